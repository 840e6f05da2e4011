"""From what a replay found to what an operator asks for: time to the first token, GPU time, wear.

A request whose prompt has `t` tokens, of which the engine's own cache holds `e`, and which loads
`h` of the host's and `s` of the SSD's, has its first token after

    max(load time of h, load time of s) + (t - e - h - s) / prefill rate

seconds: parts in different tiers are loaded side by side, and the rest is computed behind them.
How much of what it finds is loaded is up to the gate of `recompute` (`tiered_kv.planning.cuts`).
That is of a request that the engine serves at once; time in its queue is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiered_kv.planning.grid import Cell, Measured, Outcome
from tiered_kv.planning.speeds import Speeds

__all__ = ["RATED_YEARS", "SECONDS_PER_DAY", "Drive", "Figures", "FirstToken", "figures_of"]

SECONDS_PER_DAY = 86_400

RATED_YEARS = 5.0
"""Years for which drives are rated to bear their DWPD."""


@dataclass(frozen=True, slots=True)
class Drive:
    """What is known of the SSD."""

    rated_dwpd: float = 1.0
    """Times that its whole capacity may be written per day, for `RATED_YEARS`."""
    rated_from: str = "assumed"


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Seconds to the first token."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: npt.NDArray[np.float64]) -> FirstToken:
        """Of a request each."""
        p50, p99 = np.percentile(seconds, (50, 99))
        return cls(float(seconds.mean()), float(p50), float(p99))


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one cell. Shares are of the tokens of all measured prompts."""

    cell: Cell
    engine_hits: float
    host_hits: float
    ssd_hits: float
    loaded: float
    """Share that is loaded from the tiers: what was found in them, but for what computing brings
    sooner, and for loads that would take too long."""
    first_token: FirstToken | None
    """None where the trace does not tell requests apart."""
    gpu_seconds: float | None
    """That engines compute prompts for, per second of the trace: how many of them are busy with
    it. None where the trace takes no time."""
    saved_gpu_seconds: float | None
    """The same, of what is loaded in place of being computed."""
    ssd_bytes_per_day: float | None
    """Written; None where the trace takes no time."""
    ssd_drive_writes: float | None
    """The same, as times of its capacity."""
    ssd_full: bool
    """Whether blocks had to go from it."""
    late: int = 0
    """Requests that would load more if loads could take longer."""

    @property
    def hits(self) -> float:
        """In the tiers, the engine's own cache not among them."""
        return self.host_hits + self.ssd_hits

    def years(self, drive: Drive) -> float | None:
        """That a drive of the SSD's size lasts; None where it is not written to."""
        writes = self.ssd_drive_writes
        return None if not writes else RATED_YEARS * drive.rated_dwpd / writes


def figures_of(
    outcome: Outcome,
    measured: Measured,
    speeds: Speeds,
    *,
    block_bytes: float,
    whole_requests: bool,
) -> Figures:
    """The figures of a cell.

    Args:
        outcome: of its replay.
        measured: the part of the trace that it is of.
        speeds: of the engine and the tiers.
        block_bytes: of a block of the trace, over all ranks.
        whole_requests: see `Trace.whole_requests`.
    """
    tokens = measured.tokens
    total = float(tokens.sum())
    loaded, computed = float(outcome.loaded.sum()), float(outcome.computed.sum())
    seconds = measured.seconds
    written = outcome.ssd_stored * block_bytes
    per_day = written / seconds * SECONDS_PER_DAY if seconds else None
    size = outcome.cell.ssd_bytes
    return Figures(
        outcome.cell,
        float(outcome.engine.sum()) / total,
        float(outcome.host.sum()) / total,
        float(outcome.ssd.sum()) / total,
        loaded / total,
        FirstToken.of(outcome.first_token) if whole_requests else None,
        computed / speeds.prefill / seconds if seconds else None,
        loaded / speeds.prefill / seconds if seconds else None,
        per_day if size else None,
        per_day / size if size and per_day is not None else None,
        bool(outcome.ssd_evicted),
        outcome.late,
    )
