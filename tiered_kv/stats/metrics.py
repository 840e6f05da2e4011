"""The one table of metrics: every name that can occur, with its kind and labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias

__all__ = ["METRICS", "DropReason", "Metric", "MetricKind", "Series", "TierState", "series_of"]

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


class DropReason(StrEnum):
    """Why a block that was to be stored in a tier was not."""

    QUEUE = "queue"
    """As many bytes wait as `limits.store_queue` allows."""
    QUEUE_TIME = "queue_time"
    """The tier has more to write than it can in `limits.store_queue_time`."""
    SLOTS = "slots"
    """Write-behind holds as many host slots as it may; or the host tier had none to give."""
    NOT_ADMITTED = "not_admitted"
    """The host tier's policy holds it for worth less than what would go for it, or the block before
    it is not there."""
    SHARE = "share"
    """It waited for a tier that is behind, and its place was given to another tier's."""
    STAGING = "staging"
    """No staging slot came free in time."""
    NO_SPACE = "no_space"
    """The store found no room."""
    WEAR = "wear"
    """The tier's `write_budget` is spent, or asks for blocks that were wanted more often."""
    UNHEALTHY = "unhealthy"
    """The tier does not work now."""
    FAILED = "failed"
    """The write failed. It is not repeated."""
    STALE = "stale"
    """The slot was given to another block before this one was written."""
    POISONED = "poisoned"
    """The job was given up."""
    CLOSING = "closing"
    """The engine ends."""


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
            Metric(
                "tier_cut_blocks_total",
                _C,
                ("tier", "reason"),
                "Blocks found in a tier and not loaded from it, by reason: slower_than_recompute, "
                "deadline (they would come too late), waited (another request was loading them for "
                "too long), backoff (the tier failed to bring them lately), tier_down.",
            ),
            Metric(
                "gate_prefixes_total",
                _C,
                ("loaded",),
                "Prefixes that were found and decided about, by what of them is loaded (whole, "
                "part, none).",
            ),
            Metric(
                "prefill_tokens_per_second",
                _G,
                ("gate",),
                "Tokens of prompts that the engine computes per second, as measured or as "
                "configured (`recompute.gate`).",
            ),
            Metric("tier_evicted_blocks_total", _C, ("tier",), "Blocks evicted from a tier."),
            Metric(
                "tier_dropped_blocks_total",
                _C,
                ("tier", "reason"),
                "Blocks that were to be stored in a tier and were not, by reason.",
            ),
            Metric(
                "tier_promoted_blocks_total",
                _C,
                ("tier",),
                "Blocks of a slow tier that were brought into host memory ahead of their load.",
            ),
            Metric(
                "tier_unpromoted_blocks_total",
                _C,
                ("tier", "reason"),
                "Blocks of a slow tier that were not brought into host memory for the request that "
                "asked for them, by reason: late (not within its wait) and slow (they would not "
                "have been) are computed, large (host memory cannot hold them) are loaded from the "
                "tier; else what their reading ended with.",
            ),
            Metric(
                "tier_corrupt_blocks_total",
                _C,
                ("tier", "found"),
                "Blocks of a tier that did not match their checksums and were dropped from it, by "
                "what found them (load, scrub, probe).",
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
            Metric(
                "tier_written_bytes_total",
                _C,
                ("tier",),
                "Bytes written to a tier's medium by all that use it, as far as the tier knows: "
                "blocks in whole pages, and what is written beside them. Where the tier does not "
                "count them: those of this rank's blocks.",
            ),
            Metric(
                "tier_written_today_bytes",
                _G,
                ("tier",),
                "What of them counts against a tier's write budget of this day (UTC).",
            ),
            Metric(
                "tier_write_budget_bytes",
                _G,
                ("tier",),
                "Bytes that may be written to a tier in a day; only where it has such a budget.",
            ),
            Metric(
                "tier_write_only",
                _G,
                ("tier",),
                "1 where blocks were stored in a tier for long and none was found in it, else 0.",
            ),
            Metric("write_behind_blocks", _G, ("tier",), "Blocks waiting to be written to a tier."),
            Metric("write_behind_bytes", _G, ("tier",), "Bytes waiting to be written to a tier."),
            Metric(
                "tier_state",
                _G,
                ("tier", "state"),
                "1 for the state that a tier is in (opening, healthy, degraded, down), else 0.",
            ),
            Metric(
                "tier_breaker",
                _G,
                ("tier", "state"),
                "1 for the state of a tier's breaker (closed, half_open, open), else 0.",
            ),
            Metric(
                "tier_probes_total",
                _C,
                ("tier", "outcome"),
                "Background reads of a tier's stored blocks that tell whether it works and how "
                "fast it is, by outcome (read, answered: nothing to read, failed, late).",
            ),
            Metric("tier_probe_bytes_total", _C, ("tier",), "Bytes that such reads brought."),
            Metric(
                "host_pool_bytes",
                _G,
                ("kind",),
                "Host block pool: bytes mapped, and of them resident since the start, in huge "
                "pages, pinned.",
            ),
            Metric(
                "trace_requests_total",
                _C,
                ("outcome",),
                "Requests that were over while a trace is recorded, by outcome (recorded, dropped: "
                "the recorder was slow, or could not write).",
            ),
            Metric(
                "internal_errors_total",
                _C,
                ("where",),
                "Errors of tiered-kv itself that were caught before they reached the engine, by "
                "the call that they were caught at.",
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
