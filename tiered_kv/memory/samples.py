"""Reads and writes single blocks of the engine's KV caches: for self-tests, not for transfers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiered_kv.memory.caches import KVCaches

__all__ = ["read_block", "write_block"]


def read_block(caches: KVCaches, group: int, block_ids: Sequence[int]) -> bytes:
    """The bytes of engine blocks of a KV group: block by block, and in each block tensor by
    tensor. Waits for the device."""
    pages = [
        caches.tensors[ref.tensor_index][block_id, : ref.page_bytes].cpu().numpy().tobytes()
        for block_id in block_ids
        for ref in caches.groups[group]
    ]
    return b"".join(pages)


def write_block(caches: KVCaches, group: int, block_ids: Sequence[int], data: bytes) -> None:
    """Overwrite engine blocks with bytes in the order of `read_block`.

    Raises:
        ValueError: `data` is not exactly as long as these blocks.
    """
    refs = caches.groups[group]
    expected = len(block_ids) * sum(ref.page_bytes for ref in refs)
    if len(data) != expected:
        raise ValueError(f"{len(data)} bytes for engine blocks of {expected}")
    source = torch.frombuffer(bytearray(data), dtype=torch.int8)
    start = 0
    for block_id in block_ids:
        for ref in refs:
            page = source[start : start + ref.page_bytes]
            caches.tensors[ref.tensor_index][block_id, : ref.page_bytes].copy_(page)
            start += ref.page_bytes
