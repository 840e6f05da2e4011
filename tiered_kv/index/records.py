"""How rows and block records look on the disk: packed, each with a check value of its own.

LMDB has no checksums and its structural check does not look at values, so a record that was
damaged on the disk is told by the 32 bits in front of it (XXH32 over its key and content).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

from xxhash import xxh32_intdigest

from tiered_kv.checksum import BlockChecksum
from tiered_kv.values import ChecksumKind

__all__ = ["MAX_LOCATION_BYTES", "BlockRecord", "ClassRecord", "FullKey", "Row"]

MAX_LOCATION_BYTES = 32

FullKey = NewType("FullKey", bytes)
"""Namespace id (8 bytes) + key: names a block of any namespace of the tier."""

_CHECK = struct.Struct(">I")
_ROW = struct.Struct(">BQQIQ")
_SEALED_ROW = struct.Struct(">IBQQIQ")
_BLOCK = struct.Struct(">IQQHH")
_SEALED_BLOCK = struct.Struct(">IIQQHH")
_CLASS = struct.Struct(">8sIQQ")
_KIND_CODES = {ChecksumKind.XXH3: 1, ChecksumKind.WSUM: 2}
_KINDS = {code: kind for kind, code in _KIND_CODES.items()}
_SHORTEST_ROW, _LONGEST_ROW = _SEALED_ROW.size, _SEALED_ROW.size + MAX_LOCATION_BYTES

# Rows are made and read by the thousand, so what follows spends little on each: no call of a
# generated constructor, no look-up by an enum's member, whose hash is a Python function.
_pack_check, _pack_row, _unpack_row = _CHECK.pack, _ROW.pack, _SEALED_ROW.unpack_from
_new = tuple.__new__
_XXH3 = ChecksumKind.XXH3


class Row(NamedTuple):
    """Where one rank's part of a block lies."""

    checksum: BlockChecksum
    slot_class: int
    location: bytes
    """At most 32 bytes; the store's own words."""
    generation: int
    """Differs each time the location is given out (64 bits), so that a reader can tell after its
    read whether the bytes were still the row's. `BlockIndex.next_generation` gives one."""

    def pack(self, key: bytes) -> bytes:
        """The record under `key`. Raises as `packed` does."""
        ((_, record),) = self.packed([(key, self)])
        return record

    @staticmethod
    def packed(rows: Iterable[tuple[bytes, Row]]) -> list[tuple[bytes, bytes]]:
        """(key, record) of each (key, row).

        Raises:
            ValueError: a location is too long.
        """
        records: list[tuple[bytes, bytes]] = []
        for key, ((length, value, kind), slot_class, location, generation) in rows:
            if len(location) > MAX_LOCATION_BYTES:
                raise ValueError(
                    f"a location is at most {MAX_LOCATION_BYTES} bytes, not {len(location)}"
                )
            code = 1 if kind is _XXH3 else _KIND_CODES[kind]
            content = _pack_row(code, length, value, slot_class, generation) + location
            records.append((key, _pack_check(xxh32_intdigest(key + content)) + content))
        return records

    @classmethod
    def unpack(cls, key: bytes, data: bytes) -> Row | None:
        """The row; None where the record is damaged."""
        if not _SHORTEST_ROW <= len(data) <= _LONGEST_ROW:
            return None
        check, code, length, value, slot_class, generation = _unpack_row(data)
        kind = _KINDS.get(code)
        if kind is None or check != xxh32_intdigest(key + data[4:]):
            return None
        checksum = _new(BlockChecksum, (length, value, kind))
        return _new(cls, (checksum, slot_class, data[_SHORTEST_ROW:], generation))


class BlockRecord(NamedTuple):
    """What all ranks' parts of a block have in common."""

    slot_class: int
    tick: int
    """Orders victims: the least goes first."""
    group: int
    """Number of the record of `order` that has the block's key."""
    world_size: int
    present: int
    """How many ranks' rows are published."""

    @property
    def whole(self) -> bool:
        """Whether all ranks have their part."""
        return self.present == self.world_size

    def packed(self, keys: Sequence[FullKey]) -> list[tuple[FullKey, bytes]]:
        """(key, record) of several blocks, of which all is the same."""
        content = _BLOCK.pack(*self)
        return [(key, _pack_check(xxh32_intdigest(key + content)) + content) for key in keys]

    @classmethod
    def unpack(cls, key: bytes, data: bytes | None) -> BlockRecord | None:
        """The record; None where it is missing or damaged."""
        if data is None or len(data) != _SEALED_BLOCK.size:
            return None
        check, *fields = _SEALED_BLOCK.unpack(data)
        if check != xxh32_intdigest(key + data[_CHECK.size :]):
            return None
        return cls._make(fields)


@dataclass(frozen=True, slots=True)
class ClassRecord:
    """A slot class, see `SlotClass`."""

    namespace_id: bytes
    group: int
    slot_bytes: int
    blocks: int

    def pack(self) -> bytes:
        """The record."""
        return _CLASS.pack(self.namespace_id, self.group, self.slot_bytes, self.blocks)

    @classmethod
    def unpack(cls, data: bytes) -> ClassRecord:
        """The inverse of `pack`."""
        return cls(*_CLASS.unpack(data))
