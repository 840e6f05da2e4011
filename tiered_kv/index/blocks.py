"""What lies where in one tier: rows, recency, slot classes and the change log.

Databases of the environment (numbers are big-endian, so that they sort):

| name | key | value |
|---|---|---|
| `rows` | full key, rank (2 bytes) | `Row` |
| `blocks` | full key | `BlockRecord`: class, place in `order`, how many ranks' rows there are |
| `order` | class (4), tick (8), number (8) | length (2), full keys; see `Order`, `Scoring` |
| `log` | number of the last key (8) | 1 added or 0 removed; length (2) and full key of each |
| `classes` | number (4); or namespace id, group (4), slot bytes (8) | `ClassRecord`; number |
| `meta` | names | counters; a JSON object per namespace, for people |
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import cast

from tiered_kv.contracts import ChangeBatch, Recency, Scoring
from tiered_kv.errors import TierError
from tiered_kv.index import listing, namespaces, ranking
from tiered_kv.index.classes import SlotClass, SlotClasses
from tiered_kv.index.environment import Environment, Transaction
from tiered_kv.index.log import ChangeLog, Counters
from tiered_kv.index.order import Order, name_of
from tiered_kv.index.placing import Places, Touched
from tiered_kv.index.records import BlockRecord, FullKey, Row
from tiered_kv.values import BlockKey, CacheGeometry, Namespace

__all__ = ["BlockIndex", "FullKey"]

_NAMESPACE_BYTES = 8
_RANK_BYTES = 2
_MOST_KEY_BYTES = 256
_MOST_DAMAGED = 4_096
_TOUCH_SECONDS = 0.05
"""How long `touch`, which a load waits for, waits for its turn to write."""
_SCAN_RECORDS = 2_048
_ARRANGED_TOGETHER = 1_024
_NANOSECONDS = 1_000_000_000
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
        scoring: Scoring | None = None,
    ) -> None:
        """`log_entries` is the most the change log keeps; `scoring` orders blocks, the least
        recently used first where none is given. Records the namespace and what its
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
        self._counters = Counters(environment)
        self._order = Order(environment, self._counters)
        self._log = ChangeLog(environment, self._counters, log_entries)
        self._classes = SlotClasses(environment, self._counters)
        self._places = Places(environment, self._order, self._counters, scoring or Recency())
        self._touched = Touched()
        self._damaged: set[FullKey] = set()
        self._settled: tuple[Transaction | None, set[FullKey]] = None, set()
        """Of these, those that are no more when this transaction is committed."""
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

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each block is whole on all ranks."""
        full = self.full_keys(keys)
        with self._environment.read() as txn:
            records = [self._record(txn, key) for key in full]
        return [
            record is not None and record.whole and key not in self._damaged
            for key, record in zip(full, records, strict=True)
        ]

    def rows(self, txn: Transaction, keys: Sequence[BlockKey]) -> list[Row | None]:
        """This rank's rows. A row that fails its own check value is None, and its block will be
        removed by the next `publish` or `remove`."""
        rank, rows, get, unpack = self._rank, self._rows, txn.get, Row.unpack
        found: list[Row | None] = []
        for key in self.full_keys(keys):
            name = key + rank
            data = get(name, None, rows)
            row = None if data is None else unpack(name, data)
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

    def hottest(self) -> list[BlockKey]:
        """All whole blocks of this namespace, the one that would be evicted last first."""
        self.flush()
        return ranking.most_used_first(self._environment, self._order, self._blocks, self._prefix)

    def count(self) -> int:
        """Whole blocks of this namespace."""
        with self._environment.read() as txn:
            return self._log.visible(txn, self._prefix)

    def changes(self, cursor: int | None) -> ChangeBatch:
        """See `BlockStore.changes`."""
        self._environment.check_current()
        with self._environment.read() as txn:
            return self._log.since(txn, cursor, self._prefix)

    def publish(self, txn: Transaction, blocks: Sequence[tuple[BlockKey, Row]]) -> list[Row]:
        """Add this rank's rows. The first block of the batch becomes the most recently used.

        Returns the rows whose room is to be freed: given ones that lost to a row published
        before, and those of blocks that are dropped because a row of theirs was damaged.
        """
        freed = self._settle(txn)
        keys = self.full_keys([key for key, _ in blocks])
        given = dict(zip(reversed(keys), [row for _, row in reversed(blocks)], strict=True))
        if len(given) < len(keys):
            freed += _given_twice(given, keys, blocks)
        rank = self._rank
        items = Row.packed([(key + rank, given[key]) for key in sorted(given)])
        with txn.cursor(self._rows) as cursor:
            _, added = cursor.putmulti(items, overwrite=False)
        if added < len(items):
            freed += self._give_in(txn, given)
        self._trust(txn, given)
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
        """One more row of each of these blocks is there; those that go first come first."""
        with txn.cursor(self._blocks) as cursor:
            known = set(cursor.getmulti(new, values=False))
        tick = self._places.fresh(txn)
        placed: dict[tuple[int, int], dict[FullKey, tuple[int, int]]] = {}
        gone: dict[bytes, list[FullKey]] = {}
        whole: list[FullKey] = []
        in_class: Counter[int] = Counter()
        alone: tuple[int, int] = (self._world_size, 1)
        if not known and not self._other_ranks:
            whole += new
            for slot_class in {row.slot_class for row in new.values()}:
                fresh: dict[FullKey, tuple[int, int]] = {
                    key: alone for key, row in new.items() if row.slot_class == slot_class
                }
                in_class[slot_class] = len(fresh)
                placed[slot_class, tick] = fresh
        else:
            for key, row in new.items():
                before = self._record(txn, key) if key in known else None
                after = self._counted(txn, key, row, before, tick)
                if before is None:
                    in_class[after.slot_class] += 1
                else:
                    gone.setdefault(name_of(before), []).append(key)
                if after.whole and (before is None or not before.whole):
                    whole.append(key)
                place = placed.setdefault((after.slot_class, after.tick), {})
                place[key] = (after.world_size, after.present)
        whole.reverse()
        self._order.take_out(txn, gone)
        self._places.put(txn, placed)
        self._classes.add(txn, in_class)
        self._log.note(txn, whole, added=True)

    def _counted(
        self, txn: Transaction, key: FullKey, row: Row, before: BlockRecord | None, tick: int
    ) -> BlockRecord:
        """The record of a block that has one more row; its group is to be filled in."""
        slot_class, world_size, present = row.slot_class, self._world_size, 1
        if before is not None:
            slot_class, world_size = before.slot_class, before.world_size
            present += before.present
            tick = before.tick  # the other ranks' parts are of the same use
        if before is None or present > world_size:  # our row was there and got lost
            present = 1
            for rank in self._other_ranks:
                present += self._row(txn, key, rank) is not None
        return BlockRecord(slot_class, tick, 0, world_size, present)

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
        gone: dict[bytes, list[FullKey]] = {}
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
                gone.setdefault(name_of(record), []).append(key)
                in_class[record.slot_class] -= 1
                if record.whole:
                    whole.append(key)
            if enough is not None and enough(rows[before:]):
                break
        self._order.take_out(txn, gone)
        self._classes.add(txn, in_class)
        self._log.note(txn, whole, added=False)
        return rows

    def clear(self, txn: Transaction) -> None:
        """Forget all blocks of all namespaces, where their data was lost. Whoever follows the
        change log is asked to start again."""
        for database in (self._rows, self._blocks):
            txn.drop(database, delete=False)
        self._order.clear(txn)
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
        settled = self._settled[1] if self._settled[0] is txn else ()
        damaged = self._damaged.difference(settled)
        self._trust(txn, damaged)
        self._places.used(txn, self._touched.take())
        return self._remove(txn, damaged)

    def _trust(self, txn: Transaction, keys: Iterable[FullKey]) -> None:
        """These keys' rows are gone, or sound, once the transaction is committed."""
        if self._damaged:
            if self._settled[0] is not txn:
                self._settled = txn, set()
                forget = partial(self._damaged.difference_update, self._settled[1])
                self._environment.after_commit.append(forget)
            self._settled[1].update(keys)

    def oldest(self, txn: Transaction, slot_class: int, count: int) -> list[FullKey]:
        """At most `count` blocks of a class, least recently used first (write transaction)."""
        self._places.expire(txn, slot_class)
        return self._order.first(txn, slot_class, count, partial(self._record, txn))

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Mark as recently used: in memory, written at most every second, or with the next
        `publish` or `remove`. The first key becomes the most recently used."""
        if self._environment.writable and self._touched.add(self.full_keys(keys)):
            with suppress(TierError):  # somebody writes, and a load waits for this call
                self.flush(_TOUCH_SECONDS)

    def flush(self, wait: float | None = None) -> None:
        """Write what `touch` batched; `wait` as for `Environment.write`. What can't be written is
        forgotten, which costs hits only."""
        touched = self._touched.take()
        if touched:
            with self._environment.write(wait) as txn:
                self._places.used(txn, touched)

    def arrange(self, keys: Sequence[BlockKey]) -> None:
        """Let blocks of this namespace go in the reverse of this order, and none before others
        that nobody used since; see `RanksByUse.arrange`."""
        self.flush()
        full, level = self.full_keys(keys), 0
        for end in range(len(full), 0, -_ARRANGED_TOGETHER):
            some = full[max(0, end - _ARRANGED_TOGETHER) : end]
            with self._environment.write() as txn:
                level = self._places.arrange(txn, reversed(some), level)

    def keep(self, keys: Sequence[BlockKey], seconds: float, most: int) -> int:
        """See `KeepsBlocks.keep`."""
        if not seconds > 0:
            raise ValueError(f"blocks are kept for more than 0 seconds, not {seconds}")
        self.flush()
        until = time.time_ns() + int(seconds * _NANOSECONDS)
        room = most - self.kept()
        with self._environment.read() as txn:
            chosen = self._places.to_keep(txn, self.full_keys(keys), room)
        kept = 0
        for end in range(len(chosen), 0, -_ARRANGED_TOGETHER):  # what is placed last goes last
            some = chosen[max(0, end - _ARRANGED_TOGETHER) : end]
            with self._environment.write() as txn:
                kept += self._places.keep(txn, reversed(some), until)
        return kept

    def kept(self) -> int:
        """See `KeepsBlocks.kept`."""
        with self._environment.read() as txn:
            return self._places.kept(txn)

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

    def _record(self, txn: Transaction, key: FullKey) -> BlockRecord | None:
        return BlockRecord.unpack(key, txn.get(key, db=self._blocks))

    def _row(self, txn: Transaction, key: FullKey, rank: bytes) -> Row | None:
        name = key + rank
        data = txn.get(name, None, self._rows)
        if data is None:
            return None
        row = Row.unpack(name, data)
        if row is None:
            self._doubt(key)
        return row

    def _doubt(self, key: FullKey) -> None:
        if len(self._damaged) < _MOST_DAMAGED:
            self._damaged.add(key)


def _given_twice(
    given: dict[FullKey, Row], keys: Sequence[FullKey], blocks: Sequence[tuple[BlockKey, Row]]
) -> list[Row]:
    """Of the rows of one key the first counts; the others are to be freed."""
    first: dict[FullKey, Row] = {}
    freed: list[Row] = []
    for key, (_, row) in zip(keys, blocks, strict=True):
        if key in first:
            freed.append(row)
        else:
            first[key] = row
    given.clear()
    given.update((key, first[key]) for key in reversed(first))
    return freed
