"""Which jobs run, which have ended, and what is still written behind them.

The one place that several threads share; everything is under one lock.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from tiered_kv.engine.outcome import Outcome
from tiered_kv.specs import JobResult, LoadJob, Part, PromoteJob, SlotRef, StoreJob
from tiered_kv.stats import StatsRecorder
from tiered_kv.values import BlockStatus, JobId, JobKind

__all__ = ["Active", "Era", "Gate", "JobTable", "check_job", "check_promotion"]


@dataclass(slots=True, eq=False)
class Era:
    """The time between two resets of the cache."""

    over: bool = False
    """Stores that were submitted in it publish nothing any more. Set from any thread."""


@dataclass(slots=True, eq=False)
class Active:
    """A job between its submission and its end."""

    job: LoadJob | StoreJob
    after: object | None = None
    """What copies to and from the engine's cache are ordered after; see `TransferSpec.after`."""
    submitted: float = field(default_factory=time.monotonic)
    given_up: bool = False
    """A load that nobody waits for, or a store that was poisoned. Set from any thread."""
    told: asyncio.Future[None] | None = None
    """Done when the job is given up; made and completed on the event loop's thread only."""
    era: Era = field(default_factory=Era)

    @property
    def void(self) -> bool:
        """Whether nothing may come of it any more: it was given up, or is a store of an era that
        is over."""
        return self.given_up or (self.era.over and self.job.kind is JobKind.STORE)


class Gate:
    """Lets a handler take the step that cannot be taken back, or the engine give the call up:
    whoever comes first. Thread-safe."""

    def __init__(self, active: Active) -> None:
        self._active = active
        self._lock = threading.Lock()
        self._committed = False
        self._closed = False

    def commit(self) -> bool:
        """The handler is about to publish, or to write to the engine. False: it must not. What an
        earlier yes allowed goes on all the same."""
        with self._lock:
            allowed = not self._closed and not self._active.void
            self._committed = self._committed or allowed
            return allowed

    def close(self) -> bool:
        """Give the call up. False: it is too late, the call is to be awaited."""
        with self._lock:
            self._closed = not self._committed
            return self._closed


