"""The copies between engine blocks and host slots. Plain copies only: each one ends.

Two ways, chosen by where the engine's cache is:

* `HostCopies`: the cache is host memory. One copy by the processor, over when the call returns.
* `DeviceCopies`: the cache is on a device. Blocks pass through bounded staging on the device: one
  launch gathers (or scatters) a group of blocks, one transfer over the bus moves each run of
  neighbouring host slots, in streams of our own.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch

from tiered_kv.contracts import HostMemory
from tiered_kv.errors import UnsupportedError
from tiered_kv.memory import (
    BlockIds,
    Device,
    DeviceRows,
    GroupLayout,
    HostRows,
    KVCaches,
    Mark,
    alike,
    device_of,
)
from tiered_kv.specs import GpuBlock

__all__ = [
    "STAGING_BYTES",
    "Copies",
    "Copy",
    "DeviceCopies",
    "HostCopies",
    "Moves",
    "Slot",
    "copies_for",
]

STAGING_BYTES = 32 << 20
"""Device memory of one direction, in two halves; of one block, where half of it holds none."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A host slot: its number in the pool and its bytes."""

    number: int
    view: memoryview


class Copy(Protocol):
    """A group of blocks under way."""

    def wait(self) -> None:
        """Block until no part of it runs any more; idempotent.

        Raises:
            RuntimeError: the device failed.
        """
        ...


class Moves(Protocol):
    """The copies of one handler call. Not thread-safe; calls run side by side."""

    def gather(
        self, layout: GroupLayout, blocks: Sequence[GpuBlock], slots: Sequence[Slot]
    ) -> Copy:
        """Begin to copy whole engine blocks into slots (writable, at least a block long)."""
        ...

    def scatter(
        self, layout: GroupLayout, slots: Sequence[Slot], blocks: Sequence[GpuBlock]
    ) -> Copy:
        """Begin to copy the wanted engine blocks out of slots."""
        ...


class Copies(Protocol):
    """Moves bytes. Blocks were checked against their layout before."""

    @property
    def way(self) -> str:
        """What copies, for logs and `check`."""
        ...

    @property
    def depth(self) -> int:
        """How many groups are best under way at a time."""
        ...

    def group_size(self, layout: GroupLayout) -> int:
        """How many blocks one group has at most."""
        ...

    def begin(self, after: object | None) -> AbstractContextManager[Moves]:
        """The copies of one call, which read and write the engine's cache after `after` (see
        `TransferSpec.after`). On exit none of them runs any more, also after an error."""
        ...


def copies_for(caches: KVCaches, layouts: Mapping[int, GroupLayout], memory: HostMemory) -> Copies:
    """The copies that fit the caches' device.

    Raises:
        UnsupportedError: the device is not supported, or has no memory left for staging.
    """
    device = device_of(caches.device)
    if device is None:
        return HostCopies(caches, layouts)
    return DeviceCopies(caches, layouts, memory, device)


class _Done:
    """A copy that was over when the call returned."""

    def wait(self) -> None:
        """Nothing to wait for."""


_DONE = _Done()


class HostCopies:
    """Copies where the engine's cache is in host memory."""

    way = "numpy"
    depth = 1

    def __init__(self, caches: KVCaches, layouts: Mapping[int, GroupLayout]) -> None:
        self._rows = HostRows(caches, layouts)

    def group_size(self, layout: GroupLayout) -> int:
        """One block: it is still in the processor's cache when its checksum is taken."""
        return 1

    def begin(self, after: object | None) -> Self:
        """Nothing to wait for: an engine in host memory runs no work behind its caller's back."""
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """All copies are over."""

    def gather(
        self, layout: GroupLayout, blocks: Sequence[GpuBlock], slots: Sequence[Slot]
    ) -> Copy:
        """Copy whole engine blocks into the slots."""
        self._rows.gather(layout, blocks, [slot.view for slot in slots])
        return _DONE

    def scatter(
        self, layout: GroupLayout, slots: Sequence[Slot], blocks: Sequence[GpuBlock]
    ) -> Copy:
        """Copy the wanted engine blocks out of the slots."""
        self._rows.scatter(layout, [slot.view for slot in slots], blocks)
        return _DONE


