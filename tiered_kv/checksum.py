"""The checksum that is bound to a block when it is captured from the engine.

It covers key, length and rank as well as the bytes, so that a right block under a wrong key is
found too. `xxh3` is XXH3-64 (https://github.com/Cyan4973/xxHash) seeded with the XXH3-64 of
`key || length (8 bytes, big endian) || rank (4 bytes, big endian)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from tiered_kv.values import BlockKey, ChecksumKind

__all__ = ["BlockChecksum"]


@dataclass(frozen=True, slots=True)
class BlockChecksum:
    """What a block must look like: its length in bytes and its checksum (64 bits)."""

    length: int
    value: int
    kind: ChecksumKind = ChecksumKind.XXH3

    @classmethod
    def capture(cls, key: BlockKey, rank: int, data: memoryview) -> BlockChecksum:
        """Compute the checksum of `data` (contiguous bytes). Releases the GIL."""
        return cls(data.nbytes, _xxh3(key, rank, data))

    def verifies(self, key: BlockKey, rank: int, data: memoryview) -> bool:
        """Whether `data` is what was captured under `key` on `rank`. Releases the GIL."""
        return data.nbytes == self.length and _xxh3(key, rank, data) == self.value


def _xxh3(key: BlockKey, rank: int, data: memoryview) -> int:
    bound = key + data.nbytes.to_bytes(8, "big") + rank.to_bytes(4, "big")
    return xxhash.xxh3_64_intdigest(data, seed=xxhash.xxh3_64_intdigest(bound))
