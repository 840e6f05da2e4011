"""The copies between engine blocks and host slots. Plain copies only: each one ends.

Two ways, chosen by where the engine's cache is:

* `HostCopies`: the cache is host memory. numpy views of the tensors' own memory, no bytes in
  between. torch is not used to copy: on small pieces its CPU copies are several times slower.
* `DeviceCopies`: any other torch device. Per group of blocks one gather (or scatter) per tensor
  on the device and one transfer over the bus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tiered_kv.memory import KVCaches
from tiered_kv.specs import GpuBlock
from tiered_kv_gpu.layout import GroupLayout

__all__ = ["Copies", "DeviceCopies", "HostCopies", "copies_for"]

_RELEASE_GIL_BYTES = 1 << 20
_DEVICE_GROUP_BYTES = 64 << 20


class Copies(Protocol):
    """Moves bytes, blocking. Blocks were checked against their layout before."""

    @property
    def mode(self) -> str:
        """What copies, for logs and `check`."""
        ...

    def group_size(self, layout: GroupLayout) -> int:
        """How many blocks are best moved by one call."""
        ...

    def begin(self) -> None:
        """Before the first copy of a handler's call: wait for the engine's work so far."""
        ...

    def gather(
        self, layout: GroupLayout, blocks: Sequence[GpuBlock], slots: Sequence[memoryview]
    ) -> None:
        """Copy whole engine blocks into the slots (writable, at least a block long)."""
        ...

    def scatter(
        self, layout: GroupLayout, slots: Sequence[memoryview], blocks: Sequence[GpuBlock]
    ) -> None:
        """Copy the wanted engine blocks out of the slots; they are in place on return."""
        ...


def copies_for(caches: KVCaches, layouts: Mapping[int, GroupLayout]) -> Copies:
    """The copies that fit the caches' device."""
    if caches.device.type == "cpu":
        return HostCopies(caches, layouts)
    return DeviceCopies(caches)


class HostCopies:
    """Copies where the engine's cache is in host memory.

    A page is copied as one opaque item, which numpy does without releasing the GIL. That is on
    purpose: with the GIL released per page, each of the many short copies would have to win it
    back from a busy thread (up to 5 ms each; measured 4 ms against 1.8 s for 22 MiB in pages of
    12 KiB). The GIL is released once per block, by the checksum. Pages of 1 MiB and more are
    copied with the GIL released.
    """

    mode = "numpy"

    def __init__(self, caches: KVCaches, layouts: Mapping[int, GroupLayout]) -> None:
        """Make views of the tensors' memory, which live as long as this object."""
        self._dtypes = {number: _slot_dtype(layout) for number, layout in layouts.items()}
        self._rows = {
            number: [
                (_field(i), _rows(caches.tensors[page.tensor_index], page.page_bytes))
                for i, page in enumerate(layout.pages)
            ]
            for number, layout in layouts.items()
        }

    def group_size(self, layout: GroupLayout) -> int:
        """One block: it is still in the processor's cache when its checksum is taken."""
        return 1

    def begin(self) -> None:
        """Nothing: an engine in host memory runs no work behind its caller's back."""

    def gather(
        self, layout: GroupLayout, blocks: Sequence[GpuBlock], slots: Sequence[memoryview]
    ) -> None:
        """Copy whole engine blocks into the slots."""
        dtype = self._dtypes[layout.group]
        rows = self._rows[layout.group]
        for block, slot in zip(blocks, slots, strict=True):
            target = np.frombuffer(slot, dtype, count=layout.chunk)
            runs = _runs(block)
            for field, source in rows:
                pages = target[field]
                for inside, cached in runs:
                    pages[inside] = source[cached]

    def scatter(
        self, layout: GroupLayout, slots: Sequence[memoryview], blocks: Sequence[GpuBlock]
    ) -> None:
        """Copy the wanted engine blocks out of the slots."""
        dtype = self._dtypes[layout.group]
        rows = self._rows[layout.group]
        for slot, block in zip(slots, blocks, strict=True):
            source = np.frombuffer(slot, dtype, count=layout.chunk)
            runs = _runs(block)
            for field, target in rows:
                pages = source[field]
                for inside, cached in runs:
                    target[cached] = pages[inside]


