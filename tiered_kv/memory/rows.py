"""The engine's blocks, copied to and from memory of ours in the layout of `GroupLayout`.

Two ways, chosen by where the engine's cache is:

* `HostRows`: host memory. numpy views of the tensors' own memory, no bytes in between. torch is
  not used to copy: on small pieces its CPU copies are several times slower.
* `DeviceRows`: any other torch device. One launch per group of blocks and per `Band`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tiered_kv.memory.caches import KVCaches
from tiered_kv.memory.device import Device
from tiered_kv.memory.layout import GroupLayout
from tiered_kv.specs import GpuBlock

__all__ = ["BlockIds", "DeviceRows", "HostRows", "alike"]

_RELEASE_GIL_BYTES = 1 << 20
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.int8))


class HostRows:
    """Copies where the engine's cache is in host memory.

    A page is copied as one opaque item, which numpy does without releasing the GIL. That is on
    purpose: with the GIL released per page, each of the many short copies would have to win it
    back from a busy thread (up to 5 ms each; measured 4 ms against 1.8 s for 22 MiB in pages of
    12 KiB). The GIL is released once per block, by the checksum. Pages of 1 MiB and more are
    copied with the GIL released.
    """

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

    def gather(
        self, layout: GroupLayout, blocks: Sequence[GpuBlock], places: Sequence[memoryview]
    ) -> None:
        """Copy whole engine blocks into the places (writable, at least a block long)."""
        dtype = self._dtypes[layout.group]
        rows = self._rows[layout.group]
        for block, place in zip(blocks, places, strict=True):
            target = np.frombuffer(place, dtype, count=layout.chunk)
            runs = _runs(block)
            for field, source in rows:
                pages = target[field]
                for inside, cached in runs:
                    pages[inside] = source[cached]

    def scatter(
        self, layout: GroupLayout, places: Sequence[memoryview], blocks: Sequence[GpuBlock]
    ) -> None:
        """Copy the wanted engine blocks out of the places; they are in place on return."""
        dtype = self._dtypes[layout.group]
        rows = self._rows[layout.group]
        for place, block in zip(places, blocks, strict=True):
            source = np.frombuffer(place, dtype, count=layout.chunk)
            runs = _runs(block)
            for field, target in rows:
                pages = source[field]
                for inside, cached in runs:
                    target[cached] = pages[inside]


@dataclass(frozen=True, slots=True)
class Band:
    """Neighbouring pages of an engine block that one launch copies.

    They are alike: of one length, in one allocation, with equal distances between them. So are the
    layers of a cross-layer cache, layers packed in one tensor, and layers cut out of one
    allocation. A layer with an allocation of its own is a band of its own.
    """

    pages: torch.Tensor
    """(engine blocks of the cache, pages, words of a page); a view of the engine's cache."""
    first: int
    """Word of the engine block at which the band begins."""
    words: int
    """Words of the band's pages together."""


