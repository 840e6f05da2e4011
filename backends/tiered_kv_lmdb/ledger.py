"""Which values no row names: those being stored, and those that are to be deleted.

A value is known by a number that is never used twice. It is reserved (by a process that may die),
written, then named by a row; or freed, and deleted from the file by whoever writes to it next. The
ledger lies in the index, so that each step from one state to the next is one transaction there; a
crash between index and values leaves only numbers that are reserved or freed, never a row without
its value.

What is reserved, or freed, together is one record under its least number: numbers of a batch
mostly go together from one state to the next. A record holds runs of numbers that follow each other
and take equal room.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, repeat
from operator import itemgetter
from typing import NamedTuple

from tiered_kv.errors import NoSpace
from tiered_kv.index import Database, Environment, Owner, Transaction

__all__ = ["NUMBER_BYTES", "Ledger", "Reserved", "packed", "unpacked"]

NUMBER_BYTES = 8
_RUN = struct.Struct(">QIQ")


def packed(number: int) -> bytes:
    """A number as the ledger, the rows and the values name it."""
    return number.to_bytes(NUMBER_BYTES, "big")


def unpacked(number: bytes) -> int:
    """The inverse of `packed`."""
    return int.from_bytes(number, "big")


class Run(NamedTuple):
    """Numbers that follow each other."""

    first: int
    size: int
    """How many."""
    room: int
    """Bytes that each of their values takes."""

    def numbers(self) -> Iterator[bytes]:
        """Each of them."""
        return map(packed, range(self.first, self.first + self.size))


class Reserved(NamedTuple):
    """A number that a value is to be stored under."""

    number: bytes
    batch: bytes
    """Least number of those that were reserved together."""


class Ledger:
    """Keeps the numbers. Each call belongs to a transaction of the index."""

    def __init__(self, index: Environment, tier: str) -> None:
        """Open the ledger's databases; not inside a transaction."""
        self._tier = tier
        self._reserved = index.database("reserved")
        self._freed = index.database("freed")
        self._owner = Owner.current().pack()

    def reserve(self, txn: Transaction, first: int, rooms: Sequence[int]) -> list[Reserved]:
        """Note that this process is about to write values that take `rooms` bytes, under numbers
        from `first` on."""
        batch = packed(first)
        txn.put(batch, self._owner + _joined(enumerate(rooms, first)), db=self._reserved)
        return list(map(Reserved, map(packed, range(first, first + len(rooms))), repeat(batch)))

    def check_reserved(self, txn: Transaction, places: Iterable[Reserved]) -> None:
        """Raises `NoSpace` where a number is not reserved any more: another process may have
        taken this one for dead."""
        for batch, numbers in _by_batch(places).items():
            runs = self._batch(txn, batch)[1]
            if not (_are(runs, numbers) or numbers <= _rooms(runs).keys()):
                raise self._not_reserved()

    def _not_reserved(self) -> NoSpace:
        return NoSpace(
            f"tier {self._tier}: room that was reserved is not any more: the place was published, "
            "abandoned, or reclaimed by another process"
        )

    def settle(self, txn: Transaction, places: Collection[Reserved]) -> None:
        """Rows name these values now. Raises as `check_reserved` does."""
        if sum(run.size for run in self._take(txn, places)) < len(places):
            raise self._not_reserved()

    def release(self, txn: Transaction, places: Iterable[Reserved]) -> None:
        """Give reserved numbers up; does nothing where they are not reserved."""
        for run in self._take(txn, places):
            txn.put(packed(run.first), _RUN.pack(*run), db=self._freed)

    def _take(self, txn: Transaction, places: Iterable[Reserved]) -> list[Run]:
        """End reservations; those that there were."""
        taken: list[Run] = []
        for batch, numbers in _by_batch(places).items():
            owner, runs = self._batch(txn, batch)
            if _are(runs, numbers):
                taken += runs
                left = b""
            else:
                rooms = _rooms(runs)
                taken += _runs(
                    _joined((n, room) for n, room in _by_int(rooms) if packed(n) in numbers)
                )
                left = _joined((n, room) for n, room in _by_int(rooms) if packed(n) not in numbers)
            if left:
                txn.put(batch, owner + left, db=self._reserved)
            elif runs:
                txn.delete(batch, db=self._reserved)
        return taken

    def _batch(self, txn: Transaction, batch: bytes) -> tuple[bytes, list[Run]]:
        return _parted(txn.get(batch, b"", db=self._reserved))

    def free(self, txn: Transaction, rooms: Mapping[bytes, int]) -> None:
        """No row names these values any more; by number, the bytes that they take."""
        if rooms:
            txn.put(min(rooms), _joined(_by_int(rooms)), db=self._freed)

    def freed(self, txn: Transaction) -> dict[bytes, list[Run]]:
        """Values that are to be deleted, by record."""
        with txn.cursor(self._freed) as cursor:
            return {record: _runs(data) for record, data in cursor}

    def freed_values(self, txn: Transaction) -> int:
        """How many values are to be deleted."""
        return sum(run.size for runs in self.freed(txn).values() for run in runs)

    def forget(self, txn: Transaction, records: Iterable[bytes]) -> None:
        """All values of these records of freed ones are deleted."""
        for record in records:
            txn.delete(record, db=self._freed)

    def of_the_dead(self, txn: Transaction) -> list[Reserved]:
        """Numbers reserved by processes that don't run any more."""
        found: list[Reserved] = []
        with txn.cursor(self._reserved) as cursor:
            for batch, data in cursor:
                owner, runs = _parted(data)
                if not Owner.unpack(owner).alive():
                    found += [Reserved(number, batch) for number in _rooms(runs)]
        return found

    def reserved_rooms(self, txn: Transaction) -> dict[bytes, int]:
        """Bytes that each reserved value takes or will take, by number."""
        rooms: dict[bytes, int] = {}
        with txn.cursor(self._reserved) as cursor:
            for _, data in cursor:
                rooms |= _rooms(_parted(data)[1])
        return rooms

    def numbers(self, txn: Transaction) -> set[bytes]:
        """All reserved and freed numbers."""
        found = set(self.reserved_rooms(txn))
        for runs in self.freed(txn).values():
            found.update(_rooms(runs))
        return found

    def clear(self, txn: Transaction) -> None:
        """The values are gone, all of them."""
        for database in self._databases():
            txn.drop(database, delete=False)

    def _databases(self) -> tuple[Database, Database]:
        return self._reserved, self._freed


