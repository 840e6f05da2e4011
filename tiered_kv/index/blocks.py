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

import logging
import struct
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import NewType, cast

from tiered_kv.contracts import ChangeBatch
from tiered_kv.index import listing, namespaces
from tiered_kv.index.classes import SlotClass, SlotClasses
from tiered_kv.index.environment import BufferTransaction, Environment, Transaction
from tiered_kv.index.log import ChangeLog, Counters
from tiered_kv.index.records import BlockRecord, Row
from tiered_kv.values import BlockKey, CacheGeometry, Namespace

__all__ = ["BlockIndex", "FullKey"]

FullKey = NewType("FullKey", bytes)
"""Namespace id (8 bytes) + key: names a block of any namespace of the tier."""

_NAMESPACE_BYTES = 8
_RANK_BYTES = 2
_CLASS_BYTES = 4
_NUMBER_BYTES = 8
_ORDER = struct.Struct(">IQ")
_MOST_KEY_BYTES = 256
_MOST_TOUCHED = 65_536
_MOST_DAMAGED = 4_096
_FLUSH_SECONDS = 1.0
_TOUCH_SECONDS = 0.05
"""How long `touch`, which a load waits for, waits for its turn to write."""
_SCAN_RECORDS = 2_048
_MANY_BLOCKS = 100_000
"""From so many on a child process, which takes some tenths of a second to start, is worth it."""

