"""What the manager knows of the host tier: which slot holds which block, and who needs it still.

The life of a slot:

```
free -> storing -> ready -> (evicted | forgotten) -> free
              \\-> failed or forgotten: orphaned until nobody needs it -> free
```

A slot is needed by the ranks that were to fill it, until each has *released* it (it neither writes
it nor reads it for write-behind any more), and by the loads that *pin* it. Only a slot that nobody
needs is handed out again, under the next generation. What a rank or a job reports names the slot
with its generation: a key may have been forgotten, and stored anew elsewhere, in between.

Slots are filled by stores, or by promotions, which bring blocks from slower tiers; how many slots
each may hold at once is up to whoever asks for them.

A block of a prefix is of no use without those before it. So, whatever the policy says, none goes
while one behind it is here, and those behind one that is forgotten are forgotten with it.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from tiered_kv.contracts import EvictionPolicy, WatchesNeed
from tiered_kv.placement.lru import LruPolicy
from tiered_kv.placement.slots import Allocation, CatalogCounts, Leaseholder, SlotState, Use
from tiered_kv.specs import SlotRef
from tiered_kv.values import BlockKey

__all__ = ["HostCatalog"]

RAISED_SHARE = 0.25
"""Of the slots, what blocks of a raised priority may hold; beyond it they are like others."""

NO_PARENTS: Mapping[BlockKey, BlockKey | None] = {}


class HostCatalog:
    """The slots of the host tier. Pure bookkeeping, no I/O.

    Not thread-safe: the scheduler's thread alone calls it. Look-ups are O(1); `allocate` looks at
    as many keys of the policy as it must pass over or evict.
    """

    def __init__(
        self,
        slots: int,
        policy: EvictionPolicy[BlockKey] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`slots` numbered from 0; an empty `policy` of this catalog's own (least recently used
        first, where none is given); a `clock` in seconds for leases.

        Raises:
            ValueError: `slots` is negative.
        """
        if slots < 0:
            raise ValueError(f"a host tier cannot have {slots} slots")
        self._policy: EvictionPolicy[BlockKey] = LruPolicy() if policy is None else policy
        self._need = self._policy.needed if isinstance(self._policy, WatchesNeed) else None
        self._clock = clock
        self._free = list(range(slots))
        self._generations = [0] * slots
        self._uses: list[Use | None] = [None] * slots
        self._keys: dict[BlockKey, Use] = {}
        self._leases: dict[Leaseholder, set[BlockKey]] = {}
        self._expiries: list[tuple[float, int, Leaseholder]] = []
        self._sequence = itertools.count()
        self._pinned = 0
        self._held = 0
        self._unreleased = {False: 0, True: 0}
        """Slots that a rank has not released, by whether they were for promotions."""
        self._orphaned = 0
        self._raised = 0
        self._ready: Counter[int] = Counter()
        """Ready blocks by priority."""
        self._strays = 0
        self.version = 0
        """Grows whenever a block has come, or has gone."""

    # -------------------------------------------------------------------------------- questions

    def lookup(self, key: BlockKey) -> SlotState | None:
        """Whether a block is here; not counted as a use."""
        use = self._keys.get(key)
        if use is None:
            return None
        return SlotState.READY if use.ready else SlotState.STORING

    def look_up(self, keys: Sequence[BlockKey]) -> tuple[list[BlockKey], list[BlockKey]]:
        """Those of the keys that are ready, and those that are on their way; in their order."""
        known = self._keys
        if known.keys().isdisjoint(keys):
            return [], []
        ready: list[BlockKey] = []
        storing: list[BlockKey] = []
        for key in keys:
            use = known.get(key)
            if use is not None:
                (ready if use.ready else storing).append(key)
        return ready, storing

    def slot(self, key: BlockKey) -> SlotRef | None:
        """Where a ready block lies, else None; `pin` keeps it there."""
        use = self._keys.get(key)
        return use.ref if use is not None and use.ready else None

    @property
    def slots(self) -> int:
        """All slots of the host tier."""
        return len(self._uses)

    @property
    def counts(self) -> CatalogCounts:
        """A snapshot; O(leases)."""
        self._expire()
        resident = len(self._policy)
        return CatalogCounts(
            slots=len(self._uses),
            free=len(self._free),
            storing=len(self._keys) - resident,
            resident=resident,
            orphaned=self._orphaned,
            pinned=self._pinned,
            held=self._held,
            leased=len({key for keys in self._leases.values() for key in keys}),
            strays=self._strays,
        )

    @property
    def resident(self) -> int:
        """Ready blocks."""
        return len(self._policy)

    @property
    def pinned(self) -> int:
        """Slots that loads pin."""
        return self._pinned

    @property
    def free(self) -> int:
        """Slots that nobody needs and that hold no block."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Slots, other than storing ones, that a rank has not released (write-behind)."""
        return self._held

    def unreleased(self, *, promotion: bool) -> int:
        """Slots, storing ones among them, that a rank has not released: those of promotions, or
        those of stores."""
        return self._unreleased[promotion]

    # -------------------------------------------------------------------------------- storing

    def wanted(self, keys: Sequence[BlockKey]) -> None:
        """A request wants these blocks, whether they are here or not: a prefix in order, or what
        it grew by. Call it once for each request and block."""
        self._policy.wanted(keys, self._clock())

    def allocate(
        self,
        keys: Sequence[BlockKey],
        ranks: int,
        *,
        most: int | None = None,
        promotion: bool = False,
        parents: Mapping[BlockKey, BlockKey | None] = NO_PARENTS,
        forced: Collection[BlockKey] | None = None,
        priority: int = 0,
    ) -> Allocation:
        """Hand out slots to be filled by `ranks` ranks, which hold them until they release them.

        Keys that are here already are left out. What does not fit is left out too, from the end
        of `keys`: blocks of a prefix are of no use without those before. Ready blocks go in the
        policy's order where room is needed, but none that is pinned, leased, held by a rank,
        needed by one behind it or among `keys`, of a higher priority, or among `keys`.

        Args:
            keys: blocks, those of a prefix in order.
            ranks: how many ranks fill each slot.
            most: so many slots at most; below 0 is none.
            promotion: whether the blocks come from a slower tier (`unreleased` tells them apart).
            parents: the block before each one, as far as it has one and that is known.
            forced: what is stored as long as there are slots, with all that is given before it;
                others only where the policy finds them worth the block that goes, and where the
                block before them is here. None: all.
            priority: that of the blocks.

        Raises:
            ValueError: `ranks` is less than 1.
        """
        if ranks < 1:
            raise ValueError(f"a block is filled by at least one rank, not {ranks}")
        self._expire()
        asked = dict.fromkeys(keys)
        fresh = [key for key in asked if key not in self._keys]
        if most is not None:
            fresh = fresh[: max(0, most)]
        kept = asked | {parent: None for key in fresh if (parent := parents.get(key)) is not None}
        certain = len(fresh)
        if forced is not None:
            certain = max((n for n, key in enumerate(fresh, 1) if key in forced), default=0)
        evicted: list[BlockKey] = []
        slots: dict[BlockKey, SlotRef] = {}
        refused = 0
        free, known, policy = self._free, self._keys, self._policy
        leaving: Iterator[Use] | None = None
        for position, key in enumerate(fresh):
            parent = parents.get(key)
            before = None if parent is None else known.get(parent)
            if promotion and before is not None and not before.ready:
                before = None  # where that does not come, another tier may have it
            if position >= certain and before is None and parent is not None:
                refused = len(fresh) - position
                break
            if not free:
                if leaving is None:
                    leaving = self._leaving(kept, priority)
                victim = next(leaving, None)
                if victim is None:
                    break
                if position >= certain and not policy.admits(key, victim.key):
                    refused = len(fresh) - position
                    break
                evicted.append(victim.key)
                self._forget(victim)
            slots[key] = self._take(key, ranks, before, promotion, priority)
        return Allocation(slots, tuple(evicted), refused)

    def _leaving(self, keep: Mapping[BlockKey, None], priority: int) -> Iterator[Use]:
        """Blocks that may go, in order; each has gone when the next one is asked for."""
        went = any(blocks and level <= priority for level, blocks in self._ready.items())
        while went:  # a block that another one needed may go when that has gone
            went = False
            for key in self._policy.victims():
                use = self._keys[key]
                if use.priority <= priority and key not in keep and use.idle:
                    went = True
                    yield use

    def _take(
        self, key: BlockKey, ranks: int, before: Use | None, promotion: bool, priority: int
    ) -> SlotRef:
        number = heapq.heappop(self._free)
        self._generations[number] += 1
        ref = SlotRef(number, self._generations[number])
        use = Use(ref, key, (1 << ranks) - 1, before, promotion=promotion)
        if before is not None:
            before.behind = before.behind or set()
            if not before.behind and self._need is not None:
                self._need(before.key, True)
            before.behind.add(use)
        if priority > 0 and self._raised < RAISED_SHARE * len(self._uses):
            use.priority = priority
            self._raised += 1
        elif priority < 0:
            use.priority = priority
        self._unreleased[promotion] += 1
        self._uses[number] = self._keys[key] = use
        return ref

    def stored(self, slots: Sequence[SlotRef]) -> None:
        """All ranks have filled these slots: their blocks can be found and loaded.

        Give the blocks of a prefix in order: its end is then evicted before its beginning.
        """
        ready: list[BlockKey] = []
        for use in self._find_all(slots):
            if use.ready or use.forgotten:
                self._strays += use.ready
                continue
            use.ready = True
            self._ready[use.priority] += 1
            self.version += 1
            self._held += bool(use.holders)
            ready.append(use.key)
        self._policy.add(ready)

    def store_failed(self, slots: Sequence[SlotRef]) -> None:
        """At least one rank could not fill these slots: their blocks are forgotten."""
        for use in self._find_all(slots):
            if use.ready:
                self._strays += 1
            else:
                self._forget(use)

    def release(self, slot: SlotRef, rank: int) -> None:
        """A rank needs a slot no more: it neither writes nor reads it, now or later."""
        use = self._find(slot)
        if use is None or not use.holders >> rank & 1:
            self._strays += use is not None
            return
        use.holders ^= 1 << rank
        if not use.holders:
            self._unreleased[use.promotion] -= 1
            self._held -= use.ready or use.forgotten
        self._reclaim(use)

    # -------------------------------------------------------------------------------- loading

    def pin(self, keys: Sequence[BlockKey]) -> tuple[SlotRef, ...]:
        """Keep blocks in their slots until `unpin`; counted. All or none.

        Raises:
            KeyError: a key is not here, or not ready.
        """
        uses = [self._keys[key] for key in keys]
        for use in uses:
            if not use.ready:
                raise KeyError(use.key)
        for use in reversed(uses):
            self._pinned += use.pins == 0
            use.pins += 1
        return tuple(use.ref for use in uses)

    def unpin(self, slots: Sequence[SlotRef]) -> None:
        """End one pin on each of these slots."""
        for slot in slots:
            use = self._find(slot)
            if use is None or use.pins == 0:
                self._strays += use is not None
                continue
            use.pins -= 1
            self._pinned -= use.pins == 0
            self._reclaim(use)

    # -------------------------------------------------------------------------------- leases

    def lease(self, keys: Iterable[BlockKey], holder: Leaseholder, until: float) -> None:
        """Protect blocks from eviction until a time of the clock, on behalf of `holder`. Adds to
        the holder's leases; keys that are not here are ignored."""
        self._expire()
        mine = self._leases.setdefault(holder, set())
        for key in keys:
            use = self._keys.get(key)
            if use is not None:
                if use.leases is None:
                    use.leases = {}
                use.leases[holder] = max(until, use.leases.get(holder, until))
                mine.add(key)
        if mine:
            heapq.heappush(self._expiries, (until, next(self._sequence), holder))
        else:
            del self._leases[holder]

    def end_lease(self, holder: Leaseholder, keys: Iterable[BlockKey] | None = None) -> None:
        """End a holder's leases, all or those of these keys; unknown ones are ignored."""
        mine = self._leases.get(holder, set())
        for key in list(mine if keys is None else mine.intersection(keys)):
            mine.discard(key)
            use = self._keys.get(key)
            if use is not None and use.leases is not None:
                use.leases.pop(holder, None)
        if not mine:
            self._leases.pop(holder, None)

    # -------------------------------------------------------------------------------- forgetting

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Blocks are not to be found any more (a bad one, for example); unknown keys are
        ignored. Slots that somebody needs stay out of use until nobody does."""
        for key in keys:
            use = self._keys.get(key)
            if use is not None:
                self._forget(use)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Let blocks go that nobody needs, those of a prefix in order; others stay."""
        for key in reversed(keys):
            use = self._keys.get(key)
            if use is not None and use.ready and use.idle:
                self._forget(use)

    def reset(self) -> None:
        """Forget everything. Slots in flight stay out of use until nobody needs them."""
        self.forget(list(self._keys))
        self._expiries.clear()

    # -------------------------------------------------------------------------------- auditing

    def audit(self) -> tuple[str, ...]:
        """What is wrong with the books, in words; empty in a sound program. O(slots)."""
        wrong: list[str] = []
        uses = [use for use in self._uses if use is not None]
        expected = {
            "free and used slots": (len(self._free) + len(uses), len(self._uses)),
            "free slots": (len(set(self._free)), len(self._free)),
            "known and orphaned slots": (len(self._keys) + self._orphaned, len(uses)),
            "orphaned": (self._orphaned, sum(use.forgotten for use in uses)),
            "pinned": (self._pinned, sum(use.pins > 0 for use in uses)),
            "held": (self._held, sum(bool(u.holders) and (u.ready or u.forgotten) for u in uses)),
            "of stores": (
                self._unreleased[False],
                sum(bool(u.holders) and not u.promotion for u in uses),
            ),
            "of promotions": (
                self._unreleased[True],
                sum(bool(u.holders) and u.promotion for u in uses),
            ),
            "of a raised priority": (
                self._raised,
                sum(u.priority > 0 and not u.forgotten for u in uses),
            ),
            "resident": (len(self._policy), sum(u.ready and not u.forgotten for u in uses)),
            "ready, of all priorities": (self._ready.total(), len(self._policy)),
        }
        for what, (counted, found) in expected.items():
            if counted != found:
                wrong.append(f"{what}: counted {counted}, found {found}")
        for number in self._free:
            if self._uses[number] is not None:
                wrong.append(f"slot {number} is free and in use")
        for number, use in enumerate(self._uses):
            if use is not None:
                ref = SlotRef(number, self._generations[number])
                wrong.extend(use.audit(ref, self._keys.get(use.key), self._leases))
        for holder, keys in self._leases.items():
            for key in keys:
                if key not in self._keys or holder not in (self._keys[key].leases or ()):
                    wrong.append(f"{holder} leases {key!r}, which does not know of it")
        return tuple(wrong)

    # -------------------------------------------------------------------------------- inside

    def _find(self, slot: SlotRef) -> Use | None:
        """The use that this reference names; a stale or unknown one is counted."""
        if 0 <= slot.number < len(self._uses):
            use = self._uses[slot.number]
            if use is not None and use.ref.generation == slot.generation:
                return use
        self._strays += 1
        return None

    def _find_all(self, slots: Iterable[SlotRef]) -> list[Use]:
        return [use for slot in slots if (use := self._find(slot)) is not None]

    def _forget(self, use: Use) -> None:
        """The block is not here any more, nor are those behind it."""
        forgotten = [use]
        for one in forgotten:
            if one.forgotten:
                continue
            forgotten.extend(one.behind or ())
            self._forget_one(one)

    def _forget_one(self, use: Use) -> None:
        del self._keys[use.key]
        self.version += 1
        before, need = use.before, self._need
        if need is not None and use.behind:
            need(use.key, False)
        if before is not None and before.behind is not None:
            before.behind.discard(use)
            if need is not None and not before.behind:
                need(before.key, False)
        use.before = use.behind = None
        self._raised -= use.priority > 0
        if use.ready:
            self._ready[use.priority] -= 1
            self._policy.remove(use.key)
        else:
            self._held += bool(use.holders)
        for holder in use.leases or ():
            keys = self._leases[holder]
            keys.remove(use.key)
            if not keys:
                del self._leases[holder]
        use.leases = None
        use.forgotten = True
        self._orphaned += 1
        self._reclaim(use)

    def _reclaim(self, use: Use) -> None:
        if use.forgotten and not use.holders and not use.pins:
            self._orphaned -= 1
            self._uses[use.ref.number] = None
            heapq.heappush(self._free, use.ref.number)

    def _expire(self) -> None:
        """Drop the leases that have run out."""
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            holder = heapq.heappop(self._expiries)[2]
            keys = self._leases.get(holder, set())
            for key in list(keys):
                leases = self._keys[key].leases or {}
                if leases[holder] <= now:
                    del leases[holder]
                    keys.remove(key)
            if not keys:
                self._leases.pop(holder, None)
