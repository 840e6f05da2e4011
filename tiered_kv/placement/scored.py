"""A policy that orders blocks by a scoring, as the index of a store does."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from tiered_kv.contracts import Scoring

__all__ = ["ScoredPolicy"]

K = TypeVar("K", bound=Hashable)

NANOSECONDS = 1e9
STEP = 4
"""Nanoseconds between blocks that are used at once, the end of a prefix first: scores of different
blocks then differ, also where a use counts little."""


class ScoredPolicy(Generic[K]):
    """An `EvictionPolicy`; a use is O(1), an eviction O(log keys). Not thread-safe."""

    def __init__(self, scoring: Scoring) -> None:
        """Remembers nothing of blocks that are not here."""
        self._scoring = scoring
        self._scores: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []
        """(score, number, key); entries whose score is not the key's any more count for nothing."""
        self._number = 0
        self._now = 0

    def wanted(self, keys: Sequence[K], now: float) -> None:
        """A use of those that are here."""
        self._now = int(now * NANOSECONDS)
        for later, key in enumerate(reversed(keys)):
            before = self._scores.get(key)
            if before is not None:
                self._set(key, self._scoring.score(before, self._now + STEP * later))

    def add(self, keys: Sequence[K]) -> None:
        """Blocks are here now; new ones."""
        for later, key in enumerate(reversed(keys)):
            if key not in self._scores:
                self._set(key, self._scoring.score(None, self._now + STEP * later))

    def _set(self, key: K, score: int) -> None:
        self._scores[key] = score
        self._number += 1
        heapq.heappush(self._heap, (score, self._number, key))
        if len(self._heap) > 4 * len(self._scores) + 64:
            self._heap = [entry for entry in self._heap if self._scores.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def remove(self, key: K) -> None:
        """A block is here no more; unknown keys are ignored."""
        self._scores.pop(key, None)

    def victims(self) -> Iterator[K]:
        """Keys, least score first."""
        passed: list[tuple[int, int, K]] = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                key = entry[2]
                if self._scores.get(key) != entry[0]:
                    continue
                passed.append(entry)
                yield key
                if key not in self._scores:
                    passed.pop()
        finally:
            for entry in passed:
                heapq.heappush(self._heap, entry)

    def admits(self, key: K, victim: K) -> bool:
        """What is new is stored; the index has no number of what it does not hold."""
        return True

    def __len__(self) -> int:
        """Number of keys that are here."""
        return len(self._scores)
