"""A set of keys in 13 to 36 bytes each, changed and looked up in batches by numpy.

numpy gives the GIL away in every step over 500 numbers or more (and in some whatever their number,
such as `take`), and beside a busy thread each time costs up to 5 ms until it has it back. So
`contains`, which the scheduler calls, looks up so few keys at a time that nothing in it lets go of
the GIL.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["KeySet"]

_Hashes = npt.NDArray[np.uint64]
_Places = npt.NDArray[np.intp]

_AS_DIGESTED = np.dtype(">u8")
_EMPTY = 0
_REMOVED = 1
_LEAST_HASH = 2
"""Stands in the table for lesser ones, which are the marks above."""
_LEAST_PLACES = 1_024
_MOST_LOAD = 0.6
_LOAD_AFTER_GROWTH = 0.45
_AT_A_TIME = 256
"""Keys that are looked up together: half of what numpy gives the GIL away for."""
_TOGETHER = 2
_FEW = 96
"""Fewer are looked up sooner one by one."""


class KeySet:
    """Open addressing over 64-bit hashes (XXH3 with `seed`) of the keys.

    Two keys with one hash are taken for one: both count as added with the first of them, and as
    removed with the first of them. Among a million keys there is such a pair in one of 37 million
    sets (n * n / 2 / 2**64), and a seed of its own keeps each process from the pairs of another.

    One thread changes it; any thread may look up meanwhile without a lock, and sees each key that
    is not being changed right now as it is.
    """

    def __init__(self, seed: int | None = None) -> None:
        """`seed` has 64 bits; a random one by default. Sets that meet share it."""
        self.seed = secrets.randbits(64) if seed is None else seed
        self._taken = 0
        self._live = 0
        self._table: _Hashes = np.zeros(_LEAST_PLACES, np.uint64)

    def __len__(self) -> int:
        return self._live

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._table.nbytes

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is in the set."""
        table = self._table
        if len(keys) < _FEW:
            digest, seed, mask = xxhash.xxh3_64_intdigest, self.seed, table.size - 1
            given = [max(digest(key, seed), _LEAST_HASH) for key in keys]
            return _walk(table, given, [one & mask for one in given])
        found: list[bool] = []
        for first in range(0, len(keys), _AT_A_TIME):
            some = keys[first : first + _AT_A_TIME]
            found += _hold(table, self._hashes(some)).tolist()
        return found

    def add(self, keys: Iterable[bytes]) -> None:
        """Add keys; those that are in it already stay."""
        hashes = np.unique(self._hashes(keys))
        hashes = hashes[_find(self._table, hashes) < 0]
        if self._taken + hashes.size > _MOST_LOAD * self._table.size:
            self._rebuild(self._live + hashes.size)
        _insert(self._table, hashes)
        self._taken += hashes.size
        self._live += hashes.size

    def discard(self, keys: Iterable[bytes]) -> None:
        """Remove keys; those that are not in it are ignored."""
        self._discard(np.unique(self._hashes(keys)))

    def difference_update(self, other: KeySet) -> None:
        """Remove all keys of a set of the same seed."""
        self._discard(other._all())

    def _all(self) -> _Hashes:
        return self._table[self._table > _REMOVED]

    def _discard(self, hashes: _Hashes) -> None:
        places = _find(self._table, hashes)
        places = places[places >= 0]
        self._table[places] = _REMOVED
        self._live -= places.size

    def _rebuild(self, count: int) -> None:
        size = _LEAST_PLACES
        while count > _LOAD_AFTER_GROWTH * size:
            size *= 2
        table: _Hashes = np.zeros(size, np.uint64)
        _insert(table, self._all())
        self._table = table  # whoever looks up meanwhile goes on in the old one
        self._taken = self._live

    def _hashes(self, keys: Iterable[bytes]) -> _Hashes:
        digest, seed = xxhash.xxh3_64_digest, self.seed
        hashes = np.frombuffer(b"".join([digest(key, seed) for key in keys]), _AS_DIGESTED)
        return np.maximum(hashes, np.uint64(_LEAST_HASH))


def _hold(table: _Hashes, hashes: _Hashes) -> npt.NDArray[np.bool_]:
    """Whether the table holds each of some hashes. Nearly all end in the first places, looked at
    together; the rest is looked for one by one."""
    # As signed numbers: they are places without being converted.
    cells, wanted = table.view(np.int64), hashes.view(np.int64)
    mask = table.size - 1
    places = wanted & mask
    here = cells[places]
    found: npt.NDArray[np.bool_] = here == wanted
    (on,) = ((here != wanted) & (here != _EMPTY)).nonzero()
    left = on
    for _ in range(_TOGETHER):
        if not on.size:
            return found
        wanted, places = wanted[on], (places[on] + 1) & mask
        here = cells[places]
        found[left] = here == wanted
        (on,) = ((here != wanted) & (here != _EMPTY)).nonzero()
        left = left[on]
    if on.size:
        found[left] = _walk(table, hashes[left].tolist(), ((places[on] + 1) & mask).tolist())
    return found


def _walk(table: _Hashes, hashes: Sequence[int], places: Sequence[int]) -> list[bool]:
    """The same, one by one, for hashes that can be in these places at the earliest."""
    cells, mask = table.data, table.size - 1
    found: list[bool] = []
    for wanted, first in zip(hashes, places, strict=True):
        place = first
        here = cells[place]
        while here not in (wanted, _EMPTY):
            place = (place + 1) & mask
            here = cells[place]
        found.append(here == wanted)
    return found


def _find(table: _Hashes, hashes: _Hashes) -> _Places:
    """Where each hash lies; -1 where it does not."""
    mask = table.size - 1
    found: _Places = np.full(hashes.size, -1, np.intp)
    left: _Places = np.arange(hashes.size)
    places: _Places = (hashes & np.uint64(mask)).astype(np.intp)
    while left.size:
        here = table[places]
        hit = here == hashes[left]
        found[left[hit]] = places[hit]
        on = ~hit & (here != _EMPTY)
        left, places = left[on], (places[on] + 1) & mask
    return found


def _insert(table: _Hashes, hashes: _Hashes) -> None:
    """Put distinct hashes that are not in the table; it has room for them."""
    mask = table.size - 1
    places: _Places = (hashes & np.uint64(mask)).astype(np.intp)
    while hashes.size:
        free = table[places] == _EMPTY
        # Of several for one place the last one stays; the others find out and go on.
        table[places[free]] = hashes[free]
        on = table[places] != hashes
        hashes, places = hashes[on], (places[on] + 1) & mask
