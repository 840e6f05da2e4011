"""Copies by torch's kernels against those by numpy, over every way in which caches may lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.device_stand_in import StandIn
from tests.unit.gpu_rig import byte_tensor, geometry_of, random_bytes
from tiered_kv.memory import (
    BlockIds,
    CacheRef,
    DeviceRows,
    GroupLayout,
    HostRows,
    KVCaches,
    alike,
    layouts_of,
)
from tiered_kv.specs import GpuBlock

BLOCKS = 7


@st.composite
def caches(draw: st.DrawFn) -> KVCaches:
    """Several allocations, in each some pages at any distance from each other, in any order."""
    unit = draw(st.sampled_from([1, 2, 4, 8]), "unit")
    tensors: list[torch.Tensor] = []
    refs: list[CacheRef] = []
    for number in range(draw(st.integers(1, 3), "allocations")):
        packed = draw(st.booleans(), "pages of all layers in one row")
        widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4), "widths")
        gaps = draw(st.lists(st.integers(0, 2), min_size=4, max_size=4), "gaps")
        sizes = [unit * width for width in widths]
        starts = []
        end = unit * gaps[-1]
        for size, gap in zip(sizes, gaps, strict=False):
            starts.append(end)
            end += (size if packed else size * BLOCKS) + unit * gap
        row = end
        memory = byte_tensor(random_bytes((row * (BLOCKS if packed else 1),), number))
        flat = memory.view(torch.int8)
        order = draw(st.permutations(range(len(sizes))), "order")
        for i in order:
            stride = row if packed else sizes[i]
            tensors.append(flat.as_strided((BLOCKS, sizes[i]), (stride, 1), starts[i]))
            refs.append(CacheRef(len(tensors) - 1, sizes[i]))
    return KVCaches(tuple(tensors), (tuple(refs),))


@given(caches=caches(), data=st.data())
def test_both_ways_move_the_same_bytes(caches: KVCaches, data: st.DataObject) -> None:
    chunk = data.draw(st.integers(1, 3), "chunk")
    count = data.draw(st.integers(1, BLOCKS // chunk), "blocks")
    padding = data.draw(st.sampled_from([0, 8, 24]), "padding")
    ids = data.draw(st.permutations(range(BLOCKS)), "ids")
    layout = layouts_of(caches, geometry_of(caches, [chunk]))[10]
    blocks = [GpuBlock(10, tuple(ids[i * chunk : (i + 1) * chunk])) for i in range(count)]
    stride = -(-layout.block_bytes // 8) * 8 + padding
    by_host, by_device = np.zeros((2, count, stride), np.uint8)

    def ours(area: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> torch.Tensor:
        whole = torch.from_numpy(area).view(torch.int8)[:, : layout.block_bytes]
        return whole.view(count, chunk, layout.engine_block_bytes)

    numbers = torch.tensor([block.block_ids for block in blocks])
    host, device = HostRows(caches, {10: layout}), DeviceRows(caches, {10: layout})
    host.gather(layout, blocks, [memoryview(row.data) for row in by_host])
    device.gather(layout, numbers, ours(by_device))
    np.testing.assert_array_equal(by_device, by_host)

    new = random_bytes((count, stride), 99)
    memory = [tensor.untyped_storage() for tensor in caches.tensors]
    before = [bytes(storage) for storage in memory]
    host.scatter(layout, [memoryview(row.data) for row in new], blocks)
    expected = [bytes(storage) for storage in memory]
    for storage, old in zip(memory, before, strict=True):
        torch.tensor([], dtype=torch.uint8).set_(storage).copy_(
            torch.frombuffer(bytearray(old), dtype=torch.uint8)
        )
    device.scatter(layout, numbers, ours(new))
    assert [bytes(storage) for storage in memory] == expected


@pytest.mark.parametrize(
    ("stacked", "launches"),
    [
        ("layer by layer", 1),
        ("block by block", 1),
        ("uneven", 2),
        ("backwards", 3),
        ("other rows", 2),
    ],
)
def test_pages_alike_in_one_allocation_are_one_launch(stacked: str, launches: int) -> None:
    whole = byte_tensor(random_bytes((4, BLOCKS, 16), 1))
    rows = {
        "layer by layer": [whole[0], whole[1], whole[2]],
        "block by block": list(whole.view(BLOCKS, 4, 16)[:, :3].unbind(1)),
        "uneven": [whole[0], whole[1], whole[3]],
        "backwards": [whole[2], whole[1], whole[0]],
        "other rows": [whole[0], whole[1].as_strided((BLOCKS, 16), (32, 1))],
    }[stacked]
    named = {str(i): row for i, row in enumerate(rows)}
    caches = KVCaches.from_named(named, [list(named)])
    layout = layouts_of(caches, geometry_of(caches, [1]))[10]
    device = DeviceRows(caches, {10: layout})
    assert device.launches(layout) == launches
    block = torch.zeros((1, 1, layout.engine_block_bytes), dtype=torch.int8)
    device.gather(layout, torch.tensor([[5]]), block)
    assert block.numpy().tobytes() == b"".join(row[5].numpy().tobytes() for row in rows)


def test_pages_shorter_than_a_word_of_their_rows() -> None:
    rows = [byte_tensor(random_bytes((BLOCKS, 8), i)).view(torch.int8) for i in range(2)]
    caches = KVCaches(tuple(rows), ((CacheRef(0, 4), CacheRef(1, 4)),))
    layout = layouts_of(caches, geometry_of(caches, [1]))[10]
    block = torch.zeros((1, 1, 8), dtype=torch.int8)
    DeviceRows(caches, {10: layout}).gather(layout, torch.tensor([[3]]), block)
    assert block.flatten().tolist() == rows[0][3, :4].tolist() + rows[1][3, :4].tolist()


def test_what_one_launch_moves_is_alike() -> None:
    one, other = (GroupLayout(i, 4, 8, 16, ()) for i in range(2))
    whole, first, last = (
        GpuBlock(0, ids, start) for ids, start in (((1, 2, 3, 4), 0), ((1, 2), 0), ((3, 4), 2))
    )

    def ranges(*blocks: tuple[GpuBlock, int, GroupLayout]) -> list[tuple[int, int]]:
        columns: Sequence[tuple[object, ...]] = list(zip(*blocks, strict=True))
        assert len(columns) == 3
        return list(alike(*(list(column) for column in columns)))  # type: ignore[arg-type]

    assert ranges((whole, 0, one), (whole, 1, one), (whole, 2, one)) == [(0, 3)]
    assert ranges((whole, 0, one), (whole, 2, one)) == [(0, 1), (1, 2)], "not neighbours"
    assert ranges((whole, 1, one), (whole, 0, one)) == [(0, 1), (1, 2)], "not in order"
    assert ranges((whole, 0, one), (whole, 1, other)) == [(0, 1), (1, 2)], "other groups"
    assert ranges((first, 0, one), (last, 1, one)) == [(0, 1), (1, 2)], "other parts"
    assert ranges((whole, 0, one), (first, 1, one)) == [(0, 1), (1, 2)], "other lengths"
    assert ranges((last, 3, one), (last, 4, one), (whole, 5, one)) == [(0, 2), (2, 3)]
    assert list(alike([], [], [])) == []


def test_numbers_of_blocks_travel_as_they_were_set() -> None:
    ids = BlockIds(StandIn(), torch.device("cpu"), 6)
    ids.set([GpuBlock(0, (5, 6)), GpuBlock(0, (7, 8), 1), GpuBlock(0, (9,))])
    ids.upload()
    assert ids.part(0, 2, 2).tolist() == [[5, 6], [7, 8]]
    assert ids.part(4, 1, 1).tolist() == [[9]]
