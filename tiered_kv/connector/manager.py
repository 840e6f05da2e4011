"""The manager half: runs in the scheduler's process and decides what goes where.

It looks up, pins, places and reports; it touches no block bytes and does no I/O on the
scheduler's thread. Lookups are answered from memory: the host tier's catalog and one mirror per
store.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias

from tiered_kv.config import Recompute, TraceSettings
from tiered_kv.connector.books import Books, ManagerLimits
from tiered_kv.connector.border import Border, guarded
from tiered_kv.connector.gating import PrefixGate
from tiered_kv.connector.handshake import Handshake, agreed
from tiered_kv.connector.holding import block_tokens, held_tokens, holdings
from tiered_kv.connector.live import LiveCache, LiveView
from tiered_kv.connector.loading import LoadPlan, Loads, failing_plan
from tiered_kv.connector.lookups import NOTHING_FOUND, Lookups
from tiered_kv.connector.messages import Orders, WorkerReport
from tiered_kv.connector.promoting import Promotions
from tiered_kv.connector.recording import TraceRecorder
from tiered_kv.connector.requests import USUAL, Answer, Care, RequestState
from tiered_kv.connector.storing import StorePlan, Stores
from tiered_kv.connector.views import TierView
from tiered_kv.contracts import EvictionPolicy, PolicyContext
from tiered_kv.placement import BUILT_IN, DEFAULT_POLICY, Admission, HostCatalog
from tiered_kv.specs import SlotRef, StoreTargets
from tiered_kv.stats import StatsDelta
from tiered_kv.values import BlockKey, Fingerprint, Namespace

__all__ = ["Manager"]

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 0.3
"""Longest wait at the end for stores that are being closed."""

EPOCH_BYTES = 16

NOTHING_STORED = StorePlan((), StoreTargets(None), ())

OnReset: TypeAlias = Literal["leave", "keep", "erase"]
"""See `Deployment.on_reset`."""


class Manager:
    """Engine-neutral manager. Not thread-safe: the scheduler's thread owns it.

    After `attach` no method raises: where something of ours fails, a lookup misses, a load fails
    and its request is computed, and nothing is stored (see `tiered_kv.connector.border`).
    """

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
        on_reset: OnReset = "leave",
        recompute: Recompute | None = None,
        trace: TraceSettings | None = None,
        policy: Callable[[PolicyContext], EvictionPolicy[BlockKey]] = BUILT_IN[DEFAULT_POLICY].make,
        half_life: float | None = None,
        pin_budget: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is opened before `attach`; until then every lookup misses.

        Args:
            fingerprint: as computed in the scheduler's process.
            host_tier: name of the cpu tier, if one is configured.
            host_write: whether stores go to the cpu tier.
            tiers: store tiers, nearest first.
            limits: waits.
            world_size: number of ranks.
            min_uses: how often a block must have been wanted before it is stored.
            on_reset: what a reset does to the store tiers.
            recompute: when computing blocks is better than loading them; None: never.
            trace: where to record what requests want; None: nowhere.
            policy: makes the order in which blocks leave the host tier.
            half_life: see `PolicyContext.half_life`.
            pin_budget: share of the host tier that requests may keep blocks in.
            clock: monotonic seconds.
            wall: seconds since the epoch.
        """
        self._fingerprint = fingerprint
        self._books = Books(
            host_tier=host_tier,
            tiers=tiers,
            limits=limits,
            world_size=world_size,
            clock=clock,
            wall=wall,
        )
        self._gate = PrefixGate(self._books, recompute or Recompute(gate="off"))
        self._promotions = Promotions(self._books, self._gate.recompute_seconds)
        self._lookups = Lookups(self._books, self._gate, self._promotions)
        self._loads = Loads(self._books, self._gate)
        self._stores = Stores(
            self._books,
            Admission(min_uses),
            host_write=host_write,
            room=self._promotions.store_room,
            pin_budget=pin_budget,
        )
        self.stats = self._books.stats
        self._recorder: TraceRecorder | None = None
        if trace is not None:
            self._recorder = TraceRecorder(trace.path, trace.max_size, self.stats, clock=wall)
        self._policy, self._half_life = policy, half_life
        self._keeps_stores = on_reset == "keep"
        self._ordered_epoch: bytes | None = None
        """The ranks were not told of it yet."""
        self.border = Border(self.stats)
        self._barred: set[str] = set()
        """Requests that something went wrong with: they are computed, and not stored."""
        self._in_order = True
        """False while a reset is not through: nothing is served or stored."""

    def attach(self, handshakes: Sequence[Handshake], windows: Sequence[int | None] = ()) -> None:
        """Learn the ranks' geometry and begin to fill the mirrors.

        Args:
            handshakes: of all ranks.
            windows: by KV group, how many tokens before a position are needed to compute the token
                there; None, as for groups that are not named: all.

        Raises:
            IdentityError: scheduler and ranks, or two ranks, disagree.
        """
        books = self._books
        first = agreed(handshakes, self._fingerprint, books.world)
        books.geometry = first.geometry
        for handshake in handshakes:
            for condition in handshake.conditions:
                books.conditions.note(handshake.geometry.rank, condition)
        self._gate.windows = tuple(windows)
        if books.host_tier is not None:
            policy = self._policy(PolicyContext(first.tier_slots, self._half_life))
            books.catalog = HostCatalog(first.tier_slots, policy, clock=books.clock)
        books.mirrors.open(books.tiers, first.geometry, books.epoch)
        if self._recorder is not None:
            self._recorder.begin(first.geometry, self._gate.windows)

    def view(self) -> LiveView:
        """For `tiered-kv top` and `plan`; any thread."""
        books, cache = self._books, None
        if books.geometry is not None:
            cache = LiveCache.of(books.geometry.groups, books.world, books.host_tier)
        rates = {name: books.conditions.load_rate(name) for name in self.tier_names}
        return LiveView(
            source="manager",
            namespace=Namespace(self._fingerprint).id.hex(),
            pid=os.getpid(),
            tiers={},
            modes={},
            stats=self.stats.snapshot(),
            cache=cache,
            load_rates={name: rate for name, rate in rates.items() if rate is not None},
        )

    @property
    def tier_names(self) -> tuple[str, ...]:
        """All tiers, nearest first."""
        return self._books.tier_names

    # Requests

    def bar(self, request: str, *_: object) -> None:
        """Something went wrong with the request: serve it nothing, and store nothing of it."""
        self._barred.add(request)
        state = self._books.requests.get(request)
        if state is not None:
            state.drop_answers()

    def _bars(self, request: str) -> bool:
        return not self._in_order or request in self._barred

    @guarded(bar)
    def on_new_request(
        self, request: str, tiers: frozenset[str] | None = None, care: Care = USUAL
    ) -> None:
        """A request was added.

        Args:
            request: its id.
            tiers: tiers that may answer it; None means all.
            care: how its blocks are to be kept.
        """
        self._barred.discard(request)
        state = RequestState(tiers, care)
        before = self._books.requests.get(request)
        if before is not None:  # an id that is used again while a load of it runs
            self._books.end_lease(request)
            state.loading, state.pins = before.loading, before.pins
        self._books.requests[request] = state

    @guarded(bar)
    def keep_in_host(self, request: str) -> None:
        """The request's blocks can't be named for other processes (an adapter whose files have no
        identity), so they stay in the host tier. Called before its first lookup."""
        self._books.state(request).host_only = True

    @guarded(lambda *_: None)
    def note_answer(self, request: str, tokens: int) -> None:
        """The request was answered with so many tokens; called before it is over."""
        if self._recorder is not None:
            self._recorder.answered(request, tokens)

    def on_request_finished(self, request: str) -> None:
        """A request is over: its leases end. Its running jobs still complete."""
        recorder = self._recorder
        if recorder is not None:
            self.border.call("TraceRecorder.finished", lambda: recorder.finished(request), None)
        self._barred.discard(request)
        self.border.insist("Manager.on_request_finished", lambda: self._finish(request))

    def _finish(self, request: str) -> None:
        state = self._books.requests.get(request)
        if state is None:
            return
        self._books.end_lease(request)
        state.finished = True
        if state.loading:
            state.forget_answers()
        else:
            del self._books.requests[request]

    # Lookup

    @guarded(lambda *_: False)
    def still_holds(self, request: str, computed: int, mark: object) -> bool:
        """Whether a `lookup` of the request with this `computed` and `mark` would change nothing;
        looks at no key. An engine asks that at each of its steps while a request waits."""
        return not self._bars(request) and self._lookups.still_holds(request, computed, mark)

    @guarded(bar)
    def lookup(
        self,
        request: str,
        keys: Sequence[BlockKey],
        computed: int,
        tokens: int | None = None,
        mark: object = None,
    ) -> None:
        """Ask all tiers about all keys of a request at once; `answer` reads what was found and is
        worth loading.

        Args:
            request: its id.
            keys: those of all its whole blocks, group by group.
            computed: tokens that the engine holds itself.
            tokens: tokens of the request so far. None: everything that is found is loaded.
            mark: stands for the keys, and is equal while they are; None: they do so themselves.

        How long the answers are kept, `Lookups.lookup` says.
        """
        if not self._bars(request):
            self._lookups.lookup(request, keys, computed, tokens, mark)
            recorder = self._recorder
            if recorder is not None:  # its failures bar no request
                state = self._books.state(request)
                record = partial(recorder.looked_up, request, state, keys, computed, tokens)
                self.border.call("TraceRecorder.looked_up", record, None)

    @guarded(lambda *_: Answer.MISS)
    def answer(self, request: str, key: BlockKey) -> Answer:
        """What the last `lookup` of the request found; MISS for a key that it did not ask."""
        return Answer.MISS if self._bars(request) else self._lookups.answer(request, key)

    @guarded(lambda *_: NOTHING_FOUND)
    def answers(self, request: str) -> Mapping[BlockKey, Answer]:
        """All of them; what is not in it is a miss. It changes with them: not to be kept."""
        return NOTHING_FOUND if self._bars(request) else self._lookups.answers(request)

    @guarded(lambda *_: None)
    def source(self, request: str, key: BlockKey) -> str | None:
        """Tier that a block of the request's running load, or its last hit, comes from."""
        return self._lookups.source(request, key)

    # Loads

    def _fail_load(self, request: str, keys: Sequence[BlockKey]) -> LoadPlan:
        self.bar(request)
        return failing_plan(keys)

    @guarded(_fail_load)
    def prepare_load(self, request: str, keys: Sequence[BlockKey]) -> LoadPlan:
        """Say where each block lies now, and pin what lies in the host tier.

        A block that vanished since the lookup is still named in some tier: its load fails and it
        is recomputed.
        """
        if self._bars(request):
            return failing_plan(keys)
        plan = self._loads.prepare(request, keys)
        self._promotions.used(keys)
        return plan

    def complete_load(self, request: str, keys: Collection[BlockKey]) -> None:
        """A load has ended on all ranks, well or not (`take_report` told which)."""
        self.border.insist("Loads.complete", lambda: self._loads.complete(request, keys))

    # Stores

    @guarded(lambda *_: NOTHING_STORED)
    def prepare_store(self, request: str, keys: Sequence[BlockKey]) -> StorePlan:
        """Choose what of these blocks is stored, and where. Never waits; may choose nothing."""
        if self._bars(request):
            return NOTHING_STORED
        return self._stores.prepare(request, keys)

    def complete_store(self, keys: Collection[BlockKey]) -> None:
        """The first hop of a store has ended on all ranks, well or not."""
        self.border.insist("Stores.complete", lambda: self._stores.complete(keys))

    # News from the ranks, and for them

    @guarded(lambda *_: None)
    def take_report(self, report: WorkerReport) -> None:
        """Hear what failed, what was released and how the ranks find the tiers; call it before
        the completions of the step."""
        books, insist = self._books, self.border.insist
        loads = [failed for failed in report.failed_loads if failed.resets == books.resets]
        stores = [failed for failed in report.failed_stores if failed.resets == books.resets]
        insist("Loads.take_failures", lambda: self._loads.take_failures(loads))
        insist("Stores.take_failures", lambda: self._stores.take_failures(stores))
        insist("Promotions.take", lambda: self._promotions.take(report.promoted))
        left = deque(report.released)
        insist("Manager.released", lambda: self._release(left))
        for rank, condition in report.conditions:
            books.conditions.note(rank, condition)
        for rank, wear in report.worn:
            books.wear.note(rank, wear)

    def _release(self, left: deque[tuple[int, SlotRef]]) -> None:
        while left and self._books.catalog is not None:
            rank, slot = left[0]
            self._books.catalog.release(slot, rank)
            left.popleft()

    @guarded(lambda self: Orders(resets=self._books.resets))
    def take_orders(self) -> Orders:
        """What the ranks are to do beside the engine's jobs; goes out with the step's message."""
        epoch, self._ordered_epoch = self._ordered_epoch, None
        return Orders(self._promotions.take_orders(), epoch, self._books.resets)

    # The engine's speed

    @guarded(lambda *_: None)
    def note_step(self, tokens: int, seconds: float) -> None:
        """A step of the engine computed so many tokens of prompts in so many seconds, in which it
        waited for nothing else. What was loaded does not count, nor do tokens of answers."""
        self._gate.prefill.note(tokens, seconds)

    @property
    def prefill_rate(self) -> float | None:
        """Tokens of prompts that the engine computes per second, as measured or configured; None
        while that is not known."""
        return self._gate.prefill.tokens_per_second

    # Reset, statistics, end

    def reset(self) -> None:
        """No block stored before this call is served to this engine again.

        Waits for nothing. The host tier starts empty. Store tiers go on under a new epoch of this
        engine's namespace, in which nothing is found yet; what they hold is left for other engines
        and for a restart. Until they are open anew they miss, and nothing is stored in them. (With
        `on_reset: keep` they go on as they are, and so does what they hold.)
        """
        self._books.resets += 1
        self._in_order = False
        self.border.insist("Manager.reset", self._reset)

    def _reset(self) -> None:
        books = self._books
        self._loads.reset()
        self._stores.reset()
        self._promotions.reset()
        if books.catalog is not None:
            books.catalog.reset()
        if not self._keeps_stores:
            self._begin_epoch()
        for name, state in list(books.requests.items()):
            if state.finished:
                del books.requests[name]
            state.forget_answers()
        self._in_order = True

    def _begin_epoch(self) -> None:
        books = self._books
        books.epoch = self._ordered_epoch = secrets.token_bytes(EPOCH_BYTES)
        books.backoff.clear()
        books.mirrors.leave()
        if books.geometry is not None:
            books.mirrors.open(books.tiers, books.geometry, books.epoch)
        if books.tiers:
            logger.info(
                "cache reset: tiers %s go on under epoch %s",
                ", ".join(tier.name for tier in books.tiers),
                books.epoch.hex(),
            )

    @guarded(lambda *_: None)
    def take_stats(self) -> StatsDelta | None:
        """What was counted since the last call, with the gauges of now; None if nothing."""
        books = self._books
        if books.catalog is not None and books.host_tier is not None and books.geometry is not None:
            slot_bytes = books.geometry.slot_bytes
            self.stats.occupancy(
                books.host_tier,
                resident_blocks=books.catalog.resident,
                used_bytes=books.catalog.resident * slot_bytes,
                capacity_bytes=books.catalog.slots * slot_bytes,
                pinned_blocks=books.catalog.pinned,
            )
        rate = self.prefill_rate
        if rate is not None:
            self.stats.prefill(self._gate.mode, rate)
        return self.stats.take()

    @property
    def tracked_requests(self) -> int:
        """Requests that are remembered; none is after the last has finished."""
        return len(self._books.requests)

    def audit(self) -> tuple[str, ...]:
        """What is still in use, or wrong in the books, once no request is left and the ranks have
        reported everything; empty in a sound program. For tests; O(slots)."""
        wrong: list[str] = []
        if self.border.due:
            wrong.append(f"{self.border.due} pieces of work failed, and are due")
        if self._barred:
            wrong.append(f"requests are barred: {', '.join(sorted(self._barred))}")
        if self._books.requests:
            wrong.append(f"requests are remembered: {', '.join(sorted(self._books.requests))}")
        wrong.extend(self._loads.audit())
        wrong.extend(self._stores.audit())
        wrong.extend(self._promotions.audit())
        kept = self._promotions.kept + self._stores.kept
        catalog = self._books.catalog
        if catalog is not None:
            wrong.extend(catalog.audit())
            counts = catalog.counts
            leased = counts.leased > kept
            if counts.pinned or counts.storing or counts.held or counts.orphaned or leased:
                wrong.append(f"host slots are in use: {counts}")
        return tuple(wrong)

    def held(self, keys: Sequence[BlockKey], tokens: int) -> Mapping[str, int]:
        """By store tier, how many tokens of a prefix could be loaded from it alone, as its mirror
        knows; 0 where it is not ready. Counts as no lookup.

        Args:
            keys: of all whole blocks of the prefix, KV group by KV group.
            tokens: length of the prefix.
        """
        geometry = self._books.geometry
        sizes = [] if geometry is None else [group.tokens for group in geometry.groups]
        found: dict[str, int] = {}
        for name, mirror in self._books.mirrors.items():
            there = [known is True for known in mirror.lookup(keys)]
            found[name] = held_tokens(holdings(there, tokens, sizes, self._gate.windows))
        return found

    @property
    def block_tokens(self) -> int:
        """Tokens after which all KV groups have whole blocks; 0 until the ranks have reported."""
        geometry = self._books.geometry
        return 0 if geometry is None else block_tokens([g.tokens for g in geometry.groups])

    def states(self) -> Mapping[str, str]:
        """State of each store tier's mirror, for logs and tests."""
        return {name: mirror.state for name, mirror in self._books.mirrors.items()}

    def close(self) -> None:
        """Let go of the mirrors, waiting at most `CLOSE_SECONDS` for all of them. Idempotent."""
        self.border.call("Mirrors.close", lambda: self._books.mirrors.close(CLOSE_SECONDS), None)
        recorder = self._recorder
        if recorder is not None:
            self.border.call("TraceRecorder.close", lambda: recorder.close(CLOSE_SECONDS), False)
