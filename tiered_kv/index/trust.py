"""From when on the rows of an index are known to be true."""

from __future__ import annotations

from tiered_kv.index.environment import BufferTransaction, Environment, Transaction
from tiered_kv.index.log import ChangeLog, Counters

__all__ = ["Trust"]

_GENERATION = b"generation"
_UNPROVEN = b"unproven"


class Trust:
    """Marks rows that may lead to other bytes than theirs. Each call belongs to a transaction.

    A slot that was being rewritten when the index was lost has an old entry and new bytes, and so
    may one that was given out by a transaction which a crash of the machine undid. Such rows are
    not to be believed before their bytes were compared with their checksums, whatever the tier's
    settings say: those up to generation `unproven`.
    """

    def __init__(self, environment: Environment) -> None:
        """Not inside a transaction."""
        self._meta = environment.database("meta")
        self._counters = Counters(environment)
        self._log = ChangeLog(environment, self._counters, 0) if environment.writable else None

    def unproven(self, txn: Transaction | BufferTransaction) -> int:
        """Rows of this generation or an older one are not to be believed; 0 where all are."""
        return int.from_bytes(txn.get(_UNPROVEN, b"", db=self._meta), "big")

    @classmethod
    def after_open(cls, environment: Environment) -> Trust:
        """For a store that just opened the environment: if the machine crashed before, no row that
        is there is to be believed. Not inside a transaction."""
        trust = cls(environment)
        if environment.crashed:
            with environment.write() as txn:
                trust._counters.set(txn, _UNPROVEN, trust._counters.get(txn, _GENERATION))
            environment.crashed = False
        return trust

    def finish(self, txn: Transaction, newest: int) -> None:
        """Rows were made of entries whose generations are at most `newest`. New ones will be
        greater, and whoever follows the change log starts again (write transaction)."""
        self._counters.set(txn, _UNPROVEN, newest)
        self._counters.set(txn, _GENERATION, max(newest, self._counters.get(txn, _GENERATION)))
        if self._log is not None:
            self._log.restart(txn)
