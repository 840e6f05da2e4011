"""Where prompts come from: files, directories of documents, standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tiered_kv.cli.prompt_file import (
    JSONL_SUFFIXES,
    Origin,
    PlacedPrompt,
    document,
    prompts_in,
    refuse,
)
from tiered_kv.errors import ConfigError

__all__ = ["STDIN", "read_sources"]

STDIN = "-"


def read_sources(
    names: Sequence[str],
    *,
    whole: bool = False,
    stdin: Callable[[], bytes] | None = None,
) -> list[PlacedPrompt]:
    """Read all prompts of files, of the files below directories, and of standard input (`-`).

    A file has one prompt a line, or is JSONL; a file below a directory is one prompt, unless it is
    JSONL by its name. Names that begin with a dot are left out there, and links to directories.

    Args:
        names: as the user gave them; each once.
        whole: a file that is named itself is one prompt, too, and so is standard input.
        stdin: reads it to its end; by default this process's.

    Raises:
        ConfigError: something cannot be read, is binary, holds no prompt or has bad lines; the
            message names each.
    """
    if names.count(STDIN) > 1:
        raise ConfigError("standard input (-) is named twice, and can be read once")
    read_stdin = stdin or sys.stdin.buffer.read
    prompts: list[PlacedPrompt] = []
    problems: list[tuple[Origin, str]] = []
    for name in names:
        for file, is_document in _files(name, whole=whole, problems=problems):
            try:
                data = read_stdin() if file == STDIN else Path(file).read_bytes()
            except OSError as error:
                problems.append((Origin(file), f"cannot be read: {error.strerror or error}"))
                continue
            read = document if is_document else prompts_in
            found, wrong = read(file, data)
            prompts += found
            problems += wrong
    refuse(problems)
    return prompts


def _files(
    name: str, *, whole: bool, problems: list[tuple[Origin, str]]
) -> Iterator[tuple[str, bool]]:
    """(file, whether it is one prompt)."""
    if name == STDIN or not Path(name).is_dir():
        yield name, whole and not name.endswith(JSONL_SUFFIXES)
        return
    found = sorted(_below(name, problems))
    if not found and not problems:
        problems.append((Origin(name), "holds no file"))
    for file in found:
        yield file, not file.endswith(JSONL_SUFFIXES)


def _below(folder: str, problems: list[tuple[Origin, str]]) -> Iterator[str]:
    def cannot(error: OSError) -> None:
        problems.append((Origin(str(error.filename)), f"cannot be read: {error.strerror}"))

    for inside, folders, names in os.walk(folder, onerror=cannot):
        folders[:] = [one for one in folders if not one.startswith(".")]
        yield from (str(Path(inside, one)) for one in names if not one.startswith("."))
