"""How rows and block records look on the disk: packed, each with a check value of its own.

LMDB has no checksums and its structural check does not look at values, so a record that was
damaged on the disk is told by the 32 bits in front of it (XXH32 over its key and content).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh32_intdigest

from tiered_kv.checksum import BlockChecksum
from tiered_kv.values import ChecksumKind

__all__ = ["MAX_LOCATION_BYTES", "BlockRecord", "ClassRecord", "Row"]

MAX_LOCATION_BYTES = 32

_CHECK = struct.Struct(">I")
_ROW = struct.Struct(">BQQIQ")
_SEALED_ROW = struct.Struct(">IBQQIQ")
_BLOCK = struct.Struct(">IQHH")
_SEALED_BLOCK = struct.Struct(">IIQHH")
_CLASS = struct.Struct(">8sIQQ")
_KIND_CODES = {ChecksumKind.XXH3: 1, ChecksumKind.WSUM: 2}
_KINDS = {code: kind for kind, code in _KIND_CODES.items()}


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
        """The record under `key`.

        Raises:
            ValueError: the location is too long.
        """
        if len(self.location) > MAX_LOCATION_BYTES:
            raise ValueError(
                f"a location is at most {MAX_LOCATION_BYTES} bytes, not {len(self.location)}"
            )
        checksum, slot_class, location, generation = self
        head = _ROW.pack(
            _KIND_CODES[checksum.kind], checksum.length, checksum.value, slot_class, generation
        )
        content = head + location
        return _CHECK.pack(xxh32_intdigest(key + content)) + content

    @classmethod
    def unpack(cls, key: bytes, data: bytes) -> Row | None:
        """The row; None where the record is damaged."""
        if not 0 <= len(data) - _SEALED_ROW.size <= MAX_LOCATION_BYTES:
            return None
        check, code, length, value, slot_class, generation = _SEALED_ROW.unpack_from(data)
        kind = _KINDS.get(code)
        if kind is None or check != xxh32_intdigest(key + data[_CHECK.size :]):
            return None
        checksum = BlockChecksum(length, value, kind)
        return cls(checksum, slot_class, data[_SEALED_ROW.size :], generation)


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """What all ranks' parts of a block have in common."""

    slot_class: int
    tick: int
    """When it was used last, as a number that grows."""
    world_size: int
    present: int
    """How many ranks' rows are published."""

    @property
    def whole(self) -> bool:
        """Whether all ranks have their part."""
        return self.present == self.world_size

    def pack(self, key: bytes) -> bytes:
        """The record under `key`."""
        return self.packed(key, self.slot_class, self.tick, self.world_size, self.present)

    @staticmethod
    def packed(key: bytes, slot_class: int, tick: int, world_size: int, present: int) -> bytes:
        """What `pack` gives for a record with these fields."""
        content = _BLOCK.pack(slot_class, tick, world_size, present)
        return _CHECK.pack(xxh32_intdigest(key + content)) + content

    @classmethod
    def unpack(cls, key: bytes, data: bytes | None) -> BlockRecord | None:
        """The record; None where it is missing or damaged."""
        if data is None or len(data) != _SEALED_BLOCK.size:
            return None
        check, slot_class, tick, world_size, present = _SEALED_BLOCK.unpack(data)
        if check != xxh32_intdigest(key + data[_CHECK.size :]):
            return None
        return cls(slot_class, tick, world_size, present)


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
