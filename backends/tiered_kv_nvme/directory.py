"""The tier's directory: made, told from others', probed, and rid of what a crash left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tiered_kv.errors import IdentityError, TierError
from tiered_kv_nvme.faults import OUT_OF_SPACE, translated
from tiered_kv_nvme.posix import DirectMode, probe_direct, probe_direct_reading
from tiered_kv_nvme.segments import SEGMENT_NAME, SegmentFiles

__all__ = ["INDEX", "prepare", "probe", "sweep", "wipe"]

INDEX = "index"
"""Folder of the index inside the tier's directory."""

_HARMLESS = re.compile(r"lost\+found|\d+-\d+-probe\.tmp", re.ASCII)


def prepare(path: Path, tier: str, *, make: bool) -> None:
    """Check that the directory is ours or empty; make it (0700) when missing and `make`.

    Raises:
        IdentityError: it holds other things and no index of ours, or is no directory.
        TierError: it is missing, or cannot be made or read.
    """
    with translated("use", path, tier):
        if path.exists() and not path.is_dir():
            raise IdentityError(
                f"tier {tier}: {path} is no directory; expected one, or nothing there"
            )
        if make:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not path.exists():
            raise TierError(
                f"tier {tier}: {path} is not there, and `access: read` does not make it; expected "
                "a directory that an nvme tier was written to",
                tier=tier,
            )
        if (path / INDEX).is_dir():
            return
        names = sorted(entry.name for entry in path.iterdir())
    strange = [n for n in names if not _HARMLESS.fullmatch(n) and not SEGMENT_NAME.fullmatch(n)]
    if strange:
        shown = ", ".join(strange[:3]) + (", ..." if len(strange) > 3 else "")
        raise IdentityError(
            f"tier {tier}: {path} holds {shown} and no index of an nvme tier; expected an empty "
            "directory or one that an nvme tier made; give the tier a directory of its own"
        )


def probe(path: Path, tier: str, *, writable: bool) -> DirectMode:
    """How files in the directory are to be opened, found out by doing it.

    Raises:
        TierError: nothing can be written (or, read only, read) there.
    """
    with translated("write to" if writable else "read", path, tier):
        if writable:
            with _unless_full():
                return probe_direct(path)
        segments = (entry for entry in path.iterdir() if SEGMENT_NAME.fullmatch(entry.name))
        return probe_direct_reading(next(segments, None))


@contextmanager
def _unless_full() -> Iterator[None]:
    """Go on behind the block when the disk is full: what is stored can be read all the same."""
    try:
        yield
    except OSError as error:
        if error.errno not in OUT_OF_SPACE:
            raise


def sweep(files: SegmentFiles, known: set[int]) -> int:
    """Delete segment files of ours that the index does not know; how many. Inside a write
    transaction, so that nobody is just making one.

    Raises:
        FormatError: one was written by another format version.
        TierError: one cannot be read or deleted.
    """
    swept = 0
    for number in files.numbers().keys() - known:
        if files.is_ours(number):
            files.remove(number)
            swept += 1
    for left in files.path(0).parent.glob("*-probe.tmp"):
        if _HARMLESS.fullmatch(left.name):
            with suppress(OSError):
                left.unlink()
    return swept


def wipe(files: SegmentFiles) -> None:
    """Delete all segment files of ours: the index starts empty.

    Raises:
        FormatError: one was written by another format version.
        TierError: one cannot be read or deleted.
    """
    sweep(files, set())
