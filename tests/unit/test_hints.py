"""What requests ask for: not to be stored, priority, to be kept, to leave."""

from __future__ import annotations

import pytest

from tests.unit.test_manager import Bench, bench, keys
from tiered_kv.connector import USUAL, Answer, Care, WorkerReport, care_for
from tiered_kv.connector.leaving import Leaving
from tiered_kv.errors import ConfigError
from tiered_kv.specs import SlotRef
from tiered_kv.values import BlockKey


def store(b: Bench, request: str, care: Care, *names: str) -> tuple[bytes, ...]:
    """Store blocks in the host tier as a request of its own; those that were stored."""
    b.manager.on_new_request(request, None, care)
    plan = b.manager.prepare_store(request, keys(*names))
    slots = () if plan.targets.first is None else plan.targets.first.slots
    b.manager.take_report(WorkerReport(released=tuple((0, slot) for slot in slots)))
    b.manager.complete_store(plan.keys)
    b.manager.on_request_finished(request)
    return plan.keys


def found(b: Bench, *names: str) -> list[str]:
    hits = []
    for name in names:
        b.manager.lookup(f"look {name}", keys(name), 0)
        if b.manager.answer(f"look {name}", *keys(name)) is Answer.HIT:
            hits.append(name)
        b.manager.on_request_finished(f"look {name}")
    return hits


def test_a_request_may_not_be_stored() -> None:
    b = bench()
    assert store(b, "r", Care(store=False), "a") == ()
    assert store(b, "s", USUAL, "a") == tuple(keys("a"))


def test_blocks_of_a_higher_priority_stay_for_those_of_a_lower_one() -> None:
    b = bench(slots=4)
    store(b, "high", Care(priority=1), "a")
    store(b, "usual", USUAL, "b", "c", "d")
    store(b, "more", USUAL, "e", "f", "g", "h")
    assert found(b, *"abcdefgh") == ["a", "e", "f", "g"]
    store(b, "high too", Care(priority=1), "w", "x", "y", "z")
    assert "a" not in found(b, *"awxyz")


def test_blocks_are_kept_as_long_as_asked_for_within_the_budget() -> None:
    b = bench(slots=8)
    store(b, "kept", Care(keep=60.0), "a", "b", "c")
    store(b, "much", USUAL, *"stuvwxyz")
    assert found(b, "a", "b", "c") == ["a", "b"], "a quarter of 8 slots"
    b.clock.now += 61
    store(b, "again", USUAL, *"defghijk")
    assert found(b, "a", "b") == []


def test_blocks_leave_when_their_time_is_over() -> None:
    b = bench(slots=8)
    store(b, "short", Care(ttl=10.0), "a", "b")
    store(b, "long", USUAL, "c")
    assert found(b, "a", "b", "c") == ["a", "b", "c"]
    b.clock.now += 11
    store(b, "next", USUAL, "d")
    assert found(b, "a", "b", "c", "d") == ["c", "d"]


@pytest.mark.parametrize("slots", [4, 8])
@pytest.mark.parametrize(("ttl", "after", "then"), [(None, 99, 0), (30.0, 25, 6), (30.0, 2, 29)])
def test_a_block_that_is_stored_anew_lives_by_its_newest_time(
    slots: int, ttl: float | None, after: int, then: int
) -> None:
    b = bench(slots=slots)
    store(b, "short", Care(ttl=10.0), "a", "b")
    store(b, "much", Care(ttl=1000.0), *"stuvwxyz"[:slots])  # drives them out
    store(b, "again", Care(ttl=ttl), "a")
    b.clock.now += after
    store(b, "next", USUAL, "c")
    assert found(b, "a", "b") == ["a"], "it left at the time of its former life"
    if then:
        b.clock.now += then
        store(b, "last", USUAL, "d")
        assert found(b, "a", "b") == []


def test_times_of_blocks_are_not_more_than_there_are_slots() -> None:
    leaving, slots = Leaving(), 50
    most = 0
    for round_ in range(200):
        for first in (0, 25):
            refs = [SlotRef(number, round_ + 1) for number in range(first, first + 25)]
            leaving.note(
                [(BlockKey(b"%d of %d" % (ref.number, round_)), ref) for ref in refs], 900 + first
            )
            most = max(most, len(leaving))
    print(f"{most} entries at most for {slots} slots")
    assert most <= 4 * slots
    assert leaving.due(899) == []
    names = [BlockKey(b"%d of 199" % number) for number in range(slots)]
    assert [key for key, _ in leaving.due(900)] == names[:25]
    assert [key for key, _ in leaving.due(2000)] == names[25:]
    assert len(leaving) == 0


def test_hints_are_read_and_wrong_ones_are_named() -> None:
    assert care_for(None) is USUAL
    hints = {"store": False, "priority": -1, "keep": 5, "ttl": 2.5, "tiers": ["host"]}
    assert care_for({"tiered_kv": hints}) == Care(False, -1, 5.0, 2.5)


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        ({"store": 1}, "store must be true or false"),
        ({"priority": 2}, "priority must be -1, 0 or 1"),
        ({"keep": -1}, "keep must be seconds above 0"),
        ({"ttl": "1h"}, "ttl must be seconds above 0"),
        ({"til": 1}, "unknown hints til"),
        ("store", "must be a mapping"),
    ],
)
def test_wrong_hints(hint: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        care_for({"tiered_kv": hint})
