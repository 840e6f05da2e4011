"""Keeps a tier within its budget: evicts ahead of need, and helps LMDB to pages it may use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from tiered_kv.contracts import NewBlock
from tiered_kv.errors import NoSpace
from tiered_kv.index import BlockIndex, OutOfPages, Row, Transaction
from tiered_kv_lmdb.files import Space, TierFiles, value_bytes
from tiered_kv_lmdb.ledger import Ledger

__all__ = ["Budget"]

_EVICT_AT_ONCE = 4
_LEAST_EVICTED_BYTES = 65_536
_TRIES = 3

T = TypeVar("T")


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
        self._written: set[bytes] = set()
        """Numbers that are reserved and whose value is in the file, as far as this store wrote."""
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
        return [value_bytes(block.checksum.length, page_bytes) for block in blocks]

    def all_written(self, numbers: Collection[bytes]) -> bool:
        """Whether all of them were written and not yet settled."""
        with self._lock:
            return self._written.issuperset(numbers)

    def settled(self, numbers: Iterable[bytes]) -> None:
        """These are not reserved any more."""
        with self._lock:
            self._written.difference_update(numbers)

    # --------------------------------------------------------------------------------- writing

    def in_index(self, act: Callable[[Transaction], T]) -> T:
        """Run a write transaction of the index; where LMDB runs out of pages, make room and try
        again, so that `act` may run several times."""
        for _ in range(_TRIES - 1):
            try:
                return self._in_index_once(act)
            except OutOfPages:
                self._make_room(_LEAST_EVICTED_BYTES)
        return self._in_index_once(act)

    def _in_index_once(self, act: Callable[[Transaction], T]) -> T:
        with self._lock:
            deleted = frozenset(self._deleted)
        with self._files.index.write() as txn:
            self._ledger.forget(txn, deleted)
            result = act(txn)
        with self._lock:
            self._deleted -= deleted
        return result

    def put(self, items: Sequence[tuple[bytes, memoryview]]) -> None:
        """Write (number, bytes) pairs in the order of their numbers, and delete freed values in
        the same transaction; where LMDB runs out of pages, make room and try again."""
        page_bytes = self._files.values.page_bytes
        need = sum(value_bytes(memory.nbytes, page_bytes) for _, memory in items)
        for _ in range(_TRIES - 1):
            try:
                self._put_once(items)
                return
            except OutOfPages:
                self._make_room(need)
        self._put_once(items)

    def _put_once(self, items: Sequence[tuple[bytes, memoryview]]) -> None:
        with self._files.index.read() as txn:
            freed = self._ledger.freed(txn)
        with self._files.values.write() as txn:
            for numbers in freed.values():
                for number in numbers:
                    txn.delete(number, db=self._values)
            with txn.cursor(self._values) as cursor:
                cursor.putmulti(items)
        with self._lock:
            self._deleted.update(freed)
            self._written.update(number for number, _ in items)

    def _make_room(self, need: int) -> None:
        """Evict twice what is needed, and let two transactions pass in both files, so that LMDB
        may use the pages."""
        both = (self._files.index, self._files.values)
        for environment in both:
            environment.clear_dead_readers()
        with suppress(NoSpace):
            evicted, target = 0, 2 * need
            with self._files.index.write() as txn:
                while target > 0:
                    count, room = self._evict(txn)
                    if count == 0:
                        break
                    evicted += count
                    target -= room
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
        while (
            occupied + promised + need > limit or index.live_bytes(txn) > index.map_bytes * 3 // 4
        ):
            count, room = self._evict(txn) if need + promised <= limit else (0, 0)
            if count == 0:
                raise NoSpace(
                    f"tier {self._tier}: no room for {need} bytes: {limit} bytes may hold blocks "
                    f"now, of which {promised} are promised to others; the disk has "
                    f"{space.disk_free} bytes free, of which {space.floor} stay free"
                )
            evicted += count
            occupied -= room
        return evicted

    def _evict(self, txn: Transaction) -> tuple[int, int]:
        """Evict a few blocks: how many there were, and the bytes of their values."""
        victims = self._index.oldest(txn, 0, _EVICT_AT_ONCE)
        return len(victims), self.free(txn, self._index.remove(txn, victims))

    def free(self, txn: Transaction, rows: Sequence[Row]) -> int:
        """Have the values of removed rows deleted; the bytes they take."""
        page_bytes = self._files.values.page_bytes
        rooms = {row.location: value_bytes(row.checksum.length, page_bytes) for row in rows}
        self._ledger.free(txn, rooms)
        return sum(rooms.values())

    def _occupied(self, txn: Transaction) -> tuple[int, int]:
        """Bytes of the values that rows name, and bytes that are promised to places.

        What other processes have just written counts as promised too, and what they have just
        deleted is taken off once too often: off by their last batches, for which there is headroom.
        """
        reserved = self._ledger.reserved_rooms(txn)
        with self._lock:
            written = self._written & reserved.keys()
        freed = sum(sum(rooms.values()) for rooms in self._ledger.freed(txn).values())
        with self._files.values.read_buffers() as values:
            live = self._files.values.live_bytes(values)
        promised = sum(room for number, room in reserved.items() if number not in written)
        return live - freed, promised
