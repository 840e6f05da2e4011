"""The transfer engine: takes jobs, runs their chains, answers per block."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from tiered_kv.complaints import Complaints
from tiered_kv.contracts import BlockStore, HandlerContext, TransferHandler, VerifyMode
from tiered_kv.engine.attachments import Attachments
from tiered_kv.engine.direct import DeviceStagingFactory, DirectHops
from tiered_kv.engine.health import HealthBoard
from tiered_kv.engine.hops import LiveHop
from tiered_kv.engine.jobs import Active, JobTable, check_job
from tiered_kv.engine.lanes import Lanes, is_load
from tiered_kv.engine.limits import EngineLimits
from tiered_kv.engine.loop import LoopThread
from tiered_kv.engine.movers import Movers
from tiered_kv.engine.probing import Prober
from tiered_kv.engine.recent import RecentKeys
from tiered_kv.engine.standing import Standing
from tiered_kv.engine.verification import TierVerification
from tiered_kv.engine.wear import WriteMeter
from tiered_kv.memory import HostBlockPool, KVCaches, make_staging
from tiered_kv.registry import TransferRegistry
from tiered_kv.routing import CPU_ENDPOINT, GPU_ENDPOINT, Hop, HopCost, Router
from tiered_kv.specs import JobResult, KeySpec, LoadJob, PromoteJob, SlotRef, StoreJob
from tiered_kv.stats import StatsRecorder, TierCondition, TierWear
from tiered_kv.values import BlockStatus, CacheGeometry, JobId

__all__ = ["TransferEngine"]

logger = logging.getLogger(__name__)

GIVE_UP_SHARE = 0.1
"""Share of `close`'s timeout that is kept for giving up what did not end by itself."""


def _nothing() -> None:
    """Nobody waits for it."""


def _yes() -> bool:
    return True


