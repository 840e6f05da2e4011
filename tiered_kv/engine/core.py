"""The transfer engine: takes jobs, runs their chains, answers per block."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from tiered_kv.contracts import BlockStore, HandlerContext, TransferHandler, VerifyMode
from tiered_kv.engine.behind import WriteBehind
from tiered_kv.engine.captures import SlotStorer
from tiered_kv.engine.direct import DeviceStagingFactory, DirectHops
from tiered_kv.engine.health import NOT_IN_USE, OPENING, HealthBoard
from tiered_kv.engine.hops import Complaints, LiveHop
from tiered_kv.engine.jobs import Active, JobTable, check_job
from tiered_kv.engine.limits import EngineLimits
from tiered_kv.engine.loads import Loader
from tiered_kv.engine.loop import LoopThread
from tiered_kv.engine.slotless import SlotlessStorer
from tiered_kv.engine.verification import TierVerification
from tiered_kv.engine.waiting import Permits, Staging
from tiered_kv.errors import UnsupportedError
from tiered_kv.memory import HostBlockPool, KVCaches, make_staging
from tiered_kv.registry import TransferRegistry
from tiered_kv.routing import CPU_ENDPOINT, GPU_ENDPOINT, Hop, HopCost, Router
from tiered_kv.specs import JobResult, KeySpec, LoadJob, SlotRef, StoreJob
from tiered_kv.stats import StatsRecorder, TierState
from tiered_kv.threads import DaemonExecutor
from tiered_kv.values import CacheGeometry, JobId

__all__ = ["TransferEngine"]

logger = logging.getLogger(__name__)

GIVE_UP_SHARE = 0.1
"""Share of `close`'s timeout that is kept for giving up what did not end by itself."""


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
        device_staging: DeviceStagingFactory = make_staging,
    ) -> None:
        """Start the loop and make the handlers between engine and host memory. Every tier is
        "opening" until it is attached; without `caches` nothing moves to or from the engine.
        `verify` says when the blocks of a tier are compared with their checksums, always where it
        says nothing of it. `device_staging` gives direct hops their memory on the engine's device.

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
        self._attached: set[str] = set()
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._clean: bool | None = None
        group = max(1, limits.group_bytes // memory.slot_bytes)
        self._router = Router(registry, tiers, self._cost, memory.slot_bytes, group)
        self._executors: dict[_Lane, DaemonExecutor] = {}
        self._jobs = JobTable(stats)
        self._board = HealthBoard(
            self._router.hops(),
            limit=limits.threads_per_tier,
            retry_after=limits.retry_after,
            changed=self._health_changed,
        )
        self._loop = LoopThread("tiered-kv-engine")
        try:
            self._hops = self._make_hops()
            self._direct = DirectHops(self._hops, geometry, caches, device_staging)
            self._staging = Staging(memory, len(self._tiers))
            self._behind = WriteBehind(
                loop=self._loop,
                jobs=self._jobs,
                router=self._router,
                live=self._hops.__getitem__,
                memory=memory,
                stats=stats,
                limits=limits,
            )
            self._loader = Loader(
                loop=self._loop,
                jobs=self._jobs,
                router=self._router,
                live=self._hops.__getitem__,
                staging=self._staging,
                limits=limits,
                slot_bytes=memory.slot_bytes,
            )
            self._slot_storer = SlotStorer(
                loop=self._loop,
                jobs=self._jobs,
                router=self._router,
                live=self._hops.__getitem__,
                behind=self._behind,
                limits=limits,
                slot_bytes=memory.slot_bytes,
            )
            self._slotless_storer = SlotlessStorer(
                loop=self._loop,
                jobs=self._jobs,
                router=self._router,
                live=self._hops.__getitem__,
                staging=self._staging,
                behind=self._behind,
                stats=stats,
                limits=limits,
                slot_bytes=memory.slot_bytes,
            )
            self._attach_memory()
        except BaseException:
            self._loop.stop(1.0)
            raise
        self._note_states()

    # ----------------------------------------------------------------------------------- tiers

    @property
    def router(self) -> Router:
        """Chooses chains by what this engine measures."""
        return self._router

    def attach(self, tier: str, store: BlockStore) -> None:
        """A tier's store is open: make its handlers and use them from now on.

        Called on a thread that may block. A handler that cannot be made leaves its hop out of use
        (where it raises `UnsupportedError`, that is no fault of the tier); a tier that is attached
        after `close` is ignored.

        Raises:
            ValueError: no such tier, or it was attached before.
        """
        self._check_tier(tier)
        with self._lock:
            if tier in self._attached:
                raise ValueError(f"tier {tier!r} was attached before")
            self._attached.add(tier)
        if self._is_closed():
            return
        for hop, live in self._hops.items():
            if hop.tier != tier or not self._has_caches(hop):
                continue
            try:
                live.attach(self._make_handler(hop, store), store)
                self._direct.attached(hop)
            except UnsupportedError as error:
                logger.info("%s is %s: %s", hop, NOT_IN_USE, error)
                self._board.unusable(hop, f"{NOT_IN_USE}: {error}")
            except Exception as error:  # a plug-in may raise anything; its hop is out, not serving
                logger.exception("%s stays out of use: its handler could not be made", hop.label)
                self._board.unusable(hop, f"its handler could not be made: {error}")
            else:
                logger.info("%s is in use: %s", hop, dict(live.modes or {}))
            if self._is_closed():  # meanwhile
                _close_handler(hop, live)

    def detach_failed(self, tier: str, reason: str) -> None:
        """A tier's store could not be opened: it stays out of use, and this is why.

        Raises:
            ValueError: no such tier.
        """
        self._check_tier(tier)
        for hop in self._hops:
            if hop.tier == tier:
                self._board.unusable(hop, f"could not be opened: {reason}")

    def modes(self) -> Mapping[str, Mapping[str, str]]:
        """What is in effect, by hop (`ssd->cpu`), as the handlers said when they were made."""
        return {hop.label: live.modes for hop, live in self._hops.items() if live.modes is not None}

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
        self._board.refresh()
        return {tier: self._health_of(tier) for tier in (CPU_ENDPOINT.tier, *self._tiers)}

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
        """Results of the jobs that ended since the last call; each job exactly once."""
        return self._jobs.pop_finished()

    def wait(self, jobs: Collection[JobId], timeout: float) -> frozenset[JobId]:
        """Block until these jobs have ended, at most `timeout` seconds.

        A job has ended when no copy of it can touch the engine's cache any more; a store's
        write-behind may go on. Results stay to be popped.

        Returns:
            The jobs that have not ended. Unknown ids count as ended.
        """
        return self._jobs.wait(jobs, timeout)

    def poison(self, jobs: Collection[JobId]) -> None:
        """Give jobs up. Takes effect before it returns; jobs that have ended are left alone.

        A store that has not begun never will; of one that has begun nothing is published, and all
        its blocks are CANCELLED whatever the copies return. A load gives up what has not reached
        its last copy. Each job is still reported, once no copy can touch the engine's cache.
        """
        for active in self._jobs.give_up(jobs):
            self._loop.call(_tell, active)

    def released(self) -> list[SlotRef]:
        """Host slots of store jobs that this rank needs no more, since the last call: each slot
        of each job's first destination exactly once, when the job and its write-behind are over,
        well or not."""
        return self._jobs.pop_released()

    def drain(self, timeout: float) -> bool:
        """Block until no job runs, nothing is written behind and no call that was given up still
        runs, at most `timeout` seconds.

        Returns:
            Whether nothing is left: no I/O touches our memory any more.
        """
        return self._jobs.drained(timeout)

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
            clean = self._jobs.drained(timeout * (1 - GIVE_UP_SHARE))
            if not clean:
                self.poison(self._jobs.active())
                self._loop.call(self._behind.drop_all)
                self._jobs.drained((until - time.monotonic()) / 2)
            self._clean = clean
            stopped = self._loop.stop(max(0.0, until - time.monotonic()))
            for executor in self._executors.values():
                executor.shutdown(wait=False, cancel_futures=True)
            for hop, live in self._hops.items():
                if live.handler is not None and stopped and not live.running:
                    _close_handler(hop, live)
            return clean

    # --------------------------------------------------------------------------------- private

    def _start(self, active: Active) -> None:
        active.told = self._loop.loop.create_future()
        if active.given_up:
            active.told.set_result(None)
        self._board.refresh()
        job = active.job
        if isinstance(job, LoadJob):
            self._loop.spawn(self._loader.run(active, job))
        elif job.dst.first is None:
            self._loop.spawn(self._slotless_storer.run(active, job))
        else:
            self._loop.spawn(self._slot_storer.run(active, job, job.dst.first))

    def _is_closed(self) -> bool:
        return self._clean is not None

    def _check_tier(self, tier: str) -> None:
        if tier not in self._tiers:
            raise ValueError(f"no tier is named {tier!r}; known: {sorted(self._tiers)}")

    def _make_hops(self) -> dict[Hop, LiveHop]:
        complaints = Complaints()
        permits: dict[_Lane, Permits] = {}
        hops: dict[Hop, LiveHop] = {}
        for hop in self._router.hops():
            lane = _lane(hop)
            if lane not in self._executors:
                threads = self._limits.threads_per_tier
                self._executors[lane] = DaemonExecutor(threads, f"tiered-kv-{'-'.join(lane)}")
                permits[lane] = Permits(threads)
            hops[hop] = LiveHop(
                hop=hop,
                loop=self._loop,
                board=self._board,
                stats=self._stats,
                complaints=complaints,
                memory=self._memory,
                rank=self._geometry.rank,
                verification=self._verification[hop.tier],
                executor=self._executors[lane],
                permits=permits[lane],
            )
        return hops

    def _attach_memory(self) -> None:
        for hop, live in self._hops.items():
            if not self._has_caches(hop):
                self._board.unusable(
                    hop, f"{NOT_IN_USE}: the engine's KV caches are not registered"
                )
            elif hop.tier == CPU_ENDPOINT.tier:
                live.attach(self._make_handler(hop, None), None)

    def _has_caches(self, hop: Hop) -> bool:
        return self._caches is not None or GPU_ENDPOINT not in (hop.src, hop.dst)

    def _make_handler(self, hop: Hop, store: BlockStore | None) -> TransferHandler[Any, Any]:
        context = HandlerContext(
            geometry=self._geometry,
            memory=self._memory,
            executor=self._executors[_lane(hop)],
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
        self._note_states()

    def _tell_health(self) -> None:
        for live in self._hops.values():
            live.tell()
        self._behind.drop_unusable()

    def _note_states(self) -> None:
        """Put the tiers' states into the statistics."""
        for tier in self._tiers:
            self._stats.state(tier, self._state_of(tier))

    def _troubles(self, tier: str) -> tuple[dict[Hop, str | None], dict[Hop, str]]:
        """What is wrong with the tier's hops; and the direct ones that this set-up does without,
        while others serve."""
        hops = {hop: live.trouble for hop, live in self._hops.items() if hop.tier == tier}
        unused = {
            hop: why
            for hop, why in hops.items()
            if hop.direct and why is not None and why.startswith(NOT_IN_USE)
        }
        if len(unused) == len(hops):
            return hops, {}
        return {hop: why for hop, why in hops.items() if hop not in unused}, unused

    def _health_of(self, tier: str) -> tuple[bool, str]:
        troubles, unused = self._troubles(tier)
        serves = any(why is None and hop.src.tier == tier for hop, why in troubles.items())
        reasons = set(troubles.values())
        if not troubles:
            return False, "no handlers are registered for it"
        if len(reasons) == 1:
            said = [reasons.pop() or "healthy"]
        else:
            said = [f"{hop.label}: {why}" for hop, why in troubles.items() if why]
        return serves, "; ".join([*said, *(f"{hop.label} {why}" for hop, why in unused.items())])

    def _state_of(self, tier: str) -> TierState:
        troubles = set(self._troubles(tier)[0].values())
        if troubles == {None}:
            return TierState.HEALTHY
        if troubles == {OPENING}:
            return TierState.OPENING
        return TierState.DEGRADED if self._health_of(tier)[0] else TierState.DOWN


_Lane = tuple[str, ...]


def _lane(hop: Hop) -> _Lane:
    """Whose threads a hop uses: its tier's, those for loads or those for stores. A direct hop has
    threads of its own, so that the way through the host stays open where its calls hang."""
    load = hop.dst == GPU_ENDPOINT or (hop.dst == CPU_ENDPOINT and hop.src != GPU_ENDPOINT)
    lane = (hop.tier, "load" if load else "store")
    return (*lane, "direct") if hop.direct else lane


def _tell(active: Active) -> None:
    if active.told is not None and not active.told.done():
        active.told.set_result(None)


def _close_handler(hop: Hop, live: LiveHop) -> None:
    if live.handler is None:
        return
    try:
        live.handler.close()
    except Exception:  # a handler may be anybody's; the others are closed all the same
        logger.exception("closing the handler of %s failed", hop.label)
