"""What a segment file looks like on disk.

A segment file is `header page | header table | data`, all big endian:

* The header page (4,096 bytes) says whose file it is, how it is cut and what its blocks are: magic,
  format version, the index's identity, number, epoch, slot class, namespace, slots, and the JSON
  object that the index keeps of the namespace, as it is or compressed by zlib; the last 8 bytes are
  the page's own XXH3-64. An object that does not fit even compressed is left out and said to be:
  blocks are stored and found all the same, but the segment's rows can be made again only where the
  object is known from elsewhere.
* The header table has one entry per slot, each in sectors of its own, so that processes which
  write neighbouring slots never share a sector: key, rank, length, checksum, generation and the
  segment's epoch, closed by its own XXH3-64. Entries of another epoch are leftovers.
* The data area holds the slots, page-aligned.

Files are written to only through reservations of the index, so two processes never write to the
same bytes.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import ClassVar

import xxhash

from tiered_kv.checksum import BlockChecksum
from tiered_kv.errors import FormatError
from tiered_kv.values import FORMAT_VERSION, PAGE_BYTES, BlockKey, ChecksumKind

__all__ = [
    "ENTRY_BYTES",
    "MAGIC",
    "SegmentHeader",
    "SegmentLayout",
    "SlotEntry",
    "pack_entry",
    "round_up",
]

MAGIC = b"TKVSEG\r\n"

_KEY_BYTES = 256
_HEADER = struct.Struct(">8sI16sQQI8sQIIBH")
_ENTRY = struct.Struct(">4sQQIQQ8sH256s")
_CHECK = struct.Struct(">Q")
_ENTRY_MAGIC = b"SLOT"
_LEFT_OUT, _PLAIN, _COMPRESSED = range(3)
"""How the header page holds the namespace's description."""
_MOST_DESCRIPTION_BYTES = 2**20
_KIND_NAMES = {kind: kind.value.encode("ascii") for kind in ChecksumKind}
_KINDS = {name.ljust(8, b"\0"): kind for kind, name in _KIND_NAMES.items()}


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
    description: bytes = b""
    """What the index records of the namespace: a JSON object. Empty where it was left out, because
    it is longer than the page."""

    ROOM_BYTES: ClassVar[int] = PAGE_BYTES - _HEADER.size - _CHECK.size
    """Most bytes of a description, as it is stored."""

    def pack(self) -> bytes:
        """One page."""
        kind, stored = _PLAIN, self.description
        if len(stored) > self.ROOM_BYTES:
            kind, stored = _COMPRESSED, zlib.compress(stored, 9)
        fits = 0 < len(stored) <= self.ROOM_BYTES and (
            len(self.description) <= _MOST_DESCRIPTION_BYTES
        )
        if not fits:
            kind, stored = _LEFT_OUT, b""
        head = _HEADER.pack(
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
            kind,
            len(stored),
        )
        body = (head + stored).ljust(PAGE_BYTES - _CHECK.size, b"\0")
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, page: bytes) -> SegmentHeader | None:
        """The inverse of `pack`; None when the page is no sound header of ours.

        Raises:
            FormatError: the header is of another format version.
        """
        if len(page) < PAGE_BYTES or page[: len(MAGIC)] != MAGIC:
            return None
        (version,) = struct.unpack_from(">I", page, len(MAGIC))
        if version != FORMAT_VERSION:
            raise FormatError(f"format {version}; this version reads format {FORMAT_VERSION}")
        body = page[: PAGE_BYTES - _CHECK.size]
        if _CHECK.unpack_from(page, len(body))[0] != xxhash.xxh3_64_intdigest(body):
            return None
        _, _, identity, number, epoch, slot_class, namespace_id, *cut, kind, length = (
            _HEADER.unpack_from(body)
        )
        description = _description(kind, body[_HEADER.size : _HEADER.size + length])
        layout = SegmentLayout(*cut)
        return cls(identity, number, epoch, slot_class, namespace_id, layout, description)


def _description(kind: int, stored: bytes) -> bytes:
    if kind == _PLAIN:
        return stored
    if kind != _COMPRESSED:
        return b""
    try:
        return zlib.decompressobj().decompress(stored, _MOST_DESCRIPTION_BYTES)
    except zlib.error:
        return b""


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
        return pack_entry(self.key, self.rank, self.checksum, self.epoch, self.generation)

    @classmethod
    def unpack(cls, data: bytes) -> SlotEntry | None:
        """The inverse of `pack`; None where no sound entry was written."""
        body = data[: _ENTRY.size]
        if len(data) < cls.PACKED_BYTES or body[:4] != _ENTRY_MAGIC:
            return None
        if _CHECK.unpack_from(data, _ENTRY.size)[0] != xxhash.xxh3_64_intdigest(body):
            return None
        _, epoch, generation, rank, length, value, kind, key_bytes, key = _ENTRY.unpack(body)
        if kind not in _KINDS or key_bytes > _KEY_BYTES:
            return None
        checksum = BlockChecksum(length, value, _KINDS[kind])
        return cls(BlockKey(key[:key_bytes]), rank, checksum, epoch, generation)


ENTRY_BYTES = round_up(SlotEntry.PACKED_BYTES, 512)
"""What an entry of the table is taken to cost the medium: whole sectors of 512 bytes."""


def pack_entry(
    key: BlockKey, rank: int, checksum: BlockChecksum, epoch: int, generation: int
) -> bytes:
    """What `SlotEntry.pack` gives."""
    packed = _ENTRY.pack(
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
    return packed + xxhash.xxh3_64_digest(packed)
