"""The worker half: one per rank. It owns the memory and the I/O, and submits every transfer.

Methods are called by the engine's model-runner thread unless said otherwise; none of them raises
after the start, and none waits longer than its deadline.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.connector.care import Scrubbers, TierCare
from tiered_kv.connector.handshake import Handshake
from tiered_kv.connector.messages import ConnectorMetadata, FailedBlock, WorkerReport
from tiered_kv.connector.occupancy import OccupancyReporter
from tiered_kv.connector.opening import StoreOpener
from tiered_kv.connector.proof import Proof, ProofRun, of_self_test
from tiered_kv.contracts import BlockStore
from tiered_kv.engine import EngineLimits, TransferEngine
from tiered_kv.errors import UnsupportedError
from tiered_kv.memory import HostBlockPool, KVCaches, PageState, device_of
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import JobResult, KeySpec, LoadJob, SlotRef, StoreJob
from tiered_kv.stats import StatsDelta, StatsRecorder
from tiered_kv.values import (
    BlockStatus,
    CacheGeometry,
    Fingerprint,
    GroupGeometry,
    JobId,
    JobKind,
)

__all__ = ["WorkerConnector", "WorkerPlan"]

logger = logging.getLogger(__name__)

DEFERRED_STORE_SECONDS = 0.02
"""A deferred store that no engine step follows within this time is submitted by a timer."""

FLUSH_SECONDS = 1.0
"""Longest wait for stores whose engine blocks are about to be reused."""

REMEMBERED_JOBS = 4096
"""So many jobs back a repeated one is noticed."""

OPEN_WAIT_SECONDS = 1.0
"""How long the start waits for the stores, so that a misconfigured one is refused at once."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What one rank is built from; made from the deployment's YAML and the engine's settings."""

    fingerprint: Fingerprint
    rank: int
    world_size: int
    group_layers: tuple[tuple[str, ...], ...]
    """Layer names of each KV group."""
    group_tokens: tuple[int, ...]
    """Tokens per engine block of each KV group."""
    chunk: int
    """Engine blocks per block."""
    host_bytes: int
    """Capacity of the cpu tier for this rank; 0 without one."""
    staging_bytes: int
    tiers: Mapping[str, type[KeySpec]]
    """Store tiers, nearest first."""
    open_store: Callable[[str, CacheGeometry], BlockStore]
    """Opens a tier's store for reading and writing. Called on a thread of its own."""
    registry: TransferRegistry
    limits: EngineLimits
    drain_seconds: float
    care: Mapping[str, TierCare] = field(default_factory=dict)
    """By store tier; one that is not named is verified always and not scrubbed."""


