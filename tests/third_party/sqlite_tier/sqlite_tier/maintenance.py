"""Looks after a sqlite tier as a whole: all namespaces, no engine."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlite_tier.store import BUSY_SECONDS, FILE, alive

from tiered_kv.contracts import MaintenanceContext, Reconciliation, StoredNamespace
from tiered_kv.errors import TierError
from tiered_kv.values import CacheGeometry, Fingerprint, GroupGeometry, Namespace

__all__ = ["SqliteMaintenance"]

BYTES_WITHOUT_PART = "SELECT id FROM bytes WHERE id NOT IN (SELECT id FROM part)"
PARTS_WITHOUT_BYTES = "SELECT id FROM part WHERE owner IS NULL AND id NOT IN (SELECT id FROM bytes)"


def _understood(text: str) -> tuple[Namespace, CacheGeometry]:
    told = json.loads(text)
    fields = tuple(sorted(told["fields"].items()))
    groups = tuple(GroupGeometry(**group) for group in told["groups"])
    namespace = Namespace(Fingerprint(fields), bytes.fromhex(told["epoch"]))
    return namespace, CacheGeometry(groups, 0, told["ranks"])


class SqliteMaintenance:
    """A `StoreMaintenance`; each call has a connection of its own."""

    def __init__(self, context: MaintenanceContext) -> None:
        self._tier = context.tier
        self._file: Path = context.settings.path / FILE
        self._writable = context.writable

    @contextmanager
    def _database(self, begin: str) -> Iterator[sqlite3.Connection]:
        try:
            database = sqlite3.connect(
                f"file:{self._file}?mode=rw", timeout=BUSY_SECONDS, isolation_level=None, uri=True
            )
            try:
                database.execute(begin)
                yield database
                database.execute("COMMIT")
            finally:
                database.close()
        except sqlite3.Error as error:
            text = f"tier {self._tier}: cannot look after {self._file}: {error}"
            raise TierError(text, tier=self._tier) from error

    def _refuse_to_change(self) -> None:
        if not self._writable:
            raise ValueError(f"tier {self._tier} was opened to look at it, not to change it")

    def namespaces(self) -> list[StoredNamespace]:
        """See `StoreMaintenance.namespaces`."""
        with self._database("BEGIN") as database:
            known = database.execute("SELECT id, told FROM namespace ORDER BY id").fetchall()
            return [
                self._counted(database, *_understood(told), in_use=_in_use(database, of))
                for of, told in known
            ]

    def _counted(
        self,
        database: sqlite3.Connection,
        namespace: Namespace,
        geometry: CacheGeometry,
        *,
        in_use: bool,
    ) -> StoredNamespace:
        parts = database.execute(
            "SELECT COUNT(*), TOTAL(length) FROM part WHERE namespace = ? AND owner IS NULL"
            " GROUP BY key",
            (namespace.id,),
        ).fetchall()
        whole = sum(count == geometry.world_size for count, _ in parts)
        held = sum(int(size) for _, size in parts)
        return StoredNamespace(namespace, geometry, whole, held, in_use)

    def reconcile(self, *, repair: bool) -> Reconciliation:
        """See `StoreMaintenance.reconcile`."""
        if repair:
            self._refuse_to_change()
        found: dict[str, int] = {}
        with self._database("BEGIN IMMEDIATE" if repair else "BEGIN") as database:
            for kind, table, ids in (
                ("bytes without a row", "bytes", BYTES_WITHOUT_PART),
                ("rows without bytes", "part", PARTS_WITHOUT_BYTES),
            ):
                (count,) = database.execute(f"SELECT COUNT(*) FROM ({ids})").fetchone()
                if count:
                    found[kind] = count
                if repair:
                    database.execute(f"DELETE FROM {table} WHERE id IN ({ids})")
        return Reconciliation(found, dict(found) if repair else {})

    def drop(self, namespace_id: bytes) -> int:
        """See `StoreMaintenance.drop`."""
        self._refuse_to_change()
        with self._database("BEGIN IMMEDIATE") as database:
            if _in_use(database, namespace_id):
                raise ValueError(f"namespace {namespace_id.hex()} is in use")
            mine = (namespace_id,)
            blocks = "SELECT DISTINCT namespace, key, 0 FROM part WHERE namespace = ?"
            logged = f"INSERT INTO change (namespace, key, added) {blocks}"
            dropped = database.execute(logged, mine).rowcount
            ids = "SELECT id FROM part WHERE namespace = ?"
            database.execute(f"DELETE FROM bytes WHERE id IN ({ids})", mine)
            database.execute("DELETE FROM part WHERE namespace = ?", mine)
            database.execute("DELETE FROM namespace WHERE id = ?", mine)
        return dropped

    def close(self) -> None:
        """See `StoreMaintenance.close`."""


def _in_use(database: sqlite3.Connection, namespace_id: bytes) -> bool:
    owners = database.execute("SELECT owner FROM writer WHERE namespace = ?", (namespace_id,))
    return any(alive(owner) for (owner,) in owners.fetchall())
