"""Staging on the engine's device for handlers that move blocks between it and a store directly.

`tiered_kv.contracts.DeviceStaging` says what is owed. Where the engine computes in host memory the
staging is host memory too, and says so: the direct path then works the same, without a device.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tiered_kv.checksum import BlockChecksum, word_weights
from tiered_kv.contracts import DeviceBuffer, DeviceStaging
from tiered_kv.errors import UnsupportedError
from tiered_kv.memory.caches import KVCaches
from tiered_kv.memory.device import Device, device_of
from tiered_kv.memory.layout import GroupLayout, layouts_of
from tiered_kv.memory.rows import BlockIds, DeviceRows, HostRows, alike
from tiered_kv.specs import GpuBlock
from tiered_kv.values import BlockKey, CacheGeometry, ChecksumKind

__all__ = ["HOST_STAGING_NAME", "HostStaging", "TorchStaging", "make_staging"]

HOST_STAGING_NAME = "tiered-kv-staging"
"""What staging in host memory is called in /proc/PID/maps."""

_LEAST_AREAS = 2
_WORD_BYTES = 8
_ALIGNMENT = 64 << 10  # the pages in which the driver maps device memory for direct I/O


def make_staging(caches: KVCaches, geometry: CacheGeometry, nbytes: int) -> DeviceStaging:
    """Staging of at most `nbytes` bytes where the engine's caches are; of two blocks where two
    blocks are more than that.

    Raises:
        IdentityError: the caches are not what the geometry says.
        UnsupportedError: the device is not supported, or has not that much memory left.
    """
    device = device_of(caches.device)
    if device is None:
        return HostStaging(caches, geometry, nbytes)
    return TorchStaging(caches, geometry, nbytes, device)


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """A `DeviceBuffer`."""

    address: int
    nbytes: int
    owner: object
    """What keeps the memory alive."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": None,  # nothing to wait for: what wrote the bytes was waited for
        }


class _Areas:
    """Equal areas of one piece of memory, on lease. Thread-safe."""

    def __init__(self, caches: KVCaches, geometry: CacheGeometry, areas: int) -> None:
        self.layouts = layouts_of(caches, geometry)
        self.rank = geometry.rank
        self._device_name = str(caches.device)
        self._area_bytes = geometry.slot_bytes
        self._free = [True] * areas
        self._changed = threading.Condition()

    @property
    def device(self) -> str:
        """Where it is: "cuda:0", or "cpu" where the engine computes in host memory."""
        return self._device_name

    @property
    def area_bytes(self) -> int:
        """Bytes of each area: the largest block, rounded up to whole pages."""
        return self._area_bytes

    @property
    def areas(self) -> int:
        """Number of areas."""
        return len(self._free)

    def lease(self, count: int, timeout: float) -> tuple[int, ...] | None:
        """Between 1 and `count` neighbouring areas, ascending: the first run of free ones that is
        long enough, else the longest. Waits at most `timeout` seconds for the first; None when
        there is none until then.

        Raises:
            ValueError: `count` is not positive.
        """
        if count < 1:
            raise ValueError(f"cannot lease {count} areas of device staging")
        with self._changed:
            if not self._changed.wait_for(lambda: any(self._free), timeout):
                return None
            taken = self._run(count)
            for area in taken:
                self._free[area] = False
            return taken

    def release(self, areas: Sequence[int]) -> None:
        """Give areas back; no I/O and no copy uses them any more.

        Raises:
            ValueError: an area is not on lease; none is given back then.
        """
        with self._changed:
            for area in areas:
                if not 0 <= area < len(self._free) or self._free[area]:
                    raise ValueError(f"area {area} of device staging is not on lease")
            for area in areas:
                self._free[area] = True
            self._changed.notify_all()

    def _run(self, count: int) -> tuple[int, ...]:
        best: tuple[int, int] = (0, 0)
        start = 0
        for area, free in enumerate([*self._free, False]):
            if free:
                continue
            if area - start > best[1] - best[0]:
                best = start, area
            if best[1] - best[0] >= count:
                break
            start = area + 1
        return tuple(range(best[0], min(best[1], best[0] + count)))

    def check_span(self, first: int, nbytes: int) -> int:
        """The byte at which area `first` begins.

        Raises:
            ValueError: the staging does not hold that many bytes from there on.
        """
        start = first * self._area_bytes
        if first < 0 or not 0 < nbytes <= len(self._free) * self._area_bytes - start:
            raise ValueError(
                f"{nbytes} bytes from area {first} on are outside the {len(self._free)} areas of "
                f"{self._area_bytes} bytes of device staging"
            )
        return start

    def sound(
        self,
        blocks: Sequence[GpuBlock],
        areas: Sequence[int],
        problem_of: Callable[[GroupLayout, GpuBlock], str | None],
    ) -> list[bool]:
        """Which blocks name what they should.

        Raises:
            ValueError: blocks and areas are not equally many, or no area has that number.
        """
        if len(blocks) != len(areas):
            raise ValueError(f"{len(blocks)} blocks cannot lie in {len(areas)} areas")
        for area in areas:
            self.check_span(area, self._area_bytes)
        return [
            (layout := self.layouts.get(block.group)) is not None
            and problem_of(layout, block) is None
            for block in blocks
        ]


