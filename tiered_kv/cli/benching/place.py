"""Where a tier is measured: never where its blocks are.

A tier that has directories is measured in a copy of its settings, whose directories are new ones of
ours on the same file systems: beside the tier's where that is possible, so that an engine that runs
on it sees nothing of it, else inside. Together with what the tier holds it stays within the tier's
capacity and above its free-space floor. A tier without directories (a remote one) is measured where
it is, in a namespace of ours, which is emptied and dropped afterwards.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.config import TierSettings, format_bytes, readable_bytes
from tiered_kv.config.room import existing_parent, free_above_floor
from tiered_kv.errors import TierError

__all__ = ["Need", "Workplace", "place_of", "shortages_of", "workplace"]

PREFIX = ".tiered-kv-bench-"
_LOCK = "owner.lock"


@dataclass(frozen=True, slots=True)
class Need:
    """What measuring a tier takes."""

    store_bytes: int
    """Capacity of the store that is measured."""
    file_bytes: int
    """Size of the file that the disk itself is measured with."""
    written_bytes: int
    """What is written to the medium in all, at most."""

    @property
    def held_bytes(self) -> int:
        """What lies on the disk at once, at most."""
        return self.store_bytes + self.file_bytes


@dataclass(frozen=True, slots=True)
class Workplace:
    """A tier to measure, while it is measured."""

    settings: TierSettings
    """The tier's, in directories of ours; its own where it cannot be moved."""
    folders: tuple[Path, ...]
    """Directories of ours, which hold nothing yet."""
    own: bool
    """Whether the store is ours alone. Else it is the deployment's, and a namespace is ours."""

    @property
    def file(self) -> Path | None:
        """Where the file lies that the disk is measured with; None without directories."""
        return self.folders[0] / "raw" if self.folders else None


def place_of(directory: Path) -> Path:
    """The directory in which ours is made for one of a tier's: the one above it, if it is on the
    same file system and writable, else the tier's own, or the nearest that exists."""
    nearest = existing_parent(directory)
    above = nearest.parent
    if (
        nearest == directory
        and above.stat().st_dev == nearest.stat().st_dev
        and os.access(above, os.W_OK | os.X_OK)
    ):
        return above
    return nearest


def shortages_of(
    settings: TierSettings, need: Need, held_bytes: int, *, written_today: int
) -> list[str]:
    """Why a tier with directories cannot be measured within its bounds; empty where it can.

    Args:
        settings: of the tier.
        need: what it takes.
        held_bytes: what the tier's directories hold already.
        written_today: bytes that were written to it today, where it has a write budget.
    """
    problems: list[str] = []
    lower = "lower --size, or --rounds"
    name, wanted = repr(settings.name), readable_bytes(need.held_bytes)
    if held_bytes + need.held_bytes > settings.capacity:
        problems.append(
            f"tier {name} holds {readable_bytes(held_bytes)} of its capacity of "
            f"{format_bytes(settings.capacity)}, and measuring it takes up to {wanted} for a "
            "while; lower --size, raise capacity, or make room with `tiered-kv gc`"
        )
    places = {place_of(directory): directory for directory in settings.directories.values()}
    for place, directory in places.items():
        if not os.access(place, os.W_OK | os.X_OK):
            problems.append(f"tier {name}: {place} is not writable for us")
        elif (free := free_above_floor(settings, directory)) < need.held_bytes:
            problems.append(
                f"tier {name}: measuring it takes up to {wanted} for a while, but {place} has "
                f"{readable_bytes(free)} above the tier's min_free; lower --size, or make room"
            )
    budget = int(getattr(settings, "write_budget", 0))
    if budget and need.written_bytes > max(0, budget - written_today):
        problems.append(
            f"tier {name}: measuring it writes up to {readable_bytes(need.written_bytes)}, but "
            f"{readable_bytes(max(0, budget - written_today))} are left of its write_budget of "
            f"today; {lower}"
        )
    return problems


@contextmanager
def workplace(settings: TierSettings, need: Need) -> Iterator[Workplace]:
    """Make directories for a tier that has some; they are gone afterwards. Those that a process
    which was killed has left there go first.

    Raises:
        TierError: they cannot be made.
    """
    directories = list(dict.fromkeys(settings.directories.values()))
    made: dict[Path, Path] = {}
    locks: list[int] = []
    try:
        try:
            for directory in directories:
                place = place_of(directory)
                _remove_left(place)
                made[directory] = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
                locks.append(_lock(made[directory]))
        except OSError as error:
            raise TierError(
                f"cannot make a directory to measure tier {settings.name!r} in: {error}",
                tier=settings.name,
            ) from error
        moved = _moved(settings, {old: new / "tier" for old, new in made.items()}, need)
        yield Workplace(moved or settings, tuple(made.values()), moved is not None)
    finally:
        for folder in made.values():
            shutil.rmtree(folder, ignore_errors=True)
        for lock in locks:
            os.close(lock)


def _moved(settings: TierSettings, where: Mapping[Path, Path], need: Need) -> TierSettings | None:
    """The settings of the same tier in other directories, with a budget of its own; None where it
    has no directories, or keeps them where `directories` does not say."""
    update: dict[str, object] = {"capacity": need.store_bytes}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, Path):
            update[name] = where.get(value, value)
        elif isinstance(value, tuple):
            update[name] = tuple(
                where.get(item, item) if isinstance(item, Path) else item for item in value
            )
        elif name in ("scrub", "write_budget"):
            update[name] = 0
    moved = settings.model_copy(update=update)
    stayed = set(moved.directories.values()) & set(where)
    return moved if where and not stayed else None


def _lock(folder: Path) -> int:
    """Say that a directory has an owner: a lock, which ends with this process."""
    begun = folder / f"{_LOCK}.new"
    descriptor = os.open(begun, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    begun.rename(folder / _LOCK)  # under this name it is locked from the first moment
    return descriptor


def _remove_left(place: Path) -> None:
    """Remove what processes have left that are gone."""
    for lock in place.glob(f"{PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # somebody else's
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if lock.parent.stat().st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
