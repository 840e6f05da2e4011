"""Counting, taking, merging and crossing process borders."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.specs import HopResult, JobResult
from tiered_kv.stats import (
    METRICS,
    DropReason,
    HopStats,
    MetricKind,
    StatsDelta,
    StatsRecorder,
    StatsSnapshot,
    TierState,
)
from tiered_kv.values import BlockKey, BlockStatus, JobId, JobKind

OK, MISSING, CORRUPT = BlockStatus.OK, BlockStatus.MISSING, BlockStatus.CORRUPT


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def job(kind: JobKind, statuses: list[BlockStatus], seconds: float, copied: int = 10) -> JobResult:
    keys = tuple(BlockKey(b"%d" % i) for i in range(len(statuses)))
    return JobResult(JobId(1), kind, "r", keys, tuple(statuses), copied, seconds)


def test_hops_count_what_was_moved_and_why_not() -> None:
    recorder = StatsRecorder("rank 0")
    recorder.hop("gpu", "cpu", "host", HopResult((OK, OK), 8192), 0.5)
    recorder.hop("gpu", "cpu", "host", HopResult((OK, CORRUPT, MISSING, CORRUPT), 4096), 0.25)
    recorder.hop("nvme", "cpu", "ssd", HopResult((), 0), 0.0)
    stats = recorder.snapshot()
    assert stats.hops() == {
        ("gpu", "cpu", "host"): HopStats(2, 3, 12288, 0.75, {"corrupt": 2, "missing": 1}),
        ("nvme", "cpu", "ssd"): HopStats(operations=1),
    }
    assert stats.hop("cpu", "gpu", "host") == HopStats()
    assert stats.counter("hop_bytes_total", "gpu", "cpu", "host") == 12288
    assert stats.counter("hop_failures_total", "gpu", "cpu", "host", "corrupt") == 2


def test_tiers_and_jobs() -> None:
    recorder = StatsRecorder("manager")
    recorder.lookup("ssd", hits=3, misses=2)
    recorder.lookup("ssd", hits=1, misses=0)
    recorder.evicted("ssd", 5)
    recorder.dropped("ssd", DropReason.QUEUE, 2)
    recorder.dropped("ssd", DropReason.NO_SPACE, 1)
    recorder.written("ssd", 30)
    recorder.written("ssd", 12)
    recorder.wear("ssd", today=40, budget=50)
    recorder.write_only("ssd", True)
    recorder.occupancy("ssd", resident_blocks=7, used_bytes=70, capacity_bytes=100, pinned_blocks=1)
    recorder.write_behind("ssd", blocks=2, bytes_=20)
    recorder.state("ssd", TierState.OPENING)
    recorder.state("ssd", TierState.HEALTHY)
    recorder.job(job(JobKind.LOAD, [OK], 0.25))
    recorder.job(job(JobKind.LOAD, [OK, MISSING], 0.5))
    recorder.job(job(JobKind.LOAD, [MISSING], 60.0))
    recorder.job(job(JobKind.STORE, [OK], 0.001))
    stats = recorder.snapshot()
    tier = stats.tiers()["ssd"]
    assert list(stats.tiers()) == ["ssd"]
    assert (tier.hits, tier.misses, tier.evicted) == (4, 2, 5)
    assert tier.dropped == {"queue": 2, "no_space": 1}
    assert (tier.written_bytes, tier.written_today_bytes, tier.write_budget_bytes) == (42, 40, 50)
    assert tier.write_only
    assert (tier.resident_blocks, tier.used_bytes, tier.capacity_bytes) == (7, 70, 100)
    assert (tier.pinned_blocks, tier.write_behind_blocks, tier.write_behind_bytes) == (1, 2, 20)
    assert tier.states == ("healthy",)
    load = stats.jobs()["load"]
    assert load.outcomes == {"ok": 1, "partial": 1, "failed": 1}
    assert (load.bytes, load.seconds) == (30, 60.75)
    seconds = stats.histograms["job_duration_seconds", ("load",)]
    assert (seconds.count, seconds.total) == (3, 60.75)
    assert seconds.counts[-1] == 1, "longer than the last bound"
    store = stats.histograms["job_duration_seconds", ("store",)]
    assert store.counts[0] == 1, "a bound belongs to its bucket"


def test_take_gives_what_is_new_once() -> None:
    clock = Clock()
    recorder = StatsRecorder("manager", clock=clock)
    assert recorder.take() is None
    recorder.lookup("host", hits=2, misses=0)
    recorder.occupancy("host", resident_blocks=2, used_bytes=2, capacity_bytes=9)
    clock.now = 101.0
    first = recorder.take()
    assert isinstance(first, StatsDelta)
    assert (first.time, first.counter("tier_hits_total", "host")) == (101.0, 2)
    assert first.gauge("tier_resident_blocks", "host") == 2
    assert recorder.take() is None
    recorder.occupancy("host", resident_blocks=2, used_bytes=2, capacity_bytes=9)
    recorder.lookup("host", hits=0, misses=0)
    assert recorder.take() is None, "nothing changed"
    recorder.occupancy("host", resident_blocks=3, used_bytes=2, capacity_bytes=9)
    second = recorder.take()
    assert second is not None
    assert [series[0] for series, _ in second.gauges] == ["tier_resident_blocks"]
    recorder.lookup("host", hits=1, misses=1)
    third = recorder.take()
    assert third is not None
    together = first.merge(second).merge(third)
    assert isinstance(together, StatsDelta)
    whole = recorder.snapshot()
    assert together.counters == whole.counters
    assert {k: g.value for k, g in together.gauges.items()} == {
        k: g.value for k, g in whole.gauges.items()
    }


def test_sources_add_up_and_the_younger_gauge_of_a_source_counts() -> None:
    clock = Clock()
    ranks = [StatsRecorder(f"rank {i}", clock=clock) for i in range(2)]
    for rank, blocks in zip(ranks, (3, 4), strict=True):
        rank.write_behind("ssd", blocks=blocks, bytes_=blocks * 10)
        rank.state("ssd", TierState.HEALTHY)
        rank.job(job(JobKind.LOAD, [OK], 0.01))
    old = [rank.take() for rank in ranks]
    clock.now += 1
    ranks[0].write_behind("ssd", blocks=0, bytes_=0)
    ranks[0].state("ssd", TierState.DOWN)
    new = ranks[0].take()
    assert new is not None
    assert old[0] is not None
    assert old[1] is not None
    for merged in (old[0].merge(old[1]).merge(new), new.merge(old[1]).merge(old[0])):
        assert merged.tier("ssd").write_behind_blocks == 4
        assert merged.tier("ssd").states == ("down", "healthy")
        assert merged.histograms["job_duration_seconds", ("load",)].count == 2
        assert merged.time == 101.0


def test_snapshots_do_not_change() -> None:
    recorder = StatsRecorder("manager")
    recorder.evicted("host", 1)
    before = recorder.snapshot()
    recorder.evicted("host", 1)
    assert before.counter("tier_evicted_blocks_total", "host") == 1
    assert recorder.snapshot().counter("tier_evicted_blocks_total", "host") == 2


def test_crosses_a_process_border_as_plain_values() -> None:
    recorder = StatsRecorder("rank 1")
    recorder.hop("gpu", "cpu", "host", HopResult((OK, MISSING), 4096), 0.5)
    recorder.state("host", TierState.DEGRADED)
    recorder.job(job(JobKind.STORE, [OK], 0.3))
    stats = recorder.snapshot()
    data = json.loads(json.dumps(stats.as_dict()))
    assert StatsSnapshot.from_dict(data) == stats
    delta = recorder.take()
    assert delta is not None
    assert StatsDelta.from_dict(delta.as_dict()) == delta
    assert isinstance(StatsDelta.from_dict(delta.as_dict()), StatsDelta)
    empty = StatsRecorder("x", clock=Clock()).snapshot()
    assert StatsSnapshot.from_dict(empty.as_dict()) == empty


@pytest.mark.parametrize(
    "change",
    [
        {"time": "now"},
        {"counters": [["no_such_total", [], 1]]},
        {"counters": [["tier_hits_total", [], 1]]},
        {"counters": [["tier_hits_total", ["host"], "1"]]},
        {"counters": [["tier_hits_total"]]},
        {"gauges": [["tier_used_bytes", ["host"], 1]]},
        {"histograms": [["job_duration_seconds", ["load"], [1], 1.0]]},
        {"histograms": None},
    ],
)
def test_foreign_data_is_refused(change: dict[str, object]) -> None:
    data = StatsRecorder("x").snapshot().as_dict() | change
    with pytest.raises(ValueError, match="not statistics of this version"):
        StatsSnapshot.from_dict(data)


def test_only_declared_series_exist() -> None:
    stats = StatsRecorder("x").snapshot()
    with pytest.raises(ValueError, match="not declared"):
        stats.counter("hop_furlongs_total")
    with pytest.raises(ValueError, match="has the labels"):
        stats.counter("hop_bytes_total", "gpu")
    with pytest.raises(ValueError, match="cannot grow by -1"):
        StatsRecorder("x").evicted("host", -1)


def test_the_table_of_metrics_is_sound() -> None:
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.documentation.endswith(".")
        assert len(set(metric.labels)) == len(metric.labels) > 0
        assert (metric.kind is MetricKind.COUNTER) == name.endswith("_total")
        assert (metric.kind is MetricKind.HISTOGRAM) == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert not name.startswith("tiered_kv")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=30), st.data())
def test_deltas_add_up_to_the_whole(events: list[tuple[str, int]], data: st.DataObject) -> None:
    recorder = StatsRecorder("x")
    gathered: StatsSnapshot = StatsDelta(0.0)
    for tier, blocks in events:
        recorder.evicted(tier, blocks)
        recorder.occupancy(tier, resident_blocks=blocks, used_bytes=0, capacity_bytes=1)
        if data.draw(st.booleans()) and (delta := recorder.take()):
            gathered = gathered.merge(delta)
    if delta := recorder.take():
        gathered = gathered.merge(delta)
    whole = recorder.snapshot()
    assert gathered.counters == whole.counters
    assert gathered.tiers() == whole.tiers()


def test_threads_lose_no_count() -> None:
    recorder = StatsRecorder("x")
    taken: list[StatsDelta] = []
    start = threading.Barrier(5)

    def count() -> None:
        start.wait()
        for _ in range(2000):
            recorder.evicted("host", 1)

    def take() -> None:
        start.wait()
        while any(t.is_alive() for t in threads[:4]):
            if delta := recorder.take():
                taken.append(delta)

    threads = [threading.Thread(target=count) for _ in range(4)]
    threads.append(threading.Thread(target=take))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if delta := recorder.take():
        taken.append(delta)
    print(f"taken {len(taken)} times")
    assert recorder.snapshot().counter("tier_evicted_blocks_total", "host") == 8000
    assert sum(d.counter("tier_evicted_blocks_total", "host") for d in taken) == 8000
