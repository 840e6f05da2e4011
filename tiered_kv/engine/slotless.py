"""Runs store jobs where no cpu tier is configured: each destination is reached by a handler that
goes to it directly, or through leased staging slots, from which write-behind serves several.

Where a chain fails in the middle of a job, the blocks that it left go by another one, once by each,
unless a call that has gathered them still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from tiered_kv.engine.behind import WriteBehind, why_dropped
from tiered_kv.engine.captures import SIDE_BY_SIDE, Capture, behind_parts, in_groups
from tiered_kv.engine.hops import LiveHop, when_returned
from tiered_kv.engine.jobs import Active, Gate, JobTable
from tiered_kv.engine.limits import EngineLimits
from tiered_kv.engine.loop import LoopThread
from tiered_kv.engine.outcome import Outcome, all_ended
from tiered_kv.engine.waiting import Lease, Patience, Staging
from tiered_kv.engine.wear import WriteMeter
from tiered_kv.routing import (
    CPU_ENDPOINT,
    GPU_ENDPOINT,
    Chain,
    Endpoint,
    Hop,
    Router,
    Tried,
    endpoint_of,
)
from tiered_kv.specs import CpuSpec, HopResult, Part, StoreJob
from tiered_kv.stats import DropReason, StatsRecorder
from tiered_kv.values import BlockStatus

__all__ = ["SlotlessStorer"]

ABOUT_THE_WAY = frozenset((BlockStatus.TIER_ERROR, BlockStatus.TIMED_OUT))
"""Answers that say nothing about the block nor about the room for it: another chain may store
it."""


@dataclass(frozen=True, slots=True)
class _Target:
    """One destination of a store job."""

    part: Part
    """The blocks that are still to be moved."""
    out: Outcome
    """What became of this destination's blocks, in job order."""
    tried: Tried = frozenset()

    @property
    def endpoint(self) -> Endpoint:
        return endpoint_of(self.part.spec)

    def by(self, chain: Chain) -> _Target:
        """The same, with one more chain that was tried."""
        return replace(self, tried=self.tried | {chain.hops})

    def only(self, indices: Sequence[int]) -> _Target:
        """Some of the blocks."""
        positions = tuple(self.part.positions[i] for i in indices)
        return replace(self, part=Part(self.part.spec.take(indices), positions))

    def left(self, positions: Collection[int]) -> _Target | None:
        """Those of its blocks at these positions that another chain may store; None: none."""
        left = [
            i
            for i, p in enumerate(self.part.positions)
            if p in positions and self.out.statuses[p] in ABOUT_THE_WAY
        ]
        return self.only(left) if left else None

    def among(self, positions: Collection[int]) -> list[int]:
        """Those of the positions that belong to this destination."""
        return [p for p in self.part.positions if p in positions]


@dataclass(frozen=True, slots=True)
class _Run:
    """A job and what it waits for."""

    capture: Capture
    deadline: float
    """Until when blocks may begin to go another way, on the loop's clock."""
    hanging: list[asyncio.Task[HopResult]] = field(default_factory=list)
    """Calls that were given up, but may be gathering from the engine's blocks still."""