class DeviceRows:
    """Copies by torch's kernels, given to the current stream.

    Blocks of ours are an int8 tensor (blocks, engine blocks of each, bytes of an engine block)
    whose engine blocks lie together, and whose blocks may lie further apart.
    """

    def __init__(self, caches: KVCaches, layouts: Mapping[int, GroupLayout]) -> None:
        """Make views of the tensors, which live as long as this object."""
        self._words: dict[int, torch.dtype] = {}
        self._bands: dict[int, tuple[Band, ...]] = {}
        for number, layout in layouts.items():
            self._words[number], self._bands[number] = _bands_of(caches, layout)

    def launches(self, layout: GroupLayout) -> int:
        """How many kernels move a group of blocks, however many blocks it has."""
        return len(self._bands[layout.group])

    def gather(self, layout: GroupLayout, ids: torch.Tensor, target: torch.Tensor) -> None:
        """Copy engine blocks `ids` (int64, as many as `target` has) into `target`."""
        words = target.view(self._words[layout.group])
        for band in self._bands[layout.group]:
            torch.ops.aten.index.Tensor_out(band.pages, [ids], out=_part(words, band))

    def scatter(self, layout: GroupLayout, ids: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` into engine blocks `ids` (int64, as many as `source` has)."""
        words = source.view(self._words[layout.group])
        for band in self._bands[layout.group]:
            band.pages.index_put_((ids,), _part(words, band))


class BlockIds:
    """Numbers of engine blocks on their way to the device: room for `capacity`, taken once.

    Not to be set anew before the device has copied them.
    """

    def __init__(self, device: Device, where: torch.device, capacity: int) -> None:
        self._host = device.host_tensor(capacity)
        self._device = torch.zeros(capacity, dtype=torch.int64, device=where)
        self._count = 0

    def set(self, blocks: Sequence[GpuBlock]) -> None:
        """Take the numbers of these blocks, one behind the other."""
        numbers = [i for block in blocks for i in block.block_ids]
        self._host.numpy()[: len(numbers)] = numbers
        self._count = len(numbers)

    def upload(self) -> None:
        """Copy them; launched."""
        self._device[: self._count].copy_(self._host[: self._count], non_blocking=True)

    def part(self, start: int, blocks: int, each: int) -> torch.Tensor:
        """`blocks` times `each` numbers from the `start`-th on, on the device."""
        return self._device[start : start + blocks * each].view(blocks, each)


def alike(
    blocks: Sequence[GpuBlock], places: Sequence[int], layouts: Sequence[GroupLayout]
) -> Iterator[tuple[int, int]]:
    """Ranges (start, end) of blocks that one launch moves: of one KV group, with the same part
    wanted, in neighbouring places."""
    start = 0
    for end in range(1, len(blocks) + 1):
        if end < len(blocks):
            last, this = blocks[end - 1], blocks[end]
            same = (
                layouts[end] is layouts[end - 1]
                and places[end] == places[end - 1] + 1
                and this.first == last.first
                and len(this.block_ids) == len(last.block_ids)
            )
            if same:
                continue
        yield start, end
        start = end


def _bands_of(caches: KVCaches, layout: GroupLayout) -> tuple[torch.dtype, tuple[Band, ...]]:
    """The group's bands, in the widest words that all its addresses and lengths allow."""
    spans = [(caches.tensors[page.tensor_index], page) for page in layout.pages]
    numbers: list[int] = [layout.engine_block_bytes]
    for tensor, page in spans:
        numbers += [tensor.data_ptr(), int(tensor.storage_offset()), tensor.stride(0)]
        numbers += [page.page_bytes, page.offset]
    size, dtype = next(word for word in _WORDS if not any(n % word[0] for n in numbers))
    bands: list[Band] = []
    start = 0
    for end in range(1, len(spans) + 1):
        count = end - start
        step = _step(spans[start][0], spans[start + 1][0]) if count > 1 else 0
        if end < len(spans):
            (last, last_page), (this, this_page) = spans[end - 1], spans[end]
            distance = _step(last, this)
            fits = (
                last.untyped_storage().data_ptr() == this.untyped_storage().data_ptr()
                and last.stride(0) == this.stride(0)
                and last_page.page_bytes == this_page.page_bytes
                and distance >= this_page.page_bytes
                and (count == 1 or distance == step)
            )
            if fits:
                continue
        tensor, page = spans[start]
        pages = tensor.as_strided(
            (layout.num_blocks, count, page.page_bytes), (tensor.stride(0), step, 1)
        )
        words = count * page.page_bytes // size
        bands.append(Band(pages.view(dtype), page.offset // size, words))
        start = end
    return dtype, tuple(bands)


def _step(first: torch.Tensor, second: torch.Tensor) -> int:
    return second.data_ptr() - first.data_ptr()


def _part(words: torch.Tensor, band: Band) -> torch.Tensor:
    """The band's place in blocks of ours: (blocks, engine blocks, pages, words of a page)."""
    part = words[:, :, band.first : band.first + band.words]
    return part.view(*part.shape[:2], *band.pages.shape[1:])


def _field(index: int) -> str:
    return f"page{index}"


def _page_dtype(page_bytes: int) -> npt.DTypeLike:
    return f"V{page_bytes}" if page_bytes < _RELEASE_GIL_BYTES else ("u1", (page_bytes,))


def _slot_dtype(layout: GroupLayout) -> np.dtype[np.void]:
    """An engine block inside a block, one field per page."""
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
