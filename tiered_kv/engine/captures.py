"""Runs store jobs: takes blocks out of the engine's cache, after which the job has ended, and hands
them to write-behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiered_kv.engine.behind import BehindPart, WriteBehind
from tiered_kv.engine.hops import LiveHop, when_returned
from tiered_kv.engine.jobs import Active, Gate, JobTable
from tiered_kv.engine.limits import EngineLimits
from tiered_kv.engine.loop import LoopThread
from tiered_kv.engine.outcome import Outcome, all_ended, groups_of
from tiered_kv.engine.waiting import Patience, Priority
from tiered_kv.routing import CPU_ENDPOINT, GPU_ENDPOINT, Hop, Router
from tiered_kv.specs import CpuSpec, LoadStoreSpec, Part, SlotRef, StoreJob, TransferSpec
from tiered_kv.values import BlockStatus

__all__ = ["SIDE_BY_SIDE", "Capture", "SlotStorer", "behind_parts", "in_groups"]

SIDE_BY_SIDE = 2
"""Groups of a job that leave the engine's cache at once."""


@dataclass(frozen=True, slots=True)
class Capture:
    """A store job while its blocks leave the engine's cache."""

    active: Active
    job: StoreJob
    out: Outcome

    def spec(
        self, positions: Sequence[int], dst: LoadStoreSpec, gate: Gate
    ) -> TransferSpec[Any, Any]:
        """One hop out of the engine's cache, of the blocks at these positions of the job."""
        keys = tuple(self.job.keys[p] for p in positions)
        source = self.job.src.take(positions)
        return TransferSpec(source, dst, keys, gate.commit, self.active.after)

    async def turn(self, hop: LiveHop, positions: Sequence[int], out: Outcome) -> bool:
        """Wait for a permit; False where the blocks have failed meanwhile, as `out` says."""
        active = self.active
        patience = Patience(None, active.told, hop.broken)
        taken = await hop.permits.take(patience, Priority.STORE)
        if taken and not active.given_up and hop.trouble is None:
            return True
        if taken:
            hop.permits.give()
        status = BlockStatus.CANCELLED if active.given_up else BlockStatus.TIER_ERROR
        out.set_all(positions, status)
        return False

    async def to_slots(
        self, hop: LiveHop, positions: Sequence[int], dst: CpuSpec, out: Outcome
    ) -> None:
        """Copy blocks into host slots: a plain copy, which ends, and is awaited."""
        if not await self.turn(hop, positions, out):
            return
        task = hop.begin(self.spec(positions, dst, Gate(self.active)), None)
        when_returned(task, hop.permits.give)
        out.add(positions, await task)


@dataclass(slots=True)
class SlotStorer:
    """Runs store jobs whose blocks go to host slots of the manager first; on the event loop's
    thread."""

    loop: LoopThread
    jobs: JobTable
    router: Router
    live: Callable[[Hop], LiveHop]
    behind: WriteBehind
    limits: EngineLimits
    slot_bytes: int

    async def run(self, active: Active, job: StoreJob, first: CpuSpec) -> None:
        """Run the job, report it, and start its write-behind, whatever happens."""
        out = Outcome.pending(len(job.keys))
        work = self.loop.spawn(self._capture(Capture(active, job, out), first))
        # Whoever waits for everything must not see the gap between the job and its write-behind.
        self.jobs.behind(1)
        try:
            await all_ended([work])
        finally:
            if work.done() and not work.cancelled():
                out.statuses[:] = self.jobs.finish(active, out).statuses
                slots = dict(enumerate(first.slots))
                parts = behind_parts(job, job.dst.behind, slots, out)
                self.behind.offer(active, parts, first.slots, self.jobs.release)
                self.jobs.behind(-1)

    async def _capture(self, capture: Capture, first: CpuSpec) -> None:
        chain = self.router.find(GPU_ENDPOINT, CPU_ENDPOINT)
        if chain is None:
            return
        hop = self.live(chain.hops[0])

        async def move(positions: tuple[int, ...]) -> None:
            await capture.to_slots(hop, positions, first.take(positions), capture.out)

        size = max(1, self.limits.group_bytes // self.slot_bytes)
        await in_groups(self.loop, range(len(capture.job.keys)), size, move)


async def in_groups(
    loop: LoopThread,
    positions: Sequence[int],
    size: int,
    move: Callable[[tuple[int, ...]], Coroutine[Any, Any, None]],
) -> None:
    """Move groups of blocks, two at a time, so that one can be prepared meanwhile."""
    window = asyncio.Semaphore(SIDE_BY_SIDE)
    tasks: list[asyncio.Task[None]] = []
    for indices in groups_of(len(positions), size):
        await window.acquire()
        task = loop.spawn(move(tuple(positions[i] for i in indices)))
        task.add_done_callback(lambda _: window.release())
        tasks.append(task)
    await all_ended(tasks)


def behind_parts(
    job: StoreJob, parts: Sequence[Part], slots: Mapping[int, SlotRef], out: Outcome
) -> list[BehindPart]:
    """What is to be written from `slots` (by position in the job): blocks that lie there whole."""
    behind: list[BehindPart] = []
    for part in parts:
        chosen = [
            (index, position)
            for index, position in enumerate(part.positions)
            if position in slots and out.statuses[position] is BlockStatus.OK
        ]
        if chosen:
            behind.append(
                BehindPart(
                    part.spec.take([index for index, _ in chosen]),
                    tuple(job.keys[position] for _, position in chosen),
                    tuple(slots[position] for _, position in chosen),
                )
            )
    return behind
