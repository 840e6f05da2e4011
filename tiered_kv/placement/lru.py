"""Least recently used goes first."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

__all__ = ["LruPolicy"]

K = TypeVar("K", bound=Hashable)

LEAST_ENTRIES = 1_024
"""So many are kept whatever they are of."""


class LruPolicy(Generic[K]):
    """An `EvictionPolicy` in the order of the last use; of a prefix the end goes first. A use is
    O(1) a key, a victim O(log n). Not thread-safe."""

    def __init__(self) -> None:
        self._used: dict[K, int] = {}
        """When each was used last: the number of the use."""
        self._uses = 0
        self._needed: set[K] = set()
        self._entries: list[tuple[int, K]] = []
        """A heap: every key that is not needed, as it was used when it was looked at last. Some may
        have gone, be needed by now, or be there twice."""
        self._passed: list[tuple[int, K]] = []
        """Entries that were given as victims and are still to be returned to the heap."""

    def wanted(self, keys: Sequence[K], now: float) -> None:
        """A use of those that are here."""
        used = self._used
        for key in reversed(keys):
            if key in used:
                self._uses += 1
                used[key] = self._uses

    def add(self, keys: Sequence[K]) -> None:
        """Blocks are here now; counts as a use."""
        for key in reversed(keys):
            is_new = key not in self._used
            self._uses += 1
            self._used[key] = self._uses
            if is_new and key not in self._needed:
                self._enter(key)

    def remove(self, key: K) -> None:
        """A block is here no more; unknown keys are ignored."""
        self._used.pop(key, None)

    def needed(self, key: K, is_needed: bool) -> None:
        """See `WatchesNeed`."""
        if is_needed:
            self._needed.add(key)
            return
        self._needed.discard(key)
        if key in self._used:
            self._enter(key)

    def _enter(self, key: K) -> None:
        heapq.heappush(self._entries, (self._used[key], key))
        if len(self._entries) > LEAST_ENTRIES + 2 * len(self._used):
            self._entries = [(use, key) for key, use in self._used.items()]
            self._passed.clear()
            heapq.heapify(self._entries)

    def victims(self) -> Iterator[K]:
        """Keys that are not needed, least recently used first."""
        for entry in self._passed:
            heapq.heappush(self._entries, entry)
        self._passed.clear()
        while self._entries:
            entry = heapq.heappop(self._entries)
            key = entry[1]
            use = self._used.get(key)
            if use is None or key in self._needed:
                continue
            if use > entry[0]:
                heapq.heappush(self._entries, (use, key))
                continue
            self._passed.append(entry)
            yield key

    def admits(self, key: K, victim: K) -> bool:
        """What is used now is worth more than what was used before."""
        return True

    def __len__(self) -> int:
        """Number of keys that are here."""
        return len(self._used)
