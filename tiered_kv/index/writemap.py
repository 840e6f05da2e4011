"""Opens LMDB's own environment, writing into its map where that is safe.

Then values are copied once, straight to where they stay. But a page of the map that has no room on
the disk kills the process when it is written to (SIGBUS). So the whole file is taken from the file
system before anything is written, and only where that is a promise: ext4 and xfs keep it, others
copy on write.

The map of its lock file LMDB writes to always: that file gets its room before LMDB maps it.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import lmdb

from tiered_kv.index.directory import DATA, LOCK, file_system_magic

__all__ = ["Durability", "WriteMap", "open_lmdb"]

Durability = Literal["none", "batch", "full"]

_MAX_READERS = 510
_LOCK_BYTES = (_MAX_READERS + 2) * 64
"""LMDB 0.9's lock file: a cache line for each reader, and two for what comes before them."""
_MAX_DATABASES = 24
_KEEP_THEIR_PROMISE = {0xEF53: "ext4", 0x58465342: "xfs"}
_REFUSALS = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class WriteMap:
    """Wish to write into the map."""

    keep_free: int
    """Bytes that are to stay free on the file system; else the wish is not granted."""


def open_lmdb(
    path: Path,
    *,
    writable: bool,
    durability: Durability,
    map_bytes: int,
    locks: bool,
    writemap: WriteMap | None,
) -> tuple[lmdb.Environment, str]:
    """The environment in a vetted directory, and whether its map is written to: "on", "off" or
    "off (reason)".

    Raises:
        OSError, lmdb.Error: it cannot be opened.
    """

    def opened(*, into_map: bool) -> lmdb.Environment:
        return lmdb.Environment(
            str(path),
            map_size=whole if into_map else map_bytes,
            readonly=not writable,
            create=writable,
            mode=0o600,
            sync=durability != "none",
            metasync=durability == "full",
            writemap=into_map,
            max_readers=_MAX_READERS,
            max_dbs=_MAX_DATABASES,
            max_spare_txns=8,
            lock=locks,
            lib_version=0,
        )

    if writable and locks:
        _take_lock_room(path / LOCK)
    data = path / DATA
    # LMDB makes the file as long as the map that is written to. Where another process, with a
    # larger budget, has the file open, cutting it would kill that process at its next write.
    whole = max(map_bytes, data.stat().st_size if data.exists() else 0)
    if writemap is None or not writable:
        return opened(into_map=False), "off"
    refusal = _refusal(path, durability, whole, writemap)
    if refusal is None:
        environment = opened(into_map=True)
        refusal = _take_room(data, whole)
        if refusal is None:
            return environment, "on"
        environment.close()
    return opened(into_map=False), f"off ({refusal})"


def _take_lock_room(lock: Path) -> None:
    """A new lock file is given its room at once, or not made: LMDB would make it with holes, and
    end the process when it fills one on a full disk (SIGBUS). The directory's lock is held.

    Raises:
        OSError: the disk is full.
    """
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size:
            return
        written = 0
        try:
            while written < _LOCK_BYTES:
                written += os.pwrite(fd, bytes(_LOCK_BYTES - written), written)
        except OSError:
            os.truncate(fd, 0)
            raise
    finally:
        os.close(fd)


def _refusal(path: Path, durability: str, map_bytes: int, writemap: WriteMap) -> str | None:
    if durability != "none":
        return f"durability {durability}"
    if file_system_magic(path) not in _KEEP_THEIR_PROMISE:
        return "the file system does not promise room"
    data = path / DATA
    missing = map_bytes - (data.stat().st_blocks * 512 if data.exists() else 0)
    disk = os.statvfs(path)
    if disk.f_bavail * disk.f_frsize - missing < writemap.keep_free:
        return "the disk has no room for the whole capacity"
    return None


def _take_room(data: Path, map_bytes: int) -> str | None:
    fd = os.open(data, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, map_bytes)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return f"its room could not be taken: {error.strerror}"
    finally:
        os.close(fd)
    return None
