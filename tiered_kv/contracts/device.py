"""What handlers that move blocks between the engine's device and a store directly work with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tiered_kv.checksum import BlockChecksum
from tiered_kv.specs import GpuBlock
from tiered_kv.values import BlockKey, ChecksumKind

__all__ = ["DeviceBuffer", "DeviceStaging"]


class DeviceBuffer(Protocol):
    """Contiguous bytes on the engine's device, as the CUDA array interface describes them
    (https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, version 3). It keeps
    its memory alive."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        ...


class DeviceStaging(Protocol):
    """Memory of ours on the engine's device, in equal page-aligned areas that each hold a block.

    I/O reads and writes these areas, never the engine's cache: a store gathers blocks into them, a
    load is verified in them before it is scattered. An area whose I/O does not return is simply not
    released. Belongs to one handler. Thread-safe; methods block, and are called from the tier's own
    threads.
    """

    @property
    def device(self) -> str:
        """Where it is: "cuda:0", or "cpu" where the engine computes in host memory."""
        ...

    @property
    def area_bytes(self) -> int:
        """Bytes of each area; a multiple of `tiered_kv.values.PAGE_BYTES`."""
        ...

    @property
    def areas(self) -> int:
        """Number of areas."""
        ...

    @property
    def buffer(self) -> DeviceBuffer:
        """All areas, one behind the other: what is registered for direct I/O, once."""
        ...

    def lease(self, count: int, timeout: float) -> tuple[int, ...] | None:
        """Between 1 and `count` neighbouring areas, ascending: as many as are free. Waits at most
        `timeout` seconds for the first; None when there is none until then."""
        ...

    def release(self, areas: Sequence[int]) -> None:
        """Give areas back; no I/O and no copy uses them any more."""
        ...

    def span(self, first: int, nbytes: int) -> DeviceBuffer:
        """`nbytes` bytes from the beginning of area `first` on, over neighbouring areas."""
        ...

    def gather(
        self, blocks: Sequence[GpuBlock], areas: Sequence[int], after: object | None
    ) -> list[bool]:
        """Copy whole engine blocks into areas, ordered after `after` (see `TransferSpec.after`).
        On return the bytes are there. False for a block that is not one whole block inside the
        cache."""
        ...

    def scatter(
        self, areas: Sequence[int], blocks: Sequence[GpuBlock], after: object | None
    ) -> list[bool]:
        """Copy the wanted engine blocks out of areas; on return they are in place. False for a
        block that names no part of a block inside the cache: nothing of it is written."""
        ...

    def checksum(self, key: BlockKey, area: int, length: int, kind: ChecksumKind) -> BlockChecksum:
        """Checksum of the first `length` bytes of an area: `wsum` is computed on the device,
        `xxh3` by way of host memory."""
        ...
