"""Stores: what is stored where, and which blocks have become whole."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_

from tiered_kv.connector.books import Books
from tiered_kv.connector.leaving import Leaving
from tiered_kv.connector.messages import FailedBlock
from tiered_kv.connector.requests import Care
from tiered_kv.connector.uses import note_store
from tiered_kv.connector.views import TierView
from tiered_kv.placement import Admission, SlotState
from tiered_kv.specs import CpuSpec, Part, SlotRef, StoreTargets
from tiered_kv.stats import DropReason, TierState
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
        pin_budget: float = 0.25,
    ) -> None:
        """`host_write`: whether stores go to the cpu tier; `room`: how many of its slots more they
        may hold, None: all; `pin_budget`: the share of them that requests may keep."""
        self._books = books
        self._room = room
        self._admission = admission
        self._host_write = host_write
        self._pin_budget = pin_budget
        self._kept: list[tuple[float, int]] = []
        """Until when so many blocks are kept, as requests had it; a heap."""
        self._cared: dict[BlockKey, Care] = {}
        """Blocks of `storing` that are kept, or leave, in their own time."""
        self._leaving = Leaving()
        self._number = itertools.count()
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
            self._cared.pop(key, None)
            if self._books.catalog is not None:
                self._books.catalog.store_failed([slot])
                for rank in range(self._books.world):
                    self._books.catalog.release(slot, rank)

    def _prepare(self, request: str, keys: Sequence[BlockKey]) -> StorePlan:
        books = self._books
        state = books.state(request)
        note_store(books, state, keys)
        self._let_go()
        if state.unsure or not state.care.store:
            return StorePlan((), StoreTargets(None), ())
        storing = books.storing
        wanted = [key for key in dict.fromkeys(keys) if key not in storing]
        uses = self._uses(wanted)
        if uses is not None:
            wanted = [key for key in wanted if uses[key] >= self._admission.min_uses]
        stored = [] if state.host_only else [*self._absent(wanted, uses)]
        evicted: tuple[BlockKey, ...] = ()
        slots: Mapping[BlockKey, SlotRef] = {}
        first: CpuSpec | None = None
        host = books.host_tier
        if books.catalog is not None and host is not None and self._host_write:
            here, coming = books.catalog.look_up(wanted)
            missing = len(wanted) - len(here) - len(coming)
            known = {*here, *coming}
            # All of them, so that the end of a prefix does not drive out its beginning.
            given = books.catalog.allocate(
                wanted,
                books.world,
                most=self._room(),
                parents=state.parents,
                forced=self._on_their_way(stored),
                priority=state.care.priority,
            )
            self._given = slots = given.slots
            evicted = given.evicted
            books.stats.evicted(host, len(evicted))
            if given.refused:
                books.stats.dropped(host, DropReason.NOT_ADMITTED, given.refused)
            if missing > len(slots) + given.refused:
                without = missing - len(slots) - given.refused
                books.stats.dropped(host, DropReason.SLOTS, without)
            first = CpuSpec(tuple(slots.values()))
            if len(slots) < len(wanted):
                stored = [
                    (tier, [k for k in absent if k in slots], [k for k in worn if k not in known])
                    for tier, absent, worn in stored
                ]
            chosen = list(slots)
            books.backoff.drop(host, chosen)
            storing.update(slots)
        else:
            somewhere = {key for _, absent, _ in stored for key in absent}
            chosen = [key for key in wanted if key in somewhere]
            storing.update(dict.fromkeys(chosen))
        behind: list[Part] = []
        for tier, absent, worn in stored:
            if worn:
                books.stats.dropped(tier.name, DropReason.WEAR, len(worn))
            if not absent:
                continue
            if len(absent) == len(chosen):
                positions = tuple(range(len(chosen)))
            else:
                there = set(absent)
                positions = tuple(i for i, key in enumerate(chosen) if key in there)
            behind.append(Part(tier.spec(tier.name, tuple(absent)), positions))
            books.backoff.drop(tier.name, absent)
            books.watch.stored(tier.name, len(absent))
        if state.care.keep or state.care.ttl is not None:
            self._cared.update(dict.fromkeys(slots, state.care))
        return StorePlan(tuple(chosen), StoreTargets(first, tuple(behind)), evicted)

    def _uses(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, int] | None:
        """How often each block was wanted by now; None where nobody asks for more than once."""
        if self._admission.min_uses == 1 and not self._books.wear:
            return None
        return dict(zip(keys, self._admission.wanted(keys), strict=True))

    def _absent(
        self, keys: Sequence[BlockKey], uses: Mapping[BlockKey, int] | None
    ) -> Iterator[tuple[TierView, list[BlockKey], list[BlockKey]]]:
        """By tier that is written to, those of the blocks that it does not have: those that are
        worth its wear, and those that are not (yet)."""
        for tier in self._books.tiers:
            if not tier.write or tier.name not in self._books.mirrors:
                continue
            absent = [*compress(keys, map(not_, self._books.mirrors[tier.name].lookup(keys)))]
            if uses is None:
                yield tier, absent, []
                continue
            needed = self._books.wear.required_uses(tier.name, self._admission.min_uses)
            worth = [key for key in absent if needed is not None and uses[key] >= needed]
            there = set(worth)
            yield tier, worth, [key for key in absent if key not in there]

    def _on_their_way(
        self, stored: Iterable[tuple[TierView, Sequence[BlockKey], Sequence[BlockKey]]]
    ) -> set[BlockKey]:
        """Blocks that take a host slot whatever the host tier's policy thinks of them. Not those
        for a tier that is down, which would drive others out for nothing."""
        state = self._books.conditions.state
        works = (row for row in stored if state(row[0].name) is not TierState.DOWN)
        return {key for _, absent, _ in works for key in absent}

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
            self._care_for(ended)
        for key in ended:  # last, so that where it failed it can be done again
            del self._books.storing[key]
            self._bad.discard(key)

    def _care_for(self, keys: Sequence[BlockKey]) -> None:
        """Blocks have come: keep them, or note when they leave."""
        catalog, now = self._books.catalog, self._books.clock()
        by_care: dict[Care, list[BlockKey]] = {}
        for key in keys:
            care = self._cared.pop(key, None)
            if care is not None and catalog is not None and catalog.lookup(key) is SlotState.READY:
                by_care.setdefault(care, []).append(key)
        for care, blocks in by_care.items():
            if catalog is not None and care.keep:
                room = int(self._pin_budget * catalog.slots) - self.kept
                chosen = blocks[: max(0, room)]
                if chosen:
                    until = now + care.keep
                    catalog.lease(chosen, f"kept:{next(self._number)}", until)
                    heapq.heappush(self._kept, (until, len(chosen)))
            if catalog is not None and care.ttl is not None:
                there = ((key, slot) for key in blocks if (slot := catalog.slot(key)) is not None)
                self._leaving.note(there, now + care.ttl)

    def _let_go(self) -> None:
        """Drop the blocks whose time is over."""
        catalog = self._books.catalog
        due = self._leaving.due(self._books.clock())
        if catalog is not None and due:
            catalog.drop([key for key, slot in due if catalog.slot(key) == slot])

    @property
    def kept(self) -> int:
        """Blocks that requests keep in host memory."""
        now = self._books.clock()
        while self._kept and self._kept[0][0] <= now:
            heapq.heappop(self._kept)
        return sum(blocks for _, blocks in self._kept)

    def take_failures(self, failures: Iterable[FailedBlock]) -> None:
        """Blocks that were not stored on a rank, told before the completions of the step."""
        self._bad.update(f.key for f in failures if f.key in self._books.storing)

    def reset(self) -> None:
        """The ends of the stores that run will not be heard of."""
        self._books.storing.clear()
        self._bad.clear()
        self._cared.clear()
        self._kept.clear()
        self._leaving.clear()

    def audit(self) -> tuple[str, ...]:
        """What is still in use once all stores have ended; empty in a sound program."""
        if not self._books.storing and not self._bad:
            return ()
        storing, bad = len(self._books.storing), len(self._bad)
        return (f"{storing} blocks are being stored, {bad} of a store that failed",)
