"""The benchmarks run, on a few small blocks, and what they compare moves the right bytes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from tests.benchmarks import lmdb_store, seam
from tests.benchmarks.first_token.__main__ import show_starts, show_throughput, show_tokens
from tests.benchmarks.first_token.starts import ALONE, Starts
from tests.benchmarks.first_token.throughput import Throughput
from tests.benchmarks.first_token.tokens import (
    COMPUTED,
    LIMIT,
    RESTARTED,
    WAYS,
    Rounds,
    Tokens,
)
from tests.benchmarks.harness import KIB, Batch, Result, Took, Variant, measure
from tests.benchmarks.hops import Hops, store_context
from tests.benchmarks.nvme_store import settings_in
from tests.benchmarks.peer_files import FilePerBlock
from tests.benchmarks.peer_fio import missing_fio, run_fio
from tiered_kv.specs import HopResult
from tiered_kv.stats import StatsRecorder, StatsSnapshot
from tiered_kv.values import BlockStatus
from tiered_kv.vllm.engine_process import EngineProcess, Generated
from tiered_kv_nvme import NvmeSpec
from tiered_kv_nvme.store import NvmeStore

BATCH = Batch(64 * KIB, 8)
OPTIONS = argparse.Namespace(
    rounds=2, threads=2, durability="none", writemap="off", calls=None, group=None
)


def _sane(result: Result) -> None:
    assert all(math.isfinite(one.value or 0.0) for one in result.ratios)
    measured = [timing for timing in result.timings.values() if timing.gib_per_second > 0]
    assert len(measured) == len(result.timings) > 2
    print({name: round(t.gib_per_second, 2) for name, t in result.timings.items()})


def test_seam(tmp_path: Path) -> None:
    _sane(seam.run(OPTIONS, BATCH, tmp_path))


def test_lmdb_beside_memcpy(tmp_path: Path) -> None:
    _sane(lmdb_store.run(OPTIONS, BATCH, tmp_path))


def test_a_store_takes_checksums_on_the_way(tmp_path: Path) -> None:
    """What was spoiled before the store took its checksum is right under it; under the checksum
    that was known before, it is not."""
    with (
        closing(NvmeStore(store_context(BATCH, settings_in(tmp_path, BATCH, OPTIONS)))) as store,
        Hops(BATCH, store, NvmeSpec) as hops,
    ):
        hops.wipe()
        hops.save()
        with pytest.raises(RuntimeError, match="not every block came through"):
            hops.load()
        hops.forget()
        hops.capture_and_save()
        hops.load()


def test_a_file_per_block(tmp_path: Path) -> None:
    with closing(FilePerBlock(tmp_path / "files", BATCH, 2, direct=False)) as files:
        for _ in range(2):
            files.save()
            files.wipe()
            with pytest.raises(RuntimeError, match="did not bring back"):
                files.check()
            files.load()
            files.check()
            assert len(list((tmp_path / "files").iterdir())) == BATCH.blocks
            files.renew()


@pytest.mark.skipif(bool(missing_fio()), reason=missing_fio())
def test_fio(tmp_path: Path) -> None:
    wrote = run_fio(tmp_path / "f", BATCH, 2, write=True, direct=True)
    read = run_fio(tmp_path / "f", BATCH, 2, write=False, direct=True)
    assert (tmp_path / "f").stat().st_size == BATCH.total_bytes
    assert min(wrote.seconds, read.seconds) >= 0


def test_what_another_process_took_is_believed() -> None:
    took = iter([Took(9.0, 9.0), Took(1.0, 0.5), Took(3.0, 0.1), Took(2.0, 0.2)])
    prepared: list[None] = []
    variant = Variant("other", lambda: next(took), lambda: prepared.append(None))
    timing = measure([variant], BATCH, 3, settle=False)["other"]
    assert (timing.seconds, timing.fastest_seconds, timing.slowest_seconds) == (2.0, 1.0, 3.0)
    assert timing.processor_us_per_block == pytest.approx(0.2 / BATCH.blocks * 1e6)
    assert timing.processor_seconds_per_gib == pytest.approx(0.2 * 2**30 / BATCH.total_bytes)
    assert len(prepared) == 4


def test_first_token_figures() -> None:
    seconds = {way: [0.3, 0.2, 0.4] for way in WAYS}
    seconds[COMPUTED], seconds[LIMIT], seconds[RESTARTED] = [6.0], [0.2], [0.5]
    figures = {one["row"]: one["value"] for one in Tokens((6000,), seconds, 9, 9).figures()}
    assert figures == {
        "token.recompute": pytest.approx(12.0),
        "token.limit": pytest.approx(1.5),
    }


def test_the_tables_of_first_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {way: [0.3, 0.2, 0.4] for way in WAYS} | {COMPUTED: [9.0, 3.0, 30.0]}
    show_tokens(Tokens((6010, 6100), seconds, 8, 9))
    show_throughput(
        Throughput(
            {1: [100.0], 4: [110.0], 16: [120.0]},
            {1: [150.0], 4: [220.0], 16: [360.0]},
            {"plain": 0.1, "tiered": 0.5},
        )
    )
    show_starts(Starts({ALONE: [10.0], "1GiB": [12.0], "8GiB": [13.5, 1.0, 14.0]}))
    shown = capsys.readouterr().out
    for line in (
        "Prompts of 6010 to 6100 tokens, medians",
        "| computed | 9.000 s | 3, 3.000 to 30.000 s |",
        "| from NVMe, after a restart | 0.300 s (30 times) | 3, 0.200 to 0.400 s |",
        "8 of 9 answers are those of vLLM alone",
        "| 16 | 120 | 360 | 3.00 |",
        "| 8GiB | 13.50 |",
    ):
        assert line in shown


def test_starts_and_throughput_are_compared_by_medians() -> None:
    starts = Starts({ALONE: [10.0, 11.0, 30.0], "1GiB": [12.0], "8GiB": [13.5, 1.0, 14.0]})
    figures = {one["row"]: one["value"] for one in starts.figures()}
    assert figures == {"start.1GiB": 1.0, "start.8GiB": 2.5}
    assert Throughput({4: [100.0, 110.0]}, {4: [210.0, 210.0]}, {}).ratio(4) == 2.0


class Answering:
    """An engine that computes what it has not cached, and loads from the tier that it is told."""

    def __init__(self, *, supplies: str | None = None, warm: bool = False) -> None:
        self._stats = StatsRecorder("rank 0")
        self._supplies, self._cached = supplies, warm
        self._always_warm = warm

    def reset_prefix_cache(self) -> None:
        self._cached = self._always_warm

    def stats(self) -> StatsSnapshot:
        return self._stats.snapshot()

    def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, tiers: Sequence[str] | None = None
    ) -> Generated:
        cached, self._cached = self._cached, True
        if tiers is not None:
            tier = self._supplies or tiers[0]
            self._stats.hop("nvme", "cpu", tier, HopResult((BlockStatus.OK,), 4096), 0.1)
        seconds = 0.2 if cached else 6.0
        return Generated((1,) * max_tokens, "", len(token_ids), 5 if cached else 0, seconds)

    def as_engine(self) -> EngineProcess:
        return cast(EngineProcess, self)


def test_rounds_of_first_tokens() -> None:
    found = Rounds([(1, 2, 3)])
    found.alone(Answering().as_engine(), 0)
    found.tiered(Answering().as_engine(), 0, "ssd", RESTARTED)
    assert (found.seconds[COMPUTED], found.seconds[LIMIT]) == ([6.0], [0.2])
    assert len(found.seconds[RESTARTED]) == found.compared == found.equal == 1
    assert "computed 6.000" in found.last()


def test_first_tokens_that_are_not_what_they_seem_are_refused() -> None:
    found = Rounds([(1, 2, 3)])
    with pytest.raises(RuntimeError, match="5 tokens were not computed"):
        found.alone(Answering(warm=True).as_engine(), 0)
    found.alone(Answering().as_engine(), 0)
    with pytest.raises(RuntimeError, match=r"pins.* supplied the blocks, not ssd"):
        found.tiered(Answering(supplies="pins").as_engine(), 0, "ssd", "ssd")
    assert found.seconds["ssd"] == []
