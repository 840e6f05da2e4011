"""What every handler owes, whatever it moves between."""

from __future__ import annotations

import asyncio

import pytest

from tiered_kv.errors import TierError
from tiered_kv.specs import HopResult
from tiered_kv.testing.conformance.contract import HandlerPromise, owe, refused
from tiered_kv.testing.conformance.handlers.caches import SHAPES, CacheShape
from tiered_kv.testing.conformance.handlers.fixtures import HandlerFixtures, MakeBench
from tiered_kv.values import BlockStatus

__all__ = ["MovingChecks"]

OK = BlockStatus.OK


class MovingChecks(HandlerFixtures):
    """Bytes, answers, counts, and the life of a handler."""

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_blocks_arrive_bit_for_bit(self, make: MakeBench, shape: CacheShape) -> None:
        """Blocks of all KV groups, strides, chunks and lengths in one call; nothing beside them
        changes, at either end; `copied_bytes` is the sum of their lengths."""
        bench = make(shape)
        hop = bench.hop(bench.blocks(2 if shape.name == "large" else 6))
        before = bench.source.remember()
        result = bench.run(hop)
        bench.judge(hop, result, [OK] * len(hop.blocks))
        total = sum(len(block.data) for block in hop.blocks)
        owe(
            result.copied_bytes == total,
            HandlerPromise.COPIED,
            f"{result.copied_bytes} bytes were told where {total} were copied",
        )
        owe(
            bench.source.unchanged(before),
            HandlerPromise.OK_MEANS_THERE,
            "the blocks at the source were changed",
        )

    def test_blocks_keep_their_order(self, make: MakeBench) -> None:
        """The order of the spec is not that of the places."""
        bench = make()
        blocks = bench.blocks(5)
        src, dst = bench.source.supply(blocks), bench.destination.offer(blocks)
        order = [3, 0, 4, 1, 2]
        turned = bench.hop_between([blocks[i] for i in order], src.take(order), dst.take(order))
        bench.judge(turned, bench.run(turned), [OK] * 5)

    def test_one_call_after_another(self, make: MakeBench) -> None:
        """Calls of one handler do not remember each other."""
        bench = make()
        for first in range(0, 6, 2):
            hop = bench.hop(bench.blocks(2, first))
            bench.judge(hop, bench.run(hop), [OK] * 2)

    def test_an_empty_batch_does_nothing(self, make: MakeBench) -> None:
        """F50. No blocks, no bytes, no change."""
        bench = make()
        hop = bench.hop([])
        result = bench.run(hop)
        owe(result == HopResult((), 0), HandlerPromise.PER_BLOCK, f"the answer was {result}")
        bench.judge_bytes(hop, [])

    def test_unequal_lengths_are_refused(self, make: MakeBench) -> None:
        """F50. Nothing is moved then, neither of what would fit."""
        bench = make()
        blocks = bench.blocks(2)
        src, dst = bench.source.supply(blocks), bench.destination.offer(blocks)
        for keys, sources, destinations in (
            (1, 1, 2),
            (1, 2, 1),
            (2, 1, 1),
            (0, 1, 1),
            (1, 0, 0),
            (2, 1, 2),
            (2, 2, 1),
        ):
            hop = bench.hop_between(
                blocks[:keys], src.take(range(sources)), dst.take(range(destinations))
            )
            refused(lambda hop=hop: bench.call(hop), ValueError, HandlerPromise.EQUALLY_LONG)  # type: ignore[misc]
            found = bench.destination.difference(hop.before, dst, blocks, [])
            owe(found is None, HandlerPromise.EQUALLY_LONG, f"after the refusal {found}")

    def test_calls_side_by_side(self, make: MakeBench) -> None:
        """Four calls of two blocks, in two threads of the executor."""
        bench = make(threads=2)
        whole = bench.hop(bench.blocks(8))
        pairs = [range(first, first + 2) for first in range(0, 8, 2)]
        hops = [
            bench.hop_between(
                [whole.blocks[i] for i in pair],
                whole.spec.src.take(pair),
                whole.spec.dst.take(pair),
            )
            for pair in pairs
        ]

        async def together() -> list[HopResult]:
            calls = (bench.handler.transfer(hop.spec) for hop in hops)
            return list(await asyncio.gather(*calls))

        results = bench.await_(together())
        statuses = tuple(status for result in results for status in result.statuses)
        copied = [result.copied_bytes for result in results]
        bench.judge(whole, HopResult(statuses, sum(copied)), [OK] * 8)
        due = [sum(len(block.data) for block in hop.blocks) for hop in hops]
        owe(copied == due, HandlerPromise.COPIED, f"{copied} bytes were told of {due}")

    def test_blocking_work_is_given_to_the_executor_per_call(self, make: MakeBench) -> None:
        """Never per block: twelve blocks are fewer calls of the executor than blocks."""
        bench = make(SHAPES[0])
        hop = bench.hop(bench.blocks(12))
        before = bench.executor.calls
        bench.judge(hop, bench.run(hop), [OK] * 12)
        calls = bench.executor.calls - before
        print(f"{calls} calls of the executor for 12 blocks")
        owe(1 <= calls < 12, HandlerPromise.EXECUTOR, f"it was called {calls} times for 12 blocks")

    def test_modes_are_text(self, make: MakeBench) -> None:
        """Shown in logs, `check` and statistics."""
        modes = make().handler.modes()
        print(dict(modes))
        owe(modes, HandlerPromise.MODES, "no mode is told")
        for name, value in modes.items():
            owe(
                str(name) == name != "" and str(value) == value != "",
                HandlerPromise.MODES,
                f"the mode {name!r} is told as {value!r}",
            )

    def test_closing_ends_it(self, make: MakeBench) -> None:
        """Twice is once; a call after it is a `TierError` and moves nothing."""
        bench = make()
        hop = bench.hop(bench.blocks(2))
        bench.handler.close()
        bench.handler.close()
        refused(lambda: bench.call(hop), TierError, HandlerPromise.CLOSED)
        bench.judge_bytes(hop, [])
