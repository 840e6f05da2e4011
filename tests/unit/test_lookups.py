"""Repeated lookups of a request that waits: what stands, and what makes it be asked anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.unit.test_manager import Bench, bench, keys
from tiered_kv.connector import Answer, WorkerReport
from tiered_kv.connector.lookups import NEWS_SECONDS
from tiered_kv.connector.messages import FailedBlock
from tiered_kv.stats import TierCondition, TierState
from tiered_kv.values import BlockKey, BlockStatus

HIT, MISS, PENDING = Answer.HIT, Answer.MISS, Answer.PENDING
NAMES = ("a", "b", "c")


@dataclass
class Counting:
    """A bench whose disk counts how often it is asked."""

    b: Bench
    asked: int = 0

    def __post_init__(self) -> None:
        disk = self.b.disk
        ask = disk.lookup

        def lookup(given: list[BlockKey]) -> list[bool | None]:
            self.asked += 1
            return ask(given)

        disk.lookup = lookup  # type: ignore[assignment,method-assign]  # a double of our own

    def answers(self, computed: int = 0, mark: object = "m") -> list[Answer]:
        manager = self.b.manager
        if not manager.still_holds("q", computed, mark):
            manager.lookup("q", keys(*NAMES), computed, None, mark)
        found = manager.answers("q")
        one_by_one = [manager.answer("q", key) for key in keys(*NAMES)]
        assert one_by_one == [found.get(key, MISS) for key in keys(*NAMES)]
        return one_by_one

    def has(self, *names: str) -> None:
        self.b.disk.known = dict.fromkeys(keys(*names), True)
        self.b.disk.version = object()


@pytest.fixture
def disk() -> Counting:
    counting = Counting(bench())
    counting.has("a", "b")
    assert counting.answers() == [HIT, HIT, MISS]
    assert counting.asked == 1
    return counting


def later(disk: Counting) -> None:
    disk.b.clock.now += NEWS_SECONDS


def test_answers_stand_while_nothing_changes(disk: Counting) -> None:
    for _ in range(50):
        disk.b.clock.now += 0.1
        assert disk.answers() == [HIT, HIT, MISS]
    print(f"asked {disk.asked} times")
    assert disk.asked == 1


def test_what_came_or_went_is_noticed_after_a_while(disk: Counting) -> None:
    disk.has("b", "c")
    assert disk.answers() == [HIT, HIT, MISS]
    later(disk)
    assert disk.answers() == [MISS, HIT, HIT]
    assert disk.answers() == [MISS, HIT, HIT]
    assert disk.asked == 2


def test_what_came_to_the_host_tier_is_noticed(disk: Counting) -> None:
    disk.b.store("c")
    later(disk)
    assert disk.answers() == [HIT, HIT, HIT]
    assert disk.b.manager.source("q", keys("c")[0]) == "host"


def test_what_is_asked_again_makes_no_request_wait(disk: Counting) -> None:
    """It could be scheduled now: that another one stores what it misses is no reason to put it
    off, again and again."""
    plan = disk.b.manager.prepare_store("r", keys("c", "d"))
    disk.has("a")
    later(disk)
    assert disk.answers() == [HIT, MISS, MISS]
    disk.b.manager.complete_store(plan.keys)
    later(disk)
    assert disk.answers() == [HIT, MISS, HIT]


def test_what_is_asked_again_is_counted_once(disk: Counting) -> None:
    manager = disk.b.manager

    def counted() -> tuple[int, int]:
        tier = manager.stats.snapshot().tier("ssd")
        return tier.hits, tier.misses

    before = counted()
    assert before == (2, 1)
    for _ in range(5):
        disk.has("a")
        later(disk)
        assert disk.answers() == [HIT, MISS, MISS]
    assert disk.asked == 6
    assert counted() == before


def tier_down(disk: Counting) -> None:
    condition = TierCondition("ssd", TierState.DOWN, "broken", None)
    disk.b.manager.take_report(WorkerReport(conditions=((0, condition),)))


def test_a_tier_that_fails_is_noticed_at_once(disk: Counting) -> None:
    tier_down(disk)
    assert disk.answers() == [MISS, MISS, MISS]
    condition = TierCondition("ssd", TierState.HEALTHY, "", None)
    disk.b.manager.take_report(WorkerReport(conditions=((0, condition),)))
    assert disk.answers() == [HIT, HIT, MISS]


def test_a_load_of_another_request_that_failed_is_noticed_at_once(disk: Counting) -> None:
    manager = disk.b.manager
    manager.lookup("other", keys("a", "b"), 0)
    manager.prepare_load("other", keys("a", "b"))
    failed = FailedBlock(keys("a")[0], BlockStatus.MISSING, "other")
    manager.take_report(WorkerReport(failed_loads=(failed,)))
    assert disk.answers() == [MISS, HIT, MISS]


def used(disk: Counting) -> None:
    disk.b.manager.prepare_load("q", keys("a", "b"))
    disk.b.manager.complete_load("q", keys("a", "b"))


def reset(disk: Counting) -> None:
    disk.b.manager.reset()


def barred(disk: Counting) -> None:
    disk.b.manager.bar("q")


def over(disk: Counting) -> None:
    disk.b.manager.on_request_finished("q")


def lease_over(disk: Counting) -> None:
    disk.b.clock.now += 10.0


@pytest.mark.parametrize("change", [used, reset, barred, over, lease_over])
def test_answers_do_not_stand_any_more(disk: Counting, change: Callable[[Counting], None]) -> None:
    assert disk.b.manager.still_holds("q", 0, "m")
    change(disk)
    assert not disk.b.manager.still_holds("q", 0, "m")
    if change is not lease_over:
        assert not disk.b.manager.answers("q")


def test_answers_stand_for_the_question_alone(disk: Counting) -> None:
    manager = disk.b.manager
    assert not manager.still_holds("q", 0, "another")
    assert not manager.still_holds("q", 16, "m")
    assert not manager.still_holds("p", 0, "m")
    assert manager.still_holds("q", 0, "m")
    assert disk.answers(computed=16) == [HIT, HIT, MISS]
    assert disk.answers(computed=16, mark="longer") == [HIT, HIT, MISS]
    assert disk.asked == 3


def test_who_reads_the_answers_sees_that_they_were_dropped(disk: Counting) -> None:
    found = disk.b.manager.answers("q")
    assert len(found) == 3
    disk.b.manager.bar("q")
    assert not found


def test_what_is_not_known_yet_is_asked_at_every_step() -> None:
    disk = Counting(bench())
    disk.b.disk.known = dict.fromkeys(keys("a", "b"), None)
    assert disk.answers() == [Answer.RETRY, Answer.RETRY, MISS]
    assert disk.answers() == [Answer.RETRY, Answer.RETRY, MISS]
    disk.b.disk.known = dict.fromkeys(keys("a", "b"), True)
    assert disk.answers() == [HIT, HIT, MISS]
    assert disk.asked == 3


def test_a_block_that_is_being_stored_is_found_in_another_tier_meanwhile() -> None:
    disk = Counting(bench())
    disk.b.manager.prepare_store("r", keys("a", "c"))
    disk.has("a", "b")
    assert disk.answers() == [HIT, HIT, PENDING]
    assert not disk.b.manager.still_holds("q", 0, "m")


def test_a_key_that_is_asked_twice_is_one_block() -> None:
    b = bench()
    b.disk.known = dict.fromkeys(keys("a"), True)
    assert b.answers("q", keys("a", "a", "b")) == [HIT, HIT, MISS]
    found = b.manager.stats.snapshot().tier("ssd")
    assert (found.hits, found.misses) == (1, 1)
