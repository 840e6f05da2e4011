"""The background scrub: what it finds, how fast it reads, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.unit.test_verifying import LENGTH, open_memory, put
from tiered_kv.config import Deployment
from tiered_kv.connector.care import Scrubbers, TierCare, care_of
from tiered_kv.contracts import BlockStore, VerifyMode
from tiered_kv.stats import StatsRecorder
from tiered_kv.testing.faults import Effect, Fault, Faults, FaultyStore, Method
from tiered_kv.testing.memory_tier import MemoryDisk, MemorySettings
from tiered_kv.upkeep import Pace, Scrubber, Verified
from tiered_kv.upkeep.scrubbing import LEAST_ROUND_SECONDS, LONGEST_YIELD_SECONDS, YIELD_SECONDS
from tiered_kv.values import CacheGeometry, GroupGeometry

PATIENCE = 30.0
GEOMETRY = CacheGeometry((GroupGeometry(0, LENGTH, 1, 16),), 0, 1)


class Time:
    """Stands still but for waits, which take no time, and ends the scrub after so many seconds."""

    def __init__(self, seconds: float = 1e9) -> None:
        self.now = 1_000.0
        self.until = self.now + seconds
        self.waits: list[float] = []
        self.close: Callable[[], object] = lambda: None

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        if self.now < self.until:
            return False
        self.close()
        return True


class Watch:
    """Scrubs in a `Time` until it is over."""

    def __init__(
        self,
        store: BlockStore,
        time: Time,
        rate: int,
        *,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self.batches: list[Verified] = []
        self.rounds: list[bool] = []
        made = threading.Event()

        def close() -> None:
            assert made.wait(PATIENCE)
            self.scrubber._closed.set()  # it is its own thread that closes it here

        time.close = close
        self.scrubber = Scrubber(
            store,
            tier="t",
            rank=0,
            block_bytes=LENGTH,
            rate=rate,
            drop=True,
            checked=self.batches.append,
            ended=self.rounds.append,
            busy=busy,
            clock=time.clock,
            wait=time.wait,
        )
        made.set()
        self.scrubber._thread.join(PATIENCE)
        assert not self.scrubber._thread.is_alive()

    @property
    def bytes(self) -> int:
        return sum(batch.bytes for batch in self.batches)


def test_one_damaged_block_among_many_is_found_and_dropped_without_a_load() -> None:
    disk = MemoryDisk()
    store = open_memory(disk)
    keys = put(store, range(500))
    disk.spoil(keys[321])
    watch = Watch(store, Time(1.5 * LEAST_ROUND_SECONDS), rate=10**9)
    assert watch.rounds == [True, True]
    assert [k for batch in watch.batches for k in batch.corrupt] == [keys[321]]
    assert [k for k in keys if not store.contains([k])[0]] == [keys[321]]
    assert put(store, [321]) == [keys[321]]
    assert sum(batch.blocks for batch in watch.batches) == 500 + 499


@pytest.mark.parametrize("rate", [LENGTH, 7 * LENGTH, 1000 * LENGTH])
def test_it_reads_no_more_than_its_rate(rate: int) -> None:
    store = open_memory(MemoryDisk())
    put(store, range(200))
    seconds = 3 * LEAST_ROUND_SECONDS
    watch = Watch(store, Time(seconds), rate)
    largest = max(batch.bytes for batch in watch.batches)
    print(f"{watch.bytes} bytes in {seconds} s at {rate} bytes per second, {watch.rounds}")
    assert watch.bytes <= rate * seconds + 2 * largest
    # As fast as it may, or round after round where there is less to read than that.
    assert watch.bytes >= min(rate * seconds - 2 * largest, 3 * 200 * LENGTH)


def test_a_medium_that_cannot_be_read_is_not_asked_faster_than_the_rate() -> None:
    store = open_memory(MemoryDisk())
    keys = frozenset(put(store, range(200)))
    faults = Faults(Fault(method=Method.READ, effect=Effect.BLOCK_ERROR, keys=keys), tier="t")
    seconds = LEAST_ROUND_SECONDS / 2
    watch = Watch(FaultyStore(store, faults), Time(seconds), rate=LENGTH)
    assert watch.bytes == 0
    assert 0 < sum(batch.unreadable for batch in watch.batches) <= seconds + 2


def test_long_pauses_are_not_made_up_for() -> None:
    time = Time()
    pace = Pace(100, time.clock)
    assert pace.took(100) == 1.0
    time.now += 1.0
    assert pace.took(50) == 0.5
    time.now += 1_000.0
    assert [pace.took(100) for _ in range(3)] == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match="below 1"):
        Pace(0)


def test_it_steps_aside_for_loads_but_not_for_ever() -> None:
    store = open_memory(MemoryDisk())
    put(store, [1])
    time = Time(LEAST_ROUND_SECONDS / 2)
    watch = Watch(store, time, rate=10**9, busy=lambda: True)
    assert sum(batch.blocks for batch in watch.batches) == 1
    # Before its batch, and before it finds out that there is none after it.
    aside = [wait for wait in time.waits if wait == YIELD_SECONDS]
    assert len(aside) == 2 * round(LONGEST_YIELD_SECONDS / YIELD_SECONDS)


def test_an_idle_tier_makes_it_wait_for_nobody() -> None:
    store = open_memory(MemoryDisk())
    put(store, [1])
    time = Time(LEAST_ROUND_SECONDS / 2)
    Watch(store, time, rate=10**9)
    assert YIELD_SECONDS not in time.waits


def test_a_store_that_fails_costs_the_round_and_is_asked_again() -> None:
    disk = MemoryDisk()
    store = open_memory(disk)
    put(store, range(3))
    faults = Faults(
        Fault(method=Method.READ, effect=Effect.TIER_ERROR, calls=(1,)),
        Fault(method=Method.READ, effect=Effect.BUG, calls=(2,)),
        tier="t",
    )
    watch = Watch(FaultyStore(store, faults), Time(2.5 * LEAST_ROUND_SECONDS), rate=10**9)
    assert watch.rounds == [False, False, True]
    assert sum(batch.blocks for batch in watch.batches) == 3


@pytest.fixture
def stats() -> StatsRecorder:
    return StatsRecorder("rank 0")


def test_the_end_does_not_wait_for_a_read_that_hangs(stats: StatsRecorder) -> None:
    disk = MemoryDisk()
    store = open_memory(disk)
    put(store, range(4))
    faults = Faults(tier="t")
    faults.at(Method.READ).shut()
    scrubbers = Scrubbers({"t": TierCare(scrub=10**9)}, stats, lambda _: False)
    scrubbers.add("t", FaultyStore(store, faults), GEOMETRY)
    assert faults.at(Method.READ).wait_held(timeout=PATIENCE)
    assert not scrubbers.close(0.05)
    faults.at(Method.READ).open()
    assert scrubbers.close(PATIENCE)
    assert scrubbers.close(0.0)
    (thread,) = (scrubber._thread for scrubber in scrubbers._running.values())
    assert thread.daemon


def test_what_it_finds_is_counted(stats: StatsRecorder) -> None:
    disk = MemoryDisk()
    store = open_memory(disk)
    keys = put(store, range(20))
    disk.spoil(keys[3])
    scrubbers = Scrubbers(
        {"t": TierCare(scrub=10**9), "off": TierCare()}, stats, lambda tier: tier != "t"
    )
    ended = threading.Event()
    tell = scrubbers._ended

    def told(tier: str, whole: bool) -> None:
        tell(tier, whole)
        ended.set()

    scrubbers._ended = told  # type: ignore[method-assign]
    scrubbers.add("off", store, GEOMETRY)
    scrubbers.add("another", store, GEOMETRY)
    scrubbers.add("t", store, GEOMETRY)
    assert ended.wait(PATIENCE)
    assert set(scrubbers._running) == {"t"}
    assert scrubbers.close(PATIENCE)
    scrubbers.add("t", store, GEOMETRY)
    tier = stats.snapshot().tier("t")
    assert (tier.scrubbed_blocks, tier.scrubbed_bytes) == (20, 20 * LENGTH)
    assert tier.corrupt == {"scrub": 1}
    assert stats.snapshot().counter("scrub_rounds_total", "t") == 1
    assert not store.contains([keys[3]])[0]


def test_the_settings_say_what_is_done() -> None:
    deployment = Deployment(
        tiers=(
            MemorySettings(name="one"),
            MemorySettings(name="two", verify="first", scrub=1_000),
        )
    )
    assert care_of(deployment) == {
        "one": TierCare(),
        "two": TierCare(VerifyMode.FIRST, scrub=1_000),
    }