class DeviceCopies:
    """Copies through staging on the device, for one direction.

    The staging has two halves, each with a stream of its own: while one half's bytes are on the
    bus, the next group is gathered into the other. Areas of a half are as far apart as host slots
    are, so that neighbouring slots which their blocks fill are one transfer. A half is in use from
    the first launch until its last copy was waited for.
    """

    def __init__(
        self,
        caches: KVCaches,
        layouts: Mapping[int, GroupLayout],
        memory: HostMemory,
        device: Device,
    ) -> None:
        """Take the staging: `STAGING_BYTES`, or one block where that is more than half of it.

        Raises:
            UnsupportedError: the device has no memory left for it.
        """
        self.way = f"{device.name} streams"
        self._device = device
        self._slot_bytes = memory.slot_bytes
        halves = 2 if 2 * self._slot_bytes <= STAGING_BYTES else 1
        self._areas = max(1, STAGING_BYTES // halves // self._slot_bytes)
        self.depth = halves
        rows = DeviceRows(caches, layouts)
        most = self._areas * max(layout.chunk for layout in layouts.values())
        try:
            self._free = deque(
                _Half(
                    torch.zeros(
                        (self._areas, self._slot_bytes), dtype=torch.int8, device=caches.device
                    ),
                    BlockIds(device, caches.device, most),
                    rows,
                    memory,
                    device,
                )
                for _ in range(halves)
            )
        except RuntimeError as error:  # torch's out of memory is one
            raise UnsupportedError(
                f"cannot take {halves * self._areas * self._slot_bytes:,} bytes of {device.name} "
                f"for copies to and from host memory ({error}); leave more of its memory to others "
                "than the engine"
            ) from error
        self._returned = threading.Condition()

    def group_size(self, layout: GroupLayout) -> int:
        """As many blocks as half of the staging holds."""
        return self._areas

    def begin(self, after: object | None) -> AbstractContextManager[Moves]:
        """Copies that the device does after `after`; without one, after all that it was given."""
        if after is None:
            self._device.synchronize()
        return _DeviceMoves(self, after)

    def take(self, *, wait: bool) -> _Half | None:
        """A free half. Without `wait`, None where there is none. Whoever waits holds none: those
        that do give theirs back without taking another first."""
        with self._returned:
            if wait:
                self._returned.wait_for(lambda: self._free)
            return self._free.popleft() if self._free else None

    def give_back(self, half: _Half) -> None:
        """The half's last copy was waited for."""
        with self._returned:
            self._free.append(half)
            self._returned.notify()


class _DeviceMoves:
    """The copies of one call."""

    def __init__(self, copies: DeviceCopies, after: object | None) -> None:
        self._copies = copies
        self._after = after
        self._open: deque[_DeviceCopy] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        failed: RuntimeError | None = None
        for copy in self._open:
            try:
                copy.wait()
            except RuntimeError as failure:
                failed = failed or failure
        if failed is not None and error is None:
            raise failed

    def gather(
        self, layout: GroupLayout, blocks: Sequence[GpuBlock], slots: Sequence[Slot]
    ) -> Copy:
        return self._start(slots, lambda half: half.gather(layout, blocks, slots, self._after))

    def scatter(
        self, layout: GroupLayout, slots: Sequence[Slot], blocks: Sequence[GpuBlock]
    ) -> Copy:
        return self._start(slots, lambda half: half.scatter(layout, slots, blocks, self._after))

    def _start(self, slots: Sequence[Slot], launch: Callable[[_Half], None]) -> Copy:
        half = self._copies.take(wait=not self._open)
        while half is None:
            self._open.popleft().wait()
            half = self._copies.take(wait=not self._open)
        copy = _DeviceCopy(self._copies, half, slots)
        self._open.append(copy)
        # The mark is set after a failure too: what was launched until then is waited for.
        try:
            launch(half)
        finally:
            copy.mark = half.lane.mark()
        return copy


class _DeviceCopy:
    """A group of blocks in one half of the staging."""

    def __init__(self, copies: DeviceCopies, half: _Half, slots: Sequence[Slot]) -> None:
        self.mark: Mark | None = None
        self._copies = copies
        self._half: _Half | None = half
        self._slots = slots  # keeps the pool's memory mapped

    def wait(self) -> None:
        half = self._half
        if half is None:
            return
        self._half = None
        try:
            if self.mark is not None:
                self.mark.wait()
        finally:
            self._copies.give_back(half)


class _Half:
    """Areas of staging on the device, a stream, and the way of the block numbers to the device."""

    def __init__(
        self,
        areas: torch.Tensor,
        ids: BlockIds,
        rows: DeviceRows,
        memory: HostMemory,
        device: Device,
    ) -> None:
        self._areas = areas
        self._ids = ids
        self._rows = rows
        self._memory = memory
        self.lane = device.lane()
        # The allocator may have given memory that the engine's stream still has work for.
        self.lane.after(device.fence())

    def gather(
        self,
        layout: GroupLayout,
        blocks: Sequence[GpuBlock],
        slots: Sequence[Slot],
        after: object | None,
    ) -> None:
        order = _by_number(slots)
        ordered = [blocks[i] for i in order]
        runs = self._runs(layout, [slots[i] for i in order])

        def gather() -> None:
            self._ids.upload()
            ids = self._ids.part(0, len(ordered), layout.chunk)
            self._rows.gather(layout, ids, self._blocks(layout, 0, len(ordered)))

        def copy_to_host() -> None:
            for host, staged in runs:
                host.copy_(staged, non_blocking=True)

        if after is not None:
            self.lane.after(after)
        self._ids.set(ordered)
        self.lane.run(gather)
        self.lane.run(copy_to_host)

    def scatter(
        self,
        layout: GroupLayout,
        slots: Sequence[Slot],
        blocks: Sequence[GpuBlock],
        after: object | None,
    ) -> None:
        order = _by_number(slots)
        ordered = [blocks[i] for i in order]
        runs = self._runs(layout, [slots[i] for i in order])

        def copy_from_host() -> None:
            for host, staged in runs:
                staged.copy_(host, non_blocking=True)

        def scatter() -> None:
            self._ids.upload()
            done = 0
            for start, end in alike(ordered, range(len(ordered)), [layout] * len(ordered)):
                first, each = ordered[start].first, len(ordered[start].block_ids)
                ids = self._ids.part(done, end - start, each)
                done += (end - start) * each
                staged = self._blocks(layout, start, end - start)
                self._rows.scatter(layout, ids, staged[:, first : first + each])

        self._ids.set(ordered)
        self.lane.run(copy_from_host)
        if after is not None:
            self.lane.after(after)
        self.lane.run(scatter)

    def _blocks(self, layout: GroupLayout, first: int, count: int) -> torch.Tensor:
        """Blocks in neighbouring areas: (blocks, engine blocks, bytes of an engine block)."""
        areas = self._areas[first : first + count, : layout.block_bytes]
        return areas.view(count, layout.chunk, layout.engine_block_bytes)

    def _runs(
        self, layout: GroupLayout, slots: Sequence[Slot]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(host bytes, staged bytes) of what one transfer moves: neighbouring slots that their
        blocks fill, as far as the driver takes them for one piece of memory; else one block. What
        lies behind a block in its slot is never moved."""
        size, stride = layout.block_bytes, self._memory.slot_bytes
        staged = self._areas.view(-1)
        addresses = [np.frombuffer(slot.view, np.uint8).ctypes.data for slot in slots]
        chunks = [self._memory.chunk_of(slot.number) for slot in slots]
        runs: list[tuple[torch.Tensor, torch.Tensor]] = []
        start = 0
        for end in range(1, len(slots) + 1):
            if (
                end < len(slots)
                and size == stride
                and addresses[end] == addresses[end - 1] + stride
                and chunks[end] == chunks[end - 1]
            ):
                continue
            nbytes = (end - start - 1) * stride + size
            first = start * stride
            runs.append((_host_bytes(addresses[start], nbytes), staged[first : first + nbytes]))
            start = end
        return runs


def _by_number(slots: Sequence[Slot]) -> list[int]:
    return sorted(range(len(slots)), key=lambda i: slots[i].number)


def _host_bytes(address: int, nbytes: int) -> torch.Tensor:
    """Bytes of the pool, which the caller keeps mapped."""
    array = (ctypes.c_int8 * nbytes).from_address(address)
    return torch.from_numpy(np.frombuffer(memoryview(array), np.int8))
