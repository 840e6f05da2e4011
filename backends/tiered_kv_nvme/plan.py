"""Turns blocks of a batch into few vectored calls."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from tiered_kv.values import PAGE_BYTES
from tiered_kv_nvme.groups import Group
from tiered_kv_nvme.posix import SECTOR_BYTES
from tiered_kv_nvme.spreading import place_of

__all__ = ["GROUP_BYTES", "Piece", "Plan", "address_of", "anonymous", "flat", "plan"]

GROUP_BYTES = 4 * 2**20
"""Size from which on larger calls bring nothing."""

IOV_MAX = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one block: where they are in memory and on disk."""

    position: int
    """Place of the block in the caller's batch."""
    number: int
    """Segment."""
    offset: int
    """Byte in the segment's file, page-aligned."""
    view: memoryview
    """Exactly the bytes to move; begins page-aligned."""


@dataclass(slots=True)
class Plan:
    """The calls for a batch, and the last pages of blocks that are not whole pages.

    Direct I/O moves whole sectors only, and the memory behind a view belongs to somebody else: such
    a tail passes through a page of ours.
    """

    groups: list[Group] = field(default_factory=list)
    tails: list[tuple[memoryview, memoryview]] = field(default_factory=list)
    """(the block's tail, the page that stands for it)."""

    def refuse_unaligned(self, failed: Mapping[int, OSError]) -> None:
        """Say so where blocks failed because their memory does not suit direct I/O. Asked only
        then: to find out an address costs more than all else that is done for a small block.

        Raises:
            ValueError: the memory of a block is not aligned.
        """
        if not any(error.errno == errno.EINVAL for error in failed.values()):
            return
        for group in self.groups:
            for view, position in zip(group.views, group.positions, strict=True):
                address = address_of(view)
                if address % SECTOR_BYTES:
                    raise ValueError(
                        f"the memory of block {position} of the batch begins at {address:#x}; "
                        "expected a page-aligned slot of a host pool"
                    )

    def unload(self) -> None:
        """After reading: copy the tails to where they belong."""
        for tail, page in self.tails:
            tail[:] = page[: tail.nbytes]


def anonymous(size: int) -> memoryview:
    """`size` zero bytes, page-aligned."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def flat(view: memoryview) -> memoryview:
    """The same memory as plain bytes."""
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def address_of(view: memoryview) -> int:
    """Where in memory a view begins."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def plan(pieces: Iterable[Piece], fds: Mapping[int, int], *, writing: bool) -> Plan:
    """Sort the pieces by place and join neighbours into groups of about 4 MiB; groups of different
    directories take turns, so that all disks are busy from the first on.

    Raises:
        ValueError: a view is empty.
    """
    ordered = sorted(pieces, key=_place)
    made = Plan()
    open_tails = sum(1 for piece in ordered if piece.view.nbytes % PAGE_BYTES)
    pages = anonymous(open_tails * PAGE_BYTES) if open_tails else memoryview(b"")
    by_directory: dict[int, list[Group]] = {}
    builder = _Builder()
    for piece in ordered:
        builder.groups = by_directory.setdefault(place_of(piece.number), [])
        fd, view, offset = fds[piece.number], piece.view, piece.offset
        size = view.nbytes
        if not size:
            raise ValueError(f"block {piece.position} of the batch is empty")
        body = size - size % PAGE_BYTES
        if size == body <= GROUP_BYTES:
            builder.add(fd, offset, view, piece.position)
            continue
        for start in range(0, body, GROUP_BYTES):
            stop = min(start + GROUP_BYTES, body)
            builder.add(fd, offset + start, view[start:stop], piece.position)
        if body < size:
            page, pages = pages[:PAGE_BYTES], pages[PAGE_BYTES:]
            tail = view[body:]
            if writing:
                page[: tail.nbytes] = tail
            made.tails.append((tail, page))
            builder.add(fd, offset + body, page, piece.position, slack=PAGE_BYTES)
    builder.close()
    for turn in zip_longest(*by_directory.values()):
        made.groups += [group for group in turn if group is not None]
    return made


def _place(piece: Piece) -> tuple[int, int]:
    return piece.number, piece.offset


class _Builder:
    """Joins what follows on each other into one group."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        """Where the next group goes."""
        self._goes_to = self.groups
        self._fd = -1
        self._start = 0
        self._end = 0
        self._views: list[memoryview] = []
        self._positions: list[int] = []

    def add(self, fd: int, offset: int, view: memoryview, position: int, *, slack: int = 0) -> None:
        size = view.nbytes
        joins = (
            fd == self._fd
            and offset == self._end
            and len(self._views) < IOV_MAX
            and offset + size - self._start <= GROUP_BYTES + slack
        )
        if not joins:
            self.close()
            self._fd, self._start, self._goes_to = fd, offset, self.groups
        self._end = offset + size
        self._views.append(view)
        self._positions.append(position)

    def close(self) -> None:
        if self._views:
            views, positions = tuple(self._views), tuple(self._positions)
            self._goes_to.append(Group(self._fd, self._start, views, positions))
            self._views, self._positions = [], []
        self._fd = -1
