"""Making a store evict moved blocks in the order of their use where they came from."""

from __future__ import annotations

from collections.abc import Iterator

from tiered_kv.contracts import BlockStore, RanksByUse
from tiered_kv.values import BlockKey

__all__ = ["OrderOfUse", "most_used_first"]

_TOGETHER = 1024
_MOST = 65_536
"""Blocks whose order is kept: a store remembers no more of them at once either."""


def most_used_first(store: BlockStore) -> Iterator[BlockKey]:
    """All visible keys of a store's namespace: those used last or most come first, and so a
    prefix's beginning before its end. A store that does not tell the order gives them in any."""
    return store.hottest() if isinstance(store, RanksByUse) else store.scan()


class OrderOfUse:
    """Keys that were moved, the most used first."""

    def __init__(self) -> None:
        self._keys: list[BlockKey] = []

    def note(self, key: BlockKey) -> None:
        """The next one, which was used less than all before."""
        if len(self._keys) < _MOST:
            self._keys.append(key)

    def mark(self, store: BlockStore) -> None:
        """Have the store evict them in this order; without it what was moved first, the most used,
        would be evicted first. A store that takes no order has them marked as used, in reverse,
        since what is marked last counts as used last.

        Raises:
            TierError: the store does not work.
        """
        if isinstance(store, RanksByUse):
            store.arrange(self._keys)
            return
        for end in range(len(self._keys), 0, -_TOGETHER):
            store.touch(self._keys[max(0, end - _TOGETHER) : end])
