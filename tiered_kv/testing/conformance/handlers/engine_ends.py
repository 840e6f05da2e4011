"""Where one side is the engine's KV cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tiered_kv.specs import GpuBlock, GpuSpec, HopResult
from tiered_kv.testing.conformance.contract import HandlerPromise, owe
from tiered_kv.testing.conformance.handlers.bench import Bench
from tiered_kv.testing.conformance.handlers.caches import DTYPES, of_dtype
from tiered_kv.testing.conformance.handlers.fixtures import HandlerFixtures, MakeBench
from tiered_kv.testing.conformance.handlers.sides import CacheSide, Fault, StoreSide
from tiered_kv.values import BlockStatus

__all__ = ["EngineDestinationChecks", "EngineSourceChecks"]

OK = BlockStatus.OK
NOT_OK = tuple(status for status in BlockStatus if status is not OK)


def _nonsense(bench: Bench, good: GpuBlock) -> list[GpuBlock]:
    """Places that are not one whole block inside the cache, whatever the group's chunk."""
    ids = good.block_ids
    return [
        replace(good, block_ids=(*ids, ids[0])),
        replace(good, first=1),
        replace(good, first=-1),
        replace(good, block_ids=(*ids[:-1], bench.caches.num_blocks)),
        replace(good, block_ids=(-1, *ids[1:])),
        replace(good, group=0),
    ]


class EngineSourceChecks(HandlerFixtures):
    """Stores: what is gathered is what was there when the call was made."""

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_leaves_bit_for_bit(self, make: MakeBench, dtype: torch.dtype) -> None:
        """F46; NaNs of every kind included, since the bytes are random."""
        bench = make(of_dtype(dtype))
        hop = bench.hop(bench.blocks(4))
        bench.judge(hop, bench.run(hop), [OK] * 4)

    def test_the_engine_may_write_when_the_call_is_done(self, make: MakeBench) -> None:
        """F10: its blocks are free for other requests then."""
        bench = make()
        hop = bench.hop(bench.blocks(4))
        result = bench.run(hop)
        for tensor in bench.caches.tensors:
            tensor.fill_(1)
        if isinstance(bench.destination, CacheSide):
            raise TypeError("both sides are the engine's cache")
        bench.judge(hop, result, [OK] * 4)

    def test_what_is_no_whole_block_costs_itself_alone(self, make: MakeBench) -> None:
        """Only whole blocks inside the cache are stored; others leave no trace."""
        bench = make()
        blocks = bench.blocks(12)
        src = bench.source.supply(blocks)
        if not isinstance(src, GpuSpec):
            raise TypeError(f"the source is {src}, not the engine's cache")
        wrong = _nonsense(bench, src.blocks[0])
        wrong.append(replace(src.blocks[0], block_ids=src.blocks[0].block_ids[:1]))
        places = [*wrong, *src.blocks[len(wrong) :]]
        dst = bench.destination.offer(blocks)
        hop = bench.hop_between(blocks, GpuSpec(tuple(places)), dst)
        result = bench.run(hop)
        bench.judge(
            hop,
            result,
            [NOT_OK] * len(wrong) + [OK] * (12 - len(wrong)),
            HandlerPromise.OK_MEANS_THERE,
        )


