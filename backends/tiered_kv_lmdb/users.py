"""Which processes have which namespace of a tier open for writing: a record per store.

Key: 8 random bytes. Value: the process, and the id of the namespace.
"""

from __future__ import annotations

import secrets

from tiered_kv.index import Environment, Owner, Transaction

__all__ = ["Users"]

_NAME_BYTES = 8


class Users:
    """The records, in a database of the index. Each call belongs to a transaction."""

    def __init__(self, index: Environment) -> None:
        """Not inside a transaction."""
        self._records = index.database("users")

    def enter(self, txn: Transaction, namespace_id: bytes) -> bytes:
        """Say that this process has the namespace open for writing; the name of the record, to
        `leave` with. Records of the dead are removed."""
        for name, owner, _ in self._all(txn):
            if not owner.alive():
                txn.delete(name, db=self._records)
        name = secrets.token_bytes(_NAME_BYTES)
        txn.put(name, Owner.current().pack() + namespace_id, db=self._records)
        return name

    def leave(self, txn: Transaction, name: bytes) -> None:
        """It has it open no more."""
        txn.delete(name, db=self._records)

    def namespaces(self, txn: Transaction) -> set[bytes]:
        """Ids of the namespaces that a live process has open for writing."""
        return {namespace for _, owner, namespace in self._all(txn) if owner.alive()}

    def _all(self, txn: Transaction) -> list[tuple[bytes, Owner, bytes]]:
        size = Owner.PACKED_BYTES
        with txn.cursor(self._records) as cursor:
            return [(name, Owner.unpack(data[:size]), data[size:]) for name, data in cursor]