@dataclass(slots=True)
class SlotlessStorer:
    """Runs store jobs on the event loop's thread."""

    loop: LoopThread
    jobs: JobTable
    router: Router
    live: Callable[[Hop], LiveHop]
    staging: Staging
    behind: WriteBehind
    stats: StatsRecorder
    limits: EngineLimits
    meter: WriteMeter
    slot_bytes: int

    async def run(self, active: Active, job: StoreJob) -> None:
        """Run the job and report it, whatever happens. A block is stored where one destination
        has it, or will have it from staging; each destination has a result of its own."""
        out = Outcome.pending(len(job.keys))
        run = _Run(Capture(active, job, out), self.loop.loop.time() + self.limits.store_deadline)
        targets = [_Target(part, Outcome.pending(len(job.keys))) for part in job.dst.behind]
        work = self.loop.spawn(self._all(run, targets))
        try:
            await all_ended([work])
        finally:
            if work.done() and not work.cancelled():
                self.jobs.finish(active, out)

    async def _all(self, run: _Run, targets: Sequence[_Target]) -> None:
        out = run.capture.out
        await self._route(run, targets)
        for target in targets:
            for position in target.part.positions:
                if out.statuses[position] is not BlockStatus.OK:
                    out.statuses[position] = target.out.statuses[position]
            out.copied_bytes += target.out.copied_bytes
        await all_ended(run.hanging)

    async def _route(self, run: _Run, targets: Iterable[_Target]) -> None:
        """Each destination by the cheapest healthy chain that was not tried for its blocks."""
        staged: list[_Target] = []
        works: list[asyncio.Task[None]] = []
        for target in targets:
            chain = self.router.find(GPU_ENDPOINT, target.endpoint, target.tried)
            if chain is None:
                self._dropped(target, DropReason.FAILED if target.tried else DropReason.UNHEALTHY)
            elif chain.hops[0].direct:
                hop = self.live(chain.hops[0])
                works.append(self.loop.spawn(self._direct(run, hop, target.by(chain))))
            else:
                staged.append(target.by(chain))
        if staged:
            works.append(self.loop.spawn(self._staged(run, staged)))
        await all_ended(works)

    async def _elsewhere(self, run: _Run, left: Iterable[_Target | None]) -> None:
        """What a chain has left goes by another one."""
        given_up = run.capture.active.given_up
        targets = [target for target in left if target is not None]
        if not given_up and self.loop.loop.time() < run.deadline:
            await self._route(run, targets)
            return
        for target in targets:
            self._dropped(target, DropReason.POISONED if given_up else DropReason.FAILED)

    def _dropped(self, target: _Target, reason: DropReason) -> None:
        self.stats.dropped(target.part.spec.tier, reason, len(target.part.positions))

    async def _direct(self, run: _Run, hop: LiveHop, target: _Target) -> None:
        """By a handler that gathers from the engine, writes and publishes by itself."""
        other = self.router.find(GPU_ENDPOINT, target.endpoint, target.tried) is not None
        limit = self.limits.call_seconds(self.limits.store_deadline, other_chain=other)

        async def move(indices: tuple[int, ...]) -> None:
            piece = target.only(indices)
            if await self._call(run, hop, piece, limit):
                await self._elsewhere(run, [piece.left(piece.part.positions)])

        pace = self.behind.pace(hop.hop.tier)
        size = max(1, pace.call_bytes(self.limits.group_bytes, SIDE_BY_SIDE) // self.slot_bytes)
        await in_groups(self.loop, range(len(target.part.positions)), size, move)

    async def _call(self, run: _Run, hop: LiveHop, piece: _Target, limit: float) -> bool:
        """Store one group; whether what it left may go by another chain."""
        capture, positions, out = run.capture, piece.part.positions, piece.out
        if not await capture.turn(hop, positions, out):
            return True
        tier, size = hop.hop.tier, len(positions) * self.slot_bytes
        if not self.meter.allows(tier, size):
            hop.permits.give()
            out.set_all(positions, BlockStatus.OVER_BUDGET)
            self._dropped(piece, DropReason.WEAR)
            return True
        gate = Gate(capture.active)
        pace = self.behind.pace(tier)
        pace.began(size)
        task = hop.begin(capture.spec(positions, piece.part.spec, gate), limit)
        when_returned(task, hop.permits.give)
        if await Patience(self.loop.loop.time() + limit).wait(task):
            result = await task
            pace.ended(size, result.copied_bytes)
            self.meter.written(tier, result.copied_bytes)
            out.add(positions, result)
            for reason, blocks in why_dropped(result, poisoned=capture.active.given_up).items():
                if reason is not DropReason.FAILED:  # that may go another way
                    self.stats.dropped(tier, reason, blocks)
            return True
        pace.given_up(size)
        out.set_all(positions, BlockStatus.TIMED_OUT)
        if gate.close():  # it will publish nothing, but the engine's blocks are in its hands
            run.hanging.append(task)
            return True
        # It has left the engine's blocks, and may publish yet: the job does not wait for that.
        self.jobs.behind(1)
        when_returned(task, lambda: self.jobs.behind(-1))
        self._dropped(piece, DropReason.FAILED)
        return False

    async def _staged(self, run: _Run, targets: Sequence[_Target]) -> None:
        """Into leased staging slots, which write-behind holds until it is done with them."""
        chain = self.router.find(GPU_ENDPOINT, CPU_ENDPOINT)
        if chain is None:  # it broke between the choice of the longer chain and now
            await self._elsewhere(run, [target.left(target.part.positions) for target in targets])
            return
        hop = self.live(chain.hops[0])

        async def move(positions: tuple[int, ...]) -> None:
            await self._stage(run, hop, targets, positions)
            await self._elsewhere(run, [target.left(positions) for target in targets])

        wanted = sorted({p for target in targets for p in target.part.positions})
        size = max(1, self.limits.group_bytes // self.slot_bytes)
        size = max(1, self.staging.group(Staging.STORES, size))
        await in_groups(self.loop, wanted, size, move)

    async def _stage(
        self, run: _Run, hop: LiveHop, targets: Sequence[_Target], positions: tuple[int, ...]
    ) -> None:
        """Gather one group into staging, and have it written from there to its destinations."""
        active = run.capture.active
        gathered = Outcome.pending(len(run.capture.job.keys))
        self.behind.make_way(len(positions), (target.part.spec.tier for target in targets))
        lease = await self._lease(len(positions), Patience(run.deadline, active.told, hop.broken))
        if lease is not None:
            await self._from_staging(run, hop, targets, positions, lease, gathered)
        elif hop.trouble is None:
            gathered.set_all(positions, BlockStatus.NO_SPACE)
            for target in targets:
                tier, blocks = target.part.spec.tier, len(target.among(positions))
                self.stats.dropped(tier, DropReason.STAGING, blocks)
        for target in targets:
            for position in target.among(positions):
                target.out.statuses[position] = gathered.statuses[position]

    async def _from_staging(
        self,
        run: _Run,
        hop: LiveHop,
        targets: Sequence[_Target],
        positions: tuple[int, ...],
        lease: Lease,
        gathered: Outcome,
    ) -> None:
        capture = run.capture
        await capture.to_slots(hop, positions, CpuSpec(lease.slots), gathered)
        capture.out.copied_bytes += gathered.copied_bytes
        if capture.active.given_up:
            lease.give_back()
            return
        slots = dict(zip(positions, lease.slots, strict=True))
        parts = behind_parts(capture.job, [target.part for target in targets], slots, gathered)
        kept = self.behind.offer(capture.active, parts, lease.slots, lease.give_back)
        for position, slot in slots.items():
            if slot not in kept and gathered.statuses[position] is BlockStatus.OK:
                gathered.statuses[position] = BlockStatus.NO_SPACE

    async def _lease(self, count: int, patience: Patience) -> Lease | None:
        if not self.staging.group(Staging.STORES, 1):
            return None
        return await self.staging.lease(Staging.STORES, count, patience)
