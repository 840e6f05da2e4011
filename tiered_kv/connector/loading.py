"""Loads: where each block of a load lies now, and what becomes of those that do not come."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tiered_kv.connector.books import Books
from tiered_kv.connector.gating import PrefixGate
from tiered_kv.connector.messages import FailedBlock
from tiered_kv.connector.requests import Loading, RequestState
from tiered_kv.specs import CpuSpec, LoadStoreSpec, Part, Parts, SlotRef
from tiered_kv.values import BlockKey, BlockStatus

__all__ = ["LoadPlan", "Loads", "failing_plan"]

NO_SLOT = SlotRef(0, -1)
"""A slot under a generation that was never given out: a load from it finds nothing."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Where the blocks of a load lie, and how long it may take."""

    parts: Parts
    deadline: float | None = None
    """Seconds; see `LoadJob.deadline`."""


def failing_plan(keys: Sequence[BlockKey]) -> LoadPlan:
    """A load that finds nothing, so that its request is computed."""
    return LoadPlan(Parts((Part(CpuSpec((NO_SLOT,) * len(keys)), tuple(range(len(keys)))),)))


class Loads:
    """Loads between their preparation and their end. Scheduler's thread only."""

    def __init__(self, books: Books, gate: PrefixGate) -> None:
        self._books = books
        self._gate = gate
        self._failed: set[str] = set()
        """Requests that have a failed block in the load that runs."""

    def prepare(self, request: str, keys: Sequence[BlockKey]) -> LoadPlan:
        """Say where each block lies now, and pin what lies in the host tier.

        A block that vanished since the lookup is still named in some tier: its load fails and it
        is recomputed.
        """
        state = self._books.state(request)
        self._books.end_lease(request)
        deadline = self._gate.load_deadline(state, keys)
        sizes = self._gate.block_bytes(state)
        host, catalog = self._books.host_tier, self._books.catalog
        positions: dict[str, list[int]] = {}
        found = [*map(state.sources.get, keys)]
        unsure = [key for key, tier in zip(keys, found, strict=True) if tier in (None, host)]
        ready = set[BlockKey]() if catalog is None else set(catalog.look_up(unsure)[0])
        for position, (key, source) in enumerate(zip(keys, found, strict=True)):
            tier = host if key in ready else source
            if tier is None or (tier == host and key not in ready):
                tier = self._elsewhere(state, key, source)
            positions.setdefault(tier, []).append(position)
        for tier, chosen in positions.items():
            self._begin(state, tier, [keys[i] for i in chosen], sizes)
        parts = [
            Part(self._spec(state, tier, [keys[i] for i in chosen]), tuple(chosen))
            for tier, chosen in positions.items()
        ]
        state.drop_answers()
        return LoadPlan(Parts(tuple(parts)), deadline)

    def _begin(
        self,
        state: RequestState,
        tier: str,
        keys: Sequence[BlockKey],
        sizes: Mapping[BlockKey, int],
    ) -> None:
        """These come from a tier."""
        self._end(state, keys)
        alike: dict[int, Loading] = {}
        total = 0
        for key in dict.fromkeys(keys):
            size = sizes.get(key, 0)
            loading = alike.get(size)
            if loading is None:
                loading = alike[size] = Loading(tier, size)
            state.loading[key] = loading
            total += size
        self._books.loading.update(dict.fromkeys(keys, 1))  # a Counter: it adds
        self._books.loading_bytes[tier] += total

    def _end(self, state: RequestState, keys: Iterable[BlockKey]) -> None:
        """These are not on their way for the request any more."""
        if not state.loading:
            return
        left = self._books.loading
        for key in keys:
            loading = state.loading.pop(key, None)
            if loading is None:
                continue
            count = left[key] - 1
            if count > 0:
                left[key] = count
            else:
                del left[key]
            self._books.loading_bytes[loading.tier] -= loading.size

    def _elsewhere(self, state: RequestState, key: BlockKey, tier: str | None) -> str:
        """Where a block may be that was found nowhere, or went from the host tier."""
        for view in self._books.tiers:
            mirror = self._books.mirrors.get(view.name)
            if (
                self._books.allows(state, view.name)
                and mirror is not None
                and mirror.lookup([key])[0]
            ):
                return view.name
        return tier or self._books.tier_names[-1]

    def _spec(self, state: RequestState, tier: str, keys: Sequence[BlockKey]) -> LoadStoreSpec:
        if tier != self._books.host_tier:
            view = next(view for view in self._books.tiers if view.name == tier)
            return view.spec(tier, tuple(keys))
        catalog = self._books.catalog
        here = [] if catalog is None else catalog.look_up(keys)[0]
        pins = dict(zip(here, catalog.pin(here) if catalog is not None else (), strict=True))
        state.pins.extend(pins.values())
        return CpuSpec(tuple(pins.get(key, NO_SLOT) for key in keys))

    def complete(self, request: str, keys: Collection[BlockKey]) -> None:
        """A load has ended on all ranks, well or not (`take_report` told which)."""
        state = self._books.requests.get(request)
        if state is None:  # it is over, and its load was never begun
            self._failed.discard(request)
            return
        self._unpin(state)
        self._end(state, keys)
        if request in self._failed:
            self._failed.discard(request)
            state.failed_loads += 1
        state.forget_answers()
        if state.finished and not state.loading:
            del self._books.requests[request]

    def _unpin(self, state: RequestState) -> None:
        # Where one of many raised, those that were done are not asked for again.
        if self._books.catalog is not None and state.pins:
            self._books.catalog.unpin(state.pins)
        state.pins = []

    def take_failures(self, failures: Iterable[FailedBlock]) -> None:
        """Blocks that did not come, told before the completions of the step.

        Lost blocks are forgotten at once, so that the recomputing request does not find them
        again, and no tier is asked again for a while for a block that it failed to bring, unless
        that is stored there anew. One that was too slow for a block is not asked for the others of
        that load either: who waited for them would wait for it again.
        """
        books = self._books
        until = books.clock() + books.limits.retry_backoff
        late: set[tuple[str, str]] = set()
        for failed in failures:
            state = books.requests.get(failed.request)
            loading = None if state is None else state.loading.get(failed.key)
            if state is None or loading is None:  # from before a reset: nobody waits for its end
                continue
            tier = loading.tier
            self._failed.add(failed.request)
            books.failures += 1
            if failed.status.lost:
                books.forget(tier, failed.key)
            books.backoff.add(tier, failed.key, until)
            if failed.status is BlockStatus.TIMED_OUT:
                late.add((failed.request, tier))
        for request, tier in late:
            for key, loading in books.requests[request].loading.items():
                if loading.tier == tier:
                    books.backoff.add(tier, key, until)

    def reset(self) -> None:
        """The ends of the loads that run will not be heard of.

        Their reads are guarded by the slots' generations, so that their pins can go now."""
        for state in self._books.requests.values():
            state.unsure |= bool(state.loading)
            self._unpin(state)
            state.loading.clear()
        self._books.loading.clear()
        self._books.loading_bytes.clear()
        self._failed.clear()

    def audit(self) -> tuple[str, ...]:
        """What is still in use once all loads have ended; empty in a sound program."""
        if not self._failed and not self._books.loading:
            return ()
        failed, blocks = len(self._failed), len(self._books.loading)
        return (f"{blocks} blocks are being loaded, {failed} requests have a load that failed",)
