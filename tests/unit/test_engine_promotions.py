"""Promotions: from stores into host slots, behind the loads, whatever goes wrong."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from tests.unit.doubles import BLOCK_BYTES, PATIENCE, FastSpec, SlowSpec, content, key
from tests.unit.engine_rig import Rig
from tiered_kv.engine.waiting import Priority
from tiered_kv.errors import TierError
from tiered_kv.specs import CpuSpec, Part, Parts, SlotRef
from tiered_kv.values import BlockStatus, JobId

OK, CANCELLED, TIMED_OUT = BlockStatus.OK, BlockStatus.CANCELLED, BlockStatus.TIMED_OUT


def in_slots(rig: Rig, numbers: range, generation: int = 1) -> dict[int, bytes | None]:
    """What is bound in slots."""
    views = {i: rig.pool.view(SlotRef(i, generation)) for i in numbers}
    return {i: None if view is None else bytes(view) for i, view in views.items()}


def wait_in_line(rig: Rig, priority: Priority) -> None:
    """Wait until a call of this priority waits for its turn to read from the tier "fast"."""
    [permits] = [live.permits for hop, live in rig.engine._hops.items() if hop.label == "fast->cpu"]
    pause = threading.Event()
    for _ in range(3000):
        if len(permits._lines[priority]):
            return
        pause.wait(PATIENCE / 3000)  # nobody tells
    raise AssertionError(f"nobody of priority {priority.name} waits")


def test_blocks_come_into_the_slots_that_the_manager_named() -> None:
    with Rig(group_blocks=2) as rig:
        rig.fast.fill(range(5))
        job = rig.promotion(0, range(5))
        rig.engine.promote(job)
        rig.engine.promote(job)
        assert rig.promoted(1) == {0: (OK,) * 5}
        assert rig.wait_for_released(5) == [0, 1, 2, 3, 4]
        assert in_slots(rig, range(5)) == {i: content(i) for i in range(5)}
        hop = rig.snapshot().hop("fast", "cpu", "fast")
        assert (hop.operations, hop.blocks, hop.bytes) == (3, 5, 5 * BLOCK_BYTES)
        assert rig.engine.finished() == [], "the engine hears nothing of it"
        assert rig.engine.drain(PATIENCE)
        assert rig.engine.promoted() == []
        # What is there is loaded like any block of the host tier.
        [loaded] = rig.run(rig.load(0, {CpuSpec(job.dst.slots): range(5)}))
        assert loaded.ok
        assert rig.cache.blocks == {i: content(i) for i in range(5)}


def test_blocks_of_two_tiers_come_side_by_side() -> None:
    with Rig() as rig:
        rig.fast.fill([0])
        rig.slow.fill([1])
        keys = (key(0), key(1))
        parts = Parts(
            (Part(SlowSpec("slow", keys[1:]), (1,)), Part(FastSpec("fast", keys[:1]), (0,)))
        )
        rig.engine.promote(replace(rig.promotion(3, [0, 1]), src=parts))
        assert rig.promoted(1) == {3: (OK, OK)}
        assert in_slots(rig, range(2)) == {0: content(0), 1: content(1)}


def test_each_block_that_does_not_come_says_why() -> None:
    with Rig(group_blocks=4) as rig:
        rig.fast.fill([0, 1, 3])
        rig.fast.spoil(1)
        rig.fast.answers[key(3)] = BlockStatus.TIER_ERROR
        rig.engine.promote(rig.promotion(0, range(4)))
        statuses = rig.promoted(1)[0]
        assert statuses == (OK, BlockStatus.CORRUPT, BlockStatus.MISSING, BlockStatus.TIER_ERROR)
        assert rig.wait_for_released(4) == [0, 1, 2, 3]
        assert rig.fast.discarded == [key(1)]
        assert rig.snapshot().counter("tier_corrupt_blocks_total", "fast", "load") == 1


def test_a_tier_that_fails_or_is_not_open_promotes_nothing() -> None:
    def fail(method: str, _: object) -> None:
        raise TierError(f"{method}: the disk is gone", tier="fast")

    with Rig() as rig:
        rig.fast.fill(range(3))
        rig.fast.trouble = fail
        rig.engine.promote(rig.promotion(0, [0]))
        assert rig.promoted(1) == {0: (BlockStatus.TIER_ERROR,)}
        rig.engine.promote(rig.promotion(1, [1, 2]))
        assert rig.promoted(1) == {1: (BlockStatus.TIER_ERROR,) * 2}
        assert rig.wait_for_released(3) == [0, 1, 2]
    with Rig(attach=False) as closed:
        closed.engine.promote(closed.promotion(0, [0]))
        assert closed.promoted(1) == {0: (BlockStatus.TIER_ERROR,)}


def test_a_slot_stays_out_of_use_until_the_read_that_was_given_up_returns() -> None:
    with Rig(load_deadline=0.1, threads=1) as rig:
        rig.fast.fill(range(3))
        rig.fast.reading.shut()
        rig.engine.promote(rig.promotion(0, [0]))
        rig.journal.wait_for("fast.read begins key-000000")
        rig.engine.promote(rig.promotion(1, [1], deadline=0.01))
        ended = rig.promoted(2)
        # The other one hears of its deadline, or that the tier does not work, whichever is first.
        assert ended[0] == (TIMED_OUT,)
        assert ended[1] in ((TIMED_OUT,), (BlockStatus.TIER_ERROR,))
        assert rig.wait_for_released(1) == [1], "nothing was begun for it"
        assert not rig.engine.drain(0.05)
        rig.fast.reading.open()
        assert rig.wait_for_released(1) == [0]
        assert rig.engine.drain(PATIENCE)


def test_a_read_that_returns_late_does_not_touch_the_next_generation() -> None:
    with Rig(load_deadline=0.05) as rig:
        rig.fast.fill(range(2))
        rig.fast.reading.shut()
        rig.engine.promote(rig.promotion(0, [0]))
        assert rig.promoted(1) == {0: (TIMED_OUT,)}
        rig.fill_slots([0], generation=2)
        rig.fast.reading.open()
        assert rig.wait_for_released(1) == [0]
        assert in_slots(rig, range(1), 1) == {0: None}
        # The bytes are what they may be: the manager hands no slot out that was not released.
        assert rig.pool.checksum(SlotRef(0, 2)) is not None


def test_a_load_goes_before_the_promotions_that_wait() -> None:
    with Rig(threads=1) as rig:
        rig.fast.fill(range(6))
        rig.fast.reading.shut()
        for job in range(4):
            rig.engine.promote(rig.promotion(job, [job]))
        rig.journal.wait_for("fast.read begins key-000000")
        load = rig.load_from(0, [5], FastSpec)
        rig.engine.submit(load)
        wait_in_line(rig, Priority.LOAD)
        rig.fast.reading.open()
        assert rig.results(load.id)[0].ok
        assert rig.promoted(4) == dict.fromkeys(range(4), (OK,))
        order = [e for e in rig.journal.entries() if e.startswith("fast.read begins")]
        print(order)
        assert order.index("fast.read begins key-000005") == 1


def test_an_engine_that_closes_gives_up_what_was_not_begun() -> None:
    rig = Rig(threads=1)
    rig.fast.fill(range(3))
    rig.fast.reading.shut()
    for job in range(3):
        rig.engine.promote(rig.promotion(job, [job]))
    rig.journal.wait_for("fast.read begins key-000000")
    assert not rig.engine.close(0.2), "a read hangs"
    rig.engine.promote(rig.promotion(3, [3]))
    assert rig.promoted(3) == dict.fromkeys((1, 2, 3), (CANCELLED,))
    assert rig.wait_for_released(3) == [1, 2, 3], "the first may be written to still"
    rig.fast.reading.open()
    rig.pool.close()


@pytest.mark.parametrize("wrong", ["slots", "positions", "places"])
def test_a_promotion_that_contradicts_itself_ends_at_once(wrong: str) -> None:
    with Rig() as rig:
        job = rig.promotion(0, [0, 1])
        [part] = job.src.parts
        broken = {
            "slots": replace(job, dst=CpuSpec(job.dst.slots[:1])),
            "positions": replace(job, src=Parts((replace(part, positions=(0, 0)),))),
            "places": replace(job, src=Parts((replace(part, spec=part.spec.take([0])),))),
        }[wrong]
        with pytest.raises(ValueError, match="promote job 0 contradicts itself"):
            rig.engine.promote(broken)
        assert rig.engine.promoted() == [(JobId(0), (CANCELLED, CANCELLED))]
        assert len(rig.engine.released()) == len(broken.dst)
