"""Engine caches of several shapes, and the documented layout of a block, written out anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tiered_kv.memory import CacheRef, KVCaches
from tiered_kv.specs import GpuBlock
from tiered_kv.values import CacheGeometry, GroupGeometry

__all__ = ["DTYPES", "SHAPES", "CacheShape", "engine_pages", "geometry_of", "of_dtype"]

FIRST_GROUP = 10
"""Number of the first KV group: engines do not count groups from 0."""

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """A way to lay out KV caches."""

    name: str
    build: Callable[[str], KVCaches]
    """Makes them on a torch device."""
    chunks: tuple[int, ...]
    """Engine blocks per block, for each KV group."""

    def __str__(self) -> str:
        return self.name


def _simple(device: str) -> KVCaches:
    named = {
        f"layer.{i}": torch.zeros((64, 96), dtype=torch.uint8, device=device) for i in range(3)
    }
    return KVCaches.from_named(named, [list(named)])


def _strided(device: str) -> KVCaches:
    """Two groups: layers packed in one tensor, and tensors of their own with padded rows."""
    packed = torch.zeros((64, 3, 64), dtype=torch.uint8, device=device)
    padded = torch.zeros((64, 100), dtype=torch.uint8, device=device)[:, 12:60]
    own = torch.zeros((64, 33), dtype=torch.uint8, device=device)
    named = {f"packed.{i}": packed[:, i] for i in range(3)} | {"padded": padded, "own": own}
    return KVCaches.from_named(named, [["packed.0", "packed.2"], ["padded", "own", "packed.1"]])


def _padded(device: str) -> KVCaches:
    """Rows whose last bytes belong to no page."""
    rows = torch.zeros((64, 128), dtype=torch.int8, device=device)
    return KVCaches((rows, rows.clone()), ((CacheRef(0, 100), CacheRef(1, 7)),))


def _pages(device: str) -> KVCaches:
    """Blocks of exactly three memory pages, and of one byte more than two."""
    named = {
        "whole": torch.zeros((48, 12_288), dtype=torch.uint8, device=device),
        "odd": torch.zeros((48, 8193), dtype=torch.uint8, device=device),
    }
    return KVCaches.from_named(named, [["whole"], ["odd"]])


def _large(device: str) -> KVCaches:
    """Pages of a mebibyte, blocks of four."""
    named = {
        f"layer.{i}": torch.zeros((12, 1 << 20), dtype=torch.uint8, device=device) for i in range(2)
    }
    return KVCaches.from_named(named, [list(named)])


SHAPES = (
    CacheShape("one group", _simple, (2,)),
    CacheShape("two groups, strided", _strided, (4, 2)),
    CacheShape("rows with padding", _padded, (2,)),
    CacheShape("around whole pages", _pages, (1, 1)),
    CacheShape("large", _large, (2,)),
)


def of_dtype(dtype: torch.dtype) -> CacheShape:
    """Two layers of (blocks, 2, heads, head size), as attention kernels keep them."""

    def build(device: str) -> KVCaches:
        named = {
            f"layer.{i}": torch.zeros((48, 2, 4, 8), dtype=dtype, device=device) for i in range(2)
        }
        return KVCaches.from_named(named, [list(named)])

    return CacheShape(str(dtype).removeprefix("torch."), build, (2,))


def geometry_of(
    caches: KVCaches, chunks: Sequence[int], rank: int, world_size: int
) -> CacheGeometry:
    """The geometry of these caches, with blocks of `chunks[i]` engine blocks of 16 tokens."""
    groups = tuple(
        GroupGeometry(FIRST_GROUP + i, caches.block_bytes(i, chunk), chunk, 16 * chunk)
        for i, chunk in enumerate(chunks)
    )
    return CacheGeometry(groups, rank, world_size)


def engine_pages(caches: KVCaches, block: GpuBlock) -> Iterator[tuple[torch.Tensor, int, int]]:
    """The pages that a block names, as (memory in the cache, begin and end inside the block).

    A block is its engine blocks one behind the other, an engine block the pages of its group's
    tensors, a page the first `page_bytes` of the tensor's row.
    """
    refs = caches.groups[block.group - FIRST_GROUP]
    place = block.first * sum(ref.page_bytes for ref in refs)
    for engine_block in block.block_ids:
        for ref in refs:
            row = caches.tensors[ref.tensor_index][engine_block, : ref.page_bytes]
            yield row.view(torch.uint8), place, place + ref.page_bytes
            place += ref.page_bytes
