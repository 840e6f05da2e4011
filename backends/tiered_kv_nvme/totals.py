"""Numbers of the whole tier: bytes of all segment files, and the next segment's number."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tiered_kv.index import Database, Transaction
from tiered_kv_nvme.spreading import segment_number, sequence_of

__all__ = ["Totals"]

_U64 = struct.Struct(">Q")
_BYTES_KEY: Final = b"bytes"
_NEXT_KEY: Final = b"next"


@dataclass(frozen=True, slots=True)
class Totals:
    """The records, in one database of the index. Each call belongs to a transaction."""

    database: Database

    def is_new(self, txn: Transaction) -> bool:
        """Whether no store has settled in this index yet: it does not know any segment."""
        return txn.get(_BYTES_KEY, db=self.database) is None

    def segment_bytes(self, txn: Transaction) -> int:
        """Bytes of all segment files, as they were counted."""
        return self._get(txn, _BYTES_KEY)

    def count(self, txn: Transaction, size: int) -> None:
        """Set `segment_bytes`."""
        self._put(txn, _BYTES_KEY, size)

    def add(self, txn: Transaction, size: int) -> None:
        """Add to `segment_bytes`."""
        self.count(txn, max(0, self.segment_bytes(txn) + size))

    def next_number(self, txn: Transaction, place: int) -> int:
        """The number of the next segment in a directory; never given out again."""
        sequence = self._get(txn, _NEXT_KEY)
        self._put(txn, _NEXT_KEY, sequence + 1)
        return segment_number(place, sequence)

    def number_after(self, txn: Transaction, numbers: Iterable[int]) -> None:
        """Segments that are made from now on have none of these numbers."""
        least = max(map(sequence_of, numbers)) + 1
        self._put(txn, _NEXT_KEY, max(least, self._get(txn, _NEXT_KEY)))

    def _get(self, txn: Transaction, name: bytes) -> int:
        data = txn.get(name, db=self.database)
        return 0 if data is None else int(_U64.unpack(data)[0])

    def _put(self, txn: Transaction, name: bytes, value: int) -> None:
        txn.put(name, _U64.pack(value), db=self.database)
