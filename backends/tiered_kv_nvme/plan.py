"""Turns blocks of a batch into few vectored calls."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from tiered_kv.values import PAGE_BYTES
from tiered_kv_nvme.groups import Group
from tiered_kv_nvme.posix import SECTOR_BYTES
from tiered_kv_nvme.spreading import place_of

__all__ = ["GROUP_BYTES", "Piece", "Plan", "address_of", "anonymous", "flat", "plan"]

GROUP_BYTES = 4 * 2**20
"""Size from which on larger calls bring nothing."""

IOV_MAX = 1024


class Piece(NamedTuple):
    """Bytes of one block: where they are in memory and on disk."""

    position: int
    """Place of the block in the caller's batch."""
    number: int
    """Segment."""
    offset: int
    """Byte in the segment's file, page-aligned."""
    view: memoryview
    """Exactly the bytes to move; begins page-aligned."""


_place = itemgetter(1, 2)


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

    def cut(self, ordered: Sequence[Piece], *, writing: bool) -> list[Piece]:
        """The same bytes in pieces that fit into a group, the last page of a block for itself.

        Raises:
            ValueError: a view is empty.
        """
        count = sum(1 for piece in ordered if piece.view.nbytes % PAGE_BYTES)
        pages = anonymous(count * PAGE_BYTES) if count else memoryview(b"")
        cut: list[Piece] = []
        for position, number, offset, view in ordered:
            size = view.nbytes
            if not size:
                raise ValueError(f"block {position} of the batch is empty")
            body = size - size % PAGE_BYTES
            for start in range(0, body, GROUP_BYTES):
                part = view[start : min(start + GROUP_BYTES, body)]
                cut.append(Piece(position, number, offset + start, part))
            if body < size:
                page, pages = pages[:PAGE_BYTES], pages[PAGE_BYTES:]
                tail = view[body:]
                if writing:
                    page[: tail.nbytes] = tail
                self.tails.append((tail, page))
                cut.append(Piece(position, number, offset + body, page))
        return cut

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
    sizes = {piece.view.nbytes for piece in ordered}
    if any(size % PAGE_BYTES or not 0 < size <= GROUP_BYTES for size in sizes):
        ordered = made.cut(ordered, writing=writing)
    by_directory: dict[int, list[Group]] = {}
    for run in _runs(ordered):
        positions, numbers, offsets, views = zip(*ordered[run.start : run.stop], strict=True)
        group = Group(fds[numbers[0]], offsets[0], views, positions)
        by_directory.setdefault(place_of(numbers[0]), []).append(group)
    for turn in zip_longest(*by_directory.values()):
        made.groups += [group for group in turn if group is not None]
    return made


def _runs(ordered: Sequence[Piece]) -> Iterator[range]:
    """Which pieces follow on each other and fit into one group. The last page of a block may go
    beyond a group's size."""
    first = 0
    at = -1
    start = end = 0
    for i, (_, number, offset, view) in enumerate(ordered):
        size = view.nbytes
        joins = (
            offset == end
            and number == at
            and i - first < IOV_MAX
            and (
                offset - start <= GROUP_BYTES
                if size == PAGE_BYTES
                else offset + size - start <= GROUP_BYTES
            )
        )
        if not joins:
            if i:
                yield range(first, i)
            first, at, start = i, number, offset
        end = offset + size
    if ordered:
        yield range(first, len(ordered))