logger = logging.getLogger(__name__)


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
        self._other_ranks = [
            rank.to_bytes(_RANK_BYTES, "big")
            for rank in range(geometry.world_size)
            if rank != geometry.rank
        ]
        self._meta = environment.database("meta")
        self._rows = environment.database("rows")
        self._blocks = environment.database("blocks")
        self._order = environment.database("order")
        self._counters = Counters(environment)
        self._log = ChangeLog(environment, self._counters, log_entries)
        self._classes = SlotClasses(environment, self._counters)
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
        prefix = self._prefix
        full = cast("list[FullKey]", [prefix + key for key in keys])
        for length in set(map(len, full)):
            if not 0 < length - _NAMESPACE_BYTES <= _MOST_KEY_BYTES:
                raise ValueError(
                    f"a key has 1 to {_MOST_KEY_BYTES} bytes, not {length - _NAMESPACE_BYTES}"
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
        rank, rows, get, unpack = self._rank, self._rows, txn.get, Row.unpack
        found: list[Row | None] = []
        for key in self.full_keys(keys):
            name = key + rank
            data = get(name, None, rows)
            row = None if data is None else unpack(name, bytes(data))
            if row is None and data is not None:
                self._doubt(key)
            found.append(row)
        return found

    def with_row(self, txn: Transaction, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Those of the blocks of which this rank has a sound row; see `rows` for the others."""
        start, end = len(self._prefix), -_RANK_BYTES
        with txn.cursor(self._rows) as cursor:
            rank = self._rank
            names = cursor.getmulti([key + rank for key in self.full_keys(keys)], values=False)
        found = [BlockKey(name[start:end]) for name in names]
        rows = self.rows(txn, found)
        return {key for key, row in zip(found, rows, strict=True) if row is not None}

    def present(self, txn: Transaction, blocks: Iterable[FullKey]) -> list[FullKey]:
        """Those of the blocks that have a row of any rank."""
        return [key for key in blocks if self._record(txn, key) is not None]

    def distrust(self, keys: Iterable[BlockKey]) -> None:
        """The rows of these blocks lead nowhere: they count as missing, and the blocks will be
        removed by the next `publish` or `remove`."""
        for key in self.full_keys(keys):
            self._doubt(key)

    def row_of(self, txn: Transaction, block: FullKey, rank: int) -> Row | None:
        """A rank's row of any namespace's block."""
        return self._row(txn, block, rank.to_bytes(_RANK_BYTES, "big"))

    def all_rows(self, txn: Transaction, start: bytes = b"") -> Iterator[tuple[FullKey, int, Row]]:
        """(block, rank, row) of every sound row of the tier, all namespaces and ranks, sorted;
        from a block on."""
        with txn.cursor(self._rows) as cursor:
            for name, data in cursor if cursor.set_range(start) else ():
                row = Row.unpack(name, data)
                if row is not None:
                    rank = int.from_bytes(name[-_RANK_BYTES:], "big")
                    yield FullKey(name[:-_RANK_BYTES]), rank, row

    def scan(self) -> Iterator[BlockKey]:
        """All whole blocks of this namespace. Holds no transaction while suspended. Where there
        are many, a child process reads them."""
        start = self._prefix
        if self.count() >= _MANY_BLOCKS:
            try:
                with closing(listing.list_apart(self._environment, self._prefix)) as portions:
                    for portion in portions:
                        if portion is None:  # not begun: who asks meanwhile need not wait
                            found, after = self._list(start)
                        else:
                            found = portion[bisect_left(portion, start[_NAMESPACE_BYTES:]) :]
                            after = max(start, self._prefix + portion[-1] + b"\0")
                        yield from found
                        start = after
                        if not start:
                            break
                return
            except listing.ListingFailed as error:
                logger.warning("blocks are listed in this process: %s", error)
        while start:
            found, start = self._list(start)
            yield from found

    def _list(self, start: bytes) -> tuple[list[BlockKey], bytes]:
        with self._environment.read() as txn:
            return listing.list_some(txn, self._blocks, self._prefix, start, _SCAN_RECORDS)

    def count(self) -> int:
        """Whole blocks of this namespace."""
        with self._environment.read() as txn:
            return self._log.visible(txn, self._prefix)

    def changes(self, cursor: int | None) -> ChangeBatch:
        """See `BlockStore.changes`."""
        self._environment.check_current()
        with self._environment.read() as txn:
            return self._log.since(txn, cursor, self._prefix)

    # ---------------------------------------------------------------------------------- change

    def publish(self, txn: Transaction, blocks: Sequence[tuple[BlockKey, Row]]) -> list[Row]:
        """Add this rank's rows. The first block of the batch becomes the most recently used.

        Returns the rows whose room is to be freed: given ones that lost to a row published
        before, and those of blocks that are dropped because a row of theirs was damaged.
        """
        freed = self._settle(txn)
        keys = self.full_keys([key for key, _ in blocks])
        given: dict[FullKey, Row] = {}
        for key, (_, row) in zip(keys, blocks, strict=True):
            if key in given:
                freed.append(row)
            else:
                given[key] = row
        rank = self._rank
        items = [(name := key + rank, row.pack(name)) for key, row in given.items()]
        with txn.cursor(self._rows) as cursor:
            _, added = cursor.putmulti(items, overwrite=False)
        if added < len(items):
            freed += self._give_in(txn, given)
        with self._pending:
            self._damaged.difference_update(given)
        self._count_in(txn, given)
        self._log.trim(txn)
        return freed

    def _give_in(self, txn: Transaction, given: dict[FullKey, Row]) -> list[Row]:
        """Take out of `given` what lost to a row that was there before; the rows to be freed."""
        freed: list[Row] = []
        for key, row in list(given.items()):
            name = key + self._rank
            there = txn.get(name, b"", db=self._rows)
            packed = row.pack(name)
            if there == packed:
                continue
            if Row.unpack(name, there) is not None:
                freed.append(row)
                del given[key]
            else:
                freed += self._remove(txn, [key])
                txn.put(name, packed, db=self._rows)
        return freed

    def _count_in(self, txn: Transaction, new: Mapping[FullKey, Row]) -> None:
        """One more row of each of these blocks is there."""
        tick = self._counters.advance(txn, b"tick", len(new)) + len(new)
        others, ranks = self._other_ranks, self._world_size
        with txn.cursor(self._blocks) as cursor:
            known = set(cursor.getmulti(new, values=False))
        records: list[tuple[FullKey, bytes]] = []
        ordered: list[bytes] = []
        whole: list[FullKey] = []
        in_class: Counter[int] = Counter()
        for key, row in new.items():
            tick -= 1
            slot_class, world_size, present = row.slot_class, ranks, 1
            before = self._record(txn, key) if key in known else None
            if before is not None:
                txn.delete(_ordered(key, before.slot_class, before.tick), db=self._order)
                slot_class, world_size = before.slot_class, before.world_size
                present += before.present
            else:
                in_class[slot_class] += 1
            if before is None or present > world_size:  # our row was there and got lost
                present = 1
                for rank in others:
                    present += self._row(txn, key, rank) is not None
            records.append((key, BlockRecord.packed(key, slot_class, tick, world_size, present)))
            ordered.append(_ordered(key, slot_class, tick))
            if present == world_size and (before is None or not before.whole):
                whole.append(key)
        self._write_records(txn, records, ordered)
        self._classes.add(txn, in_class)
        self._log.note(txn, whole, added=True)

    def remove(
        self,
        txn: Transaction,
        blocks: Iterable[FullKey],
        *,
        enough: Callable[[Sequence[Row]], bool] | None = None,
    ) -> list[Row]:
        """Remove all ranks' rows of these blocks; returns them: their room is to be freed.
        Blocks that are not there are ignored. `enough` is asked after each block, with its rows:
        True leaves the others."""
        freed = self._settle(txn)
        freed += self._remove(txn, blocks, enough)
        self._log.trim(txn)
        return freed

    def _remove(
        self,
        txn: Transaction,
        blocks: Iterable[FullKey],
        enough: Callable[[Sequence[Row]], bool] | None = None,
    ) -> list[Row]:
        rows: list[Row] = []
        whole: list[FullKey] = []
        in_class: Counter[int] = Counter()
        for key in dict.fromkeys(blocks):
            record, before = self._record(txn, key), len(rows)
            for rank in range(self._world_size if record is None else record.world_size):
                name = key + rank.to_bytes(_RANK_BYTES, "big")
                data = txn.pop(name, db=self._rows)
                row = None if data is None else Row.unpack(name, data)
                if row is not None:
                    rows.append(row)
            txn.delete(key, db=self._blocks)
            if record is not None:
                txn.delete(_ordered(key, record.slot_class, record.tick), db=self._order)
                in_class[record.slot_class] -= 1
                if record.whole:
                    whole.append(key)
            if enough is not None and enough(rows[before:]):
                break
        self._classes.add(txn, in_class)
        self._log.note(txn, whole, added=False)
        return rows

    def clear(self, txn: Transaction) -> None:
        """Forget all blocks of all namespaces, where their data was lost. Whoever follows the
        change log is asked to start again."""
        for database in (self._rows, self._blocks, self._order):
            txn.drop(database, delete=False)
        self._classes.add(txn, {one.number: -one.blocks for one in self.classes(txn)})
        with txn.cursor(self._meta) as cursor:
            counters = [name for name in cursor.iternext(values=False) if name[:6] == b"whole:"]
        for name in counters:
            txn.delete(name, db=self._meta)
        self._log.restart(txn)

    def restart_log(self, txn: Transaction) -> None:
        """Ask whoever follows the change log to start again: blocks that they took for lost are
        there again."""
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
                if record is not None and _ordered(key, record.slot_class, record.tick) == name:
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
            self.flush(_TOUCH_SECONDS)

    def flush(self, wait: float | None = None) -> None:
        """Write what `touch` batched; `wait` as for `Environment.write`. What can't be written is
        forgotten, which costs hits only."""
        with self._pending:
            touched, self._touched = self._touched, {}
            self._flushed = time.monotonic()
        if touched:
            with self._environment.write(wait) as txn:
                self._write_touched(txn, touched)

    def _write_touched(self, txn: Transaction, touched: dict[FullKey, None]) -> None:
        tick = self._counters.advance(txn, b"tick", len(touched)) - 1
        records: list[tuple[FullKey, bytes]] = []
        ordered: list[bytes] = []
        for key in touched:
            tick += 1
            before = self._record(txn, key)
            if before is not None:
                slot_class = before.slot_class
                txn.delete(_ordered(key, slot_class, before.tick), db=self._order)
                record = BlockRecord.packed(
                    key, slot_class, tick, before.world_size, before.present
                )
                records.append((key, record))
                ordered.append(_ordered(key, slot_class, tick))
        self._write_records(txn, records, ordered)

    # --------------------------------------------------------------------- classes and counters

    def slot_class(self, txn: Transaction, group: int, slot_bytes: int) -> int:
        """Number of the slot class of this namespace; see `SlotClasses.number`."""
        return self._classes.number(txn, self._prefix, group, slot_bytes)

    def classes(self, txn: Transaction) -> list[SlotClass]:
        """All slot classes that were ever numbered."""
        return self._classes.all(txn)

    def next_generation(self, txn: Transaction, count: int) -> int:
        """First of `count` fresh generations (never given out before in this environment)."""
        return self._counters.advance(txn, b"generation", count) + 1

    # ---------------------------------------------------------------------------------- records

    def _record(self, txn: Transaction, key: FullKey) -> BlockRecord | None:
        return BlockRecord.unpack(key, txn.get(key, db=self._blocks))

    def _write_records(
        self, txn: Transaction, records: list[tuple[FullKey, bytes]], ordered: list[bytes]
    ) -> None:
        with txn.cursor(self._blocks) as cursor:
            cursor.putmulti(records)
        ordered.sort()
        with txn.cursor(self._order) as cursor:
            cursor.putmulti([(name, b"") for name in ordered])

    def _row(self, txn: Transaction | BufferTransaction, key: FullKey, rank: bytes) -> Row | None:
        name = key + rank
        data = txn.get(name, None, self._rows)
        if data is None:
            return None
        row = Row.unpack(name, bytes(data))
        if row is None:
            self._doubt(key)
        return row

    def _doubt(self, key: FullKey) -> None:
        if len(self._damaged) < _MOST_DAMAGED:
            self._damaged.add(key)


def _ordered(key: FullKey, slot_class: int, tick: int) -> bytes:
    return _ORDER.pack(slot_class, tick) + key