class TransferEngine:
    """Runs the jobs of one rank.

    An asyncio loop in a daemon thread of its own; blocking calls run in bounded daemon threads, a
    set per tier and direction, so that a tier that hangs takes nothing from others, and loads
    never queue behind stores. All public methods are thread-safe; none blocks but `wait`, `drain`
    and `close`, which take a timeout, and `attach`, which makes handlers.
    """

    def __init__(
        self,
        *,
        registry: TransferRegistry,
        geometry: CacheGeometry,
        memory: HostBlockPool,
        tiers: Mapping[str, type[KeySpec]],
        limits: EngineLimits,
        stats: StatsRecorder,
        caches: KVCaches | None,
        verify: Mapping[str, VerifyMode] = MappingProxyType({}),
        write_budgets: Mapping[str, int] = MappingProxyType({}),
        device_staging: DeviceStagingFactory = make_staging,
    ) -> None:
        """Start the loop and make the handlers between engine and host memory. Every tier is
        "opening" until it is attached; without `caches` nothing moves to or from the engine.
        `verify` says when the blocks of a tier are compared with their checksums, always where it
        says nothing of it; `write_budgets` how many bytes this rank may write to a tier per day
        where its store does not count them. `device_staging` gives direct hops their memory on the
        engine's device.

        Raises:
            ValueError: a tier is named "gpu" or "cpu".
            RefuseToStart: the engine's caches cannot be copied safely.
        """
        self._registry = registry
        self._geometry = geometry
        self._memory = memory
        self._tiers = dict(tiers)
        self._limits = limits
        self._stats = stats
        self._caches = caches
        self._verification = {
            tier: TierVerification(verify.get(tier, VerifyMode.ALWAYS), tier, stats)
            for tier in (CPU_ENDPOINT.tier, *self._tiers)
        }
        self._meter = WriteMeter(write_budgets, stats)
        self._closing = threading.Lock()
        self._clean: bool | None = None
        group = max(1, limits.group_bytes // memory.slot_bytes)
        self._router = Router(registry, tiers, self._cost, memory.slot_bytes, group)
        self._lanes = Lanes(limits, spare=int(memory.spare_slots > 0))
        self._jobs = JobTable(stats)
        self._board = HealthBoard(
            self._router.hops(),
            limit=limits.threads_per_tier,
            rules=limits.breaker(),
            changed=self._health_changed,
        )
        self._standing = Standing(
            self._router.hops(), self._board, self._router, self._tiers, stats
        )
        self._recent = {tier: RecentKeys() for tier in self._tiers}
        self._when_gone: Callable[[str, BlockStore, str], None] = _to_nobody
        self._loop = LoopThread("tiered-kv-engine")
        try:
            self._hops = self._make_hops()
            self._prober = Prober(
                {
                    hop.tier: (live, self._tiers[hop.tier], self._recent[hop.tier])
                    for hop, live in self._hops.items()
                    if _is_read(hop)
                },
                loop=self._loop,
                board=self._board,
                memory=memory,
                jobs=self._jobs,
                stats=stats,
                limit=limits.load_deadline,
                ticked=self._refresh,
            )
            self._direct = DirectHops(self._hops, geometry, caches, device_staging)
            self._attachments = Attachments(
                self._hops,
                self._board,
                make=self._make_handler,
                attached=self._direct.attached,
                has_caches=lambda: self._caches is not None,
            )
            self._movers = Movers(
                loop=self._loop,
                jobs=self._jobs,
                router=self._router,
                hops=self._hops,
                memory=memory,
                stats=stats,
                limits=limits,
                meter=self._meter,
                tiers=len(self._tiers),
            )
            self._attachments.attach_memory()
        except BaseException:
            self._loop.stop(1.0)
            raise
        self._standing.note()
        self._prober.start()

    # ----------------------------------------------------------------------------------- tiers

    @property
    def router(self) -> Router:
        """Chooses chains by what this engine measures."""
        return self._router

    def attach(
        self,
        tier: str,
        store: BlockStore,
        *,
        released: Callable[[], None] = _nothing,
        wanted: Callable[[], bool] = _yes,
    ) -> bool:
        """A tier's store is open: make its handlers and use them from now on, in place of those of
        the store that served before. Calls that run end on what they began with.

        Called on a thread that may block. A handler that cannot be made leaves its hop out of use
        (where it raises `UnsupportedError`, that is no fault of the tier).

        Args:
            tier: its name.
            store: open.
            released: called once, on a thread that may block, when the store was replaced or taken
                away (`detach`), or was not taken, and no call on it runs any more: it can be
                closed then. `close` of the engine does not call it.
            wanted: asked right before the store begins to serve; quick. False: it is not taken. A
                `detach` that came after the condition changed is never undone by this.

        Returns:
            Whether the store serves: it was wanted, and the engine is not closed.

        Raises:
            ValueError: no such tier.
        """
        self._check_tier(tier)
        self._recent[tier].clear()
        self._meter.opened(tier, store)
        return self._attachments.attach(tier, store, released, wanted)

    def detach(self, tier: str, reason: str) -> None:
        """A tier has no store from now on, and this is why (`OPENING` where the next one is being
        opened). What is queued for it is dropped, calls that run end, and nothing begins. Never
        blocks.

        Raises:
            ValueError: no such tier.
        """
        self._check_tier(tier)
        self._attachments.detach(tier, reason)

    def use_caches(self, caches: KVCaches) -> None:
        """The engine's caches are other ones, of the same geometry: copy from and to these from
        now on. Jobs on the old ones have ended, or were given up and end on those.

        May block, as `attach` does.

        Raises:
            RefuseToStart: they cannot be copied safely.
        """
        self._caches = caches
        self._direct.use_caches(caches)
        self._attachments.renew()

    def poison_stores(self) -> None:
        """No store that was submitted before this call publishes anything from now on, in any
        tier; what is written behind it is dropped. Takes effect before it returns. The jobs still
        end and are reported."""
        self._jobs.begin_era()

    def detach_failed(self, tier: str, reason: str) -> None:
        """A tier's store could not be opened: it stays out of use, and this is why.

        Raises:
            ValueError: no such tier.
        """
        self._check_tier(tier)
        self._board.tier_unusable(tier, f"could not be opened: {reason}")

    def modes(self) -> Mapping[str, Mapping[str, str]]:
        """What is in effect, by hop (`ssd->cpu`), as the handlers said when they were made."""
        return {hop.label: live.modes for hop, live in self._hops.items() if live.modes is not None}

    def wear(self, tier: str) -> TierWear | None:
        """What this rank wrote to a tier that has a write budget; None where its store counts that
        itself."""
        return self._meter.wear(tier)

    def is_loading(self, tier: str) -> bool:
        """Whether a load from this store tier runs now."""
        return any(
            live.running > 0
            for hop, live in self._hops.items()
            if hop.src.tier == tier and hop.tier == tier
        )

    def health(self) -> Mapping[str, tuple[bool, str]]:
        """By tier, the host pool as "cpu" among them: whether blocks can be loaded from it, and
        what is wrong with any of its hops ("healthy" if nothing is)."""
        self._refresh()
        return self._standing.health()

    def conditions(self, *, every: bool = False) -> list[TierCondition]:
        """The tiers, the host pool as "cpu" among them, whose condition has changed since the last
        call; with `every`, and the first time, all of them. A load rate that moved by less than
        20% is no change. Never blocks."""
        self._refresh()
        return self._standing.conditions(every=every)

    def standing(self) -> list[TierCondition]:
        """All tiers as they are now, for people; takes no news from `conditions`. Never blocks."""
        return self._standing.now()

    def wait_probed(self, timeout: float) -> bool:
        """Block until every tier whose store is open was probed, at most `timeout` seconds;
        whether that is so. What nobody probes (the pool has no spare slots) is not waited for."""
        return self._prober.wait_first(timeout)

    def when_gone(self, told: Callable[[str, BlockStore, str], None]) -> None:
        """Have `told` called, on the engine's thread, with a tier, its store and the reason when a
        call finds out that what the store was opened on is not there any more; maybe several
        times. It must not block."""
        self._when_gone = told

    # ------------------------------------------------------------------------------------ jobs

    def submit(self, job: LoadJob | StoreJob, after: object | None = None) -> None:
        """Take a job; its chains are chosen now. Loads and stores run side by side.

        Copies that read or write the engine's cache are ordered after `after` on its device (see
        `TransferSpec.after`); None: nothing to wait for.

        Raises:
            ValueError: the job contradicts itself, or its id belongs to a job whose result was
                not popped yet.
            RuntimeError: the engine was closed.
        """
        check_job(job)
        active = self._jobs.add(job, after)
        # The log names the caller's file and line, not ours.
        logger.debug(
            "%s job %d submitted: %d blocks", job.kind, job.id, len(job.keys), stacklevel=2
        )
        self._loop.call(self._start, active)

    def finished(self) -> list[JobResult]:
        """Results of the jobs that ended since the last call; each job exactly once. Asked at every
        step: as long as it is, tiers are measured often, though nothing may be worth a load."""
        self._prober.active()
        return self._jobs.pop_finished()

    def wait(self, jobs: Collection[JobId], timeout: float) -> frozenset[JobId]:
        """Block until these jobs have ended, at most `timeout` seconds.

        A job has ended when no copy of it can touch the engine's cache any more; a store's
        write-behind may go on. Results stay to be popped.

        Returns:
            The jobs that have not ended. Unknown ids count as ended.
        """
        return self._jobs.wait(jobs, timeout)

    def active(self) -> frozenset[JobId]:
        """Jobs that have not ended."""
        return self._jobs.active()

    def poison(self, jobs: Collection[JobId]) -> None:
        """Give jobs up. Takes effect before it returns; jobs that have ended are left alone.

        A store that has not begun never will; of one that has begun nothing is published, and all
        its blocks are CANCELLED whatever the copies return. A load gives up what has not reached
        its last copy. Each job is still reported, once no copy can touch the engine's cache.
        """
        for active in self._jobs.give_up(jobs):
            self._loop.call(_tell, active)

    def promote(self, job: PromoteJob) -> None:
        """Take a promotion: read blocks from stores into host slots of the manager. Its id is
        counted apart from those of other jobs, and must be above those of all promotions before;
        one that was given already is ignored. After `close` it ends at once.

        Raises:
            ValueError: the job contradicts itself; it ends CANCELLED all the same.
        """
        self._board.refresh()
        self._movers.promoter.submit(job)

    def promoted(self) -> list[tuple[JobId, tuple[BlockStatus, ...]]]:
        """Promotions that have ended since the last call, with the status of each of their blocks;
        each promotion exactly once. Their slots come back through `released`, those that a call
        may still write to when it has returned."""
        return self._movers.promoter.pop_ended()

    def released(self) -> list[SlotRef]:
        """Host slots of store jobs and promotions that this rank needs no more, since the last
        call: each slot of a store's first destination exactly once, when the job and its
        write-behind are over, and each slot of a promotion when it was read into, well or not."""
        return self._jobs.pop_released()

    def drain(self, timeout: float) -> bool:
        """Block until no job runs, nothing is written behind and no call that was given up still
        runs, at most `timeout` seconds.

        Returns:
            Whether nothing is left: no I/O touches our memory any more.
        """
        return self._jobs.drained(timeout)

    def audit(self) -> tuple[str, ...]:
        """What is still in use a moment after `drain` said that nothing is left; empty in a sound
        program. For tests."""
        limit = self._limits.threads_per_tier
        return tuple(
            f"{hop.label}: {live.running} calls run, {live.permits.free} of {limit} may begin"
            for hop, live in self._hops.items()
            if live.running or live.permits.free != limit
        )

    # ------------------------------------------------------------------------------------- end

    def close(self, timeout: float) -> bool:
        """Refuse new jobs, drain, give up what is left, close the handlers and end the loop, all
        within `timeout` seconds. Idempotent. Stores are not closed: that is for their opener.

        Returns:
            True where everything ended by itself. Else daemon threads may still be in calls that
            hang: their slots were not given back, and their handlers are not closed.
        """
        until = time.monotonic() + timeout
        with self._closing:
            if self._clean is not None:
                return self._clean
            self._jobs.close()
            self._prober.stop()
            self._movers.promoter.stop()
            clean = self._jobs.drained(timeout * (1 - GIVE_UP_SHARE))
            if not clean:
                self.poison(self._jobs.active())
                self._loop.call(self._movers.behind.drop_all)
                self._jobs.drained((until - time.monotonic()) / 2)
            self._clean = clean
            stopped = self._loop.stop(max(0.0, until - time.monotonic()))
            self._lanes.shutdown()
            if stopped:
                self._attachments.close(until)
            return clean

    # --------------------------------------------------------------------------------- private

    def _start(self, active: Active) -> None:
        active.told = self._loop.loop.create_future()
        if active.given_up:
            active.told.set_result(None)
        self._refresh()
        self._loop.spawn(self._movers.run(active))

    def _check_tier(self, tier: str) -> None:
        if tier not in self._tiers:
            raise ValueError(f"no tier is named {tier!r}; known: {sorted(self._tiers)}")

    def _make_hops(self) -> dict[Hop, LiveHop]:
        complaints, limits = Complaints(logger), self._limits
        return {
            hop: LiveHop(
                hop=hop,
                loop=self._loop,
                board=self._board,
                stats=self._stats,
                complaints=complaints,
                memory=self._memory,
                rank=self._geometry.rank,
                verification=self._verification[hop.tier],
                executor=self._lanes.of(hop).executor,
                permits=self._lanes.of(hop).permits,
                way=self._lanes.of(hop).way,
                recent=self._recent.get(hop.tier),
                gone=self._gone,
                patience=(limits.load_deadline if is_load(hop) else limits.store_deadline) / 2,
            )
            for hop in self._router.hops()
        }

    def _make_handler(self, hop: Hop, store: BlockStore | None) -> TransferHandler[Any, Any]:
        context = HandlerContext(
            geometry=self._geometry,
            memory=self._memory,
            executor=self._lanes.of(hop).executor,
            tier=hop.tier,
            store=store,
            caches=self._caches,
            staging=self._direct.staging_of(hop),
            capture=self._direct.capture,
            verification=self._verification[hop.tier],
        )
        return self._registry.handler(hop.src.spec, hop.dst.spec, context)

    def _cost(self, hop: Hop) -> HopCost:
        return self._board.cost(hop)

    def _health_changed(self) -> None:
        self._router.invalidate()
        self._loop.call(self._tell_health)
        self._standing.note()

    def _tell_health(self) -> None:
        for live in self._hops.values():
            live.tell()
        self._movers.behind.drop_unusable()

    def _gone(self, tier: str, store: BlockStore, reason: str) -> None:
        self._when_gone(tier, store, reason)

    def _refresh(self) -> None:
        """Notice what changed by time alone."""
        self._board.refresh()
        self._standing.say_rest()


def _is_read(hop: Hop) -> bool:
    """Whether it brings blocks from a store into host slots."""
    return hop.dst == CPU_ENDPOINT and hop.src != GPU_ENDPOINT


def _to_nobody(tier: str, store: BlockStore, reason: str) -> None:
    """Nobody wants to know that a tier is gone."""


def _tell(active: Active) -> None:
    if active.told is not None and not active.told.done():
        active.told.set_result(None)
