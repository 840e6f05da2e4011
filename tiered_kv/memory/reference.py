"""What measurements are made with and held against: caches like an engine's, and the plain copy
between host memory and its device, with nothing around it."""

from __future__ import annotations

import torch

from tiered_kv.memory.caches import CacheRef, KVCaches
from tiered_kv.memory.device import device_of

__all__ = ["DeviceCopy", "random_caches"]


def random_caches(blocks: int, block_bytes: int, layers: int, device: torch.device) -> KVCaches:
    """Caches of one KV group whose blocks are spread evenly over `layers` tensors, full of random
    bytes.

    Raises:
        ValueError: `layers` does not divide `block_bytes`.
        RuntimeError: the device has not that much memory.
    """
    page, rest = divmod(block_bytes, layers)
    if rest:
        raise ValueError(f"a block of {block_bytes} bytes cannot be spread over {layers} layers")
    tensors = tuple(
        torch.empty((blocks, page), dtype=torch.int8, device=device).random_(-128, 128)
        for _ in range(layers)
    )
    return KVCaches(tensors, (tuple(CacheRef(index, page) for index in range(layers)),))


class DeviceCopy:
    """One copy of `nbytes` bytes each way between pinned host memory and a device: the most that
    any way of copying can reach there. Takes as much memory on both sides. One thread at a time."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Raises ValueError where the device is host memory."""
        known = device_of(device)
        if known is None:
            raise ValueError(f"{device} is host memory: nothing is copied to a device")
        self._lane = known.lane()
        self._host = known.host_tensor(-(-nbytes // 8))
        self._there = torch.empty_like(self._host, device=device)

    def to_device(self) -> None:
        """Copy, and wait for it."""
        self._copy(self._there, self._host)

    def to_host(self) -> None:
        """Copy, and wait for it."""
        self._copy(self._host, self._there)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._lane.run(lambda: target.copy_(source, non_blocking=True))
        self._lane.mark().wait()
