"""Background reads: when one is due, what it tells, and that no request waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from tests.unit.doubles import BLOCK_BYTES, PATIENCE, FastSpec, fast, key, slow
from tests.unit.engine_rig import Rig
from tiered_kv.engine.health import Pulse
from tiered_kv.engine.probing import (
    ACTIVE_SECONDS,
    AGAIN_SECONDS,
    IDLE_SECONDS,
    is_due,
)
from tiered_kv.engine.recent import MOST_REMEMBERED, RecentKeys
from tiered_kv.errors import TierError, TierGone
from tiered_kv.stats import TierState
from tiered_kv.values import BlockKey, BlockStatus, JobId


def pulse(
    *,
    opened: float = 0.0,
    due: bool = False,
    closed: bool = True,
    suspect: bool = False,
    measured_at: float | None = 10.0,
    speed: float | None = 1e9,
) -> Pulse:
    return Pulse(opened, due, closed, suspect, measured_at, speed)


@pytest.mark.parametrize(
    ("how", "ended", "idle", "unmeasured", "after"),
    [
        (pulse(), None, False, 1, 0.0),
        (pulse(opened=11.0), 10.0, False, 1, 0.0),
        (pulse(), 10.0, False, 1, ACTIVE_SECONDS),
        (pulse(measured_at=12.0), 10.0, False, 1, 2 + ACTIVE_SECONDS),
        (pulse(), 10.0, True, 1, IDLE_SECONDS),
        (pulse(suspect=True), 10.0, True, 1, AGAIN_SECONDS),
        (pulse(speed=None), 10.0, False, 1, AGAIN_SECONDS),
        (pulse(speed=None), 10.0, True, 3, 3 * AGAIN_SECONDS),
        (pulse(speed=None), 10.0, True, 30, ACTIVE_SECONDS),
        (pulse(speed=None, measured_at=None), 10.0, False, 0, ACTIVE_SECONDS),
        (pulse(closed=False, due=True), 10.0, True, 1, 0.0),
    ],
)
def test_when_a_probe_is_due(
    how: Pulse, ended: float | None, idle: bool, unmeasured: int, after: float
) -> None:
    at = 10.0 + after
    assert is_due(how, ended, at, idle=idle, unmeasured=unmeasured)
    if after:
        assert not is_due(how, ended, at - 0.01, idle=idle, unmeasured=unmeasured)


def test_an_open_breaker_is_left_alone() -> None:
    assert not is_due(pulse(closed=False), None, 1e9, idle=False, unmeasured=1)


def test_the_latest_keys_are_remembered() -> None:
    recent = RecentKeys()
    assert not recent
    recent.add([key(i) for i in range(MOST_REMEMBERED + 8)])
    assert len(recent.some(10_000)) == MOST_REMEMBERED
    assert key(7) not in recent.some(10_000)
    ok, gone, wrong, late = (
        BlockStatus.OK,
        BlockStatus.MISSING,
        BlockStatus.CORRUPT,
        BlockStatus.TIMED_OUT,
    )
    recent.clear()
    recent.note([key(0), key(1), key(2), key(3)], [ok] * 4)
    recent.note([key(0), key(1), key(2), key(3)], [ok, gone, wrong, late])
    assert set(recent.some(10)) == {key(0), key(3)}
    assert len(recent.some(1)) == 1


def until(what: Callable[[], bool]) -> None:
    """Wait for what nobody tells."""
    pause = threading.Event()
    for _ in range(3000):
        if what():
            return
        pause.wait(PATIENCE / 3000)
    raise AssertionError("it did not come about")


def probes(rig: Rig, tier: str = "fast") -> dict[str, int]:
    return dict(rig.snapshot().tier(tier).probes)


def test_a_tier_is_measured_when_its_store_opens_and_no_load_is_counted() -> None:
    with Rig(attach=False, spare_slots=8) as rig:
        rig.fast.fill(range(300))
        rig.engine.attach("fast", rig.fast)
        assert rig.engine.wait_probed(PATIENCE)
        until(lambda: probes(rig) == {"read": 1})
        snapshot = rig.snapshot()
        read = snapshot.counter("tier_probe_bytes_total", "fast")
        print(f"probes {probes(rig)}, {read:.0f} bytes, of {rig.engine.router.version} versions")
        assert read == 4 * BLOCK_BYTES, "each tier has half of the spare slots"
        assert not snapshot.hop("fast", "cpu", "fast").blocks
        assert not snapshot.jobs()
        assert not rig.engine.is_loading("fast")
        assert rig.pool.leased == 0
        assert rig.pool.asked == 0, "the staging of requests is not touched"


def test_a_store_without_blocks_is_asked_how_full_it_is() -> None:
    with Rig(spare_slots=8) as rig:
        assert rig.engine.wait_probed(PATIENCE)
        until(lambda: probes(rig) == {"answered": 1})
        [condition] = [c for c in rig.engine.conditions() if c.tier == "fast"]
        assert (condition.state, condition.load) == (TierState.HEALTHY, None)
        # What is stored is read as soon as it is there.
        rig.run(rig.store(1, range(4), FastSpec))
        until(lambda: probes(rig).get("read", 0) >= 1)


def test_corrupt_blocks_that_a_probe_meets_are_dropped() -> None:
    with Rig(attach=False, spare_slots=8) as rig:
        rig.fast.fill([0])
        rig.fast.spoil(0)
        rig.engine.attach("fast", rig.fast)
        until(lambda: probes(rig) == {"answered": 1})
        assert rig.fast.discarded == [key(0)]
        assert rig.snapshot().tier("fast").corrupt == {"probe": 1}
        assert rig.engine.health()["fast"] == (True, "healthy")


def test_the_way_back_is_found_by_a_probe_and_not_by_a_request() -> None:
    """F14: an error takes the tier out, and no request meets the next one."""
    broken = threading.Event()
    reads: list[int] = []

    def trouble(method: str, keys: Sequence[BlockKey]) -> None:
        if method == "read":
            reads.append(len(keys))
            if broken.is_set():
                raise TierError("EIO", tier="fast")

    with Rig(spare_slots=8, retry_after=0.1) as rig:
        rig.fast.fill(range(4))
        rig.slow.fill(range(4))
        rig.fast.trouble = trouble
        assert rig.engine.wait_probed(PATIENCE)
        broken.set()
        [failed] = rig.run(rig.load_from(1, [0], FastSpec))
        assert failed.statuses == (BlockStatus.TIER_ERROR,)
        assert rig.engine.health()["fast"] == (False, "fast->cpu: unhealthy: EIO")
        until(lambda: probes(rig).get("failed", 0) >= 2)
        met = len(reads)
        [failed] = rig.run(rig.load_from(2, [0], FastSpec))
        assert failed.statuses == (BlockStatus.TIER_ERROR,)
        [other] = rig.run(rig.load(3, {slow(0, 1): range(2)}))
        assert other.ok, "other tiers serve"
        assert rig.snapshot().hop("fast", "cpu", "fast").operations == 1, "one load met it"
        assert met >= 3
        broken.clear()
        until(lambda: rig.engine.health()["fast"][0])
        [again] = rig.run(rig.load(4, {fast(0, 1): range(2)}))
        assert again.ok
        print(f"reads: {len(reads)}, probes: {probes(rig)}")


def held(rig: Rig) -> int:
    """Reads of block 0 that wait at the valve."""
    begun, gone_on = (rig.journal.count(f"fast.read {x} key-000000") for x in ("begins", "goes on"))
    return begun - gone_on


def test_while_loads_of_a_tier_run_it_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.engine.probing.ACTIVE_SECONDS", 0.01)
    with Rig(spare_slots=8, attach=False) as rig:
        rig.fast.fill([0])
        rig.engine.attach("fast", rig.fast)
        rig.engine.attach("slow", rig.slow)
        until(lambda: probes(rig).get("read", 0) >= 2)
        rig.fast.reading.shut()
        rig.engine.submit(rig.load(1, {fast(0): [0]}))
        until(lambda: held(rig) >= 1 and rig.engine.is_loading("fast"))
        asked = probes(rig, "slow")["answered"]
        until(lambda: probes(rig, "slow")["answered"] >= asked + 3)  # which shows that time passes
        seen = held(rig)
        assert seen <= 2, "one that had begun before the load, if any"
        until(lambda: probes(rig, "slow")["answered"] >= asked + 6)
        assert held(rig) == seen
        rig.fast.reading.open()
        [result] = rig.results(JobId(1))
        assert result.ok


def test_a_probe_that_hangs_takes_nothing_from_requests() -> None:
    entry = "fast.read begins key-000000"
    with Rig(spare_slots=8, attach=False, threads=1, load_deadline=1.0, retry_after=0.1) as rig:
        rig.fast.fill([0])
        rig.slow.fill([0])
        rig.fast.reading.shut()
        rig.engine.attach("fast", rig.fast)
        rig.engine.attach("slow", rig.slow)
        rig.journal.wait_for(entry)
        # Whoever loads meanwhile has the tier's thread for itself.
        rig.engine.submit(rig.load(1, {fast(0): [0]}))
        rig.journal.wait_for(entry, 2)
        [other] = rig.run(rig.load(2, {slow(0): [0]}))
        assert other.ok
        [hung] = rig.results(JobId(1))
        assert hung.statuses == (BlockStatus.TIMED_OUT,)
        until(lambda: not rig.engine.health()["fast"][0])
        begun = rig.journal.count(entry)
        rig.fast.reading.open()
        until(lambda: rig.engine.health()["fast"][0])
        [again] = rig.run(rig.load(3, {fast(0): [0]}))
        assert again.ok
        print(f"{begun} reads hung; probes {probes(rig)}")
        assert begun == 2
        assert probes(rig)["late"] == 1


def test_the_condition_tells_the_speed_of_the_slowest_hop_and_follows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiered_kv.engine.meter.WINDOW_SECONDS", 0.01)
    monkeypatch.setattr("tiered_kv.engine.meter.TRUSTED_BYTES", 1000)
    monkeypatch.setattr("tiered_kv.engine.probing.ACTIVE_SECONDS", 0.01)
    pause = threading.Event()
    slowness = [0.0]

    def trouble(method: str, keys: Sequence[BlockKey]) -> None:
        if method == "read":
            pause.wait(slowness[0])

    with Rig(attach=False, spare_slots=8) as rig:
        rig.fast.fill(range(4))
        rig.fast.trouble = trouble
        rig.engine.attach("fast", rig.fast)
        found: list[float] = []

        def told(right: Callable[[float], bool]) -> None:
            def seen() -> bool:
                for condition in rig.engine.conditions():
                    if condition.tier == "fast" and condition.load is not None:
                        found.append(condition.load.bytes_per_second)
                return bool(found) and right(found[-1])

            until(seen)

        slowness[0] = 0.2
        told(lambda speed: speed < 1e6)
        slowness[0] = 0.0
        told(lambda speed: speed > 3e6)
        slowness[0] = 0.2
        told(lambda speed: speed < 1e6)
        print("bytes/s:", [round(speed) for speed in found])
        for before, after in pairwise(found):
            assert abs(after - before) > 0.2 * before


def test_what_is_gone_takes_the_tier_out_at_once_and_is_told() -> None:
    told: list[tuple[str, bool, str]] = []

    def trouble(method: str, keys: Sequence[BlockKey]) -> None:
        if method == "read":
            raise TierGone("no such directory", tier="fast")

    with Rig(faults=100) as rig:
        rig.engine.when_gone(lambda tier, store, why: told.append((tier, store is rig.fast, why)))
        rig.fast.fill(range(4))
        rig.fast.trouble = trouble
        [result] = rig.run(rig.load(1, {fast(0): [0]}))
        assert result.statuses == (BlockStatus.TIER_ERROR,)
        assert rig.engine.health()["fast"] == (False, "unhealthy: no such directory")
        assert told == [("fast", True, "no such directory")]
        gauges = rig.snapshot()
        assert gauges.gauge("tier_breaker", "fast", "open") == 1
        assert gauges.gauge("tier_state", "fast", "down") == 1


def test_a_tier_that_nothing_is_loaded_from_is_measured_as_long_as_the_engine_makes_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what was slow once would stay unused long after it became fast."""
    monkeypatch.setattr("tiered_kv.engine.meter.TRUSTED_BYTES", 1)
    monkeypatch.setattr("tiered_kv.engine.probing.IDLE_AFTER_SECONDS", 0.2)
    monkeypatch.setattr("tiered_kv.engine.probing.ACTIVE_SECONDS", 0.1)
    with Rig(spare_slots=8, attach=False) as rig:
        rig.fast.fill([0])
        rig.engine.attach("fast", rig.fast)

        def asked(count: int) -> bool:
            return not rig.engine.finished() and probes(rig).get("read", 0) >= count

        until(lambda: asked(1))
        threading.Event().wait(0.5)  # idle for longer than it takes to count as that
        until(lambda: asked(4))
        print(f"probes: {probes(rig)}, jobs: {rig.engine.active()}")
