"""Blocks that are known to lie in a tier, for what reads some of them in the background."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence

from tiered_kv.values import BlockKey, BlockStatus

__all__ = ["RecentKeys"]

MOST_REMEMBERED = 512
"""Keys; the latest."""


class RecentKeys:
    """What a tier's calls told of its blocks lately. Thread-safe; nothing blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[BlockKey, None] = {}
        """The latest come last."""

    def note(self, keys: Sequence[BlockKey], statuses: Sequence[BlockStatus]) -> None:
        """A call that stored these blocks, or loaded them, has ended so."""
        with self._lock:
            for key, status in zip(keys, statuses, strict=True):
                if status in (BlockStatus.OK, BlockStatus.MISSING, BlockStatus.CORRUPT):
                    self._keys.pop(key, None)
                if status is BlockStatus.OK:
                    self._keys[key] = None
            while len(self._keys) > MOST_REMEMBERED:
                del self._keys[next(iter(self._keys))]

    def add(self, keys: Iterable[BlockKey]) -> None:
        """These blocks lie in the tier."""
        found = list(keys)
        self.note(found, [BlockStatus.OK] * len(found))

    def some(self, most: int) -> list[BlockKey]:
        """Some of them, each time others: what was read just now comes out of a cache."""
        with self._lock:
            known = list(self._keys)
        return random.sample(known, min(most, len(known)))

    def __bool__(self) -> bool:
        return bool(self._keys)

    def clear(self) -> None:
        """The tier has another store."""
        with self._lock:
            self._keys.clear()
