"""In which order blocks go: by slot class, by tick, and as they were placed where ticks are equal.

A tick is a time in nanoseconds; with `KEPT` added to it, until when a block is kept: such blocks
come behind all others of their class.

One record of `order` holds the keys of blocks that were placed together with the same tick, as many
as fit into a page. Its number, which grows, orders the records of one tick. A block's own
record says in which one its key lies; a key whose block says otherwise is astray, and dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby

from tiered_kv.index.environment import Environment, Transaction
from tiered_kv.index.log import Counters
from tiered_kv.index.records import BlockRecord, FullKey

__all__ = ["KEPT", "Order", "name_of", "tick_of"]

KEPT = 1 << 63

_NAME = struct.Struct(">IQQ")
_LENGTH = struct.Struct(">H")
_CLASS_BYTES, _TICK_BYTES = 4, 8
_LAST_CLASS = 2 ** (8 * _CLASS_BYTES) - 1
_GROUP_BYTES = 4_000
"""Of the keys in one record: it fills a page of its own. Of smaller ones that come in order, LMDB
leaves pages half empty."""


def name_of(record: BlockRecord) -> bytes:
    """The record of `order` that has the block's key."""
    return _NAME.pack(record.slot_class, record.tick, record.group)


def tick_of(name: bytes) -> int:
    """The tick of the blocks in a record of `order`; something, where its name is damaged."""
    return int.from_bytes(name[_CLASS_BYTES : _CLASS_BYTES + _TICK_BYTES], "big")


class Order:
    """The order of all blocks. Each call but `portion` belongs to a write transaction."""

    def __init__(self, environment: Environment, counters: Counters) -> None:
        """Not inside a transaction."""
        self._records = environment.database("order")
        self._counters = counters

    def place(
        self, txn: Transaction, slot_class: int, tick: int, keys: Sequence[FullKey]
    ) -> list[tuple[int, list[FullKey]]]:
        """Put blocks behind all that have this tick; the first of them goes first. Which keys lie
        in which record, by its number."""
        groups = list(_groups(keys))
        first = self._counters.advance(txn, b"order", len(groups)) + 1
        numbered = list(enumerate(groups, first))
        with txn.cursor(self._records) as cursor:
            cursor.putmulti(
                [(_NAME.pack(slot_class, tick, number), _packed(same)) for number, same in numbered]
            )
        return numbered

    def take_out(self, txn: Transaction, gone: Mapping[bytes, Collection[FullKey]]) -> None:
        """Take keys out of the records of these names, as far as they are there."""
        for name, keys in gone.items():
            there = _keys(txn.get(name, b"", db=self._records))
            left = [key for key in there if key not in keys]
            if not left:
                txn.delete(name, db=self._records)
            elif len(left) < len(there):
                txn.put(name, _packed(left), db=self._records)

    def first(
        self,
        txn: Transaction,
        slot_class: int,
        count: int,
        record_of: Callable[[FullKey], BlockRecord | None],
    ) -> list[FullKey]:
        """At most `count` blocks of a class, those that go first; `record_of` gives a block's
        record."""
        found: list[FullKey] = []
        astray: dict[bytes, list[FullKey]] = {}
        for name, keys in self._of_class(txn, slot_class):
            if not keys:
                astray[name] = []
            for key in keys[: count - len(found)]:
                record = record_of(key)
                if record is None or name_of(record) != name:
                    astray.setdefault(name, []).append(key)
                else:
                    found.append(key)
            if len(found) == count:
                break
        self.take_out(txn, astray)
        return found

    def _of_class(self, txn: Transaction, slot_class: int) -> Iterator[tuple[bytes, list[FullKey]]]:
        prefix = slot_class.to_bytes(_CLASS_BYTES, "big")
        with txn.cursor(self._records) as cursor:
            more = cursor.set_range(prefix)
            while more and cursor.key().startswith(prefix):
                yield cursor.key(), _keys(cursor.value())
                more = cursor.next()

    def kept(
        self, txn: Transaction, slot_class: int, until: int = KEPT - 1
    ) -> Iterator[tuple[bytes, list[FullKey]]]:
        """Names and keys of the records of blocks that are kept until `until` at most, those that
        are kept for the shortest time first. Any transaction."""
        last = _NAME.pack(slot_class, KEPT + until, KEPT)
        with txn.cursor(self._records) as cursor:
            more = cursor.set_range(_NAME.pack(slot_class, KEPT, 0))
            while more and cursor.key() <= last:
                yield cursor.key(), _keys(cursor.value())
                more = cursor.next()

    def classes(self, txn: Transaction) -> list[int]:
        """Numbers of the slot classes that have blocks. Any transaction."""
        found: list[int] = []
        with txn.cursor(self._records) as cursor:
            more = cursor.first()
            while more:
                # Filled up where a damaged name is shorter, so that the next one is behind it.
                name = cursor.key()[:_CLASS_BYTES].ljust(_CLASS_BYTES, b"\0")
                found.append(int.from_bytes(name, "big"))
                more = found[-1] < _LAST_CLASS and cursor.set_range(
                    (found[-1] + 1).to_bytes(_CLASS_BYTES, "big")
                )
        return found

    def portion(
        self, txn: Transaction, start: bytes, most: int
    ) -> tuple[list[tuple[bytes, list[FullKey]]], bytes | None]:
        """Names and keys of the next `most` records from a name on, keys astray included, and where
        to go on; None at the end. Any transaction."""
        found: list[tuple[bytes, list[FullKey]]] = []
        with txn.cursor(self._records) as cursor:
            more = cursor.set_range(start) if start else cursor.first()
            while more and len(found) < most:
                found.append((cursor.key(), _keys(cursor.value())))
                more = cursor.next()
            return found, cursor.key() if more else None

    def clear(self, txn: Transaction) -> None:
        """No block is left."""
        txn.drop(self._records, delete=False)


def _groups(keys: Sequence[FullKey]) -> Iterator[list[FullKey]]:
    """Cut into runs of keys of one length, of which as many as fit a record."""
    for length, run in groupby(keys, len):
        same = list(run)
        most = max(1, _GROUP_BYTES // length)
        for start in range(0, len(same), most):
            yield same[start : start + most]


def _packed(keys: Sequence[FullKey]) -> bytes:
    return _LENGTH.pack(len(keys[0])) + b"".join(keys)


def _keys(data: bytes) -> list[FullKey]:
    """The keys of a record; whatever a damaged one holds."""
    length = int.from_bytes(data[: _LENGTH.size], "big")
    if not length:
        return []
    starts = range(_LENGTH.size, len(data), length)
    return [FullKey(data[start : start + length]) for start in starts]
