"""Stores through the transfer engine, and their write-behind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.unit.doubles import BLOCK_BYTES, FastSpec, SlowSpec, content, fast, gpu, key
from tests.unit.engine_rig import Rig
from tiered_kv.errors import NoSpace, TierError
from tiered_kv.specs import CpuSpec, JobResult, Part, SlotRef, StoreJob, StoreTargets
from tiered_kv.values import BlockKey, BlockStatus, JobId

OK = BlockStatus.OK
CANCELLED = BlockStatus.CANCELLED


def released(rig: Rig) -> list[int]:
    """Numbers of the slots that were released, after everything has ended."""
    assert rig.engine.drain(30.0)
    return sorted(slot.number for slot in rig.engine.released())


def test_a_store_goes_to_host_slots_and_is_written_behind_to_every_tier() -> None:
    with Rig(group_blocks=4) as rig:
        job = rig.store(1, range(10), FastSpec, SlowSpec)
        [result] = rig.run(job)
        assert result.ok
        assert result.copied_bytes == 10 * BLOCK_BYTES
        assert released(rig) == list(range(10))
        for store in (rig.fast, rig.slow):
            assert {k: row[0] for k, row in store.rows.items()} == {
                key(i): content(i) for i in range(10)
            }
        [loaded] = rig.run(rig.load(2, {fast(*range(10)): range(10)}))
        assert loaded.ok
        hops = rig.snapshot().hops()
        assert hops["gpu", "cpu", "cpu"].blocks == hops["cpu", "slow", "slow"].blocks == 10
        tier = rig.snapshot().tier("fast")
        assert (tier.write_behind_blocks, tier.write_behind_bytes) == (0, 0)


def test_the_job_ends_before_its_write_behind() -> None:
    with Rig() as rig:
        rig.fast.writing.shut()
        [result] = rig.run(rig.store(1, range(3), FastSpec))
        assert result.ok
        rig.journal.wait_for("fast.write begins")
        assert not rig.engine.drain(0)
        assert rig.engine.released() == []
        assert rig.snapshot().tier("fast").write_behind_blocks == 3
        assert not rig.fast.rows
        rig.fast.writing.open()
        assert released(rig) == [0, 1, 2]
        assert len(rig.fast.rows) == 3


def test_a_slot_is_released_when_its_last_tier_is_done() -> None:
    with Rig(group_blocks=8) as rig:
        rig.slow.writing.shut()
        keys = tuple(key(i) for i in range(4))
        job = rig.store(1, range(4), FastSpec)
        assert job.dst.first is not None
        some = Part(SlowSpec("slow", keys[:2]), (0, 1))
        targets = StoreTargets(job.dst.first, (*job.dst.behind, some))
        [result] = rig.run(StoreJob(job.id, job.request, job.keys, job.src, targets))
        assert result.ok
        rig.journal.wait_for("slow.write begins")
        rig.journal.wait_for("fast.publish goes on")
        assert rig.wait_for_released(2) == [2, 3]
        rig.slow.writing.open()
        assert released(rig) == [0, 1]


def test_slots_of_a_store_that_goes_nowhere_further_are_released_at_its_end() -> None:
    with Rig() as rig:
        [result] = rig.run(rig.store(1, range(3)))
        assert result.ok
        assert released(rig) == [0, 1, 2]


def test_a_poisoned_store_that_has_begun_publishes_nothing() -> None:
    with Rig(group_blocks=2) as rig:
        rig.cache.gathering.shut()
        rig.engine.submit(rig.store(1, range(6), FastSpec, SlowSpec))
        rig.journal.wait_for("gpu->cpu begins key-000000")
        rig.engine.poison([JobId(1)])
        assert rig.engine.wait([JobId(1)], 0.05) == {JobId(1)}
        for i in range(6):
            rig.cache.blocks[i] = b"new owner".ljust(BLOCK_BYTES)
        rig.cache.gathering.open()
        [result] = rig.results(JobId(1))
        assert set(result.statuses) == {CANCELLED}
        assert released(rig) == list(range(6))
        assert not rig.fast.rows
        assert not rig.slow.rows
        assert rig.journal.count("fast.write begins") == 0


def test_a_poisoned_store_that_has_not_begun_never_begins() -> None:
    with Rig(threads=1) as rig:
        rig.cache.gathering.shut()
        rig.engine.submit(rig.store(1, [0], FastSpec))
        rig.journal.wait_for("gpu->cpu begins key-000000")
        rig.engine.submit(rig.store(2, [1], FastSpec))
        rig.engine.poison([JobId(2), JobId(77)])
        [second] = rig.results(JobId(2))
        assert second.statuses == (CANCELLED,)
        rig.cache.gathering.open()
        [first] = rig.results(JobId(1))
        assert first.ok
        assert released(rig) == [0, 1]
        assert list(rig.fast.rows) == [key(0)]
        assert rig.journal.count("gpu->cpu begins key-000001") == 0


def test_a_job_that_has_ended_is_not_poisoned_any_more() -> None:
    with Rig() as rig:
        rig.fast.writing.shut()
        rig.engine.submit(rig.store(1, [0], FastSpec))
        rig.journal.wait_for("fast.write begins")
        rig.engine.poison([JobId(1)])
        [result] = rig.results(JobId(1))
        assert result.ok
        rig.fast.writing.open()
        assert released(rig) == [0]
        assert list(rig.fast.rows) == [key(0)]


@pytest.mark.parametrize("at", ["write", "publish"])
def test_a_slot_given_out_anew_during_write_behind_is_not_published(at: str) -> None:
    with Rig(group_blocks=3) as rig:
        held = rig.fast.writing
        held.shut()
        [result] = rig.run(rig.store(1, range(3), FastSpec))
        assert result.ok
        rig.journal.wait_for("fast.write begins")
        rewritten = [1] if at == "write" else [0, 1, 2]
        for number in rewritten:
            view = rig.pool.begin(SlotRef(number, 2))
            assert view is not None
            view[:9] = b"new owner"
        held.open()
        assert released(rig) == [0, 1, 2]
        expected = {key(i): content(i) for i in range(3) if i not in rewritten}
        assert {k: row[0] for k, row in rig.fast.rows.items()} == expected
        assert rig.fast.reserved == 0
        failures = rig.snapshot().hop("cpu", "fast", "fast").failures
        assert failures == {"cancelled": len(rewritten)}


def test_a_slot_given_out_anew_before_write_behind_is_dropped() -> None:
    with Rig(threads=1) as rig:
        rig.fast.writing.shut()
        [result] = rig.run(rig.store(1, range(2), FastSpec))
        rig.journal.wait_for("fast.write begins")
        rig.pool.begin(SlotRef(1, 2))
        rig.fast.writing.open()
        assert released(rig) == [0, 1]
        assert list(rig.fast.rows) == [key(0)]
        assert result.ok


def test_what_exceeds_the_queue_is_dropped_and_counted() -> None:
    with Rig(store_queue_blocks=2) as rig:
        rig.fast.writing.shut()
        [result] = rig.run(rig.store(1, range(5), FastSpec))
        assert result.ok
        rig.journal.wait_for("fast.write begins")
        assert rig.snapshot().tier("fast").dropped == {"queue": 3}
        assert rig.wait_for_released(3) == [2, 3, 4]
        rig.fast.writing.open()
        assert released(rig) == [0, 1]
        assert sorted(rig.fast.rows) == [key(0), key(1)]
        [again] = rig.run(rig.store(2, [10, 11], FastSpec))
        assert again.ok
        assert released(rig) == [10, 11]
        assert rig.snapshot().tier("fast").dropped == {"queue": 3}


def test_write_behind_holds_no_more_than_its_share_of_the_slots() -> None:
    with Rig(tier_slots=16, share=0.25) as rig:
        rig.fast.writing.shut()
        rig.slow.writing.shut()
        [result] = rig.run(rig.store(1, range(10), FastSpec, SlowSpec))
        assert result.ok
        assert rig.wait_for_released(6) == [4, 5, 6, 7, 8, 9]
        assert rig.snapshot().tier("fast").dropped == {"slots": 6}
        assert rig.snapshot().tier("slow").dropped == {"slots": 6}
        rig.fast.writing.open()
        rig.slow.writing.open()
        assert released(rig) == [0, 1, 2, 3]
        [again] = rig.run(rig.store(2, range(4), FastSpec, generation=2))
        assert again.ok
        assert released(rig) == [0, 1, 2, 3]


def test_a_tier_that_fails_does_not_touch_the_other() -> None:
    def trouble(method: str, keys: Sequence[BlockKey]) -> None:
        if method == "write":
            raise TierError("the disk is gone", tier="fast")

    with Rig(threads=1) as rig:
        rig.fast.trouble = trouble
        [result] = rig.run(rig.store(1, range(5), FastSpec, SlowSpec))
        assert result.ok
        assert released(rig) == list(range(5))
        assert not rig.fast.rows
        assert rig.fast.reserved == 0
        assert len(rig.slow.rows) == 5
        snapshot = rig.snapshot()
        failed = snapshot.hop("cpu", "fast", "fast").failures
        dropped = snapshot.tier("fast").dropped
        assert failed == {"tier_error": 1}
        assert dropped == {"failed": 1, "unhealthy": 4}
        healthy, reason = rig.engine.health()["fast"]
        assert healthy  # it can still be read
        assert reason == "cpu->fast: unhealthy: the disk is gone"
        [late] = rig.run(rig.store(2, [20], FastSpec))
        assert late.ok
        assert released(rig) == [20]
        assert rig.snapshot().tier("fast").dropped == {"failed": 1, "unhealthy": 5}


@pytest.mark.parametrize("method", ["reserve", "write", "publish"])
@pytest.mark.parametrize("error", [NoSpace("full"), ZeroDivisionError("a mistake")])
def test_a_failing_write_leaves_no_trace(method: str, error: Exception) -> None:
    def trouble(called: str, keys: Sequence[BlockKey]) -> None:
        if called == method:
            raise error

    with Rig(group_blocks=4, faults=2) as rig:
        rig.fast.trouble = trouble
        [result] = rig.run(rig.store(1, range(4), FastSpec))
        assert result.ok
        assert released(rig) == list(range(4))
        assert not rig.fast.rows
        assert rig.fast.reserved == 0
        assert sum(rig.snapshot().hop("cpu", "fast", "fast").failures.values()) == 4
        rig.fast.trouble = lambda called, keys: None
        rig.run(rig.store(2, range(4), FastSpec, generation=2))
        assert released(rig) == list(range(4))
        assert len(rig.fast.rows) == 4


def test_a_block_that_the_store_has_is_not_written_again() -> None:
    with Rig(group_blocks=4) as rig:
        rig.fast.fill([1])
        rig.run(rig.store(1, range(3), FastSpec))
        assert released(rig) == [0, 1, 2]
        assert rig.snapshot().hop("cpu", "fast", "fast").bytes == 2 * BLOCK_BYTES
        assert rig.snapshot().hop("cpu", "fast", "fast").blocks == 3


def test_a_hanging_write_takes_the_tier_out_and_drops_what_is_queued() -> None:
    with Rig(threads=1, store_deadline=2.0) as rig:
        rig.fast.writing.shut()
        [result] = rig.run(rig.store(1, range(5), FastSpec, SlowSpec))
        assert result.ok
        assert rig.wait_for_released(4) == [1, 2, 3, 4]
        assert rig.snapshot().tier("fast").dropped == {"unhealthy": 4}
        assert "all 1 calls hang" in rig.engine.health()["fast"][1]
        rig.fast.writing.open()
        assert released(rig) == [0]
        assert list(rig.fast.rows) == [key(0)]
        assert len(rig.slow.rows) == 5


def test_loads_pass_queued_stores() -> None:
    with Rig(threads=2, load_deadline=5.0) as rig:  # less than the writes are held
        rig.fast.fill(range(40, 44))
        rig.fast.writing.shut()
        rig.run(rig.store(1, range(40), FastSpec))
        rig.journal.wait_for("fast.write begins", 2)
        [result] = rig.run(rig.load_from(2, range(40, 44), FastSpec))
        assert result.ok
        assert rig.journal.count("fast.write goes on") == 0
        rig.fast.writing.open()
        assert released(rig) == list(range(40))


# ------------------------------------------------------------------------- without a cpu tier


def test_without_host_slots_blocks_go_through_staging() -> None:
    with Rig(staging_slots=4, tier_slots=0, group_blocks=2) as rig:
        [result] = rig.run(rig.store(1, range(20), FastSpec, SlowSpec, slots=False))
        assert result.ok
        assert rig.engine.drain(30.0)
        assert rig.engine.released() == []
        for store in (rig.fast, rig.slow):
            assert {k: row[0] for k, row in store.rows.items()} == {
                key(i): content(i) for i in range(20)
            }
        assert rig.pool.most_leased <= 2  # half of it is kept for loads


def test_staging_that_does_not_come_in_time_is_no_space() -> None:
    with Rig(staging_slots=4, tier_slots=0, store_deadline=1.0) as rig:
        rig.fast.writing.shut()
        [result] = rig.run(rig.store(1, range(6), FastSpec, slots=False))
        assert list(result.statuses).count(OK) == 2
        assert list(result.statuses).count(BlockStatus.NO_SPACE) == 4
        dropped = rig.snapshot().tier("fast").dropped
        # Writes hang for as long as staging is waited for: the tier may be out by then.
        assert dropped["staging"] + dropped.get("unhealthy", 0) >= 4
        assert 1 <= rig.pool.leased <= 2
        rig.fast.writing.open()
        assert rig.engine.drain(30.0)
        assert 1 <= len(rig.fast.rows) <= 2
        assert rig.pool.leased == 0


def test_a_load_finds_staging_while_stores_hold_theirs() -> None:
    with Rig(staging_slots=2, tier_slots=0) as rig:
        rig.slow.fill(range(30, 40))
        rig.fast.writing.shut()
        rig.engine.submit(rig.store(1, range(6), FastSpec, slots=False))
        rig.journal.wait_for("fast.write begins")
        [loaded] = [
            r for r in _ended(rig, rig.load_from(2, range(30, 40), SlowSpec).id) if r.id == 2
        ]
        assert loaded.ok
        rig.fast.writing.open()
        [stored] = rig.results(JobId(1))
        assert stored.ok


def _ended(rig: Rig, job: JobId) -> list[JobResult]:
    rig.engine.submit(rig.load_from(job, range(30, 40), SlowSpec))
    assert not rig.engine.wait([job], 30.0)
    return rig.engine.finished()


def test_poison_stops_blocks_that_are_written_from_staging() -> None:
    with Rig(staging_slots=4, tier_slots=0) as rig:
        rig.fast.writing.shut()
        rig.engine.submit(rig.store(1, range(6), FastSpec, slots=False))
        rig.journal.wait_for("fast.write begins")
        rig.engine.poison([JobId(1)])
        [result] = rig.results(JobId(1))
        assert set(result.statuses) == {CANCELLED}
        rig.fast.writing.open()
        assert rig.engine.drain(30.0)
        assert not rig.fast.rows


def test_a_direct_store_and_one_through_staging_share_a_job() -> None:
    with Rig(direct=True, group_blocks=2) as rig:
        [result] = rig.run(rig.store(1, range(5), FastSpec, SlowSpec, slots=False))
        assert result.ok
        assert rig.engine.drain(30.0)
        hops = rig.snapshot().hops()
        assert hops["gpu", "fast", "fast"].blocks == hops["cpu", "slow", "slow"].blocks == 5
        assert ("cpu", "fast", "fast") not in hops
        assert rig.fast.rows == rig.slow.rows


def test_a_direct_store_that_is_poisoned_before_it_has_gathered_publishes_nothing() -> None:
    with Rig(direct=True, group_blocks=8) as rig:
        rig.cache.taking.shut()
        rig.engine.submit(rig.store(1, range(5), FastSpec, slots=False))
        rig.journal.wait_for("gpu->fast begins key-000000")
        rig.engine.poison([JobId(1)])
        for i in range(5):
            rig.cache.blocks[i] = b"new owner".ljust(BLOCK_BYTES)
        rig.cache.taking.open()
        [result] = rig.results(JobId(1))
        assert set(result.statuses) == {CANCELLED}
        assert not rig.fast.rows


def test_a_store_with_nowhere_to_go_fails() -> None:
    with Rig(attach=False) as rig:
        [nowhere] = rig.run(rig.store(1, range(2), slots=False))
        assert not nowhere.ok
        [opening] = rig.run(rig.store(2, range(2), FastSpec, slots=False))
        assert set(opening.statuses) == {BlockStatus.TIER_ERROR}
        assert rig.snapshot().tier("fast").dropped == {"unhealthy": 2}
        rig.engine.attach("fast", rig.fast)
        [late] = rig.run(rig.store(3, range(2), FastSpec, slots=False))
        assert late.ok


def test_a_store_whose_first_hop_fails_releases_its_slots() -> None:
    def trouble(hop: str) -> None:
        raise TierError("no device", tier="cpu")

    with Rig() as rig:
        rig.cache.trouble = trouble
        [result] = rig.run(rig.store(1, range(3), FastSpec))
        assert set(result.statuses) == {BlockStatus.TIER_ERROR}
        assert released(rig) == [0, 1, 2]
        [result] = rig.run(rig.store(2, range(3), FastSpec, generation=2))
        assert set(result.statuses) == {BlockStatus.TIER_ERROR}
        assert released(rig) == [0, 1, 2]
        assert not rig.fast.rows


def test_stores_that_contradict_themselves_are_refused() -> None:
    with Rig() as rig:
        job = rig.store(1, range(2), FastSpec)
        slots = CpuSpec((SlotRef(0, 1),))
        with pytest.raises(ValueError, match="1 host slots for 2 keys"):
            rig.engine.submit(StoreJob(job.id, job.request, job.keys, job.src, StoreTargets(slots)))
        beyond = StoreTargets(None, (Part(fast(0), (7,)),))
        with pytest.raises(ValueError, match="names positions"):
            rig.engine.submit(StoreJob(job.id, job.request, job.keys, job.src, beyond))
        with pytest.raises(ValueError, match="1 engine blocks for 2 keys"):
            rig.engine.submit(StoreJob(job.id, job.request, job.keys, gpu([0]), job.dst))