class DeviceCopies:
    """Copies through torch, for caches on an accelerator (and, in tests, on any device).

    The blocks of a group pass through one contiguous tensor on the device (at most 64 MiB, or one
    block) and one in host memory.
    """

    def __init__(self, caches: KVCaches) -> None:
        self._tensors = caches.tensors
        self._device = caches.device
        self.mode = f"torch {caches.device}"

    def group_size(self, layout: GroupLayout) -> int:
        """As many blocks as fit the intermediate tensor."""
        return max(1, _DEVICE_GROUP_BYTES // layout.block_bytes)

    def begin(self) -> None:
        """Wait for everything the engine has submitted to the device.

        The engine may compute on streams that are not ordered with ours.
        """
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def gather(
        self, layout: GroupLayout, blocks: Sequence[GpuBlock], slots: Sequence[memoryview]
    ) -> None:
        """Copy whole engine blocks into the slots."""
        ids = self._ids(blocks)
        packed = torch.empty(
            (len(ids), layout.engine_block_bytes), dtype=torch.int8, device=self._device
        )
        for page in layout.pages:
            rows = self._tensors[page.tensor_index][:, : page.page_bytes]
            packed[:, page.offset : page.offset + page.page_bytes] = rows.index_select(0, ids)
        host = packed.cpu().view(torch.uint8).numpy().reshape(len(blocks), layout.block_bytes)
        for row, slot in zip(host, slots, strict=True):
            np.frombuffer(slot, np.uint8, count=layout.block_bytes)[:] = row

    def scatter(
        self, layout: GroupLayout, slots: Sequence[memoryview], blocks: Sequence[GpuBlock]
    ) -> None:
        """Copy the wanted engine blocks out of the slots."""
        ids = self._ids(blocks)
        size = layout.engine_block_bytes
        host = np.empty((len(ids), size), np.uint8)
        done = 0
        for slot, block in zip(slots, blocks, strict=True):
            count = len(block.block_ids)
            whole = np.frombuffer(slot, np.uint8, count=layout.block_bytes).reshape(-1, size)
            host[done : done + count] = whole[block.first : block.first + count]
            done += count
        packed = torch.from_numpy(host).view(torch.int8).to(self._device)
        for page in layout.pages:
            rows = self._tensors[page.tensor_index][:, : page.page_bytes]
            rows.index_copy_(0, ids, packed[:, page.offset : page.offset + page.page_bytes])
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _ids(self, blocks: Sequence[GpuBlock]) -> torch.Tensor:
        ids = [i for block in blocks for i in block.block_ids]
        return torch.tensor(ids, dtype=torch.int64).to(self._device)


def _field(index: int) -> str:
    return f"page{index}"


def _page_dtype(page_bytes: int) -> npt.DTypeLike:
    return f"V{page_bytes}" if page_bytes < _RELEASE_GIL_BYTES else ("u1", (page_bytes,))


def _slot_dtype(layout: GroupLayout) -> np.dtype[np.void]:
    """An engine block inside a slot, one field per page."""
    return np.dtype(
        {
            "names": [_field(i) for i in range(len(layout.pages))],
            "formats": [_page_dtype(page.page_bytes) for page in layout.pages],
            "offsets": [page.offset for page in layout.pages],
            "itemsize": layout.engine_block_bytes,
        }
    )


def _rows(tensor: torch.Tensor, page_bytes: int) -> npt.NDArray[np.generic]:
    """The pages of a tensor in host memory, one item (or row) each; no copy."""
    rows = tensor.view(torch.uint8).numpy()[:, :page_bytes]
    if page_bytes >= _RELEASE_GIL_BYTES:
        return rows
    pages: npt.NDArray[np.void] = rows.view(f"V{page_bytes}")[:, 0]
    return pages


def _runs(block: GpuBlock) -> list[tuple[slice, slice]]:
    """(place inside the block, place in the cache) of neighbours that are copied in one piece.

    Slices, since numpy releases the GIL in assignments by index array.
    """
    runs: list[tuple[slice, slice]] = []
    ids = block.block_ids
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[end - 1] + 1:
            inside = slice(block.first + start, block.first + end)
            runs.append((inside, slice(ids[start], ids[end - 1] + 1)))
            start = end
    return runs
