"""Slots that wait for publication: one record per owner and segment.

Key: owner's nonce (8 bytes), segment (4). Value: (slot, generation) of each slot.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Final

from tiered_kv.index import Database, Transaction

__all__ = ["NONCE_BYTES", "Reservations", "reservation_key", "unpack_slots"]

NONCE_BYTES: Final = 8

_NUMBER = struct.Struct(">I")
_SLOT = struct.Struct(">IQ")


def reservation_key(nonce: bytes, number: int) -> bytes:
    """Key of an owner's reservations in a segment."""
    return nonce + _NUMBER.pack(number)


def unpack_slots(data: bytes | None) -> dict[int, int]:
    """Slot -> generation; none where there is no record."""
    return dict(_SLOT.iter_unpack(data)) if data else {}


def _pack_slots(slots: Mapping[int, int]) -> bytes:
    return b"".join([_SLOT.pack(slot, generation) for slot, generation in slots.items()])


class Reservations:
    """What one transaction reads and changes of them; written by `save`."""

    def __init__(self, txn: Transaction, database: Database) -> None:
        self._txn = txn
        self._database = database
        self._loaded: dict[bytes, dict[int, int]] = {}

    def slots(self, key: bytes) -> dict[int, int]:
        """Slot -> generation of one record, to be read or changed."""
        if key not in self._loaded:
            self._loaded[key] = unpack_slots(self._txn.get(key, db=self._database))
        return self._loaded[key]

    def in_segments(self, nonce: bytes, numbers: Iterable[int]) -> dict[int, dict[int, int]]:
        """The same of an owner, by segment."""
        return {number: self.slots(reservation_key(nonce, number)) for number in numbers}

    def save(self) -> None:
        """Write what was changed."""
        for key, slots in self._loaded.items():
            if slots:
                self._txn.put(key, _pack_slots(slots), db=self._database)
            else:
                self._txn.delete(key, db=self._database)
        self._loaded.clear()

    def records(self, *, nonce: bytes = b"", number: int | None = None) -> list[tuple[bytes, int]]:
        """(key, segment) of an owner's records, or of those of a segment."""
        self.save()
        found: list[tuple[bytes, int]] = []
        cursor = self._txn.cursor(db=self._database)
        if cursor.set_range(nonce) if nonce else cursor.first():
            for key in cursor.iternext(keys=True, values=False):
                if not key.startswith(nonce):
                    break
                (segment,) = _NUMBER.unpack(key[NONCE_BYTES:])
                if number is None or segment == number:
                    found.append((key, segment))
        return found
