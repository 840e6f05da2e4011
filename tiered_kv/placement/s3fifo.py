"""S3-FIFO: a small queue for what is new, a main one for what was used again, and a memory of what
went from the small one.

Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from tiered_kv.placement.turns import in_turn

__all__ = ["S3FifoPolicy"]

K = TypeVar("K", bound=Hashable)

SMALL_SHARE = 0.1
"""Of the blocks, what the small queue may hold before the main one gives way."""

MOST_USES = 3
"""Uses that count."""

PROVEN_USES = 2
"""Uses from which on a block moves from the small queue to the main one."""


class S3FifoPolicy(Generic[K]):
    """An `EvictionPolicy`; every call is O(1) a key, on the average. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        """For a tier of so many blocks; remembers as many that have gone."""
        self._capacity = capacity
        self._small_size = max(1, int(capacity * SMALL_SHARE))
        self._small: OrderedDict[K, None] = OrderedDict()
        self._main: OrderedDict[K, None] = OrderedDict()
        self._gone: OrderedDict[K, None] = OrderedDict()
        self._uses: dict[K, int] = {}

    def wanted(self, keys: Sequence[K], now: float) -> None:
        """A use of those that are here."""
        uses = self._uses
        for key in keys:
            if key in uses:
                uses[key] = min(MOST_USES, uses[key] + 1)

    def add(self, keys: Sequence[K]) -> None:
        """Blocks are here now; those that went lately go to the main queue."""
        for key in reversed(keys):
            if key in self._uses:
                continue
            self._uses[key] = 0
            if key in self._gone:
                del self._gone[key]
                self._main[key] = None
            else:
                self._small[key] = None

    def remove(self, key: K) -> None:
        """A block is here no more; unknown keys are ignored."""
        if self._uses.pop(key, None) is None:
            return
        if key in self._main:
            del self._main[key]
            return
        del self._small[key]
        self._gone[key] = None
        while len(self._gone) > self._capacity:
            self._gone.popitem(last=False)

    def victims(self) -> Iterator[K]:
        """Keys, as the queues have them; used ones move on instead."""
        while True:
            small = len(self._small) > self._small_size or not self._main
            found = self._settled(small=small)
            if found is None:
                break
            yield found
            if found in self._uses:  # passed over: something needs it
                for queue in (self._small, self._main):
                    yield from in_turn(queue)
                break

    def _settled(self, *, small: bool) -> K | None:
        """The next victim, of the small queue or of the main one."""
        while small and self._small:
            key = next(iter(self._small))
            if self._uses[key] < PROVEN_USES:
                return key
            del self._small[key]
            self._main[key] = None
            self._uses[key] = 0
            if len(self._small) <= self._small_size:
                break
        while self._main:
            key = next(iter(self._main))
            if not self._uses[key]:
                return key
            self._uses[key] -= 1
            self._main.move_to_end(key)
        return next(iter(self._small), None)

    def admits(self, key: K, victim: K) -> bool:
        """All that is new gets its chance in the small queue."""
        return True

    def __len__(self) -> int:
        """Number of keys that are here."""
        return len(self._uses)
