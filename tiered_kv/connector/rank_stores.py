"""The stores of one rank: opened behind the start, counted, scrubbed, closed, and opened anew where
their directory is gone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from tiered_kv.connector.care import Scrubbers, TierCare
from tiered_kv.connector.erasing import erase
from tiered_kv.connector.occupancy import StoreWatch
from tiered_kv.connector.opening import StoreOpener
from tiered_kv.contracts import BlockStore
from tiered_kv.engine import OPENING, TransferEngine
from tiered_kv.errors import reason_in
from tiered_kv.stats import StatsRecorder, TierWear
from tiered_kv.values import CacheGeometry

__all__ = ["RankStores"]

logger = logging.getLogger(__name__)

OPEN_WAIT_SECONDS = 1.0
"""How long the start waits for the stores, so that a misconfigured one is refused at once."""


class RankStores:
    """Opens a rank's stores on threads of their own and gives them to its transfer engine.
    Thread-safe; only `open` and `close` wait."""

    def __init__(
        self,
        open_store: Callable[[str, bytes], BlockStore],
        *,
        engine: TransferEngine,
        geometry: CacheGeometry,
        care: Mapping[str, TierCare],
        stats: StatsRecorder,
        retry_after: float,
        erase: bool = False,
    ) -> None:
        """`open_store` opens the store of a tier in an epoch; it is called on a thread that may
        block. One that cannot be opened now, or is gone, is opened again after `retry_after`
        seconds. With `erase`, what lies in the epoch that is left is deleted."""
        self._engine = engine
        self._geometry = geometry
        self._erase = erase and geometry.rank == 0  # the ranks share the stores
        self._closed = threading.Event()
        self._tiers: tuple[str, ...] = ()
        self._retry_after = retry_after
        self._lock = threading.Lock()
        self._serving: dict[str, BlockStore] = {}
        # The ranks share the stores: one of them tells how full they are.
        self._watch = StoreWatch(
            stats if geometry.rank == 0 else None,
            gone=self._gone,
            budgets={tier: one.write_budget for tier, one in care.items() if one.write_budget},
            wear_here=engine.wear,
        )
        self._scrubbers = Scrubbers(care, stats, engine.is_loading)
        self._opener = StoreOpener(
            open_store, opened=self._opened, failed=engine.detach_failed, retry_after=retry_after
        )
        engine.when_gone(self._gone)

    def open(self, tiers: tuple[str, ...]) -> None:
        """Begin to open the stores of these tiers.

        Raises:
            RefuseToStart: a tier turned out within `OPEN_WAIT_SECONDS` to be unusable as
                configured.
        """
        self._tiers = tiers
        self._opener.start(tiers, wait_seconds=OPEN_WAIT_SECONDS)

    def begin_epoch(self, epoch: bytes) -> None:
        """Leave the namespace that the stores are open in, and go on in another epoch of it.

        Nothing goes to or from a tier until its store is open there. Calls that run end on the
        store that they began with, which is closed then.
        """
        self._opener.begin_epoch(epoch)
        for tier in self._tiers:
            # Detached after the epoch has changed: what was opened before is not attached any more.
            self._let_go(tier, OPENING)
            self._opener.reopen(tier)

    def _let_go(self, tier: str, reason: str) -> None:
        """Nothing uses the tier's store from now on. Never blocks."""
        with self._lock:
            self._serving.pop(tier, None)
        self._engine.detach(tier, reason)
        self._watch.remove(tier)
        self._scrubbers.remove(tier)

    def _gone(self, tier: str, store: BlockStore, reason: str) -> None:
        """What a store was opened on is not there any more: open the tier anew, once whoever took
        it away is done with that."""
        with self._lock:
            if self._serving.get(tier) is not store:
                return
        self._let_go(tier, f"gone: {reason}")
        self._opener.reopen(tier, after=self._retry_after)

    def _opened(self, tier: str, store: BlockStore, epoch: bytes) -> None:
        def wanted() -> bool:
            return self._opener.epoch == epoch

        def released() -> None:
            self._released(tier, store, epoch)

        with self._lock:
            self._serving[tier] = store
        if not self._engine.attach(tier, store, released=released, wanted=wanted):
            return
        self._watch.add(tier, store)
        self._scrubbers.add(tier, store, self._geometry)
        if self._serving.get(tier) is not store:  # meanwhile
            self._watch.remove(tier)
            self._scrubbers.remove(tier)
            return
        try:
            stat = store.stat()
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; its tier serves
            why = reason_in(tier, error)
            logger.warning("tier %s is open but cannot say how full it is: %s", tier, why)
            return
        modes = ", ".join(f"{name} {mode}" for name, mode in sorted(stat.modes.items()))
        logger.info(
            "tier %s is open: %d blocks, %d of %d bytes used; %s",
            tier,
            stat.blocks,
            stat.used_bytes,
            stat.capacity_bytes,
            modes,
        )

    def _released(self, tier: str, store: BlockStore, epoch: bytes) -> None:
        """The engine needs a store no more."""
        if self._erase and epoch != self._opener.epoch and not self._closed.is_set():
            erase(store, tier, self._closed.is_set)
        self._opener.release(store)

    def close(self, timeout: float) -> bool:
        """Close every store, within `timeout` seconds; one that hangs is closed when it returns.
        True if all are closed."""
        until = time.monotonic() + timeout
        self._closed.set()
        ended = self._watch.close(timeout / 3)
        ended = self._scrubbers.close(timeout / 3) and ended
        return self._opener.close(max(0.0, until - time.monotonic())) and ended

    def take_wear(self) -> tuple[TierWear, ...]:
        """What was written to tiers that have a write budget, where it has changed since the last
        call."""
        return self._watch.take_wear()
