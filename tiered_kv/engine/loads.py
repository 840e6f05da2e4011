"""Runs load jobs: a chain per part, parts side by side, groups of blocks one behind the other so
that reading one overlaps copying the one before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.engine.hops import LiveHop, when_returned
from tiered_kv.engine.jobs import Active, Gate, JobTable
from tiered_kv.engine.limits import EngineLimits
from tiered_kv.engine.loop import LoopThread
from tiered_kv.engine.outcome import Outcome, all_ended, groups_of
from tiered_kv.engine.waiting import Lease, Patience, Staging
from tiered_kv.errors import TierError
from tiered_kv.routing import CPU_ENDPOINT, GPU_ENDPOINT, Chain, Hop, Router, endpoint_of
from tiered_kv.specs import CpuSpec, HopResult, LoadJob, LoadStoreSpec, Part, TransferSpec
from tiered_kv.values import BlockStatus

__all__ = ["Loader"]


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
    """Until when they may wait for their turn, on the loop's clock."""

    def patience(self) -> Patience:
        """For a turn."""
        return Patience(self.deadline, self.active.told)

    def spec(
        self, src: LoadStoreSpec, dst: LoadStoreSpec | None = None, gate: Gate | None = None
    ) -> TransferSpec[Any, Any]:
        """One hop of all blocks; to the engine where no `dst` is given."""
        keys = tuple(self.job.keys[p] for p in self.positions)
        dst = self.job.dst.take(self.positions) if dst is None else dst
        if gate is None:
            return TransferSpec(src, dst, keys)
        return TransferSpec(src, dst, keys, gate.commit)

    def only(self, indices: Sequence[int], src: LoadStoreSpec) -> Group:
        """Some of the blocks, which lie elsewhere by now."""
        positions = tuple(self.positions[i] for i in indices)
        return Group(self.active, self.job, self.out, src, positions, self.deadline)

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
        deadline = self.loop.loop.time() + self.limits.load_deadline
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
        if active.given_up:
            out.set_all(part.positions, BlockStatus.CANCELLED)
            return
        try:
            chain = self.router.chain(endpoint_of(part.spec), GPU_ENDPOINT)
        except TierError:
            out.set_all(part.positions, BlockStatus.TIER_ERROR)
            return
        window = asyncio.Semaphore(self._window)
        tasks: list[asyncio.Task[None]] = []
        for indices in groups_of(len(part.positions), self._group_size(chain)):
            group = Group(
                active,
                job,
                out,
                part.spec.take(indices),
                tuple(part.positions[i] for i in indices),
                deadline,
            )
            await window.acquire()
            task = self.loop.spawn(self._move(chain, group))
            task.add_done_callback(lambda _: window.release())
            tasks.append(task)
        await all_ended(tasks)

    def _group_size(self, chain: Chain) -> int:
        size = max(1, self.limits.group_bytes // self.slot_bytes)
        if len(chain.hops) > 1:
            size = max(1, self.staging.group(chain.hops[0].tier, size))
        return size

    async def _move(self, chain: Chain, group: Group) -> None:
        hops = [self.live(hop) for hop in chain.hops]
        if len(hops) > 1:
            await self._staged(hops[0], hops[1], group)
        elif hops[0].hop.src == CPU_ENDPOINT:
            await self._copy(hops[0], group)
        else:
            await self._direct(hops[0], group)

    async def _staged(self, read: LiveHop, copy: LiveHop, group: Group) -> None:
        """Read into leased staging, then copy to the engine."""
        if read.trouble is not None:
            group.fail(BlockStatus.TIER_ERROR)
            return
        if not await read.permits.take(group.patience()):
            group.fail(BlockStatus.TIMED_OUT)
            return
        lease = await self._lease(read, group)
        if lease is None:
            read.permits.give()
            return
        spec = group.spec(group.src, CpuSpec(lease.slots))
        gate = Gate(group.active)  # never committed: nothing is written to the engine yet
        result = await self._bounded(read, spec, group, gate, lease)
        if result is None:
            return
        group.out.set(group.positions, result.statuses)
        whole = [i for i, status in enumerate(result.statuses) if status is BlockStatus.OK]
        lease.give_back([slot for i, slot in enumerate(lease.slots) if i not in set(whole)])
        if whole:
            source = CpuSpec(tuple(lease.slots[i] for i in whole))
            await self._copy(copy, group.only(whole, source))
        lease.give_back()

    async def _lease(self, read: LiveHop, group: Group) -> Lease | None:
        """Staging for a group; None where it failed."""
        tenant = read.hop.tier
        if not self.staging.group(tenant, 1):
            group.fail(BlockStatus.NO_SPACE)
            return None
        lease = await self.staging.lease(tenant, len(group.positions), group.patience())
        if lease is None:
            group.fail(BlockStatus.TIMED_OUT)
        elif group.active.given_up or read.trouble is not None:
            lease.give_back()
            group.fail(BlockStatus.TIER_ERROR)
            lease = None
        return lease

    async def _direct(self, hop: LiveHop, group: Group) -> None:
        """A handler that brings blocks from a store to the engine by itself. It can be given up
        until it commits; after that it only copies, and is awaited."""
        if hop.trouble is not None:
            group.fail(BlockStatus.TIER_ERROR)
            return
        if not await hop.permits.take(group.patience()):
            group.fail(BlockStatus.TIMED_OUT)
            return
        if group.active.given_up or hop.trouble is not None:
            hop.permits.give()
            group.fail(BlockStatus.TIER_ERROR)
            return
        gate = Gate(group.active)
        spec = group.spec(group.src, gate=gate)
        result = await self._bounded(hop, spec, group, gate, None)
        if result is not None:
            group.out.add(group.positions, result)

    async def _copy(self, hop: LiveHop, group: Group) -> None:
        """The plain copy from host slots to the engine: once begun, it is awaited."""
        if not await hop.permits.take(Patience(None, group.active.told)):
            group.fail(BlockStatus.CANCELLED)
            return
        if group.active.given_up or hop.trouble is not None:
            hop.permits.give()
            group.fail(BlockStatus.TIER_ERROR)
            return
        task = hop.begin(group.spec(group.src), None)
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
    ) -> HopResult | None:
        """Run a call within the load deadline; None where it was given up.

        A call that was given up goes on: its permit and its staging stay out of use until it
        returns, and `drain` waits for it.
        """
        limit = self.limits.load_deadline
        task = hop.begin(spec, limit)
        when_returned(task, hop.permits.give)
        patience = Patience(self.loop.loop.time() + limit, group.active.told)
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
