"""The one table of metrics: every name that can occur, with its kind and labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias

__all__ = ["METRICS", "Metric", "MetricKind", "Series", "TierState", "series_of"]

Series: TypeAlias = tuple[str, tuple[str, ...]]
"""Name of a metric, and the values of its labels in the order of `Metric.labels`."""


class MetricKind(StrEnum):
    """How a metric's values combine."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class TierState(StrEnum):
    """Whether a tier serves."""

    OPENING = "opening"
    """Answers misses until it is open."""
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """Serves, but not as configured or not always."""
    DOWN = "down"
    """Avoided until it works again."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of series."""

    name: str
    """Without the prefix: `tiered_kv_`, inside vLLM `vllm:tiered_kv_`."""
    kind: MetricKind
    labels: tuple[str, ...]
    documentation: str
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without the last one (infinity)."""


_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)
_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_HOP = ("src", "dst", "tier")

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        metric.name: metric
        for metric in (
            Metric("hop_operations_total", _C, _HOP, "Handler calls of a hop."),
            Metric("hop_blocks_total", _C, _HOP, "Blocks that a hop moved whole."),
            Metric("hop_bytes_total", _C, _HOP, "Bytes that a hop copied."),
            Metric("hop_seconds_total", _C, _HOP, "Seconds that a hop's calls took."),
            Metric(
                "hop_failures_total",
                _C,
                (*_HOP, "reason"),
                "Blocks that a hop did not move, by reason.",
            ),
            Metric("tier_hits_total", _C, ("tier",), "Blocks looked up and found in a tier."),
            Metric("tier_misses_total", _C, ("tier",), "Blocks looked up and not in a tier."),
            Metric("tier_evicted_blocks_total", _C, ("tier",), "Blocks evicted from a tier."),
            Metric(
                "tier_dropped_blocks_total",
                _C,
                ("tier", "reason"),
                "Blocks that were to be stored in a tier and were not, by reason.",
            ),
            Metric(
                "tier_corrupt_blocks_total",
                _C,
                ("tier", "found"),
                "Blocks of a tier that did not match their checksums and were dropped from it, by "
                "what found them (load, scrub).",
            ),
            Metric(
                "tier_unverified_blocks_total",
                _C,
                ("tier",),
                "Blocks loaded from a tier without comparing them with their checksums, as its "
                "`verify` says.",
            ),
            Metric(
                "scrub_blocks_total",
                _C,
                ("tier",),
                "Blocks of a tier that its scrub compared with their checksums.",
            ),
            Metric("scrub_bytes_total", _C, ("tier",), "Bytes that a tier's scrub read."),
            Metric(
                "scrub_failures_total",
                _C,
                ("tier",),
                "Blocks that a tier's scrub could not read, and rounds that it gave up.",
            ),
            Metric("scrub_rounds_total", _C, ("tier",), "Rounds that a tier's scrub finished."),
            Metric("tier_resident_blocks", _G, ("tier",), "Whole blocks in a tier."),
            Metric("tier_pinned_blocks", _G, ("tier",), "Blocks that may not be evicted now."),
            Metric("tier_used_bytes", _G, ("tier",), "Bytes that count against a tier's budget."),
            Metric("tier_capacity_bytes", _G, ("tier",), "A tier's budget."),
            Metric("write_behind_blocks", _G, ("tier",), "Blocks waiting to be written to a tier."),
            Metric("write_behind_bytes", _G, ("tier",), "Bytes waiting to be written to a tier."),
            Metric(
                "tier_state",
                _G,
                ("tier", "state"),
                "1 for the state that a tier is in (opening, healthy, degraded, down), else 0.",
            ),
            Metric(
                "host_pool_bytes",
                _G,
                ("kind",),
                "Host block pool: bytes mapped, and of them resident since the start, in huge "
                "pages, pinned.",
            ),
            Metric(
                "jobs_total",
                _C,
                ("kind", "outcome"),
                "Jobs of the engine (load, store) by outcome (ok, partial, failed).",
            ),
            Metric(
                "job_bytes_total",
                _C,
                ("kind",),
                "Bytes that entered (load) or left (store) the engine's KV cache.",
            ),
            Metric("job_seconds_total", _C, ("kind",), "Seconds from submission to the end."),
            Metric(
                "job_duration_seconds",
                _H,
                ("kind",),
                "Seconds from submission to the end.",
                _SECONDS,
            ),
        )
    }
)
"""Every metric, by name, in the order in which they are shown."""


def series_of(name: str, labels: Iterable[str]) -> Series:
    """The series of a declared metric.

    Raises:
        ValueError: the metric is not declared, or has other labels.
    """
    metric = METRICS.get(name)
    values = tuple(labels)
    if metric is None:
        raise ValueError(f"metric {name!r} is not declared")
    if len(values) != len(metric.labels):
        raise ValueError(f"metric {name} has the labels {metric.labels}, not {values}")
    return name, values
