"""Opens the tiers' stores behind the start of the engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from tiered_kv.contracts import BlockStore
from tiered_kv.errors import RefuseToStart

__all__ = ["StoreOpener"]

logger = logging.getLogger(__name__)


class StoreOpener:
    """Opens each tier's store on a daemon thread of its own, and closes what was opened.

    `opened` and `failed` are called on those threads.
    """

    def __init__(
        self,
        open_store: Callable[[str], BlockStore],
        *,
        opened: Callable[[str, BlockStore], None],
        failed: Callable[[str, str], None],
    ) -> None:
        self._open_store = open_store
        self._opened = opened
        self._failed = failed
        self._lock = threading.Lock()
        self._stores: list[BlockStore] = []
        self._threads: list[threading.Thread] = []
        self._refusals: list[RefuseToStart] = []
        self._closed = False

    def start(self, tiers: Sequence[str], *, wait_seconds: float) -> None:
        """Begin to open; wait at most `wait_seconds` so that an operator's mistake shows at once.

        Raises:
            RefuseToStart: a tier turned out within that time to be unusable as configured.
        """
        for tier in tiers:
            thread = threading.Thread(
                target=self._run, args=(tier,), name=f"tiered-kv-open-{tier}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        until = time.monotonic() + wait_seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            if self._refusals:
                raise self._refusals[0]

    def _run(self, tier: str) -> None:
        try:
            store = self._open_store(tier)
        except RefuseToStart as error:
            with self._lock:
                self._refusals.append(error)
            self._report(tier, error)
            return
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; its tier is out
            self._report(tier, error)
            return
        with self._lock:
            late = self._closed
            if not late:
                self._stores.append(store)
        if late:
            _close(store)
            return
        try:
            self._opened(tier, store)
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; its tier is out
            self._report(tier, error)

    def _report(self, tier: str, error: Exception) -> None:
        logger.error("tier %s cannot be opened and stays out of use: %s", tier, error)
        self._failed(tier, str(error))

    def close(self) -> None:
        """Close every opened store; a store that is still opening is closed when it is open."""
        with self._lock:
            self._closed = True
            stores, self._stores = self._stores, []
        for store in stores:
            _close(store)


def _close(store: BlockStore) -> None:
    try:
        store.close()
    except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; the end goes on
        logger.warning("closing a store failed: %r", error)
