"""Files of prompts: one a line, or JSONL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tiered_kv.errors import ConfigError
from tiered_kv.vllm.engine_process import Messages

__all__ = ["Prompt", "PromptLine", "TokenIds", "read_prompts", "refuse"]

MAX_PROBLEMS = 20
"""How many bad lines are reported at once."""

JSONL_SUFFIXES = (".jsonl", ".ndjson")

FORMS = (
    '{"prompt": TEXT}, {"messages": [{"role": ..., "content": ...}, ...]} or {"token_ids": [...]}'
)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt that needs no tokenizer."""

    ids: tuple[int, ...]


Prompt: TypeAlias = str | Messages | TokenIds
"""Text, a conversation, or token ids."""


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt and where it stands."""

    number: int
    """Line in the file, from 1."""
    prompt: Prompt


def read_prompts(path: Path) -> list[PromptLine]:
    """Read all prompts of a file; empty lines are left out.

    A file is JSONL if its name ends in .jsonl or .ndjson, or if its first line is a JSON object.

    Raises:
        ConfigError: the file cannot be read, holds no prompt, or has bad lines; the message
            names each with its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", file=path) from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{path}: holds no prompt", file=path)
    as_json = path.suffix in JSONL_SUFFIXES or _is_object(numbered[0][1])
    prompts: list[PromptLine] = []
    problems: list[tuple[int, str]] = []
    for number, line in numbered:
        try:
            prompts.append(PromptLine(number, _from_json(line) if as_json else line))
        except ValueError as error:
            problems.append((number, str(error)))
    refuse(path, problems)
    return prompts


def refuse(path: Path, problems: Sequence[tuple[int, str]]) -> None:
    """Raise ConfigError if there are any problems, each a line's number and what is wrong."""
    if not problems:
        return
    texts = [f"{path}:{number}: {problem}" for number, problem in problems[:MAX_PROBLEMS]]
    left_out = len(problems) - len(texts)
    if left_out:
        texts.append(f"{path}: and {left_out} more bad lines")
    raise ConfigError("\n".join(texts), file=path, line=problems[0][0], problems=tuple(texts))


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _from_json(line: str) -> Prompt:
    """The prompt of one line of JSONL. Raises ValueError with what is wrong."""
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"is not JSON ({error}); expected {FORMS}") from error
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(f"expected {FORMS}")
    [(kind, content)] = value.items()
    match kind:
        case "prompt":
            if not isinstance(content, str) or not content:
                raise ValueError("prompt is not a text with at least one character")
            return content
        case "messages":
            return _messages(content)
        case "token_ids":
            return _token_ids(content)
        case _:
            raise ValueError(f"unknown key {kind!r}; expected {FORMS}")


def _messages(content: Any) -> Messages:
    if not isinstance(content, list) or not content:
        raise ValueError("messages is not a list with at least one message")
    for place, message in enumerate(content):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{place}] is not an object with a role and a content")
        if "content" not in message:
            raise ValueError(f"messages[{place}] has no content")
    return tuple(content)


def _token_ids(content: Any) -> TokenIds:
    if not isinstance(content, list) or not content:
        raise ValueError("token_ids is not a list with at least one number")
    for place, number in enumerate(content):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"token_ids[{place}] is {number!r}, not a number from 0")
    return TokenIds(tuple(content))
