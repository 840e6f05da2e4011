"""What tests of deadlines have in common: an engine that goes on while something hangs."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tiered_kv.config import Recompute
from tiered_kv.connector import WorkerReport
from tiered_kv.stats import LoadRate, TierCondition, TierState
from tiered_kv.testing.simulation import Request, Simulation

__all__ = ["MEASURED", "all_end", "tell"]

LONGEST = 15.0
"""Seconds after which a request counts as waiting for ever; nothing here is allowed a tenth."""

MEASURED = Recompute(gate="measured")


def all_end(sim: Simulation, requests: Iterable[Request], longest: float = LONGEST) -> bool:
    """Step until these requests are over; False where they are not after so many seconds."""
    until = time.monotonic() + longest
    waited_for = list(requests)
    while time.monotonic() < until:
        if all(request.phase.over for request in waited_for):
            return True
        sim.step()
    return False


def tell(sim: Simulation, tier: str, rate: LoadRate | None) -> None:
    """The ranks say how fast they find a tier."""
    condition = TierCondition(tier, TierState.HEALTHY, "", rate)
    news = tuple((rank, condition) for rank in range(sim.model.ranks))
    sim.manager.take_report(WorkerReport(conditions=news))
