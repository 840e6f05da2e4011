"""Runs promotions: blocks go from stores into host slots of the manager, ahead of their loads.

The engine's cache is not touched. Loads go first: a promotion takes a turn on a tier only where no
load waits for one, and promotions leave one for loads where there are several.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tiered_kv.engine.hops import LiveHop, when_returned
from tiered_kv.engine.jobs import JobTable, check_promotion
from tiered_kv.engine.limits import EngineLimits
from tiered_kv.engine.loop import LoopThread
from tiered_kv.engine.outcome import Outcome, all_ended, groups_of
from tiered_kv.engine.waiting import Patience, Permits, Priority
from tiered_kv.routing import CPU_ENDPOINT, Hop, Router, endpoint_of
from tiered_kv.specs import LoadStoreSpec, Part, PromoteJob, TransferSpec
from tiered_kv.values import BlockStatus, JobId

__all__ = ["Promoter"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Active:
    """A promotion between its submission and its end."""

    job: PromoteJob
    out: Outcome
    deadline: float
    """Until when a block may begin to be read, on the loop's clock."""
    given_up: asyncio.Future[None]
    """Done when the engine closes."""


@dataclass(slots=True)
class Promoter:
    """Runs promotions on the event loop's thread; `submit`, `pop_ended` and `stop` are for any."""

    loop: LoopThread
    jobs: JobTable
    router: Router
    live: Callable[[Hop], LiveHop]
    limits: EngineLimits
    slot_bytes: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _latest: int = -1
    _ended: list[tuple[JobId, tuple[BlockStatus, ...]]] = field(default_factory=list)
    _active: dict[JobId, _Active] = field(default_factory=dict)
    _turns: dict[str, Permits] = field(default_factory=dict)
    """By tier, how many calls promotions may have at once."""
    _stopped: bool = False

    def submit(self, job: PromoteJob) -> None:
        """Take a promotion. Its id must be above all before: one that was given already, in a
        message that came twice, is not run again.

        Raises:
            ValueError: the job contradicts itself. It ends all the same, CANCELLED.
        """
        with self._lock:
            if job.id <= self._latest:
                return
            self._latest = job.id
        self.jobs.behind(1)
        try:
            check_promotion(job)
        except ValueError:
            self._cancel(job)
            raise
        if self._stopped or not self.loop.call(self._start, job):
            self._cancel(job)

    def _cancel(self, job: PromoteJob) -> None:
        self.jobs.release(job.dst.slots)
        self._end(job, Outcome([BlockStatus.CANCELLED] * len(job.keys)))

    def pop_ended(self) -> list[tuple[JobId, tuple[BlockStatus, ...]]]:
        """Promotions that have ended since the last call, with a status per block; each once."""
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def stop(self) -> None:
        """Begin to read nothing any more; what has begun goes on."""
        self._stopped = True
        self.loop.call(self._give_up)

    # ------------------------------------------------------------------- on the loop's thread

    def _give_up(self) -> None:
        for active in self._active.values():
            if not active.given_up.done():
                active.given_up.set_result(None)

    def _start(self, job: PromoteJob) -> None:
        loop = self.loop.loop
        active = _Active(
            job,
            Outcome.pending(len(job.keys)),
            loop.time() + job.deadline,
            loop.create_future(),
        )
        self._active[job.id] = active
        if self._stopped:
            active.given_up.set_result(None)
        self.loop.spawn(self._run(active))

    async def _run(self, active: _Active) -> None:
        parts = [self.loop.spawn(self._part(active, part)) for part in active.job.src.parts]
        try:
            await all_ended(parts)
        finally:
            del self._active[active.job.id]
            if all(part.done() and not part.cancelled() for part in parts):
                self._end(active.job, active.out)

    def _end(self, job: PromoteJob, out: Outcome) -> None:
        with self._lock:
            self._ended.append((job.id, tuple(out.statuses)))
        self.jobs.behind(-1)

    async def _part(self, active: _Active, part: Part) -> None:
        chain = self.router.find(endpoint_of(part.spec), CPU_ENDPOINT)
        if chain is None:
            self._fail(active, part.positions, BlockStatus.TIER_ERROR)
            return
        hop = self.live(chain.hops[0])
        # One group more than can be read at once waits for its turn.
        window = asyncio.Semaphore(self.limits.threads_per_tier + 1)
        groups: list[asyncio.Task[None]] = []
        size = max(1, self.limits.group_bytes // self.slot_bytes)
        for indices in groups_of(len(part.positions), size):
            await window.acquire()
            positions = tuple(part.positions[i] for i in indices)
            group = self.loop.spawn(self._group(active, hop, part.spec.take(indices), positions))
            group.add_done_callback(lambda _: window.release())
            groups.append(group)
        await all_ended(groups)

    async def _group(
        self, active: _Active, hop: LiveHop, src: LoadStoreSpec, positions: tuple[int, ...]
    ) -> None:
        with hop.way.load():
            await self._bring(active, hop, src, positions)

    async def _bring(
        self, active: _Active, hop: LiveHop, src: LoadStoreSpec, positions: tuple[int, ...]
    ) -> None:
        if not await self._turn(active, hop):
            broken = BlockStatus.TIER_ERROR if hop.trouble is not None else BlockStatus.TIMED_OUT
            status = BlockStatus.CANCELLED if active.given_up.done() else broken
            self._fail(active, positions, status)
            return
        job = active.job
        slots = job.dst.take(positions)
        keys = tuple(job.keys[p] for p in positions)
        limit = self.limits.load_deadline
        task = hop.begin(TransferSpec(src, slots, keys), limit)
        when_returned(task, lambda: self._give_turn(hop))
        if await Patience(self.loop.loop.time() + limit).wait(task):
            active.out.set(positions, (await task).statuses)
            self.jobs.release(slots.slots)
            return
        # The call may write to the slots for as long as it runs.
        active.out.set_all(positions, BlockStatus.TIMED_OUT)

        def returned() -> None:
            self.jobs.release(slots.slots)
            self.jobs.behind(-1)

        self.jobs.behind(1)
        when_returned(task, returned)

    async def _turn(self, active: _Active, hop: LiveHop) -> bool:
        """Wait for a turn; False where there is none in time, or the hop does not work."""
        patience = Patience(active.deadline, active.given_up, hop.broken)
        if hop.trouble is not None or not await self._own(hop).take(patience):
            return False
        if not await hop.permits.take(patience, Priority.PROMOTE):
            self._own(hop).give()
            return False
        late = self.loop.loop.time() >= active.deadline
        if late or active.given_up.done() or hop.trouble is not None:
            self._give_turn(hop)
            return False
        return True

    def _own(self, hop: LiveHop) -> Permits:
        share = max(1, self.limits.threads_per_tier - 1)
        return self._turns.setdefault(hop.hop.tier, Permits(share))

    def _give_turn(self, hop: LiveHop) -> None:
        hop.permits.give()
        self._own(hop).give()

    def _fail(self, active: _Active, positions: tuple[int, ...], status: BlockStatus) -> None:
        active.out.set_all(positions, status)
        self.jobs.release(active.job.dst.take(positions).slots)
