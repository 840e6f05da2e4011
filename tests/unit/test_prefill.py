"""How fast the engine computes prompts, measured from its steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.connector import PrefillRate, StepTimer, TimedStep


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


def took(step: TimedStep | None, tokens: int, seconds: float) -> None:
    assert step is not None
    assert step.tokens == tokens
    assert step.seconds == pytest.approx(seconds)


def test_nothing_is_known_before_a_step_that_says_something() -> None:
    fresh = PrefillRate()
    fresh.note(31, 0.001)
    fresh.note(1000, 0.0)
    assert fresh.tokens_per_second is None
    assert fresh.seconds(1000) is None
    rate = PrefillRate()
    rate.note(1000, 0.5)
    assert rate.tokens_per_second == 2000.0
    assert rate.seconds(1000) == 0.5


def test_a_step_that_was_held_up_does_not_move_it() -> None:
    rate = PrefillRate()
    for seconds in (0.5, 0.5, 30.0, 0.5):
        rate.note(1000, seconds)
    assert rate.tokens_per_second == 2000.0


def test_long_steps_count_for_more_than_short_ones() -> None:
    rate = PrefillRate()
    for _ in range(10):
        rate.note(32, 0.032)
    rate.note(2000, 0.4)
    assert rate.tokens_per_second == 5000.0


def test_it_follows_an_engine_that_changes() -> None:
    rate = PrefillRate()
    for _ in range(100):
        rate.note(1000, 1.0)
    for _ in range(40):
        rate.note(1000, 0.1)
    assert rate.tokens_per_second == 10_000.0


def test_what_the_operator_says_is_not_measured() -> None:
    rate = PrefillRate(fixed=123.0)
    rate.note(1000, 0.5)
    assert rate.tokens_per_second == 123.0


@given(st.lists(st.tuples(st.integers(32, 5000), st.floats(1e-3, 10.0)), min_size=1, max_size=64))
def test_half_of_the_tokens_were_at_least_as_fast(steps: list[tuple[int, float]]) -> None:
    rate = PrefillRate()
    for tokens, seconds in steps:
        rate.note(tokens, seconds)
    found = rate.tokens_per_second
    assert found is not None
    total = sum(tokens for tokens, _ in steps)
    assert sum(n for n, seconds in steps if n / seconds >= found) >= total / 2
    assert sum(n for n, seconds in steps if n / seconds <= found) >= total / 2


# Steps


def test_a_step_takes_from_its_beginning_to_its_output() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    step = timer.began([500, 400])
    clock.pass_(0.3)
    took(timer.ended(step), 900, 0.3)


def test_steps_in_flight_have_the_device_one_after_another() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    first, second = timer.began([1000]), timer.began([2000])
    clock.pass_(0.5)
    took(timer.ended(first), 1000, 0.5)
    third = timer.began([1000])
    clock.pass_(1.0)
    took(timer.ended(second), 2000, 1.0)
    clock.pass_(0.5)
    took(timer.ended(third), 1000, 0.5)


def test_a_step_that_is_not_timed_has_the_device_too() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    assert timer.began([1] * 100) is None
    step = timer.began([1000])
    clock.pass_(4.0)
    assert timer.ended(None) is None
    clock.pass_(0.5)
    took(timer.ended(step), 1000, 0.5)


@pytest.mark.parametrize(
    ("scheduled", "tokens"),
    [
        ([], None),
        ([1] * 500, None),
        ([16] * 100, None),
        ([31], None),
        ([32], 32),
        ([32, *[1] * 10], 32),
        ([32, *[1] * 11], None),
        ([1000, *[4] * 64], 1000),
    ],
)
def test_steps_that_mostly_answer_or_are_tiny_tell_nothing(
    scheduled: list[int], tokens: int | None
) -> None:
    clock = Clock()
    timer = StepTimer(clock)
    step = timer.began(scheduled)
    clock.pass_(1.0)
    told = timer.ended(step)
    assert (None if told is None else told.tokens) == tokens


def test_lost_and_repeated_outputs_spoil_nothing() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    steps = [timer.began([100]) for _ in range(1000)]
    clock.pass_(1.0)
    assert timer.ended(steps[-1]) is not None
    assert timer.ended(steps[-1]) is None
    assert timer.ended(steps[0]) is None
    step = timer.began([100])
    clock.pass_(2.0)
    took(timer.ended(step), 100, 2.0)
