"""Loads: where each block of a load lies now, and what becomes of those that do not come."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tiered_kv.connector.books import Books
from tiered_kv.connector.gating import PrefixGate
from tiered_kv.connector.messages import FailedBlock
from tiered_kv.connector.requests import Loading, RequestState
from tiered_kv.placement import SlotState
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
        positions: dict[str, list[int]] = {}
        for position, key in enumerate(keys):
            tier = self._where(state, key)
            self._begin(state, key, Loading(tier, sizes.get(key, 0)))
            positions.setdefault(tier, []).append(position)
        parts = [
            Part(self._spec(state, tier, [keys[i] for i in chosen]), tuple(chosen))
            for tier, chosen in positions.items()
        ]
        state.answers = {}
        state.sources = {}
        return LoadPlan(Parts(tuple(parts)), deadline)

    def _begin(self, state: RequestState, key: BlockKey, loading: Loading) -> None:
        self._end(state, key)
        state.loading[key] = loading
        self._books.loading[key] += 1
        self._books.loading_bytes[loading.tier] += loading.size

    def _end(self, state: RequestState, key: BlockKey) -> None:
        loading = state.loading.pop(key, None)
        if loading is not None:
            self._books.loading[key] -= 1
            if self._books.loading[key] <= 0:
                del self._books.loading[key]
            self._books.loading_bytes[loading.tier] -= loading.size

    def _where(self, state: RequestState, key: BlockKey) -> str:
        tier = state.sources.get(key)
        if tier is not None and tier != self._books.host_tier:
            return tier
        catalog, host = self._books.catalog, self._books.host_tier
        if catalog is not None and host and catalog.lookup(key) is SlotState.READY:
            return host
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
        here = [
            key for key in keys if catalog is not None and catalog.lookup(key) is SlotState.READY
        ]
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
        for key in keys:
            self._end(state, key)
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
