"""Files of prompts: one a line, or JSONL; and documents, each one prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tiered_kv.errors import ConfigError
from tiered_kv.vllm.engine_process import Chat, Messages

__all__ = [
    "JSONL_SUFFIXES",
    "AnyPrompt",
    "Origin",
    "PlacedPrompt",
    "TokenIds",
    "document",
    "prompts_in",
    "refuse",
]

MAX_PROBLEMS = 20
"""How many bad prompts are reported at once."""

JSONL_SUFFIXES = (".jsonl", ".ndjson")

FORMS = (
    '{"prompt": TEXT}, {"messages": [{"role": ..., "content": ...}, ...]} or {"token_ids": [...]}'
)

_CHAT_KEYS = {"messages", "tools", "chat_template_kwargs"}


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt that needs no tokenizer."""

    ids: tuple[int, ...]


AnyPrompt: TypeAlias = str | Chat | TokenIds
"""Text, a conversation, or token ids."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a prompt stands."""

    file: str
    """Its name, as the user gave it."""
    line: int | None = None
    """Line in the file, from 1; None where the file is one prompt."""

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """A prompt and where it stands."""

    origin: Origin
    prompt: AnyPrompt


def prompts_in(name: str, data: bytes) -> tuple[list[PlacedPrompt], list[tuple[Origin, str]]]:
    """All prompts of a file, one a line, empty lines left out; and what is wrong with it.

    It is JSONL if its name ends in .jsonl or .ndjson, or if its first line is a JSON object.
    """
    whole = Origin(name)
    try:
        lines = _text(data).split("\n")
    except ValueError as error:
        return [], [(whole, str(error))]
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        return [], [(whole, "holds no prompt")]
    as_json = name.endswith(JSONL_SUFFIXES) or _is_object(numbered[0][1])
    prompts: list[PlacedPrompt] = []
    problems: list[tuple[Origin, str]] = []
    for number, line in numbered:
        origin = Origin(name, number)
        try:
            prompt = _from_json(line) if as_json else line.rstrip("\r")
        except ValueError as error:
            problems.append((origin, str(error)))
        else:
            prompts.append(PlacedPrompt(origin, prompt))
    return prompts, problems


def document(name: str, data: bytes) -> tuple[list[PlacedPrompt], list[tuple[Origin, str]]]:
    """The one prompt that a file is, or what is wrong with it."""
    origin = Origin(name)
    try:
        text = _text(data)
    except ValueError as error:
        return [], [(origin, str(error))]
    if not text.strip():
        return [], [(origin, "holds no prompt")]
    return [PlacedPrompt(origin, text)], []


def refuse(problems: Sequence[tuple[Origin, str]]) -> None:
    """Raise ConfigError if there are any problems, each a place and what is wrong there."""
    if not problems:
        return
    texts = [f"{origin}: {problem}" for origin, problem in problems[:MAX_PROBLEMS]]
    left_out = len(problems) - len(texts)
    if left_out:
        texts.append(f"and {left_out} more bad prompts")
    first = problems[0][0]
    raise ConfigError(
        "\n".join(texts), file=Path(first.file), line=first.line, problems=tuple(texts)
    )


def _text(data: bytes) -> str:
    """Raises ValueError where it is none."""
    if b"\0" in data:
        raise ValueError("is a binary file, no text; prompts are UTF-8 text, or JSONL")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is no UTF-8 text (byte {error.start} is none)") from error


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _from_json(line: str) -> AnyPrompt:
    """The prompt of one line of JSONL. Raises ValueError with what is wrong."""
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error}); expected {FORMS}") from error
    if not isinstance(value, dict) or not value:
        raise ValueError(f"expected {FORMS}")
    if isinstance(value.get("body"), dict):  # a line of OpenAI's batch format
        return _from_request(value["body"])
    if "messages" in value and value.keys() <= _CHAT_KEYS:
        return _chat(value)
    if len(value) != 1:
        raise ValueError(f"expected {FORMS}")
    [(kind, content)] = value.items()
    match kind:
        case "prompt":
            return _prompt(content)
        case "token_ids":
            return _token_ids(content, "token_ids")
        case _:
            raise ValueError(f"unknown key {kind!r}; expected {FORMS}")


def _from_request(body: dict[str, Any]) -> AnyPrompt:
    """The prompt of a request; what else it says does not shape the prompt."""
    if "messages" in body:
        return _chat(body)
    if "prompt" not in body:
        raise ValueError("body is no request for a chat or a completion: expected messages")
    content = body["prompt"]
    return _token_ids(content, "prompt") if isinstance(content, list) else _prompt(content)


def _prompt(content: Any) -> str:
    if not isinstance(content, str) or not content:
        raise ValueError("prompt is not a text with at least one character")
    return content


def _chat(value: dict[str, Any]) -> Chat:
    tools = value.get("tools") or []
    arguments = value.get("chat_template_kwargs") or {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools is not a list of objects")
    if not isinstance(arguments, dict):
        raise ValueError("chat_template_kwargs is not an object")
    return Chat(_messages(value["messages"]), tuple(tools), arguments)


def _messages(content: Any) -> Messages:
    if not isinstance(content, list) or not content:
        raise ValueError("messages is not a list with at least one message")
    for place, message in enumerate(content):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{place}] is not an object with a role and a content")
        if "content" not in message and "tool_calls" not in message:
            raise ValueError(f"messages[{place}] has no content")
    return tuple(content)


def _token_ids(content: Any, name: str) -> TokenIds:
    if not isinstance(content, list) or not content:
        raise ValueError(f"{name} is not a list with at least one number")
    for place, number in enumerate(content):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"{name}[{place}] is {number!r}, not a number from 0")
    return TokenIds(tuple(content))