class HostStaging(_Areas):
    """Staging where the engine computes in host memory: one mapping named `HOST_STAGING_NAME`."""

    def __init__(self, caches: KVCaches, geometry: CacheGeometry, nbytes: int) -> None:
        """See `make_staging`; the caches are in host memory."""
        super().__init__(caches, geometry, max(_LEAST_AREAS, nbytes // geometry.slot_bytes))
        self._rows = HostRows(caches, self.layouts)
        self._memory = _map_named(self.areas * self.area_bytes)
        self._whole = memoryview(self._memory)
        self._array = np.frombuffer(self._whole, np.uint8)

    @property
    def buffer(self) -> DeviceBuffer:
        """All areas, one behind the other."""
        return self.span(0, self._array.nbytes)

    def span(self, first: int, nbytes: int) -> DeviceBuffer:
        """`nbytes` bytes from the beginning of area `first` on.

        Raises:
            ValueError: there are not that many.
        """
        start = self.check_span(first, nbytes)
        return _Span(self._array.ctypes.data + start, nbytes, self._array)

    def gather(
        self, blocks: Sequence[GpuBlock], areas: Sequence[int], after: object | None
    ) -> list[bool]:
        """Copy whole engine blocks into areas; see the contract. Nothing is waited for: an engine
        in host memory runs no work behind its caller's back."""
        sound = self.sound(blocks, areas, GroupLayout.problem_of_whole)
        for block, area, right in zip(blocks, areas, sound, strict=True):
            if right:
                self._rows.gather(self.layouts[block.group], [block], [self._view(area)])
        return sound

    def scatter(
        self, areas: Sequence[int], blocks: Sequence[GpuBlock], after: object | None
    ) -> list[bool]:
        """Copy the wanted engine blocks out of areas; see the contract."""
        sound = self.sound(blocks, areas, GroupLayout.problem_of)
        for area, block, right in zip(areas, blocks, sound, strict=True):
            if right:
                self._rows.scatter(self.layouts[block.group], [self._view(area)], [block])
        return sound

    def checksum(self, key: BlockKey, area: int, length: int, kind: ChecksumKind) -> BlockChecksum:
        """Checksum of the first `length` bytes of an area.

        Raises:
            ValueError: an area has fewer bytes.
        """
        if not 0 <= length <= self.area_bytes:
            raise ValueError(f"an area of {self.area_bytes} bytes has no first {length}")
        return BlockChecksum.capture(key, self.rank, self._view(area)[:length], kind)

    def _view(self, area: int) -> memoryview:
        start = self.check_span(area, self.area_bytes)
        return self._whole[start : start + self.area_bytes]


class TorchStaging(_Areas):
    """Staging in a tensor on the engine's device.

    Two areas' worth of the memory holds the weights of `wsum` and its products. Copies and
    checksums take turns, in one lane; the thread waits for each.
    """

    def __init__(
        self, caches: KVCaches, geometry: CacheGeometry, nbytes: int, device: Device
    ) -> None:
        """See `make_staging`; `device` is that of the caches."""
        area = geometry.slot_bytes
        super().__init__(caches, geometry, max(_LEAST_AREAS, nbytes // area - 2))
        self._rows = DeviceRows(caches, self.layouts)
        self._device = device
        self._turn = threading.Lock()
        size = self.areas * area
        words = area // _WORD_BYTES
        most = self.areas * max(layout.chunk for layout in self.layouts.values())
        weights = torch.from_numpy(word_weights(words).view(np.int64).copy())
        try:
            memory = torch.zeros(size + _ALIGNMENT, dtype=torch.int8, device=caches.device)
            self._weights = weights.to(caches.device)
            self._products = torch.zeros_like(self._weights)
            self._sum = torch.zeros((), dtype=torch.int64, device=caches.device)
            self._host_sum = device.host_tensor(1)
            self._ids = BlockIds(device, caches.device, most)
        except RuntimeError as error:  # torch's out of memory is one
            raise UnsupportedError(
                f"cannot take {size + 2 * area:,} bytes of {device.name} for direct transfers "
                f"({error}); leave more of its memory to others than the engine"
            ) from error
        start = -memory.data_ptr() % _ALIGNMENT
        self._memory = memory[start : start + size]
        self._words = self._memory.view(torch.int64).view(self.areas, words)
        self._lane = device.lane()
        # The allocator may have given memory that the engine's stream still has work for.
        self._lane.after(device.fence())

    @property
    def buffer(self) -> DeviceBuffer:
        """All areas, one behind the other."""
        return self.span(0, self._memory.nbytes)

    def span(self, first: int, nbytes: int) -> DeviceBuffer:
        """`nbytes` bytes from the beginning of area `first` on.

        Raises:
            ValueError: there are not that many.
        """
        start = self.check_span(first, nbytes)
        return _Span(self._memory.data_ptr() + start, nbytes, self._memory)

    def launches(self, group: int) -> int:
        """How many kernels move a group of neighbouring blocks of this KV group."""
        return self._rows.launches(self.layouts[group])

    def gather(
        self, blocks: Sequence[GpuBlock], areas: Sequence[int], after: object | None
    ) -> list[bool]:
        """Copy whole engine blocks into areas; see the contract.

        Raises:
            RuntimeError: the device failed.
        """
        sound = self.sound(blocks, areas, GroupLayout.problem_of_whole)
        self._move(blocks, areas, sound, after, self._rows.gather)
        return sound

    def scatter(
        self, areas: Sequence[int], blocks: Sequence[GpuBlock], after: object | None
    ) -> list[bool]:
        """Copy the wanted engine blocks out of areas; see the contract.

        Raises:
            RuntimeError: the device failed.
        """
        sound = self.sound(blocks, areas, GroupLayout.problem_of)
        self._move(blocks, areas, sound, after, self._rows.scatter)
        return sound

    def checksum(self, key: BlockKey, area: int, length: int, kind: ChecksumKind) -> BlockChecksum:
        """Checksum of the first `length` bytes of an area: `wsum` on the device, `xxh3` by way of
        host memory.

        Raises:
            RuntimeError: the device failed.
            ValueError: an area has fewer bytes.
        """
        if not 0 <= length <= self.area_bytes:
            raise ValueError(f"an area of {self.area_bytes} bytes has no first {length}")
        if kind is ChecksumKind.WSUM:
            return BlockChecksum.of_sum(key, self.rank, length, self._weighted(area, length))
        data = self._to_host(self.check_span(area, self.area_bytes), length)
        return BlockChecksum.capture(key, self.rank, memoryview(data), kind)

    def _move(
        self,
        blocks: Sequence[GpuBlock],
        areas: Sequence[int],
        sound: Sequence[bool],
        after: object | None,
        move: Callable[[GroupLayout, torch.Tensor, torch.Tensor], None],
    ) -> None:
        wanted = [
            (block, area)
            for block, area, right in zip(blocks, areas, sound, strict=True)
            if right and block.block_ids
        ]
        if len(wanted) > self.areas:
            raise ValueError(f"{len(wanted)} blocks cannot lie in {self.areas} areas")
        if not wanted:
            return
        of_blocks = [block for block, _ in wanted]
        places = [area for _, area in wanted]
        layouts = [self.layouts[block.group] for block in of_blocks]

        def work() -> None:
            self._ids.upload()
            done = 0
            for start, end in alike(of_blocks, places, layouts):
                first, each = of_blocks[start].first, len(of_blocks[start].block_ids)
                ids = self._ids.part(done, end - start, each)
                done += (end - start) * each
                ours = self._blocks(layouts[start], places[start], end - start)
                move(layouts[start], ids, ours[:, first : first + each])

        with self._turn:
            if after is None:
                self._device.synchronize()
            else:
                self._lane.after(after)
            self._ids.set(of_blocks)
            try:
                self._lane.run(work)
            finally:  # what was launched before a failure is waited for as well
                self._lane.mark().wait()

    def _blocks(self, layout: GroupLayout, first: int, count: int) -> torch.Tensor:
        """Blocks in neighbouring areas: (blocks, engine blocks, bytes of an engine block)."""
        areas = self._memory.view(self.areas, self.area_bytes)[first : first + count]
        return areas[:, : layout.block_bytes].view(count, layout.chunk, layout.engine_block_bytes)

    def _weighted(self, area: int, length: int) -> int:
        """Sum of the weighted words of the first `length` bytes, as a signed 64-bit number or more
        where the last word is not whole."""
        start = self.check_span(area, self.area_bytes)
        whole, rest = divmod(length, _WORD_BYTES)
        total = 0
        if whole:

            def work() -> None:
                products = self._products[:whole]
                torch.mul(self._words[area, :whole], self._weights[:whole], out=products)
                torch.sum(products, 0, out=self._sum)
                self._host_sum.copy_(self._sum, non_blocking=True)

            with self._turn:
                self._lane.run(work)
                self._lane.mark().wait()
                total = int(self._host_sum[0])
        if rest:
            last = int.from_bytes(self._to_host(start + whole * _WORD_BYTES, rest), "little")
            total += last * int(word_weights(whole + 1)[whole])
        return total

    def _to_host(self, start: int, length: int) -> bytearray:
        data = bytearray(length)
        if length:
            host = torch.frombuffer(data, dtype=torch.int8)
            with self._turn:
                self._lane.run(
                    lambda: host.copy_(self._memory[start : start + length], non_blocking=True)
                )
                self._lane.mark().wait()
        return data


def _map_named(length: int) -> mmap.mmap:
    # A mapping of a memfd, since an anonymous one cannot be told from others in /proc/PID/maps.
    try:
        descriptor = os.memfd_create(HOST_STAGING_NAME)
        try:
            os.ftruncate(descriptor, length)
            return mmap.mmap(descriptor, length)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UnsupportedError(
            f"cannot map {length:,} bytes of host memory for direct transfers ({error}); raise the "
            "memory limit of this process"
        ) from error
