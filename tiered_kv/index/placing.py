"""Where blocks stand in the order in which they go, and how their uses move them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, islice

from tiered_kv.contracts import Scoring
from tiered_kv.index.environment import Environment, Transaction
from tiered_kv.index.log import Counters
from tiered_kv.index.order import KEPT, Order, name_of, tick_of
from tiered_kv.index.records import BlockRecord, FullKey

__all__ = ["Places", "Touched"]

_MOST_TOUCHED = 65_536
_FLUSH_SECONDS = 1.0
_EXPIRED = 16
"""Records of blocks whose time is over that are moved together: the transaction is short."""


class Touched:
    """Blocks whose use is not written yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[FullKey, None] = {}
        self._written = time.monotonic()

    def add(self, keys: Sequence[FullKey]) -> bool:
        """Note uses, the first key's as the last one; whether it is time to write them."""
        with self._lock:
            for key in reversed(keys):
                self._keys.pop(key, None)
                self._keys[key] = None
            while len(self._keys) > _MOST_TOUCHED:
                del self._keys[next(iter(self._keys))]
            return bool(self._keys) and time.monotonic() - self._written > _FLUSH_SECONDS

    def take(self) -> dict[FullKey, None]:
        """What is to be written, the last used last; it is not kept."""
        with self._lock:
            keys, self._keys = self._keys, {}
            self._written = time.monotonic()
            return keys


class Places:
    """Block records with their places in the order. Each call belongs to a write transaction."""

    def __init__(
        self, environment: Environment, order: Order, counters: Counters, scoring: Scoring
    ) -> None:
        """Not inside a transaction."""
        self._blocks = environment.database("blocks")
        self._order = order
        self._counters = counters
        self._scoring = scoring

    def fresh(self, txn: Transaction) -> int:
        """The tick of a block that is stored now."""
        return self._scoring.score(None, self._counters.moment(txn))

    def put(
        self,
        txn: Transaction,
        placed: Mapping[tuple[int, int], Mapping[FullKey, tuple[int, int]]],
    ) -> None:
        """Write block records: by class and tick, world size and ranks present by key, those that
        go first before the others."""
        records: list[tuple[FullKey, bytes]] = []
        for (slot_class, tick), counts in placed.items():
            for group, keys in self._order.place(txn, slot_class, tick, list(counts)):
                for count, same in groupby(keys, counts.__getitem__):
                    record = BlockRecord(slot_class, tick, group, *count)
                    records += record.packed(list(same))
        records.sort()  # keys that come in order fill LMDB's pages
        with txn.cursor(self._blocks) as cursor:
            cursor.putmulti(records)

    def used(self, txn: Transaction, keys: Iterable[FullKey]) -> None:
        """Blocks were used now, the last one last."""
        before = self._records(txn, keys)
        if before:
            now = self._counters.moment(txn)
            self._move(
                txn,
                before,
                lambda tick: tick if tick >= KEPT else self._scoring.score(tick, now),
            )

    def arrange(self, txn: Transaction, keys: Iterable[FullKey], floor: int) -> int:
        """Let blocks go in this order, none before those of the tick `floor`; each stays as long
        as it would have, and what is kept stays where it is. Returns the tick that they have."""
        found = self._records(txn, keys)
        before = {key: record for key, record in found.items() if record.tick < KEPT}
        if not before:
            return floor
        now = self._counters.moment(txn)
        level = max(floor, now, *(record.tick for record in before.values()))
        self._move(txn, before, lambda tick: level)
        return level

    def to_keep(self, txn: Transaction, keys: Iterable[FullKey], room: int) -> list[FullKey]:
        """Those of the keys that are here and are kept already, and the first `room` others. Any
        transaction."""
        chosen: list[FullKey] = []
        for key, record in self._records(txn, keys).items():
            is_new = record.tick < KEPT
            if not is_new or room > 0:
                chosen.append(key)
                room -= is_new
        return chosen

    def keep(self, txn: Transaction, keys: Iterable[FullKey], until: int) -> int:
        """Keep blocks until a time in nanoseconds, those that go first before the others; how many
        are here."""
        before = self._records(txn, keys)
        self._move(txn, before, lambda tick: max(tick, KEPT + min(until, KEPT - 1)))
        return len(before)

    def kept(self, txn: Transaction) -> int:
        """How many blocks are kept now. Any transaction."""
        now = time.time_ns()
        return sum(
            len(keys)
            for number in self._order.classes(txn)
            for name, keys in self._order.kept(txn, number)
            if tick_of(name) - KEPT > now
        )

    def expire(self, txn: Transaction, slot_class: int) -> None:
        """Blocks whose time is over count as used when it ended."""
        for name, keys in list(islice(self._order.kept(txn, slot_class, time.time_ns()), _EXPIRED)):
            found = self._records(txn, keys)
            over = {key: record for key, record in found.items() if name_of(record) == name}
            self._order.take_out(txn, {name: set(keys)})
            self._move(txn, over, lambda tick: tick - KEPT)

    def _records(self, txn: Transaction, keys: Iterable[FullKey]) -> dict[FullKey, BlockRecord]:
        found = {}
        for key in keys:
            record = BlockRecord.unpack(key, txn.get(key, db=self._blocks))
            if record is not None:
                found[key] = record
        return found

    def _move(
        self,
        txn: Transaction,
        before: Mapping[FullKey, BlockRecord],
        ticks: Callable[[int], int],
    ) -> None:
        placed: dict[tuple[int, int], dict[FullKey, tuple[int, int]]] = {}
        gone: dict[bytes, list[FullKey]] = {}
        for key, record in before.items():
            gone.setdefault(name_of(record), []).append(key)
            place = placed.setdefault((record.slot_class, ticks(record.tick)), {})
            place[key] = (record.world_size, record.present)
        self._order.take_out(txn, gone)
        self.put(txn, placed)
