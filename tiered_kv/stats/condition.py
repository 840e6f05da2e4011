"""How a rank finds a tier: what the manager has to know of it to choose well."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.stats.metrics import TierState

__all__ = ["SECONDS_PER_DAY", "LoadRate", "TierCondition", "TierWear", "day_of"]

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class LoadRate:
    """What loading from a tier costs, from the tier to the engine's cache: `latency_seconds` once
    per load, and its bytes at `bytes_per_second`."""

    bytes_per_second: float
    latency_seconds: float

    def seconds(self, size: int) -> float:
        """Predicted seconds of a load of `size` bytes."""
        return self.latency_seconds + size / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class TierCondition:
    """One tier as one rank finds it now."""

    tier: str
    state: TierState
    reason: str
    """What is wrong with it; empty where nothing is."""
    load: LoadRate | None
    """As measured lately; None where nothing is known."""


def day_of(seconds: float) -> int:
    """The day (UTC) that a time of the epoch lies in, counted from the epoch."""
    return int(seconds // SECONDS_PER_DAY)


@dataclass(frozen=True, slots=True)
class TierWear:
    """What was written to a tier that has a write budget."""

    tier: str
    day: int
    """See `day_of`."""
    written_bytes: int
    """On that day, by all that use the tier."""
    budget_bytes: int
    """Per day; above 0."""

    def used(self, day: int) -> float:
        """The share of the budget of `day` that is used; may exceed 1."""
        return self.written_bytes / self.budget_bytes if day <= self.day else 0.0
