"""Asks the stores of a rank how full and how worn they are: for the statistics, and because that
notices a store whose directory is gone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tiered_kv.contracts import BlockStore, StoreStat
from tiered_kv.errors import TierGone, reason_in
from tiered_kv.stats import StatsRecorder, TierWear
from tiered_kv.stats.condition import day_of

__all__ = ["StoreWatch"]

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 2.0


class StoreWatch:
    """Asks each store for its `stat` every `PERIOD_SECONDS`, on a daemon thread of its own, so that
    one that hangs delays nothing else. Thread-safe."""

    def __init__(
        self,
        stats: StatsRecorder | None,
        *,
        gone: Callable[[str, BlockStore, str], None],
        budgets: Mapping[str, int] = MappingProxyType({}),
        wear_here: Callable[[str], TierWear | None] = lambda _: None,
    ) -> None:
        """
        Args:
            stats: is told how full and how worn the stores are; None where somebody else does that.
            gone: told of a tier, its store and the reason, when what the store was opened on is
                not there any more. That store is asked no more.
            budgets: bytes per day that may be written to a tier, where that is limited.
            wear_here: what this rank wrote to a tier whose store does not count that.
        """
        self._stats = stats
        self._gone = gone
        self._budgets = budgets
        self._wear_here = wear_here
        self._written: dict[str, int] = {}
        self._wear: dict[str, TierWear] = {}
        self._news: dict[str, TierWear] = {}
        self._lock = threading.Lock()
        self._watched: dict[str, tuple[threading.Thread, threading.Event]] = {}
        self._evicted: dict[str, int] = {}
        self._closed = False

    def add(self, tier: str, store: BlockStore) -> None:
        """Watch this store too, in place of the one that the tier had. Reports it now. Called on
        the thread that opened it."""
        self.remove(tier)
        self._evicted[tier] = 0
        if not self._ask(tier, store):
            return
        left = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(tier, store, left), name=f"tiered-kv-watch-{tier}", daemon=True
        )
        with self._lock:
            if self._closed:
                return
            try:
                thread.start()
            except RuntimeError as error:  # no thread to be had
                logger.warning("tier %s is not watched: %s", tier, error)
                return
            self._watched[tier] = thread, left

    def remove(self, tier: str) -> None:
        """Its store is to be asked no more. Waits for nothing."""
        with self._lock:
            watched = self._watched.pop(tier, None)
        if watched is not None:
            watched[1].set()

    def _run(self, tier: str, store: BlockStore, left: threading.Event) -> None:
        while not left.wait(PERIOD_SECONDS):
            if not self._ask(tier, store):
                return

    def _ask(self, tier: str, store: BlockStore) -> bool:
        """Whether the store is to be asked again."""
        try:
            stat = store.stat()
        except TierGone as error:
            self._gone(tier, store, str(error))
            return False
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; it is asked again
            logger.debug("tier %s cannot say how full it is: %s", tier, reason_in(tier, error))
            return True
        if self._stats is not None:
            self._stats.occupancy(
                tier,
                resident_blocks=stat.blocks,
                used_bytes=stat.used_bytes,
                capacity_bytes=stat.capacity_bytes,
            )
            before, self._evicted[tier] = self._evicted.get(tier, 0), stat.evicted_blocks
            self._stats.evicted(tier, max(0, stat.evicted_blocks - before))
            self._note_wear(self._stats, tier, stat)
        return True

    def _note_wear(self, stats: StatsRecorder, tier: str, stat: StoreStat) -> None:
        if stat.written_bytes is not None:
            # An index that was made again counts from nothing.
            before = self._written.setdefault(tier, stat.written_bytes)
            self._written[tier] = stat.written_bytes
            stats.written(tier, max(0, stat.written_bytes - before))
        budget = self._budgets.get(tier)
        if budget is None:
            return
        if stat.written_today is not None:
            wear: TierWear | None = TierWear(tier, day_of(time.time()), stat.written_today, budget)
        else:
            wear = self._wear_here(tier)
        if wear is None:
            return
        stats.wear(tier, today=wear.written_bytes, budget=wear.budget_bytes)
        with self._lock:
            if self._wear.get(tier) != wear:
                self._wear[tier] = self._news[tier] = wear

    def take_wear(self) -> tuple[TierWear, ...]:
        """How worn tiers with a write budget are, as far as that has changed since the last call.
        Any thread."""
        with self._lock:
            news, self._news = self._news, {}
        return tuple(news.values())

    def close(self, timeout: float) -> bool:
        """End, waiting at most `timeout` seconds for stores that are being asked; True if ended.

        Call it before the stores are closed.
        """
        with self._lock:
            self._closed = True
            watched = list(self._watched.values())
        for _, left in watched:
            left.set()
        until = time.monotonic() + timeout
        for thread, _ in watched:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread, _ in watched)
