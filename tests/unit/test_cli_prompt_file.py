"""What `warm` reads prompts from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiered_kv.cli.prompt_file import Origin, PlacedPrompt, TokenIds
from tiered_kv.cli.prompt_sources import read_sources
from tiered_kv.errors import ConfigError
from tiered_kv.vllm.engine_process import Chat


def written(folder: Path, name: str, *lines: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def read(*names: Path | str, whole: bool = False, stdin: bytes = b"") -> list[PlacedPrompt]:
    return read_sources([str(name) for name in names], whole=whole, stdin=lambda: stdin)


def placed(file: Path | str, line: int | None, prompt: str | Chat | TokenIds) -> PlacedPrompt:
    return PlacedPrompt(Origin(str(file), line), prompt)


def test_one_prompt_a_line(tmp_path: Path) -> None:
    file = written(tmp_path, "prompts.txt", "What is a block?", "", "[1, 2] is a list", "  ")
    assert read(file) == [
        placed(file, 1, "What is a block?"),
        placed(file, 3, "[1, 2] is a list"),
    ]


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.txt"])
def test_jsonl_by_its_name_or_by_its_first_line(tmp_path: Path, name: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    file = written(
        tmp_path,
        name,
        json.dumps({"prompt": "What is a block?"}),
        "",
        json.dumps({"messages": messages}),
        json.dumps({"token_ids": [0, 17, 4]}),
    )
    assert read(file) == [
        placed(file, 1, "What is a block?"),
        placed(file, 3, Chat(tuple(messages))),
        placed(file, 4, TokenIds((0, 17, 4))),
    ]


def test_what_openai_requests_say_of_a_prompt(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "How warm is it?"}]},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]},
    ]
    tools = [{"type": "function", "function": {"name": "warmth"}}]
    how = {"enable_thinking": False}
    chat = {"messages": messages, "tools": tools, "chat_template_kwargs": how}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    ids = {"model": "m", "prompt": [3, 4], "max_tokens": 9}
    file = written(
        tmp_path,
        "batch.jsonl",
        json.dumps(chat),
        json.dumps(request | {"body": chat | {"model": "m", "temperature": 0}}),
        json.dumps(request | {"body": ids}),
    )
    expected = Chat(tuple(messages), tuple(tools), how)
    assert read(file) == [
        placed(file, 1, expected),
        placed(file, 2, expected),
        placed(file, 3, TokenIds((3, 4))),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nonsense", "is not JSON"),
        ("[1]", "expected {"),
        ("{}", "expected {"),
        ('{"prompt": "a", "messages": []}', "expected {"),
        ('{"promt": "a"}', "unknown key 'promt'"),
        ('{"prompt": ""}', "at least one character"),
        ('{"prompt": 3}', "not a text"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": ["a"]}', "messages[0] is not an object"),
        ('{"messages": [{"role": "user"}]}', "messages[0] has no content"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": 1}', "tools is not a list"),
        (
            '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": [1]}',
            "chat_template_kwargs is not an object",
        ),
        ('{"body": {"input": "a"}}', "no request for a chat"),
        ('{"token_ids": []}', "at least one number"),
        ('{"token_ids": [1, true]}', "token_ids[1] is True"),
        ('{"token_ids": [-1]}', "token_ids[0] is -1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    file = written(tmp_path, "prompts.jsonl", '{"prompt": "good"}', line)
    with pytest.raises(ConfigError) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}:2: ")
    assert problem in str(caught.value)
    assert (caught.value.file, caught.value.line) == (file, 2)


def test_all_bad_lines_of_all_files_are_named_up_to_a_limit(tmp_path: Path) -> None:
    first = written(tmp_path, "a.jsonl", *["nonsense"] * 15)
    second = written(tmp_path, "b.jsonl", *["nonsense"] * 15)
    with pytest.raises(ConfigError) as caught:
        read(first, second)
    lines = str(caught.value).splitlines()
    named = [f"{first}:{n}" for n in range(1, 16)] + [f"{second}:{n}" for n in range(1, 6)]
    assert [line.partition(": ")[0] for line in lines[:20]] == named
    assert lines[20:] == ["and 10 more bad prompts"]


def test_files_without_a_prompt(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no prompt"):
        read(written(tmp_path, "empty.txt", "", " "))
    with pytest.raises(ConfigError, match=r"missing\.txt: cannot be read: No such file"):
        read(tmp_path / "missing.txt")
    (tmp_path / "other.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="is no UTF-8 text \\(byte 3 is none\\)"):
        read(tmp_path / "other.txt")


def test_a_directory_of_documents_and_files_beside_it(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    late = written(docs, "z.md", "# Last", "", "With two lines.")
    deep = written(docs, "deep/er/a.txt", "A line.", "Another one.")
    chats = written(docs, "chats.jsonl", '{"prompt": "one"}', '{"prompt": "two"}')
    written(docs, ".git/config", "not a document")
    written(docs, ".hidden", "not a document")
    lines = written(tmp_path, "lines.txt", "first", "second")
    assert read(docs, lines) == [
        placed(chats, 1, "one"),
        placed(chats, 2, "two"),
        placed(deep, None, "A line.\nAnother one.\n"),
        placed(late, None, "# Last\n\nWith two lines.\n"),
        placed(lines, 1, "first"),
        placed(lines, 2, "second"),
    ]
    assert read(lines, whole=True) == [placed(lines, None, "first\nsecond\n")]


def test_binary_files_are_refused_by_name(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    written(docs, "good.md", "text")
    pictures = [docs / "a.png", docs / "b" / "c.bin"]
    (docs / "b").mkdir()
    for picture in pictures:
        picture.write_bytes(b"\x89PNG\0\0")
    written(docs, "empty.md", "")
    with pytest.raises(ConfigError) as caught:
        read(docs)
    binary = "is a binary file, no text; prompts are UTF-8 text, or JSONL"
    assert str(caught.value).splitlines() == [
        f"{pictures[0]}: {binary}",
        f"{pictures[1]}: {binary}",
        f"{docs / 'empty.md'}: holds no prompt",
    ]
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match="nothing: holds no file"):
        read(tmp_path / "nothing")


def test_standard_input(tmp_path: Path) -> None:
    file = written(tmp_path, "a.txt", "from a file")
    assert read("-", file, stdin=b"one\r\ntwo\n") == [
        placed("-", 1, "one"),
        placed("-", 2, "two"),
        placed(file, 1, "from a file"),
    ]
    assert read("-", stdin=b'{"token_ids": [5]}\n') == [placed("-", 1, TokenIds((5,)))]
    assert read("-", stdin=b"a\nb\n", whole=True) == [placed("-", None, "a\nb\n")]
    with pytest.raises(ConfigError, match="named twice"):
        read("-", "-")
    with pytest.raises(ConfigError, match=r"^-: holds no prompt"):
        read("-", stdin=b"\n")


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.txt"])
def test_a_line_that_is_nested_too_deeply(tmp_path: Path, name: str) -> None:
    deep = "[" * 100_000
    first = json.dumps({"prompt": "What is a block?"})
    with pytest.raises(ConfigError, match=r":2: is not JSON \(maximum recursion depth"):
        read(written(tmp_path, name, first, deep))
    file = written(tmp_path, "text.txt", deep)
    assert read(file) == [placed(file, 1, deep)]
