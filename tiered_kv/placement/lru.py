"""Least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

__all__ = ["LruPolicy", "oldest_first"]

K = TypeVar("K", bound=Hashable)

BATCH = 64
"""Keys that are looked at together where one may be removed in between."""


def oldest_first(order: OrderedDict[K, None]) -> Iterator[K]:
    """The keys of an order whose entries may be removed, each once it was given."""
    passed = 0
    while batch := list(islice(order, passed, passed + BATCH)):
        for key in batch:
            yield key
            passed += key in order


class LruPolicy(Generic[K]):
    """An `EvictionPolicy` in the order of the last use; of a prefix the end goes first. Every call
    is O(1) a key. Not thread-safe."""

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def wanted(self, keys: Sequence[K], now: float) -> None:
        """A use of those that are here."""
        order = self._order
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)

    def add(self, keys: Sequence[K]) -> None:
        """Blocks are here now; counts as a use."""
        order = self._order
        for key in reversed(keys):
            order[key] = None
            order.move_to_end(key)

    def remove(self, key: K) -> None:
        """A block is here no more; unknown keys are ignored."""
        self._order.pop(key, None)

    def victims(self) -> Iterator[K]:
        """Keys, least recently used first."""
        return oldest_first(self._order)

    def admits(self, key: K, victim: K) -> bool:
        """What is used now is worth more than what was used before."""
        return True

    def __len__(self) -> int:
        """Number of keys that are here."""
        return len(self._order)
