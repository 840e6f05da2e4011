"""Which processes have the tier open for writing: one record per store that stores.

Key: the store's nonce (8 bytes). Value: its process, and the id of its namespace.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.index import Database, Owner, Transaction

__all__ = ["Owners"]


@dataclass(frozen=True, slots=True)
class Owners:
    """The records, in one database of the index. Each call belongs to a transaction."""

    database: Database

    def register(self, txn: Transaction, nonce: bytes, namespace_id: bytes) -> None:
        """Say that this process has the tier open for writing."""
        txn.put(nonce, Owner.current().pack() + namespace_id, db=self.database)

    def forget(self, txn: Transaction, nonce: bytes) -> None:
        """It has it no more."""
        txn.delete(nonce, db=self.database)

    def live_namespaces(self, txn: Transaction) -> set[bytes]:
        """Ids of the namespaces that some live process has open for writing."""
        return {namespace for _, owner, namespace in self._all(txn) if owner.alive()}

    def nonces(self, txn: Transaction) -> set[bytes]:
        """All of them, the dead ones' included."""
        return {nonce for nonce, _, _ in self._all(txn)}

    def dead(self, txn: Transaction) -> list[bytes]:
        """Nonces of processes that do not run any more."""
        return [nonce for nonce, owner, _ in self._all(txn) if not owner.alive()]

    def _all(self, txn: Transaction) -> list[tuple[bytes, Owner, bytes]]:
        size = Owner.PACKED_BYTES
        with txn.cursor(self.database) as cursor:
            return [
                (nonce, Owner.unpack(value[:size]), value[size:])
                for nonce, value in cursor.iternext()
            ]
