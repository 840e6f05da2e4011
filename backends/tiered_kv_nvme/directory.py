"""One directory of a tier: made, told from others', probed, and rid of what a crash left."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from tiered_kv.errors import FormatError, IdentityError, TierError
from tiered_kv.values import FORMAT_VERSION
from tiered_kv_nvme.faults import OUT_OF_SPACE, translated
from tiered_kv_nvme.posix import DirectMode, probe_direct, probe_direct_reading

if TYPE_CHECKING:
    from tiered_kv_nvme.segments import SegmentFiles

__all__ = [
    "INDEX",
    "SEGMENT_NAME",
    "Marker",
    "Seen",
    "look",
    "make",
    "probe",
    "sweep",
    "wipe",
    "write_marker",
]

INDEX = "index"
"""Folder of the index inside the tier's directory."""

MARKER = "tiered-kv-directory.json"
SEGMENT_NAME = re.compile(r"segment-(\d{6,10})", re.ASCII)

_HARMLESS = re.compile(
    rf"lost\+found|\d+-\d+-probe\.tmp|{re.escape(MARKER)}(\.new)?|{INDEX}", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Marker:
    """Says whose a directory is: a JSON object in a file of its own."""

    tier: bytes
    """16 bytes, the same in all directories of a tier."""
    place: int
    """Which of its directories this one is, from 0."""

    def pack(self) -> bytes:
        """The file's content."""
        body = {
            "kind": "nvme",
            "format": FORMAT_VERSION,
            "tier": self.tier.hex(),
            "place": self.place,
        }
        return json.dumps(body | {"check": _check(body)}).encode("ascii") + b"\n"

    @classmethod
    def unpack(cls, data: bytes) -> Marker | None:
        """The inverse of `pack`; None when it is damaged.

        Raises:
            FormatError: it is sound, and of another format version.
        """
        try:
            body: Any = json.loads(data)
            check = body.pop("check")
            if check != _check(body):
                return None
            marker = cls(bytes.fromhex(body["tier"]), int(body["place"]))
            version = body["format"]
        except (AttributeError, KeyError, TypeError, ValueError):
            return None
        if version != FORMAT_VERSION:
            raise FormatError(f"format {version}; this version reads format {FORMAT_VERSION}")
        return marker


def _check(body: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True).encode("ascii"))


@dataclass(frozen=True, slots=True)
class Seen:
    """What lies at a path."""

    exists: bool
    device: int
    """Of its file system, or of the one in which it would be made."""
    marker: Marker | None


def make(path: Path, tier: str, *, allowed: bool) -> None:
    """Make the directory, and those above it, when they are missing: for their owner alone.

    Raises:
        TierError: it is missing and making it is not `allowed`.
        OSError: it cannot be made.
    """
    if allowed:
        if not path.is_dir():
            make(path.parent, tier, allowed=True)
            path.mkdir(mode=0o700, exist_ok=True)
    elif not path.exists():
        raise TierError(
            f"tier {tier}: {path} is not there, and `access: read` does not make it; expected "
            "a directory that an nvme tier was written to",
            tier=tier,
        )


def look(path: Path, tier: str) -> Seen:
    """What the directory is; one that is missing is nobody's.

    Raises:
        IdentityError: it holds other things and nothing that says it is a tier's, or is no
            directory.
        FormatError: its marker is of another format version.
        OSError: it cannot be read.
    """
    try:
        there = path.stat()
    except FileNotFoundError:
        parent = path.parent
        while not parent.exists():
            parent = parent.parent
        return Seen(False, parent.stat().st_dev, None)
    except NotADirectoryError as error:
        raise IdentityError(
            f"tier {tier}: {error.filename} is no directory; expected one, or nothing there"
        ) from error
    if not path.is_dir():
        raise IdentityError(f"tier {tier}: {path} is no directory; expected one, or nothing there")
    try:
        marker = Marker.unpack((path / MARKER).read_bytes())
    except FileNotFoundError:
        marker = None
    except FormatError as error:
        raise FormatError(
            f"tier {tier}: {path} was written in {error}; use the version of tiered-kv that wrote "
            "it, or give the tier another directory"
        ) from error
    if marker is None and not (path / INDEX).is_dir():
        _refuse_others(path, tier)
    return Seen(True, there.st_dev, marker)


def _refuse_others(path: Path, tier: str) -> None:
    names = sorted(entry.name for entry in path.iterdir())
    strange = [n for n in names if not _HARMLESS.fullmatch(n) and not SEGMENT_NAME.fullmatch(n)]
    if strange:
        shown = ", ".join(strange[:3]) + (", ..." if len(strange) > 3 else "")
        raise IdentityError(
            f"tier {tier}: {path} holds {shown} and no index of an nvme tier; expected an empty "
            "directory or one that an nvme tier made; give the tier a directory of its own"
        )


def write_marker(path: Path, marker: Marker) -> None:
    """Say whose the directory is; it is there whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    new = path / f"{MARKER}.new"
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            data = marker.pack()
            if os.write(fd, data) != len(data):
                raise OSError(f"short write of {new}")
            os.fsync(fd)
        finally:
            os.close(fd)
        new.rename(path / MARKER)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


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
    for place in files.stripes.here:
        path = files.stripes.paths[place]
        for left in [*path.glob("*-probe.tmp"), path / f"{MARKER}.new"]:
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
