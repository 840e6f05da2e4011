"""How much of the tiers' write budgets is used, as far as the ranks have told the manager."""

from __future__ import annotations

import time
from collections.abc import Callable

from tiered_kv.placement import required_uses
from tiered_kv.stats import TierWear
from tiered_kv.stats.condition import SECONDS_PER_DAY, day_of

__all__ = ["Wear"]


class Wear:
    """The latest news of each tier. Scheduler's thread only.

    What is told is what all that use a tier have written, where its store counts that: so several
    engines tighten together. No rank's word counts more than another's: the most used one holds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since the epoch."""
        self._clock = clock
        self._ranks: dict[str, dict[int, TierWear]] = {}

    def __bool__(self) -> bool:
        """Whether any tier has a write budget, as far as that is known."""
        return bool(self._ranks)

    def note(self, rank: int, wear: TierWear) -> None:
        """A rank reported a tier."""
        self._ranks.setdefault(wear.tier, {})[rank] = wear

    def required_uses(self, tier: str, least: int) -> int | None:
        """How often a block must have been wanted to be stored in a tier; None: nothing is now."""
        ranks = self._ranks.get(tier)
        if not ranks:
            return least
        now = self._clock()
        day = day_of(now)
        elapsed = now / SECONDS_PER_DAY - day
        used = max(wear.used(day) for wear in ranks.values())
        return required_uses(least, used=used, elapsed=elapsed)
