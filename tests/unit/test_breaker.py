"""The breaker's state machine, over a clock that stands still."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.clocks import Clock
from tiered_kv.engine.breaker import Attempt, Breaker, BreakerRules, BreakerState

RULES = BreakerRules(retry_after=5.0, longest_retry=30.0)
CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


def made() -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(RULES, clock), clock


def state(breaker: Breaker) -> BreakerState:
    return breaker.state


def suspects(breaker: Breaker) -> bool:
    return breaker.suspects


def admits(breaker: Breaker) -> bool:
    return breaker.admits


def fail(breaker: Breaker, times: int = 1) -> None:
    for _ in range(times):
        breaker.failed(breaker.begin(), "EIO")


def work(breaker: Breaker, times: int = 1) -> None:
    for _ in range(times):
        breaker.worked(breaker.begin())


def test_a_single_error_does_not_open_it() -> None:
    breaker, _ = made()
    work(breaker, 5)
    fail(breaker)
    assert state(breaker) is CLOSED
    assert suspects(breaker)
    work(breaker)
    assert not suspects(breaker)
    fail(breaker, 2)
    assert state(breaker) is CLOSED, "three of nine calls"


def test_it_opens_by_the_error_rate_of_a_window() -> None:
    breaker, clock = made()
    fail(breaker, 2)
    assert state(breaker) is CLOSED
    fail(breaker)
    assert (state(breaker), breaker.reason) == (OPEN, "EIO")
    breaker, clock = made()
    for _ in range(20):  # one error in each window is no rate
        fail(breaker)
        clock.now += RULES.window_seconds
    assert state(breaker) is CLOSED


def test_it_opens_by_time_outs_in_a_row() -> None:
    breaker, _ = made()
    work(breaker, 50)
    for _ in range(3):
        breaker.timed_out(breaker.begin(), "slow")
        work(breaker)
    assert state(breaker) is CLOSED
    for _ in range(2):
        assert state(breaker) is CLOSED
        breaker.timed_out(breaker.begin(), "slow")
    assert state(breaker) is OPEN


def test_it_opens_at_once_where_the_medium_is_gone() -> None:
    breaker, _ = made()
    work(breaker, 50)
    breaker.trip("gone")
    assert (state(breaker), breaker.reason) == (OPEN, "gone")


def test_one_trial_decides() -> None:
    breaker, clock = made()
    late = breaker.begin()
    fail(breaker, 3)
    assert not admits(breaker)
    breaker.worked(late)
    assert state(breaker) is OPEN, "it began before"
    clock.now += 4.9
    assert state(breaker) is OPEN
    clock.now += 0.1
    assert state(breaker) is HALF_OPEN
    assert admits(breaker)
    trial, other = breaker.begin(), breaker.begin()
    assert (trial.trial, other.trial) == (True, False)
    assert not admits(breaker)
    breaker.worked(other)
    assert state(breaker) is HALF_OPEN, "only the trial decides"
    breaker.worked(trial)
    assert state(breaker) is CLOSED
    breaker.failed(other, "late news")
    assert not suspects(breaker)


def test_a_trial_that_says_nothing_is_followed_by_another() -> None:
    breaker, clock = made()
    breaker.trip("gone")
    clock.now += 5
    breaker.said_nothing(breaker.begin())
    assert admits(breaker)
    assert breaker.begin().trial


def test_the_wait_grows_to_a_cap_and_starts_anew_once_it_was_well() -> None:
    breaker, clock = made()
    breaker.trip("gone")
    waits = []
    for _ in range(5):
        began = clock.now
        while state(breaker) is OPEN:
            clock.now += 1
        waits.append(clock.now - began)
        breaker.timed_out(breaker.begin(), "hangs")
    assert waits == [5, 10, 20, 30, 30]
    clock.now += 30
    work(breaker)
    clock.now += 29
    breaker.trip("it had not been well for long")
    clock.now += 29
    assert state(breaker) is OPEN
    clock.now += 1
    work(breaker)
    clock.now += 30
    breaker.trip("it had been well")
    clock.now += 5
    assert state(breaker) is HALF_OPEN


def test_a_sign_of_life_brings_the_trial_forward() -> None:
    breaker, _ = made()
    breaker.hurry()
    assert state(breaker) is CLOSED
    breaker.trip("hangs")
    breaker.hurry()
    assert state(breaker) is HALF_OPEN


@pytest.mark.parametrize(
    "make",
    [
        lambda: BreakerRules(0.0, 30.0),
        lambda: BreakerRules(31.0, 30.0),
        lambda: BreakerRules(5.0, 30.0, least_faults=0),
        lambda: BreakerRules(5.0, 30.0, fault_share=0.0),
    ],
)
def test_rules_are_checked(make: Callable[[], BreakerRules]) -> None:
    with pytest.raises(ValueError, match=r"breaker|retry_after"):
        make()


EVENTS = st.sampled_from(["begin", "worked", "failed", "timed_out", "nothing", "trip", "hurry"])


@given(
    st.lists(st.tuples(EVENTS, st.integers(0, 7), st.floats(0, 40, allow_nan=False)), max_size=80)
)
def test_it_is_never_closed_by_nothing_and_never_open_for_ever(
    story: list[tuple[str, int, float]],
) -> None:
    breaker, clock = made()
    running: list[Attempt] = []
    for what, which, pause in story:
        clock.now += pause
        before, admitted = state(breaker), admits(breaker)
        closes = False
        if what == "begin":
            running.append(breaker.begin())
            assert running[-1].trial == (before is HALF_OPEN and admitted)
        elif what == "trip":
            breaker.trip("gone")
        elif what == "hurry":
            breaker.hurry()
        elif running:
            attempt = running.pop(which % len(running))
            if what == "worked":
                breaker.worked(attempt)
                closes = attempt.trial
            elif what == "failed":
                breaker.failed(attempt, "EIO")
            elif what == "timed_out":
                breaker.timed_out(attempt, "hangs")
            else:
                breaker.said_nothing(attempt)
        if before is not CLOSED and state(breaker) is CLOSED:
            assert closes, f"{what} closed it"
    # However it went: once its trials end, and the last one works, it is closed again.
    for attempt in running:
        breaker.said_nothing(attempt)
    clock.now += RULES.longest_retry
    assert admits(breaker)
    breaker.worked(breaker.begin())
    assert state(breaker) is CLOSED
