"""Whether the rows of an index and its block records agree, for those that look after a tier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tiered_kv.index.blocks import BlockIndex, FullKey
from tiered_kv.index.environment import Database, Environment, Transaction
from tiered_kv.index.records import BlockRecord, Row

__all__ = ["IndexAudit", "Parts"]

_RANK_BYTES = 2
_BATCH = 1_024


@dataclass(frozen=True, slots=True)
class Parts:
    """What an index has of one block."""

    record: BlockRecord | None
    """None where there is none, or it is damaged."""
    rows: dict[int, Row | None]
    """By rank; None where the row is damaged."""

    @property
    def is_nothing(self) -> bool:
        """Whether the block is not there at all."""
        return self.record is None and not self.rows

    @property
    def agree(self) -> bool:
        """Whether the record counts the rows that there are, all of them sound."""
        record = self.record
        return (
            record is not None
            and record.present == len(self.rows) > 0
            and all(row is not None and rank < record.world_size for rank, row in self.rows.items())
        )


class IndexAudit:
    """Looks at the blocks of all namespaces. Thread-safe, as far as transactions are."""

    def __init__(self, environment: Environment, index: BlockIndex) -> None:
        """Not inside a transaction."""
        self._environment = environment
        self._index = index
        self._rows = environment.database("rows")
        self._blocks = environment.database("blocks")

    def batches(self, namespace_id: bytes = b"") -> Iterator[list[FullKey]]:
        """All blocks, of one namespace or of all, that have a record or a row; in batches. Holds no
        transaction while suspended; what is added meanwhile may be left out."""
        for names in self._names(self._blocks, namespace_id):
            yield [FullKey(name) for name in names]
        for names in self._names(self._rows, namespace_id):
            keys = dict.fromkeys(FullKey(name[:-_RANK_BYTES]) for name in names)
            with self._environment.read() as txn:
                orphans = [key for key in keys if txn.get(key, db=self._blocks) is None]
            yield orphans

    def _names(self, database: Database, prefix: bytes) -> Iterator[list[bytes]]:
        start = prefix
        while True:
            names: list[bytes] = []
            with self._environment.read() as txn, txn.cursor(database) as cursor:
                more = cursor.set_range(start) if start else cursor.first()
                while more and len(names) < _BATCH and cursor.key().startswith(prefix):
                    names.append(cursor.key())
                    more = cursor.next()
            if not names:
                return
            yield names
            start = names[-1] + b"\0"

    def parts(self, txn: Transaction, key: FullKey) -> Parts:
        """What there is of one block."""
        rows: dict[int, Row | None] = {}
        for name, data in self._rows_of(txn, key):
            rows[int.from_bytes(name[-_RANK_BYTES:], "big")] = Row.unpack(name, data)
        return Parts(BlockRecord.unpack(key, txn.get(key, db=self._blocks)), rows)

    def _rows_of(self, txn: Transaction, key: FullKey) -> Iterator[tuple[bytes, bytes]]:
        with txn.cursor(self._rows) as cursor:
            more = cursor.set_range(key)
            while more and cursor.key().startswith(key):
                # Another key may begin with this one.
                if len(cursor.key()) == len(key) + _RANK_BYTES:
                    yield cursor.key(), cursor.value()
                more = cursor.next()

    def erase(self, txn: Transaction, key: FullKey) -> list[Row]:
        """Remove all there is of a block, however damaged; its sound rows (write transaction)."""
        rows = self._index.remove(txn, [key])
        for name, data in list(self._rows_of(txn, key)):
            row = Row.unpack(name, data)
            if row is not None:
                rows.append(row)
            txn.delete(name, db=self._rows)
        return rows
