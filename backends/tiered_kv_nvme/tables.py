"""Reads and writes entries of segments' header tables."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from tiered_kv_nvme.headers import SegmentLayout, SlotEntry
from tiered_kv_nvme.plan import anonymous

__all__ = ["read_entries", "read_entry", "write_entry"]

_CHUNK_BYTES = 2**20


def read_entries(fd: int, layout: SegmentLayout) -> Iterator[tuple[int, SlotEntry]]:
    """(slot, entry) of every sound entry, of whatever epoch. `fd` may be open for direct I/O.

    Raises:
        OSError: the table cannot be read.
    """
    per_chunk = min(layout.slots, max(1, _CHUNK_BYTES // layout.stride))
    memory = anonymous(per_chunk * layout.stride)
    for first in range(0, layout.slots, per_chunk):
        count = min(per_chunk, layout.slots - first)
        table = memory[: count * layout.stride]
        got = os.preadv(fd, [table], layout.entry_offset(first))
        for place in range(got // layout.stride):
            start = place * layout.stride
            entry = SlotEntry.unpack(bytes(table[start : start + SlotEntry.PACKED_BYTES]))
            if entry is not None:
                yield first + place, entry


def read_entry(fd: int, layout: SegmentLayout, slot: int) -> SlotEntry | None:
    """The entry of one slot, of whatever epoch; None where there is no sound one.

    Raises:
        OSError: it cannot be read.
    """
    memory = anonymous(layout.stride)
    os.preadv(fd, [memory], layout.entry_offset(slot))
    return SlotEntry.unpack(bytes(memory))


def write_entry(fd: int, layout: SegmentLayout, slot: int, entry: SlotEntry) -> None:
    """Replace one slot's entry. The slot must hold a published block for as long as this takes.

    Raises:
        OSError: it cannot be written.
    """
    memory = anonymous(layout.stride)
    memory[: entry.PACKED_BYTES] = entry.pack()
    if os.pwrite(fd, memory, layout.entry_offset(slot)) != layout.stride:
        raise OSError(errno.EIO, "short write of a header table's entry")
