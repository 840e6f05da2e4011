"""How a rank looks after its stores: what is compared at loads, the scrub, and their wear."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from tiered_kv.config import Deployment, StoreSettings
from tiered_kv.contracts import BlockStore, VerifyMode
from tiered_kv.stats import StatsRecorder
from tiered_kv.upkeep import Scrubber, Verified
from tiered_kv.values import CacheGeometry

__all__ = ["Scrubbers", "TierCare", "care_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierCare:
    """What a tier's settings say about its blocks."""

    verify: VerifyMode = VerifyMode.ALWAYS
    scrub: int = 0
    """Bytes per second; 0: not at all."""
    drop: bool = True
    """Whether what the scrub finds bad may be dropped: False where the tier is read only."""
    write_budget: int = 0
    """Bytes per day that all who use the tier may write to it; 0: no limit."""


def care_of(deployment: Deployment) -> dict[str, TierCare]:
    """By store tier. A tier of a type that knows nothing of it is verified always."""
    return {
        tier.name: TierCare(VerifyMode(tier.verify), tier.scrub, tier.writable, tier.write_budget)
        for tier in deployment.stores
        if isinstance(tier, StoreSettings)
    }


class Scrubbers:
    """The scrubs of one rank, and their counts. Thread-safe."""

    def __init__(
        self,
        care: Mapping[str, TierCare],
        stats: StatsRecorder,
        busy: Callable[[str], bool],
    ) -> None:
        """`busy` says whether a load from a tier runs."""
        self._care = care
        self._stats = stats
        self._busy = busy
        self._lock = threading.Lock()
        self._running: dict[str, Scrubber] = {}
        self._closed = False

    def add(self, tier: str, store: BlockStore, geometry: CacheGeometry) -> None:
        """A tier's store is open: scrub it from now on, where its settings say so."""
        care = self._care.get(tier)
        if care is None or not care.scrub:
            return
        with self._lock:
            if self._closed or tier in self._running:
                return
            try:
                self._running[tier] = Scrubber(
                    store,
                    tier=tier,
                    rank=geometry.rank,
                    block_bytes=max(group.block_bytes for group in geometry.groups),
                    rate=care.scrub,
                    drop=care.drop,
                    checked=partial(self._checked, tier),
                    ended=partial(self._ended, tier),
                    busy=partial(self._busy, tier),
                )
            except RuntimeError as error:  # no thread to be had
                logger.warning("tier %s is not scrubbed: %s", tier, error)

    def remove(self, tier: str) -> None:
        """A tier has no store any more. Waits for nothing: a batch that is being read ends, maybe
        with an error, when the store is closed."""
        with self._lock:
            running = self._running.pop(tier, None)
        if running is not None:
            running.close(0.0)

    def _checked(self, tier: str, batch: Verified) -> None:
        self._stats.scrubbed(
            tier, blocks=batch.blocks, bytes_=batch.bytes, failures=batch.unreadable
        )
        self._stats.corrupt(tier, "scrub", len(batch.corrupt))

    def _ended(self, tier: str, whole: bool) -> None:
        self._stats.scrubbed(tier, rounds=int(whole), failures=int(not whole))

    def close(self, timeout: float) -> bool:
        """End them all, waiting at most `timeout` seconds together; True if all ended.

        Call it before the stores are closed.
        """
        with self._lock:
            self._closed = True
            running = list(self._running.values())
        until = time.monotonic() + timeout
        # All are told before any is waited for.
        late = [one for one in running if not one.close(0.0)]
        return all(one.close(max(0.0, until - time.monotonic())) for one in late)
