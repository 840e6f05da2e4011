"""What a segment file looks like on disk.

A segment file is `header page | header table | data`, all big endian:

* The header page (4,096 bytes) says whose file it is and how it is cut: magic, format version, the
  index's identity, number, epoch, slot class, namespace, slots; closed by its own XXH3-64.
* The header table has one entry per slot, each in sectors of its own, so that processes which
  write neighbouring slots never share a sector: key, rank, length, checksum, generation and the
  segment's epoch, closed by its own XXH3-64. Entries of another epoch are leftovers.
* The data area holds the slots, page-aligned.

Files are written to only through reservations of the index, so two processes never write to the
same bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar

import xxhash

from tiered_kv.checksum import BlockChecksum
from tiered_kv.errors import FormatError
from tiered_kv.values import FORMAT_VERSION, PAGE_BYTES, BlockKey, ChecksumKind

__all__ = ["MAGIC", "SegmentHeader", "SegmentLayout", "SlotEntry", "pack_entry", "round_up"]

MAGIC = b"TKVSEG\r\n"

_KEY_BYTES = 256
_HEADER = struct.Struct(">8sI16sQQI8sQII")
_ENTRY = struct.Struct(">4sQQIQQ8sH256s")
_CHECK = struct.Struct(">Q")
_ENTRY_MAGIC = b"SLOT"
_KIND_NAMES = {kind: kind.value.encode("ascii") for kind in ChecksumKind}


def round_up(size: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `size`."""
    return -(-size // unit) * unit


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """How a segment file is cut into slots."""

    slot_bytes: int
    """Bytes of a slot, whole pages."""
    slots: int
    stride: int
    """Bytes between entries of the header table."""

    @property
    def data_offset(self) -> int:
        """Where the first slot begins."""
        return PAGE_BYTES + round_up(self.slots * self.stride, PAGE_BYTES)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_offset + self.slots * self.slot_bytes

    def offset(self, slot: int) -> int:
        """Where a slot begins."""
        return self.data_offset + slot * self.slot_bytes

    def entry_offset(self, slot: int) -> int:
        """Where a slot's entry in the header table begins."""
        return PAGE_BYTES + slot * self.stride

    @classmethod
    def fitting(cls, file_bytes: int, slot_bytes: int, stride: int) -> SegmentLayout:
        """As many slots as fit into `file_bytes`; none where not even one does."""
        slots = max(0, (file_bytes - PAGE_BYTES) // (slot_bytes + stride))
        while slots and cls(slot_bytes, slots, stride).file_bytes > file_bytes:
            slots -= 1
        return cls(slot_bytes, slots, stride)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """First page of a segment file."""

    identity: bytes
    """16 bytes: the index that the file belongs to."""
    number: int
    epoch: int
    """Changes whenever the file is given to a slot class."""
    slot_class: int
    namespace_id: bytes
    layout: SegmentLayout

    def pack(self) -> bytes:
        """One page."""
        body = _HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            self.identity,
            self.number,
            self.epoch,
            self.slot_class,
            self.namespace_id,
            self.layout.slot_bytes,
            self.layout.slots,
            self.layout.stride,
        )
        return (body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))).ljust(PAGE_BYTES, b"\0")

    @classmethod
    def unpack(cls, page: bytes) -> SegmentHeader | None:
        """The inverse of `pack`; None when the page is no sound header of ours.

        Raises:
            FormatError: the header is of another format version.
        """
        if len(page) < _HEADER.size + _CHECK.size or page[: len(MAGIC)] != MAGIC:
            return None
        (version,) = struct.unpack_from(">I", page, len(MAGIC))
        if version != FORMAT_VERSION:
            raise FormatError(f"format {version}; this version reads format {FORMAT_VERSION}")
        body = page[: _HEADER.size]
        if _CHECK.unpack_from(page, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(body):
            return None
        _, _, identity, number, epoch, slot_class, namespace_id, slot_bytes, slots, stride = (
            _HEADER.unpack(body)
        )
        layout = SegmentLayout(slot_bytes, slots, stride)
        return cls(identity, number, epoch, slot_class, namespace_id, layout)


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """One slot's entry in the header table: enough to make its row again."""

    PACKED_BYTES: ClassVar[int] = _ENTRY.size + _CHECK.size

    key: BlockKey
    rank: int
    checksum: BlockChecksum
    epoch: int
    generation: int

    def pack(self) -> bytes:
        """`PACKED_BYTES` bytes, to be padded to the table's stride."""
        packed = bytearray(self.PACKED_BYTES)
        pack_entry(
            memoryview(packed), 0, self.key, self.rank, self.checksum, self.epoch, self.generation
        )
        return bytes(packed)

    @classmethod
    def unpack(cls, data: bytes) -> SlotEntry | None:
        """The inverse of `pack`; None where no sound entry was written."""
        body = data[: _ENTRY.size]
        if len(data) < cls.PACKED_BYTES or body[:4] != _ENTRY_MAGIC:
            return None
        if _CHECK.unpack_from(data, _ENTRY.size)[0] != xxhash.xxh3_64_intdigest(body):
            return None
        _, epoch, generation, rank, length, value, kind, key_bytes, key = _ENTRY.unpack(body)
        name = kind.rstrip(b"\0").decode("ascii", "replace")
        if name not in {known.value for known in ChecksumKind} or key_bytes > _KEY_BYTES:
            return None
        checksum = BlockChecksum(length, value, ChecksumKind(name))
        return cls(BlockKey(key[:key_bytes]), rank, checksum, epoch, generation)


def pack_entry(
    table: memoryview,
    offset: int,
    key: BlockKey,
    rank: int,
    checksum: BlockChecksum,
    epoch: int,
    generation: int,
) -> None:
    """Write what `SlotEntry.pack` gives to byte `offset` of `table`."""
    _ENTRY.pack_into(
        table,
        offset,
        _ENTRY_MAGIC,
        epoch,
        generation,
        rank,
        checksum.length,
        checksum.value,
        _KIND_NAMES[checksum.kind],
        len(key),
        key,
    )
    end = offset + _ENTRY.size
    _CHECK.pack_into(table, end, xxhash.xxh3_64_intdigest(table[offset:end]))
