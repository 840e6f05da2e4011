"""What lies where in one tier: rows, recency, slot classes and the change log.

Databases of the environment (numbers are big-endian, so that they sort):

| name | key | value |
|---|---|---|
| `rows` | full key, rank (2 bytes) | `Row` |
| `blocks` | full key | `BlockRecord`: class, tick, how many ranks' rows there are |
| `order` | class (4), tick (8), full key | nothing |
| `log` | number of the last key (8) | 1 added or 0 removed; length (2) and full key of each |
| `classes` | number (4); or namespace id, group (4), slot bytes (8) | `ClassRecord`; number |
| `meta` | names | counters; a JSON object per namespace, for people |
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NewType

from tiered_kv.contracts import ChangeBatch
from tiered_kv.index import namespaces
from tiered_kv.index.environment import BufferTransaction, Environment, Transaction
from tiered_kv.index.log import ChangeLog, Counters, number_bytes
from tiered_kv.index.records import BlockRecord, ClassRecord, Row
from tiered_kv.values import BlockKey, CacheGeometry, Namespace

__all__ = ["BlockIndex", "FullKey", "SlotClass"]

FullKey = NewType("FullKey", bytes)
"""Namespace id (8 bytes) + key: names a block of any namespace of the tier."""

_NAMESPACE_BYTES = 8
_RANK_BYTES = 2
_CLASS_BYTES = 4
_NUMBER_BYTES = 8
_MOST_KEY_BYTES = 256
_MOST_TOUCHED = 65_536
_MOST_DAMAGED = 4_096
_FLUSH_SECONDS = 1.0
_SCAN_KEYS = 2_048


@dataclass(frozen=True, slots=True)
class SlotClass:
    """Blocks that can take each other's place: one namespace, group and slot size."""

    number: int
    namespace_id: bytes
    group: int
    slot_bytes: int
    blocks: int
    """Blocks in it, whole or not."""
    oldest: int | None
    """Tick of the least recently used one (a smaller tick is longer ago); None when empty."""


