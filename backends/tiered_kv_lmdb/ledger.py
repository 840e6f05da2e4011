"""Which values no row names: those being stored, and those that are to be deleted.

A value is known by a number that is never used twice. It is reserved (by a process that may die),
written, then named by a row; or freed, and deleted from the file by whoever writes to it next. The
ledger lies in the index, so that each step from one state to the next is one transaction there; a
crash between index and values leaves only numbers that are reserved or freed, never a row without
its value.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.errors import NoSpace
from tiered_kv.index import Database, Environment, Owner, Transaction

__all__ = ["Ledger", "packed"]

_NUMBER_BYTES = 8


def packed(number: int) -> bytes:
    """A number as the ledger, the rows and the values name it."""
    return number.to_bytes(_NUMBER_BYTES, "big")


class Ledger:
    """Keeps the numbers. Each call belongs to a transaction of the index."""

    def __init__(self, index: Environment, tier: str) -> None:
        """Open the ledger's databases; not inside a transaction."""
        self._tier = tier
        self._reserved = index.database("reserved")
        self._freed = index.database("freed")
        self._owner = Owner.current().pack()

    def reserve(self, txn: Transaction, number: bytes, room: int) -> None:
        """Note that this process is about to write a value that takes `room` bytes."""
        txn.put(number, packed(room) + self._owner, db=self._reserved)

    def check_reserved(self, txn: Transaction, numbers: Iterable[bytes]) -> None:
        """Raises `NoSpace` where a number is not reserved any more: another process may have
        taken this one for dead."""
        for number in numbers:
            if txn.get(number, db=self._reserved) is None:
                raise NoSpace(
                    f"tier {self._tier}: room that was reserved is not any more: the place was "
                    "published, abandoned, or reclaimed by another process"
                )

    def settle(self, txn: Transaction, number: bytes) -> None:
        """A row names the value now."""
        txn.delete(number, db=self._reserved)

    def release(self, txn: Transaction, number: bytes) -> None:
        """Give a reserved number up; does nothing where it is not reserved."""
        data = txn.pop(number, db=self._reserved)
        if data is not None:
            txn.put(number, data[:_NUMBER_BYTES], db=self._freed)

    def free(self, txn: Transaction, number: bytes, room: int) -> None:
        """No row names the value any more, which takes `room` bytes."""
        txn.put(number, packed(room), db=self._freed)

    def freed(self, txn: Transaction) -> list[bytes]:
        """Numbers whose values are to be deleted."""
        with txn.cursor(self._freed) as cursor:
            return list(cursor.iternext(values=False))

    def forget(self, txn: Transaction, numbers: Iterable[bytes]) -> None:
        """The values of these freed numbers are deleted."""
        for number in numbers:
            txn.delete(number, db=self._freed)

    def of_the_dead(self, txn: Transaction) -> list[bytes]:
        """Numbers reserved by processes that don't run any more."""
        with txn.cursor(self._reserved) as cursor:
            return [
                number for number, data in cursor if not Owner.unpack(data[_NUMBER_BYTES:]).alive()
            ]

    def numbers(self, txn: Transaction) -> set[bytes]:
        """All reserved and freed numbers."""
        with txn.cursor(self._reserved) as cursor:
            reserved = set(cursor.iternext(values=False))
        return reserved.union(self.freed(txn))

    def count(self, txn: Transaction) -> int:
        """How many numbers are reserved or freed."""
        return sum(txn.stat(one)["entries"] for one in (self._reserved, self._freed))

    def clear(self, txn: Transaction) -> None:
        """The values are gone, all of them."""
        for database in (self._reserved, self._freed):
            txn.drop(database, delete=False)

    def reserved_rooms(self, txn: Transaction) -> dict[bytes, int]:
        """Bytes that each reserved value takes or will take."""
        return self._rooms(txn, self._reserved)

    def freed_rooms(self, txn: Transaction) -> dict[bytes, int]:
        """Bytes that each freed value takes, unless it is deleted already."""
        return self._rooms(txn, self._freed)

    def _rooms(self, txn: Transaction, database: Database) -> dict[bytes, int]:
        with txn.cursor(database) as cursor:
            return {number: int.from_bytes(data[:_NUMBER_BYTES], "big") for number, data in cursor}
