"""What was written to tiers whose stores do not count it themselves.

A store that counts (`StoreStat.written_bytes`) knows what other processes write, and outlives them.
For the others this rank counts its own writes, from its start on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from tiered_kv.contracts import BlockStore
from tiered_kv.stats import StatsRecorder, TierWear
from tiered_kv.stats.condition import day_of

__all__ = ["WriteMeter"]

logger = logging.getLogger(__name__)


class WriteMeter:
    """Thread-safe; nothing blocks."""

    def __init__(
        self,
        budgets: Mapping[str, int],
        stats: StatsRecorder,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`budgets`: bytes that this rank may write to a tier per day, where that is limited;
        `clock` gives seconds since the epoch."""
        self._budgets = {tier: budget for tier, budget in budgets.items() if budget}
        self._stats = stats
        self._clock = clock
        self._lock = threading.Lock()
        self._today: dict[str, int] = {}
        self._day = day_of(clock())

    def opened(self, tier: str, store: BlockStore) -> None:
        """A tier's store is open, maybe in place of another one. Asks it whether it counts what is
        written to it, on a thread that may block."""
        try:
            counts = store.stat().written_bytes is not None
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; its tier serves
            logger.debug("tier %s: what is written is counted here: %s", tier, error)
            counts = False
        with self._lock:
            if counts:
                self._today.pop(tier, None)
            else:
                self._today.setdefault(tier, 0)

    def allows(self, tier: str, size: int) -> bool:
        """Whether so many more bytes may be written today, as far as that is known here."""
        budget = self._budgets.get(tier)
        with self._lock:
            self._turn()
            return budget is None or tier not in self._today or self._today[tier] + size <= budget

    def written(self, tier: str, size: int) -> None:
        """So many bytes were written."""
        with self._lock:
            self._turn()
            if tier not in self._today:
                return
            self._today[tier] += size
        self._stats.written(tier, size)

    def wear(self, tier: str) -> TierWear | None:
        """What this rank has written; None where the store counts itself, or there is no
        budget."""
        budget = self._budgets.get(tier)
        with self._lock:
            self._turn()
            if budget is None or tier not in self._today:
                return None
            return TierWear(tier, self._day, self._today[tier], budget)

    def _turn(self) -> None:
        """A day ends. One that the clock is set back to does not begin again."""
        day = day_of(self._clock())
        if day > self._day:
            self._day = day
            self._today = dict.fromkeys(self._today, 0)
