"""How much host memory this process can still have: of the machine, and of its control groups.

Mapping memory says nothing about it: a kernel that overcommits maps any size, and kills the process
when the pages are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.config.units import readable_bytes

__all__ = ["MemoryRoom", "host_memory", "memory_rooms"]

_UNLIMITED = 1 << 62
"""cgroup v1 writes "no limit" as a number a little below 2**63."""


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """One bound on host memory, and how much of it is left."""

    place: str
    """"host memory", or the control group."""
    free_bytes: int
    """What can still be had; never negative."""
    terms: str
    """The sum behind it, for people."""


def host_memory(root: Path = Path("/")) -> MemoryRoom:
    """The tightest bound now. `root` is where `proc` and the paths in it are looked for."""
    return min(memory_rooms(root), key=lambda room: room.free_bytes)


def memory_rooms(root: Path = Path("/")) -> list[MemoryRoom]:
    """Every bound: the machine's, and those of this process's control group and of the groups
    above it, version 1 or 2. What can't be read bounds nothing."""
    return [_machine(root), *_groups(root)]


def _machine(root: Path) -> MemoryRoom:
    for name, number in _numbers(root / "proc/meminfo"):
        if name == "MemAvailable":
            return MemoryRoom("host memory", number * 1024, "MemAvailable of /proc/meminfo")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return MemoryRoom("host memory", free, "free pages")


def _groups(root: Path) -> Iterator[MemoryRoom]:
    """A group's file cache is left out of what is in use: the kernel drops it for new pages (it
    holds, for example, the weights that were just read)."""
    for group, mount, version in _memberships(root):
        if version == 2:
            limit_file, use_file, prefix = "memory.max", "memory.current", ""
        else:
            limit_file, use_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
            prefix = "total_"
        for folder in (group, *group.parents):
            limit = _number(folder / limit_file)
            used = _number(folder / use_file)
            if limit is not None and used is not None and limit < _UNLIMITED:
                stat = dict(_numbers(folder / "memory.stat"))
                cache = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
                cache = min(cache, used)
                name = "/" + "/".join(folder.relative_to(mount).parts)
                yield MemoryRoom(
                    f"the control group {name} ({limit_file})",
                    max(0, limit - used + cache),
                    f"limit {_text(limit)} - in use {_text(used)} + file cache {_text(cache)}",
                )
            if folder == mount:
                break


def _memberships(root: Path) -> Iterator[tuple[Path, Path, int]]:
    """(folder of this process's group, folder where the hierarchy is mounted, version) of each
    hierarchy that can bound memory."""
    paths: dict[int, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for line in _lines(root / "proc/self/mountinfo"):
        fields = line.split()
        kind, *_, options = fields[fields.index("-") + 1 :]
        version = {"cgroup2": 2, "cgroup": 1}.get(kind)
        if version not in paths or (version == 1 and "memory" not in options.split(",")):
            continue
        # In a container the hierarchy may be mounted from the group's own folder on.
        top, mount = fields[3], root / fields[4].lstrip("/")
        inside = paths[version].removeprefix("" if top == "/" else top).lstrip("/")
        group = mount / inside
        seen = ".." not in group.parts and group.is_dir()
        yield (group if seen else mount), mount, version


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not there, or not for us to see
        return []


def _numbers(path: Path) -> Iterator[tuple[str, int]]:
    """The lines `name number` or `name: number unit` of a file."""
    for line in _lines(path):
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdigit():
            yield words[0], int(words[1])


def _number(path: Path) -> int | None:
    """The one number in a file; None where there is none (`max`)."""
    for line in _lines(path):
        if line.strip().isdigit():
            return int(line)
    return None


def _text(size: int) -> str:
    return f"{size:,} bytes ({readable_bytes(size)})"
