"""Looks after all namespaces of an lmdb tier, without an engine's geometry.

Engines go on beside it: it reads in slices, and what looks wrong is looked at once more, in the
order in which engines change things (a value is there before its row, and goes after it).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from functools import partial

from tiered_kv.contracts import MaintenanceContext, Reconciliation, StoredNamespace
from tiered_kv.errors import TierError
from tiered_kv.index import FullKey, Holdings, Owners, Row, Transaction
from tiered_kv_lmdb.budget import Budget, number_of
from tiered_kv_lmdb.files import HEAD_BYTES, OWNERS, TierFiles
from tiered_kv_lmdb.ledger import Ledger
from tiered_kv_lmdb.settings import LmdbSettings

__all__ = ["LmdbMaintenance"]

_SLICE = 4_096
"""Records that are read in one transaction."""
_MOST_BLOCKS = 256
"""Blocks that are removed in one transaction."""
_NAMESPACE_BYTES = 8

_NO_VALUE = "rows without a value"
_OTHER_LENGTH = "rows whose value has another length"
_NO_ROW = "values without a row"
_OF_THE_DEAD = "reservations of dead processes"
_NOT_DELETED = "freed values that were not deleted"

logger = logging.getLogger(__name__)


class LmdbMaintenance:
    """A `StoreMaintenance` of an lmdb tier."""

    def __init__(self, context: MaintenanceContext) -> None:
        """Open the tier's directory, which must be there.

        Raises:
            ValueError: the settings are not an lmdb tier's.
            RefuseToStart: the directory is not this tier's, or not fit for LMDB.
            TierError: nothing was stored there yet, or it cannot be opened now.
            NoSpace: the capacity is too small for what lies in the directory.
        """
        settings = context.settings
        if not isinstance(settings, LmdbSettings):
            raise ValueError(f"an lmdb tier takes LmdbSettings, not {type(settings).__name__}")
        self._tier = context.tier
        self._writable = context.writable and settings.writable
        if not (settings.path / "data.mdb").exists():
            raise TierError(
                f"tier {self._tier}: nothing was stored in {settings.path}", tier=self._tier
            )
        self._lock = threading.Lock()
        self._closed = False
        self._files = TierFiles(settings, self._tier, writable=self._writable)
        try:
            self._holdings = Holdings.of(self._files.index)
            self._index = self._holdings.index
            self._ledger = Ledger(self._files.index, self._tier)
            self._owners = Owners(self._files.index.database(OWNERS))
            self._files.open_values(self._forget_all)
            self._values = self._files.values.database("values")
            self._budget = Budget(self._files, self._index, self._ledger, self._tier)
        except BaseException:
            self._files.close()
            raise

    def _forget_all(self) -> None:
        """The values were lost: no row may stay."""
        with self._files.index.write() as txn:
            self._index.clear(txn)
            self._ledger.clear(txn)

    def namespaces(self) -> Sequence[StoredNamespace]:
        """See `StoreMaintenance.namespaces`."""
        self._check_open()
        return self._holdings.namespaces(self._in_use())

    def _in_use(self) -> set[bytes]:
        with self._files.index.read() as txn:
            return self._owners.live_namespaces(txn)

    # ------------------------------------------------------------------------------- reconcile

    def reconcile(self, *, repair: bool) -> Reconciliation:
        """See `StoreMaintenance.reconcile`. Values that were freed and not deleted yet count where
        no engine is there that deletes them with its next store.

        Raises:
            ValueError: `repair` where it was opened with `writable=False`.
            NoSpace: the index has no room for the repair.
            TierError: the disk or the index does not work.
        """
        self._check_open()
        if repair:
            self._check_writable("repair anything")
        lengths = dict(self._all_lengths())
        with self._files.index.read() as txn:
            known = self._ledger.numbers(txn)
            of_the_dead = self._ledger.of_the_dead(txn)
        strays: list[tuple[FullKey, int, Row, str]] = []
        for key, rank, row in self._all_rows():
            known.add(number_of(row))
            wrong = _wrong(row, lengths.get(number_of(row)))
            if wrong is not None:
                strays.append((key, rank, row, wrong))
        strays = self._still_astray(strays)
        orphans = self._still_orphans(lengths.keys() - known)
        with self._files.index.read() as txn:
            pending = 0 if self._owners.live_namespaces(txn) else self._ledger.freed_values(txn)
        found = {
            _NO_VALUE: sum(wrong == _NO_VALUE for *_, wrong in strays),
            _OTHER_LENGTH: sum(wrong == _OTHER_LENGTH for *_, wrong in strays),
            _NO_ROW: len(orphans),
            _OF_THE_DEAD: len(of_the_dead),
            _NOT_DELETED: pending,
        }
        repaired: dict[str, int] = {}
        if repair and any(found.values()):
            repaired = self._repair(strays, orphans, of_the_dead)
            if pending:
                repaired[_NOT_DELETED] = pending
        return Reconciliation(_counted(found), _counted(repaired))

    def _all_lengths(self) -> Iterator[tuple[bytes, int]]:
        """Number and length of every value, without reading one."""
        start, more = b"", True
        while more:
            found: list[tuple[bytes, int]] = []
            with self._files.values.read_buffers() as txn, txn.cursor(self._values) as cursor:
                more = cursor.set_range(start)
                while more and len(found) < _SLICE:
                    found.append((bytes(cursor.key()), len(cursor.value())))
                    more = cursor.next()
            if found:
                start = found[-1][0] + b"\0"
            yield from found

    def _all_rows(self) -> Iterator[tuple[FullKey, int, Row]]:
        """Every sound row."""
        start: FullKey | None = FullKey(b"")
        while start is not None:
            found: list[tuple[FullKey, int, Row]] = []
            after, start = start, None
            with self._files.index.read() as txn:
                for one in self._index.all_rows(txn, after):
                    if len(found) >= _SLICE and one[0] != found[-1][0]:
                        start = one[0]
                        break
                    found.append(one)
            yield from found

    def _still_astray(
        self, strays: Sequence[tuple[FullKey, int, Row, str]]
    ) -> list[tuple[FullKey, int, Row, str]]:
        """Those whose value is wrong now, and whose row is still there after that was seen."""
        wrong_now: list[tuple[FullKey, int, Row, str]] = []
        with self._files.values.read_buffers() as values:
            for key, rank, row, _ in strays:
                value = values.get(number_of(row), db=self._values)
                wrong = _wrong(row, None if value is None else len(value))
                if wrong is not None:
                    wrong_now.append((key, rank, row, wrong))
        with self._files.index.read() as txn:
            return [one for one in wrong_now if self._index.row_of(txn, one[0], one[1]) == one[2]]

    def _still_orphans(self, numbers: set[bytes]) -> list[bytes]:
        """Those that nobody is about to delete, and that are not deleted."""
        if not numbers:
            return []
        with self._files.index.read() as txn:
            left = sorted(numbers - self._ledger.numbers(txn))
        with self._files.values.read_buffers() as values:
            return [n for n in left if values.get(n, db=self._values) is not None]

    def _repair(
        self,
        strays: Sequence[tuple[FullKey, int, Row, str]],
        orphans: Sequence[bytes],
        of_the_dead: Sequence[int],
    ) -> dict[str, int]:
        repaired = {_NO_ROW: len(orphans), _OF_THE_DEAD: len(of_the_dead)}
        for start in range(0, len(strays), _MOST_BLOCKS):
            part = strays[start : start + _MOST_BLOCKS]
            for wrong in self._budget.in_index(partial(self._remove, strays=part)):
                repaired[wrong] = repaired.get(wrong, 0) + 1
        if orphans or of_the_dead:
            self._budget.in_index(lambda txn: self._give_up(txn, orphans, of_the_dead))
        self._budget.delete_freed()
        return repaired

    def _remove(
        self, txn: Transaction, strays: Sequence[tuple[FullKey, int, Row, str]]
    ) -> list[str]:
        """Remove the blocks of rows that are as they were seen; what was wrong with them."""
        there = [one for one in strays if self._index.row_of(txn, one[0], one[1]) == one[2]]
        self._budget.free(txn, self._index.remove(txn, [key for key, *_ in there]))
        return [wrong for *_, wrong in there]

    def _give_up(
        self, txn: Transaction, orphans: Sequence[bytes], of_the_dead: Sequence[int]
    ) -> None:
        self._ledger.free(txn, dict.fromkeys(orphans, 0))
        self._ledger.release(txn, of_the_dead)

    # ------------------------------------------------------------------------------------ drop

    def drop(self, namespace_id: bytes) -> int:
        """See `StoreMaintenance.drop`. LMDB keeps the pages in its file, for blocks to come.

        Raises:
            ValueError: it was opened with `writable=False`, or the namespace is in use.
            NoSpace: the index has no room to note it.
            TierError: the disk or the index does not work.
        """
        self._check_open()
        self._check_writable("drop a namespace")
        if len(namespace_id) != _NAMESPACE_BYTES:
            raise ValueError(f"the id of a namespace is 8 bytes, not {len(namespace_id)}")
        dropped = 0
        while blocks := self._budget.in_index(lambda txn: self._drop_some(txn, namespace_id)):
            dropped += blocks
            self._budget.delete_freed()
        if dropped:
            logger.info(
                "tier %s: %d blocks of namespace %s dropped",
                self._tier,
                dropped,
                namespace_id.hex(),
            )
        return dropped

    def _drop_some(self, txn: Transaction, namespace_id: bytes) -> int:
        if namespace_id in self._owners.live_namespaces(txn):
            raise ValueError(
                f"tier {self._tier}: namespace {namespace_id.hex()} is in use by a running "
                "process; stop it first"
            )
        blocks = self._holdings.blocks(txn, namespace_id, _MOST_BLOCKS)
        if not blocks:  # rows whose block's record was damaged
            for key, _, _ in self._index.all_rows(txn, FullKey(namespace_id)):
                if not key.startswith(namespace_id) or len(blocks) >= _MOST_BLOCKS:
                    break
                blocks.append(key)
        if not blocks:
            self._holdings.forget(txn, namespace_id)
            return 0
        self._budget.free(txn, self._index.remove(txn, blocks))
        return len(set(blocks))

    # ----------------------------------------------------------------------------------- close

    def close(self) -> None:
        """See `StoreMaintenance.close`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._files.close()

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"tier {self._tier}: its maintenance was closed", tier=self._tier)

    def _check_writable(self, what: str) -> None:
        if not self._writable:
            raise ValueError(f"tier {self._tier} was opened for reading only, cannot {what}")


def _wrong(row: Row, length: int | None) -> str | None:
    """What is wrong with a row whose value has this length."""
    if length is None:
        return _NO_VALUE
    head = min(HEAD_BYTES, row.checksum.length)
    return None if length == row.checksum.length - head else _OTHER_LENGTH


def _counted(counts: dict[str, int]) -> dict[str, int]:
    return {what: count for what, count in counts.items() if count}
