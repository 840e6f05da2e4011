"""How stores order their blocks by frequency: one number per block, a time in nanoseconds."""

from __future__ import annotations

import math

__all__ = ["AgedFrequency"]


class AgedFrequency:
    """Least often used goes first, where a use counts half after each half-life. A `Scoring`.

    The count `c = sum(2**((use - t) / h))` of uses at a time `t` orders blocks as the time
    `t + h * log2(c)` does, which does not depend on `t`. A further use at `now` makes of a score
    `s` the score `now + h * log2(1 + 2**((s - now) / h))`.
    """

    def __init__(self, half_life: float) -> None:
        """`half_life` in seconds.

        Raises:
            ValueError: it is not above 0.
        """
        if not half_life > 0:
            raise ValueError(f"a half-life is above 0 seconds, not {half_life}")
        self._half_life = half_life * 1e9

    def score(self, before: int | None, now: int) -> int:
        """The aged count of uses, as a time."""
        if before is None:
            return now
        ahead = (before - now) / self._half_life
        if ahead > 0:  # the power stays below 1 either way
            return before + round(self._half_life * math.log2(1 + 2.0**-ahead))
        return now + round(self._half_life * math.log2(1 + 2.0**ahead))
