"""Making a store evict moved blocks in the order of their use where they came from."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from tiered_kv.contracts import BlockStore, RanksByUse
from tiered_kv.values import BlockKey

__all__ = ["OrderOfUse", "most_used_first"]

_TOGETHER = 1024
_MOST_TOUCHED = 65_536
"""Blocks whose order is given to a store that takes uses alone: it remembers no more at once."""
_GROWN, _GROWN_FULL = 4, 64
"""Marked anew when a quarter has come besides, so that each block is marked some five times; where
the tier may be full of them soon, when a 64th has."""


def most_used_first(store: BlockStore) -> Iterator[BlockKey]:
    """All visible keys of a store's namespace: those used last or most come first, and so a
    prefix's beginning before its end. A store that does not tell the order gives them in any."""
    return store.hottest() if isinstance(store, RanksByUse) else store.scan()


class OrderOfUse:
    """Keys that are moved to a store, the most used first. Not thread-safe."""

    def __init__(self) -> None:
        self._keys: list[BlockKey] = []
        self._marked = 0
        self._bytes = 0
        self._fresh: list[int] = []
        """Places of those that were stored."""

    def note(self, key: BlockKey, nbytes: int, *, fresh: bool) -> None:
        """The next one, which was used less than all before, with its bytes of all ranks; `fresh`:
        it was not there."""
        if fresh:
            self._fresh.append(len(self._keys))
        self._keys.append(key)
        self._bytes += nbytes

    def goes_first(self) -> BlockKey | None:
        """Which of those that were stored the store evicts first as long as nobody uses them; None
        without any. One that was there before may be kept (`KeepsBlocks`)."""
        if not self._fresh:
            return None
        first = bisect_left(self._fresh, self._marked)
        return self._keys[self._fresh[min(first, len(self._fresh) - 1)]]

    def lost(self, store: BlockStore) -> list[BlockKey]:
        """Those that are not there any more.

        Raises:
            TierError: the store does not work.
        """
        lost: list[BlockKey] = []
        for start in range(0, len(self._keys), _TOGETHER):
            some = self._keys[start : start + _TOGETHER]
            there = store.contains(some)
            lost += [key for key, is_there in zip(some, there, strict=True) if not is_there]
        return lost

    def mark_when_grown(self, store: BlockStore) -> None:
        """Mark those that came since, if they are many beside the others: what the store evicts
        while they are moved is then of the least used. To be called before each batch.

        Raises:
            TierError: the store does not work.
        """
        full_soon = 2 * self._bytes > store.stat().capacity_bytes
        times = _GROWN_FULL if full_soon else _GROWN
        if (len(self._keys) - self._marked) * times >= self._marked:
            self.mark(store)

    def mark(self, store: BlockStore) -> None:
        """Have the store evict them in this order; without it what was moved first, the most used,
        would be evicted first. A store that takes no order has them marked as used, in reverse,
        since what is marked last counts as used last.

        Raises:
            TierError: the store does not work.
        """
        if isinstance(store, RanksByUse):
            store.arrange(self._keys)
        else:
            for end in range(min(len(self._keys), _MOST_TOUCHED), 0, -_TOGETHER):
                store.touch(self._keys[max(0, end - _TOGETHER) : end])
        self._marked = len(self._keys)
