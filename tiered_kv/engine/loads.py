"""Runs load jobs: a chain per part, parts side by side, groups of blocks one behind the other so
that reading one overlaps copying the one before.

Where a chain fails in the middle of a job, the blocks that have not come go by another one, once by
each. A block about which a tier has answered (it came, it is gone, it is corrupt) never moves
twice, and no block moves again while a call that may still write it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.contracts import VerifyMode
from tiered_kv.engine.hops import LiveHop, when_returned
from tiered_kv.engine.jobs import Active, Gate, JobTable
from tiered_kv.engine.limits import EngineLimits
from tiered_kv.engine.loop import LoopThread
from tiered_kv.engine.outcome import Outcome, all_ended, groups_of
from tiered_kv.engine.waiting import Lease, Patience, Staging
from tiered_kv.routing import CPU_ENDPOINT, GPU_ENDPOINT, Chain, Hop, Router, Tried, endpoint_of
from tiered_kv.specs import CpuSpec, HopResult, LoadJob, LoadStoreSpec, Part, TransferSpec
from tiered_kv.values import BlockKey, BlockStatus

__all__ = ["Loader"]

ABOUT_THE_WAY = frozenset((BlockStatus.TIER_ERROR, BlockStatus.TIMED_OUT, BlockStatus.NO_SPACE))
"""Answers that say nothing about the block: another chain may bring it."""


@dataclass(slots=True)
class Group:
    """Blocks of one part that move together."""

    active: Active
    job: LoadJob
    out: Outcome
    src: LoadStoreSpec
    positions: tuple[int, ...]
    """Their places in the job."""
    deadline: float
    """Until when they may come, on the loop's clock; a last copy that has begun is awaited."""

    def patience(self, hop: LiveHop) -> Patience:
        """For a turn on a hop."""
        return Patience(self.deadline, self.active.told, hop.broken)

    def to_engine(
        self, gate: Gate | None = None, *, compared: bool = False
    ) -> TransferSpec[Any, Any]:
        """A hop of all blocks that ends in the engine's cache; a plain copy has no gate."""
        dst, after = self.job.dst.take(self.positions), self.active.after
        if gate is None:
            return TransferSpec(self.src, dst, self._keys, after=after, compared=compared)
        return TransferSpec(self.src, dst, self._keys, gate.commit, after)

    def to_staging(self, dst: CpuSpec, gate: Gate) -> TransferSpec[Any, Any]:
        """A hop of all blocks into host slots."""
        return TransferSpec(self.src, dst, self._keys, gate.commit)

    @property
    def _keys(self) -> tuple[BlockKey, ...]:
        return tuple(self.job.keys[p] for p in self.positions)

    def only(self, indices: Sequence[int], src: LoadStoreSpec) -> Group:
        """Some of the blocks, which lie in `src`."""
        positions = tuple(self.positions[i] for i in indices)
        return Group(self.active, self.job, self.out, src, positions, self.deadline)

    @property
    def seconds(self) -> float:
        """How long the job may take in all."""
        return self.deadline - self.active.submitted

    def left(self) -> Group | None:
        """The blocks that did not come for no fault of theirs; None where there are none."""
        statuses = self.out.statuses
        left = [i for i, p in enumerate(self.positions) if statuses[p] in ABOUT_THE_WAY]
        return self.only(left, self.src.take(left)) if left else None

    def fail(self, status: BlockStatus) -> None:
        """None of the blocks will come; CANCELLED where the job was given up."""
        if self.active.given_up:
            status = BlockStatus.CANCELLED
        self.out.set_all(self.positions, status)


