"""The two LMDB files of a tier, and how much of them blocks may take.

The index has a file of its own, so that what is asked about existence lies close together and is
never read from the disk along with blocks. LMDB never overwrites a page that a reader may see: what
a transaction frees can be used again by the second transaction after it. So a part of each file is
kept free for it to work in, and blocks are evicted before a file is full. No file can outgrow its
map.

Where the values are written into the map, their file takes the whole capacity at once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.config import MIB
from tiered_kv.index import Environment, WriteMap, bytes_beside_data, data_bytes
from tiered_kv_lmdb.settings import LmdbSettings

__all__ = ["HEAD_BYTES", "OWNERS", "Space", "TierFiles", "value_bytes"]

OWNERS = "users"
"""The database of the index that says who has which namespace open for writing."""
_VALUES = "values"
_INDEX_SHARE = 24
"""The index takes at most this fraction (1/24) of the capacity."""
_LEAST_INDEX_BYTES = MIB
HEAD_BYTES = 16
"""A block's first bytes lie in its row. LMDB puts a header of 16 bytes before a value, so the other
bytes begin at the same place of a page as they do in memory (some processors copy at half their
speed where they don't), and a block of whole pages takes just these."""


def value_bytes(length: int, page_bytes: int) -> int:
    """Bytes of the file that the value of a block of `length` bytes takes."""
    return -(-max(length, 1) // page_bytes) * page_bytes


@dataclass(frozen=True, slots=True)
class Space:
    """How far the file of the values may be filled now, in bytes."""

    file_bytes: int
    """The most that it may grow to, by the budget and by the disk."""
    disk_free: int
    """Free bytes of the file system."""
    floor: int
    """What is to be left free there."""

    def limit(self, need: int) -> int:
        """Bytes that may be live once `need` more are: an eighth stays free, or twice what is
        being stored, up to a third."""
        headroom = max(self.file_bytes // 8, min(2 * need, self.file_bytes // 3))
        return self.file_bytes - headroom


class TierFiles:
    """The environments of a tier's directory: `index` in it, `values` in a subdirectory."""

    def __init__(self, settings: LmdbSettings, tier: str, *, writable: bool | None = None) -> None:
        """Open the index; `open_values` has to follow. `writable`: as the settings say, if it is
        not given. Raises as `Environment.open` does."""
        self._settings = settings
        self._writable = settings.writable if writable is None else writable
        self._tier = tier
        self.path = settings.path
        beside = bytes_beside_data(self.path, (_VALUES,)) if self.path.is_dir() else 0
        share = max(settings.capacity // _INDEX_SHARE, _LEAST_INDEX_BYTES)
        self.index = self._open(self.path, "lmdb", share + beside, self._drop_values, None)
        self._values: Environment | None = None

    def _open(
        self,
        path: Path,
        kind: str,
        max_bytes: int,
        on_empty: Callable[[], None],
        writemap: WriteMap | None,
    ) -> Environment:
        return Environment.open(
            path,
            kind=kind,
            tier=self._tier,
            max_bytes=max_bytes,
            writable=self._writable,
            durability=self._settings.durability,
            force=self._settings.force,
            own_budget=(_VALUES,),
            on_empty=lambda _: on_empty(),
            writemap=writemap,
        )

    def _drop_values(self) -> None:
        """Without the index nobody knows what they are."""
        if (self.path / _VALUES).exists():
            shutil.rmtree(self.path / _VALUES)

    def open_values(self, on_lost: Callable[[], None]) -> None:
        """Open the values; `on_lost` is called, while nobody else has them open, when they start
        empty: no row may stay. Raises as `Environment.open` does."""
        beside = bytes_beside_data(self.path, (_VALUES,))
        rest = self._settings.capacity - self.index.map_bytes - beside
        wish = None
        if self._settings.writemap == "auto":
            disk = os.statvfs(self.path)
            wish = WriteMap(self._settings.min_free.of(disk.f_blocks * disk.f_frsize))
        self._values = self._open(self.path / _VALUES, "lmdb-values", rest, on_lost, wish)

    @property
    def values(self) -> Environment:
        """The environment of the values."""
        if self._values is None:
            raise RuntimeError("open_values was not called")
        return self._values

    def check_current(self) -> None:
        """Raise `TierGone` where one of the two was deleted, or replaced, since it was opened."""
        for environment in (self.index, self.values):
            environment.check_current()

    def space(self) -> Space:
        """Ask the file system.

        Raises:
            OSError: it does not answer.
        """
        disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize
        floor = self._settings.min_free.of(disk.f_blocks * disk.f_frsize)
        taken = data_bytes(self.values.path)
        most = min(self.values.map_bytes, taken + max(0, free - floor))
        return Space(most, free, floor)

    def disk_bytes(self) -> int:
        """Bytes on the disk of all that the directory holds.

        Raises:
            OSError: it does not answer.
        """
        return bytes_beside_data(self.path) + data_bytes(self.path)

    def close(self) -> None:
        """Close both: the values first, as whoever empties the index drops them."""
        if self._values is not None:
            self._values.close()
        self.index.close()
