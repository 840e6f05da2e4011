"""The lmdb store: one value per part of a block in one LMDB file, the index in another.

A part is reserved in the index's ledger, written to the values, then published: row in, reservation
out, in one transaction of the index. Removing is the same backwards: the row goes and the number is
freed in one transaction; the value is deleted by whoever writes next. Numbers are never used twice,
so a reader that finds the row's number finds the row's bytes, or nothing.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from itertools import compress

import numpy as np

from tiered_kv.config import KIB
from tiered_kv.contracts import ChangeBatch, NewBlock, Place, ReadResult, StoreContext, StoreStat
from tiered_kv.errors import NoSpace, RetryLater, TierError, WriteBudgetSpent, reason_in
from tiered_kv.index import (
    BlockIndex,
    BufferTransaction,
    Owners,
    Row,
    Transaction,
    WriteAccount,
)
from tiered_kv.values import BlockKey, BlockStatus
from tiered_kv_lmdb.budget import Budget, number_of
from tiered_kv_lmdb.files import OWNERS, Space, TierFiles
from tiered_kv_lmdb.ledger import NUMBER_BYTES, Ledger
from tiered_kv_lmdb.settings import LmdbSettings

__all__ = ["LmdbStore"]

_MOST_VALUE_BYTES = 2**32 - 1
_COPIED_WITH_GIL_BYTES = 128 * KIB
"""Blocks up to this size are copied without letting go of the GIL: a copy takes less time (10 us)
than getting it back from a thread that keeps it (up to 5 ms, at every block)."""
_NONCE_BYTES = 8
_TURN_SECONDS, _TURN_WAIT_SECONDS = 0.002, 0.010
"""How long a load keeps the turn at most, and how long the next one waits for it. py-lmdb gives the
GIL away at every look-up and wakes whoever wants it, mostly in vain, so that several loads of small
blocks at once take up to three times as long as one after the other. A load whose blocks come from
the disk does not keep others from reading there."""
_SWEEP_SECONDS = 60.0
_SWEEP_AGAIN_SECONDS = 1.0

_MISSING = ReadResult(BlockStatus.MISSING)

logger = logging.getLogger(__name__)


class LmdbStore:
    """A `BlockStore` in two LMDB files; see the contract for what each method owes."""

    def __init__(self, context: StoreContext) -> None:
        """Open the tier's directory.

        Raises:
            RefuseToStart: the directory is not this tier's, or not fit for LMDB.
            TierError: it cannot be opened now.
            NoSpace: the capacity is too small for what lies in the directory.
        """
        settings = context.settings
        if not isinstance(settings, LmdbSettings):
            raise TypeError(f"an lmdb tier is opened with LmdbSettings, not {type(settings)}")
        self._settings = settings
        self._tier = context.tier
        self._writable = context.writable and settings.writable
        self._lock = threading.Lock()
        self._namespace_id = context.namespace.id
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._turn = threading.Lock()
        """One load of small blocks at a time."""
        self._held: set[int] = set()
        """Numbers that this store reserved and has not settled or given up; its places' tokens."""
        self._given_up: set[int] = set()
        self._swept: float | None = None
        self._closed = False
        self._files = TierFiles(settings, context.tier)
        try:
            self._index = BlockIndex(
                self._files.index,
                context.namespace,
                context.geometry,
                log_entries=min(65_536, max(1_024, settings.capacity // 2**14)),
                scoring=context.scoring,
            )
            self._account = WriteAccount(self._files.index, context.tier, settings.write_budget)
            if settings.writable:
                self._ledger = Ledger(self._files.index, context.tier)
            self._files.open_values(self._forget_all)
            self._values = self._files.values.database("values")
            if settings.writable:
                self._budget = Budget(self._files, self._index, self._ledger, context.tier)
            if self._writable:
                self._owners = Owners(self._files.index.database(OWNERS))
                with self._files.index.write() as txn:
                    self._register(txn)
                self._sweep_if_due(_SWEEP_SECONDS)
                self._drop_orphans()
        except BaseException:
            self._files.close()
            raise

    def _register(self, txn: Transaction) -> None:
        """Say that we have the namespace open, and of those who died that they have not."""
        for nonce in self._owners.dead(txn):
            self._owners.forget(txn, nonce)
        self._owners.register(txn, self._nonce, self._namespace_id)

    def _forget_all(self) -> None:
        """The values were lost: no row may stay."""
        with self._files.index.write() as txn:
            self._index.clear(txn)
            self._ledger.clear(txn)

    # ---------------------------------------------------------------------------------- lookup

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `BlockStore.contains`."""
        self._check_open()
        return self._index.contains(keys) if keys else []

    def hottest(self) -> Iterator[BlockKey]:
        """See `RanksByUse.hottest`."""
        self._check_open()
        return iter(self._index.hottest())

    def arrange(self, keys: Sequence[BlockKey]) -> None:
        """See `RanksByUse.arrange`."""
        self._check_writable()
        self._index.arrange(keys)

    def keep(self, keys: Sequence[BlockKey], seconds: float, most: int) -> int:
        """See `KeepsBlocks.keep`."""
        self._check_writable()
        return self._index.keep(keys, seconds, most)

    def kept(self) -> int:
        """See `KeepsBlocks.kept`."""
        self._check_open()
        return self._index.kept()

    def scan(self) -> Iterator[BlockKey]:
        """See `BlockStore.scan`."""
        self._check_open()
        return self._index.scan()

    def changes(self, cursor: int | None) -> ChangeBatch:
        """See `BlockStore.changes`."""
        self._check_open()
        return self._index.changes(cursor)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See `BlockStore.touch`."""
        self._check_open()
        if self._writable:
            self._index.touch(keys)

    def stat(self) -> StoreStat:
        """See `BlockStore.stat`."""
        self._check_open()
        self._files.check_current()
        try:
            used = self._files.disk_bytes()
        except OSError as error:
            raise self._unreachable(error) from error
        written = self._account.written()
        return StoreStat(
            blocks=self._index.count(),
            used_bytes=used,
            capacity_bytes=self._settings.capacity,
            evicted_blocks=self._budget.evicted if self._settings.writable else 0,
            modes=self._files.values.modes(),
            written_bytes=written.ever,
            written_today=written.today,
        )

    def live_bytes(self) -> int:
        """Bytes of the pages of the values' file that hold something; the others are free."""
        self._check_open()
        with self._files.values.read_buffers() as txn:
            return self._files.values.live_bytes(txn)

    # ----------------------------------------------------------------------------------- store

    def reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        """See `BlockStore.reserve`."""
        self._check_writable()
        if not blocks:
            return []
        for length in {checksum.length for _, checksum in blocks}:
            if not 0 < length <= _MOST_VALUE_BYTES:
                raise ValueError(f"a block has 1 to {_MOST_VALUE_BYTES} bytes, not {length}")
        self._sweep_if_due(_SWEEP_SECONDS)
        try:
            return self._reserve_now(blocks)
        except WriteBudgetSpent:
            raise
        except NoSpace:
            # What a process that died meanwhile had reserved may be what is missing.
            if not self._sweep_if_due(_SWEEP_AGAIN_SECONDS):
                raise
            return self._reserve_now(blocks)

    def _reserve_now(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        try:
            space = self._files.space()
        except OSError as error:
            raise self._unreachable(error) from error
        given, missing, evicted = self._budget.in_index(
            lambda txn: self._reserve(txn, blocks, space)
        )
        with self._lock:
            self._held.update(given)
        self._budget.count_evicted(evicted)
        if len(given) == len(blocks):
            return list(map(Place, blocks, given))
        taken = iter(given)
        return [
            Place(block, next(taken)) if is_missing else None
            for block, is_missing in zip(blocks, missing, strict=True)
        ]

    def _reserve(
        self, txn: Transaction, blocks: Sequence[NewBlock], space: Space
    ) -> tuple[range, list[bool], int]:
        """What is reserved for those blocks that are missing, which these are, and how many were
        evicted."""
        keys = [key for key, _ in blocks]
        there = self._index.with_row(txn, keys)
        missing = [key not in there for key in keys]
        wanted = list(compress(blocks, missing)) if there else blocks
        if not wanted:
            return range(0), missing, 0
        rooms = self._budget.rooms(wanted)
        self._account.take(txn, sum(rooms))
        evicted = self._budget.evict_for(txn, sum(rooms), space)
        first = self._index.next_generation(txn, len(wanted))
        return self._ledger.reserve(txn, first, rooms), missing, evicted

    def write(self, places: Sequence[Place], memory: Sequence[memoryview]) -> None:
        """See `BlockStore.write`."""
        self._check_writable()
        lengths = [checksum.length for (_, checksum), _ in places]
        sizes = [view.nbytes for view in memory]
        if lengths != sizes:
            if len(lengths) != len(sizes):
                raise ValueError(f"{len(lengths)} places but {len(sizes)} pieces of memory")
            pairs = zip(lengths, sizes, strict=True)
            length, size = next((length, size) for length, size in pairs if length != size)
            raise ValueError(f"memory of {size} bytes for a block of {length} bytes")
        if places:
            numbers = _numbers(places)
            if list(map(len, memory)) != sizes:
                memory = list(map(_octets, memory))
            with self._files.index.read() as txn:
                self._ledger.check_reserved(txn, numbers)
            self._budget.put(numbers, memory)

    def publish(self, places: Sequence[Place]) -> None:
        """See `BlockStore.publish`."""
        self._check_writable()
        if not places:
            return
        numbers = _numbers(places)
        blocks = [
            (key, Row(checksum, 0, location, number))
            for ((key, checksum), _), number, location in zip(
                places, numbers, self._budget.locations(numbers), strict=True
            )
        ]
        self._budget.in_index(lambda txn: self._publish(txn, blocks, numbers))
        self._let_go(numbers)

    def _publish(
        self,
        txn: Transaction,
        blocks: Sequence[tuple[BlockKey, Row]],
        numbers: Sequence[int],
    ) -> None:
        self._ledger.settle(txn, numbers)
        self._budget.free(txn, self._index.publish(txn, blocks))

    def _let_go(self, numbers: Collection[int]) -> None:
        self._budget.settled(numbers)
        with self._lock:
            self._held.difference_update(numbers)

    def abandon(self, places: Sequence[Place]) -> None:
        """See `BlockStore.abandon`."""
        self._check_writable()
        if places:
            self._release(_numbers(places))

    def _release(self, numbers: Collection[int]) -> None:
        try:
            self._budget.in_index(lambda txn: self._ledger.release(txn, numbers))
        except (TierError, RetryLater) as error:
            # The next sweep, here or after our end elsewhere, gives it back.
            logger.warning(
                "tier %s: room not given back yet: %s", self._tier, reason_in(self._tier, error)
            )
            with self._lock:
                self._given_up.update(numbers)
                self._swept = None
        self._let_go(numbers)

    # ------------------------------------------------------------------------------------ load

    def read(self, keys: Sequence[BlockKey], memory: Sequence[memoryview]) -> list[ReadResult]:
        """See `BlockStore.read`."""
        self._check_open()
        if len(keys) != len(memory):
            raise ValueError(f"{len(keys)} keys but {len(memory)} pieces of memory")
        if not keys:
            return []
        results = [_MISSING] * len(keys)
        gone: list[int] = []
        with ExitStack() as turn:
            if self._turn.acquire(timeout=_TURN_WAIT_SECONDS):
                turn.callback(self._turn.release)
            until = time.monotonic() + _TURN_SECONDS
            with self._files.index.read() as txn:
                rows = self._index.rows(txn, keys)
            with self._files.values.read_buffers() as values:
                for place, (row, view) in enumerate(zip(rows, memory, strict=True)):
                    if row is None or row.checksum.length > view.nbytes:
                        continue
                    if row.checksum.length > _COPIED_WITH_GIL_BYTES or time.monotonic() > until:
                        turn.close()
                    if self._copy(values, row, view):
                        results[place] = ReadResult(BlockStatus.OK, row.checksum)
                    else:
                        gone.append(place)
        if gone:
            self._distrust([(keys[place], rows[place]) for place in gone])
        return results

    def _copy(self, values: BufferTransaction, row: Row, memory: memoryview) -> bool:
        """False where the row's value is not there."""
        (length, _, _), _, location, _ = row
        head = location[NUMBER_BYTES:]
        at = len(head)
        value = values.get(location[:NUMBER_BYTES], None, self._values)
        if value is None or at + len(value) != length:
            return False
        memory = _octets(memory)
        memory[:at] = head
        if length <= _COPIED_WITH_GIL_BYTES:
            memory[at:length] = value
        else:
            target = np.frombuffer(memory, np.uint8, length - at, at)
            np.copyto(target, np.frombuffer(value, np.uint8))
        return True

    def _distrust(self, found: Sequence[tuple[BlockKey, Row | None]]) -> None:
        """A row without its value was evicted meanwhile, or leads nowhere."""
        keys = [key for key, _ in found]
        with self._files.index.read() as txn:
            now = self._index.rows(txn, keys)
        self._index.distrust(
            key for (key, before), after in zip(found, now, strict=True) if before == after
        )

    # ---------------------------------------------------------------------------------- remove

    def discard(self, blocks: Sequence[NewBlock]) -> int:
        """See `BlockStore.discard`."""
        self._check_writable()
        if not blocks:
            return 0
        return self._budget.in_index(lambda txn: self._discard(txn, blocks))

    def _discard(self, txn: Transaction, blocks: Sequence[NewBlock]) -> int:
        rows = self._index.rows(txn, [block.key for block in blocks])
        keys = [
            block.key
            for block, row in zip(blocks, rows, strict=True)
            if row is not None and row.checksum == block.checksum
        ]
        return self._remove(txn, keys)

    def delete(self, keys: Sequence[BlockKey]) -> int:
        """See `BlockStore.delete`."""
        self._check_writable()
        if not keys:
            return 0
        return self._budget.in_index(lambda txn: self._remove(txn, keys))

    def _remove(self, txn: Transaction, keys: Sequence[BlockKey]) -> int:
        there = self._index.present(txn, dict.fromkeys(self._index.full_keys(keys)))
        self._budget.free(txn, self._index.remove(txn, there))
        return len(there)

    # ----------------------------------------------------------------------------------- sweep

    def _sweep_if_due(self, seconds: float) -> bool:
        """Free what dead processes reserved and what could not be given back, if the last time is
        longer ago; whether it was."""
        with self._lock:
            if self._swept is not None and time.monotonic() - self._swept < seconds:
                return False
            self._swept = time.monotonic()
            given_up, self._given_up = self._given_up, set()
        with self._files.index.read() as txn:
            reserved = given_up.union(self._ledger.of_the_dead(txn))
        if reserved:
            self._release(reserved)
        return True

    def _drop_orphans(self) -> None:
        """Free the values that nothing names, because a record of the index was damaged, or a
        place was written after another process had taken its owner for dead."""
        with self._files.values.read() as values, self._files.index.read() as txn:
            rows = txn.stat(self._files.index.database("rows"))["entries"]
            if values.stat(self._values)["entries"] <= rows + len(self._ledger.numbers(txn)):
                return
        with self._files.index.write() as txn:
            named = self._ledger.numbers(txn)
            named.update(number_of(row) for _, _, row in self._index.all_rows(txn))
            with self._files.values.read() as values, values.cursor(self._values) as cursor:
                orphans = set(cursor.iternext(values=False)) - named
            self._ledger.free(txn, dict.fromkeys(orphans, 0))
        if orphans:
            logger.warning("tier %s: %d values without a row removed", self._tier, len(orphans))

    # ----------------------------------------------------------------------------------- close

    def close(self) -> None:
        """See `BlockStore.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            held = set(self._held)
        if self._writable:
            try:
                self._files.index.check_usable()
                self._index.flush()
                if held:
                    self._release(held)
                self._budget.delete_freed()
                with self._files.index.write() as txn:
                    self._owners.forget(txn, self._nonce)
            except (TierError, RetryLater) as error:
                logger.warning(
                    "tier %s: not all was written at the end: %s",
                    self._tier,
                    reason_in(self._tier, error),
                )
        self._files.close()

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(
                f"tier {self._tier}: the store of {self._settings.path} was closed",
                tier=self._tier,
            )

    def _check_writable(self) -> None:
        self._check_open()
        if not self._writable:
            raise ValueError(f"tier {self._tier} was opened for reading only")

    def _unreachable(self, error: OSError) -> TierError:
        return TierError(
            f"tier {self._tier}: {self._settings.path} does not answer: {error}", tier=self._tier
        )


def _numbers(places: Sequence[Place]) -> list[int]:
    tokens = [token for _, token in places]
    numbers = [token for token in tokens if isinstance(token, int)]
    if len(numbers) < len(tokens):
        raise ValueError(f"a place of another store: {tokens!r}")
    return numbers


def _octets(memory: memoryview) -> memoryview:
    return memory if memory.format == "B" and memory.ndim == 1 else memory.cast("B")
