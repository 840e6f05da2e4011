"""Finds tiers that are written to for nothing: blocks go in, and none is ever found there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tiered_kv.stats import StatsRecorder

__all__ = ["WriteOnlyWatch"]

logger = logging.getLogger(__name__)

SILENT_SECONDS = 3_600.0
LEAST_BLOCKS = 1_000
"""So many must have been stored, and as many looked for, before a tier is suspected."""


@dataclass(slots=True)
class _Tier:
    since: float
    """When blocks were first stored, or one was last found."""
    stored: int = 0
    sought: int = 0
    alarm: bool = False


class WriteOnlyWatch:
    """Counts what is stored in each tier and found there. Scheduler's thread only.

    A block counts as found when the tier has it, whether it is loaded from there or not. A tier
    that is never asked, because those before it have everything, is not suspected.
    """

    def __init__(self, stats: StatsRecorder, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._stats = stats
        self._clock = clock
        self._tiers: dict[str, _Tier] = {}

    def stored(self, tier: str, blocks: int) -> None:
        """Blocks are on their way into a tier."""
        if not blocks:
            return
        known = self._tiers.get(tier)
        if known is None:
            known = self._tiers[tier] = _Tier(self._clock())
            self._stats.write_only(tier, False)
        known.stored += blocks
        self._judge(tier, known)

    def sought(self, tier: str, blocks: int, *, found: int) -> None:
        """Requests asked a tier for blocks, and it has some of them."""
        known = self._tiers.get(tier)
        if known is None:
            return
        if found:
            if known.alarm:
                logger.warning("tier %s: its blocks are found now", tier)
            self._tiers[tier] = _Tier(self._clock())
            self._stats.write_only(tier, False)
            return
        known.sought += blocks

    def _judge(self, tier: str, known: _Tier) -> None:
        seconds = self._clock() - known.since
        if known.alarm or seconds < SILENT_SECONDS:
            return
        if min(known.stored, known.sought) < LEAST_BLOCKS:
            return
        known.alarm = True
        self._stats.write_only(tier, True)
        logger.warning(
            "tier %s is only written to: in %.1f hours %d blocks were sent to it, and not one of "
            "the %d that requests asked it for was there. Look whether prompts repeat at all; "
            "whether the tier keeps what it gets (`tiered-kv ls` and the drops by reason in the "
            "metrics); whether `capacity` is so small that blocks go before they are wanted again; "
            "and whether the engine's arguments differ from those of the engine that is to find "
            "the blocks (`tiered-kv stat`). If nothing is to be found there, leave the tier out of "
            "`placement.write`: it only wears",
            tier,
            seconds / 3600,
            known.stored,
            known.sought,
        )
