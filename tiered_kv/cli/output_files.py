"""Files that a command writes when it is done: refused before it begins where that cannot be, and
written before anything is printed, so that no work is lost."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from tiered_kv.cli.output import FAILED

__all__ = ["OutputFiles", "check_output"]


def check_output(
    file: Path | None, option: str, *, new: bool = False, others: Sequence[Path | None] = ()
) -> None:
    """Refuse a file that could not be written in the end; what it holds stays as it is.

    Args:
        file: what the user named; None: nothing.
        option: that named it, for the message.
        new: whether it must not be there yet.
        others: files that the command reads or writes besides.

    Raises:
        typer.BadParameter: it cannot be written, is there already, or is one of the others.
    """
    if file is None:
        return
    if new and os.path.lexists(file):
        raise typer.BadParameter(f"{file} is there already", param_hint=option)
    target = Path(os.path.realpath(file))
    if target in {Path(os.path.realpath(one)) for one in others if one is not None}:
        raise typer.BadParameter(f"{file} is read or written besides", param_hint=option)
    if file.is_dir():
        raise typer.BadParameter(f"{file} is a directory; name a file", param_hint=option)
    if not target.parent.is_dir():
        raise typer.BadParameter(
            f"{file}: there is no directory {target.parent}; make it first", param_hint=option
        )
    try:
        if target.is_file():
            os.close(os.open(target, os.O_WRONLY))
        elif not target.exists():  # a pipe or a device is opened once only, when it is written
            with tempfile.TemporaryFile(dir=target.parent):
                pass
    except OSError as error:
        raise typer.BadParameter(
            f"{file} cannot be written: {error.strerror or error}", param_hint=option
        ) from error


class OutputFiles:
    """Writes them one by one; where one fails, the others and what is printed do not."""

    def __init__(self) -> None:
        """Nothing has failed yet."""
        self._failed: list[str] = []

    def write(
        self, file: Path | None, write: Callable[[Path], object], *, new: bool = False
    ) -> None:
        """Let `write` write a file; None: there is none to write. A regular file is whole, or is
        as it was before; a `new` one must not have come meanwhile."""
        if file is None:
            return
        try:
            if file.exists() and not file.is_file():  # a pipe, a device
                write(file)
            elif new and os.path.lexists(file):
                self._failed.append(f"{file} could not be written: it is there by now")
            else:
                _write_whole(Path(os.path.realpath(file)), write)
        except OSError as error:
            self._failed.append(f"{file} could not be written: {error.strerror or error}")

    def finish(self) -> None:
        """Call it when everything is printed.

        Raises:
            typer.Exit: one of them could not be written; it was told to stderr.
        """
        for text in self._failed:
            typer.echo(f"error: {text}", err=True)
        if self._failed:
            raise typer.Exit(FAILED)


def _write_whole(file: Path, write: Callable[[Path], object]) -> None:
    draft = file.with_name(f".{secrets.token_hex(4)}.{file.name}")  # drawing goes by the suffix
    try:
        write(draft)
        if file.exists():
            draft.chmod(file.stat().st_mode & 0o777)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
