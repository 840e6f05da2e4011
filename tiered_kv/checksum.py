"""The checksum that is bound to a block when it is captured from the engine.

It covers key, length and rank as well as the bytes, so that a right block under a wrong key is
found too. With `bound` = XXH3-64 (https://github.com/Cyan4973/xxHash) of
`key || length (8 bytes, big endian) || rank (4 bytes, big endian)`:

* `xxh3` is XXH3-64 of the bytes, seeded with `bound`;
* `wsum` is `bound` plus the sum of `weight[i] * word[i]`, modulo 2^64, over the bytes read as
  little-endian 64-bit words, the last one filled up with zeros. `weight[i]` is the i-th output of
  SplitMix64 (Steele, Lea, Flood 2014) from seed 0, made odd: every change of a single word changes
  the sum. Two errors cancel where both are in the topmost bit of a word, since an odd weight moves
  that bit to itself; `xxh3` has no such pair.
"""

from __future__ import annotations

import struct
import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tiered_kv.values import BlockKey, ChecksumKind

__all__ = ["BlockChecksum", "word_weights"]

WORD_BYTES = 8

_LENGTH_AND_RANK = struct.Struct(">QI")

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = 2**64 - 1


class BlockChecksum(NamedTuple):
    """What a block must look like: its length in bytes and its checksum (64 bits)."""

    length: int
    value: int
    kind: ChecksumKind = ChecksumKind.XXH3

    @classmethod
    def capture(
        cls,
        key: BlockKey,
        rank: int,
        data: memoryview,
        kind: ChecksumKind = ChecksumKind.XXH3,
    ) -> BlockChecksum:
        """Compute the checksum of `data` (contiguous bytes). Releases the GIL."""
        return cls(data.nbytes, _COMPUTE[kind](key, rank, data), kind)

    @classmethod
    def of_sum(cls, key: BlockKey, rank: int, length: int, total: int) -> BlockChecksum:
        """The `wsum` checksum of a block whose weighted sum was computed elsewhere, for example on
        the engine's device; `total` is that sum, modulo 2^64 or as a signed 64-bit number."""
        value = (_bound(key, length, rank) + total) & _MASK
        return cls(length, value, ChecksumKind.WSUM)

    def verifies(self, key: BlockKey, rank: int, data: memoryview) -> bool:
        """Whether `data` is what was captured under `key` on `rank`. Releases the GIL."""
        return data.nbytes == self.length and _COMPUTE[self.kind](key, rank, data) == self.value


def word_weights(words: int) -> npt.NDArray[np.uint64]:
    """The weights of the first `words` words: odd 64-bit numbers, read-only. Thread-safe; they are
    made once."""
    return _weights.first(words)


class _Weights:
    """Weights as far as they were needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: npt.NDArray[np.uint64] = np.empty(0, np.uint64)

    def first(self, words: int) -> npt.NDArray[np.uint64]:
        if self._made.size < words:
            with self._lock:
                if self._made.size < words:
                    made = _split_mix(max(words, 2 * self._made.size)) | np.uint64(1)
                    made.flags.writeable = False
                    self._made = made
        return self._made[:words]


_weights = _Weights()


def _split_mix(count: int) -> npt.NDArray[np.uint64]:
    state = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    mixed: npt.NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed


def _bound(key: BlockKey, length: int, rank: int) -> int:
    return xxhash.xxh3_64_intdigest(key + _LENGTH_AND_RANK.pack(length, rank))


def _xxh3(key: BlockKey, rank: int, data: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data, seed=_bound(key, data.nbytes, rank))


def _wsum(key: BlockKey, rank: int, data: memoryview) -> int:
    octets = np.frombuffer(data, np.uint8)
    whole = octets.size - octets.size % WORD_BYTES
    words = octets[:whole].view("<u8")
    weights = word_weights(-(-octets.size // WORD_BYTES))
    total = int(np.dot(words, weights[: words.size]))
    if whole < octets.size:
        last = int.from_bytes(octets[whole:].tobytes(), "little")
        total += last * int(weights[words.size])
    return (_bound(key, data.nbytes, rank) + total) & _MASK


_COMPUTE = {ChecksumKind.XXH3: _xxh3, ChecksumKind.WSUM: _wsum}
