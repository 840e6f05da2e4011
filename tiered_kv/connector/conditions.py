"""How the ranks find the tiers, as far as they have told the manager."""

from __future__ import annotations

from tiered_kv.stats import LoadRate, TierCondition, TierState

__all__ = ["Conditions"]

_ORDER = (TierState.HEALTHY, TierState.DEGRADED, TierState.OPENING, TierState.DOWN)


class Conditions:
    """The latest condition of each tier on each rank; what holds for a load, which needs all
    ranks, is the worst of them. Scheduler's thread only, but for `load_rate`: any."""

    def __init__(self) -> None:
        self._ranks: dict[str, dict[int, TierCondition]] = {}
        self.version = 0
        """Grows whenever the state of a tier has changed."""

    def note(self, rank: int, condition: TierCondition) -> None:
        """A rank reported a tier."""
        ranks = self._ranks.setdefault(condition.tier, {})
        before = ranks.get(rank)
        self.version += before is None or before.state is not condition.state
        ranks[rank] = condition

    def state(self, tier: str) -> TierState:
        """Of the rank that it is worst for; healthy where none has reported."""
        ranks = self._ranks.get(tier, {})
        return max((c.state for c in ranks.values()), key=_ORDER.index, default=TierState.HEALTHY)

    def load_rate(self, tier: str) -> LoadRate | None:
        """Of the slowest rank; None while none has measured it."""
        rates = [c.load for c in list(self._ranks.get(tier, {}).values()) if c.load is not None]
        if not rates:
            return None
        return LoadRate(
            min(rate.bytes_per_second for rate in rates),
            max(rate.latency_seconds for rate in rates),
        )
