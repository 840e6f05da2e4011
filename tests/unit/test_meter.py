"""How fast a hop is, and how soon a change of that shows."""

from __future__ import annotations

import pytest

from tests.unit.clocks import Clock
from tiered_kv.engine.meter import STALE_SECONDS, WINDOW_SECONDS, Meter

MIB = 2**20


def call(meter: Meter, clock: Clock, copied: int, seconds: float) -> None:
    mark = meter.begin(clock.now)
    clock.now += seconds
    meter.end(clock.now)
    meter.count(clock.now, mark, seconds, copied)


def test_nothing_is_known_before_enough_has_moved_or_run() -> None:
    meter, clock = Meter(), Clock()
    call(meter, clock, MIB - 1, 0.01)
    assert meter.speed(clock.now) is None
    assert meter.latency(clock.now) == 0
    call(meter, clock, 1, 0.01)
    assert meter.speed(clock.now) == pytest.approx(MIB / 0.02)
    slow = Meter()
    call(slow, clock, 2000, 0.2)
    assert slow.speed(clock.now) == pytest.approx(10_000)


def test_calls_side_by_side_share_their_time() -> None:
    meter, clock = Meter(), Clock()
    for _ in range(4):
        marks = [meter.begin(clock.now) for _ in range(2)]
        clock.now += 0.5
        for mark in marks:
            meter.end(clock.now)
            meter.count(clock.now, mark, 0.5, MIB)
        clock.now += 60
    speed = meter.speed(clock.now)
    assert speed == pytest.approx(2 * MIB / 0.5)
    assert meter.latency(clock.now) == pytest.approx(0.5 - MIB / (2 * MIB / 0.5))


def test_a_throttle_shows_within_a_few_calls_and_so_does_its_end() -> None:
    """From 2 GB/s to 5 MB/s and back, with a read of 4 MiB every 3 seconds."""
    meter, clock = Meter(), Clock()
    size = 4 * MIB
    for _ in range(100):
        call(meter, clock, size, size / 2e9)
    assert meter.speed(clock.now) == pytest.approx(2e9)
    seen: list[float] = []
    began = clock.now
    for speed in (5e6,) * 3 + (2e9,) * 3:
        clock.now += 3 if seen else 0
        call(meter, clock, size, size / speed)
        seen.append(meter.speed(clock.now) or 0)
        if len(seen) == 3:
            assert clock.now - began < 10
            assert seen[-1] == pytest.approx(5e6, rel=0.01)
            began = clock.now
    print("MB/s:", [round(speed / 1e6) for speed in seen])
    assert seen[0] < 100e6, "at once it is known to be slow"
    assert seen[-1] == pytest.approx(2e9, rel=0.01)
    assert clock.now - began < 10


def test_old_calls_count_while_young_ones_tell_too_little() -> None:
    meter, clock = Meter(), Clock()
    call(meter, clock, 8 * MIB, 0.01)
    clock.now += 10 * WINDOW_SECONDS
    call(meter, clock, 1000, 0.001)
    assert meter.speed(clock.now) == pytest.approx((8 * MIB + 1000) / 0.011)


def test_a_call_that_hangs_says_nothing() -> None:
    meter, clock = Meter(), Clock()
    meter.begin(clock.now)
    clock.now += 100
    meter.end(clock.now)
    call(meter, clock, 2 * MIB, 0.01)
    assert meter.speed(clock.now) == pytest.approx(2 * MIB / 0.01)


def test_a_measurement_grows_old() -> None:
    meter, clock = Meter(), Clock()
    assert Meter().measured_at is None
    call(meter, clock, 2 * MIB, 0.01)
    assert meter.measured_at == clock.now
    meter.begin(clock.now)
    clock.now += STALE_SECONDS
    assert not meter.is_stale(clock.now), "a call runs"
    meter.end(clock.now)
    clock.now += STALE_SECONDS
    assert meter.is_stale(clock.now + 1)
