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
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tiered_kv.errors import NoSpace
from tiered_kv.index import Database, Environment, Owner, Transaction

__all__ = ["NUMBER_BYTES", "Ledger", "packed", "unpacked"]

NUMBER_BYTES = 8
_NUMBER = struct.Struct(">Q")
_RUN = struct.Struct(">QIQ")
_MOST_TOGETHER = 2**20
"""Numbers in a run. One that says more is damaged: whoever went through it would not come back."""
_NUMBERS = 1 << (8 * NUMBER_BYTES)

packed = _NUMBER.pack
"""A number as the ledger, the rows and the values name it."""


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

    @property
    def end(self) -> int:
        """The number behind the last one."""
        return self.first + self.size

    def all(self) -> range:
        """Each of them."""
        return range(self.first, self.first + self.size)

    def numbers(self) -> Iterator[bytes]:
        """Each of them, packed."""
        return map(packed, self.all())


class Ledger:
    """Keeps the numbers. Each call belongs to a transaction of the index."""

    def __init__(self, index: Environment, tier: str) -> None:
        """Open the ledger's databases; not inside a transaction."""
        self._tier = tier
        self._reserved = index.database("reserved")
        self._freed = index.database("freed")
        self._owner = Owner.current().pack()

    def reserve(self, txn: Transaction, first: int, rooms: Sequence[int]) -> range:
        """Note that this process is about to write values that take `rooms` bytes, under numbers
        from `first` on: these."""
        txn.put(packed(first), self._owner + _joined(enumerate(rooms, first)), db=self._reserved)
        return range(first, first + len(rooms))

    def check_reserved(self, txn: Transaction, numbers: Sequence[int]) -> None:
        """Raises `NoSpace` where a number is not reserved any more: another process may have
        taken this one for dead."""
        for _, runs, together in self._by_record(txn, numbers).values():
            if not (_are(runs, together) or _rooms(runs).keys() >= set(together)):
                raise self._not_reserved()

    def _not_reserved(self) -> NoSpace:
        return NoSpace(
            f"tier {self._tier}: room that was reserved is not any more: the place was published, "
            "abandoned, or reclaimed by another process"
        )

    def settle(self, txn: Transaction, numbers: Sequence[int]) -> None:
        """Rows name these values now. Raises as `check_reserved` does."""
        if sum(run.size for run in self._take(txn, numbers)) < len(numbers):
            raise self._not_reserved()

    def release(self, txn: Transaction, numbers: Iterable[int]) -> None:
        """Give reserved numbers up; does nothing where they are not reserved."""
        for run in self._take(txn, numbers):
            txn.put(packed(run.first), _RUN.pack(*run), db=self._freed)

    def _take(self, txn: Transaction, numbers: Iterable[int]) -> list[Run]:
        """End reservations; those that there were."""
        taken: list[Run] = []
        for record, (owner, runs, together) in self._by_record(txn, numbers).items():
            if _are(runs, together):
                taken += runs
                left = b""
            else:
                which = set(together)
                rooms = _rooms(runs).items()
                taken += _runs(_joined(one for one in rooms if one[0] in which))
                left = _joined(one for one in rooms if one[0] not in which)
            if left:
                txn.put(record, owner + left, db=self._reserved)
            elif runs:
                txn.delete(record, db=self._reserved)
        return taken

    def _by_record(
        self, txn: Transaction, numbers: Iterable[int]
    ) -> dict[bytes, tuple[bytes, list[Run], list[int]]]:
        """Records of reserved numbers: their owner and runs, and those of the given numbers that
        may be among them. What was reserved together lies under its least number, so the record of
        a number is the last one that is not above it."""
        found: dict[bytes, tuple[bytes, list[Run], list[int]]] = {}
        left = sorted(numbers)
        with txn.cursor(self._reserved) as cursor:
            while left:
                name = packed(left[0])
                there = cursor.set_range(name)
                if not (there and cursor.key() == name):
                    there = cursor.prev() if there else cursor.last()
                name, data = cursor.item()
                behind = cursor.next() if there else cursor.first()
                count = bisect_left(left, unpacked(cursor.key())) if behind else len(left)
                if there:
                    found[name] = (*_parted(data), left[:count])
                else:
                    found[b""] = (b"", [], left[:count])
                left = left[count:]
        return found

    def free(self, txn: Transaction, rooms: Mapping[bytes, int]) -> None:
        """No row names these values any more; by number, the bytes that they take."""
        if rooms:
            by_int = sorted((unpacked(number), room) for number, room in rooms.items())
            txn.put(min(rooms), _joined(by_int), db=self._freed)

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

    def of_the_dead(self, txn: Transaction) -> list[int]:
        """Numbers reserved by processes that don't run any more."""
        with txn.cursor(self._reserved) as cursor:
            records = [_parted(data) for _, data in cursor]
        return [
            number
            for owner, runs in records
            if len(owner) < Owner.PACKED_BYTES or not Owner.unpack(owner).alive()
            for run in runs
            for number in run.all()
        ]

    def reserved(self, txn: Transaction) -> list[Run]:
        """All reserved numbers."""
        with txn.cursor(self._reserved) as cursor:
            return [run for _, data in cursor for run in _parted(data)[1]]

    def numbers(self, txn: Transaction) -> set[bytes]:
        """All reserved and freed numbers, packed."""
        freed = [run for runs in self.freed(txn).values() for run in runs]
        return {number for run in self.reserved(txn) + freed for number in run.numbers()}

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
        if 0 < count < _MOST_TOGETHER and number == first + count and room == each:
            count += 1
            continue
        if count:
            runs.append(_RUN.pack(first, count, each))
        first, count, each = number, 1, room
    if count:
        runs.append(_RUN.pack(first, count, each))
    return b"".join(runs)


def _runs(data: bytes) -> list[Run]:
    """The runs of a record, but for those that can't have been written. Their values, if there are
    any, are values that nothing names, for `verify --repair` to delete."""
    if len(data) % _RUN.size:
        return []
    runs = map(Run._make, _RUN.iter_unpack(data))
    return [run for run in runs if 0 < run.size <= _MOST_TOGETHER and run.end <= _NUMBERS]


def _parted(data: bytes) -> tuple[bytes, list[Run]]:
    """Owner and runs of a record; of none where there is no record."""
    size = Owner.PACKED_BYTES
    return data[:size], _runs(data[size:])


def _rooms(runs: Iterable[Run]) -> dict[int, int]:
    """Bytes that each value takes, by number."""
    return {number: run.room for run in runs for number in run.all()}


def _are(runs: Sequence[Run], numbers: Sequence[int]) -> bool:
    """Whether these numbers, which are sorted, are all of the runs, each once. A quick no where
    runs have gaps."""
    if (
        not runs
        or sum(run.size for run in runs) != len(numbers)
        or len(set(numbers)) < len(numbers)
    ):
        return False
    first, end = runs[0].first, runs[-1].end
    return first == numbers[0] and numbers[-1] == end - 1 and end - first == len(numbers)
