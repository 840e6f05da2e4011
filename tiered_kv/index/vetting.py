"""Decides whether what lies in a directory may be opened, and makes it empty where it may not."""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tiered_kv.errors import NoSpace, TierError
from tiered_kv.index import checking, directory
from tiered_kv.index.directory import DATA, LOCK, USERS, Marker
from tiered_kv.index.witness import is_as_left

__all__ = ["Emptied", "Vetted", "mark_clean", "vet_for_reading", "vet_for_writing"]

_LEAST_MAP_BYTES = 512 * 1024
_BESIDE_BYTES = 96 * 1024
"""Kept free of the budget for the lock file, the marker and the directory."""
_MAGIC = (0xBEEFC0DE).to_bytes(4, sys.byteorder)
_META = struct.Struct("=16x4s116xQ")
"""`mm_magic` and `mm_last_pg`, the last page in use, of LMDB's `MDB_meta` behind the head of its
page (liblmdb 0.9, mdb.c; 8-byte words)."""
_KEPT_DAMAGED_SHARE = 4
"""A damaged file is kept when it takes at most this fraction (1/4) of the budget."""

logger = logging.getLogger(__name__)


class Emptied(Enum):
    """Why an environment starts empty."""

    MISSING = "missing"
    """There is no `data.mdb`: the directory is new, or somebody deleted it."""
    DAMAGED = "damaged"
    OUTGROWN = "outgrown"
    """It is larger than the budget allows now."""
    CRASHED = "crashed"
    """The machine stopped without a clean close, and nothing was promised for that case: what lies
    beside it is not to be trusted either."""


@dataclass(frozen=True, slots=True)
class Vetted:
    """How the environment is to be opened."""

    map_bytes: int
    """The most that `data.mdb` may grow to."""
    users_fd: int | None = None
    """Holds the shared lock of a process that writes; to be closed after the environment."""
    locks: bool = True
    """False where the reader table cannot be written."""
    crashed: bool = False
    """See `Environment.crashed`."""


