"""Write-behind in the transfer engine: shares, seconds, reasons."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.unit.doubles import BLOCK_BYTES, FastSpec, SlowSpec, content, key
from tests.unit.engine_rig import Rig
from tests.unit.test_engine_store_jobs import released
from tiered_kv.errors import NoSpace, TierError, WriteBudgetSpent
from tiered_kv.values import BlockKey, BlockStatus


def accounted(rig: Rig, tier: str, offered: int) -> None:
    """Everything that was offered to the tier is there, or was dropped for a reason."""
    tier_stats = rig.snapshot().tier(tier)
    stored = rig.snapshot().hop("cpu", tier, tier).blocks
    assert stored + sum(tier_stats.dropped.values()) == offered, tier_stats.dropped
    assert (tier_stats.write_behind_blocks, tier_stats.write_behind_bytes) == (0, 0)


def test_a_slow_tier_leaves_the_others_their_share_of_the_queue() -> None:
    with Rig(store_queue_blocks=8, threads=1) as rig:
        rig.slow.writing.shut()
        rig.run(rig.store(1, range(8), SlowSpec))  # it takes all, while nobody else wants it
        rig.journal.wait_for("slow.write begins")
        rig.fast.writing.shut()
        rig.run(rig.store(2, range(10, 18), FastSpec, SlowSpec))
        rig.journal.wait_for("fast.write begins")
        assert rig.snapshot().tier("fast").write_behind_blocks == 4
        assert rig.snapshot().tier("slow").write_behind_blocks == 4
        assert rig.snapshot().tier("slow").dropped == {"share": 4, "queue": 8}
        assert rig.snapshot().tier("fast").dropped == {"queue": 4}
        assert rig.wait_for_released(8) == [4, 5, 6, 7, 14, 15, 16, 17]
        rig.fast.writing.open()
        rig.slow.writing.open()
        assert released(rig) == [0, 1, 2, 3, 10, 11, 12, 13]
        assert sorted(rig.slow.rows) == [key(i) for i in range(4)]
        assert sorted(rig.fast.rows) == [key(i) for i in range(10, 14)]
        accounted(rig, "slow", 16)
        accounted(rig, "fast", 8)


def test_a_slow_tier_leaves_the_others_their_share_of_the_slots() -> None:
    """A block that is dropped for one tier is still written to the other."""
    with Rig(tier_slots=64, share=0.125, threads=1) as rig:  # 8 slots
        rig.slow.writing.shut()
        stored = 0
        for job in range(6):
            numbers = range(stored, stored + (4 if job else 8))
            rig.run(rig.store(job, numbers, FastSpec, SlowSpec))
            stored += len(numbers)
            rig.journal.wait_for("fast.publish goes on", stored)
        assert len(rig.fast.rows) == stored == 28
        dropped = rig.snapshot().tier("slow").dropped
        assert dropped["share"] > 0
        assert rig.snapshot().tier("fast").dropped == {}
        rig.slow.writing.open()
        assert rig.engine.drain(30.0)
        assert len(rig.engine.released()) == 28
        print(f"fast stored {stored}, slow {len(rig.slow.rows)}, dropped {dropped}")
        assert len(rig.slow.rows) >= 4
        accounted(rig, "fast", 28)
        accounted(rig, "slow", 28)


def test_a_slow_tier_leaves_the_others_their_share_of_the_staging() -> None:
    with Rig(tier_slots=0, staging_slots=8, threads=1, store_deadline=20.0) as rig:
        rig.slow.writing.shut()
        [first] = rig.run(rig.store(1, range(4), SlowSpec, slots=False))
        assert first.ok
        rig.journal.wait_for("slow.write begins")
        [second] = rig.run(rig.store(2, range(10, 22), FastSpec, slots=False))
        assert second.ok, "it waited for no write to the slow tier"
        assert rig.snapshot().tier("slow").dropped["share"] >= 1
        rig.slow.writing.open()
        assert rig.engine.drain(30.0)
        assert len(rig.fast.rows) == 12
        accounted(rig, "slow", 4)
        accounted(rig, "fast", 12)


def test_no_more_waits_than_a_tier_writes_in_time() -> None:
    with Rig(threads=1, store_queue_seconds=1e-6) as rig:
        rig.run(rig.store(1, range(3), FastSpec))  # nothing is known of its speed: bytes alone
        assert released(rig) == [0, 1, 2]
        rig.fast.writing.shut()
        rig.run(rig.store(2, range(10, 14), FastSpec, SlowSpec))
        rig.journal.wait_for("fast.write begins", 4)
        assert rig.snapshot().tier("fast").dropped == {"queue_time": 3}
        rig.fast.writing.open()
        assert released(rig) == [10, 11, 12, 13]
        assert key(10) in rig.fast.rows, "what comes alone is written"
        assert len(rig.slow.rows) == 4
        accounted(rig, "fast", 7)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NoSpace("full"), "no_space"),
        (WriteBudgetSpent("enough for today"), "wear"),
        (TierError("the disk is gone", tier="fast"), "failed"),
        (ZeroDivisionError("a mistake"), "failed"),
    ],
)
def test_a_write_that_failed_is_counted_and_not_repeated(error: Exception, reason: str) -> None:
    calls: list[int] = []

    def trouble(method: str, keys: Sequence[BlockKey]) -> None:
        if method == "reserve":
            calls.append(len(keys))
            raise error

    with Rig(group_blocks=4) as rig:
        rig.fast.trouble = trouble
        [result] = rig.run(rig.store(1, range(4), FastSpec, SlowSpec))
        assert result.ok
        assert released(rig) == [0, 1, 2, 3]
        assert calls == [4]
        assert rig.snapshot().tier("fast").dropped == {reason: 4}
        assert len(rig.slow.rows) == 4
        accounted(rig, "fast", 4)


def test_a_spent_budget_is_no_fault_of_the_tier() -> None:
    def trouble(method: str, keys: Sequence[BlockKey]) -> None:
        if method == "reserve":
            raise WriteBudgetSpent("enough for today")

    with Rig() as rig:
        rig.fast.fill([40])
        rig.fast.trouble = trouble
        rig.run(rig.store(1, range(4), FastSpec))
        assert released(rig) == [0, 1, 2, 3]
        assert rig.engine.health()["fast"] == (True, "healthy")
        failures = rig.snapshot().hop("cpu", "fast", "fast").failures
        assert failures == {BlockStatus.OVER_BUDGET.value: 4}
        [loaded] = rig.run(rig.load_from(2, [40], FastSpec))
        assert loaded.ok


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("slots", [False, True])
def test_the_engine_counts_for_a_store_that_does_not(direct: bool, slots: bool) -> None:
    budget = 5 * BLOCK_BYTES if slots or not direct else 5 * 4096
    with Rig(direct=direct, write_budgets={"fast": budget}) as rig:
        for job in range(8):
            rig.run(rig.store(job, [job], FastSpec, SlowSpec, slots=slots))
            assert rig.engine.drain(30.0)
        kept = len(rig.fast.rows)
        assert 5 <= kept <= 6, "staging is counted in whole pages, what was copied in bytes"
        assert len(rig.slow.rows) == 8
        tier = rig.snapshot().tier("fast")
        assert tier.dropped == {"wear": 8 - kept}
        assert tier.written_bytes == kept * BLOCK_BYTES
        wear = rig.engine.wear("fast")
        assert wear is not None
        assert (wear.written_bytes, wear.budget_bytes) == (kept * BLOCK_BYTES, budget)
        assert rig.engine.wear("slow") is None


def test_a_tier_that_is_named_twice_is_written_once() -> None:
    with Rig() as rig:
        [result] = rig.run(rig.store(1, range(3), FastSpec, FastSpec))
        assert result.ok
        assert released(rig) == [0, 1, 2]
        assert {k: row[0] for k, row in rig.fast.rows.items()} == {
            key(i): content(i) for i in range(3)
        }
