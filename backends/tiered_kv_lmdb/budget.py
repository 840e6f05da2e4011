"""Keeps a tier within its budget: evicts ahead of need, and helps LMDB to pages it may use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import TypeVar

from tiered_kv.contracts import NewBlock
from tiered_kv.errors import NoSpace
from tiered_kv.index import BlockIndex, OutOfPages, Row, Transaction
from tiered_kv_lmdb.files import HEAD_BYTES, Space, TierFiles, value_bytes
from tiered_kv_lmdb.ledger import NUMBER_BYTES, Ledger, packed

__all__ = ["Budget", "number_of"]

_LISTED_FIRST, _LISTED_AT_ONCE = 8, 256
_LEAST_EVICTED_BYTES = 65_536
_FURTHER_TRIES = 2
_PAUSES = (0.0, 0.02, 0.1, 0.3)
"""Seconds before each further try where the map is full: LMDB uses no page again that somebody
reads who began before it was freed."""

T = TypeVar("T")


def number_of(row: Row) -> bytes:
    """The number of a row's value; the block's head follows it."""
    return row.location[:NUMBER_BYTES]


class Budget:
    """Every write to a tier's files goes through here. Thread-safe."""

    def __init__(self, files: TierFiles, index: BlockIndex, ledger: Ledger, tier: str) -> None:
        """Both files are open."""
        self._files = files
        self._index = index
        self._ledger = ledger
        self._tier = tier
        self._values = files.values.database("values")
        self._lock = threading.Lock()
        self._deleted: set[bytes] = set()
        """Records of the ledger whose values are deleted."""
        self._written: dict[int, bytes] = {}
        """By number that is reserved and whose value is in the file, as far as this store wrote:
        what its row is to say of where it lies."""
        self._evicted = 0

    @property
    def evicted(self) -> int:
        """Blocks evicted by this store."""
        return self._evicted

    def count_evicted(self, blocks: int) -> None:
        """Blocks were evicted, in a transaction that is committed now."""
        with self._lock:
            self._evicted += blocks

    def rooms(self, blocks: Sequence[NewBlock]) -> list[int]:
        """Bytes that the values of these blocks take in the file."""
        page_bytes = self._files.values.page_bytes
        lengths = [checksum.length for _, checksum in blocks]
        rooms = {length: value_bytes(length, page_bytes) for length in set(lengths)}
        return [rooms[length] for length in lengths]

    def locations(self, numbers: Sequence[int]) -> list[bytes]:
        """What rows are to say of where these blocks lie, which were written and are not yet
        settled.

        Raises:
            ValueError: one was not written.
        """
        with self._lock:
            try:
                return list(map(self._written.__getitem__, numbers))
            except KeyError:
                raise ValueError("a place is published before it was written") from None

    def settled(self, numbers: Iterable[int]) -> None:
        """These are not reserved any more."""
        with self._lock:
            for number in numbers:
                self._written.pop(number, None)

    # --------------------------------------------------------------------------------- writing

    def in_index(self, act: Callable[[Transaction], T]) -> T:
        """Run a write transaction of the index; where LMDB runs out of pages, make room and try
        again, so that `act` may run several times."""
        return self._insist(lambda: self._in_index_once(act), lambda: _LEAST_EVICTED_BYTES)

    def _insist(self, act: Callable[[], T], need: Callable[[], int]) -> T:
        """Run a transaction; where LMDB runs out of pages, make room for what it may need (bytes)
        and try again."""
        tries = 0
        while True:
            try:
                return act()
            except OutOfPages as error:
                tries += 1
                if tries > (_FURTHER_TRIES if error.disk_full else len(_PAUSES)):
                    raise
                if not error.disk_full:
                    time.sleep(_PAUSES[tries - 1])
                self._make_room(need())

    def _in_index_once(self, act: Callable[[Transaction], T]) -> T:
        with self._lock:
            deleted = frozenset(self._deleted)
        with self._files.index.write() as txn:
            self._ledger.forget(txn, deleted)
            result = act(txn)
        with self._lock:
            self._deleted -= deleted
        return result

    def put(self, numbers: Sequence[int], memory: Sequence[memoryview]) -> None:
        """Write blocks (octets), by number, and delete freed values in the same transaction; where
        LMDB runs out of pages, make room and try again."""
        names = list(map(packed, numbers))
        items = [(name, view[HEAD_BYTES:]) for name, view in zip(names, memory, strict=True)]
        items.sort(key=itemgetter(0))  # LMDB appends, then

        def need() -> int:
            page_bytes = self._files.values.page_bytes
            return sum(value_bytes(view.nbytes, page_bytes) for view in memory)

        self._insist(lambda: self._put_once(items), need)
        locations = [
            name + view[:HEAD_BYTES].tobytes() for name, view in zip(names, memory, strict=True)
        ]
        with self._lock:
            self._written.update(zip(numbers, locations, strict=True))

    def _put_once(self, items: Sequence[tuple[bytes, memoryview]]) -> None:
        with self._files.index.read() as txn:
            freed = self._ledger.freed(txn)
        with self._files.values.write() as txn:
            for runs in freed.values():
                for run in runs:
                    for number in run.numbers():
                        txn.delete(number, b"", self._values)
            with txn.cursor(self._values) as cursor:
                cursor.putmulti(items)
        with self._lock:
            self._deleted.update(freed)

    def delete_freed(self) -> None:
        """Delete values that were freed, where there are any, and forget that they were."""
        with self._files.index.read() as txn:
            if not self._ledger.freed(txn):
                return
        self._put_once([])
        self.in_index(lambda _: None)

    def _make_room(self, need: int) -> None:
        """Evict twice what is needed, and let two transactions pass in both files, so that LMDB
        may use the pages."""
        both = (self._files.index, self._files.values)
        for environment in both:
            environment.clear_dead_readers()
        with suppress(NoSpace):
            with self._files.index.write() as txn:
                evicted, _ = self._evict(txn, 2 * need)
            self.count_evicted(evicted)
            self._put_once([])
            for environment in both:
                meta = environment.database("meta")
                for turn in (b"0", b"1"):
                    with environment.write() as txn:
                        txn.put(b"turn", turn, db=meta)

    # -------------------------------------------------------------------------------- eviction

    def evict_for(self, txn: Transaction, need: int, space: Space) -> int:
        """Evict until `need` more bytes fit, whole blocks, least recently used first; how many.

        Raises:
            NoSpace: they can't; the transaction is to be aborted, which takes evictions back.
        """
        limit = space.limit(need)
        occupied, promised = self._occupied(txn)
        index = self._files.index
        evicted = 0
        while (missing := occupied + promised + need - limit) > 0 or (
            index.live_bytes(txn) > index.map_bytes * 3 // 4
        ):
            count, room = self._evict(txn, max(1, missing)) if need + promised <= limit else (0, 0)
            if count == 0:
                raise NoSpace(
                    f"tier {self._tier}: no room for {need} bytes: {limit} bytes may hold blocks "
                    f"now, of which {promised} are promised to others; the disk has "
                    f"{space.disk_free} bytes free, of which {space.floor} stay free"
                )
            evicted += count
            occupied -= room
        return evicted

    def _evict(self, txn: Transaction, need: int) -> tuple[int, int]:
        """Evict blocks until `need` bytes are freed, or none is left: how many there were, and the
        bytes of their values."""
        page_bytes = self._files.values.page_bytes
        evicted, room = 0, 0

        def enough(rows: Sequence[Row]) -> bool:
            nonlocal evicted, room
            evicted += 1
            room += sum(value_bytes(row.checksum.length, page_bytes) for row in rows)
            return room >= need

        listed = _LISTED_FIRST
        while room < need and (victims := self._index.oldest(txn, 0, listed)):
            self.free(txn, self._index.remove(txn, victims, enough=enough))
            listed = min(2 * listed, _LISTED_AT_ONCE)
        return evicted, room

    def free(self, txn: Transaction, rows: Sequence[Row]) -> int:
        """Have the values of removed rows deleted; the bytes they take."""
        page_bytes = self._files.values.page_bytes
        rooms = {number_of(row): value_bytes(row.checksum.length, page_bytes) for row in rows}
        self._ledger.free(txn, rooms)
        return sum(rooms.values())

    def _occupied(self, txn: Transaction) -> tuple[int, int]:
        """Bytes of the values that rows name, and bytes that are promised to places.

        What other processes have just written counts as promised too, and what they have just
        deleted is taken off once too often: off by their last batches, for which there is headroom.
        """
        reserved = self._ledger.reserved(txn)
        with self._lock:
            written = list(self._written)
        freed = sum(
            run.size * run.room for runs in self._ledger.freed(txn).values() for run in runs
        )
        with self._files.values.read_buffers() as values:
            live = self._files.values.live_bytes(values)
        promised = sum(
            (run.size - sum(run.first <= number < run.end for number in written)) * run.room
            for run in reserved
        )
        return live - freed, promised