class JobTable:
    """Jobs from submission until their results are popped. Thread-safe; only `wait` and
    `drained` block."""

    def __init__(self, stats: StatsRecorder) -> None:
        self._stats = stats
        self._changed = threading.Condition()
        self._active: dict[JobId, Active] = {}
        self._done: dict[JobId, JobResult] = {}
        self._released: list[SlotRef] = []
        self._behind = 0
        self._era = Era()
        self._closed = False

    def add(self, job: LoadJob | StoreJob, after: object | None = None) -> Active:
        """Note a new job; for `after` see `Active`.

        Raises:
            ValueError: a job of this id runs, or its result was not popped yet.
            RuntimeError: the table was closed.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError(f"job {job.id} was submitted to a transfer engine that closed")
            if job.id in self._active or job.id in self._done:
                raise ValueError(f"job id {job.id} is taken: ids are used once")
            active = Active(job, after, era=self._era)
            self._active[job.id] = active
            return active

    def finish(self, active: Active, out: Outcome) -> JobResult:
        """End a job. A poisoned store is CANCELLED, whatever it did."""
        job = active.job
        with self._changed:
            ended = tuple(out.statuses)
            if active.given_up and job.kind is JobKind.STORE:
                ended = (BlockStatus.CANCELLED,) * len(job.keys)
            result = JobResult(
                id=job.id,
                kind=job.kind,
                request=job.request,
                keys=job.keys,
                statuses=ended,
                copied_bytes=out.copied_bytes,
                seconds=time.monotonic() - active.submitted,
            )
            del self._active[job.id]
            self._done[job.id] = result
            self._stats.job(result)
            self._changed.notify_all()
            return result

    def begin_era(self) -> None:
        """Stores that were added so far publish nothing from now on; they still end."""
        with self._changed:
            self._era.over = True
            self._era = Era()

    def give_up(self, ids: Collection[JobId]) -> list[Active]:
        """Mark jobs that still run; those that ended, or are unknown, are left alone."""
        with self._changed:
            found = [self._active[job] for job in dict.fromkeys(ids) if job in self._active]
            for active in found:
                active.given_up = True
            return found

    def pop_finished(self) -> list[JobResult]:
        """Results in the order in which the jobs ended; each once."""
        with self._changed:
            done = [*self._done.values()]
            self._done.clear()
            return done

    def wait(self, ids: Collection[JobId], timeout: float) -> frozenset[JobId]:
        """Block until these jobs have ended, at most `timeout` seconds; those that have not."""
        with self._changed:
            self._changed.wait_for(lambda: not self._active.keys() & set(ids), max(0.0, timeout))
            return frozenset(self._active.keys() & set(ids))

    def active(self) -> frozenset[JobId]:
        """Jobs that have not ended."""
        with self._changed:
            return frozenset(self._active)

    def behind(self, change: int) -> None:
        """More, or fewer, pieces of work go on behind ended jobs; `drained` waits for them."""
        with self._changed:
            self._behind += change
            self._changed.notify_all()

    def release(self, slots: Iterable[SlotRef]) -> None:
        """Hand slots back to the manager."""
        with self._changed:
            self._released.extend(slots)

    def pop_released(self) -> list[SlotRef]:
        """Slots handed back since the last call."""
        with self._changed:
            released, self._released = self._released, []
            return released

    def drained(self, timeout: float) -> bool:
        """Block until no job runs and nothing is written behind, at most `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._active and not self._behind, max(0.0, timeout)
            )

    def close(self) -> None:
        """Refuse new jobs."""
        with self._changed:
            self._closed = True


def check_job(job: LoadJob | StoreJob) -> None:
    """Raises ValueError where a job contradicts itself."""
    count = len(job.keys)
    problems: list[str] = []
    if isinstance(job, LoadJob):
        engine, parts = job.dst, job.src.parts
        problems.extend(_partition_problems(parts, count))
    else:
        engine, parts = job.src, job.dst.behind
        first = job.dst.first
        if first is not None and len(first) != count:
            problems.append(f"{len(first)} host slots for {count} keys")
        for part in parts:
            wrong = [p for p in part.positions if not 0 <= p < count]
            if wrong or len(set(part.positions)) != len(part.positions):
                problems.append(
                    f"tier {part.spec.tier!r} names positions {part.positions} of {count}"
                )
    if len(engine) != count:
        problems.append(f"{len(engine)} engine blocks for {count} keys")
    problems.extend(_place_problems(parts))
    _raise_problems(job, problems)


def check_promotion(job: PromoteJob) -> None:
    """Raises ValueError where a promotion contradicts itself."""
    problems = [*_partition_problems(job.src.parts, len(job.keys)), *_place_problems(job.src.parts)]
    if len(job.dst) != len(job.keys):
        problems.append(f"{len(job.dst)} host slots for {len(job.keys)} keys")
    _raise_problems(job, problems)


def _partition_problems(parts: Sequence[Part], count: int) -> Iterable[str]:
    positions = sorted(p for part in parts for p in part.positions)
    if positions != list(range(count)):
        yield f"its parts must name each of the {count} positions exactly once"


def _place_problems(parts: Sequence[Part]) -> Iterable[str]:
    for part in parts:
        if len(part.spec) != len(part.positions):
            yield (
                f"tier {part.spec.tier!r}: {len(part.spec)} places for "
                f"{len(part.positions)} positions"
            )


def _raise_problems(job: LoadJob | StoreJob | PromoteJob, problems: Sequence[str]) -> None:
    if problems:
        raise ValueError(f"{job.kind} job {job.id} contradicts itself: {'; '.join(problems)}")
