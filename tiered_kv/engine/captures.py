"""Runs store jobs: takes blocks out of the engine's cache, after which the job has ended, and hands
them to write-behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiered_kv.engine.behind import BehindPart, WriteBehind
from tiered_kv.engine.hops import LiveHop
from tiered_kv.engine.jobs import Active, Gate, JobTable
from tiered_kv.engine.limits import EngineLimits
from tiered_kv.engine.loop import LoopThread
from tiered_kv.engine.outcome import Outcome, all_ended, groups_of
from tiered_kv.engine.waiting import Lease, Patience, Staging
from tiered_kv.errors import TierError
from tiered_kv.routing import CPU_ENDPOINT, GPU_ENDPOINT, Hop, Router, endpoint_of
from tiered_kv.specs import (
    CpuSpec,
    HopResult,
    LoadStoreSpec,
    Part,
    SlotRef,
    StoreJob,
    TransferSpec,
)
from tiered_kv.stats import StatsRecorder
from tiered_kv.values import BlockStatus

__all__ = ["Storer"]


@dataclass(slots=True)
class Storer:
    """Runs store jobs on the event loop's thread."""

    loop: LoopThread
    jobs: JobTable
    router: Router
    live: Callable[[Hop], LiveHop]
    staging: Staging
    behind: WriteBehind
    stats: StatsRecorder
    limits: EngineLimits
    slot_bytes: int

    async def run(self, active: Active, job: StoreJob) -> None:
        """Run the job, report it, and start its write-behind, whatever happens."""
        out = Outcome.pending(len(job.keys))
        first = job.dst.first
        if first is None:
            work = self.loop.spawn(self._without_slots(active, job, out))
        else:
            work = self.loop.spawn(self._to_slots(active, job, first, out))
        # Whoever waits for everything must not see the gap between the job and its write-behind.
        self.jobs.behind(1)
        try:
            await all_ended([work])
        finally:
            if work.done() and not work.cancelled():
                out.statuses[:] = self.jobs.finish(active, out).statuses
                if first is not None:
                    slots = dict(enumerate(first.slots))
                    parts = _behind_parts(job, job.dst.behind, slots, out)
                    self.behind.offer(active, parts, first.slots, self.jobs.release)
                self.jobs.behind(-1)

    async def _to_slots(self, active: Active, job: StoreJob, first: CpuSpec, out: Outcome) -> None:
        """Into the manager's host slots."""
        try:
            chain = self.router.chain(GPU_ENDPOINT, CPU_ENDPOINT)
        except TierError:
            return
        hop = self.live(chain.hops[0])

        async def move(positions: tuple[int, ...]) -> None:
            await self._call(active, job, hop, positions, first.take(positions), out)

        size = max(1, self.limits.group_bytes // self.slot_bytes)
        await self._in_groups(range(len(job.keys)), size, move)

    async def _without_slots(self, active: Active, job: StoreJob, out: Outcome) -> None:
        """No cpu tier: through leased staging, or by handlers that go to a store directly."""
        staged: list[Part] = []
        works: list[asyncio.Task[None]] = []
        for part in job.dst.behind:
            try:
                chain = self.router.chain(GPU_ENDPOINT, endpoint_of(part.spec))
            except TierError:
                self.stats.dropped(part.spec.tier, "unhealthy", len(part.positions))
                continue
            if len(chain.hops) == 2:
                staged.append(part)
            else:
                hop = self.live(chain.hops[0])
                works.append(self.loop.spawn(self._direct(active, job, hop, part, out)))
        if staged:
            works.append(self.loop.spawn(self._staged(active, job, staged, out)))
        await all_ended(works)

    async def _direct(
        self, active: Active, job: StoreJob, hop: LiveHop, part: Part, out: Outcome
    ) -> None:
        """By a handler that gathers from the engine, writes and publishes by itself."""

        async def move(indices: tuple[int, ...]) -> None:
            positions = tuple(part.positions[i] for i in indices)
            await self._call(active, job, hop, positions, part.spec.take(indices), out)

        size = max(1, self.limits.group_bytes // self.slot_bytes)
        await self._in_groups(range(len(part.positions)), size, move)

    async def _staged(
        self, active: Active, job: StoreJob, parts: Sequence[Part], out: Outcome
    ) -> None:
        """Into leased staging slots, which write-behind holds until it is done with them."""
        try:
            hop = self.live(self.router.chain(GPU_ENDPOINT, CPU_ENDPOINT).hops[0])
        except TierError:
            return
        deadline = self.loop.loop.time() + self.limits.store_deadline
        patience = Patience(deadline, active.told)

        async def move(positions: tuple[int, ...]) -> None:
            lease = await self._lease(len(positions), patience)
            if lease is None:
                out.set_all(positions, BlockStatus.NO_SPACE)
                for part in parts:
                    lost = len(set(part.positions) & set(positions))
                    self.stats.dropped(part.spec.tier, "staging", lost)
                return
            slots = CpuSpec(lease.slots)
            result = await self._call(active, job, hop, positions, slots, out)
            if result is None or active.given_up:
                lease.give_back()
                return
            behind = _behind_parts(job, parts, dict(zip(positions, lease.slots, strict=True)), out)
            kept = self.behind.offer(active, behind, lease.slots, lease.give_back)
            for position, slot in zip(positions, lease.slots, strict=True):
                if slot not in kept and out.statuses[position] is BlockStatus.OK:
                    out.statuses[position] = BlockStatus.NO_SPACE

        wanted = sorted({position for part in parts for position in part.positions})
        size = max(1, self.limits.group_bytes // self.slot_bytes)
        size = max(1, self.staging.group(Staging.STORES, size))
        await self._in_groups(wanted, size, move)

    async def _lease(self, count: int, patience: Patience) -> Lease | None:
        if not self.staging.group(Staging.STORES, 1):
            return None
        return await self.staging.lease(Staging.STORES, count, patience)

    async def _call(
        self,
        active: Active,
        job: StoreJob,
        hop: LiveHop,
        positions: tuple[int, ...],
        dst: LoadStoreSpec,
        out: Outcome,
    ) -> HopResult | None:
        """Move one group out of the engine's cache; None where that did not begin."""
        if not await hop.permits.take(Patience(None, active.told)):
            out.set_all(positions, BlockStatus.CANCELLED)
            return None
        if active.given_up or hop.trouble is not None:
            hop.permits.give()
            status = BlockStatus.CANCELLED if active.given_up else BlockStatus.TIER_ERROR
            out.set_all(positions, status)
            return None
        keys = tuple(job.keys[p] for p in positions)
        source = job.src.take(positions)
        spec = TransferSpec(source, dst, keys, Gate(active).commit)
        # A plain copy out of the engine ends; a direct one is watched, and awaited all the same.
        limit = None if hop.hop.dst == CPU_ENDPOINT else self.limits.store_deadline
        result = await hop.begin(spec, limit)
        hop.permits.give()
        out.add(positions, result)
        return result

    async def _in_groups(
        self,
        positions: Sequence[int],
        size: int,
        move: Callable[[tuple[int, ...]], Coroutine[Any, Any, None]],
    ) -> None:
        """Move groups of blocks, two at a time, so that one can be prepared meanwhile."""
        window = asyncio.Semaphore(2)
        tasks: list[asyncio.Task[None]] = []
        for indices in groups_of(len(positions), size):
            await window.acquire()
            task = self.loop.spawn(move(tuple(positions[i] for i in indices)))
            task.add_done_callback(lambda _: window.release())
            tasks.append(task)
        await all_ended(tasks)


def _behind_parts(
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
