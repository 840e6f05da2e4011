"""Our counters as vLLM's metrics. Inside vLLM every name has to begin with `vllm:`."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from tiered_kv.stats import METRICS, Metric, MetricKind, StatsDelta

__all__ = ["metric_definitions", "to_vllm_stats"]

PREFIX = "vllm:tiered_kv_"


def _name(metric: Metric) -> str:
    # vLLM's Prometheus client adds `_total` to counters itself.
    return PREFIX + metric.name.removesuffix("_total")


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Declare every counter and gauge that any tier or plug-in can emit.

    Histograms are left out: vLLM takes single observations, ours are counted in buckets already.
    """
    kinds = {
        MetricKind.COUNTER: OffloadingCounterMetadata,
        MetricKind.GAUGE: OffloadingGaugeMetadata,
    }
    return {
        _name(metric): kinds[metric.kind](metric.documentation, metric.labels)
        for metric in METRICS.values()
        if metric.kind in kinds
    }


def to_vllm_stats(delta: StatsDelta | None) -> OffloadingConnectorStats | None:
    """Plain numbers that cross vLLM's process borders; None where nothing was counted."""
    if delta is None:
        return None
    stats = OffloadingConnectorStats()
    for (name, labels), value in delta.counters.items():
        stats.increase_counter(_name(METRICS[name]), value, labels)
    for ((name, labels), _), gauge in delta.gauges.items():
        stats.set_gauge(_name(METRICS[name]), gauge.value, labels)
    return stats
