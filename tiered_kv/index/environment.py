"""One LMDB environment per directory and process: opened, vetted, shared and closed here.

LMDB 0.9 is pinned. Rules of LMDB that this module keeps for its callers: a file is opened once
per process; never used after a fork; no transaction runs while the map is changed or closed; a
file that may be damaged is checked before LMDB maps it; dead readers are cleared.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

import lmdb

from tiered_kv.errors import IdentityError, TieredKVError, TierError, TierGone, reason_in
from tiered_kv.index import directory, identity
from tiered_kv.index.directory import DATA
from tiered_kv.index.gate import Gate
from tiered_kv.index.transactions import BufferTransaction, Database, Transaction
from tiered_kv.index.translation import FOREIGN, translated
from tiered_kv.index.turns import Turn
from tiered_kv.index.vetting import Emptied, mark_clean, vet_for_reading, vet_for_writing
from tiered_kv.index.witness import Witness
from tiered_kv.index.writemap import Durability, WriteMap, open_lmdb

__all__ = ["BufferTransaction", "Database", "Durability", "Environment", "Transaction"]

_OPEN_SECONDS = 120.0
"""Longest wait for another process that opens the same directory: it may be checking it."""
_CLOSE_SECONDS = 10.0
_WRITE_SECONDS = 10.0
"""Longest wait for other threads and processes that write; a transaction takes milliseconds."""
_CLEAR_SECONDS = 60.0

logger = logging.getLogger(__name__)


class Environment:
    """An open LMDB environment. `open` makes it; every `open` is paired with one `close`.

    Thread-safe; a transaction belongs to the thread that began it.
    """

    _open: ClassVar[dict[tuple[int, int], Environment]] = {}
    _opening: ClassVar[dict[tuple[int, int], threading.Lock]] = {}
    _guard: ClassVar[threading.Lock] = threading.Lock()
    _devices: ClassVar[dict[Path, int]] = {}
    _inherited: ClassVar[list[Environment]] = []
    """Environments of the parent process, kept so that nothing closes them in a child."""

    path: Path
    tier: str
    writable: bool
    identity: bytes
    """16 random bytes made when the environment was created empty. Segments of a store carry them,
    so that data of an earlier life of the directory can be told."""
    map_bytes: int
    """The most that `data.mdb` can grow to."""
    page_bytes: int
    crashed: bool
    """Whether the machine stopped without a clean close before this process, the first one since,
    opened it: the last transaction may be undone, and what was written after it not."""

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        kind: str,
        tier: str,
        max_bytes: int,
        writable: bool,
        durability: Durability = "none",
        force: bool = False,
        own_budget: Collection[str] = (),
        on_empty: Callable[[Emptied], None] | None = None,
        on_clean: Callable[[], None] | None = None,
        writemap: WriteMap | None = None,
    ) -> Environment:
        """Open the environment in directory `path`, or share the one this process has open.

        Args:
            path: a directory of its own; made (0700) when missing and `writable`.
            kind: which store the directory belongs to ("nvme", "lmdb").
            tier: name of the tier, for errors and logs.
            max_bytes: most bytes that this directory may take, other files in it included.
            writable: what the tier's `access` says, not what one store object may do: the
                scheduler's half opens a read-write tier with True as well.
            durability: "none": nothing is flushed before a clean close; contents are given up when
                the machine crashed. "batch": each transaction's data is flushed, the last
                transaction may be undone by a crash of the machine. "full": nothing is lost.
            force: open it on a network file system too.
            own_budget: names of subdirectories that do not count against `max_bytes`.
            on_empty: called while no other process can have the directory open, whenever the
                environment starts empty, with the reason: the store drops its data there. A crash
                in it leads to its being called again.
            on_clean: called by the last process that closes it, before it is marked clean: the
                store flushes its data there. The one of the first `open` in a process counts.
            writemap: write into the map where that is safe; `modes` says whether it is in effect.

        Raises:
            IdentityError: the directory belongs to something else.
            FormatError: it was written by a newer format.
            UnsupportedError: it lies on a network file system.
            TierError: it cannot be opened now.
            NoSpace: `max_bytes` leaves no room.
        """
        try:
            if writable:
                directory.refuse_empty_mount_point(path, tier, cls._devices.get(path))
                directory.make_private(path)
            key = directory.number_of(path)
            with cls._lock_of(key):
                shared = cls._open.get(key)
                # Its number may be that of a directory that was deleted.
                if shared is not None and shared._is_current():
                    shared._share(kind, tier, writable)
                    return shared
                cls._refuse_inherited(key, path, tier)
                if not force:
                    directory.refuse_network_file_system(path)
                with directory.directory_lock(path, tier, _OPEN_SECONDS):
                    opened = cls(path, key, kind, tier, writable, durability)
                    opened._on_clean = on_clean
                    opened._start(max_bytes, own_budget, on_empty, writemap)
                cls._open[key] = opened
                cls._devices[path] = key[0]
                return opened
        except (lmdb.Error, OSError) as error:
            raise translated(error, tier, path) from error

    @classmethod
    def _lock_of(cls, key: tuple[int, int]) -> threading.Lock:
        """One lock per directory: a disk that hangs must not keep others from being opened."""
        with cls._guard:
            return cls._opening.setdefault(key, threading.Lock())

    def __init__(
        self,
        path: Path,
        key: tuple[int, int],
        kind: str,
        tier: str,
        writable: bool,
        durability: Durability,
    ) -> None:
        """Not for callers: use `open`."""
        self.path, self.tier, self.writable = path, tier, writable
        self.after_commit: list[Callable[[], None]] = []
        """Called when the write transaction that runs is committed; forgotten if it is not."""
        self._kind = kind
        self._durability: Durability = durability
        self._pid = os.getpid()
        self._uses = 1
        self._key = key
        self._users_fd: int | None = None
        self._witness: Witness | None = None
        self._file = (0, 0)
        self._locks = True
        self._databases: dict[str, Database] = {}
        self._gate, self._turn = Gate(), Turn(path, tier)
        self._writemap, self._cleared = "off", 0.0
        self._on_clean: Callable[[], None] | None = None

    @classmethod
    def _refuse_inherited(cls, key: tuple[int, int], path: Path, tier: str) -> None:
        """LMDB opens a file once per process, and closing what the parent has open would take its
        readers' places from it."""
        if any(one._key == key and one._pid != os.getpid() for one in cls._inherited):
            raise TierError(
                f"tier {tier}: {path} was open before the fork of this process; open it in a "
                "process that was started with the spawn method",
                tier=tier,
            )

    def _share(self, kind: str, tier: str, writable: bool) -> None:
        if kind != self._kind:
            raise IdentityError(
                f"tier {tier} ({kind}) and tier {self.tier} ({self._kind}) share the directory "
                f"{self.path}; give each a directory of its own"
            )
        if writable and not self.writable:
            raise TierError(
                f"tier {tier}: {self.path} is open read-only in this process (tier {self.tier}) "
                "and cannot be opened for writing as well",
                tier=tier,
            )
        self._uses += 1

    # ------------------------------------------------------------------------------------ open

    def _start(
        self,
        max_bytes: int,
        own_budget: Collection[str],
        on_empty: Callable[[Emptied], None] | None,
        writemap: WriteMap | None,
    ) -> None:
        """Vet and open. The directory's lock is held."""
        if self.writable:
            vetted = vet_for_writing(
                self.path,
                kind=self._kind,
                tier=self.tier,
                durability=self._durability,
                max_bytes=max_bytes,
                own_budget=own_budget,
                on_empty=on_empty,
            )
        else:
            vetted = vet_for_reading(
                self.path, kind=self._kind, tier=self.tier, max_bytes=max_bytes
            )
        self.map_bytes, self._users_fd = vetted.map_bytes, vetted.users_fd
        self._locks, self.crashed = vetted.locks, vetted.crashed
        try:
            self._lmdb, self._writemap = open_lmdb(
                self.path,
                writable=self.writable,
                durability=self._durability,
                map_bytes=self.map_bytes,
                locks=self._locks,
                writemap=writemap,
            )
            try:
                self._file = directory.number_of(self.path / DATA)
                if self._users_fd is not None:
                    self._witness = Witness(self.path, self._users_fd)
                with self._turn.taken(_WRITE_SECONDS) if self.writable else nullcontext():
                    self._greet()
            except BaseException:
                self._lmdb.close()
                raise
        except BaseException:
            self._let_go()
            raise

    def _greet(self) -> None:
        self.page_bytes = self._lmdb.stat()["psize"]
        if cleared := self._clear_dead_readers(0.0):
            logger.info("tier %s: %d dead readers cleared", self.tier, cleared)
        self._databases["meta"], self.identity = identity.greet(
            self._lmdb, self.path, self._kind, self._witness
        )

    # ---------------------------------------------------------------------------- transactions

    def read(self) -> AbstractContextManager[Transaction]:
        """A read transaction. Keep it short: it pins every page freed meanwhile."""
        return self._reading(buffers=False)

    def read_buffers(self) -> AbstractContextManager[BufferTransaction]:
        """Like `read`; values are views of the map, valid until the transaction ends: whoever
        keeps one longer reads what is not there."""
        return self._reading(buffers=True)

    @contextmanager
    def _reading(self, *, buffers: bool) -> Iterator[Any]:
        try:
            txn = self._begin(write=False, buffers=buffers)
            try:
                yield txn
            finally:
                txn.abort()
                self._gate.leave()
        except FOREIGN as error:
            raise translated(error, self.tier, self.path) from error

    @contextmanager
    def write(self, wait: float | None = None) -> Iterator[Transaction]:
        """The one write transaction of all processes; commits at the end, aborts on an exception.

        Keep it short. Not reentrant. `wait`: seconds for others that write, 10 if not given.

        Raises:
            NoSpace: the budget or the disk is full.
            TierError: LMDB failed, or others did not end in time.
        """
        if not self.writable:
            raise ValueError(f"{self.path} is open read-only")
        self.check_usable()
        try:
            self._turn.take(_WRITE_SECONDS if wait is None else wait)
        except OSError as error:
            raise translated(error, self.tier, self.path) from error
        try:
            self._clear_dead_readers(_CLEAR_SECONDS)
            txn: Transaction = self._begin(write=True)
            try:
                if self._witness is not None:
                    self._witness.begins()
                yield txn
                txn.commit()
                for call in self.after_commit:
                    call()
            finally:
                txn.abort()  # does nothing after a commit
                self.after_commit.clear()
                if self._witness is not None:  # none in a child that was forked meanwhile
                    self._witness.ended()
                self._gate.leave()
        except FOREIGN as error:
            raise translated(error, self.tier, self.path) from error
        finally:
            self._turn.give()

    def _begin(self, *, write: bool, buffers: bool = False) -> Any:
        for last in (False, True):
            self._enter()
            try:
                begin = self._lmdb.begin
                return begin(write=write, buffers=True) if buffers else begin(write=write)
            except lmdb.MapResizedError:
                self._gate.leave()
                if last:
                    raise
                self._adopt_map()
            except lmdb.ReadersFullError:
                self._gate.leave()
                if last or self._lmdb.reader_check() == 0:
                    raise
            except BaseException:
                self._gate.leave()
                raise
        raise AssertionError  # pragma: no cover - the loop returns or raises

    def _enter(self) -> None:
        self.check_usable()
        if not self._gate.enter(_CLOSE_SECONDS):
            self.check_usable()
            raise self._unusable("its map is being changed")

    def _adopt_map(self) -> None:
        """Another process has a larger map and used it: take its size, between transactions."""
        with self._gate.alone(_CLOSE_SECONDS) as alone:
            if not alone:
                raise self._unusable("another process has enlarged it while it is read here")
            # Never less than the file where the map is written to: LMDB would cut it, under whoever
            # has a still larger map and has not used it yet.
            size = (self.path / DATA).stat().st_size if self._writemap == "on" else 0
            self._lmdb.set_mapsize(size)

    def check_usable(self) -> None:
        """Raise `TierError` when the environment was closed, or opened before a fork."""
        if os.getpid() != self._pid:
            raise self._unusable(
                f"it was opened by process {self._pid} before the fork; start child processes with "
                "the spawn method, or before it is opened"
            )
        if self._gate.is_shut:
            raise self._unusable("it was closed")

    def check_current(self) -> None:
        """Raise `TierGone` when `data.mdb` was removed or replaced since it was opened here: what
        is stored from now on would never be seen here."""
        self.check_usable()
        if not self._is_current():
            raise TierGone(
                f"tier {self.tier}: {self.path / DATA} was removed or replaced while it was open",
                tier=self.tier,
            )

    def _is_current(self) -> bool:
        with suppress(OSError):
            return directory.number_of(self.path / DATA) == self._file
        return False

    def _unusable(self, reason: str) -> TierError:
        return TierError(f"tier {self.tier}: {self.path} cannot be used: {reason}", tier=self.tier)

    def database(self, name: str) -> Database:
        """Handle of a named database, made when missing. Not inside a transaction.

        Raises:
            TierError: it is missing and the environment is read-only.
        """
        self.check_usable()
        handle = self._databases.get(name)
        if handle is None:
            try:
                if self.writable:
                    with self.write() as txn:
                        handle = self._lmdb.open_db(name.encode(), txn)
                else:
                    handle = self._lmdb.open_db(name.encode(), create=False)
            except lmdb.Error as error:
                raise translated(error, self.tier, self.path) from error
            self._databases[name] = handle
        return handle

    def live_bytes(self, txn: Transaction | BufferTransaction) -> int:
        """Bytes of all pages that hold something, in the databases that were opened here; the
        other pages of the file are free or wait for readers to end."""
        pages = 2
        for database in (None, *self._databases.values()):
            stat = txn.stat(database) if database is not None else self._lmdb.stat()
            pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return pages * self.page_bytes

    def clear_dead_readers(self) -> int:
        """Free the places, and the pages, of readers whose process died; how many there were.
        `write` does it every minute."""
        self.check_usable()
        return self._clear_dead_readers(0.0)

    def _clear_dead_readers(self, seconds: float) -> int:
        if not self._locks or time.monotonic() - self._cleared < seconds:
            return 0
        self._cleared = time.monotonic()
        return self._lmdb.reader_check()

    def sync(self) -> None:
        """Flush to the disk, whatever the durability."""
        self._enter()
        try:
            self._lmdb.sync(True)
        except lmdb.Error as error:
            raise translated(error, self.tier, self.path) from error
        finally:
            self._gate.leave()

    def modes(self) -> dict[str, str]:
        """What is in effect, for logs, `check` and stats."""
        return {
            "lmdb": ".".join(str(part) for part in self._lmdb.lib_version()),
            "durability": self._durability,
            "writemap": self._writemap,
            "access": "read_write" if self.writable else "read",
            "reader_locks": "on" if self._locks else "off",
        }

    # ----------------------------------------------------------------------------------- close

    def close(self) -> None:
        """One user less. The last one in the process closes, the last process marks it clean.

        Waits at most 10 s for transactions of other threads; after that the environment is left
        open until the process ends, since closing it under them would kill the process.
        """
        if os.getpid() != self._pid:
            return
        with self._lock_of(self._key):
            if self._uses == 0:
                return
            self._uses -= 1
            if self._uses:
                return
            if self._open.get(self._key) is self:
                del self._open[self._key]
            if not self._gate.shut(_CLOSE_SECONDS):
                logger.warning("tier %s: %s is still in use, not closed", self.tier, self.path)
                self._inherited.append(self)
                return
            try:
                self._finish()
            except (OSError, lmdb.Error, TieredKVError) as error:
                # Unmarked, the directory is checked when it is opened next; nothing is lost.
                why = reason_in(self.tier, error)
                logger.warning("tier %s: %s was not closed cleanly: %s", self.tier, self.path, why)
            finally:
                self._lmdb.close()
                self._let_go()

    def _finish(self) -> None:
        # What was deleted is not marked, and least of all what another one made in its place.
        if self._users_fd is not None and self._is_current():
            with directory.directory_lock(self.path, self.tier, _CLOSE_SECONDS):
                self._lmdb.sync(True)
                self._lmdb.close()
                mark_clean(self.path, self._users_fd, self._kind, self._durability, self._on_clean)

    def _let_go(self) -> None:
        self._witness = None
        self._turn.close()
        if self._users_fd is not None:
            if os.getpid() == self._pid:
                directory.unlock(self._users_fd)
            else:  # a copy: the lock is the parent's
                os.close(self._users_fd)
            self._users_fd = None

    @classmethod
    def _after_fork(cls) -> None:
        """In a child: what the parent has open is not ours to use or to close."""
        for environment in cls._open.values():
            with suppress(OSError):
                environment._let_go()
        cls._inherited.extend(cls._open.values())
        cls._open = {}
        cls._opening = {}
        cls._guard = threading.Lock()


os.register_at_fork(after_in_child=Environment._after_fork)
