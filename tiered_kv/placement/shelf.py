"""A tier of a replay: the rules of `HostCatalog`, without what a replay has none of.

Nothing is on its way, loaded or leased in a replay, and every block is whole at once, so that
slots, ranks, pins and leases are left out, and an object per block with them: that is most of the
time that a catalog takes. Which blocks are stored and which ones go is the same, and a test holds
the two together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from tiered_kv.contracts import EvictionPolicy, WatchesNeed
from tiered_kv.values import BlockKey

__all__ = ["Shelf"]


class Shelf:
    """Blocks, the policy that orders them, and which of them others need. Not thread-safe."""

    def __init__(self, capacity: int, policy: EvictionPolicy[BlockKey]) -> None:
        """Empty, for so many blocks; an empty `policy` of its own."""
        self._capacity = capacity
        self._policy = policy
        self._need = policy.needed if isinstance(policy, WatchesNeed) else None
        self._before: dict[BlockKey, BlockKey | None] = {}
        """Of each block here the one that it needs, where that is here."""
        self._behind: dict[BlockKey, int] = {}
        """How many blocks need one; of others there is no entry."""
        self.stored = self.evicted = 0
        """Blocks that have come, and that had to go."""

    @property
    def resident(self) -> Collection[BlockKey]:
        """What is here; as it changes."""
        return self._before.keys()

    def store(self, keys: Sequence[BlockKey], first: int, *, forced: bool) -> None:
        """Store the blocks of a prefix from number `first` on that are not here, as far as there
        are blocks that may go for them; unless `forced`, as far as the policy finds them worth it,
        too, and the block before is here. See `HostCatalog.allocate`."""
        here, behind, need = self._before, self._behind, self._need
        room = self._capacity - len(here)
        stored: list[BlockKey] = []
        leaving: Iterator[BlockKey] | None = None
        parent = keys[first - 1] if first else None
        kept = first
        if parent is not None and first < len(keys) and keys[first] not in here:
            kept -= 1  # it will be needed
        for key in keys[first:]:
            if key in here:
                parent = key
                continue
            before = parent if parent in here else None
            if before is None and parent is not None and not forced:
                break
            if room:
                room -= 1
            else:
                if leaving is None:
                    leaving = self._leaving({*keys[kept:]})
                victim = next(leaving, None)
                if victim is None or not (forced or self._policy.admits(key, victim)):
                    break
                self._evict(victim)
            here[key] = before
            if before is not None:
                count = behind.get(before, 0)
                if need is not None and not count:
                    need(before, True)
                behind[before] = count + 1
            stored.append(key)
            parent = key
        del leaving  # it may hold what the policy has to know of
        self.stored += len(stored)
        self._policy.add(stored)

    def wanted(self, keys: Sequence[BlockKey], now: float) -> None:
        """A request wants these blocks."""
        self._policy.wanted(keys, now)

    def _leaving(self, keep: Collection[BlockKey]) -> Iterator[BlockKey]:
        """Blocks that may go, in order; each has gone when the next one is asked for."""
        behind = self._behind
        went = bool(len(self._policy))
        while went:
            went = False
            for key in self._policy.victims():
                if key not in behind and key not in keep:
                    went = True
                    yield key

    def _evict(self, key: BlockKey) -> None:
        before = self._before.pop(key)
        if before is not None:
            count = self._behind[before] - 1
            if count:
                self._behind[before] = count
            else:
                del self._behind[before]
                if self._need is not None:
                    self._need(before, False)
        self._policy.remove(key)
        self.evicted += 1
