"""gpu <-> cpu: bytes in every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gpu_rig import (
    KINDS,
    OK,
    BothWays,
    Rig,
    byte_tensor,
    keys_of,
    random_bytes,
    simple,
    slots_of,
    strided,
)
from tiered_kv.memory import KVCaches
from tiered_kv.specs import GpuBlock, HopResult


class TestBytes(BothWays):
    @pytest.mark.parametrize(
        "dtype",
        [
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.int8,
            torch.uint8,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        ],
    )
    def test_every_dtype_comes_back_bit_for_bit(
        self, make: Callable[..., Rig], dtype: torch.dtype
    ) -> None:
        """F46; NaNs of every kind included, since the bytes are random."""
        raw = [random_bytes((12, 2 * 4 * 8 * dtype.itemsize), i) for i in range(2)]
        named = {
            f"layer.{i}": byte_tensor(rows.copy()).view(dtype).reshape(12, 2, 4, 8)
            for i, rows in enumerate(raw)
        }
        rig = make(KVCaches.from_named(named, [list(named)]), [1])
        blocks = [GpuBlock(10, (i,)) for i in (3, 0, 11, 7)]
        result = rig.store(keys_of(4), blocks, slots_of(4))
        assert result == HopResult((OK,) * 4, 4 * rig.geometry.groups[0].block_bytes)
        for tensor in named.values():
            tensor.view(torch.uint8).fill_(0xA5)
        targets = [GpuBlock(10, (i,)) for i in (5, 6, 1, 2)]
        assert rig.load(keys_of(4), slots_of(4), targets).statuses == (OK,) * 4
        for rows, tensor in zip(raw, named.values(), strict=True):
            got = tensor.view(torch.uint8).reshape(12, -1).numpy()
            np.testing.assert_array_equal(got[[5, 6, 1, 2]], rows[[3, 0, 11, 7]])
            assert (np.delete(got, [5, 6, 1, 2], axis=0) == 0xA5).all()

    def test_groups_strides_and_chunks_in_one_call(self, make: Callable[..., Rig]) -> None:
        rig = make(strided(), [4, 2])
        blocks = [
            GpuBlock(10, (3, 4, 5, 6)),
            GpuBlock(11, (15, 0)),
            GpuBlock(10, (9, 1, 2, 8)),
            GpuBlock(11, (7, 8)),
        ]
        before = rig.cache_bytes()
        result = rig.store(keys_of(4), blocks, slots_of(4))
        sizes = [rig.geometry.groups[b.group - 10].block_bytes for b in blocks]
        assert result == HopResult((OK,) * 4, sum(sizes))
        for slot, block, size in zip(slots_of(4), blocks, sizes, strict=True):
            view = rig.pool.view(slot)
            assert view is not None
            assert view.nbytes == size
            assert bytes(view) == rig.expected(block.group - 10, block.block_ids)
        for tensor in rig.caches.tensors:
            tensor.zero_()
        result = rig.load(keys_of(4), slots_of(4), blocks)
        assert result == HopResult((OK,) * 4, sum(sizes))
        for i, (was, now) in enumerate(zip(before, rig.cache_bytes(), strict=True)):
            group = 0 if i in {0, 1} else 1
            ids = [j for b in blocks if b.group == 10 + group for j in b.block_ids]
            np.testing.assert_array_equal(now[ids], was[ids])
            assert not np.delete(now, ids, axis=0).any()

    def test_unaligned_parts_of_a_block(self, make: Callable[..., Rig]) -> None:
        """First and last blocks of a request: some engine blocks of a block only."""
        rig = make(strided(), [4, 2])
        rig.store(keys_of(1), [GpuBlock(10, (0, 1, 2, 3))], slots_of(1))
        before = rig.cache_bytes()
        engine_block = rig.geometry.groups[0].block_bytes // 4
        for first, ids in [(0, (8,)), (1, (9, 4)), (3, (5,)), (2, (12, 11)), (1, (7, 13, 6))]:
            result = rig.load(keys_of(1), slots_of(1), [GpuBlock(10, ids, first)])
            assert result == HopResult((OK,), len(ids) * engine_block)
            for tensor, was in zip(rig.cache_bytes()[:2], before[:2], strict=True):
                np.testing.assert_array_equal(tensor[list(ids)], was[first : first + len(ids)])
        assert rig.load(keys_of(1), slots_of(1), [GpuBlock(10, (), 2)]) == HopResult((OK,), 0)
        untouched = [0, 1, 2, 3, 10, 14, 15]
        for tensor, was in zip(rig.cache_bytes(), before, strict=True):
            np.testing.assert_array_equal(tensor[untouched], was[untouched])
        for tensor, was in zip(rig.cache_bytes()[2:], before[2:], strict=True):
            np.testing.assert_array_equal(tensor, was, "the other group's tensors")

    def test_padding_behind_a_page_is_left_alone(self, make: Callable[..., Rig]) -> None:
        whole = byte_tensor(random_bytes((6, 128), 1)).view(torch.int8)
        caches = KVCaches((whole,), ((replace(simple().groups[0][0], page_bytes=100),),))
        rig = make(caches, [2])
        assert rig.geometry.groups[0].block_bytes == 200
        rig.store(keys_of(1), [GpuBlock(10, (0, 1))], slots_of(1))
        before = rig.cache_bytes()[0]
        rig.load(keys_of(1), slots_of(1), [GpuBlock(10, (4, 3))])
        after = rig.cache_bytes()[0]
        np.testing.assert_array_equal(after[[4, 3], :100], before[[0, 1], :100])
        np.testing.assert_array_equal(after[:, 100:], before[:, 100:])

    def test_pages_of_a_mebibyte(self, make: Callable[..., Rig]) -> None:
        rig = make(simple(4, 1 << 20, 2), [2], slots=2)
        blocks = [GpuBlock(10, (3, 0))]
        rig.store(keys_of(1), blocks, slots_of(1))
        before = rig.cache_bytes()
        result = rig.load(keys_of(1), slots_of(1), [GpuBlock(10, (1, 2))])
        assert result == HopResult((OK,), 4 << 20)
        for was, now in zip(before, rig.cache_bytes(), strict=True):
            np.testing.assert_array_equal(now[[1, 2]], was[[3, 0]])

    def test_both_ways_of_copying_fill_slots_alike(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []
        for name in KINDS:
            rig = Rig(strided(), [4, 2], monkeypatch, kind=name)
            blocks = [GpuBlock(10, (3, 1, 2, 9)), GpuBlock(11, (0, 15))]
            rig.store(keys_of(2), blocks, slots_of(2))
            seen.append([rig.pool.checksum(slot) for slot in slots_of(2)])
            rig.close()
        assert seen[0] == seen[1]
        assert None not in seen[0]

    @given(data=st.data(), pages=st.lists(st.integers(1, 40), min_size=1, max_size=4))
    def test_any_geometry(self, data: st.DataObject, pages: list[int]) -> None:
        chunk = data.draw(st.integers(1, 5), "chunk")
        count = data.draw(st.integers(0, 3), "blocks")
        name = data.draw(st.sampled_from(sorted(KINDS)), "kind")
        total = 2 * chunk * max(1, count)
        named = {
            str(i): byte_tensor(random_bytes((total, page), i)) for i, page in enumerate(pages)
        }
        with pytest.MonkeyPatch.context() as patch:
            rig = Rig(KVCaches.from_named(named, [list(named)]), [chunk], patch, kind=name)
        ids = data.draw(st.permutations(range(total)), "ids")
        here = [tuple(ids[i * chunk : (i + 1) * chunk]) for i in range(count)]
        there = [tuple(ids[(count + i) * chunk :][:chunk]) for i in range(count)]
        before = rig.cache_bytes()
        stored = rig.store(keys_of(count), [GpuBlock(10, b) for b in here], slots_of(count))
        loaded = rig.load(keys_of(count), slots_of(count), [GpuBlock(10, b) for b in there])
        rig.close()
        assert stored == loaded == HopResult((OK,) * count, count * chunk * sum(pages))
        sources = [i for b in here for i in b]
        targets = [i for b in there for i in b]
        for was, now in zip(before, rig.cache_bytes(), strict=True):
            np.testing.assert_array_equal(now[targets], was[sources])
            rest = np.delete(np.arange(total), targets)
            np.testing.assert_array_equal(now[rest], was[rest])
