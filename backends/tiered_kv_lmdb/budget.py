"""Keeps a tier within its budget: evicts ahead of need, and helps LMDB to pages it may use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TypeVar

from tiered_kv.contracts import NewBlock
from tiered_kv.errors import NoSpace
from tiered_kv.index import BlockIndex, BufferTransaction, OutOfPages, Row, Transaction
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
        self._evicted = 0

    @property
    def evicted(self) -> int:
        """Blocks evicted by this store."""
        return self._evicted

    def count_evicted(self, blocks: int) -> None:
        """Blocks were evicted, in a transaction that is committed now."""
        with self._lock:
            self._evicted += blocks

    def need(self, blocks: Sequence[NewBlock]) -> int:
        """Bytes that the values of these blocks take in the file."""
        return sum(self._room(block.checksum.length) for block in blocks)

    def _room(self, length: int) -> int:
        return value_bytes(length, self._files.values.page_bytes)

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
        need = sum(self._room(memory.nbytes) for _, memory in items)
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
            for number in freed:
                txn.delete(number, db=self._values)
            with txn.cursor(self._values) as cursor:
                cursor.putmulti(items)
        with self._lock:
            self._deleted.update(freed)

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
        total = 0
        for row in rows:
            room = self._room(row.checksum.length)
            self._ledger.free(txn, row.location, room)
            total += room
        return total

    def _occupied(self, txn: Transaction) -> tuple[int, int]:
        """Bytes of the values that rows name, and bytes that are promised to places."""
        reserved, freed = self._ledger.reserved_rooms(txn), self._ledger.freed_rooms(txn)
        with self._files.values.read_buffers() as values:
            written = self._found(values, [*reserved, *freed])
            live = self._files.values.live_bytes(values)
        promised = sum(room for one, room in reserved.items() if one not in written)
        return live - sum(room for one, room in freed.items() if one in written), promised

    def written(self, numbers: Collection[bytes]) -> set[bytes]:
        """Those whose value is in the file."""
        with self._files.values.read_buffers() as values:
            return self._found(values, numbers)

    def _found(self, values: BufferTransaction, numbers: Collection[bytes]) -> set[bytes]:
        # A view of a value reads nothing of it.
        return {one for one in numbers if values.get(one, db=self._values) is not None}
