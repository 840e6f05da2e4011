"""ARC: a list of blocks that were used once and one of those used again, whose shares follow what
was missed of either.

Megiddo, Modha: "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from tiered_kv.placement.turns import in_turn

__all__ = ["ArcPolicy"]

K = TypeVar("K", bound=Hashable)


class ArcPolicy(Generic[K]):
    """An `EvictionPolicy`; every call is O(1) a key. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        """For a tier of so many blocks; remembers as many that have gone."""
        self._capacity = capacity
        self._share = 0.0
        """Blocks that those used once may hold."""
        self._once: OrderedDict[K, None] = OrderedDict()
        self._again: OrderedDict[K, None] = OrderedDict()
        self._once_gone: OrderedDict[K, None] = OrderedDict()
        self._again_gone: OrderedDict[K, None] = OrderedDict()

    def wanted(self, keys: Sequence[K], now: float) -> None:
        """A use of those that are here: they were used again."""
        for key in reversed(keys):
            if key in self._once:
                del self._once[key]
                self._again[key] = None
            elif key in self._again:
                self._again.move_to_end(key)

    def add(self, keys: Sequence[K]) -> None:
        """Blocks are here now; one that went lately says which list was too short."""
        once, again = self._once_gone, self._again_gone
        for key in reversed(keys):
            if key in self._once or key in self._again:
                continue
            if key in once:
                step = max(1.0, len(again) / len(once))
                self._share = min(float(self._capacity), self._share + step)
                del once[key]
                self._again[key] = None
            elif key in again:
                step = max(1.0, len(once) / len(again))
                self._share = max(0.0, self._share - step)
                del again[key]
                self._again[key] = None
            else:
                self._once[key] = None

    def remove(self, key: K) -> None:
        """A block is here no more; unknown keys are ignored."""
        if key in self._once:
            del self._once[key]
            self._once_gone[key] = None
            while self._once_gone and len(self._once) + len(self._once_gone) > self._capacity:
                self._once_gone.popitem(last=False)
        elif key in self._again:
            del self._again[key]
            self._again_gone[key] = None
        everything = (self._once, self._again, self._once_gone, self._again_gone)
        while self._again_gone and sum(map(len, everything)) > 2 * self._capacity:
            self._again_gone.popitem(last=False)

    def victims(self) -> Iterator[K]:
        """Keys, of the list that holds more than its share."""
        while self._once or self._again:
            first = self._once if self._from_once() else self._again
            found = next(iter(first))
            yield found
            if found in first:  # passed over: give all others, least recently used first
                for order in (self._once, self._again):
                    yield from in_turn(order)
                break

    def _from_once(self) -> bool:
        return bool(self._once) and (len(self._once) > self._share or not self._again)

    def admits(self, key: K, victim: K) -> bool:
        """All that is new gets its chance among those used once."""
        return True

    def __len__(self) -> int:
        """Number of keys that are here."""
        return len(self._once) + len(self._again)