class BlockIndex:
    """All blocks of one tier, bound to one namespace, and a rank of its ranks, for plain keys.

    Thread-safe, as far as transactions are: each belongs to the thread that began it. Methods that
    take no `txn` begin their own and must not be called inside a write transaction.
    """

    def __init__(
        self,
        environment: Environment,
        namespace: Namespace,
        geometry: CacheGeometry,
        *,
        log_entries: int = 65_536,
        listed: bool = True,
    ) -> None:
        """`log_entries` is the most the change log keeps. Records the namespace and what its
        blocks are, for tools that have no engine; not with `listed=False`, where no block of it
        will be stored."""
        self._environment = environment
        self._namespace = namespace
        self._geometry = geometry
        self._prefix = namespace.id
        self._rank = geometry.rank.to_bytes(_RANK_BYTES, "big")
        self._world_size = geometry.world_size
        self._meta = environment.database("meta")
        self._rows = environment.database("rows")
        self._blocks = environment.database("blocks")
        self._order = environment.database("order")
        self._counters = Counters(environment)
        self._log = ChangeLog(environment, self._counters, log_entries)
        self._classes = environment.database("classes")
        self._pending = threading.Lock()
        self._touched: dict[FullKey, None] = {}
        self._flushed = time.monotonic()
        self._damaged: set[FullKey] = set()
        if environment.writable and listed:
            self._introduce()

    def _introduce(self) -> None:
        """Note the namespace, and where the log begins."""
        what = (self._meta, self._namespace, self._geometry)
        with self._environment.read() as txn:
            known = namespaces.is_noted(txn, *what) and self._log.begun(txn)
        if not known:
            with self._environment.write() as txn:
                namespaces.note(txn, *what)
                self._log.begin(txn)

    def full_keys(self, keys: Iterable[BlockKey]) -> list[FullKey]:
        """Keys of this namespace, as the calls across namespaces take them.

        Raises:
            ValueError: a key is empty or longer than 256 bytes.
        """
        full = [FullKey(self._prefix + key) for key in keys]
        for key in full:
            if not 0 < len(key) - _NAMESPACE_BYTES <= _MOST_KEY_BYTES:
                raise ValueError(
                    f"a key has 1 to {_MOST_KEY_BYTES} bytes, not {len(key) - _NAMESPACE_BYTES}"
                )
        return full

    # ---------------------------------------------------------------------------------- lookup

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each block is whole on all ranks."""
        full = self.full_keys(keys)
        with self._environment.read() as txn:
            records = [self._record(txn, key) for key in full]
        return [
            record is not None and record.whole and key not in self._damaged
            for key, record in zip(full, records, strict=True)
        ]

    def rows(
        self, txn: Transaction | BufferTransaction, keys: Sequence[BlockKey]
    ) -> list[Row | None]:
        """This rank's rows. A row that fails its own check value is None, and its block will be
        removed by the next `publish` or `remove`."""
        return [self._row(txn, key, self._rank) for key in self.full_keys(keys)]

    def present(self, txn: Transaction, blocks: Iterable[FullKey]) -> list[FullKey]:
        """Those of the blocks that have a row of any rank."""
        return [key for key in blocks if self._record(txn, key) is not None]

    def distrust(self, keys: Iterable[BlockKey]) -> None:
        """The rows of these blocks lead nowhere: they count as missing, and the blocks will be
        removed by the next `publish` or `remove`."""
        for key in self.full_keys(keys):
            self._doubt(key)

    def all_rows(self, txn: Transaction) -> Iterator[tuple[FullKey, int, Row]]:
        """(block, rank, row) of every sound row of the tier, all namespaces and ranks."""
        with txn.cursor(self._rows) as cursor:
            for name, data in cursor:
                row = Row.unpack(name, data)
                if row is not None:
                    rank = int.from_bytes(name[-_RANK_BYTES:], "big")
                    yield FullKey(name[:-_RANK_BYTES]), rank, row

    def scan(self) -> Iterator[BlockKey]:
        """All whole blocks of this namespace. Holds no transaction while suspended."""
        start = self._prefix
        while start:
            with self._environment.read() as txn:
                found, start = self._scan_from(txn, start)
            yield from found

    def _scan_from(self, txn: Transaction, start: bytes) -> tuple[list[BlockKey], bytes]:
        """The next keys, and where to go on; empty at the end."""
        found: list[BlockKey] = []
        with txn.cursor(self._blocks) as cursor:
            more = cursor.set_range(start)
            for _ in range(_SCAN_KEYS):
                if not more or not cursor.key().startswith(self._prefix):
                    return found, b""
                name = cursor.key()
                record = BlockRecord.unpack(name, cursor.value())
                if record is not None and record.whole:
                    found.append(BlockKey(name[_NAMESPACE_BYTES:]))
                start = name + b"\0"
                more = cursor.next()
        return found, start

    def count(self) -> int:
        """Whole blocks of this namespace."""
        with self._environment.read() as txn:
            return self._log.visible(txn, self._prefix)

    def changes(self, cursor: int | None) -> ChangeBatch:
        """See `BlockStore.changes`."""
        with self._environment.read() as txn:
            return self._log.since(txn, cursor, self._prefix)

    # ---------------------------------------------------------------------------------- change

    def publish(self, txn: Transaction, blocks: Sequence[tuple[BlockKey, Row]]) -> list[Row]:
        """Add this rank's rows. The first block of the batch becomes the most recently used.

        Returns the rows whose room is to be freed: given ones that lost to a row published
        before, and those of blocks that are dropped because a row of theirs was damaged.
        """
        freed = self._settle(txn)
        rank = self._rank
        given: dict[FullKey, tuple[bytes, Row]] = {}
        for key, (_, row) in zip(self.full_keys(k for k, _ in blocks), blocks, strict=True):
            if key in given:
                freed.append(row)
            else:
                given[key] = (row.pack(key + rank), row)
        with txn.cursor(self._rows) as cursor:
            items = [(key + rank, given[key][0]) for key in sorted(given)]
            _, added = cursor.putmulti(items, overwrite=False)
        if added < len(items):
            freed += self._give_in(txn, given)
        with self._pending:
            self._damaged.difference_update(given)
        self._count_in(txn, {key: row.slot_class for key, (_, row) in given.items()})
        self._log.trim(txn)
        return freed

    def _give_in(self, txn: Transaction, given: dict[FullKey, tuple[bytes, Row]]) -> list[Row]:
        """Take out of `given` what lost to a row that was there before; the rows to be freed."""
        freed: list[Row] = []
        for key, (packed, row) in list(given.items()):
            name = key + self._rank
            there = txn.get(name, b"", db=self._rows)
            if there == packed:
                continue
            if Row.unpack(name, there) is not None:
                freed.append(row)
                del given[key]
            else:
                freed += self._remove(txn, [key])
                txn.put(name, packed, db=self._rows)
        return freed

    def _count_in(self, txn: Transaction, new: Mapping[FullKey, int]) -> None:
        """One more row of each of these blocks is there; by block, its slot class."""
        tick = self._counters.advance(txn, b"tick", len(new)) + len(new)
        others = [
            rank.to_bytes(_RANK_BYTES, "big")
            for rank in range(self._world_size)
            if rank != int.from_bytes(self._rank, "big")
        ]
        records: list[tuple[FullKey, BlockRecord]] = []
        in_class: Counter[int] = Counter()
        for key, slot_class in new.items():
            tick -= 1
            before = self._record(txn, key)
            if before is not None:
                txn.delete(_ordered(key, before), db=self._order)
                present = before.present + 1
                record = BlockRecord(before.slot_class, tick, before.world_size, present)
            else:
                present = 1 + sum(self._row(txn, key, rank) is not None for rank in others)
                record = BlockRecord(slot_class, tick, self._world_size, present)
                in_class[slot_class] += 1
            records.append((key, record))
        self._write_records(txn, records)
        self._add_to_classes(txn, in_class)
        self._log.note(txn, [key for key, record in records if record.whole], added=True)

    def remove(self, txn: Transaction, blocks: Iterable[FullKey]) -> list[Row]:
        """Remove all ranks' rows of these blocks; returns them: their room is to be freed.
        Blocks that are not there are ignored."""
        freed = self._settle(txn)
        freed += self._remove(txn, blocks)
        self._log.trim(txn)
        return freed

    def _remove(self, txn: Transaction, blocks: Iterable[FullKey]) -> list[Row]:
        rows: list[Row] = []
        whole: list[FullKey] = []
        in_class: Counter[int] = Counter()
        for key in dict.fromkeys(blocks):
            record = self._record(txn, key)
            for rank in range(self._world_size if record is None else record.world_size):
                name = key + rank.to_bytes(_RANK_BYTES, "big")
                data = txn.pop(name, db=self._rows)
                row = None if data is None else Row.unpack(name, data)
                if row is not None:
                    rows.append(row)
            txn.delete(key, db=self._blocks)
            if record is not None:
                txn.delete(_ordered(key, record), db=self._order)
                in_class[record.slot_class] -= 1
                if record.whole:
                    whole.append(key)
        self._add_to_classes(txn, in_class)
        self._log.note(txn, whole, added=False)
        return rows

    def clear(self, txn: Transaction) -> None:
        """Forget all blocks of all namespaces, where their data was lost. Whoever follows the
        change log is asked to start again."""
        for database in (self._rows, self._blocks, self._order):
            txn.drop(database, delete=False)
        self._add_to_classes(txn, {one.number: -one.blocks for one in self.classes(txn)})
        with txn.cursor(self._meta) as cursor:
            counters = [name for name in cursor.iternext(values=False) if name[:6] == b"whole:"]
        for name in counters:
            txn.delete(name, db=self._meta)
        self._log.restart(txn)

    def _settle(self, txn: Transaction) -> list[Row]:
        """Before a change: write what `touch` batched, drop what was found damaged."""
        with self._pending:
            touched, self._touched = self._touched, {}
            damaged, self._damaged = self._damaged, set()
            self._flushed = time.monotonic()
        self._write_touched(txn, touched)
        return self._remove(txn, damaged)

    def oldest(self, txn: Transaction, slot_class: int, count: int) -> list[FullKey]:
        """At most `count` blocks of a class, least recently used first (write transaction)."""
        prefix = slot_class.to_bytes(_CLASS_BYTES, "big")
        head = _CLASS_BYTES + _NUMBER_BYTES
        found: list[FullKey] = []
        astray: list[bytes] = []
        with txn.cursor(self._order) as cursor:
            more = cursor.set_range(prefix)
            while more and len(found) < count and cursor.key().startswith(prefix):
                name = cursor.key()
                key = FullKey(name[head:])
                record = self._record(txn, key)
                if record is not None and _ordered(key, record) == name:
                    found.append(key)
                else:
                    astray.append(name)  # its block record was damaged
                more = cursor.next()
        for name in astray:
            txn.delete(name, db=self._order)
        return found

    # ------------------------------------------------------------------------------------- use

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Mark as recently used: in memory, written at most every second, or with the next
        `publish` or `remove`. The first key becomes the most recently used."""
        if not self._environment.writable:
            return
        full = self.full_keys(keys)
        with self._pending:
            for key in reversed(full):
                self._touched.pop(key, None)
                self._touched[key] = None
            while len(self._touched) > _MOST_TOUCHED:
                del self._touched[next(iter(self._touched))]
            due = bool(self._touched) and time.monotonic() - self._flushed > _FLUSH_SECONDS
        if due:
            self.flush()

    def flush(self) -> None:
        """Write what `touch` batched."""
        with self._pending:
            touched, self._touched = self._touched, {}
            self._flushed = time.monotonic()
        if touched:
            with self._environment.write() as txn:
                self._write_touched(txn, touched)

    def _write_touched(self, txn: Transaction, touched: dict[FullKey, None]) -> None:
        tick = self._counters.advance(txn, b"tick", len(touched)) - 1
        records: list[tuple[FullKey, BlockRecord]] = []
        for key in touched:
            tick += 1
            before = self._record(txn, key)
            if before is not None:
                txn.delete(_ordered(key, before), db=self._order)
                record = BlockRecord(before.slot_class, tick, before.world_size, before.present)
                records.append((key, record))
        self._write_records(txn, records)

    # --------------------------------------------------------------------- classes and counters

    def slot_class(self, txn: Transaction, group: int, slot_bytes: int) -> int:
        """Stable number (from 1) of (this namespace, group, slot bytes); made when new, which
        needs a write transaction. 0 is free for stores that have no classes."""
        name = self._prefix + group.to_bytes(_CLASS_BYTES, "big") + number_bytes(slot_bytes)
        known = txn.get(name, db=self._classes)
        if known is not None:
            return int.from_bytes(known, "big")
        number = self._counters.advance(txn, b"class", 1) + 1
        packed = number.to_bytes(_CLASS_BYTES, "big")
        txn.put(name, packed, db=self._classes)
        record = ClassRecord(self._prefix, group, slot_bytes, 0)
        txn.put(packed, record.pack(), db=self._classes)
        return number

    def classes(self, txn: Transaction) -> list[SlotClass]:
        """All slot classes that were ever numbered."""
        found: list[SlotClass] = []
        with txn.cursor(self._classes) as cursor, txn.cursor(self._order) as order:
            for name, data in cursor:
                if len(name) != _CLASS_BYTES:
                    continue
                record = ClassRecord.unpack(data)
                oldest = None
                if order.set_range(name) and order.key().startswith(name):
                    tick = order.key()[_CLASS_BYTES : _CLASS_BYTES + _NUMBER_BYTES]
                    oldest = int.from_bytes(tick, "big")
                found.append(
                    SlotClass(
                        int.from_bytes(name, "big"),
                        record.namespace_id,
                        record.group,
                        record.slot_bytes,
                        record.blocks,
                        oldest,
                    )
                )
        return found

    def next_generation(self, txn: Transaction, count: int) -> int:
        """First of `count` fresh generations (never given out before in this environment)."""
        return self._counters.advance(txn, b"generation", count) + 1

    def _add_to_classes(self, txn: Transaction, differences: Mapping[int, int]) -> None:
        for slot_class, difference in differences.items():
            name = slot_class.to_bytes(_CLASS_BYTES, "big")
            data = txn.get(name, db=self._classes)
            if data is not None:
                record = ClassRecord.unpack(data)
                changed = replace(record, blocks=max(0, record.blocks + difference))
                txn.put(name, changed.pack(), db=self._classes)

    # ---------------------------------------------------------------------------------- records

    def _record(self, txn: Transaction, key: FullKey) -> BlockRecord | None:
        return BlockRecord.unpack(key, txn.get(key, db=self._blocks))

    def _write_records(
        self, txn: Transaction, records: Sequence[tuple[FullKey, BlockRecord]]
    ) -> None:
        with txn.cursor(self._blocks) as cursor:
            cursor.putmulti(sorted((key, record.pack(key)) for key, record in records))
        with txn.cursor(self._order) as cursor:
            cursor.putmulti(sorted((_ordered(key, record), b"") for key, record in records))

    def _row(self, txn: Transaction | BufferTransaction, key: FullKey, rank: bytes) -> Row | None:
        name = key + rank
        data = txn.get(name, db=self._rows)
        if data is None:
            return None
        row = Row.unpack(name, bytes(data))
        if row is None:
            self._doubt(key)
        return row

    def _doubt(self, key: FullKey) -> None:
        if len(self._damaged) < _MOST_DAMAGED:
            self._damaged.add(key)


def _ordered(key: FullKey, record: BlockRecord) -> bytes:
    return record.slot_class.to_bytes(_CLASS_BYTES, "big") + number_bytes(record.tick) + key
