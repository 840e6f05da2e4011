"""What the commands have in common: options, exit codes, tables and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

__all__ = [
    "FAILED",
    "REFUSED",
    "BlockSize",
    "BlockTokens",
    "Config",
    "Json",
    "Ranks",
    "Tier",
    "bytes_text",
    "excerpts",
    "print_json",
    "print_table",
    "read_seconds",
    "read_size",
    "warn",
]

FAILED = 1
"""Exit code: the command ran, and what it was asked for does not work."""

REFUSED = 2
"""Exit code: wrong use or configuration; nothing was done."""

Config = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file of the deployment.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
BlockSize = Annotated[
    str,
    typer.Option("--block-size", help="Size of a block on one rank, with a unit.", metavar="SIZE"),
]
BlockTokens = Annotated[
    int, typer.Option("--block-tokens", min=1, help="Tokens whose KV a block holds.")
]
Tier = Annotated[
    str | None,
    typer.Option(
        "--tier", metavar="NAME", help="Only this tier; by default every tier but the host's."
    ),
]

Ranks = Annotated[int, typer.Option("--ranks", min=1, help="Ranks of the engine on this machine.")]


def read_size(text: str) -> int:
    """The bytes of an option such as `--block-size 2MiB`.

    Raises:
        typer.BadParameter: it is no size above 0.
    """
    from tiered_kv.config.units import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if size == 0:
        raise typer.BadParameter("expected more than 0 bytes")
    return size


def read_seconds(text: str) -> float:
    """The seconds of an option such as `--timeout 30s`.

    Raises:
        typer.BadParameter: it is no duration above 0.
    """
    from tiered_kv.config.units import parse_seconds

    try:
        seconds = parse_seconds(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if seconds == 0:
        raise typer.BadParameter("expected more than 0 seconds")
    return seconds


def print_json(value: Any) -> None:
    """Print one JSON value to stdout."""
    typer.echo(json.dumps(value, indent=2))


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    whole: str = "",
    numbers: Collection[str] = (),
    sections: bool = False,
) -> None:
    """Print a table to stdout; whole cells where it does not go to a terminal, and in the column
    `whole` there too. Columns of `numbers` are flush right; with `sections` there is a line above
    each row whose first cell is not empty."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        flush: Literal["right", "left"] = "right" if column in numbers else "left"
        table.add_column(column, overflow="fold", no_wrap=column == whole, justify=flush)
    for row in rows:
        if sections and row[0]:
            table.add_section()
        table.add_row(*(Text(cell) for cell in row))  # Text: no cell is read as markup
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def warn(message: str) -> None:
    """Print a warning to stderr."""
    typer.echo(f"warning: {message}", err=True)


def bytes_text(size: int) -> str:
    """A size for people: `1.5GiB`."""
    from tiered_kv.config.units import readable_bytes

    return readable_bytes(size)


def excerpts(texts: Sequence[str], most: int = 40) -> list[str]:
    """Texts for cells, of at most `most` characters: of longer ones what is around the first
    character in which they differ."""
    if all(len(text) <= most for text in texts):
        return list(texts)
    alike = takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False))
    start = max(0, sum(1 for _ in alike) - most // 4) if len(set(texts)) > 1 else 0
    return [_excerpt(text, start, most) for text in texts]


def _excerpt(text: str, start: int, most: int) -> str:
    shown = text[start:]
    front = "..." if start and shown else ""
    room = most - len(front)
    return front + (shown if len(shown) <= room else f"{shown[: room - 3]}...")
