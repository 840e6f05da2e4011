"""How much room the tiers of a deployment may take, and how much there is.

Asks file systems, so these calls may block where one hangs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tiered_kv.config.host_memory import host_memory
from tiered_kv.config.model import Deployment, TierSettings
from tiered_kv.config.units import SizeOrPercent, readable_bytes
from tiered_kv.errors import ConfigError

__all__ = ["Volume", "existing_parent", "free_above_floor", "require_room", "shortages", "volumes"]


@dataclass(slots=True)
class Volume:
    """A file system, or the machine's memory, and the tiers that share it."""

    place: str
    """A path on it, "host memory", or the control group whose memory limit is the tightest."""
    free_bytes: int
    """What is free now."""
    held_bytes: int = 0
    """What the tiers hold there already; it counts against their capacity."""
    wanted_bytes: int = 0
    """What the tiers may hold in the end."""
    tiers: list[str] = field(default_factory=list)
    """Their names."""
    terms: str = ""
    """The sum behind `free_bytes`, where it is one."""

    @property
    def unwanted_bytes(self) -> int:
        """What no tier wants yet."""
        return self.free_bytes + self.held_bytes - self.wanted_bytes

    @property
    def shortage(self) -> str | None:
        """What is wrong if the tiers do not fit, else None."""
        if self.wanted_bytes <= self.free_bytes + self.held_bytes:
            return None
        names = " and ".join(repr(tier) for tier in self.tiers)
        noun = "tier" if len(self.tiers) == 1 else "tiers"
        held = f" beside the {self.held_bytes} that they hold" if self.held_bytes else ""
        terms = f" ({self.terms})" if self.terms else ""
        return (
            f"{noun} {names} may grow to {self.wanted_bytes} bytes "
            f"({readable_bytes(self.wanted_bytes)}), but {self.place} has {self.free_bytes} bytes "
            f"({readable_bytes(self.free_bytes)}) free{held}{terms}; lower capacity or make room"
        )


def existing_parent(directory: Path) -> Path:
    """The directory itself, or the nearest one above it that exists."""
    for candidate in (directory, *directory.parents):
        try:
            candidate.stat()
        except OSError:  # not there, or not for us to see
            continue
        return candidate
    return Path("/")


def free_above_floor(tier: TierSettings, directory: Path) -> int:
    """Bytes that the file system of a directory has above the tier's `min_free`, where its settings
    have one."""
    disk = os.statvfs(existing_parent(directory))
    floor = getattr(tier, "min_free", None)
    kept = floor.of(disk.f_blocks * disk.f_frsize) if isinstance(floor, SizeOrPercent) else 0
    return max(0, disk.f_bavail * disk.f_frsize - kept)


def volumes(deployment: Deployment, ranks: int) -> list[Volume]:
    """Every volume that a tier uses. A tier whose capacity is spread over several of them wants the
    same of each, as far as that has room beside what the tiers before it want; the others have to
    bring the rest. One that is read only does not grow, and counts nowhere."""
    found: list[Volume] = []
    by_device: dict[int, Volume] = {}
    if deployment.cpu is not None:
        host = deployment.cpu
        wanted = host.capacity * ranks
        memory = host_memory()
        volume = Volume(memory.place, memory.free_bytes, 0, wanted, [host.name], memory.terms)
        found.append(volume)
    used: dict[Path, Volume] = {}
    growing = [tier for tier in deployment.tiers if tier.writable]
    for tier in growing:
        for directory in tier.directories.values():
            parent = existing_parent(directory)
            device = parent.stat().st_dev
            if device not in by_device:
                room = os.statvfs(parent)
                by_device[device] = Volume(str(parent), room.f_bavail * room.f_frsize)
                found.append(by_device[device])
            used[directory] = by_device[device]
            used[directory].held_bytes += sum(_sizes(directory))
    for tier in growing:
        _spread(tier, [used[directory] for directory in tier.data_directories])
    return found


def _spread(tier: TierSettings, over: Sequence[Volume]) -> None:
    """Let the tier want its capacity of these volumes, of which one may be named several times."""
    distinct = {id(volume): volume for volume in over}.values()
    left = tier.capacity
    ordered = sorted(distinct, key=lambda volume: volume.unwanted_bytes)
    for place, volume in enumerate(ordered):
        rest = len(ordered) - place
        # The last one has most room: what fits nowhere is missing there.
        share = left if rest == 1 else min(left // rest, max(0, volume.unwanted_bytes))
        volume.wanted_bytes += share
        volume.tiers.append(tier.name)
        left -= share


def shortages(found: Sequence[Volume]) -> list[str]:
    """One message per volume that is too small."""
    return [volume.shortage for volume in found if volume.shortage is not None]


def require_room(deployment: Deployment, ranks: int) -> None:
    """Refuse a deployment whose tiers cannot grow to their capacities on this machine.

    Raises:
        ConfigError: one problem per volume that is too small, with its free bytes.
    """
    problems = tuple(shortages(volumes(deployment, ranks)))
    if problems:
        raise ConfigError("\n".join(problems), problems=problems)


def _sizes(directory: Path) -> Iterator[int]:
    """Bytes on the disk of every file below a directory; what cannot be read counts 0."""
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                yield Path(folder, name).lstat().st_blocks * 512
            except OSError:  # gone, or not ours to see
                continue
