"""What `tiered-kv bench` finds out, as values."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "LIMITS",
    "Figure",
    "Move",
    "Sample",
    "SizeResult",
    "TierResult",
    "Way",
    "figures_of",
]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run."""

    seconds: float
    processor_seconds: float | None
    """Of all threads of the process that did it; None where that is not known."""


@dataclass(frozen=True, slots=True)
class Move:
    """What is measured."""

    kind: str
    """"hop", "chain" or "limit"."""
    name: str
    """`cpu->ssd`, `gpu->cpu->ssd`, or one of `LIMITS`."""
    direction: str = ""
    """"store" or "load"; empty for what is both."""
    verify: str = ""
    """"always" or "never", where blocks are compared with their checksums or not."""
    cache: str = ""
    """"cold" where the page cache held nothing of the blocks, "warm" where it held them; empty
    where there is none in between."""
    limit: str = ""
    """Which of `LIMITS` it is held against."""


LIMITS = (
    *("memcpy", "copy to device", "copy to host"),
    *("disk write", "disk read", "fio write", "fio read"),
)
"""Names of the limits. What fio does is shown beside the disk's; nothing is held against it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What came of one move, over the rounds that count."""

    move: Move
    best_gib_per_second: float
    median_gib_per_second: float
    processor_seconds_per_gib: float | None
    """Median."""
    of_limit: float | None
    """Its median, as a share of that of its limit in the same rounds; None for a limit."""


@dataclass(frozen=True, slots=True)
class Way:
    """A chain that leads between the engine and a tier, and whether routing takes it."""

    source: str
    destination: str
    chain: str
    chosen: bool
    seconds_per_block: float | None
    """Estimated by routing from what was measured; None where it is not to be used."""
    reason: str
    """Where the estimate comes from, or why the chain is not taken."""


@dataclass(frozen=True, slots=True)
class SizeResult:
    """All figures of one block size."""

    block_bytes: int
    blocks: int
    """Moved together."""
    figures: Sequence[Figure]
    ways: Sequence[Way]


@dataclass(slots=True)
class TierResult:
    """One tier, filled while it is measured. Where it could not be measured, or not to the end,
    `problem` says why."""

    tier: str
    type: str
    place: str = ""
    """Where it was measured."""
    written_bytes: int = 0
    """Most that is written to its medium."""
    sizes: list[SizeResult] = field(default_factory=list)
    modes: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """What is in effect: of the "pool" or the "store", and by the label of a hop."""
    limits: dict[str, str] = field(default_factory=dict)
    """How each limit was measured."""
    problem: str = ""
    failed: bool = False
    """Whether the problem is a fault, and not that there was nothing to measure."""


def figures_of(samples: Mapping[Move, Sequence[Sample]], nbytes: int) -> list[Figure]:
    """Limits first, else in the order of the moves; each run moved `nbytes` bytes."""
    gib = nbytes / 2**30
    medians = {
        move: statistics.median(one.seconds for one in runs) for move, runs in samples.items()
    }
    limits = {move.name: seconds for move, seconds in medians.items() if move.kind == "limit"}
    figures: list[Figure] = []
    for move in sorted(samples, key=lambda one: one.kind != "limit"):
        seconds = medians[move]
        against = limits.get(move.limit)
        figures.append(
            Figure(
                move,
                gib / min(one.seconds for one in samples[move]),
                gib / seconds,
                _per(gib, [one.processor_seconds for one in samples[move]]),
                None if against is None else against / seconds,
            )
        )
    return figures


def _per(gib: float, seconds: Sequence[float | None]) -> float | None:
    """Median of those that are known, per GiB."""
    known = [value for value in seconds if value is not None]
    return statistics.median(known) / gib if known else None
