"""Decides whether what lies in a directory may be opened, and makes it empty where it may not."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.errors import NoSpace, TierError
from tiered_kv.index import directory
from tiered_kv.index.directory import DATA, LOCK, USERS, Marker

__all__ = ["Vetted", "mark_clean", "vet_for_reading", "vet_for_writing"]

_LEAST_MAP_BYTES = 512 * 1024
_BESIDE_BYTES = 96 * 1024
"""Kept free of the budget for the lock file, the marker and the directory."""
_KEPT_DAMAGED_SHARE = 4
"""A damaged file is kept when it takes at most this fraction (1/4) of the budget."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Vetted:
    """How the environment is to be opened."""

    map_bytes: int
    """The most that `data.mdb` may grow to."""
    users_fd: int | None = None
    """Holds the shared lock of a process that writes; to be closed after the environment."""
    locks: bool = True
    """False where the reader table cannot be written."""


def vet_for_writing(
    path: Path,
    *,
    kind: str,
    tier: str,
    durability: str,
    max_bytes: int,
    own_budget: Collection[str],
    on_empty: Callable[[], None] | None,
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
        empty = alone and _emptied(path, marker, tier, max_bytes)
        map_bytes = _map_bytes(path, tier, max_bytes, own_budget)
        if alone and not empty and not directory.fit_data(path, map_bytes):
            _warn(tier, path, f"it is larger than the budget allows now ({map_bytes} bytes)")
            directory.remove_data(path)
            empty = True
        if empty and on_empty is not None:
            on_empty()
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
        os.close(users_fd)
        raise
    return Vetted(map_bytes, users_fd)


def _emptied(path: Path, marker: Marker | None, tier: str, max_bytes: int) -> bool:
    """Whether there is nothing, or nothing to be trusted, which is then out of the way."""
    if marker is None or not (path / DATA).exists():
        directory.remove_data(path)
        return True
    reason = _stale(marker)
    if reason is not None:
        directory.remove_data(path)
        _warn(tier, path, reason)
        return True
    reason = _damage(path, marker)
    if reason is None:
        return False
    kept = directory.set_aside(path, max_bytes // _KEPT_DAMAGED_SHARE)
    _warn(tier, path, reason, f"set aside as {kept.name}" if kept else "removed")
    return True


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
    with _no_writer(path) as alone:
        if not alone and not locks:
            raise TierError(
                f"tier {tier}: another process writes to {path}, and this one may not write to "
                f"{lock}, without which it can't read safely meanwhile",
                tier=tier,
            )
        reason = (_stale(marker) or _damage(path, marker)) if alone else None
    if reason is not None:
        raise TierError(
            f"tier {tier}: {data} cannot be used: {reason}; it is left as it is, because the tier "
            "is opened for reading only",
            tier=tier,
        )
    return Vetted(max(max_bytes, data.stat().st_size), locks=locks)


@contextmanager
def _no_writer(path: Path) -> Iterator[bool]:
    """Whether no process has it open for writing; none can open it while this lasts."""
    try:
        fd = os.open(path / USERS, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        yield directory.try_lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def _stale(marker: Marker) -> str | None:
    now = directory.start_marker(marker.kind, marker.durability)
    if marker.clean or marker.boot_id == now.boot_id or marker.durability != "none":
        return None
    return (
        "the machine stopped without a clean close, and with `durability: none` it is not known "
        "what reached the disk"
    )


def _damage(path: Path, marker: Marker) -> str | None:
    status = (path / DATA).stat()
    untouched = (status.st_size, status.st_mtime_ns) == (marker.data_bytes, marker.data_mtime_ns)
    if marker.clean and untouched:
        return None
    problem = directory.find_damage(path)
    return None if problem is None else f"it is damaged: {problem}"


def mark_clean(path: Path, users_fd: int, kind: str, durability: str) -> None:
    """Say that all is on the disk, if no other process writes; the directory's lock is held.

    Raises:
        OSError: as the file system says; the directory is then checked at the next open.
    """
    if directory.try_lock(users_fd, fcntl.LOCK_EX):
        status = (path / DATA).stat()
        started = directory.start_marker(kind, durability)
        marker = Marker(kind, started.boot_id, True, durability, status.st_size, status.st_mtime_ns)
        directory.write_marker(path, marker)
