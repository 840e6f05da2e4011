from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiered_kv.cli.prompt_file import PromptLine, TokenIds, read_prompts
from tiered_kv.errors import ConfigError


def written(folder: Path, name: str, *lines: str) -> Path:
    file = folder / name
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def test_one_prompt_a_line(tmp_path: Path) -> None:
    file = written(tmp_path, "prompts.txt", "What is a block?", "", "[1, 2] is a list", "  ")
    assert read_prompts(file) == [
        PromptLine(1, "What is a block?"),
        PromptLine(3, "[1, 2] is a list"),
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
    assert read_prompts(file) == [
        PromptLine(1, "What is a block?"),
        PromptLine(3, tuple(messages)),
        PromptLine(4, TokenIds((0, 17, 4))),
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
        ('{"token_ids": []}', "at least one number"),
        ('{"token_ids": [1, true]}', "token_ids[1] is True"),
        ('{"token_ids": [-1]}', "token_ids[0] is -1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    file = written(tmp_path, "prompts.jsonl", '{"prompt": "good"}', line)
    with pytest.raises(ConfigError) as caught:
        read_prompts(file)
    assert str(caught.value).startswith(f"{file}:2: ")
    assert problem in str(caught.value)
    assert (caught.value.file, caught.value.line) == (file, 2)


def test_all_bad_lines_are_named_up_to_a_limit(tmp_path: Path) -> None:
    file = written(tmp_path, "prompts.jsonl", *["nonsense"] * 30)
    with pytest.raises(ConfigError) as caught:
        read_prompts(file)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[1] for line in lines[:20]] == [str(n) for n in range(1, 21)]
    assert lines[20:] == [f"{file}: and 10 more bad lines"]


def test_files_without_a_prompt(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(written(tmp_path, "empty.txt", "", " "))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "missing.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "binary.txt")
