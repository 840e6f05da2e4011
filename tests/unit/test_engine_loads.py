"""Loads through the transfer engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from tests.unit.doubles import (
    BLOCK_BYTES,
    FastSpec,
    SlowSpec,
    content,
    fast,
    key,
    slow,
)
from tests.unit.engine_rig import Rig
from tiered_kv.engine import StoreToCpuHandler
from tiered_kv.errors import DeadlineExceeded, NoSpace, TierError
from tiered_kv.specs import (
    CpuSpec,
    GpuSpec,
    HopResult,
    KeySpec,
    LoadJob,
    Part,
    Parts,
    TransferSpec,
)
from tiered_kv.values import BlockKey, BlockStatus, JobId, JobKind

OK = BlockStatus.OK


def test_a_composite_load_is_put_together_per_block_in_job_order() -> None:
    with Rig(group_blocks=3) as rig:
        rig.fast.fill(range(0, 30, 3))
        rig.slow.fill(range(1, 30, 3))
        host = list(range(2, 30, 3))
        job = rig.load(
            1,
            {
                fast(*range(0, 30, 3)): range(0, 30, 3),
                slow(*range(1, 30, 3)): range(1, 30, 3),
                rig.fill_slots(host): host,
            },
        )
        [result] = rig.run(job)
        assert result.ok
        assert result.kind is JobKind.LOAD
        assert result.keys == job.keys
        assert result.copied_bytes == 30 * BLOCK_BYTES
        assert rig.cache.blocks == {i: content(i) for i in range(30)}
        hops = rig.snapshot().hops()
        for hop, blocks in {
            ("fast", "cpu", "fast"): 10,
            ("slow", "cpu", "slow"): 10,
            ("cpu", "gpu", "cpu"): 30,
        }.items():
            assert (hops[hop].blocks, hops[hop].bytes) == (blocks, blocks * BLOCK_BYTES)
        assert rig.snapshot().jobs()["load"].outcomes == {"ok": 1}
        assert sorted(rig.fast.touched) == [key(i) for i in range(0, 30, 3)]


def test_reading_a_group_overlaps_copying_the_one_before() -> None:
    with Rig(threads=1, staging_slots=4) as rig:
        rig.fast.fill(range(3))
        rig.cache.scattering.shut()
        rig.engine.submit(rig.load(1, {fast(0, 1, 2): range(3)}))
        rig.journal.wait_for("cpu->gpu begins key-000000")
        rig.journal.wait_for("fast.read goes on key-000001")
        order = rig.journal.entries()
        assert "cpu->gpu goes on key-000000" not in order
        rig.cache.scattering.open()
        [result] = rig.results(JobId(1))
        assert result.ok


@pytest.mark.parametrize("bad", [0, 2, 4])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_one_missing_block_fails_alone(bad: int, group: int) -> None:
    with Rig(group_blocks=group, staging_slots=16) as rig:
        rig.fast.fill(i for i in range(5) if i != bad)
        [result] = rig.run(rig.load(1, {fast(*range(5)): range(5)}))
        expected = [BlockStatus.MISSING if i == bad else OK for i in range(5)]
        assert list(result.statuses) == expected
        assert rig.cache.blocks == {i: content(i) for i in range(5) if i != bad}
        failures = rig.snapshot().hop("fast", "cpu", "fast").failures
        assert failures == {"missing": 1}


@pytest.mark.parametrize("bad", [0, 2, 4])
def test_a_block_that_changed_in_the_store_is_corrupt_and_discarded(bad: int) -> None:
    with Rig(group_blocks=2) as rig:
        rig.fast.fill(range(5))
        rig.fast.spoil(bad)
        [result] = rig.run(rig.load(1, {fast(*range(5)): range(5)}))
        expected = [BlockStatus.CORRUPT if i == bad else OK for i in range(5)]
        assert list(result.statuses) == expected
        assert bad not in rig.cache.blocks
        assert rig.fast.discarded == [key(bad)]
        assert key(bad) not in rig.fast.rows
        assert rig.engine.health()["fast"] == (True, "healthy")


def test_a_right_block_under_a_wrong_key_is_corrupt() -> None:
    with Rig() as rig:
        rig.fast.fill([0, 1])
        rig.fast.rows[key(0)] = rig.fast.rows[key(1)]
        [result] = rig.run(rig.load(1, {fast(0): [0]}))
        assert result.statuses == (BlockStatus.CORRUPT,)
        assert not rig.cache.blocks


def test_a_discard_that_fails_leaves_the_answer_corrupt() -> None:
    def trouble(method: str, keys: Sequence[BlockKey]) -> None:
        if method == "discard":
            raise ZeroDivisionError

    with Rig() as rig:
        rig.fast.fill([0])
        rig.fast.spoil(0)
        rig.fast.trouble = trouble
        [result] = rig.run(rig.load(1, {fast(0): [0]}))
        assert result.statuses == (BlockStatus.CORRUPT,)


def test_a_read_beyond_the_deadline_is_reported_and_its_staging_kept_until_it_returns() -> None:
    with Rig(load_deadline=1.0, group_blocks=4, staging_slots=16, threads=4) as rig:
        rig.fast.fill(range(4))
        rig.cache.blocks = dict.fromkeys(range(4), b"new owner")
        rig.fast.reading.shut()
        [result] = rig.run(rig.load(1, {fast(*range(4)): range(4)}))
        assert set(result.statuses) == {BlockStatus.TIMED_OUT}
        assert rig.pool.leased == 4
        assert rig.engine.health()["fast"][0] is False
        assert "more than 1 s" in rig.engine.health()["fast"][1]
        rig.fast.reading.open()
        rig.pool.wait_for_leased(0)
        assert rig.engine.drain(5.0)
        assert rig.cache.blocks == dict.fromkeys(range(4), b"new owner")
        assert rig.journal.count("fast.read goes on key-000000") == 1


def test_what_waits_behind_a_hanging_read_fails_within_the_deadline() -> None:
    with Rig(load_deadline=1.0, threads=1) as rig:
        rig.fast.fill(range(20))
        rig.fast.reading.shut()
        results = rig.run(*(rig.load_from(job, range(20), FastSpec) for job in range(3)))
        bad = {BlockStatus.TIMED_OUT, BlockStatus.TIER_ERROR}
        for result in results:
            assert set(result.statuses) <= bad
        assert BlockStatus.TIMED_OUT in results[0].statuses
        assert rig.journal.count("fast.read begins key-000000") == 1
        rig.fast.reading.open()


def test_a_load_that_is_given_up_leaves_the_destination_alone() -> None:
    with Rig() as rig:
        rig.fast.fill(range(6))
        rig.fast.reading.shut()
        rig.engine.submit(rig.load(1, {fast(*range(6)): range(6)}))
        rig.journal.wait_for("fast.read begins key-000000")
        rig.engine.poison([JobId(1)])
        [result] = rig.results(JobId(1))
        assert set(result.statuses) == {BlockStatus.CANCELLED}
        assert rig.pool.leased > 0
        rig.fast.reading.open()
        rig.pool.wait_for_leased(0)
        assert not rig.cache.blocks
        assert rig.engine.health()["fast"] == (True, "healthy")


def test_a_last_copy_that_has_begun_is_awaited() -> None:
    with Rig(threads=1) as rig:
        rig.fast.fill(range(3))
        rig.cache.scattering.shut()
        rig.engine.submit(rig.load(1, {fast(*range(3)): range(3)}))
        rig.journal.wait_for("cpu->gpu begins key-000000")
        rig.engine.poison([JobId(1)])
        assert rig.engine.wait([JobId(1)], 0.05) == {JobId(1)}
        rig.cache.scattering.open()
        [result] = rig.results(JobId(1))
        assert result.statuses[0] is OK
        assert result.statuses[2] is BlockStatus.CANCELLED
        written = [i for i, status in enumerate(result.statuses) if status is OK]
        assert rig.cache.blocks == {i: content(i) for i in written}


def test_a_poisoned_load_that_waits_for_staging_ends_at_once() -> None:
    with Rig(staging_slots=1, threads=2) as rig:
        rig.fast.fill(range(2))
        rig.fast.reading.shut()
        rig.engine.submit(rig.load_from(1, [0], FastSpec))
        rig.journal.wait_for("fast.read begins key-000000")
        rig.engine.submit(rig.load_from(2, [1], FastSpec))
        rig.engine.poison([JobId(2)])
        [second] = rig.results(JobId(2))
        assert second.statuses == (BlockStatus.CANCELLED,)
        rig.fast.reading.open()
        [first] = rig.results(JobId(1))
        assert first.ok


def test_a_small_staging_pool_serves_a_large_load_and_many_submitters() -> None:
    with Rig(staging_slots=2, group_blocks=4, threads=4) as rig:
        rig.fast.fill(range(100))
        rig.slow.fill(range(100))
        jobs = [
            rig.load_from(job, range(100), FastSpec if job % 2 else SlowSpec) for job in range(16)
        ]
        results = rig.run(*jobs)
        assert all(result.ok for result in results)
        assert rig.pool.most_leased == 2
        assert rig.cache.blocks == {i: content(i) for i in range(100)}
        assert rig.snapshot().hop("cpu", "gpu", "cpu").blocks == 1600


def test_without_staging_a_load_through_host_memory_finds_no_space() -> None:
    with Rig(staging_slots=0) as rig:
        rig.fast.fill([0])
        [result] = rig.run(rig.load(1, {fast(0): [0]}))
        assert result.statuses == (BlockStatus.NO_SPACE,)


@pytest.mark.parametrize(
    ("error", "status", "healthy"),
    [
        (TierError("the disk is gone", tier="fast"), BlockStatus.TIER_ERROR, False),
        (NoSpace("no room"), BlockStatus.NO_SPACE, True),
        (DeadlineExceeded("slow"), BlockStatus.TIMED_OUT, False),
        (ZeroDivisionError("a mistake"), BlockStatus.TIER_ERROR, False),
        (OSError(5, "not translated"), BlockStatus.TIER_ERROR, False),
    ],
)
def test_errors_of_a_tier_become_statuses(
    error: Exception, status: BlockStatus, healthy: bool
) -> None:
    def trouble(method: str, keys: Sequence[BlockKey]) -> None:
        if method == "read":
            raise error

    with Rig() as rig:
        rig.fast.fill([0])
        rig.fast.trouble = trouble
        [result] = rig.run(rig.load(1, {fast(0): [0]}))
        assert result.statuses == (status,)
        assert rig.engine.health()["fast"][0] is healthy
        rig.slow.fill([0])
        [result] = rig.run(rig.load(2, {slow(0): [0]}))
        assert result.ok


def _cancelled() -> HopResult:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    "answer",
    [
        _cancelled,
        lambda: None,
        lambda: HopResult((), 0),
        lambda: HopResult((OK, OK), 0),
        lambda: HopResult((OK,), -1),
        lambda: HopResult((cast("BlockStatus", "ok"),), 0),
    ],
)
def test_the_loop_survives_whatever_a_handler_answers(answer: Callable[[], HopResult]) -> None:
    with Rig(faults=2) as rig:
        rig.cache.answer = answer
        host = rig.fill_slots([0])
        [result] = rig.run(rig.load(1, {host: [0]}))
        assert result.statuses == (BlockStatus.TIER_ERROR,)
        rig.cache.answer = None
        [again] = rig.run(rig.load(2, {host: [0]}))
        assert again.ok


def test_staging_comes_back_whatever_a_handler_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def answer(self: StoreToCpuHandler, spec: TransferSpec[KeySpec, CpuSpec]) -> HopResult:
        calls.append(len(spec))
        return HopResult((cast("BlockStatus", None),) * len(spec), 0)

    monkeypatch.setattr(StoreToCpuHandler, "_get", answer)
    with Rig() as rig:
        [result] = rig.run(rig.load(1, {fast(0, 1): range(2)}))
        assert result.statuses == (BlockStatus.TIER_ERROR,) * 2
        assert calls
        assert rig.pool.leased == 0


def test_a_kind_of_mistake_is_logged_once_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def trouble(hop: str) -> None:
        raise ZeroDivisionError("a mistake")

    with Rig() as rig:
        rig.cache.trouble = trouble
        host = rig.fill_slots([0])
        for job in range(20):
            [result] = rig.run(rig.load(job, {host: [0]}))
            assert result.statuses == (BlockStatus.TIER_ERROR,)
        errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(errors) == 1
        assert errors[0].exc_info is not None
        assert "cpu->gpu" in errors[0].getMessage()


def test_a_failed_tier_is_tried_again_after_a_while() -> None:
    down = [True]

    def trouble(method: str, keys: Sequence[BlockKey]) -> None:
        if method == "read" and down[0]:
            raise TierError("the disk is gone", tier="fast")

    with Rig(retry_after=0.02) as rig:
        rig.fast.fill([0])
        rig.fast.trouble = trouble
        [result] = rig.run(rig.load(1, {fast(0): [0]}))
        assert result.statuses == (BlockStatus.TIER_ERROR,)
        down[0] = False
        for job in range(2, 1000):
            [result] = rig.run(rig.load(job, {fast(0): [0]}))
            if result.ok:
                break
        assert result.ok
        assert rig.engine.health()["fast"] == (True, "healthy")


def test_an_unhealthy_tier_is_not_asked() -> None:
    def trouble(method: str, keys: Sequence[BlockKey]) -> None:
        if method == "read":
            raise TierError("the disk is gone", tier="fast")

    with Rig() as rig:
        rig.fast.fill([0])
        rig.fast.trouble = trouble
        rig.run(rig.load(1, {fast(0): [0]}))
        [result] = rig.run(rig.load(2, {fast(0): [0]}))
        assert result.statuses == (BlockStatus.TIER_ERROR,)
        assert rig.snapshot().hop("fast", "cpu", "fast").operations == 1


def test_a_hanging_tier_takes_nothing_from_others() -> None:
    with Rig(staging_slots=4) as rig:
        rig.fast.fill(range(50))
        rig.slow.fill(range(50))
        rig.fast.reading.shut()
        rig.engine.submit(rig.load_from(1, range(50), FastSpec))
        rig.journal.wait_for("fast.read begins key-000000")
        rig.engine.submit(rig.load_from(2, range(50), SlowSpec))
        [served] = rig.results(JobId(2))
        assert served.ok
        assert rig.engine.wait([JobId(1)], 0.0) == {JobId(1)}
        rig.engine.poison([JobId(1)])
        [hung] = rig.results(JobId(1))
        assert not any(status is OK for status in hung.statuses)
        rig.fast.reading.open()
        rig.pool.wait_for_leased(0)


def test_a_tier_serves_from_when_it_is_attached() -> None:
    with Rig(attach=False) as rig:
        rig.fast.fill([0])
        assert rig.engine.health()["fast"] == (False, "opening")
        [result] = rig.run(rig.load(1, {fast(0): [0]}))
        assert result.statuses == (BlockStatus.TIER_ERROR,)
        rig.engine.attach("fast", rig.fast)
        [result] = rig.run(rig.load(2, {fast(0): [0]}))
        assert result.ok
        rig.engine.detach_failed("slow", "no such directory")
        assert rig.engine.health()["slow"] == (False, "could not be opened: no such directory")
        assert rig.engine.modes()["fast->cpu"] == {"io": "memory", "verify": "always"}
        with pytest.raises(ValueError, match="no tier is named 'nope'"):
            rig.engine.attach("nope", rig.fast)


def test_an_empty_load_ends_well() -> None:
    with Rig() as rig:
        [result] = rig.run(LoadJob(JobId(1), "request", (), Parts(()), GpuSpec(())))
        assert result.ok
        assert result.statuses == ()


def test_jobs_that_contradict_themselves_are_refused() -> None:
    with Rig() as rig:
        good = rig.load(1, {fast(0, 1): [0, 1]})
        twice = Parts((Part(fast(0, 1), (0, 0)),))
        with pytest.raises(ValueError, match="exactly once"):
            rig.engine.submit(LoadJob(good.id, good.request, good.keys, twice, good.dst))
        short = Parts((Part(fast(0), (0, 1)),))
        with pytest.raises(ValueError, match="1 places for 2 positions"):
            rig.engine.submit(LoadJob(good.id, good.request, good.keys, short, good.dst))
        [result] = rig.run(good)
        assert result.statuses == (BlockStatus.MISSING, BlockStatus.MISSING)


def test_an_id_is_taken_until_its_result_is_popped() -> None:
    with Rig() as rig:
        job = rig.load(1, {fast(0): [0]})
        rig.engine.submit(job)
        with pytest.raises(ValueError, match="job id 1 is taken"):
            rig.engine.submit(job)
        rig.engine.wait([job.id], 10)
        with pytest.raises(ValueError, match="job id 1 is taken"):
            rig.engine.submit(job)
        assert len(rig.engine.finished()) == 1
        assert rig.engine.finished() == []
        rig.run(job)
