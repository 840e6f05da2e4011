"""What happened, counted: the one table of metrics, a recorder, and immutable snapshots.

Everything is a number under a *series*: the name of a metric and one value per label. Every name
that can occur is declared in `METRICS`; a plug-in brings label values, never names. The command
line, Prometheus and the connector's own stats read the same snapshots.

Counters and histograms only grow. A gauge belongs to the process that reports it (its *source*,
for example "manager" or "rank 0") and carries the time at which it was set, so that snapshots of
several sources, or of one source at several times, merge into the truth.
"""

from tiered_kv.stats.condition import LoadRate, TierCondition, TierWear
from tiered_kv.stats.metrics import METRICS, DropReason, Metric, MetricKind, Series, TierState
from tiered_kv.stats.recorder import StatsRecorder
from tiered_kv.stats.snapshot import (
    GaugeValue,
    HistogramValue,
    HopStats,
    JobStats,
    StatsDelta,
    StatsSnapshot,
    TierStats,
)

__all__ = [
    "METRICS",
    "DropReason",
    "GaugeValue",
    "HistogramValue",
    "HopStats",
    "JobStats",
    "LoadRate",
    "Metric",
    "MetricKind",
    "Series",
    "StatsDelta",
    "StatsRecorder",
    "StatsSnapshot",
    "TierCondition",
    "TierState",
    "TierStats",
    "TierWear",
]
