"""The manager half: runs in the scheduler's process and decides what goes where.

It looks up, pins, places and reports; it touches no block bytes and does no I/O on the
scheduler's thread. Lookups are answered from memory: the host tier's catalog and one mirror per
store.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from tiered_kv.connector.backoff import Backoff
from tiered_kv.connector.handshake import Handshake, agreed
from tiered_kv.connector.messages import WorkerReport
from tiered_kv.connector.requests import Answer, RequestState
from tiered_kv.connector.views import Mirrors, TierView
from tiered_kv.placement import Admission, HostCatalog, LruPolicy, SlotState
from tiered_kv.specs import CpuSpec, LoadStoreSpec, Part, Parts, SlotRef, StoreTargets
from tiered_kv.stats import StatsDelta, StatsRecorder
from tiered_kv.values import BlockKey, Fingerprint

__all__ = ["Manager", "ManagerLimits", "StorePlan"]

logger = logging.getLogger(__name__)

MAX_FAILED_LOADS = 2
"""A request whose loads failed this often is computed."""

CLOSE_SECONDS = 1.0
"""Longest wait at the end for stores that are being closed."""

NO_SLOT = SlotRef(0, -1)
"""A slot under a generation that was never given out: a load from it finds nothing."""


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """Waits of the manager, in seconds."""

    lookup_wait: float
    retry_backoff: float
    lease: float = 10.0
    """How long a lookup's answer protects host blocks that are not loaded yet."""


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What of a store is accepted, in the order in which it was asked."""

    keys: tuple[BlockKey, ...]
    targets: StoreTargets
    evicted: tuple[BlockKey, ...]


class Manager:
    """Engine-neutral manager. Not thread-safe: the scheduler's thread owns it."""

    def __init__(
        self,
        *,
        fingerprint: Fingerprint,
        host_tier: str | None,
        host_write: bool,
        tiers: Sequence[TierView],
        limits: ManagerLimits,
        world_size: int,
        min_uses: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is opened before `attach`; until then every lookup misses.

        Args:
            fingerprint: as computed in the scheduler's process.
            host_tier: name of the cpu tier, if one is configured.
            host_write: whether stores go to the cpu tier.
            tiers: store tiers, nearest first.
            limits: waits.
            world_size: number of ranks.
            min_uses: how often a block must have been computed before it is stored.
            clock: monotonic seconds.
        """
        self._fingerprint = fingerprint
        self._host_tier = host_tier
        self._host_write = host_write
        self._tiers = tuple(tiers)
        self._limits = limits
        self._world = world_size
        self._clock = clock
        self._admission = Admission(min_uses)
        self._catalog: HostCatalog | None = None
        self._slot_bytes = 0
        self._mirrors = Mirrors()
        """Mirrors that were told to let go and not waited for."""
        self._requests: dict[str, RequestState] = {}
        self._backoff = Backoff(clock)
        self._storing: dict[BlockKey, SlotRef | None] = {}
        """Blocks whose first hop has not ended on all ranks, with their host slot."""
        self._bad_stores: set[BlockKey] = set()
        self._failed_requests: set[str] = set()
        self._failures = 0
        self.stats = StatsRecorder("manager")

    def attach(self, handshakes: Sequence[Handshake]) -> None:
        """Learn the ranks' geometry and begin to fill the mirrors.

        Raises:
            IdentityError: scheduler and ranks, or two ranks, disagree.
        """
        first = agreed(handshakes, self._fingerprint, self._world)
        self._slot_bytes = first.geometry.slot_bytes
        if self._host_tier is not None:
            self._catalog = HostCatalog(first.tier_slots, LruPolicy(), clock=self._clock)
        for tier in self._tiers:
            self._mirrors[tier.name] = tier.mirror(first.geometry)

    @property
    def tier_names(self) -> tuple[str, ...]:
        """All tiers, nearest first."""
        host = () if self._host_tier is None else (self._host_tier,)
        return host + tuple(tier.name for tier in self._tiers)

    # Requests

    def on_new_request(self, request: str, tiers: frozenset[str] | None = None) -> None:
        """A request was added.

        Args:
            request: its id.
            tiers: tiers that may answer it; None means all.
        """
        state = RequestState(tiers)
        before = self._requests.get(request)
        if before is not None:  # an id that is used again while a load of it runs
            self._end_lease(request)
            state.loading, state.pins = before.loading, before.pins
        self._requests[request] = state

    def keep_in_host(self, request: str) -> None:
        """The request's blocks can't be named for other processes (an adapter whose files have no
        identity), so they stay in the host tier. Called before its first lookup."""
        self._state(request).host_only = True

    def on_request_finished(self, request: str) -> None:
        """A request is over: its leases end. Its running jobs still complete."""
        state = self._requests.get(request)
        if state is None:
            return
        self._end_lease(request)
        state.finished = True
        if state.loading:
            state.forget_answers()
        else:
            del self._requests[request]

    def _state(self, request: str) -> RequestState:
        return self._requests.setdefault(request, RequestState(None))

    # Lookup

    def lookup(self, request: str, keys: Sequence[BlockKey], computed: int) -> None:
        """Ask all tiers about all keys of a request at once; `answer` reads what was found.

        The answers are kept until they are used, until `computed` (tokens that the engine holds
        itself) changes, until a load of any request fails, or until the lease ends.
        """
        state = self._state(request)
        now = self._clock()
        fresh = state.computed == computed and state.failures == self._failures
        fresh = fresh and now - state.answered_at < self._limits.lease
        if fresh and state.settled() and all(key in state.answers for key in keys):
            return
        self._end_lease(request)
        first = state.asked_since is None
        if first:
            state.asked_since = now
        waited = now - (state.asked_since or now) >= self._limits.lookup_wait
        state.computed, state.answered_at, state.failures = computed, now, self._failures
        if state.failed_loads >= MAX_FAILED_LOADS:
            state.answers = dict.fromkeys(keys, Answer.MISS)
        else:
            self._ask(state, keys, now)
            if waited:
                for key, answer in state.answers.items():
                    if answer in (Answer.PENDING, Answer.RETRY):
                        state.answers[key] = Answer.MISS
        if first:
            self._count(state)
        if state.settled():
            state.asked_since = None
        if self._catalog is not None and self._host_tier is not None:
            hits = [k for k, tier in state.sources.items() if tier == self._host_tier]
            self._catalog.lease(hits, request, now + self._limits.lease)

    def _ask(self, state: RequestState, keys: Sequence[BlockKey], now: float) -> None:
        state.answers = {}
        state.sources = {}
        open_keys: list[BlockKey] = []
        host = self._host_tier if self._allows(state, self._host_tier) else None
        for key in keys:
            found = None
            if (
                host is not None
                and self._catalog is not None
                and not self._backoff.holds(host, key, now)
            ):
                found = self._catalog.lookup(key)
            if found is SlotState.READY and host is not None:
                state.answers[key] = Answer.HIT
                state.sources[key] = host
                continue
            if found is SlotState.STORING or (host is None and key in self._storing):
                state.answers[key] = Answer.PENDING
            open_keys.append(key)
        for tier in self._tiers:
            if not open_keys or not self._allows(state, tier.name):
                continue
            mirror = self._mirrors.get(tier.name)
            if mirror is None:
                continue
            still_open: list[BlockKey] = []
            for key, known in zip(open_keys, mirror.lookup(open_keys), strict=True):
                if known is not False and self._backoff.holds(tier.name, key, now):
                    still_open.append(key)
                    continue
                if known:
                    state.answers[key] = Answer.HIT
                    state.sources[key] = tier.name
                    continue
                if known is None:
                    state.answers.setdefault(key, Answer.RETRY)
                still_open.append(key)
            open_keys = still_open
        for key in open_keys:
            state.answers.setdefault(key, Answer.MISS)

    def _allows(self, state: RequestState, tier: str | None) -> bool:
        if tier is None or (state.host_only and tier != self._host_tier):
            return False
        return state.tiers is None or tier in state.tiers

    def _count(self, state: RequestState) -> None:
        hits = Counter(state.sources.values())
        for tier in self.tier_names:
            if self._allows(state, tier):
                self.stats.lookup(tier, hits=hits[tier], misses=len(state.answers) - hits[tier])

    def answer(self, request: str, key: BlockKey) -> Answer:
        """What the last `lookup` of the request found; MISS for a key that it did not ask."""
        state = self._requests.get(request)
        return Answer.MISS if state is None else state.answers.get(key, Answer.MISS)

    def source(self, request: str, key: BlockKey) -> str | None:
        """Tier that a block of the request's running load, or its last hit, comes from."""
        state = self._requests.get(request)
        if state is None:
            return None
        return state.loading.get(key) or state.sources.get(key)

    def _end_lease(self, request: str) -> None:
        if self._catalog is not None:
            self._catalog.end_lease(request)

    # Loads

    def prepare_load(self, request: str, keys: Sequence[BlockKey]) -> Parts:
        """Say where each block lies now, and pin what lies in the host tier.

        A block that vanished since the lookup is still named in some tier: its load fails and it
        is recomputed.
        """
        state = self._state(request)
        self._end_lease(request)
        positions: dict[str, list[int]] = {}
        for position, key in enumerate(keys):
            tier = self._where(state, key)
            state.loading[key] = tier
            positions.setdefault(tier, []).append(position)
        parts = [
            Part(self._spec(state, tier, [keys[i] for i in chosen]), tuple(chosen))
            for tier, chosen in positions.items()
        ]
        state.answers = {}
        state.sources = {}
        return Parts(tuple(parts))

    def _where(self, state: RequestState, key: BlockKey) -> str:
        tier = state.sources.get(key)
        if tier is not None and tier != self._host_tier:
            return tier
        catalog, host = self._catalog, self._host_tier
        if catalog is not None and host and catalog.lookup(key) is SlotState.READY:
            return host
        for view in self._tiers:
            mirror = self._mirrors.get(view.name)
            if self._allows(state, view.name) and mirror is not None and mirror.lookup([key])[0]:
                return view.name
        return tier or self.tier_names[-1]

    def _spec(self, state: RequestState, tier: str, keys: Sequence[BlockKey]) -> LoadStoreSpec:
        if tier != self._host_tier:
            view = next(view for view in self._tiers if view.name == tier)
            return view.spec(tier, tuple(keys))
        catalog = self._catalog
        here = [
            key for key in keys if catalog is not None and catalog.lookup(key) is SlotState.READY
        ]
        pins = dict(zip(here, catalog.pin(here) if catalog is not None else (), strict=True))
        state.pins.extend(pins.values())
        return CpuSpec(tuple(pins.get(key, NO_SLOT) for key in keys))

    def complete_load(self, request: str, keys: Collection[BlockKey]) -> None:
        """A load has ended on all ranks, well or not (`take_report` told which)."""
        state = self._state(request)
        self._unpin(state)
        for key in keys:
            state.loading.pop(key, None)
        if request in self._failed_requests:
            self._failed_requests.discard(request)
            state.failed_loads += 1
        state.forget_answers()
        if state.finished and not state.loading:
            del self._requests[request]

    def _unpin(self, state: RequestState) -> None:
        if self._catalog is not None:
            self._catalog.unpin(state.pins)
        state.pins = []

    # Stores

    def prepare_store(self, request: str, keys: Sequence[BlockKey]) -> StorePlan:
        """Choose what of these blocks is stored, and where. Never waits; may choose nothing."""
        state = self._state(request)
        wanted = [key for key in dict.fromkeys(keys) if key not in self._storing]
        wanted = self._admission.admitted(wanted)
        present = {
            tier.name: self._mirrors[tier.name].lookup(wanted)
            for tier in self._tiers
            if tier.write and tier.name in self._mirrors and not state.host_only
        }
        absent = {
            name: {key for key, known in zip(wanted, found, strict=True) if not known}
            for name, found in present.items()
        }
        evicted: tuple[BlockKey, ...] = ()
        slots: Mapping[BlockKey, SlotRef] = {}
        first: CpuSpec | None = None
        if self._catalog is not None and self._host_write:
            missing = [key for key in wanted if self._catalog.lookup(key) is None]
            # All of them, so that the end of a prefix does not drive out its beginning.
            given = self._catalog.allocate(wanted, self._world)
            chosen = [key for key in missing if key in given.slots]
            evicted = given.evicted
            slots = given.slots
            if self._host_tier is not None:
                self.stats.evicted(self._host_tier, len(evicted))
            dropped = len(missing) - len(chosen)
            if dropped and self._host_tier is not None:
                self.stats.dropped(self._host_tier, "slots", dropped)
            first = CpuSpec(tuple(slots[key] for key in chosen))
            if self._host_tier is not None:
                self._backoff.drop(self._host_tier, chosen)
        else:
            chosen = [key for key in wanted if any(key in keys for keys in absent.values())]
        behind: list[Part] = []
        for tier in self._tiers:
            positions = tuple(i for i, k in enumerate(chosen) if k in absent.get(tier.name, ()))
            if positions:
                spec = tier.spec(tier.name, tuple(chosen[i] for i in positions))
                behind.append(Part(spec, positions))
                self._backoff.drop(tier.name, spec.keys)
        self._storing.update((key, slots.get(key)) for key in chosen)
        return StorePlan(tuple(chosen), StoreTargets(first, tuple(behind)), evicted)

    def complete_store(self, keys: Collection[BlockKey]) -> None:
        """The first hop of a store has ended on all ranks, well or not."""
        good: list[SlotRef] = []
        bad: list[SlotRef] = []
        # In the order in which they were prepared: `keys` is a set, a prefix has an order.
        ended = set(keys)
        for key in [key for key in self._storing if key in ended]:
            slot = self._storing.pop(key)
            failed = key in self._bad_stores
            self._bad_stores.discard(key)
            if slot is not None:
                (bad if failed else good).append(slot)
        if self._catalog is not None:
            self._catalog.stored(good)
            self._catalog.store_failed(bad)

    # News from the ranks

    def take_report(self, report: WorkerReport) -> None:
        """Hear what failed and what was released; call it before the completions of the step.

        Lost blocks are forgotten at once, so that the recomputing request does not find them
        again, and no tier is asked again for a while for a block that it failed to bring, unless
        that is stored there anew.
        """
        until = self._clock() + self._limits.retry_backoff
        for failed in report.failed_loads:
            state = self._requests.get(failed.request)
            tier = None if state is None else state.loading.get(failed.key)
            if tier is None:  # of a load from before a reset, whose end nobody waits for
                continue
            self._failed_requests.add(failed.request)
            self._failures += 1
            if failed.status.lost:
                self._forget(tier, failed.key)
            self._backoff.add(tier, failed.key, until)
        self._bad_stores.update(f.key for f in report.failed_stores if f.key in self._storing)
        if self._catalog is not None:
            for rank, slot in report.released:
                self._catalog.release(slot, rank)

    def _forget(self, tier: str, key: BlockKey) -> None:
        if tier == self._host_tier and self._catalog is not None:
            self._catalog.forget([key])
        elif tier in self._mirrors:
            self._mirrors[tier].forget([key])

    # Reset, statistics, end

    def reset(self) -> None:
        """No block stored before this call is served to this engine again.

        Waits for nothing. The host tier starts empty. Store tiers are left as they are, for other
        engines and for a restart, but this engine does not use them any more: it can't tell its
        own older rows from rows of changed weights.
        """
        if self._catalog is not None:
            # Completions of loads from before a reset never arrive. Their reads are guarded by the
            # slots' generations, so the pins can go now.
            for state in self._requests.values():
                self._unpin(state)
            self._catalog.reset()
        if self._mirrors:
            logger.warning(
                "cache reset: tiers %s are not used by this engine until it is restarted",
                ", ".join(self._mirrors),
            )
        self._mirrors.leave()
        self._storing.clear()
        self._bad_stores.clear()
        self._failed_requests.clear()
        self._requests = {r: state for r, state in self._requests.items() if not state.finished}
        for state in self._requests.values():
            state.forget_answers()
            state.loading.clear()

    def take_stats(self) -> StatsDelta | None:
        """What was counted since the last call, with the gauges of now; None if nothing."""
        if self._catalog is not None and self._host_tier is not None:
            self.stats.occupancy(
                self._host_tier,
                resident_blocks=self._catalog.resident,
                used_bytes=self._catalog.resident * self._slot_bytes,
                capacity_bytes=self._catalog.slots * self._slot_bytes,
                pinned_blocks=self._catalog.pinned,
            )
        return self.stats.take()

    @property
    def tracked_requests(self) -> int:
        """Requests that are remembered; none is after the last has finished."""
        return len(self._requests)

    def audit(self) -> tuple[str, ...]:
        """What is still in use, or wrong in the books, once no request is left and the ranks have
        reported everything; empty in a sound program. For tests; O(slots)."""
        wrong: list[str] = []
        if self._requests:
            wrong.append(f"requests are remembered: {', '.join(sorted(self._requests))}")
        if self._storing or self._bad_stores or self._failed_requests:
            wrong.append(
                f"{len(self._storing)} blocks are being stored, {len(self._bad_stores)} of a store "
                f"that failed, {len(self._failed_requests)} requests have a load that failed"
            )
        if self._catalog is not None:
            wrong.extend(self._catalog.audit())
            counts = self._catalog.counts
            if counts.pinned or counts.storing or counts.held or counts.orphaned or counts.leased:
                wrong.append(f"host slots are in use: {counts}")
        return tuple(wrong)

    def states(self) -> Mapping[str, str]:
        """State of each store tier's mirror, for logs and tests."""
        return {name: mirror.state for name, mirror in self._mirrors.items()}

    def close(self) -> None:
        """Let go of the mirrors, waiting at most `CLOSE_SECONDS` for all of them. Idempotent."""
        self._mirrors.close(CLOSE_SECONDS)
