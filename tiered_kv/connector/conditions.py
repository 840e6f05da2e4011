"""How the ranks find the tiers, as far as they have told the manager."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.stats import LoadRate, TierCondition, TierState

__all__ = ["Conditions"]

_ORDER = (TierState.HEALTHY, TierState.DEGRADED, TierState.OPENING, TierState.DOWN)


class Conditions:
    """The latest condition of each tier on each rank; what holds for a load, which needs all
    ranks, is the worst of them. Scheduler's thread only, but for `load_rate`: any."""

    def __init__(self) -> None:
        self._ranks: dict[str, dict[int, TierCondition]] = {}
        self._states: dict[str, TierState] = {}
        self._rates: dict[str, LoadRate | None] = {}
        self.version = 0
        """Grows whenever the state of a tier has changed."""

    def note(self, rank: int, condition: TierCondition) -> None:
        """A rank reported a tier."""
        ranks = self._ranks.setdefault(condition.tier, {})
        before = ranks.get(rank)
        self.version += before is None or before.state is not condition.state
        ranks[rank] = condition
        self._states[condition.tier] = max((c.state for c in ranks.values()), key=_ORDER.index)
        self._rates[condition.tier] = _slowest([c.load for c in ranks.values()])

    def state(self, tier: str) -> TierState:
        """Of the rank that it is worst for; healthy where none has reported."""
        return self._states.get(tier, TierState.HEALTHY)

    def load_rate(self, tier: str) -> LoadRate | None:
        """Of the slowest rank; None while none has measured it."""
        return self._rates.get(tier)


def _slowest(rates: Iterable[LoadRate | None]) -> LoadRate | None:
    known = [rate for rate in rates if rate is not None]
    if not known:
        return None
    return LoadRate(
        min(rate.bytes_per_second for rate in known),
        max(rate.latency_seconds for rate in known),
    )
