"""Which blocks are worth storing: those that were wanted often enough, where it costs a tier's life
more often."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from tiered_kv.values import BlockKey

__all__ = ["Admission", "required_uses"]

HOUR = 1 / 24
"""An hour's share of a day."""


def required_uses(least: int, *, used: float, elapsed: float) -> int | None:
    """How often a block must have been wanted before it is stored in a tier with a write budget.

    While the budget is used at most an hour ahead of the day, `least` times; for each further hour
    that is begun, once more. Where it is used up: None, never.

    Args:
        least: how often without a budget.
        used: share of the day's budget that is used.
        elapsed: share of the day that has passed.
    """
    if used >= 1:
        return None
    # Rounded, so that what is exactly an hour ahead is not one more for want of a last digit.
    ahead = round((used - elapsed) / HOUR, 6) - 1
    return least + max(0, math.ceil(ahead))


class Admission:
    """Counts how often blocks were wanted. Not thread-safe.

    Remembers the most recently wanted `memory` keys.
    """

    def __init__(self, min_uses: int, memory: int = 262_144) -> None:
        if min_uses < 1:
            raise ValueError(f"min_uses must be at least 1, not {min_uses}")
        self.min_uses = min_uses
        """How often a block must have been wanted to be stored anywhere."""
        self._memory = memory
        self._wanted: OrderedDict[BlockKey, int] = OrderedDict()

    def wanted(self, keys: Sequence[BlockKey]) -> list[int]:
        """Each key is wanted once more; how often it was by now."""
        uses: list[int] = []
        for key in keys:
            uses.append(self._wanted.pop(key, 0) + 1)
            self._wanted[key] = uses[-1]
        while len(self._wanted) > self._memory:
            self._wanted.popitem(last=False)
        return uses
