"""Counts what happens, from any thread."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tiered_kv.specs import HopResult, JobResult
from tiered_kv.stats.metrics import METRICS, DropReason, Series, TierState, series_of
from tiered_kv.stats.snapshot import (
    GaugeValue,
    HistogramValue,
    StatsDelta,
    StatsSnapshot,
    add_histograms,
)
from tiered_kv.values import BlockStatus

__all__ = ["StatsRecorder"]

S = TypeVar("S", bound=StatsSnapshot)


class StatsRecorder:
    """Counts. Thread-safe; every call takes microseconds and never blocks on I/O."""

    def __init__(self, source: str, *, clock: Callable[[], float] = time.time) -> None:
        """`source` names this process in gauges; `clock` gives seconds since the epoch."""
        self._source = source
        self._clock = clock
        self._lock = threading.Lock()
        self._total = _Sums()
        self._since = _Sums()
        self._silent = False

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Count nothing meanwhile, whoever counts; gauges are still set. For a self-test before
        the engine's work begins."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def hop(self, src: str, dst: str, tier: str, result: HopResult, seconds: float) -> None:
        """One call of a hop's handler (`src` and `dst` are media) has returned.

        A call that raised is recorded as a result whose blocks carry the status that was made of
        the error.
        """
        labels = (src, dst, tier)
        moved = result.statuses.count(BlockStatus.OK)
        with self._lock:
            self._add("hop_operations_total", labels, 1)
            self._add("hop_blocks_total", labels, moved)
            self._add("hop_bytes_total", labels, result.copied_bytes)
            self._add("hop_seconds_total", labels, seconds)
            for status in set(result.statuses) - {BlockStatus.OK}:
                failed = result.statuses.count(status)
                self._add("hop_failures_total", (*labels, status.value), failed)

    def job(self, result: JobResult) -> None:
        """A job has ended."""
        good = result.statuses.count(BlockStatus.OK)
        outcome = "ok" if result.ok else "partial" if good else "failed"
        kind = (result.kind.value,)
        with self._lock:
            self._add("jobs_total", (*kind, outcome), 1)
            self._add("job_bytes_total", kind, result.copied_bytes)
            self._add("job_seconds_total", kind, result.seconds)
            self._observe("job_duration_seconds", kind, result.seconds)

    def lookup(self, tier: str, *, hits: int, misses: int) -> None:
        """Blocks were looked up in a tier."""
        with self._lock:
            self._add("tier_hits_total", (tier,), hits)
            self._add("tier_misses_total", (tier,), misses)

    def cut(self, tier: str, reason: str, blocks: int) -> None:
        """Blocks were found in a tier and are not loaded; `reason` is a `CutReason`."""
        with self._lock:
            self._add("tier_cut_blocks_total", (tier, reason), blocks)

    def gate(self, loaded: str) -> None:
        """A prefix was decided about; `loaded` says what of it is: whole, part or none."""
        with self._lock:
            self._add("gate_prefixes_total", (loaded,), 1)

    def prefill(self, gate: str, tokens_per_second: float) -> None:
        """How fast the engine computes prompts now, and how that is known."""
        with self._lock:
            self._set("prefill_tokens_per_second", (gate,), tokens_per_second)

    def evicted(self, tier: str, blocks: int) -> None:
        """Blocks were evicted from a tier."""
        with self._lock:
            self._add("tier_evicted_blocks_total", (tier,), blocks)

    def dropped(self, tier: str, reason: DropReason, blocks: int) -> None:
        """Blocks were to be stored in a tier and were not."""
        with self._lock:
            self._add("tier_dropped_blocks_total", (tier, str(reason)), blocks)

    def written(self, tier: str, bytes_: int) -> None:
        """More bytes were written to a tier's medium."""
        with self._lock:
            self._add("tier_written_bytes_total", (tier,), bytes_)

    def wear(self, tier: str, *, today: int, budget: int) -> None:
        """How much of a tier's write budget is used, in bytes."""
        with self._lock:
            self._set("tier_written_today_bytes", (tier,), today)
            self._set("tier_write_budget_bytes", (tier,), budget)

    def write_only(self, tier: str, alarm: bool) -> None:
        """Whether a tier is written to for nothing."""
        with self._lock:
            self._set("tier_write_only", (tier,), int(alarm))

    def promoted(self, tier: str, blocks: int) -> None:
        """Blocks of a tier were brought into host memory ahead of their load."""
        with self._lock:
            self._add("tier_promoted_blocks_total", (tier,), blocks)

    def unpromoted(self, tier: str, reason: str, blocks: int) -> None:
        """Blocks of a tier were not brought into host memory for a request; `reason` is one short
        word."""
        with self._lock:
            self._add("tier_unpromoted_blocks_total", (tier, reason), blocks)

    def corrupt(self, tier: str, found: str, blocks: int) -> None:
        """Blocks of a tier did not match their checksums; `found` says what noticed: "load",
        "scrub" or "probe"."""
        with self._lock:
            self._add("tier_corrupt_blocks_total", (tier, found), blocks)

    def unverified(self, tier: str, blocks: int) -> None:
        """Blocks were loaded from a tier without comparing them with their checksums."""
        with self._lock:
            self._add("tier_unverified_blocks_total", (tier,), blocks)

    def scrubbed(
        self, tier: str, *, blocks: int = 0, bytes_: int = 0, failures: int = 0, rounds: int = 0
    ) -> None:
        """What a tier's scrub did since the last call."""
        with self._lock:
            self._add("scrub_blocks_total", (tier,), blocks)
            self._add("scrub_bytes_total", (tier,), bytes_)
            self._add("scrub_failures_total", (tier,), failures)
            self._add("scrub_rounds_total", (tier,), rounds)

    def occupancy(
        self,
        tier: str,
        *,
        resident_blocks: int,
        used_bytes: int,
        capacity_bytes: int,
        pinned_blocks: int | None = None,
    ) -> None:
        """How full a tier is now."""
        with self._lock:
            self._set("tier_resident_blocks", (tier,), resident_blocks)
            self._set("tier_used_bytes", (tier,), used_bytes)
            self._set("tier_capacity_bytes", (tier,), capacity_bytes)
            if pinned_blocks is not None:
                self._set("tier_pinned_blocks", (tier,), pinned_blocks)

    def host_pool(
        self, *, mapped_bytes: int, resident_bytes: int, huge_bytes: int, pinned_bytes: int
    ) -> None:
        """What the pages of this process's host block pool are."""
        kinds = {
            "mapped": mapped_bytes,
            "resident": resident_bytes,
            "huge": huge_bytes,
            "pinned": pinned_bytes,
        }
        with self._lock:
            for kind, value in kinds.items():
                self._set("host_pool_bytes", (kind,), value)

    def write_behind(self, tier: str, *, blocks: int, bytes_: int) -> None:
        """What waits to be written to a tier now."""
        with self._lock:
            self._set("write_behind_blocks", (tier,), blocks)
            self._set("write_behind_bytes", (tier,), bytes_)

    def traced(self, outcome: str) -> None:
        """A request was recorded in a trace, or dropped; `outcome` says which."""
        with self._lock:
            self._add("trace_requests_total", (outcome,), 1)

    def internal_error(self, where: str) -> None:
        """An error of our own was caught at the border to the engine; `where` names the call."""
        with self._lock:
            self._add("internal_errors_total", (where,), 1)

    def state(self, tier: str, state: TierState) -> None:
        """The state that a tier is in now."""
        with self._lock:
            for each in TierState:
                self._set("tier_state", (tier, each.value), int(each is state))

    def breaker(self, tier: str, state: str) -> None:
        """The state that a tier's breaker is in now: closed, half_open or open."""
        with self._lock:
            for each in ("closed", "half_open", "open"):
                self._set("tier_breaker", (tier, each), int(each == state))

    def probe(self, tier: str, outcome: str, *, copied_bytes: int = 0) -> None:
        """A background read of a tier has ended, or runs for too long; `outcome` is one short
        word."""
        with self._lock:
            self._add("tier_probes_total", (tier, outcome), 1)
            self._add("tier_probe_bytes_total", (tier,), copied_bytes)

    def snapshot(self) -> StatsSnapshot:
        """Everything since this recorder was made."""
        with self._lock:
            return self._total.freeze(StatsSnapshot, self._clock())

    def take(self) -> StatsDelta | None:
        """What was gathered since the last call, or None if nothing was; then start afresh."""
        with self._lock:
            if self._since.empty:
                return None
            since, self._since = self._since, _Sums()
            return since.freeze(StatsDelta, self._clock())

    def _add(self, name: str, labels: tuple[str, ...], amount: float) -> None:
        if amount < 0:
            raise ValueError(f"{name} cannot grow by {amount}")
        if amount and not self._silent:
            series = series_of(name, labels)
            for sums in (self._total, self._since):
                sums.counters[series] = sums.counters.get(series, 0) + amount

    def _set(self, name: str, labels: tuple[str, ...], value: float) -> None:
        """A value that did not change is not news: it renews the time in the total alone."""
        key = (series_of(name, labels), self._source)
        known = self._total.gauges.get(key)
        gauge = GaugeValue(value, self._clock())
        self._total.gauges[key] = gauge
        if known is None or known.value != value:
            self._since.gauges[key] = gauge

    def _observe(self, name: str, labels: tuple[str, ...], value: float) -> None:
        if self._silent:
            return
        series = series_of(name, labels)
        buckets = METRICS[name].buckets
        counts = [0] * (len(buckets) + 1)
        counts[bisect.bisect_left(buckets, value)] = 1
        one = HistogramValue(tuple(counts), value)
        for sums in (self._total, self._since):
            known = sums.histograms.get(series)
            sums.histograms[series] = one if known is None else add_histograms(known, one)


class _Sums:
    """What a recorder fills; its owner holds a lock."""

    def __init__(self) -> None:
        self.counters: dict[Series, float] = {}
        self.gauges: dict[tuple[Series, str], GaugeValue] = {}
        self.histograms: dict[Series, HistogramValue] = {}

    @property
    def empty(self) -> bool:
        return not (self.counters or self.gauges or self.histograms)

    def freeze(self, kind: type[S], at: float) -> S:
        return kind(at, dict(self.counters), dict(self.gauges), dict(self.histograms))
