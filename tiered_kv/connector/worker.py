"""The worker half: one per rank. It owns the memory and the I/O, and submits every transfer.

Methods are called by the engine's model-runner thread unless said otherwise; none of them raises
after the start (see `tiered_kv.connector.border`), and none waits longer than its deadline.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tiered_kv.connector.border import Border, guarded
from tiered_kv.connector.handshake import Handshake
from tiered_kv.connector.live import LiveTier, LiveView
from tiered_kv.connector.messages import ConnectorMetadata, FailedBlock, Orders, WorkerReport
from tiered_kv.connector.plan import WorkerPlan
from tiered_kv.connector.proof import Proof, ProofRun, of_self_test
from tiered_kv.connector.rank_stores import RankStores
from tiered_kv.connector.submission import Submission
from tiered_kv.engine import TransferEngine
from tiered_kv.errors import UnsupportedError
from tiered_kv.memory import HostBlockPool, KVCaches, PageState
from tiered_kv.specs import JobResult, LoadJob, SlotRef, StoreJob
from tiered_kv.stats import StatsDelta, StatsRecorder, TierCondition, TierWear
from tiered_kv.values import (
    BlockStatus,
    CacheGeometry,
    JobId,
    JobKind,
    Namespace,
)

__all__ = ["WorkerConnector"]

logger = logging.getLogger(__name__)


PROBED_SECONDS = 1.0
"""How long the start waits until the speed of the tiers that are open is known."""

CLOSE_SECONDS = 0.5
"""Longest wait at the end, behind the drain, for what is being closed."""


class WorkerConnector:
    """Engine-neutral worker connector. One thread calls it, except where noted."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        """What it was built from."""
        self._engine: TransferEngine | None = None
        self._pool: HostBlockPool | None = None
        self._stores: RankStores | None = None
        self._submission: Submission | None = None
        self._geometry: CacheGeometry | None = None
        self._caches: KVCaches | None = None
        self._proof: Proof | None = None
        self._tier_slots = 0
        self.stats = StatsRecorder(f"rank {plan.rank}")
        self._finished_requests: set[str] = set()
        self._completed: list[JobResult] = []
        self._failed_loads: list[FailedBlock] = []
        self._failed_stores: list[FailedBlock] = []
        self._released: list[SlotRef] = []
        self.border = Border(self.stats)
        self._orders = Orders()
        """The latest that told of a reset."""
        self._serves = True
        """False once the engine's caches cannot be used any more."""
        self._in_order = True
        """False while what a reset asks for is not done: no job is begun."""
        self._ending = threading.Lock()
        self._at_exit: Callable[[], None] | None = None
        self._closed = False

    # Start

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Take over the engine's caches: layer name -> tensor whose first dimension is blocks.

        Handlers are made for the caches given here. Called before any job, and again where the
        engine has other tensors after a pause; see `attach`.

        Raises:
            UnsupportedError: a tensor's shape, strides or device cannot be copied safely.
            RefuseToStart: a tier cannot be used as configured.
        """
        self._register(lambda: KVCaches.from_named(kv_caches, self.plan.group_layers))

    def register_cross_layers_kv_cache(self, kv_cache: Any) -> None:
        """Take over one tensor that holds all layers: its first dimension is blocks.

        Raises:
            UnsupportedError: the engine has several KV groups, or the tensor cannot be copied.
            RefuseToStart: a tier cannot be used as configured.
        """
        self._register(lambda: KVCaches.from_named({"all layers": kv_cache}, [["all layers"]]))

    def _register(self, make: Callable[[], KVCaches]) -> None:
        if self._engine is None:
            self.attach(make())
        else:
            self._attach_again(make)

    def attach(self, caches: KVCaches) -> None:
        """Build the pool and the transfer engine for these caches, and begin to open the stores.

        Another time, these take the place of the caches given before: jobs on those are waited for
        as at a flush, or given up; pool and stores stay as they are. It raises nothing then: caches
        of another shape, or that cannot be copied, are refused, in the log, and this rank loads and
        stores nothing any more.

        Raises:
            UnsupportedError: the caches do not have the KV groups that the engine announced.
            RefuseToStart: a tier cannot be used as configured.
        """
        if self._engine is not None:
            self._attach_again(lambda: caches)
            return
        plan = self.plan
        geometry = plan.geometry_of(caches)
        self._caches, self._geometry = caches, geometry
        self._tier_slots = plan.host_slots(geometry)
        self._pool = pool = plan.pool(caches, geometry)
        self._engine = engine = plan.engine(caches, geometry, pool, self.stats)
        # A process that ends without a shutdown stores what it can all the same.
        self._at_exit = partial(_shut_down, weakref.ref(self))
        atexit.register(self._at_exit)
        self._submission = Submission(engine, self._fence, self.border)
        logger.info(
            "rank %d of %d: blocks of %s bytes, %d host slots and %d staging slots of %d bytes",
            plan.rank,
            plan.world_size,
            ", ".join(str(group.block_bytes) for group in geometry.groups),
            self._tier_slots,
            pool.staging_slots,
            pool.slot_bytes,
        )
        self._stores = RankStores(
            lambda tier, epoch: plan.open_store(tier, geometry, epoch),
            engine=engine,
            geometry=geometry,
            care=plan.care,
            stats=self.stats,
            retry_after=plan.limits.retry_after,
            erase=plan.erase,
        )
        try:
            self._stores.open(tuple(plan.tiers))
        except BaseException:
            self.shutdown()
            raise

    def serve_nothing(self, *_: object) -> None:
        """The engine's caches cannot be copied from or to any more: load and store nothing."""
        self._serves = False
        logger.error(
            "rank %d: the engine's KV caches were replaced by some that cannot be used; blocks are "
            "neither loaded nor stored until the engine is restarted",
            self.plan.rank,
        )

    @guarded(serve_nothing)
    def _attach_again(self, make: Callable[[], KVCaches]) -> None:
        self._serves = False
        self.submission.give_up_all()
        caches = make()
        geometry = self.plan.geometry_of(caches)
        if geometry != self._geometry:
            raise UnsupportedError(
                f"the engine registered KV caches anew, of {geometry}; before they were of "
                f"{self._geometry}"
            )
        self.engine.use_caches(caches)
        self._caches = caches
        self._serves = True
        logger.info("rank %d: the engine's KV caches were registered anew", self.plan.rank)

    @property
    def attached(self) -> bool:
        """Whether caches were registered."""
        return self._engine is not None

    def handshake(self) -> Handshake:
        """What the manager half has to know of this rank. The host pool grows from now on: the
        engine asks for this when the manager has checked that the pools of all ranks fit.

        Runs the start-up self-test first, once: the engine must be idle, and waits a few
        milliseconds, at most `tiered_kv.connector.proof.PROOF_SECONDS`; longer only where a copy
        into the engine's cache does not end. Then waits until the speed of the tiers that are open
        is known, at most `PROBED_SECONDS`.

        Raises:
            RefuseToStart: that copy hangs.
            RuntimeError: no caches were registered yet.
        """
        if self._geometry is None or self._caches is None or self._pool is None:
            raise RuntimeError("handshake before register_kv_caches")
        plan, geometry = self.plan, self._geometry
        if self._proof is None:
            run = ProofRun(self.engine, self.memory, self._caches, geometry, plan.fingerprint)
            with self.stats.silence():
                self._proof = run.run()
        self._pool.grow(self._grown)
        self.engine.wait_probed(PROBED_SECONDS)
        conditions = self.plan.named(self.engine.conditions(every=True))
        return Handshake(
            plan.fingerprint, geometry, self._tier_slots, self._proof, conditions=conditions
        )

    def _grown(self, state: PageState) -> None:
        self.stats.host_pool(
            mapped_bytes=state.mapped_bytes,
            resident_bytes=state.prefaulted_bytes,
            huge_bytes=state.huge_bytes,
            pinned_bytes=state.pinned_bytes,
        )
        modes = "; ".join(f"{name} {mode}" for name, mode in state.modes().items())
        logger.info("rank %d: host pool: %s", self.plan.rank, modes)

    @property
    def engine(self) -> TransferEngine:
        """The rank's transfer engine.

        Raises:
            RuntimeError: no caches were registered yet.
        """
        if self._engine is None:
            raise RuntimeError("no KV caches are registered")
        return self._engine

    @property
    def submission(self) -> Submission:
        """The rank's jobs on their way to the engine; raises RuntimeError without caches."""
        if self._submission is None:
            raise RuntimeError("no KV caches are registered")
        return self._submission

    @property
    def memory(self) -> HostBlockPool:
        """The rank's host block pool.

        Raises:
            RuntimeError: no caches were registered yet.
        """
        if self._pool is None:
            raise RuntimeError("no KV caches are registered")
        return self._pool

    # Every engine step

    def _refuse_loads(self, metadata: ConnectorMetadata) -> None:
        self._refuse(metadata.loads)
        if self._submission is not None:
            self._submission.refuse_promotions(metadata.orders.promotions)

    def _refuse_stores(self, metadata: ConnectorMetadata) -> None:
        self._refuse(metadata.stores)

    def _give_up(self, metadata: ConnectorMetadata) -> None:
        """Nothing of these is to be read from the engine's blocks, or written to them, any more."""
        submission = self._submission
        if submission is not None:
            self.border.insist("Submission.give_up", lambda: submission.give_up(metadata.flush))
        self._refuse([job for job in metadata.stores if job.id in metadata.flush])

    def _refuse(self, jobs: Sequence[LoadJob | StoreJob]) -> None:
        if self._submission is not None:
            self._submission.refuse(jobs)

    @guarded(_give_up)
    def handle_preemptions(self, metadata: ConnectorMetadata) -> None:
        """Submit the deferred stores, then wait until the jobs to flush have left the engine's
        blocks alone; what does not end in time is poisoned (never published, never written)."""
        self._take_orders(metadata.orders)
        if not (self._in_order and self._serves):
            self._refuse([job for job in metadata.stores if job.id in metadata.flush])
        self.submission.flush(metadata)

    @guarded(_refuse_loads)
    def start_kv_transfers(self, metadata: ConnectorMetadata) -> None:
        """Submit the stores deferred from the step before, then this step's loads and
        promotions."""
        self._take_orders(metadata.orders)
        if not (self._in_order and self._serves):
            self._refuse_loads(metadata)
            return
        self.submission.load(metadata)
        self.submission.promote(metadata.orders.promotions)

    @guarded(_refuse_stores)
    def prepare_store_kv(self, metadata: ConnectorMetadata) -> None:
        """Queue this step's stores, to be submitted after the transfers that sampling waits for:
        at the next step, or by a timer where no step follows.

        What computes the blocks has been given to the device by now, so the fence that their copies
        wait for is recorded here: the timer's thread knows nothing of the engine's stream.
        """
        self._take_orders(metadata.orders)
        if not (self._in_order and self._serves):
            self._refuse(metadata.stores)
            return
        self.submission.defer(metadata)

    def _take_orders(self, orders: Orders) -> None:
        """Do what the manager orders, once for each message, before any job of the message."""
        told = self._orders
        # An epoch that was drawn late comes with the number of its reset once more.
        late = orders.resets == told.resets and orders.epoch not in (None, told.epoch)
        if orders.resets <= told.resets and not late:
            return
        epoch = self._orders.epoch if orders.epoch is None and not self._in_order else orders.epoch
        self._orders = replace(orders, epoch=epoch)
        self._in_order = False
        self.border.insist("WorkerConnector.reset", self._reset)

    def _reset(self) -> None:
        self.submission.begin_era(self._orders.resets)
        if self._orders.epoch is not None and self._stores is not None:
            self.engine.poison_stores()
            self._stores.begin_epoch(self._orders.epoch)
        self._in_order = True

    def _fence(self) -> object | None:
        """The point behind what the model-runner thread has given the device; see
        `TransferSpec.after`."""
        if self._caches is None:
            return None
        try:
            return self._caches.fence()
        except RuntimeError as error:  # torch's, of a device that failed: the copies will, too
            logger.error("the engine's device cannot say how far it is: %s", error)
            return None

    @guarded(lambda *_: (set[str](), set[str]()))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Pop finished jobs.

        Args:
            finished_req_ids: requests that the engine has finished since the last call.

        Returns:
            (sent, received): requests whose last store job is done and that are finished, and
            requests whose load is done, well or not.
        """
        received: set[str] = set()
        submission = self.submission
        self._finished_requests.update(finished_req_ids)
        none: list[JobResult] = []
        ended = self.border.call("TransferEngine.finished", self.engine.finished, none)
        refused = self.border.call("Submission.take_refused", submission.take_refused, none)
        for result in (*ended, *refused):
            if of_self_test(result):
                continue
            self._completed.append(result)
            failures = _failures(result, self._ended(result))
            if result.kind is JobKind.LOAD:
                received.add(result.request)
                self._failed_loads.extend(failures)
            else:
                self._failed_stores.extend(failures)
        # Where that is not known, none is over yet.
        unknown = frozenset(self._finished_requests)
        storing = self.border.call("Submission.storing", submission.storing, unknown)
        sent = self._finished_requests - storing
        self._finished_requests -= sent
        return sent, received

    def _ended(self, result: JobResult) -> int:
        """How many resets a job came after."""
        resets = self._orders.resets

        def ended() -> None:
            nonlocal resets
            resets = self.submission.ended(result)

        self.border.insist("Submission.ended", ended)
        return resets

    def failed_requests(self) -> set[str]:
        """Requests whose load failed since the last `take_report`."""
        return {block.request for block in self._failed_loads}

    def take_completed(self) -> tuple[JobResult, ...]:
        """The jobs that `get_finished` popped since the last call; each job exactly once."""
        completed, self._completed = self._completed, []
        return tuple(completed)

    @guarded(lambda *_: None)
    def take_report(self) -> WorkerReport | None:
        """News for the manager half since the last call; None if there is none."""
        rank = self.plan.rank
        none: list[SlotRef] = []
        for where, take in (
            ("TransferEngine.released", self.engine.released),
            ("Submission.take_released", self.submission.take_released),
        ):
            self._released += self.border.call(where, take, none)
        staging = [slot for slot in self._released if slot.number >= self._tier_slots]
        if staging:  # of a self-test that had not waited for its store
            self._released = [slot for slot in self._released if slot.number < self._tier_slots]
            self.border.insist("HostBlockPool.give_back", lambda: self.memory.give_back(staging))
        call = self.border.call
        ended: list[tuple[JobId, tuple[BlockStatus, ...]]] = []
        promoted = call("Submission.take_promoted", self.submission.take_promoted, ended)
        unchanged: tuple[TierCondition, ...] = ()
        unworn: tuple[TierWear, ...] = ()
        conditions = call("TransferEngine.conditions", self._news_of_tiers, unchanged)
        worn = call("RankStores.take_wear", self._take_wear, unworn)
        report = WorkerReport(
            failed_loads=tuple(self._failed_loads),
            failed_stores=tuple(self._failed_stores),
            released=tuple((rank, slot) for slot in self._released),
            promoted=tuple((rank, job, statuses) for job, statuses in promoted),
            conditions=tuple((rank, condition) for condition in conditions),
            worn=tuple((rank, wear) for wear in worn),
        )
        self._failed_loads = []
        self._failed_stores = []
        self._released = []
        return report or None

    def _news_of_tiers(self) -> tuple[TierCondition, ...]:
        return self.plan.named(self.engine.conditions())

    def _take_wear(self) -> tuple[TierWear, ...]:
        return () if self._stores is None else self._stores.take_wear()

    @guarded(lambda *_: None)
    def get_kv_connector_stats(self) -> StatsDelta | None:
        """What was counted since the last call, per tier and per hop; None if nothing was."""
        return self.stats.take()

    def view(self) -> LiveView:
        """For `tiered-kv top`; any thread."""
        tiers = self.plan.named(self.engine.standing())
        return LiveView(
            source=f"rank {self.plan.rank}",
            namespace=Namespace(self.plan.fingerprint).id.hex(),
            pid=os.getpid(),
            tiers={one.tier: LiveTier(one.state.value, one.reason) for one in tiers},
            modes=self.engine.modes(),
            stats=self.stats.snapshot(),
        )

    # End

    def drain(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for all transfers and all write-behind; True if done."""
        self.submission.submit_deferred()
        return self.engine.drain(timeout)

    def shutdown(self) -> None:
        """Drain within the deadline, then let go of everything, within a second more. Idempotent;
        any thread: a second one does not wait for the first. Where the process ends without it, it
        is called then, as far as the interpreter gets to end in order."""
        with self._ending:
            if self._closed:
                return
            self._closed = True
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        call = self.border.call
        if self._submission is not None:
            call("Submission.close", self._submission.close, None)
        if self._engine is not None:
            engine, seconds = self._engine, self.plan.drain_seconds
            if not call("TransferEngine.close", lambda: engine.close(seconds), False):
                logger.warning(
                    "some blocks were not written behind within %g s at shutdown; "
                    "they will be recomputed",
                    seconds,
                )
        if self._stores is not None:
            stores = self._stores
            call("RankStores.close", lambda: stores.close(CLOSE_SECONDS), False)
        if self._pool is not None:
            call("HostBlockPool.close", self._pool.close, False)


def _shut_down(worker: weakref.ref[WorkerConnector]) -> None:
    left = worker()
    if left is not None:
        left.shutdown()


def _failures(result: JobResult, resets: int) -> list[FailedBlock]:
    return [
        FailedBlock(key, status, result.request, resets)
        for key, status in zip(result.keys, result.statuses, strict=True)
        if status is not BlockStatus.OK
    ]
