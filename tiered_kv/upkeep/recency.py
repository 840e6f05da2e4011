"""Making a store evict moved blocks in the order of their use where they came from."""

from __future__ import annotations

from collections.abc import Iterator

from tiered_kv.contracts import BlockStore, RanksByUse
from tiered_kv.values import BlockKey

__all__ = ["OrderOfUse", "most_used_first"]

_TOGETHER = 1024
_MOST_TOUCHED = 65_536
"""Blocks whose order is given to a store that takes uses alone: it remembers no more at once."""
_GROWN = 4
"""Marked anew when a quarter has come besides, so that each block is marked some five times."""


def most_used_first(store: BlockStore) -> Iterator[BlockKey]:
    """All visible keys of a store's namespace: those used last or most come first, and so a
    prefix's beginning before its end. A store that does not tell the order gives them in any."""
    return store.hottest() if isinstance(store, RanksByUse) else store.scan()


class OrderOfUse:
    """Keys that are moved to a store, the most used first. Not thread-safe."""

    def __init__(self) -> None:
        self._keys: list[BlockKey] = []
        self._marked = 0

    def note(self, key: BlockKey) -> None:
        """The next one, which was used less than all before."""
        self._keys.append(key)

    def goes_first(self) -> BlockKey | None:
        """Which of them the store evicts first as long as nobody uses them; None without any."""
        unmarked = self._keys[self._marked : self._marked + 1]
        return next(iter(unmarked or self._keys[-1:]), None)

    def mark_when_grown(self, store: BlockStore) -> None:
        """Mark those that came since, if they are many beside the others: what the store evicts
        while they are moved is then of the least used. To be called before each batch.

        Raises:
            TierError: the store does not work.
        """
        if (len(self._keys) - self._marked) * _GROWN >= self._marked:
            self.mark(store)

    def mark(self, store: BlockStore) -> None:
        """Have the store evict them in this order; without it what was moved first, the most used,
        would be evicted first. A store that takes no order has them marked as used, in reverse,
        since what is marked last counts as used last.

        Raises:
            TierError: the store does not work.
        """
        if self._marked == len(self._keys):
            return
        if isinstance(store, RanksByUse):
            store.arrange(self._keys)
        else:
            for end in range(min(len(self._keys), _MOST_TOUCHED), 0, -_TOGETHER):
                store.touch(self._keys[max(0, end - _TOGETHER) : end])
        self._marked = len(self._keys)
