"""Tells the statistics how full the stores are, on a thread of its own."""

from __future__ import annotations

import logging
import threading

from tiered_kv.contracts import BlockStore
from tiered_kv.stats import StatsRecorder

__all__ = ["OccupancyReporter"]

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 2.0


class OccupancyReporter:
    """Asks each store for its `stat` every few seconds. A store that hangs delays only this."""

    def __init__(self, stats: StatsRecorder) -> None:
        self._stats = stats
        self._lock = threading.Lock()
        self._stores: dict[str, BlockStore] = {}
        self._evicted: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, tier: str, store: BlockStore) -> None:
        """Report this store too, beginning now. Called on the thread that opened it."""
        self._report(tier, store)
        with self._lock:
            self._stores[tier] = store
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="tiered-kv-occupancy", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_SECONDS):
            with self._lock:
                stores = list(self._stores.items())
            for tier, store in stores:
                if not self._ended.is_set():
                    self._report(tier, store)

    def _report(self, tier: str, store: BlockStore) -> None:
        try:
            stat = store.stat()
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; others go on
            logger.debug("tier %s cannot say how full it is: %s", tier, error)
            return
        self._stats.occupancy(
            tier,
            resident_blocks=stat.blocks,
            used_bytes=stat.used_bytes,
            capacity_bytes=stat.capacity_bytes,
        )
        before = self._evicted.get(tier, 0)
        self._evicted[tier] = stat.evicted_blocks
        self._stats.evicted(tier, max(0, stat.evicted_blocks - before))

    def close(self, timeout: float) -> bool:
        """End, waiting at most `timeout` seconds for a store that is being asked; True if ended.

        Call it before the stores are closed.
        """
        self._ended.set()
        with self._lock:
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout)
        return not thread.is_alive()
