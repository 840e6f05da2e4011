"""Statistics as immutable values that merge and cross process borders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from tiered_kv.stats.metrics import METRICS, Series, series_of

__all__ = [
    "GaugeValue",
    "HistogramValue",
    "HopStats",
    "JobStats",
    "StatsDelta",
    "StatsSnapshot",
    "TierStats",
    "add_histograms",
]

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class GaugeValue:
    """What one source last said."""

    value: float
    time: float
    """Seconds since the epoch at which it was set."""


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """Observations of a histogram."""

    counts: tuple[int, ...]
    """Per bucket, not cumulated; one more than `Metric.buckets`."""
    total: float
    """Sum of the observations."""

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class HopStats:
    """What one hop did."""

    operations: int = 0
    blocks: int = 0
    """Moved whole."""
    bytes: int = 0
    seconds: float = 0.0
    """Sum over calls; calls that run side by side count each."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Blocks by `BlockStatus` value."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """What happened to one tier, and how it is now (summed over sources)."""

    hits: int = 0
    misses: int = 0
    cut: Mapping[str, int] = field(default_factory=dict)
    """Blocks that were found and not loaded, by reason."""
    evicted: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Blocks by reason."""
    corrupt: Mapping[str, int] = field(default_factory=dict)
    """Blocks by what found them: load, scrub, probe."""
    unverified: int = 0
    """Blocks that were loaded without comparing them with their checksums."""
    scrubbed_blocks: int = 0
    scrubbed_bytes: int = 0
    resident_blocks: int = 0
    pinned_blocks: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    written_bytes: int = 0
    written_today_bytes: int = 0
    write_budget_bytes: int = 0
    """Per day; 0: none."""
    write_only: bool = False
    """Blocks are stored in it, and for long none was found there."""
    write_behind_blocks: int = 0
    write_behind_bytes: int = 0
    states: tuple[str, ...] = ()
    """States that sources report, sorted; one where they agree."""
    probes: Mapping[str, int] = field(default_factory=dict)
    """Background reads by outcome."""


@dataclass(frozen=True, slots=True)
class JobStats:
    """Jobs of one kind."""

    outcomes: Mapping[str, int] = field(default_factory=dict)
    """Jobs by outcome: ok, partial, failed."""
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StatsSnapshot:
    """Statistics at one moment, or (as `StatsDelta`) of one stretch of time."""

    time: float
    """Seconds since the epoch at which it was taken."""
    counters: Mapping[Series, float] = field(default_factory=dict)
    gauges: Mapping[tuple[Series, str], GaugeValue] = field(default_factory=dict)
    """By series and source."""
    histograms: Mapping[Series, HistogramValue] = field(default_factory=dict)

    def counter(self, name: str, *labels: str) -> float:
        """A counter's value; 0 where nothing was counted."""
        return self.counters.get(series_of(name, labels), 0)

    def gauge(self, name: str, *labels: str) -> float:
        """A gauge's value, summed over sources; 0 where nothing was reported."""
        wanted = series_of(name, labels)
        return sum(g.value for (series, _), g in self.gauges.items() if series == wanted)

    def hops(self) -> dict[tuple[str, str, str], HopStats]:
        """By (source medium, destination medium, tier)."""
        names = {
            (labels[0], labels[1], labels[2])
            for name, labels in self.counters
            if name.startswith("hop_")
        }
        return {hop: self.hop(*hop) for hop in sorted(names)}

    def hop(self, src: str, dst: str, tier: str) -> HopStats:
        """One hop; all zero where it did nothing."""
        hop = (src, dst, tier)
        return HopStats(
            operations=int(self.counter("hop_operations_total", *hop)),
            blocks=int(self.counter("hop_blocks_total", *hop)),
            bytes=int(self.counter("hop_bytes_total", *hop)),
            seconds=self.counter("hop_seconds_total", *hop),
            failures=self._by_last_label("hop_failures_total", hop),
        )

    def tiers(self) -> dict[str, TierStats]:
        """By the tier's name."""
        known = [*self.counters, *(series for series, _ in self.gauges)]
        names = {labels[0] for name, labels in known if METRICS[name].labels[0] == "tier"}
        return {name: self.tier(name) for name in sorted(names)}

    def tier(self, name: str) -> TierStats:
        """One tier; all zero where nothing is known of it."""
        states = {
            series[1][1]
            for (series, _), gauge in self.gauges.items()
            if series[0] == "tier_state" and series[1][0] == name and gauge.value
        }
        return TierStats(
            hits=int(self.counter("tier_hits_total", name)),
            misses=int(self.counter("tier_misses_total", name)),
            cut=self._by_last_label("tier_cut_blocks_total", (name,)),
            evicted=int(self.counter("tier_evicted_blocks_total", name)),
            dropped=self._by_last_label("tier_dropped_blocks_total", (name,)),
            corrupt=self._by_last_label("tier_corrupt_blocks_total", (name,)),
            unverified=int(self.counter("tier_unverified_blocks_total", name)),
            scrubbed_blocks=int(self.counter("scrub_blocks_total", name)),
            scrubbed_bytes=int(self.counter("scrub_bytes_total", name)),
            resident_blocks=int(self.gauge("tier_resident_blocks", name)),
            pinned_blocks=int(self.gauge("tier_pinned_blocks", name)),
            used_bytes=int(self.gauge("tier_used_bytes", name)),
            capacity_bytes=int(self.gauge("tier_capacity_bytes", name)),
            written_bytes=int(self.counter("tier_written_bytes_total", name)),
            written_today_bytes=int(self.gauge("tier_written_today_bytes", name)),
            write_budget_bytes=int(self.gauge("tier_write_budget_bytes", name)),
            write_only=bool(self.gauge("tier_write_only", name)),
            write_behind_blocks=int(self.gauge("write_behind_blocks", name)),
            write_behind_bytes=int(self.gauge("write_behind_bytes", name)),
            states=tuple(sorted(states)),
            probes=self._by_last_label("tier_probes_total", (name,)),
        )

    def jobs(self) -> dict[str, JobStats]:
        """By kind: load, store."""
        kinds = {labels[0] for name, labels in self.counters if name == "jobs_total"}
        return {
            kind: JobStats(
                outcomes=self._by_last_label("jobs_total", (kind,)),
                bytes=int(self.counter("job_bytes_total", kind)),
                seconds=self.counter("job_seconds_total", kind),
            )
            for kind in sorted(kinds)
        }

    def _by_last_label(self, name: str, first: tuple[str, ...]) -> dict[str, int]:
        return {
            labels[-1]: int(value)
            for (known, labels), value in sorted(self.counters.items())
            if known == name and labels[:-1] == first
        }

    def merge(self, other: StatsSnapshot) -> Self:
        """Both together: counters and histograms add up, per source the younger gauge counts.

        For deltas of one source in any order, and for deltas or snapshots of several sources.
        """
        counters = _sum(self.counters, other.counters, lambda a, b: a + b)
        histograms = _sum(self.histograms, other.histograms, add_histograms)
        gauges = _sum(self.gauges, other.gauges, lambda a, b: b if b.time >= a.time else a)
        return type(self)(max(self.time, other.time), counters, gauges, histograms)

    def as_dict(self) -> dict[str, Any]:
        """Lists, strings and numbers only: fit for JSON and for another process."""
        return {
            "time": self.time,
            "counters": [[name, list(ls), v] for (name, ls), v in self.counters.items()],
            "gauges": [
                [name, list(ls), source, gauge.value, gauge.time]
                for ((name, ls), source), gauge in self.gauges.items()
            ],
            "histograms": [
                [name, list(ls), list(h.counts), h.total]
                for (name, ls), h in self.histograms.items()
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`.

        Raises:
            ValueError: `data` is not what `as_dict` gives, or holds a metric that is not declared.
        """
        try:
            return cls(
                float(data["time"]),
                {series_of(name, ls): _number(v) for name, ls, v in data["counters"]},
                {
                    (series_of(name, ls), str(source)): GaugeValue(float(value), float(at))
                    for name, ls, source, value, at in data["gauges"]
                },
                {
                    series_of(name, ls): _histogram(name, counts, total)
                    for name, ls, counts, total in data["histograms"]
                },
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"these are not statistics of this version: {error}") from error


class StatsDelta(StatsSnapshot):
    """What was gathered since the last `StatsRecorder.take`; gauges that were set since then."""

    __slots__ = ()


def _number(value: Any) -> float:
    if isinstance(value, int | float):
        return value
    raise TypeError(f"{value!r} is not a number")


def _histogram(name: str, counts: Sequence[int], total: float) -> HistogramValue:
    if len(counts) != len(METRICS[name].buckets) + 1:
        raise ValueError(f"{name} has {len(METRICS[name].buckets) + 1} buckets, not {len(counts)}")
    return HistogramValue(tuple(int(count) for count in counts), float(total))


def add_histograms(a: HistogramValue, b: HistogramValue) -> HistogramValue:
    """Both together."""
    counts = tuple(x + y for x, y in zip(a.counts, b.counts, strict=True))
    return HistogramValue(counts, a.total + b.total)


def _sum(a: Mapping[K, V], b: Mapping[K, V], add: Callable[[V, V], V]) -> dict[K, V]:
    both = dict(a)
    for key, value in b.items():
        both[key] = add(both[key], value) if key in both else value
    return both