class WorkerConnector:
    """Engine-neutral worker connector. One thread calls it, except where noted."""

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._engine: TransferEngine | None = None
        self._pool: HostBlockPool | None = None
        self._opener: StoreOpener | None = None
        self._geometry: CacheGeometry | None = None
        self._caches: KVCaches | None = None
        self._proof: Proof | None = None
        self._tier_slots = 0
        self.stats = StatsRecorder(f"rank {plan.rank}")
        self._occupancy = OccupancyReporter(self.stats)
        self._scrubbers = Scrubbers(plan.care, self.stats, self._is_loading)
        self._lock = threading.Lock()
        self._deferred: list[tuple[StoreJob, object | None]] = []
        """Stores with the fence that they come after."""
        self._timer: threading.Timer | None = None
        self._flushed: set[JobId] = set()
        self._given: OrderedDict[JobId, None] = OrderedDict()
        """The latest jobs that were submitted, or refused: ids are used once."""
        self._open_stores: dict[str, set[JobId]] = {}
        self._finished_requests: set[str] = set()
        self._completed: list[JobResult] = []
        self._refused: list[JobResult] = []
        self._released: list[SlotRef] = []
        self._failed_loads: list[FailedBlock] = []
        self._failed_stores: list[FailedBlock] = []
        self._closed = False

    # Start

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Take over the engine's caches: layer name -> tensor whose first dimension is blocks.

        Handlers are made for the caches given here. Called once, before any job.

        Raises:
            UnsupportedError: a tensor's shape, strides or device cannot be copied safely.
            RefuseToStart: a tier cannot be used as configured.
        """
        self.attach(KVCaches.from_named(kv_caches, self._plan.group_layers))

    def register_cross_layers_kv_cache(self, kv_cache: Any) -> None:
        """Take over one tensor that holds all layers: its first dimension is blocks.

        Raises:
            UnsupportedError: the engine has several KV groups, or the tensor cannot be copied.
            RefuseToStart: a tier cannot be used as configured.
        """
        self.attach(KVCaches.from_named({"all layers": kv_cache}, [["all layers"]]))

    def attach(self, caches: KVCaches) -> None:
        """Build the pool and the transfer engine for these caches, and begin to open the stores.

        Raises:
            UnsupportedError: the caches do not have the KV groups that the engine announced.
            RefuseToStart: a tier cannot be used as configured.
        """
        plan = self._plan
        if len(caches.groups) != len(plan.group_tokens):
            raise UnsupportedError(
                f"the engine has {len(plan.group_tokens)} KV groups, but registered caches for "
                f"{len(caches.groups)}; one tensor for all layers is for one KV group"
            )
        self._caches = caches
        groups = tuple(
            GroupGeometry(
                index=index,
                block_bytes=caches.block_bytes(index, plan.chunk),
                chunk=plan.chunk,
                tokens=tokens * plan.chunk,
            )
            for index, tokens in enumerate(plan.group_tokens)
        )
        geometry = CacheGeometry(groups, plan.rank, plan.world_size)
        slot_bytes = geometry.slot_bytes
        self._tier_slots = plan.host_bytes // slot_bytes
        # One for each tier that is read from, and one for stores: none can starve another then.
        staging_slots = max(1 + max(1, len(plan.tiers)), plan.staging_bytes // slot_bytes)
        self._geometry = geometry
        device = device_of(caches.device)
        self._pool = HostBlockPool(
            self._tier_slots,
            staging_slots,
            slot_bytes,
            register=None if device is None else device.register_host,
            unregister=None if device is None else device.unregister_host,
        )
        engine = TransferEngine(
            registry=plan.registry,
            geometry=geometry,
            memory=self._pool,
            tiers=plan.tiers,
            limits=plan.limits,
            stats=self.stats,
            caches=caches,
            verify={tier: care.verify for tier, care in plan.care.items()},
        )
        self._engine = engine
        logger.info(
            "rank %d of %d: blocks of %s bytes, %d host slots and %d staging slots of %d bytes",
            plan.rank,
            plan.world_size,
            ", ".join(str(group.block_bytes) for group in groups),
            self._tier_slots,
            staging_slots,
            slot_bytes,
        )
        self._opener = StoreOpener(
            lambda tier: plan.open_store(tier, geometry),
            opened=self._opened,
            failed=engine.detach_failed,
        )
        try:
            self._opener.start(tuple(plan.tiers), wait_seconds=OPEN_WAIT_SECONDS)
        except BaseException:
            self.shutdown()
            raise

    def _opened(self, tier: str, store: BlockStore) -> None:
        self.engine.attach(tier, store)
        try:
            stat = store.stat()
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; its tier serves
            logger.warning("tier %s is open but cannot say how full it is: %s", tier, error)
            return
        if self._plan.rank == 0:  # the ranks share the stores
            self._occupancy.add(tier, store)
        if self._geometry is not None:
            self._scrubbers.add(tier, store, self._geometry)
        modes = ", ".join(f"{name} {mode}" for name, mode in sorted(stat.modes.items()))
        logger.info(
            "tier %s is open: %d blocks, %d of %d bytes used; %s",
            tier,
            stat.blocks,
            stat.used_bytes,
            stat.capacity_bytes,
            modes,
        )

    def _is_loading(self, tier: str) -> bool:
        return self.engine.is_loading(tier)

    def handshake(self) -> Handshake:
        """What the manager half has to know of this rank. The host pool grows from now on: the
        engine asks for this when the manager has checked that the pools of all ranks fit.

        Runs the start-up self-test first, once: the engine must be idle, and waits a few
        milliseconds, at most `tiered_kv.connector.proof.PROOF_SECONDS`; longer only where a copy
        into the engine's cache does not end.

        Raises:
            RefuseToStart: that copy hangs.
            RuntimeError: no caches were registered yet.
        """
        if self._geometry is None or self._caches is None or self._pool is None:
            raise RuntimeError("handshake before register_kv_caches")
        plan, geometry = self._plan, self._geometry
        if self._proof is None:
            run = ProofRun(self.engine, self.memory, self._caches, geometry, plan.fingerprint)
            with self.stats.silence():
                self._proof = run.run()
        self._pool.grow(self._grown)
        return Handshake(plan.fingerprint, geometry, self._tier_slots, self._proof)

    def _grown(self, state: PageState) -> None:
        self.stats.host_pool(
            mapped_bytes=state.mapped_bytes,
            resident_bytes=state.prefaulted_bytes,
            huge_bytes=state.huge_bytes,
            pinned_bytes=state.pinned_bytes,
        )
        modes = "; ".join(f"{name} {mode}" for name, mode in state.modes().items())
        logger.info("rank %d: host pool: %s", self._plan.rank, modes)

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
    def memory(self) -> HostBlockPool:
        """The rank's host block pool.

        Raises:
            RuntimeError: no caches were registered yet.
        """
        if self._pool is None:
            raise RuntimeError("no KV caches are registered")
        return self._pool

    # Every engine step

    def handle_preemptions(self, metadata: ConnectorMetadata) -> None:
        """Submit the deferred stores, then wait until the jobs to flush have left the engine's
        blocks alone; what does not end in time is poisoned (never published, never written)."""
        self._submit_deferred()
        flush = metadata.flush
        if not flush:
            return
        stores = [job for job in metadata.stores if job.id in flush]
        after = self._fence() if stores else None
        with self._lock:
            for job in stores:
                self._flushed.add(job.id)
                self._submit_store(job, after)
        late = self.engine.wait(flush, FLUSH_SECONDS)
        if late:
            logger.warning(
                "%d transfers did not leave the engine's blocks within %g s and were given up",
                len(late),
                FLUSH_SECONDS,
            )
            self.engine.poison(late)

    def start_kv_transfers(self, metadata: ConnectorMetadata) -> None:
        """Submit the stores deferred from the step before, then this step's loads."""
        self._submit_deferred()
        after = self._fence() if metadata.loads else None
        with self._lock:
            for job in metadata.loads:
                self._submit(job, after)

    def prepare_store_kv(self, metadata: ConnectorMetadata) -> None:
        """Queue this step's stores, to be submitted after the transfers that sampling waits for:
        at the next step, or by a timer where no step follows.

        What computes the blocks has been given to the device by now, so the fence that their copies
        wait for is recorded here: the timer's thread knows nothing of the engine's stream.
        """
        after = self._fence() if metadata.stores else None
        with self._lock:
            for job in metadata.stores:
                if job.id in self._flushed:
                    self._flushed.discard(job.id)
                    continue
                self._deferred.append((job, after))
            if self._deferred and self._timer is None and not self._closed:
                timer = threading.Timer(DEFERRED_STORE_SECONDS, self._submit_deferred)
                timer.daemon = True
                try:
                    timer.start()
                except RuntimeError as error:  # no thread to be had: the next step submits them
                    logger.warning("stores wait for the engine's next step: %s", error)
                else:
                    self._timer = timer

    def _submit_deferred(self) -> None:
        with self._lock:
            jobs, self._deferred = self._deferred, []
            timer, self._timer = self._timer, None
            if timer is not None:
                timer.cancel()
            for job, after in jobs:
                self._submit_store(job, after)

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

    def _submit_store(self, job: StoreJob, after: object | None) -> None:
        if job.id not in self._given:
            self._open_stores.setdefault(job.request, set()).add(job.id)
        self._submit(job, after)

    def _submit(self, job: LoadJob | StoreJob, after: object | None) -> None:
        if job.id in self._given:
            logger.error("job %d of request %s was given twice; it runs once", job.id, job.request)
            return
        self._given[job.id] = None
        if len(self._given) > REMEMBERED_JOBS:
            self._given.popitem(last=False)
        try:
            self.engine.submit(job, after)
        except (ValueError, RuntimeError) as error:
            # The inference engine must hear of every job it gave us, and of no exception.
            logger.error("job %d of request %s was not begun: %s", job.id, job.request, error)
            cancelled = (BlockStatus.CANCELLED,) * len(job.keys)
            self._refused.append(
                JobResult(job.id, job.kind, job.request, job.keys, cancelled, 0, 0.0)
            )
            if isinstance(job, StoreJob) and job.dst.first is not None:
                self._released.extend(job.dst.first.slots)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Pop finished jobs.

        Args:
            finished_req_ids: requests that the engine has finished since the last call.

        Returns:
            (sent, received): requests whose last store job is done and that are finished, and
            requests whose load is done, well or not.
        """
        received: set[str] = set()
        with self._lock:
            self._finished_requests.update(finished_req_ids)
            refused, self._refused = self._refused, []
            for result in (*self.engine.finished(), *refused):
                if of_self_test(result):
                    continue
                self._completed.append(result)
                if result.kind is JobKind.LOAD:
                    received.add(result.request)
                    self._failed_loads.extend(_failures(result))
                else:
                    self._failed_stores.extend(_failures(result))
                    jobs = self._open_stores.get(result.request)
                    if jobs is not None:
                        jobs.discard(result.id)
                        if not jobs:
                            del self._open_stores[result.request]
            deferred = {job.request for job, _ in self._deferred}
            sent = {
                request
                for request in self._finished_requests
                if request not in self._open_stores and request not in deferred
            }
            self._finished_requests -= sent
        return sent, received

    def failed_requests(self) -> set[str]:
        """Requests whose load failed since the last `take_report`."""
        return {block.request for block in self._failed_loads}

    def take_completed(self) -> tuple[JobResult, ...]:
        """The jobs that `get_finished` popped since the last call; each job exactly once."""
        completed, self._completed = self._completed, []
        return tuple(completed)

    def take_report(self) -> WorkerReport | None:
        """News for the manager half since the last call; None if there is none."""
        rank = self._plan.rank
        with self._lock:  # the timer's thread may be refusing a job
            refused, self._released = self._released, []
        released: Sequence[SlotRef] = (*self.engine.released(), *refused)
        staging = [slot for slot in released if slot.number >= self._tier_slots]
        if staging:  # of a self-test that had not waited for its store
            self.memory.give_back(staging)
            released = [slot for slot in released if slot.number < self._tier_slots]
        report = WorkerReport(
            tuple(self._failed_loads),
            tuple(self._failed_stores),
            tuple((rank, slot) for slot in released),
        )
        self._failed_loads = []
        self._failed_stores = []
        return report or None

    def get_kv_connector_stats(self) -> StatsDelta | None:
        """What was counted since the last call, per tier and per hop; None if nothing was."""
        return self.stats.take()

    # End

    def drain(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for all transfers and all write-behind; True if done."""
        self._submit_deferred()
        return self.engine.drain(timeout)

    def shutdown(self) -> None:
        """Drain within the deadline, then let go of everything. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._engine is not None:
            self._submit_deferred()
            clean = self._engine.close(self._plan.drain_seconds)
            if not clean:
                logger.warning(
                    "some blocks were not written behind within %g s at shutdown; "
                    "they will be recomputed",
                    self._plan.drain_seconds,
                )
        self._occupancy.close(timeout=1.0)
        self._scrubbers.close(timeout=1.0)
        if self._opener is not None:
            self._opener.close()
        if self._pool is not None:
            self._pool.close()


def _failures(result: JobResult) -> list[FailedBlock]:
    return [
        FailedBlock(key, status, result.request)
        for key, status in zip(result.keys, result.statuses, strict=True)
        if status is not BlockStatus.OK
    ]
