"""Write budgets in the manager: admission tightens, several ranks, the end of a day."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.unit.test_manager import FINGERPRINT, DiskSpec, MirrorDouble, handshake, keys
from tiered_kv.config import StoreSettings
from tiered_kv.connector import Manager, ManagerLimits, TierView, WorkerReport
from tiered_kv.connector.storing import StorePlan
from tiered_kv.placement import Admission, required_uses
from tiered_kv.specs import KeySpec
from tiered_kv.stats import TierWear
from tiered_kv.values import BlockKey

DAY = 86_400
BUDGET = 24_000


class Settings(StoreSettings, frozen=True):
    type: str = "disk"


class Deployed:
    """A manager over one or two tiers, at an hour of a day."""

    def __init__(self, *, host: bool = False, min_uses: int = 1) -> None:
        self.now = 100.0 * DAY
        self.ssd, self.far = MirrorDouble(), MirrorDouble()
        self.manager = Manager(
            fingerprint=FINGERPRINT,
            host_tier="host" if host else None,
            host_write=host,
            tiers=[
                TierView("ssd", DiskSpec, write=True, mirror=lambda _, __: self.ssd),
                TierView("far", DiskSpec, write=True, mirror=lambda _, __: self.far),
            ],
            limits=ManagerLimits(lookup_wait=0.05, retry_backoff=5.0),
            world_size=2,
            min_uses=min_uses,
            wall=lambda: self.now,
        )
        self.manager.attach([handshake(rank, 2, 64 if host else 0) for rank in range(2)])

    def report(self, *written: int, day: int = 100) -> None:
        """By rank, what was written to the ssd on a day."""
        worn = tuple((r, TierWear("ssd", day, bytes_, BUDGET)) for r, bytes_ in enumerate(written))
        self.manager.take_report(WorkerReport(worn=worn))

    def store(self, *names: str) -> StorePlan:
        plan = self.manager.prepare_store("r", keys(*names))
        self.manager.complete_store(plan.keys)
        return plan

    def to_ssd(self, *names: str) -> tuple[BlockKey, ...]:
        """Which of these blocks go to the ssd."""
        return tuple(
            key
            for part in self.store(*names).targets.behind
            if isinstance(part.spec, KeySpec) and part.spec.tier == "ssd"
            for key in part.spec.keys
        )

    def dropped(self) -> dict[str, int]:
        return dict(self.manager.stats.snapshot().tier("ssd").dropped)


def test_the_budget_of_an_hour_may_be_used_ahead() -> None:
    assert required_uses(1, used=0.0, elapsed=0.0) == 1
    assert required_uses(1, used=1 / 24, elapsed=0.0) == 1
    assert required_uses(1, used=1 / 24 + 0.001, elapsed=0.0) == 2
    assert required_uses(3, used=4 / 24, elapsed=0.0) == 6
    assert required_uses(1, used=0.5, elapsed=0.5) == 1
    assert required_uses(1, used=0.99, elapsed=0.0) == 24
    assert required_uses(1, used=1.0, elapsed=0.999) is None
    assert required_uses(1, used=1.7, elapsed=0.999) is None


@given(
    least=st.integers(1, 100),
    used=st.floats(0, 2, allow_nan=False),
    more=st.floats(0, 1, allow_nan=False),
    elapsed=st.floats(0, 1, exclude_max=True, allow_nan=False),
)
def test_admission_only_tightens_as_the_budget_is_used(
    least: int, used: float, more: float, elapsed: float
) -> None:
    before = required_uses(least, used=used, elapsed=elapsed)
    after = required_uses(least, used=used + more, elapsed=elapsed)
    assert before is None or before >= least
    assert after is None or (before is not None and after >= before)


def test_wanted_blocks_are_counted_and_the_oldest_forgotten() -> None:
    admission = Admission(1, memory=3)
    a, b, c, d = keys("a", "b", "c", "d")
    assert admission.wanted([a, b, a]) == [1, 1, 2]
    assert admission.wanted([c, d]) == [1, 1]
    assert admission.wanted([a, b]) == [3, 1], "b was wanted longest ago"


def test_a_tier_that_is_ahead_of_its_budget_takes_what_was_wanted_more_often() -> None:
    d = Deployed()
    d.report(3 * BUDGET // 24, 3 * BUDGET // 24)  # at midnight: two hours more than one ahead
    assert d.to_ssd("a") == ()
    assert d.to_ssd("a") == ()
    assert d.to_ssd("a", "b") == tuple(keys("a"))
    assert d.dropped() == {"wear": 3}
    d.now += 2 * 3600 + 1  # two hours later it is no more than an hour ahead
    assert d.to_ssd("c") == tuple(keys("c"))


def test_other_tiers_take_what_one_refuses() -> None:
    d = Deployed(host=True)
    d.report(BUDGET, 0)
    plan = d.store("a", "b")
    assert plan.keys == tuple(keys("a", "b"))
    assert plan.targets.first is not None
    assert [part.spec.tier for part in plan.targets.behind] == ["far"]
    assert d.dropped() == {"wear": 2}
    assert d.store("a", "b").keys == (), "the host has them"
    assert d.dropped() == {"wear": 2}


def test_beyond_the_budget_nothing_is_stored_until_the_next_day() -> None:
    d = Deployed()
    d.report(10, BUDGET + 5)  # the rank that has written most holds
    for _ in range(50):
        assert d.to_ssd("a") == ()
    d.now += DAY - 1
    assert d.to_ssd("a") == ()
    d.now += 2
    assert d.to_ssd("a") == tuple(keys("a")), "a new day, of which nothing was heard yet"
    d.report(BUDGET, day=101)
    assert d.to_ssd("b") == ()


def test_the_whole_budget_of_a_day_is_spread_over_it() -> None:
    """A store of a thousand bytes each minute, wanted once: twice the budget of the day."""
    d = Deployed()
    budget, written, by_hour = 720_000, 0, [0] * 24
    for minute in range(24 * 60):
        d.now = 100.0 * DAY + 60 * minute
        worn = ((0, TierWear("ssd", 100, written, budget)),)
        d.manager.take_report(WorkerReport(worn=worn))
        stored = len(d.to_ssd(f"block {minute}"))
        written += 1000 * stored
        by_hour[minute // 60] += stored
    print(f"{written} of {budget} bytes, by hour {by_hour}")
    assert budget * 0.99 <= written <= budget
    assert max(by_hour[1:]) <= 2 * budget / 24_000
    assert min(by_hour[:-1]) > 0, "an hour ahead, so the last one has none left"


def test_without_a_budget_nothing_is_counted() -> None:
    d = Deployed()
    for _ in range(3):
        assert d.to_ssd("a") == tuple(keys("a"))
    assert d.dropped() == {}


def test_reports_of_several_ranks_and_steps_are_put_together() -> None:
    worn = [TierWear("ssd", 100, n, BUDGET) for n in range(3)]
    reports = [WorkerReport(worn=((rank, wear),)) for rank, wear in enumerate(worn)]
    merged = reports[0].merged(reports[1]).merged(reports[2])
    assert merged.worn == tuple(enumerate(worn))
    assert merged
    assert all(wear.used(99) == wear.used(100) for wear in worn)
    assert all(after.used(101) == 0 for _, after in itertools.pairwise(worn))


@pytest.mark.parametrize(
    ("written", "budget"), [("off", 0), ("500GiB", 500 * 2**30), (False, 0), (4096, 4096)]
)
def test_a_budget_as_it_is_written(written: object, budget: int) -> None:
    assert Settings.model_validate({"name": "ssd", "write_budget": written}).write_budget == budget


@pytest.mark.parametrize("written", ["500", "500G", "on", -1, "5GiB/day"])
def test_a_budget_that_can_be_read_in_two_ways_is_refused(written: object) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate({"name": "ssd", "write_budget": written})
