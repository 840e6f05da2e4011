"""Calls that are given up: by `commit`, or because nobody awaits them any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tiered_kv.specs import GpuSpec
from tiered_kv.testing.conformance.contract import HandlerPromise, owe
from tiered_kv.testing.conformance.handlers.bench import PATIENCE, Bench, Gate, Hop
from tiered_kv.testing.conformance.handlers.caches import SHAPES
from tiered_kv.testing.conformance.handlers.fixtures import HandlerFixtures, MakeBench
from tiered_kv.testing.conformance.handlers.sides import CacheSide
from tiered_kv.values import BlockStatus

__all__ = ["CommitChecks", "InterruptionChecks"]

OK, CANCELLED = BlockStatus.OK, BlockStatus.CANCELLED
EARLY_SECONDS = 0.05


class InterruptionChecks(HandlerFixtures):
    """A call is held in its thread, in the first call of the host memory or in `commit`."""

    def hold(self, bench: Bench, gate: Gate) -> Callable[[], bool]:
        """Make the next call wait at the gate; the `commit` for its spec."""
        bench.pool.before = gate

        def commit() -> bool:
            gate()
            return True

        return commit

    def held(self, bench: Bench) -> tuple[Hop, Gate]:
        """A call that will wait at a gate."""
        gate = Gate()
        number = 100 * bench.executor.calls
        blocks = bench.blocks(1, first=number)
        src, dst = bench.source.supply(blocks), bench.destination.offer(blocks)
        return bench.hop_between(blocks, src, dst, self.hold(bench, gate)), gate

    def test_a_call_returns_after_its_last_copy(self, make: MakeBench) -> None:
        """While a thread of it is held, the call is not over, the event loop goes on, and nothing
        counts as there; then all of it is."""
        bench = make()
        hop, gate = self.held(bench)

        async def look() -> None:
            task = asyncio.ensure_future(bench.handler.transfer(hop.spec))
            await self._reach(bench, gate)
            done, _ = await asyncio.wait({task}, timeout=EARLY_SECONDS)
            gate.open()
            owe(not done, HandlerPromise.RETURNS_LAST, "the call was over while its thread ran")
            bench.judge(hop, await task, [OK])

        bench.await_(look())

    def test_a_cancelled_call_goes_on_in_its_thread(self, make: MakeBench) -> None:
        """The awaiting task is cancelled while the call is held, more often than there are areas
        of staging. Each block is then either there whole, or not at all; and nothing that the
        handler took is lost to it: calls work as before."""
        bench = make(SHAPES[0], staging_blocks=3)
        for _ in range(6):
            hop, gate = self.held(bench)
            bench.await_(self._cancel(bench, hop, gate))
            bench.drain()
            arrived = bench.destination.arrived(hop.spec.dst, hop.blocks)
            bench.judge_bytes(hop, arrived)
        print("6 calls cancelled while their threads ran")
        after = bench.hop(bench.blocks(3, first=90_000))
        bench.judge(after, bench.run(after), [OK] * 3, HandlerPromise.GOES_ON)

    async def _reach(self, bench: Bench, gate: Gate) -> None:
        """Wait until the call is held; what else asks the host memory then is not."""
        reached = await asyncio.to_thread(gate.reached.wait, PATIENCE)
        bench.pool.before = lambda method, slot: None
        owe(reached, HandlerPromise.EXECUTOR, "the call never came to the held step")

    async def _cancel(self, bench: Bench, hop: Hop, gate: Gate) -> None:
        task = asyncio.ensure_future(bench.handler.transfer(hop.spec))
        await self._reach(bench, gate)
        task.cancel()
        await asyncio.wait({task}, timeout=EARLY_SECONDS)
        early = bench.destination.arrived(hop.spec.dst, hop.blocks)
        gate.open()
        await asyncio.wait({task}, timeout=PATIENCE)
        owe(task.done(), HandlerPromise.GOES_ON, "the cancelled call did not end")
        owe(not early, HandlerPromise.RETURNS_LAST, "the block was there while its call was held")
        if not task.cancelled() and task.exception() is None:
            bench.judge(hop, task.result(), [(OK, CANCELLED)])


class CommitChecks(HandlerFixtures):
    """`TransferSpec.commit`: asked once, right before what cannot be taken back."""

    def test_a_call_that_is_given_up_leaves_no_trace(self, make: MakeBench) -> None:
        """`commit` says False: every block is CANCELLED, nothing arrived; the same call works
        afterwards, also when staging or room was as much as it needs."""
        bench = make(SHAPES[0], staging_blocks=6)
        for _ in range(3):
            asked: list[bool] = []

            def commit(asked: list[bool] = asked) -> bool:
                asked.append(False)
                return False

            blocks = bench.blocks(6, first=10 * bench.executor.calls)
            hop = bench.hop(blocks, commit=commit)
            result = bench.run(hop)
            owe(len(asked) == 1, HandlerPromise.COMMIT, f"`commit` was asked {len(asked)} times")
            bench.judge(hop, result, [CANCELLED] * 6, HandlerPromise.GIVEN_UP)
            again = bench.hop_between(blocks, hop.spec.src, hop.spec.dst)
            bench.judge(again, bench.run(again), [OK] * 6, HandlerPromise.GIVEN_UP)

    def test_commit_is_asked_once_before_anything_arrives(self, make: MakeBench) -> None:
        """When it is asked nothing is there yet. A store has gathered by then: what the engine
        writes into its blocks from now on does not get into the store."""
        bench = make()
        early: list[list[int]] = []
        hops: list[Hop] = []

        def commit() -> bool:
            early.append(bench.destination.arrived(hops[0].spec.dst, hops[0].blocks))
            if isinstance(bench.source, CacheSide) and isinstance(hops[0].spec.src, GpuSpec):
                for tensor in bench.caches.tensors:
                    tensor.fill_(0x3C)
            return True

        hops.append(bench.hop(bench.blocks(6), commit=commit))
        result = bench.run(hops[0])
        owe(len(early) == 1, HandlerPromise.COMMIT, f"`commit` was asked {len(early)} times")
        owe(early == [[]], HandlerPromise.COMMIT_WHEN, f"blocks {early[0]} were there already")
        bench.judge(hops[0], result, [OK] * 6, HandlerPromise.COMMIT_WHEN)
