"""A set of keys in 13 to 27 bytes each, looked up in batches at the speed of numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["KeySet"]

_Hashes = npt.NDArray[np.uint64]
_Places = npt.NDArray[np.intp]

_EMPTY = np.uint64(0)
_REMOVED = np.uint64(1)
_LEAST_PLACES = 1_024
_MOST_LOAD = 0.6
_LOAD_AFTER_GROWTH = 0.45


class KeySet:
    """Open addressing over 64-bit hashes (XXH3) of the keys.

    Two keys with one hash are taken for one: of 10 million keys and as many lookups, about one in
    two hundred thousand such sets gives one wrong answer, which costs a recompute.

    One thread changes it; any thread may look up meanwhile without a lock, and sees each key that
    is not being changed right now as it is.
    """

    def __init__(self) -> None:
        self._table: _Hashes = np.zeros(_LEAST_PLACES, np.uint64)
        self._taken = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._table.nbytes

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is in the set."""
        found: list[bool] = (_find(self._table, _hashes(keys)) >= 0).tolist()
        return found

    def add(self, keys: Iterable[bytes]) -> None:
        """Add keys; those that are in it already stay."""
        hashes = np.unique(_hashes(keys))
        hashes = hashes[_find(self._table, hashes) < 0]
        if self._taken + hashes.size > _MOST_LOAD * self._table.size:
            self._rebuild(self._live + hashes.size)
        _insert(self._table, hashes)
        self._taken += hashes.size
        self._live += hashes.size

    def discard(self, keys: Iterable[bytes]) -> None:
        """Remove keys; those that are not in it are ignored."""
        places = _find(self._table, np.unique(_hashes(keys)))
        places = places[places >= 0]
        self._table[places] = _REMOVED
        self._live -= places.size

    def _rebuild(self, count: int) -> None:
        size = _LEAST_PLACES
        while count > _LOAD_AFTER_GROWTH * size:
            size *= 2
        table: _Hashes = np.zeros(size, np.uint64)
        _insert(table, self._table[self._table > _REMOVED])
        self._table = table  # whoever looks up meanwhile goes on in the old one
        self._taken = self._live


def _hashes(keys: Iterable[bytes]) -> _Hashes:
    digest = xxhash.xxh3_64_intdigest
    hashes = np.array([digest(key) for key in keys], np.uint64)
    hashes[hashes <= _REMOVED] += np.uint64(2)
    return hashes


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