@dataclass(slots=True)
class Loader:
    """Runs load jobs on the event loop's thread."""

    loop: LoopThread
    jobs: JobTable
    router: Router
    live: Callable[[Hop], LiveHop]
    staging: Staging
    limits: EngineLimits
    slot_bytes: int
    _window: int = field(init=False)

    def __post_init__(self) -> None:
        # One group more than can be read at once: it is being copied meanwhile.
        self._window = self.limits.threads_per_tier + 1

    async def run(self, active: Active, job: LoadJob) -> None:
        """Run the job and report it, whatever happens."""
        out = Outcome.pending(len(job.keys))
        longest = self.limits.load_deadline
        if job.deadline is not None:
            longest = min(longest, job.deadline)
        deadline = active.submitted + longest  # the loop's clock is `time.monotonic`, too
        parts = [
            self.loop.spawn(self._part(active, job, part, out, deadline)) for part in job.src.parts
        ]
        try:
            await all_ended(parts)
        finally:
            # Not when the engine is stopped with the job in flight: copies may go on.
            if all(part.done() and not part.cancelled() for part in parts):
                self.jobs.finish(active, out)

    async def _part(
        self, active: Active, job: LoadJob, part: Part, out: Outcome, deadline: float
    ) -> None:
        group = Group(active, job, out, part.spec, part.positions, deadline)
        if active.given_up:
            group.fail(BlockStatus.CANCELLED)
        else:
            await self._route(group, frozenset())

    async def _route(self, group: Group, tried: Tried) -> None:
        """Bring the blocks by the cheapest healthy chain that was not tried for them."""
        chain = self.router.find(endpoint_of(group.src), GPU_ENDPOINT, tried)
        if chain is None:
            if not tried:
                group.fail(BlockStatus.TIER_ERROR)
            return
        window = asyncio.Semaphore(self._window)
        tasks: list[asyncio.Task[None]] = []
        with self.live(chain.hops[0]).way.load():
            for indices in groups_of(len(group.positions), self._group_size(chain)):
                piece = group.only(indices, group.src.take(indices))
                await window.acquire()
                task = self.loop.spawn(self._piece(chain, piece, tried))
                task.add_done_callback(lambda _: window.release())
                tasks.append(task)
            await all_ended(tasks)

    def _group_size(self, chain: Chain) -> int:
        size = max(1, self.limits.group_bytes // self.slot_bytes)
        if len(chain.hops) > 1:
            size = max(1, self.staging.group(chain.hops[0].tier, size))
        return size

    async def _piece(self, chain: Chain, piece: Group, tried: Tried) -> None:
        """Bring one group, and what the chain leaves of it by another."""
        tried |= {chain.hops}
        other = self.router.find(endpoint_of(piece.src), GPU_ENDPOINT, tried) is not None
        await self._move(chain, piece, other=other)
        left = piece.left()
        if left is None or piece.active.given_up or self.loop.loop.time() >= piece.deadline:
            return
        await self._route(left, tried)

    async def _move(self, chain: Chain, group: Group, *, other: bool) -> None:
        """By a chain; `other` says whether there is another one that could take over."""
        hops = [self.live(hop) for hop in chain.hops]
        if len(hops) > 1:
            await self._staged(hops[0], hops[1], group, other=other)
        elif hops[0].hop.src == CPU_ENDPOINT:
            await self._copy(hops[0], group)
        else:
            await self._direct(hops[0], group, other=other)

    async def _staged(self, read: LiveHop, copy: LiveHop, group: Group, *, other: bool) -> None:
        """Read into leased staging, then copy to the engine."""
        if not await self._turn(read, group):
            return
        lease = await self._lease(read, group)
        if lease is None:
            read.permits.give()
            return
        gate = Gate(group.active)  # never committed: nothing is written to the engine yet
        spec = group.to_staging(CpuSpec(lease.slots), gate)
        result = await self._bounded(read, spec, group, gate, lease, other=other)
        if result is None:
            return
        group.out.set(group.positions, result.statuses)
        whole = [i for i, status in enumerate(result.statuses) if status is BlockStatus.OK]
        lease.give_back([slot for i, slot in enumerate(lease.slots) if i not in set(whole)])
        if whole:
            source = CpuSpec(tuple(lease.slots[i] for i in whole))
            compared = read.verification.mode is not VerifyMode.ALWAYS
            await self._copy(copy, group.only(whole, source), compared=compared)
        lease.give_back()

    async def _turn(self, hop: LiveHop, group: Group) -> bool:
        """Wait for a permit of a hop that reads from a tier; False where the group failed."""
        if hop.trouble is not None:
            group.fail(BlockStatus.TIER_ERROR)
            return False
        if self.loop.loop.time() >= group.deadline:
            group.fail(BlockStatus.TIMED_OUT)
            return False
        taken = await hop.permits.take(group.patience(hop))
        if group.active.given_up or hop.trouble is not None:
            if taken:
                hop.permits.give()
            group.fail(BlockStatus.TIER_ERROR)
            return False
        if not taken:
            group.fail(BlockStatus.TIMED_OUT)
        return taken

    async def _lease(self, read: LiveHop, group: Group) -> Lease | None:
        """Staging for a group; None where it failed."""
        tenant = read.hop.tier
        if not self.staging.group(tenant, 1):
            group.fail(BlockStatus.NO_SPACE)
            return None
        lease = await self.staging.lease(tenant, len(group.positions), group.patience(read))
        if group.active.given_up or read.trouble is not None:
            if lease is not None:
                lease.give_back()
            group.fail(BlockStatus.TIER_ERROR)
            return None
        if lease is None:
            group.fail(BlockStatus.TIMED_OUT)
        return lease

    async def _direct(self, hop: LiveHop, group: Group, *, other: bool) -> None:
        """A handler that brings blocks from a store to the engine by itself. It can be given up
        until it commits; after that it only copies, and is awaited."""
        if not await self._turn(hop, group):
            return
        gate = Gate(group.active)
        result = await self._bounded(hop, group.to_engine(gate), group, gate, None, other=other)
        if result is not None:
            group.out.add(group.positions, result)

    async def _copy(self, hop: LiveHop, group: Group, *, compared: bool = False) -> None:
        """The plain copy from host slots to the engine: once begun, it is awaited."""
        with hop.way.load():
            await self._copy_now(hop, group, compared=compared)

    async def _copy_now(self, hop: LiveHop, group: Group, *, compared: bool) -> None:
        if not await self._turn(hop, group):
            return
        task = hop.begin(group.to_engine(compared=compared), None)
        when_returned(task, hop.permits.give)
        result = await task
        group.out.add(group.positions, result)

    async def _bounded(
        self,
        hop: LiveHop,
        spec: TransferSpec[Any, Any],
        group: Group,
        gate: Gate,
        lease: Lease | None,
        *,
        other: bool,
    ) -> HopResult | None:
        """Run a call until the job's deadline at most, and for half of the job's time where there
        is another chain; None where it was given up.

        A call that was given up goes on: its permit and its staging stay out of use until it
        returns, and `drain` waits for it. How long it may run before its hop counts as hanging does
        not depend on the job: one that is soon computed anew has little patience.
        """
        limits = self.limits
        task = hop.begin(spec, limits.call_seconds(limits.load_deadline, other_chain=other))
        when_returned(task, hop.permits.give)
        until = self.loop.loop.time() + limits.call_seconds(group.seconds, other_chain=other)
        patience = Patience(min(until, group.deadline), group.active.told)
        if await patience.wait(task) or not gate.close():
            return await task

        def returned() -> None:
            if lease is not None:
                lease.give_back()
            self.jobs.behind(-1)

        self.jobs.behind(1)
        when_returned(task, returned)
        group.fail(BlockStatus.TIMED_OUT)
        return None
