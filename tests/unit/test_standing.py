"""What the log and the manager hear of the tiers."""

from __future__ import annotations

import pytest

from tests.unit.clocks import Clock
from tests.unit.doubles import SLOT_BYTES, FastSpec, Gather, Scatter
from tiered_kv.engine import register_store_handlers
from tiered_kv.engine.breaker import BreakerRules
from tiered_kv.engine.health import HealthBoard, Verdict
from tiered_kv.engine.standing import QUIET_SECONDS, Standing
from tiered_kv.registry import TransferRegistry
from tiered_kv.routing import Hop, HopCost, Router
from tiered_kv.specs import CpuSpec, GpuSpec
from tiered_kv.stats import StatsRecorder, TierCondition, TierState

MIB = 2**20


class Tiers:
    """A board, a router and what is told of them, over a clock; the tier is "fast"."""

    def __init__(self) -> None:
        self.clock = Clock()
        registry = TransferRegistry()
        registry.register(GpuSpec, CpuSpec, Gather, provider="doubles")
        registry.register(CpuSpec, GpuSpec, Scatter, provider="doubles")
        register_store_handlers(registry, FastSpec, "doubles")
        self.router = Router(registry, {"fast": FastSpec}, self._cost, SLOT_BYTES, 1000)
        self.board = HealthBoard(
            self.router.hops(),
            limit=2,
            rules=BreakerRules(retry_after=5.0, longest_retry=30.0),
            changed=self._changed,
            clock=self.clock,
        )
        self.stats = StatsRecorder("rank 0")
        tiers = {"fast": FastSpec}
        self.standing = Standing(
            self.router.hops(), self.board, self.router, tiers, self.stats, self.clock
        )

    def _cost(self, hop: Hop) -> HopCost:
        return self.board.cost(hop)

    def _changed(self) -> None:
        self.router.invalidate()
        self.standing.note()

    def open(self) -> None:
        for hop in self.board.hops:
            self.board.open(hop)

    def move(self, label: str, seconds: float, copied: int = 4 * MIB) -> None:
        [hop] = [hop for hop in self.board.hops if hop.label == label]
        call = self.board.began(hop)
        self.clock.now += seconds
        self.board.ended(call, Verdict.WORKED, copied)

    def news(self) -> list[TierCondition]:
        return [one for one in self.standing.conditions(every=False) if one.tier == "fast"]


def test_a_flapping_tier_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tiered_kv.engine.standing")
    tiers = Tiers()
    tiers.open()

    def lines() -> list[str]:
        said = [record.getMessage() for record in caplog.records]
        return [line for line in said if "tier fast" in line]

    assert lines() == ["tier fast is healthy"]
    for _ in range(20):
        tiers.clock.now += QUIET_SECONDS / 50
        tiers.board.tier_unusable("fast", "gone: no such directory")
        tiers.open()
    tiers.board.tier_unusable("fast", "gone: no such directory")
    assert len(lines()) == 1
    tiers.clock.now += QUIET_SECONDS
    tiers.standing.say_rest()
    tiers.standing.say_rest()
    print(*lines(), sep="\n")
    [last] = lines()[1:]
    begin = "tier fast is down: gone: no such directory ("
    assert last.startswith(begin)
    assert last.endswith(" changes before that were not told)")
    assert int(last.removeprefix(begin).split()[0]) >= 40
    tiers.clock.now += QUIET_SECONDS
    tiers.open()
    assert lines()[2:3] != []
    assert caplog.records[-1].levelname == "WARNING", "whoever heard of the fault hears of its end"


def test_a_condition_is_told_when_it_changes_and_no_sooner() -> None:
    tiers = Tiers()
    assert tiers.news() == [TierCondition("fast", TierState.OPENING, "opening", None)]
    tiers.open()
    assert tiers.news() == [TierCondition("fast", TierState.HEALTHY, "", None)]
    assert tiers.news() == []
    tiers.move("fast->cpu", 4 * MIB / 1e9)
    [known] = tiers.news()
    assert known.load is not None
    assert known.load.bytes_per_second == pytest.approx(1e9)
    tiers.move("fast->cpu", 4 * MIB / 0.95e9)
    assert tiers.news() == []
    for _ in range(20):
        tiers.move("cpu->gpu", 4 * MIB / 0.5e9)
    [slower] = tiers.news()
    assert slower.load is not None
    assert slower.load.bytes_per_second == pytest.approx(0.5e9), "the slowest hop of the chain"
    tiers.board.gone("fast", "no such directory")
    [down] = tiers.news()
    assert (down.state, down.reason, down.load) == (
        TierState.DOWN,
        "unhealthy: no such directory",
        None,
    )
    assert {one.tier for one in tiers.standing.conditions(every=True)} == {"cpu", "fast"}
    assert tiers.stats.snapshot().gauge("tier_breaker", "fast", "open") == 1
