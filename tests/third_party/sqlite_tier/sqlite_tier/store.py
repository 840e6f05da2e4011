"""The store: one row per block and rank, its bytes in a table beside, everything in transactions.

A part is published by clearing `owner`, the store object that reserved it: its process in the upper
bits, so that what dead processes left is found. A block is visible when the
published parts are as many as there are ranks.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path

from sqlite_tier.settings import SqliteSettings

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import (
    ChangeBatch,
    NewBlock,
    Place,
    ReadResult,
    StoreContext,
    StoreStat,
)
from tiered_kv.errors import ConfigError, FormatError, NoSpace, TierError
from tiered_kv.values import BlockKey, BlockStatus, ChecksumKind

__all__ = ["SqliteStore", "alive"]

FILE = "blocks.sqlite"
APPLICATION_ID = 0x54494B56
FORMAT = 2
PAGE = 4096
ROW_BYTES = 2 * PAGE
"""What a block may cost beside its bytes: a page that is not full, and its rows."""
LOG_ENTRIES = 65_536
BUSY_SECONDS = 5.0

SCHEMA = """
CREATE TABLE part (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace BLOB NOT NULL, key BLOB NOT NULL, rank INTEGER NOT NULL,
    length INTEGER NOT NULL, value BLOB NOT NULL, kind TEXT NOT NULL,
    owner INTEGER, used INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX published ON part (namespace, key, rank) WHERE owner IS NULL;
CREATE TABLE bytes (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE change (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace BLOB NOT NULL, key BLOB NOT NULL, added INTEGER NOT NULL
);
CREATE TABLE namespace (id BLOB PRIMARY KEY, told TEXT NOT NULL);
CREATE TABLE writer (owner INTEGER PRIMARY KEY, namespace BLOB NOT NULL);
"""
VISIBLE = "SELECT COUNT(*) FROM part WHERE namespace = ? AND key = ? AND owner IS NULL"


class SqliteStore:
    """A `BlockStore`; see the contract for the rules of every method."""

    def __init__(self, context: StoreContext) -> None:
        settings = context.settings
        if not isinstance(settings, SqliteSettings):
            raise ValueError(f"a sqlite store takes SqliteSettings, not {type(settings).__name__}")
        self.settings = settings
        self._tier = context.tier
        self._namespace = context.namespace.id
        self._rank = context.geometry.rank
        self._ranks = context.geometry.world_size
        self._capacity = settings.capacity
        self._budget = settings.capacity * 3 // 4
        largest = max(group.block_bytes for group in context.geometry.groups)
        if largest + ROW_BYTES > self._budget:
            raise ConfigError(
                f"tier {self._tier}: a capacity of {settings.capacity} bytes cannot hold one block "
                f"of {largest} bytes; expected at least {(largest + ROW_BYTES) * 4 // 3}",
                key="capacity",
            )
        self._path: Path = settings.path
        self._writable = context.writable
        self._pid = os.getpid()
        self._owner = self._pid << 32 | secrets.randbits(32)
        self._lock = threading.RLock()
        self._evicted = 0
        self._database = self._open(settings.path / FILE)
        if context.writable:
            try:
                self._introduce(context)
            except BaseException:
                self._database.close()
                raise

    def _introduce(self, context: StoreContext) -> None:
        """Record what is stored here, for tools that have no engine, and that it is in use."""
        told = json.dumps(
            {
                "fields": dict(context.namespace.fingerprint.fields),
                "epoch": context.namespace.epoch.hex(),
                "groups": [asdict(group) for group in context.geometry.groups],
                "ranks": context.geometry.world_size,
            }
        )
        with self._changing("introduce a namespace to") as cursor:
            cursor.execute(
                "INSERT OR REPLACE INTO namespace VALUES (?, ?)", (self._namespace, told)
            )
            cursor.execute("INSERT INTO writer VALUES (?, ?)", (self._owner, self._namespace))

    def _open(self, file: Path) -> sqlite3.Connection:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            database = sqlite3.connect(
                file, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            text = f"tier {self._tier}: cannot open {file}: {error}"
            raise TierError(text, tier=self._tier) from error
        try:
            self._prepare(database)
        except sqlite3.DatabaseError as error:
            database.close()
            raise FormatError(
                f"tier {self._tier}: {file} is no sqlite tier ({error}); give the tier a directory "
                "of its own"
            ) from error
        except BaseException:
            database.close()
            raise
        return database

    def _prepare(self, database: sqlite3.Connection) -> None:
        database.execute(f"PRAGMA page_size = {PAGE}")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = OFF")
        database.execute(f"PRAGMA wal_autocheckpoint = {max(1, self._capacity // 16 // PAGE)}")
        database.execute(f"PRAGMA max_page_count = {self._capacity * 7 // 8 // PAGE}")
        database.execute("BEGIN IMMEDIATE")
        (application,) = database.execute("PRAGMA application_id").fetchone()
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if application == 0 and not database.execute("SELECT 1 FROM sqlite_master").fetchone():
            for statement in filter(str.strip, SCHEMA.split(";")):
                database.execute(statement)
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {FORMAT}")
        elif (application, version) != (APPLICATION_ID, FORMAT):
            database.execute("ROLLBACK")
            raise FormatError(
                f"tier {self._tier}: {self._path} holds format {version} of application "
                f"{application:#x}; this plug-in reads format {FORMAT} of {APPLICATION_ID:#x}"
            )
        owners = database.execute(
            "SELECT owner FROM part WHERE owner IS NOT NULL UNION SELECT owner FROM writer"
        )
        for (owner,) in owners.fetchall():
            if not alive(owner):
                _give_back(database, owner)
        database.execute("COMMIT")

    @contextmanager
    def _transaction(self, doing: str, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Cursor]:
        """The one place that translates SQLite's errors."""
        with self._lock:
            if os.getpid() != self._pid:
                raise TierError(
                    f"tier {self._tier}: opened by process {self._pid}, used after a fork in "
                    f"{os.getpid()}; open it anew",
                    tier=self._tier,
                )
            try:
                cursor = self._database.execute(begin)
                try:
                    yield cursor
                    cursor.execute("COMMIT")
                finally:
                    if self._database.in_transaction:
                        self._database.execute("ROLLBACK")
            except sqlite3.Error as error:
                text = f"tier {self._tier}: cannot {doing} {self._path / FILE}: {error}"
                if getattr(error, "sqlite_errorname", "") == "SQLITE_FULL":
                    raise NoSpace(text) from error
                raise TierError(text, tier=self._tier) from error

    def _changing(self, doing: str) -> AbstractContextManager[sqlite3.Cursor]:
        if not self._writable:
            raise ValueError(f"tier {self._tier} was opened to follow it, cannot {doing} it")
        return self._transaction(doing)

    def _reading(self, doing: str) -> AbstractContextManager[sqlite3.Cursor]:
        return self._transaction(doing, "BEGIN")

    # --------------------------------------------------------------------------------- storing

    def reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        """See `BlockStore.reserve`."""
        for block in blocks:
            if block.checksum.length < 1 or not block.key:
                raise ValueError(f"a block of {block.checksum.length} bytes, key {block.key!r}")
        if not blocks:
            return []
        with self._changing("reserve room in") as cursor:
            new = [block for block in blocks if not self._published(cursor, block.key)]
            evicted = self._make_room(
                cursor, sum(block.checksum.length + ROW_BYTES for block in new)
            )
            places: list[Place | None] = [
                Place(block, self._insert(cursor, block)) if block in new else None
                for block in blocks
            ]
        self._evicted += evicted
        return places

    def _published(self, cursor: sqlite3.Cursor, key: BlockKey) -> bool:
        row = cursor.execute(
            "SELECT 1 FROM part WHERE namespace = ? AND key = ? AND rank = ? AND owner IS NULL",
            (self._namespace, key, self._rank),
        )
        return row.fetchone() is not None

    def _insert(self, cursor: sqlite3.Cursor, block: NewBlock) -> int:
        checksum = block.checksum
        cursor.execute(
            "INSERT INTO part (namespace, key, rank, length, value, kind, owner)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                self._namespace,
                block.key,
                self._rank,
                checksum.length,
                checksum.value.to_bytes(8, "big"),
                checksum.kind.value,
                self._owner,
            ),
        )
        number = cursor.lastrowid
        assert number is not None
        return number

    def _make_room(self, cursor: sqlite3.Cursor, wanted: int) -> int:
        """Evict whole blocks, least recently used first; how many."""
        if wanted > self._budget:
            raise NoSpace(f"tier {self._tier}: {wanted} bytes in one batch of {self._budget}")
        room = self._budget - wanted - self._held(cursor)
        evicted = 0
        while room < 0:
            victims = cursor.execute(
                "SELECT namespace, key, SUM(length + ?) FROM part WHERE owner IS NULL"
                " GROUP BY namespace, key ORDER BY MAX(used), MIN(id) LIMIT 64",
                (ROW_BYTES,),
            ).fetchall()
            if not victims:
                raise NoSpace(f"tier {self._tier}: {-room} bytes are missing, all are reserved")
            for namespace, key, size in victims:
                if room >= 0:
                    break
                evicted += self._drop(cursor, namespace, key)
                room += size
        return evicted

    def _held(self, cursor: sqlite3.Cursor) -> int:
        (held,) = cursor.execute("SELECT TOTAL(length + ?) FROM part", (ROW_BYTES,)).fetchone()
        return int(held)

    def _drop(self, cursor: sqlite3.Cursor, namespace: bytes, key: bytes) -> bool:
        """Forget the published parts of a block; whether it was visible."""
        (parts,) = cursor.execute(VISIBLE, (namespace, key)).fetchone()
        ids = "SELECT id FROM part WHERE namespace = ? AND key = ? AND owner IS NULL"
        cursor.execute(f"DELETE FROM bytes WHERE id IN ({ids})", (namespace, key))
        cursor.execute(f"DELETE FROM part WHERE id IN ({ids})", (namespace, key))
        if parts == self._ranks:
            self._log(cursor, namespace, key, added=False)
        return bool(parts == self._ranks)

    def _log(self, cursor: sqlite3.Cursor, namespace: bytes, key: bytes, *, added: bool) -> None:
        cursor.execute(
            "INSERT INTO change (namespace, key, added) VALUES (?, ?, ?)", (namespace, key, added)
        )
        cursor.execute(
            "DELETE FROM change WHERE seq <= (SELECT MAX(seq) FROM change) - ?", (LOG_ENTRIES,)
        )

    def write(self, places: Sequence[Place], memory: Sequence[memoryview]) -> None:
        """See `BlockStore.write`."""
        if len(places) != len(memory):
            raise ValueError(f"{len(places)} places, but {len(memory)} pieces of memory")
        for place, view in zip(places, memory, strict=True):
            length = place.block.checksum.length
            if view.nbytes != length:
                raise ValueError(f"a block of {length} bytes from {view.nbytes} bytes of memory")
        for place, view in zip(places, memory, strict=True):
            # A transaction each: SQLite's log holds what one of them wrote.
            with self._changing("write to") as cursor:
                self._check_reserved(cursor, place)
                cursor.execute("INSERT OR REPLACE INTO bytes VALUES (?, ?)", (place.token, view))

    def _check_reserved(self, cursor: sqlite3.Cursor, place: Place) -> None:
        found = cursor.execute(
            "SELECT 1 FROM part WHERE id = ? AND owner = ?", (place.token, self._owner)
        )
        if found.fetchone() is None:
            raise ValueError(f"the place of key {place.block.key.hex()} is not reserved")

    def publish(self, places: Sequence[Place]) -> None:
        """See `BlockStore.publish`."""
        if not places:
            return
        with self._changing("publish in") as cursor:
            for place in places:
                self._check_reserved(cursor, place)
                written = cursor.execute("SELECT 1 FROM bytes WHERE id = ?", (place.token,))
                if written.fetchone() is None:
                    raise ValueError(f"block {place.block.key.hex()} was not written")
                if self._published(cursor, place.block.key):
                    self._free(cursor, place)
                    continue
                (now,) = cursor.execute("SELECT IFNULL(MAX(used), 0) + 1 FROM part").fetchone()
                cursor.execute(
                    "UPDATE part SET owner = NULL, used = ? WHERE id = ?", (now, place.token)
                )
                (parts,) = cursor.execute(VISIBLE, (self._namespace, place.block.key)).fetchone()
                if parts == self._ranks:
                    self._log(cursor, self._namespace, place.block.key, added=True)

    def _free(self, cursor: sqlite3.Cursor, place: Place) -> None:
        owned = (place.token, self._owner)
        if cursor.execute("DELETE FROM part WHERE id = ? AND owner = ?", owned).rowcount:
            cursor.execute("DELETE FROM bytes WHERE id = ?", (place.token,))

    def abandon(self, places: Sequence[Place]) -> None:
        """See `BlockStore.abandon`."""
        if not places:
            return
        try:
            with self._transaction("give room back in") as cursor:
                for place in places:
                    self._free(cursor, place)
        except (TierError, NoSpace):
            pass  # given back when the next process opens the tier

    # --------------------------------------------------------------------------------- reading

    def read(self, keys: Sequence[BlockKey], memory: Sequence[memoryview]) -> list[ReadResult]:
        """See `BlockStore.read`."""
        if len(keys) != len(memory):
            raise ValueError(f"{len(keys)} keys, but {len(memory)} pieces of memory")
        if not keys:
            return []
        with self._reading("read") as cursor:
            return [self._read(cursor, key, view) for key, view in zip(keys, memory, strict=True)]

    def _read(self, cursor: sqlite3.Cursor, key: BlockKey, view: memoryview) -> ReadResult:
        missing = ReadResult(BlockStatus.MISSING)
        row = cursor.execute(
            "SELECT id, length, value, kind FROM part"
            " WHERE namespace = ? AND key = ? AND rank = ? AND owner IS NULL",
            (self._namespace, key, self._rank),
        ).fetchone()
        (parts,) = cursor.execute(VISIBLE, (self._namespace, key)).fetchone()
        if row is None or parts != self._ranks or row[1] > view.nbytes:
            return missing
        number, length, value, kind = row
        found = cursor.execute("SELECT data FROM bytes WHERE id = ?", (number,)).fetchone()
        if found is None or len(found[0]) != length:
            return missing
        view[:length] = found[0]
        checksum = BlockChecksum(length, int.from_bytes(value, "big"), ChecksumKind(kind))
        return ReadResult(BlockStatus.OK, checksum)

    # ------------------------------------------------------------------------------ the others

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `BlockStore.contains`."""
        if not keys:
            return []
        with self._reading("ask") as cursor:
            return [
                cursor.execute(VISIBLE, (self._namespace, key)).fetchone() == (self._ranks,)
                for key in keys
            ]

    def discard(self, blocks: Sequence[NewBlock]) -> int:
        """See `BlockStore.discard`."""
        return self._delete({block.key: block.checksum for block in blocks})

    def delete(self, keys: Sequence[BlockKey]) -> int:
        """See `BlockStore.delete`."""
        return self._delete(dict.fromkeys(keys))

    def _delete(self, wanted: Mapping[BlockKey, BlockChecksum | None]) -> int:
        if not wanted:
            return 0
        dropped = 0
        with self._changing("delete from") as cursor:
            for key, checksum in wanted.items():
                if checksum is not None and not self._carries(cursor, key, checksum):
                    continue
                dropped += self._drop(cursor, self._namespace, key)
        return dropped

    def _carries(self, cursor: sqlite3.Cursor, key: BlockKey, checksum: BlockChecksum) -> bool:
        row = cursor.execute(
            "SELECT 1 FROM part WHERE namespace = ? AND key = ? AND rank = ? AND owner IS NULL"
            " AND length = ? AND value = ? AND kind = ?",
            (
                self._namespace,
                key,
                self._rank,
                checksum.length,
                checksum.value.to_bytes(8, "big"),
                checksum.kind.value,
            ),
        )
        return row.fetchone() is not None

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See `BlockStore.touch`."""
        if not keys:
            return
        with self._transaction("note a use in") as cursor:
            cursor.executemany(
                "UPDATE part SET used = (SELECT MAX(used) + 1 FROM part)"
                " WHERE namespace = ? AND key = ? AND owner IS NULL",
                [(self._namespace, key) for key in keys],
            )

    def scan(self) -> Iterator[BlockKey]:
        """See `BlockStore.scan`."""
        with self._reading("list") as cursor:
            rows = cursor.execute(
                "SELECT key FROM part WHERE namespace = ? AND owner IS NULL"
                " GROUP BY key HAVING COUNT(*) = ?",
                (self._namespace, self._ranks),
            ).fetchall()
        return iter([BlockKey(key) for (key,) in rows])

    def changes(self, cursor: int | None) -> ChangeBatch:
        """See `BlockStore.changes`."""
        with self._reading("follow") as read:
            row = read.execute("SELECT seq FROM sqlite_sequence WHERE name = 'change'").fetchone()
            now = row[0] if row else 0
            if cursor is None:
                return ChangeBatch(now, ())
            (first,) = read.execute("SELECT IFNULL(MIN(seq), ?) FROM change", (now + 1,)).fetchone()
            if not first - 1 <= cursor <= now:
                return ChangeBatch(now, (), restart=True)
            rows = read.execute(
                "SELECT key, added FROM change WHERE seq > ? AND namespace = ? ORDER BY seq",
                (cursor, self._namespace),
            ).fetchall()
        return ChangeBatch(now, tuple((BlockKey(key), bool(added)) for key, added in rows))

    def stat(self) -> StoreStat:
        """See `BlockStore.stat`."""
        blocks = sum(1 for _ in self.scan())
        used = sum(file.stat().st_size for file in self._path.iterdir())
        modes = {"io": "sqlite", "journal": "wal", "durability": "none"}
        return StoreStat(blocks, used, self._capacity, self._evicted, modes)

    def close(self) -> None:
        """See `BlockStore.close`."""
        with self._lock:
            if os.getpid() == self._pid:
                try:
                    with self._transaction("leave") as cursor:
                        _give_back(cursor, self._owner)
                except (TierError, NoSpace):
                    pass  # closed before, or given back when the next process opens the tier
                self._database.close()


def alive(owner: int) -> bool:
    """Whether the process of a store still runs."""
    return Path(f"/proc/{owner >> 32}").exists()


def _give_back(database: sqlite3.Connection | sqlite3.Cursor, owner: int) -> None:
    """Free what a store reserved and did not publish."""
    database.execute("DELETE FROM writer WHERE owner = ?", (owner,))
    ids = "SELECT id FROM part WHERE owner = ?"
    database.execute(f"DELETE FROM bytes WHERE id IN ({ids})", (owner,))
    database.execute("DELETE FROM part WHERE owner = ?", (owner,))
