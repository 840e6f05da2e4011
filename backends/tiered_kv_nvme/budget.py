"""How large the tier may become: capacity, free-space floor, and what the disk holds already."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from tiered_kv.config import format_bytes
from tiered_kv.errors import ConfigError
from tiered_kv.values import PAGE_BYTES
from tiered_kv_nvme.faults import translated
from tiered_kv_nvme.headers import SegmentLayout
from tiered_kv_nvme.segments import SEGMENT_NAME
from tiered_kv_nvme.settings import NvmeSettings

__all__ = ["Budget", "disk_bytes"]

LEAST_SEGMENTS = 8
"""A tier is cut into at least this many segments, so that taking one costs little of it."""

MEASURE_SECONDS = 10.0
"""How long the size of what else lies in the directory is believed."""

FULL_BYTES = 2**20
"""A disk with less room than this is full: others fill it up."""

_INDEX_BASE_BYTES = 2 * 2**20
_INDEX_SLOT_BYTES = 768
"""Index bytes per slot: its row, recency, owner of the slot, and copies of pages in use."""
_LOG_ENTRY_BYTES = 128


class Budget:
    """Decides whether a further segment may be made. Thread-safe."""

    def __init__(
        self, settings: NvmeSettings, index_path: Path, *, least_slot: int, largest_slot: int
    ) -> None:
        """Divide the capacity. The slots are those of the blocks that will be stored, in bytes.

        Raises:
            ConfigError: the capacity holds not even one block.
        """
        self._settings = settings
        self._directory = settings.path
        self._index_path = index_path
        self.capacity = settings.capacity
        slots = settings.capacity // least_slot
        self.log_entries = min(65_536, max(1_024, 4 * slots))
        wanted = _INDEX_BASE_BYTES + slots * _INDEX_SLOT_BYTES + self.log_entries * _LOG_ENTRY_BYTES
        self.index_bytes = min(wanted, settings.capacity // 3) // PAGE_BYTES * PAGE_BYTES
        """Most bytes that the index may take."""
        share = (settings.capacity - self.index_bytes) // LEAST_SEGMENTS
        self._segment_bytes = min(settings.segment, share) // PAGE_BYTES * PAGE_BYTES
        self._lock = threading.Lock()
        self._index_used = 0
        self._found_bytes = 0
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

    def measure(self) -> None:
        """Look at what else lies in the directory, at most every few seconds. Not inside a
        transaction: it may be much.

        Raises:
            TierError: the directory cannot be read.
        """
        with self._lock:
            if time.monotonic() - self._measured < MEASURE_SECONDS:
                return
            self._measured = time.monotonic()
        with translated("read", self._directory, self._settings.name):
            index = disk_bytes(self._index_path)
            found = disk_bytes(self._directory, skip=self._index_path)
        with self._lock:
            self._index_used, self._found_bytes = index, found

    def used(self, segment_bytes: int) -> int:
        """Bytes on the disk: segments, index, and what else lies in the directory."""
        with self._lock:
            return segment_bytes + self._index_used + self._found_bytes

    def excess(self, segment_bytes: int) -> int:
        """Bytes by which segments of this size in total are beyond the capacity."""
        with self._lock:
            # The index keeps its share also while it is small: it must always be able to grow.
            other = self._found_bytes + max(self._index_used, self.index_bytes)
        return max(0, segment_bytes + other - self.capacity)

    def refuses(self, new_bytes: int, segment_bytes: int) -> str | None:
        """Why no file of `new_bytes` may be made beside `segment_bytes` of segments; None if it
        may.

        Raises:
            TierError: the file system cannot be asked.
        """
        if self.excess(segment_bytes + new_bytes):
            return f"the capacity of {format_bytes(self.capacity)} is used up"
        disk = self._ask()
        floor = self._settings.min_free.of(disk.f_blocks * disk.f_frsize)
        free = disk.f_bavail * disk.f_frsize
        if free - new_bytes < floor:
            return (
                f"the file system has {format_bytes(free)} free, "
                f"and min_free keeps {format_bytes(floor)} of them"
            )
        return None

    def disk_is_full(self) -> bool:
        """Whether the file system has no room even for the index.

        Raises:
            TierError: the file system cannot be asked.
        """
        disk = self._ask()
        return disk.f_bavail * disk.f_frsize < FULL_BYTES

    def _ask(self) -> os.statvfs_result:
        with translated("ask for the free space of", self._directory, self._settings.name):
            return os.statvfs(self._directory)


def disk_bytes(directory: Path, *, skip: Path | None = None) -> int:
    """Bytes that everything below `directory` takes, segments and what lies below `skip` not
    counted. What vanishes meanwhile is not counted.

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
                if path == skip or (
                    path.parent == directory and SEGMENT_NAME.fullmatch(entry.name)
                ):
                    continue
                with suppress(FileNotFoundError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(path)
    return total