def _joined(rooms: Iterable[tuple[int, int]]) -> bytes:
    """The runs of (number, room) pairs that are sorted by number, as a record has them."""
    runs: list[bytes] = []
    first, count, each = 0, 0, 0
    for number, room in rooms:
        if count and number == first + count and room == each:
            count += 1
            continue
        if count:
            runs.append(_RUN.pack(first, count, each))
        first, count, each = number, 1, room
    if count:
        runs.append(_RUN.pack(first, count, each))
    return b"".join(runs)


def _runs(data: bytes) -> list[Run]:
    return list(map(Run._make, _RUN.iter_unpack(data)))


def _parted(data: bytes) -> tuple[bytes, list[Run]]:
    """Owner and runs of a record; of none where there is no record."""
    size = Owner.PACKED_BYTES
    return data[:size], _runs(data[size:])


def _rooms(runs: Iterable[Run]) -> dict[bytes, int]:
    """Bytes that each value takes, by number."""
    return {number: run.room for run in runs for number in run.numbers()}


def _by_int(rooms: Mapping[bytes, int]) -> Iterable[tuple[int, int]]:
    """(number, room) pairs, sorted by number."""
    return sorted((int.from_bytes(number, "big"), room) for number, room in rooms.items())


def _are(runs: Sequence[Run], numbers: Collection[bytes]) -> bool:
    """Whether these numbers, each once, are all of the runs. A quick no where runs have gaps."""
    if sum(run.size for run in runs) != len(numbers) or not numbers:
        return False
    first, end = runs[0].first, runs[-1].first + runs[-1].size
    within = packed(first) <= min(numbers) and max(numbers) < packed(end)
    return within and end - first == len(numbers)


def _by_batch(places: Iterable[Reserved]) -> dict[bytes, set[bytes]]:
    found: dict[bytes, set[bytes]] = {}
    for batch, together in groupby(places, itemgetter(1)):
        found.setdefault(batch, set()).update(map(itemgetter(0), together))
    return found
