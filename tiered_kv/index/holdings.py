"""What a tier holds, all namespaces together: for those that look after it, not for serving."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from tiered_kv.contracts import StoredNamespace
from tiered_kv.index import namespaces
from tiered_kv.index.blocks import BlockIndex, FullKey
from tiered_kv.index.environment import Environment, Transaction
from tiered_kv.index.log import ChangeLog, Counters
from tiered_kv.values import CacheGeometry, Fingerprint, GroupGeometry, Namespace

__all__ = ["Holdings"]

_NOBODY = Namespace(Fingerprint((("purpose", "maintenance"),)))
_NOTHING = CacheGeometry((GroupGeometry(0, 1, 1, 1),), rank=0, world_size=1)
_NAMESPACE_BYTES = 8


@dataclass(frozen=True, slots=True)
class Holdings:
    """All namespaces of one tier's index. Thread-safe, as far as transactions are."""

    environment: Environment
    index: BlockIndex
    """Bound to no namespace that has blocks: for calls that take full keys."""
    log: ChangeLog

    @classmethod
    def of(cls, environment: Environment) -> Holdings:
        """Not inside a transaction."""
        index = BlockIndex(environment, _NOBODY, _NOTHING, listed=False)
        return cls(environment, index, ChangeLog(environment, Counters(environment), 0))

    def namespaces(self, in_use: Collection[bytes]) -> list[StoredNamespace]:
        """What `StoreMaintenance.namespaces` answers; `in_use` are ids. A pass over the rows."""
        with self.environment.read() as txn:
            held: Counter[bytes] = Counter()
            for key, _, row in self.index.all_rows(txn):
                held[key[:_NAMESPACE_BYTES]] += row.checksum.length
            meta = self.environment.database("meta")
            return [
                StoredNamespace(
                    namespace,
                    geometry,
                    self.log.visible(txn, namespace.id),
                    held[namespace.id],
                    namespace.id in in_use,
                )
                for namespace, geometry in namespaces.recorded(txn, meta)
            ]

    def blocks(self, txn: Transaction, namespace_id: bytes, most: int) -> list[FullKey]:
        """At most `most` blocks of a namespace, whole or not."""
        found: list[FullKey] = []
        with txn.cursor(self.environment.database("blocks")) as cursor:
            more = cursor.set_range(namespace_id)
            while more and len(found) < most and cursor.key().startswith(namespace_id):
                found.append(FullKey(cursor.key()))
                more = cursor.next()
        return found

    def forget(self, txn: Transaction, namespace_id: bytes) -> None:
        """Drop the record of a namespace that has no block any more (write transaction)."""
        namespaces.forget(txn, self.environment.database("meta"), namespace_id)
