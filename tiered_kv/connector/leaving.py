"""When blocks that requests gave a time to live leave the host tier."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from tiered_kv.specs import SlotRef
from tiered_kv.values import BlockKey

__all__ = ["Leaving"]

_STALE = 64
"""So many entries more than are valid may be held, beside as many as are."""


class Leaving:
    """Times named by slot and generation: a block that is stored anew has none of its former life.
    A slot has one time at most, so that they are bounded by the slots. Not thread-safe."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        """By slot, the number of the entry that is valid."""
        self._entries: list[tuple[float, int, BlockKey, SlotRef]] = []
        """A heap; entries that are not valid any more go by and by."""
        self._number = itertools.count()

    def note(self, blocks: Iterable[tuple[BlockKey, SlotRef]], until: float) -> None:
        """Blocks leave at a time of the clock; those of a prefix in order."""
        for key, slot in blocks:
            number = self._last[slot.number] = next(self._number)
            heapq.heappush(self._entries, (until, number, key, slot))
        if len(self._entries) > 2 * len(self._last) + _STALE:
            self._entries = [e for e in self._entries if self._last.get(e[3].number) == e[1]]
            heapq.heapify(self._entries)

    def due(self, now: float) -> list[tuple[BlockKey, SlotRef]]:
        """Blocks whose time is over, each once, with the slots that they were in."""
        found: list[tuple[BlockKey, SlotRef]] = []
        while self._entries and self._entries[0][0] <= now:
            _, number, key, slot = heapq.heappop(self._entries)
            if self._last.get(slot.number) == number:
                del self._last[slot.number]
                found.append((key, slot))
        return found

    def clear(self) -> None:
        """No block has a time any more."""
        self._last.clear()
        self._entries.clear()

    def __len__(self) -> int:
        """Entries that are held."""
        return len(self._entries)
