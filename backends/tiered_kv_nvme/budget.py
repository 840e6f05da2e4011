"""How large the tier may become: capacity, free-space floors, and what the disks hold already."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from tiered_kv.config import format_bytes
from tiered_kv.errors import ConfigError, TierError
from tiered_kv.values import PAGE_BYTES
from tiered_kv_nvme.directory import SEGMENT_NAME
from tiered_kv_nvme.faults import translated
from tiered_kv_nvme.headers import SegmentLayout
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.spreading import place_of
from tiered_kv_nvme.stripes import Stripes

__all__ = ["Budget", "disk_bytes"]

LEAST_SEGMENTS = 8
"""A tier is cut into at least this many segments, so that taking one costs little of it."""

SEGMENTS_EACH = 4
"""And into at least this many for each directory, so that they are used alike."""

MEASURE_SECONDS = 10.0
"""How long the size of what else lies in the directories is believed."""

FULL_BYTES = 2**20
"""A disk with less room than this is full: others fill it up."""

_INDEX_BASE_BYTES = 2 * 2**20
_INDEX_SLOT_BYTES = 768
"""Index bytes per slot: its row, recency, owner of the slot, and copies of pages in use."""
_LOG_ENTRY_BYTES = 128


class Budget:
    """Decides whether a further segment may be made. Thread-safe."""

    def __init__(
        self, settings: NvmeSettings, stripes: Stripes, *, least_slot: int, largest_slot: int
    ) -> None:
        """Divide the capacity. The slots are those of the blocks that will be stored, in bytes.

        Raises:
            ConfigError: the capacity holds not even one block.
        """
        self._settings = settings
        self._stripes = stripes
        self.capacity = settings.capacity
        slots = settings.capacity // least_slot
        self.log_entries = min(65_536, max(1_024, 4 * slots))
        wanted = _INDEX_BASE_BYTES + slots * _INDEX_SLOT_BYTES + self.log_entries * _LOG_ENTRY_BYTES
        self.index_bytes = min(wanted, settings.capacity // 3) // PAGE_BYTES * PAGE_BYTES
        """Most bytes that the index may take."""
        pieces = max(LEAST_SEGMENTS, SEGMENTS_EACH * len(stripes.paths))
        share = (settings.capacity - self.index_bytes) // pieces
        self._segment_bytes = min(settings.segment, share) // PAGE_BYTES * PAGE_BYTES
        self._lock = threading.Lock()
        self._index_used = 0
        self._found_bytes: dict[Path, int] = {}
        self._measured = -MEASURE_SECONDS
        least = self.index_bytes + SegmentLayout(largest_slot, 1, PAGE_BYTES).file_bytes
        if least > settings.capacity:
            raise ConfigError(
                f"tier {settings.name}: capacity {format_bytes(settings.capacity)} cannot hold one "
                f"block of {format_bytes(largest_slot)} beside its index; expected at least "
                f"{format_bytes(3 * least)}",
                key="capacity",
            )

    def layout(self, slot_bytes: int, stride: int) -> SegmentLayout:
        """How a new segment for slots of this size is cut: at least one slot."""
        fitting = SegmentLayout.fitting(self._segment_bytes, slot_bytes, stride)
        return fitting if fitting.slots else SegmentLayout(slot_bytes, 1, stride)

    def measure(self, known: Callable[[], Collection[int]]) -> None:
        """Look at what else lies in the directories, at most every few seconds. Not inside a
        transaction: it may be much. `known` gives the segments that the index counts. What lies in
        a directory that is out of use is taken to be as it was.

        Raises:
            TierError: a directory cannot be read.
        """
        with self._lock:
            if time.monotonic() - self._measured < MEASURE_SECONDS:
                return
            self._measured = time.monotonic()
        index_path = self._stripes.index_path
        with translated("read", index_path, self._settings.name):
            index = disk_bytes(index_path)
        counted = set(known())
        found: dict[Path, int] = {}
        for place in self._stripes.here:
            path = self._stripes.paths[place]
            try:
                with translated("read", path, self._settings.name):
                    found[path] = disk_bytes(path, place=place, skip=index_path, counted=counted)
            except TierError:
                if not self._stripes.failed(place):
                    raise
        if index_path.parent not in self._stripes.paths:
            with translated("read", index_path.parent, self._settings.name):
                found[index_path.parent] = disk_bytes(index_path.parent, skip=index_path)
        with self._lock:
            self._index_used = index
            self._found_bytes |= found

    def used(self, segment_bytes: int) -> int:
        """Bytes on the disks: segments, index, and what else lies in the directories."""
        with self._lock:
            return segment_bytes + self._index_used + sum(self._found_bytes.values())

    def excess(self, segment_bytes: int) -> int:
        """Bytes by which segments of this size in total are beyond the capacity."""
        with self._lock:
            # The index keeps its share also while it is small: it must always be able to grow.
            other = sum(self._found_bytes.values()) + max(self._index_used, self.index_bytes)
        return max(0, segment_bytes + other - self.capacity)

    def refuses(self, new_bytes: int, segment_bytes: int) -> str | None:
        """Why no file of `new_bytes` may be made beside `segment_bytes` of segments, in whichever
        directory; None if it may."""
        if self.excess(segment_bytes + new_bytes):
            return f"the capacity of {format_bytes(self.capacity)} is used up"
        return None

    def free_bytes(self, place: int) -> int:
        """What a directory's file system has free.

        Raises:
            TierError: it cannot be asked.
        """
        disk = self._ask(self._stripes.paths[place])
        return disk.f_bavail * disk.f_frsize

    def refuses_in(self, place: int, new_bytes: int) -> str | None:
        """Why no file of `new_bytes` may be made in a directory; None if it may, or if its file
        system does not say how large it is.

        Raises:
            TierError: its file system cannot be asked.
        """
        path = self._stripes.paths[place]
        if self._stripes.is_full(place):
            return f"no file could be made in {path} just now"
        disk = self._ask(path)
        floor = self._settings.min_free.of(disk.f_blocks * disk.f_frsize)
        free = disk.f_bavail * disk.f_frsize
        if disk.f_blocks and free - new_bytes < floor:
            return (
                f"the file system of {path} has {format_bytes(free)} free, "
                f"and min_free keeps {format_bytes(floor)} of them"
            )
        return None

    def disk_is_full(self) -> bool:
        """Whether the file system of the index has no room even for that.

        Raises:
            TierError: the file system cannot be asked.
        """
        disk = self._ask(self._stripes.index_path)
        return disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < FULL_BYTES

    def _ask(self, path: Path) -> os.statvfs_result:
        with translated("ask for the free space of", path, self._settings.name):
            return os.statvfs(path)


def disk_bytes(
    directory: Path,
    *,
    place: int = 0,
    skip: Path | None = None,
    counted: Collection[int] = (),
) -> int:
    """Bytes that everything below `directory`, the tier's at `place`, takes: without the segments
    that are `counted` already, and what lies below `skip`. What vanishes meanwhile is not counted.

    Raises:
        OSError: a directory cannot be read.
    """
    total = 0
    pending = [directory]
    while pending:
        try:
            entries = os.scandir(pending.pop())
        except FileNotFoundError:
            continue
        with entries:
            for entry in entries:
                path = Path(entry.path)
                match = SEGMENT_NAME.fullmatch(entry.name)
                number = int(match[1]) if match and path.parent == directory else None
                ours = number in counted and number is not None and place_of(number) == place
                if path == skip or ours:
                    continue
                with suppress(FileNotFoundError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(path)
    return total
