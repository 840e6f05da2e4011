"""Records of the space: segments with their slots, and the extents that rows name."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tiered_kv.contracts import NewBlock
from tiered_kv.index import Row
from tiered_kv_nvme.headers import SegmentLayout, SlotEntry, pack_entry
from tiered_kv_nvme.plan import anonymous

__all__ = ["Extent", "Segment", "contiguous", "pack_entries"]

_RECORD = struct.Struct(">I8sQQIIIQQ")
_LOCATION = struct.Struct(">IQIQ")
_CHECK = struct.Struct(">Q")


class Extent(NamedTuple):
    """One slot, as it was given out once."""

    number: int
    """Segment."""
    epoch: int
    """The segment's epoch when the slot was given out."""
    slot: int
    offset: int
    """Byte in the segment's file."""
    slot_class: int
    generation: int

    def location(self) -> bytes:
        """What a row says about it."""
        return _LOCATION.pack(self.number, self.epoch, self.slot, self.offset)

    @classmethod
    def of(cls, row: Row) -> Extent:
        """The extent that a row of this tier names."""
        number, epoch, slot, offset = _LOCATION.unpack(row.location)
        return cls(number, epoch, slot, offset, row.slot_class, row.generation)


@dataclass(slots=True)
class Segment:
    """A segment's record, as it is changed inside one transaction."""

    number: int
    slot_class: int
    namespace_id: bytes
    epoch: int
    layout: SegmentLayout
    file_bytes: int
    reserved: int
    """Slots that wait for publication."""
    used: int
    """When a block in it was last stored or read, nanoseconds since the epoch."""
    taken: npt.NDArray[np.uint8]
    """1 per slot that is reserved or published."""

    @property
    def free(self) -> int:
        """Slots that can be given out."""
        return self.layout.slots - int(np.count_nonzero(self.taken))

    def pack(self) -> bytes:
        """The record."""
        layout = self.layout
        head = _RECORD.pack(
            self.slot_class,
            self.namespace_id,
            self.epoch,
            layout.slot_bytes,
            layout.slots,
            layout.stride,
            self.reserved,
            self.file_bytes,
            self.used,
        )
        body = head + np.packbits(self.taken).tobytes()
        return _CHECK.pack(_check(self.number, body)) + body

    @classmethod
    def unpack(cls, number: int, data: bytes) -> Segment | None:
        """The inverse of `pack`; None when the record is not what was packed for this number."""
        body = data[_CHECK.size :]
        if len(body) < _RECORD.size or data[: _CHECK.size] != _CHECK.pack(_check(number, body)):
            return None
        slot_class, namespace_id, epoch, slot_bytes, slots, stride, reserved, file_bytes, used = (
            _RECORD.unpack_from(body)
        )
        taken = np.unpackbits(np.frombuffer(body, np.uint8, offset=_RECORD.size), count=slots)
        layout = SegmentLayout(slot_bytes, slots, stride)
        return cls(
            number, slot_class, namespace_id, epoch, layout, file_bytes, reserved, used, taken
        )


def _check(number: int, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=number)


def contiguous(taken: npt.NDArray[np.uint8], count: int) -> list[int]:
    """At most `count` free slots: the shortest run that is long enough, else the longest ones."""
    bounded = np.empty(taken.size + 2, np.uint8)
    bounded[0] = bounded[-1] = 1
    bounded[1:-1] = taken
    edges = np.flatnonzero(bounded[1:] != bounded[:-1])
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    enough = np.flatnonzero(lengths >= count)
    if enough.size:
        start = int(starts[enough[np.argmin(lengths[enough])]])
        return list(range(start, start + count))
    found: list[int] = []
    for run in np.argsort(-lengths, kind="stable"):
        if len(found) >= count:
            break
        start = int(starts[run])
        found += range(start, start + min(int(lengths[run]), count - len(found)))
    return sorted(found)


def pack_entries(
    run: Sequence[tuple[Extent, NewBlock]], rank: int, layout: SegmentLayout
) -> memoryview:
    """The entries of neighbouring slots in their segment's header table, page-aligned."""
    padding = bytes(layout.stride - SlotEntry.PACKED_BYTES)
    parts: list[bytes] = []
    for (_, epoch, _, _, _, generation), (key, checksum) in run:
        parts += (pack_entry(key, rank, checksum, epoch, generation), padding)
    view = anonymous(len(run) * layout.stride)
    view[:] = b"".join(parts)
    return view
