"""Which values no row names: those being stored, and those that are to be deleted.

A value is known by a number that is never used twice. It is reserved (by a process that may die),
written, then named by a row; or freed, and deleted from the file by whoever writes to it next. The
ledger lies in the index, so that each step from one state to the next is one transaction there; a
crash between index and values leaves only numbers that are reserved or freed, never a row without
its value.

What is reserved, or freed, together is one record under its least number: numbers of a batch
mostly go together from one state to the next.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tiered_kv.errors import NoSpace
from tiered_kv.index import Database, Environment, Owner, Transaction

__all__ = ["Ledger", "Reserved", "packed"]

_NUMBER_BYTES = 8
_ENTRY = struct.Struct(">8sQ")


def packed(number: int) -> bytes:
    """A number as the ledger, the rows and the values name it."""
    return number.to_bytes(_NUMBER_BYTES, "big")


@dataclass(frozen=True, slots=True)
class Reserved:
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

    def reserve(self, txn: Transaction, first: int, rooms: Iterable[int]) -> list[Reserved]:
        """Note that this process is about to write values that take `rooms` bytes, under numbers
        from `first` on."""
        batch = packed(first)
        entries = {packed(first + place): room for place, room in enumerate(rooms)}
        txn.put(batch, self._owner + _joined(entries), db=self._reserved)
        return [Reserved(number, batch) for number in entries]

    def check_reserved(self, txn: Transaction, places: Iterable[Reserved]) -> None:
        """Raises `NoSpace` where a number is not reserved any more: another process may have
        taken this one for dead."""
        for batch, numbers in _by_batch(places).items():
            if not numbers <= self._batch(txn, batch)[1].keys():
                raise NoSpace(
                    f"tier {self._tier}: room that was reserved is not any more: the place was "
                    "published, abandoned, or reclaimed by another process"
                )

    def settle(self, txn: Transaction, places: Iterable[Reserved]) -> None:
        """Rows name these values now."""
        self._take(txn, places)

    def release(self, txn: Transaction, places: Iterable[Reserved]) -> None:
        """Give reserved numbers up; does nothing where they are not reserved."""
        self.free(txn, self._take(txn, places))

    def _take(self, txn: Transaction, places: Iterable[Reserved]) -> dict[bytes, int]:
        """End reservations; by number, the bytes of those that there were."""
        taken: dict[bytes, int] = {}
        for batch, numbers in _by_batch(places).items():
            owner, entries = self._batch(txn, batch)
            taken |= {number: room for number, room in entries.items() if number in numbers}
            left = {number: room for number, room in entries.items() if number not in numbers}
            if left:
                txn.put(batch, owner + _joined(left), db=self._reserved)
            elif entries:
                txn.delete(batch, db=self._reserved)
        return taken

    def _batch(self, txn: Transaction, batch: bytes) -> tuple[bytes, dict[bytes, int]]:
        return _parted(txn.get(batch, b"", db=self._reserved))

    def free(self, txn: Transaction, rooms: Mapping[bytes, int]) -> None:
        """No row names these values any more; by number, the bytes that they take."""
        if rooms:
            txn.put(min(rooms), _joined(rooms), db=self._freed)

    def freed(self, txn: Transaction) -> dict[bytes, dict[bytes, int]]:
        """Values that are to be deleted and the bytes they take, by record."""
        with txn.cursor(self._freed) as cursor:
            return {record: dict(_ENTRY.iter_unpack(data)) for record, data in cursor}

    def forget(self, txn: Transaction, records: Iterable[bytes]) -> None:
        """All values of these records of freed ones are deleted."""
        for record in records:
            txn.delete(record, db=self._freed)

    def of_the_dead(self, txn: Transaction) -> list[Reserved]:
        """Numbers reserved by processes that don't run any more."""
        found: list[Reserved] = []
        with txn.cursor(self._reserved) as cursor:
            for batch, data in cursor:
                owner, entries = _parted(data)
                if not Owner.unpack(owner).alive():
                    found += [Reserved(number, batch) for number in entries]
        return found

    def reserved_rooms(self, txn: Transaction) -> dict[bytes, int]:
        """Bytes that each reserved value takes or will take, by number."""
        rooms: dict[bytes, int] = {}
        with txn.cursor(self._reserved) as cursor:
            for _, data in cursor:
                rooms |= _parted(data)[1]
        return rooms

    def numbers(self, txn: Transaction) -> set[bytes]:
        """All reserved and freed numbers."""
        found = set(self.reserved_rooms(txn))
        return found.union(*self.freed(txn).values())

    def clear(self, txn: Transaction) -> None:
        """The values are gone, all of them."""
        for database in self._databases():
            txn.drop(database, delete=False)

    def _databases(self) -> tuple[Database, Database]:
        return self._reserved, self._freed


def _joined(entries: Mapping[bytes, int]) -> bytes:
    return b"".join(_ENTRY.pack(number, room) for number, room in entries.items())


def _parted(data: bytes) -> tuple[bytes, dict[bytes, int]]:
    """Owner and entries of a record; of none where there is no record."""
    size = Owner.PACKED_BYTES
    return data[:size], dict(_ENTRY.iter_unpack(data[size:]))


def _by_batch(places: Iterable[Reserved]) -> dict[bytes, set[bytes]]:
    found: dict[bytes, set[bytes]] = {}
    for place in places:
        found.setdefault(place.batch, set()).add(place.number)
    return found