def vet_for_writing(
    path: Path,
    *,
    kind: str,
    tier: str,
    durability: str,
    max_bytes: int,
    own_budget: Collection[str],
    on_empty: Callable[[Emptied], None] | None,
) -> Vetted:
    """Check the directory for opening it read-write; the directory's lock is held.

    Raises:
        IdentityError: the directory belongs to something else.
        FormatError: it was written by a newer format.
        TierError: another program has it locked.
        NoSpace: `max_bytes` leaves no room.
        OSError: as the file system says.
    """
    users_fd = os.open(path / USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        alone = directory.try_lock(users_fd, fcntl.LOCK_EX)
        marker = directory.read_marker(path, kind)
        ours = directory.start_marker(kind, durability)
        if marker is None:
            directory.write_marker(path, ours)  # from here on the directory is ours
        if not alone and not (path / DATA).exists():
            raise TierError(
                f"tier {tier}: {path / DATA} was deleted while other processes use it; stop them, "
                "then start again",
                tier=tier,
            )
        crashed = alone and marker is not None and _crashed(marker)
        empty = _emptied(path, users_fd, marker, tier, max_bytes) if alone else None
        map_bytes = _map_bytes(path, tier, max_bytes, own_budget)
        if alone and empty is None and not directory.fit_data(path, map_bytes):
            _warn(tier, path, f"it is larger than the budget allows now ({map_bytes} bytes)")
            directory.remove_data(path)
            empty = Emptied.OUTGROWN
        if empty is not None and on_empty is not None:
            on_empty(empty)
        # After a crash nobody may take the directory for clean, nor for left by an earlier boot.
        if marker != ours:
            directory.write_marker(path, ours)
        # The directory's lock keeps others out while this lock changes hands.
        fcntl.flock(users_fd, fcntl.LOCK_UN)
        if not directory.try_lock(users_fd, fcntl.LOCK_SH):
            raise TierError(
                f"tier {tier}: {path / USERS} is locked by another program; lslocks says by which",
                tier=tier,
            )
    except BaseException:
        directory.unlock(users_fd)
        raise
    return Vetted(map_bytes, users_fd, crashed=crashed)


def _emptied(
    path: Path, users_fd: int, marker: Marker | None, tier: str, max_bytes: int
) -> Emptied | None:
    """Why there is nothing, or nothing to be trusted, which is then out of the way; None where
    what is there may be used."""
    reason = None if marker is None else _stale(marker)
    if reason is not None:
        directory.remove_data(path)
        _warn(tier, path, reason)
        return Emptied.CRASHED
    if marker is None or not (path / DATA).exists():
        directory.remove_data(path)
        return Emptied.MISSING
    reason = _damage(path, users_fd, marker, tier)
    if reason is None:
        return None
    kept = directory.set_aside(path, max_bytes // _KEPT_DAMAGED_SHARE)
    _warn(tier, path, reason, f"set aside as {kept.name}" if kept else "removed")
    return Emptied.DAMAGED


def _warn(tier: str, path: Path, reason: str, done: str = "removed") -> None:
    logger.warning("tier %s starts empty: %s was %s: %s", tier, path / DATA, done, reason)


def _map_bytes(path: Path, tier: str, max_bytes: int, own_budget: Collection[str]) -> int:
    beside = max(directory.bytes_beside_data(path, own_budget), _BESIDE_BYTES)
    page = os.sysconf("SC_PAGE_SIZE")
    map_bytes = (max_bytes - beside) // page * page
    if map_bytes < _LEAST_MAP_BYTES:
        raise NoSpace(
            f"tier {tier}: {max_bytes} bytes are too few for {path}: {beside} bytes go to other "
            f"files and at least {_LEAST_MAP_BYTES} are needed; raise the tier's capacity or "
            "remove the other files"
        )
    return map_bytes


def vet_for_reading(path: Path, *, kind: str, tier: str, max_bytes: int) -> Vetted:
    """Check the directory for opening it read-only; changes nothing in it.

    Raises:
        IdentityError: the directory belongs to something else.
        FormatError: it was written by a newer format.
        TierError: it is empty, damaged, or cannot be read safely now.
        OSError: as the file system says.
    """
    marker = directory.read_marker(path, kind)
    data = path / DATA
    if marker is None or not data.exists():
        raise TierError(
            f"tier {tier}: nothing was stored in {path} yet, and it is opened for reading only; "
            "warm it with `access: read_write` first",
            tier=tier,
        )
    lock = path / LOCK
    locks = os.access(lock if lock.exists() else path, os.W_OK)
    with _no_writer(path) as (alone, users_fd):
        if not alone and not locks:
            raise TierError(
                f"tier {tier}: another process writes to {path}, and this one may not write to "
                f"{lock}, without which it can't read safely meanwhile",
                tier=tier,
            )
        reason = _stale(marker) or _damage(path, users_fd, marker, tier) if alone else None
    if reason is not None:
        raise TierError(
            f"tier {tier}: {data} cannot be used: {reason}; it is left as it is, because the tier "
            "is opened for reading only",
            tier=tier,
        )
    return Vetted(max(max_bytes, data.stat().st_size), locks=locks)


@contextmanager
def _no_writer(path: Path) -> Iterator[tuple[bool, int | None]]:
    """Whether no process has it open for writing, and the file that says so, if it is there; none
    can open it while this lasts."""
    try:
        fd = os.open(path / USERS, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True, None
        return
    try:
        yield directory.try_lock(fd, fcntl.LOCK_EX), fd
    finally:
        directory.unlock(fd)


def _crashed(marker: Marker) -> bool:
    now = directory.start_marker(marker.kind, marker.durability)
    return not marker.clean and marker.boot_id != now.boot_id


def _stale(marker: Marker) -> str | None:
    if marker.durability != "none" or not _crashed(marker):
        return None
    return (
        "the machine stopped without a clean close, and with `durability: none` it is not known "
        "what reached the disk"
    )


def _damage(path: Path, users_fd: int | None, marker: Marker, tier: str) -> str | None:
    """Why the file may not be given to LMDB; None where it may."""
    if _is_as_left(path, users_fd, marker) and _can_be_mapped(path / DATA):
        return None
    try:
        problem = checking.find_damage(path / DATA)
    except checking.DamageUnknown as error:
        raise TierError(
            f"tier {tier}: {path / DATA} was not closed in good order, and whether it is whole "
            f"is not known: {error}",
            tier=tier,
        ) from error
    return None if problem is None else f"it is damaged: {problem}"


def _is_as_left(path: Path, users_fd: int | None, marker: Marker) -> bool:
    """Whether it is as it was when it was closed, or, under the same boot, when the last process
    that wrote to it ended."""
    status = (path / DATA).stat()
    if marker.clean:
        return (status.st_size, status.st_mtime_ns) == (marker.data_bytes, marker.data_mtime_ns)
    same_boot = marker.boot_id == directory.start_marker(marker.kind, marker.durability).boot_id
    return same_boot and users_fd is not None and is_as_left(users_fd, status)


def _can_be_mapped(data: Path) -> bool:
    """Whether both pages that name the roots are LMDB's, and the file has all pages that they say
    are in use: who wrote to the file within the clock tick of its last transaction, or cut it while
    one was cut off, has left what was noted of it as it was."""
    page = os.sysconf("SC_PAGE_SIZE")
    with data.open("rb") as file:
        pages = file.read(2 * page)
    if len(pages) < 2 * page:
        return False
    metas = [_META.unpack_from(pages, at) for at in (0, page)]
    whole = max(last + 1 for _, last in metas) * page
    return all(magic == _MAGIC for magic, _ in metas) and data.stat().st_size >= whole


def mark_clean(
    path: Path, users_fd: int, kind: str, durability: str, on_clean: Callable[[], None] | None
) -> None:
    """Say that all is on the disk, if no other process writes; the directory's lock is held.
    `on_clean` is called before, to bring there what lies beside the environment.

    Raises:
        TieredKVError, OSError: as `on_clean`, or the file system, says; the directory is then
            checked at the next open.
    """
    if directory.try_lock(users_fd, fcntl.LOCK_EX):
        if on_clean is not None:
            on_clean()
        status = (path / DATA).stat()
        started = directory.start_marker(kind, durability)
        marker = Marker(kind, started.boot_id, True, durability, status.st_size, status.st_mtime_ns)
        directory.write_marker(path, marker)
