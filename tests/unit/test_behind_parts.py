"""What write-behind is bounded by, alone: the right of way, paces, claims, meters."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace

import pytest

from tests.unit.clocks import Clock
from tests.unit.doubles import Journal, MemoryStore
from tests.unit.test_engine_parts import run, settle
from tiered_kv.contracts import StoreStat
from tiered_kv.engine.claims import Claims
from tiered_kv.engine.pace import CALL_SECONDS, UNMEASURED_BYTES, Pace
from tiered_kv.engine.waiting import Patience, Permits, Priority, RightOfWay
from tiered_kv.engine.wear import WriteMeter
from tiered_kv.specs import SlotRef
from tiered_kv.stats import StatsRecorder, TierWear

MIB = 2**20


def test_loads_go_before_promotions_and_these_before_stores() -> None:
    async def work() -> None:
        permits = Permits(1)
        assert await permits.take(Patience())
        served: list[str] = []

        async def ask(name: str, priority: Priority) -> None:
            assert await permits.take(Patience(), priority)
            served.append(name)

        asked = [
            ("store", Priority.STORE),
            ("promotion", Priority.PROMOTE),
            ("load", Priority.LOAD),
            ("second load", Priority.LOAD),
            ("second store", Priority.STORE),
        ]
        tasks = []
        for name, priority in asked:
            tasks.append(asyncio.create_task(ask(name, priority)))
            await settle()
        for _ in asked:
            permits.give()
            await settle()
        assert served == ["load", "second load", "promotion", "store", "second store"]
        await asyncio.gather(*tasks)

    run(work)


def test_a_store_waits_until_the_loads_of_its_tier_have_ended() -> None:
    async def work() -> None:
        way = RightOfWay(1000.0)
        permits = Permits(2, way)
        with way.load():
            with way.load():
                store = asyncio.create_task(permits.take(Patience(), Priority.STORE))
                await settle()
            await settle()
            assert not store.done()
        await settle()
        assert store.done()
        assert await permits.take(Patience(deadline=0.0), Priority.STORE)

    run(work)


def test_loads_that_leave_no_gap_do_not_starve_stores() -> None:
    async def work() -> None:
        way = RightOfWay(0.05)
        permits = Permits(4, way)
        loop = asyncio.get_running_loop()
        times = [loop.time()]
        with way.load():
            for _ in range(3):
                assert await permits.take(Patience(), Priority.STORE)
                times.append(loop.time())
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert min(gaps) >= 0.05 * 0.99, "one for each stretch of loads"

    run(work)


def test_a_pace_is_what_the_tier_writes_in_a_quarter_of_a_second() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.room() == UNMEASURED_BYTES
    assert pace.speed is None
    pace.began(MIB)
    assert pace.room() == 0
    clock.now += 0.2
    pace.ended(MIB, MIB)
    assert pace.speed == pytest.approx(5 * MIB)
    assert pace.room() == pytest.approx(5 * MIB * CALL_SECONDS, rel=0.01)
    clock.now += 3600  # idle: nothing is known to have changed
    assert pace.speed == pytest.approx(5 * MIB)
    assert pace.call_bytes(16 * MIB, 2) == pytest.approx(5 * MIB * CALL_SECONDS / 2, rel=0.01)
    assert pace.call_bytes(1000, 2) == 1000


def test_one_slow_call_makes_the_next_one_short() -> None:
    clock = Clock()
    pace = Pace(clock)
    for _ in range(100):
        pace.began(16 * MIB)
        clock.now += 0.008
        pace.ended(16 * MIB, 16 * MIB)
    assert pace.room() > 400 * MIB
    pace.began(16 * MIB)
    clock.now += 3.2  # 5 MiB/s
    assert (pace.speed or 0) < 5 * MIB, "a call that goes on shows before it ends"
    pace.ended(16 * MIB, 16 * MIB)
    assert pace.room() < 2 * MIB
    for _ in range(20):  # and it is fast again
        size = max(MIB, min(16 * MIB, pace.room()))
        pace.began(size)
        clock.now += size / (2000 * MIB)
        pace.ended(size, size)
    assert pace.room() > 16 * MIB


def test_a_write_that_was_given_up_makes_the_pace_unknown() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.began(MIB)
    clock.now += 10
    pace.given_up(MIB)
    assert (pace.speed, pace.under_way, pace.room()) == (None, 0, UNMEASURED_BYTES)


def slots(*numbers: int) -> list[SlotRef]:
    return [SlotRef(number, 1) for number in numbers]


def test_a_slot_that_several_tiers_need_counts_once() -> None:
    claims = Claims(2)
    [first, second] = slots(0, 1)
    for tier in ("fast", "slow"):
        claims.keep(first, tier)
        claims.keep(second, tier)
    assert claims.full
    assert (len(claims), claims.of("slow")) == (2, 2)
    assert not claims.give_up(first, "fast")
    assert claims.give_up(first, "slow")
    assert not claims.full


def test_a_slot_is_taken_back_from_tiers_beyond_their_share_alone() -> None:
    claims = Claims(4)
    kept = slots(0, 1, 2, 3)
    for slot in kept:
        claims.keep(slot, "slow")
    claims.keep(kept[3], "fast")
    assert claims.to_take_back("slow") is None, "it has more than its share"
    # The newest that fast does not need itself, and that is not being written.
    claims.begin([kept[2]])
    assert claims.to_take_back("fast") == (kept[1], frozenset({"slow"}))
    claims.end([kept[2]])
    assert claims.to_take_back("fast") == (kept[2], frozenset({"slow"}))
    for slot in kept[:3]:
        assert claims.give_up(slot, "slow")
    assert claims.to_take_back("fast") is None


@pytest.mark.parametrize("seed", range(20))
def test_claims_agree_with_a_plain_count(seed: int) -> None:
    draw = random.Random(seed)
    claims = Claims(8)
    plain: dict[SlotRef, set[str]] = {}
    for _ in range(500):
        slot, tier = SlotRef(draw.randrange(8), 1), draw.choice("abc")
        needs = plain.setdefault(slot, set())
        if tier in needs:
            needs.discard(tier)
            assert claims.give_up(slot, tier) == (not needs)
        else:
            needs.add(tier)
            claims.keep(slot, tier)
        held = [slot for slot, needs in plain.items() if needs]
        assert len(claims) == len(held)
        for each in "abc":
            assert claims.of(each) == sum(each in plain[slot] for slot in held)
            found = claims.to_take_back(each)
            if found is not None:
                assert plain[found[0]] == found[1]
                assert each not in found[1]
                assert all(claims.of(other) > claims.share(each) for other in found[1])


class Counting(MemoryStore):
    """Says what was written to it, or does not count that."""

    def __init__(self, written: int | None) -> None:
        super().__init__("counting", Journal())
        self._counted = written

    def stat(self) -> StoreStat:
        return replace(super().stat(), written_bytes=self._counted)


def test_what_a_store_does_not_count_is_counted_by_the_day() -> None:
    clock = Clock()
    clock.now = 86_400.0 * 100 - 10
    stats = StatsRecorder("rank 0", clock=clock)
    meter = WriteMeter({"far": 1000, "ssd": 500}, stats, clock)
    meter.opened("far", Counting(None))
    meter.opened("ssd", Counting(0))
    meter.written("far", 900)
    meter.written("ssd", 900)
    assert meter.wear("far") == TierWear("far", 99, 900, 1000)
    assert meter.wear("ssd") is None, "its store counts"
    assert not meter.allows("far", 101)
    assert meter.allows("far", 100)
    assert meter.allows("ssd", 10_000)
    clock.now += 20
    assert meter.wear("far") == TierWear("far", 100, 0, 1000)
    meter.written("far", 5)
    clock.now -= 20  # a clock that is set back begins no day again
    assert meter.wear("far") == TierWear("far", 100, 5, 1000)
    assert stats.snapshot().tier("far").written_bytes == 905
    assert stats.snapshot().tier("ssd").written_bytes == 0
