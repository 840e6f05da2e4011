"""Least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["LruPolicy"]

K = TypeVar("K", bound=Hashable)


class LruPolicy(Generic[K]):
    """An `EvictionPolicy` in the order of the last use. Every call is O(1). Not thread-safe."""

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def add(self, key: K) -> None:
        """A key was stored; adding a key again counts as a use."""
        self._order[key] = None
        self._order.move_to_end(key)

    def use(self, key: K) -> None:
        """A key was hit; unknown keys are ignored."""
        if key in self._order:
            self._order.move_to_end(key)

    def remove(self, key: K) -> None:
        """A key is gone; unknown keys are ignored."""
        self._order.pop(key, None)

    def victims(self) -> Iterator[K]:
        """Keys, least recently used first. The policy must not be changed while iterating."""
        return iter(self._order)

    def __len__(self) -> int:
        """Number of keys."""
        return len(self._order)
