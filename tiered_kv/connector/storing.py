"""Stores: what is stored where, and which blocks have become whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tiered_kv.connector.books import Books
from tiered_kv.connector.messages import FailedBlock
from tiered_kv.placement import Admission
from tiered_kv.specs import CpuSpec, Part, SlotRef, StoreTargets
from tiered_kv.stats import DropReason
from tiered_kv.values import BlockKey

__all__ = ["StorePlan", "Stores"]


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What of a store is accepted, in the order in which it was asked."""

    keys: tuple[BlockKey, ...]
    targets: StoreTargets
    evicted: tuple[BlockKey, ...]


class Stores:
    """Stores between their preparation and the end of their first hop. Scheduler's thread only."""

    def __init__(
        self,
        books: Books,
        admission: Admission,
        *,
        host_write: bool,
        room: Callable[[], int | None],
    ) -> None:
        """`host_write`: whether stores go to the cpu tier; `room`: how many of its slots more they
        may hold, None: all."""
        self._books = books
        self._room = room
        self._admission = admission
        self._host_write = host_write
        self._bad: set[BlockKey] = set()
        self._given: Mapping[BlockKey, SlotRef] = {}
        """Slots of the store that is being prepared."""

    def prepare(self, request: str, keys: Sequence[BlockKey]) -> StorePlan:
        """Choose what of these blocks is stored, and where. Never waits; may choose nothing."""
        self._given = {}
        try:
            return self._prepare(request, keys)
        except BaseException:
            self._take_back(self._given)
            raise

    def _take_back(self, slots: Mapping[BlockKey, SlotRef]) -> None:
        """No rank will hear of these slots."""
        for key, slot in slots.items():
            self._books.storing.pop(key, None)
            if self._books.catalog is not None:
                self._books.catalog.store_failed([slot])
                for rank in range(self._books.world):
                    self._books.catalog.release(slot, rank)

    def _prepare(self, request: str, keys: Sequence[BlockKey]) -> StorePlan:
        state = self._books.state(request)
        if state.unsure:
            return StorePlan((), StoreTargets(None), ())
        wanted = [key for key in dict.fromkeys(keys) if key not in self._books.storing]
        uses = self._uses(wanted)
        wanted = [key for key in wanted if uses[key] >= self._admission.min_uses]
        absent: dict[str, set[BlockKey]] = {}
        worn: dict[str, set[BlockKey]] = {}
        for tier in self._books.tiers:
            if tier.write and tier.name in self._books.mirrors and not state.host_only:
                absent[tier.name], worn[tier.name] = self._absent(tier.name, wanted, uses)
        evicted: tuple[BlockKey, ...] = ()
        slots: Mapping[BlockKey, SlotRef] = {}
        first: CpuSpec | None = None
        if self._books.catalog is not None and self._host_write:
            missing = [key for key in wanted if self._books.catalog.lookup(key) is None]
            # All of them, so that the end of a prefix does not drive out its beginning.
            given = self._books.catalog.allocate(wanted, self._books.world, most=self._room())
            self._given = given.slots
            chosen = [key for key in missing if key in given.slots]
            evicted = given.evicted
            slots = given.slots
            if self._books.host_tier is not None:
                self._books.stats.evicted(self._books.host_tier, len(evicted))
            dropped = len(missing) - len(chosen)
            if dropped and self._books.host_tier is not None:
                self._books.stats.dropped(self._books.host_tier, DropReason.SLOTS, dropped)
            first = CpuSpec(tuple(slots[key] for key in chosen))
            if self._books.host_tier is not None:
                self._books.backoff.drop(self._books.host_tier, chosen)
        else:
            missing = wanted
            chosen = [key for key in wanted if any(key in keys for keys in absent.values())]
        for name, keys_ in worn.items():
            self._books.stats.dropped(name, DropReason.WEAR, sum(key in keys_ for key in missing))
        behind: list[Part] = []
        for tier in self._books.tiers:
            positions = tuple(i for i, k in enumerate(chosen) if k in absent.get(tier.name, ()))
            if positions:
                spec = tier.spec(tier.name, tuple(chosen[i] for i in positions))
                behind.append(Part(spec, positions))
                self._books.backoff.drop(tier.name, spec.keys)
                self._books.watch.stored(tier.name, len(positions))
        self._books.storing.update((key, slots.get(key)) for key in chosen)
        return StorePlan(tuple(chosen), StoreTargets(first, tuple(behind)), evicted)

    def _uses(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, int]:
        """How often each block was wanted by now; 1 where nobody asks for more."""
        if self._admission.min_uses == 1 and not self._books.wear:
            return dict.fromkeys(keys, 1)
        return dict(zip(keys, self._admission.wanted(keys), strict=True))

    def _absent(
        self, tier: str, keys: Sequence[BlockKey], uses: Mapping[BlockKey, int]
    ) -> tuple[set[BlockKey], set[BlockKey]]:
        """Those of the blocks that a tier does not have: those that are worth its wear, and those
        that are not (yet)."""
        there = self._books.mirrors[tier].lookup(keys)
        absent = {key for key, known in zip(keys, there, strict=True) if not known}
        needed = self._books.wear.required_uses(tier, self._admission.min_uses)
        worth = {key for key in absent if needed is not None and uses[key] >= needed}
        return worth, absent - worth

    def complete(self, keys: Collection[BlockKey]) -> None:
        """The first hop of a store has ended on all ranks, well or not."""
        good: list[SlotRef] = []
        bad: list[SlotRef] = []
        # In the order in which they were prepared: `keys` is a set, a prefix has an order.
        asked = set(keys)
        ended = [key for key in self._books.storing if key in asked]
        for key in ended:
            slot = self._books.storing[key]
            if slot is not None:
                (bad if key in self._bad else good).append(slot)
        if self._books.catalog is not None:
            self._books.catalog.stored(good)
            self._books.catalog.store_failed(bad)
        for key in ended:  # last, so that where it failed it can be done again
            del self._books.storing[key]
            self._bad.discard(key)

    def take_failures(self, failures: Iterable[FailedBlock]) -> None:
        """Blocks that were not stored on a rank, told before the completions of the step."""
        self._bad.update(f.key for f in failures if f.key in self._books.storing)

    def reset(self) -> None:
        """The ends of the stores that run will not be heard of."""
        self._books.storing.clear()
        self._bad.clear()

    def audit(self) -> tuple[str, ...]:
        """What is still in use once all stores have ended; empty in a sound program."""
        if not self._books.storing and not self._bad:
            return ()
        storing, bad = len(self._books.storing), len(self._bad)
        return (f"{storing} blocks are being stored, {bad} of a store that failed",)