class EngineDestinationChecks(HandlerFixtures):
    """Loads: F1, invariant "never a wrong byte"."""

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_arrives_bit_for_bit(self, make: MakeBench, dtype: torch.dtype) -> None:
        """F46; NaNs of every kind included, since the bytes are random."""
        bench = make(of_dtype(dtype))
        hop = bench.hop(bench.blocks(4))
        bench.judge(hop, bench.run(hop), [OK] * 4)

    @pytest.mark.parametrize("fault", [f for f in Fault if f is not Fault.GONE], ids=str)
    def test_a_block_that_fails_verification_is_not_written(
        self, make: MakeBench, fault: Fault
    ) -> None:
        """F1, F3, F4: a flipped bit anywhere, another key, another rank, another length. It is
        CORRUPT, not a byte of it is written, and the others of the call are right. A store drops
        its row."""
        bench = make()
        hop = bench.hop(bench.blocks(6), faults={1: fault, 4: fault})
        result = bench.run(hop)
        expected = [BlockStatus.CORRUPT if i in {1, 4} else OK for i in range(6)]
        bench.judge(hop, result, expected, HandlerPromise.VERIFIED_FIRST)
        due = sum(len(hop.blocks[i].data) for i in (0, 2, 3, 5))
        owe(
            result.copied_bytes == due,
            HandlerPromise.COPIED,
            f"{result.copied_bytes} bytes were told where {due} were copied",
        )
        if isinstance(bench.source, StoreSide):
            left = bench.source.arrived(hop.spec.src, hop.blocks)
            owe(left == [0, 2, 3, 5], HandlerPromise.CORRUPT, f"blocks {left} are in the store")

    def test_a_part_of_a_block(self, make: MakeBench) -> None:
        """First and last blocks of a request: fewer engine blocks, from any place inside. The
        whole block is verified, the wanted part is written, nothing else."""
        bench = make()
        blocks = bench.blocks(8)
        src, whole = bench.source.supply(blocks), bench.destination.offer(blocks)
        if not isinstance(whole, GpuSpec):
            raise TypeError(f"the destination is {whole}, not the engine's cache")
        places: list[GpuBlock] = []
        copied = 0
        for i, place in enumerate(whole.blocks):
            chunk = len(place.block_ids)
            first = i % chunk
            count = 1 + (i // 2) % (chunk - first)
            places.append(GpuBlock(place.group, place.block_ids[:count], first))
            copied += count * bench.engine_block_bytes(blocks[i])
        hop = bench.hop_between(blocks, src, GpuSpec(tuple(places)))
        result = bench.run(hop)
        bench.judge(hop, result, [OK] * 8, HandlerPromise.PARTIAL)
        owe(
            result.copied_bytes == copied,
            HandlerPromise.COPIED,
            f"{result.copied_bytes} bytes were told where {copied} were copied",
        )

    def test_a_place_outside_the_cache_costs_itself_alone(self, make: MakeBench) -> None:
        """Nothing of such a block is written, neither the part that would fit."""
        bench = make()
        blocks = bench.blocks(12)
        src, dst = bench.source.supply(blocks), bench.destination.offer(blocks)
        if not isinstance(dst, GpuSpec):
            raise TypeError(f"the destination is {dst}, not the engine's cache")
        wrong = _nonsense(bench, dst.blocks[0])
        sources = [0] * len(wrong) + list(range(len(wrong), 12))
        places = GpuSpec((*wrong, *dst.blocks[len(wrong) :]))
        hop = bench.hop_between([blocks[i] for i in sources], src.take(sources), places)
        expected = [NOT_OK] * len(wrong) + [OK] * (12 - len(wrong))
        bench.judge(hop, bench.run(hop), expected, HandlerPromise.OK_MEANS_THERE)

    def test_a_block_of_another_group_is_not_written(self, make: MakeBench) -> None:
        """F5: the two halves disagree on where a block belongs; its length gives it away."""
        bench = make()
        blocks = bench.blocks(2)
        src, dst = bench.source.supply(blocks), bench.destination.offer(blocks)
        hop = bench.hop_between(blocks, src, dst.take([1, 0]))
        bench.judge(hop, bench.run(hop), [NOT_OK] * 2, HandlerPromise.VERIFIED_FIRST)

    def test_the_answer_is_whole_when_all_is_wrong(self, make: MakeBench) -> None:
        """No block is right: nothing is written and no byte is counted."""
        bench = make()
        hop = bench.hop(bench.blocks(3), faults=dict.fromkeys(range(3), Fault.FLIPPED))
        result = bench.run(hop)
        expected = HopResult((BlockStatus.CORRUPT,) * 3, 0)
        owe(result == expected, HandlerPromise.VERIFIED_FIRST, f"the answer was {result}")
        bench.judge_bytes(hop, [])
