"""How many bytes were written to a tier's medium: since it was made, and on this day (UTC).

One record in the index, so that all processes of the tier share it, and it outlives them.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from tiered_kv.config import readable_bytes
from tiered_kv.errors import WriteBudgetSpent
from tiered_kv.index.environment import Environment, Transaction

__all__ = ["WriteAccount", "Written"]

SECONDS_PER_DAY = 86_400
_NAME = b"written"
_RECORD = struct.Struct(">QQQ")


@dataclass(frozen=True, slots=True)
class Written:
    """What was written, in bytes."""

    ever: int
    today: int


class WriteAccount:
    """Counts room that was taken to be written, in the transaction that takes it.

    What is then not written after all (the job was given up, the disk failed) counts as well: part
    of it may have been, and so several processes together never write more than the budget. A
    record that was damaged counts from nothing again.
    """

    def __init__(
        self,
        environment: Environment,
        tier: str,
        budget: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Not inside a transaction.

        Args:
            environment: that of the index.
            tier: its name, for messages.
            budget: bytes per day; 0: no limit.
            clock: seconds since the epoch.
        """
        self._meta = environment.database("meta")
        self._environment = environment
        self._tier = tier
        self._budget = budget
        self._clock = clock

    def take(self, txn: Transaction, size: int) -> None:
        """So many bytes are going to be written (write transaction).

        Raises:
            WriteBudgetSpent: they are more than is left of the day's budget; nothing is counted.
        """
        spent = self.spent(txn, size)
        if spent is not None:
            raise spent

    def spent(self, txn: Transaction, size: int) -> WriteBudgetSpent | None:
        """As `take`, for a transaction that is to go on: the error to raise behind it, or None."""
        if not size:
            return None
        day, today, ever = self._record(txn)
        if self._budget and today + size > self._budget:
            return WriteBudgetSpent(
                f"tier {self._tier}: {readable_bytes(today)} of the day's write budget of "
                f"{readable_bytes(self._budget)} are used, so {readable_bytes(size)} more are not "
                "written before the next day (UTC)"
            )
        txn.put(_NAME, _RECORD.pack(day, today + size, ever + size), db=self._meta)
        return None

    def written(self) -> Written:
        """What was counted by all processes. Not inside a write transaction."""
        with self._environment.read() as txn:
            _, today, ever = self._record(txn)
        return Written(ever, today)

    def _record(self, txn: Transaction) -> tuple[int, int, int]:
        """Day, bytes of that day, bytes of all. A day does not begin again when the clock is set
        back."""
        now = int(self._clock() // SECONDS_PER_DAY)
        data = txn.get(_NAME, db=self._meta)
        if data is None or len(data) != _RECORD.size:
            return now, 0, 0
        day, today, ever = _RECORD.unpack(data)
        return (day, today, ever) if day >= now else (now, 0, ever)
