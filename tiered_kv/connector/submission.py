"""Gives a rank's jobs to its transfer engine: each once, stores after the transfers that sampling
waits for, and those whose engine blocks are about to be reused before the step goes on."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

from tiered_kv.connector.border import Border
from tiered_kv.connector.messages import ConnectorMetadata
from tiered_kv.engine import TransferEngine
from tiered_kv.specs import JobResult, LoadJob, PromoteJob, SlotRef, StoreJob
from tiered_kv.threads import Alarm
from tiered_kv.values import BlockStatus, JobId

__all__ = ["Submission"]

logger = logging.getLogger(__name__)

DEFERRED_STORE_SECONDS = 0.02
"""A deferred store that no engine step follows within this time is submitted by a timer."""

FLUSH_SECONDS = 1.0
"""Longest wait for stores whose engine blocks are about to be reused."""

ENDING_SECONDS = 0.2
"""How much longer it waits for those of them that were given up."""

REMEMBERED_JOBS = 4096
"""So many jobs back a repeated one is noticed."""


class Submission:
    """The jobs of one rank on their way to the transfer engine. Thread-safe; only `flush` waits."""

    def __init__(
        self, engine: TransferEngine, fence: Callable[[], object | None], border: Border
    ) -> None:
        """`fence` names the point behind what the model-runner thread has given the device; it is
        called on that thread only. `border` hears of what fails on the timer's thread."""
        self._engine = engine
        self._fence = fence
        self._border = border
        self._lock = threading.Lock()
        self._deferred: list[tuple[StoreJob, object | None]] = []
        """Stores with the fence that they come after."""
        self._alarm = Alarm("tiered-kv-deferred", self._time_is_up)
        self._flushed: set[JobId] = set()
        self._given: OrderedDict[JobId, None] = OrderedDict()
        """The latest jobs that were submitted, or refused: ids are used once."""
        self._open_stores: dict[str, set[JobId]] = {}
        self._resets = 0
        self._resets_of: dict[JobId, int] = {}
        """Jobs that have not ended, with the number of resets that they came after."""
        self._refused: list[JobResult] = []
        self._released: list[SlotRef] = []
        self._promoted = -1
        """The latest promotion that was submitted, or refused: their ids grow."""
        self._unpromoted: list[tuple[JobId, tuple[BlockStatus, ...]]] = []

    def flush(self, metadata: ConnectorMetadata) -> None:
        """Submit the deferred stores, then wait until the jobs to flush have left the engine's
        blocks alone; what does not end in time is poisoned (never published, never written)."""
        self.submit_deferred()
        flush = metadata.flush
        if not flush:
            return
        stores = [job for job in metadata.stores if job.id in flush]
        after = self._fence() if stores else None
        with self._lock:
            for job in stores:
                self._flushed.add(job.id)
                self._submit_store(job, after)
        late = self._engine.wait(flush, FLUSH_SECONDS)
        if late:
            logger.warning(
                "%d transfers did not leave the engine's blocks within %g s and were given up",
                len(late),
                FLUSH_SECONDS,
            )
            # That ends them, but for a plain copy from or to the engine's blocks that has begun.
            self.give_up(late)

    def begin_era(self, resets: int) -> None:
        """The cache was reset, so often by now: jobs that are given from now on come after that.
        Those that were put off come before."""
        self.submit_deferred()
        with self._lock:
            self._resets = resets

    def load(self, metadata: ConnectorMetadata) -> None:
        """Submit the stores deferred from the step before, then this step's loads."""
        self.submit_deferred()
        after = self._fence() if metadata.loads else None
        with self._lock:
            for job in metadata.loads:
                self._submit(job, after)

    def defer(self, metadata: ConnectorMetadata) -> None:
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
            if self._deferred:
                try:
                    self._alarm.set(DEFERRED_STORE_SECONDS)
                except RuntimeError as error:  # no thread to be had: the next step submits them
                    logger.warning("stores wait for the engine's next step: %s", error)

    def _time_is_up(self) -> None:
        self._border.call("Submission.submit_deferred", self.submit_deferred, None)

    def submit_deferred(self) -> None:
        """Submit the stores that were put off. Any thread."""
        with self._lock:
            jobs, self._deferred = self._deferred, []
            self._alarm.stop()
            for job, after in jobs:
                self._submit_store(job, after)

    def _submit_store(self, job: StoreJob, after: object | None) -> None:
        if job.id not in self._given:
            self._open_stores.setdefault(job.request, set()).add(job.id)
        self._submit(job, after)

    def _submit(self, job: LoadJob | StoreJob, after: object | None) -> None:
        if job.id in self._given:
            logger.error("job %d of request %s was given twice; it runs once", job.id, job.request)
            return
        self._note(job)
        try:
            self._engine.submit(job, after)
        except (ValueError, RuntimeError) as error:  # it contradicts itself, or the engine closed
            logger.error("job %d of request %s was not begun: %s", job.id, job.request, error)
            self._refuse(job)
        # The inference engine must hear of every job that it gave us, and of no exception.
        except Exception as error:  # noqa: BLE001
            self._border.caught("TransferEngine.submit", error)
            self._refuse(job)

    def _refuse(self, job: LoadJob | StoreJob) -> None:
        cancelled = (BlockStatus.CANCELLED,) * len(job.keys)
        self._refused.append(JobResult(job.id, job.kind, job.request, job.keys, cancelled, 0, 0.0))
        if isinstance(job, StoreJob) and job.dst.first is not None:
            self._released.extend(job.dst.first.slots)

    def give_up(self, jobs: Collection[JobId]) -> None:
        """Leave the engine's blocks of these alone, as far as that can be done: what was put off is
        not begun, the others are poisoned and waited for, for a moment."""
        with self._lock:
            mine = [job for job, _ in self._deferred if job.id in jobs]
            self._deferred = [(job, after) for job, after in self._deferred if job.id not in jobs]
            for job in mine:
                self._note(job)
                self._refuse(job)
        self._engine.poison(jobs)
        self._engine.wait(jobs, ENDING_SECONDS)

    def give_up_all(self) -> None:
        """The engine's caches are to be left alone: what runs is waited for as at a flush."""
        with self._lock:
            put_off = frozenset(job.id for job, _ in self._deferred)
        self._engine.wait(self._engine.active(), FLUSH_SECONDS)
        self.give_up(self._engine.active() | put_off)

    def refuse(self, jobs: Iterable[LoadJob | StoreJob]) -> None:
        """These are not begun, as far as they were not given or put off before; they are reported
        as failed."""
        with self._lock:
            put_off = {job.id for job, _ in self._deferred}
            for job in jobs:
                if job.id not in self._given and job.id not in put_off:
                    self._note(job)
                    self._refuse(job)

    def _note(self, job: LoadJob | StoreJob) -> None:
        self._given[job.id] = None
        self._resets_of[job.id] = self._resets
        if len(self._given) > REMEMBERED_JOBS:
            self._given.popitem(last=False)

    def promote(self, jobs: Iterable[PromoteJob]) -> None:
        """Submit promotions, those that were not given before."""
        for job in jobs:
            with self._lock:
                if job.id <= self._promoted:
                    continue
                self._promoted = job.id
            try:
                self._engine.promote(job)
            except ValueError as error:
                logger.error("promotion %d was not begun: %s", job.id, error)

    def refuse_promotions(self, jobs: Iterable[PromoteJob]) -> None:
        """These are not begun, as far as they were not given before; their blocks do not come."""
        with self._lock:
            for job in jobs:
                if job.id > self._promoted:
                    self._promoted = job.id
                    self._unpromoted.append((job.id, (BlockStatus.CANCELLED,) * len(job.keys)))
                    self._released.extend(job.dst.slots)

    def take_promoted(self) -> list[tuple[JobId, tuple[BlockStatus, ...]]]:
        """Promotions that have ended since the last call, with the status of each block."""
        with self._lock:
            refused, self._unpromoted = self._unpromoted, []
        try:
            return refused + self._engine.promoted()
        except BaseException:
            with self._lock:
                self._unpromoted = refused + self._unpromoted
            raise

    def take_refused(self) -> list[JobResult]:
        """Jobs that the transfer engine did not take, since the last call."""
        with self._lock:
            refused, self._refused = self._refused, []
            return refused

    def take_released(self) -> list[SlotRef]:
        """Host slots of refused stores and promotions, since the last call."""
        with self._lock:
            released, self._released = self._released, []
            return released

    def ended(self, result: JobResult) -> int:
        """A job has ended; how many resets it came after."""
        with self._lock:
            resets = self._resets_of.pop(result.id, self._resets)
            jobs = self._open_stores.get(result.request)
            if jobs is not None:
                jobs.discard(result.id)
                if not jobs:
                    del self._open_stores[result.request]
            return resets

    def storing(self) -> frozenset[str]:
        """Requests with a store job that has not ended."""
        with self._lock:
            return frozenset((*self._open_stores, *(job.request for job, _ in self._deferred)))

    def close(self) -> None:
        """Submit what was put off; nothing is put off any more."""
        self._alarm.close()
        self.submit_deferred()
