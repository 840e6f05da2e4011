"""How rows and block records look on the disk: packed, each with a check value of its own.

LMDB has no checksums and its structural check does not look at values, so a record that was
damaged on the disk is told by the 32 bits in front of it (XXH32 over its key and content).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from tiered_kv.checksum import BlockChecksum
from tiered_kv.values import ChecksumKind

__all__ = ["MAX_LOCATION_BYTES", "BlockRecord", "ClassRecord", "Row"]

MAX_LOCATION_BYTES = 32

_CHECK = struct.Struct(">I")
_ROW = struct.Struct(">BQQIQ")
_BLOCK = struct.Struct(">IQHH")
_CLASS = struct.Struct(">8sIQQ")
_KIND_CODES = {ChecksumKind.XXH3: 1, ChecksumKind.WSUM: 2}
_KINDS = {code: kind for kind, code in _KIND_CODES.items()}


def _sealed(key: bytes, content: bytes) -> bytes:
    return _CHECK.pack(xxhash.xxh32_intdigest(key + content)) + content


def _opened(key: bytes, data: bytes) -> bytes | None:
    content = data[_CHECK.size :]
    if data[: _CHECK.size] != _CHECK.pack(xxhash.xxh32_intdigest(key + content)):
        return None
    return content


@dataclass(frozen=True, slots=True)
class Row:
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
        checksum = self.checksum
        head = _ROW.pack(
            _KIND_CODES[checksum.kind],
            checksum.length,
            checksum.value,
            self.slot_class,
            self.generation,
        )
        return _sealed(key, head + self.location)

    @classmethod
    def unpack(cls, key: bytes, data: bytes) -> Row | None:
        """The row; None where the record is damaged."""
        content = _opened(key, data)
        if content is None or not 0 <= len(content) - _ROW.size <= MAX_LOCATION_BYTES:
            return None
        code, length, value, slot_class, generation = _ROW.unpack_from(content)
        kind = _KINDS.get(code)
        if kind is None:
            return None
        checksum = BlockChecksum(length, value, kind)
        return cls(checksum, slot_class, content[_ROW.size :], generation)


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
        content = _BLOCK.pack(self.slot_class, self.tick, self.world_size, self.present)
        return _sealed(key, content)

    @classmethod
    def unpack(cls, key: bytes, data: bytes | None) -> BlockRecord | None:
        """The record; None where it is missing or damaged."""
        content = None if data is None else _opened(key, data)
        if content is None or len(content) != _BLOCK.size:
            return None
        return cls(*_BLOCK.unpack(content))


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
