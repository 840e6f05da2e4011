"""What the manager answers of prefixes that are not worth loading, and how long it lets wait."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.unit.test_manager import FINGERPRINT, Clock, DiskSpec, MirrorDouble, PinsSpec
from tiered_kv.config import Recompute
from tiered_kv.connector import (
    Answer,
    FailedBlock,
    Handshake,
    Manager,
    ManagerLimits,
    TierView,
    WorkerReport,
)
from tiered_kv.stats import LoadRate, StatsSnapshot, TierCondition, TierState
from tiered_kv.values import BlockKey, BlockStatus, CacheGeometry, GroupGeometry

BLOCK = 4096
TOKENS = 16
HIT, MISS = Answer.HIT, Answer.MISS

ONE = (GroupGeometry(0, BLOCK, 1, TOKENS),)
TWO = (GroupGeometry(0, BLOCK, 1, TOKENS), GroupGeometry(1, BLOCK, 1, TOKENS))

MEASURED = Recompute()


@dataclass
class Bench:
    """A manager over mirrors "ssd" and "pins", at a prefill rate of 1,600 tokens/s: a block takes
    10 ms to compute."""

    recompute: Recompute = MEASURED
    groups: tuple[GroupGeometry, ...] = ONE
    windows: tuple[int | None, ...] = ()
    load_deadline: float = 2.0
    prefill: float | None = 1600.0

    def __post_init__(self) -> None:
        self.ssd, self.pins, self.clock = MirrorDouble(), MirrorDouble(), Clock()
        self.manager = Manager(
            fingerprint=FINGERPRINT,
            host_tier="host",
            host_write=True,
            tiers=[
                TierView("ssd", DiskSpec, write=False, mirror=lambda _, __: self.ssd),
                TierView("pins", PinsSpec, write=False, mirror=lambda _, __: self.pins),
            ],
            limits=ManagerLimits(
                lookup_wait=0.05, retry_backoff=5.0, load_deadline=self.load_deadline
            ),
            world_size=1,
            recompute=self.recompute,
            clock=self.clock,
        )
        geometry = CacheGeometry(self.groups, 0, 1)
        self.manager.attach([Handshake(FINGERPRINT, geometry, 32)], self.windows)
        if self.prefill is not None:
            self.manager.note_step(1000, 1000 / self.prefill)
        self.snapshot = StatsSnapshot(0.0)

    def rate(self, tier: str, block_seconds: float, latency: float = 0.0) -> None:
        """A rank reports how long a block takes."""
        self.tell(tier, TierState.HEALTHY, LoadRate(BLOCK / block_seconds, latency))

    def tell(self, tier: str, state: TierState, load: LoadRate | None = None) -> None:
        condition = TierCondition(tier, state, "", load)
        self.manager.take_report(WorkerReport(conditions=((0, condition),)))

    def ask(self, request: str, keys: Sequence[BlockKey], computed: int = 0) -> str:
        """The answers, a letter each."""
        tokens = len(keys) // len(self.groups) * TOKENS
        self.manager.lookup(request, keys, computed, tokens)
        return "".join(self.manager.answer(request, key).value[0] for key in keys)

    def begin(self, request: str, keys: Sequence[BlockKey]) -> float:
        """Begin a load; its deadline."""
        deadline = self.manager.prepare_load(request, keys).deadline
        assert deadline is not None
        return deadline

    def end(self, request: str, keys: Sequence[BlockKey], **failed: BlockStatus) -> None:
        """End it."""
        lost = tuple(
            FailedBlock(BlockKey(name.encode()), status, request) for name, status in failed.items()
        )
        self.manager.take_report(WorkerReport(failed_loads=lost))
        self.manager.complete_load(request, keys)

    def counted(self, name: str, *labels: str) -> float:
        delta = self.manager.take_stats()
        if delta is not None:
            self.snapshot = self.snapshot.merge(delta)
        return self.snapshot.counter(name, *labels)


def keys(names: str) -> list[BlockKey]:
    return [BlockKey(name.encode()) for name in names]


ABCD = keys("abcd")


def hold(mirror: MirrorDouble, names: str) -> None:
    mirror.known |= dict.fromkeys(keys(names), True)


# The cut


def test_a_slow_tier_is_not_loaded_from_and_that_is_counted_and_explained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    b = Bench()
    hold(b.ssd, "ab")
    hold(b.pins, "abcd")
    b.rate("ssd", 0.001)
    b.rate("pins", 0.030)
    with caplog.at_level(logging.DEBUG, "tiered_kv.connector.gating"):
        assert b.ask("q", ABCD) == "hhmm"
    assert b.counted("tier_cut_blocks_total", "pins", "slower_than_recompute") == 2
    assert b.counted("tier_hits_total", "pins") == 2
    assert b.counted("gate_prefixes_total", "part") == 1
    assert b.snapshot.tier("pins").cut == {"slower_than_recompute": 2}
    assert b.snapshot.gauge("prefill_tokens_per_second", "measured") == 1600
    [line] = caplog.messages
    assert "request q: of 64 tokens found behind 0, 32 are loaded (slower_than_recompute)" in line
    assert "1600 tokens/s" in line
    # The memo answers from now on; it is decided once.
    assert b.ask("q", ABCD) == "hhmm"
    assert b.counted("gate_prefixes_total", "part") == 1


def test_a_tier_is_loaded_from_again_when_it_is_fast_again() -> None:
    b = Bench()
    hold(b.ssd, "abcd")
    b.rate("ssd", 0.030)
    assert b.ask("q", ABCD) == "mmmm"
    b.rate("ssd", 0.001)
    assert b.ask("r", ABCD) == "hhhh"
    assert b.counted("gate_prefixes_total", "none") == 1
    assert b.counted("gate_prefixes_total", "whole") == 1


@pytest.mark.parametrize(
    ("recompute", "prefill", "expected"),
    [
        (Recompute(gate="off"), 1600.0, "hhhh"),
        (Recompute(gate="fixed", tokens_per_second=1600.0), None, "mmmm"),
        (Recompute(gate="fixed", tokens_per_second=100.0), 1600.0, "hhhh"),
        (MEASURED, None, "hhhh"),
    ],
)
def test_the_gate_goes_by_what_the_operator_says(
    recompute: Recompute, prefill: float | None, expected: str
) -> None:
    b = Bench(recompute, prefill=prefill)
    hold(b.ssd, "abcd")
    b.rate("ssd", 0.020)
    assert b.ask("q", ABCD) == expected


def test_a_load_that_would_be_given_up_is_cut_also_while_the_engine_is_not_measured() -> None:
    b = Bench(prefill=None, load_deadline=0.07)
    hold(b.ssd, "abcd")
    b.rate("ssd", 0.030)
    assert b.ask("q", ABCD) == "hhmm"
    assert b.counted("tier_cut_blocks_total", "ssd", "deadline") == 2


def test_loads_that_run_slow_down_those_that_come_behind() -> None:
    b = Bench()
    hold(b.ssd, "abcdefgh")
    b.rate("ssd", 0.008)
    assert b.ask("q", ABCD) == "hhhh"
    b.begin("q", ABCD)
    assert b.ask("r", keys("efgh")) == "mmmm"
    b.end("q", ABCD)
    assert b.ask("s", keys("efgh")) == "hhhh"


def test_blocks_of_all_groups_behind_the_cut_miss() -> None:
    b = Bench(groups=TWO, windows=(None, TOKENS))
    hold(b.ssd, "abABCD")
    hold(b.pins, "cd")
    b.rate("pins", 1.0)
    assert b.ask("q", keys("abcdABCD")) == "hhmmhhmm"


def test_without_the_length_of_the_request_nothing_is_cut() -> None:
    b = Bench()
    hold(b.ssd, "abcd")
    b.rate("ssd", 0.020)
    b.manager.lookup("q", ABCD, 0)
    assert [b.manager.answer("q", key) for key in ABCD] == [HIT] * 4


def test_what_was_cut_stays_cut_until_the_request_is_loaded() -> None:
    b = Bench()
    hold(b.ssd, "ab")
    hold(b.pins, "cd")
    b.rate("pins", 0.030)
    assert b.ask("q", ABCD) == "hhmm"
    b.rate("pins", 0.001)
    b.clock.now += 11.0  # the answers are too old
    assert b.ask("q", ABCD) == "hhmm"
    b.begin("q", ABCD[:2])
    b.end("q", ABCD[:2])
    assert b.ask("q", ABCD) == "hhhh"


def test_more_that_the_engine_holds_itself_is_decided_about_anew() -> None:
    b = Bench()
    hold(b.ssd, "abcd")
    b.rate("ssd", 0.001, latency=0.025)
    assert b.ask("q", ABCD) == "hhhh"
    assert b.ask("q", ABCD, computed=32) == "hhmm"


# Deadlines


@pytest.mark.parametrize(
    ("prefill", "load_deadline", "blocks", "expected"),
    [
        (1600.0, 2.0, 20, 0.3),
        (160.0, 60.0, 20, 1.2),
        (1600.0, 0.2, 20, 0.2),
        (1600.0, 2.0, 1, 0.1),
        (None, 2.0, 20, 2.0),
        (1.0, 2.0, 20, 2.0),
    ],
)
def test_a_load_that_is_given_up_makes_its_request_late_by_half_at_most(
    prefill: float | None, load_deadline: float, blocks: int, expected: float
) -> None:
    b = Bench(prefill=prefill, load_deadline=load_deadline)
    names = [BlockKey(b"%d" % number) for number in range(blocks)]
    b.ssd.known = dict.fromkeys(names, True)
    b.ask("q", names)
    assert b.begin("q", names) == pytest.approx(expected)


def test_a_deadline_is_for_what_is_loaded() -> None:
    b = Bench()
    names = [BlockKey(b"%d" % number) for number in range(40)]
    b.ssd.known = dict.fromkeys(names, True)
    b.ask("q", names, computed=160)
    assert b.begin("q", names[10:30]) == pytest.approx(0.3)


def test_with_the_gate_off_a_load_has_the_time_that_is_configured() -> None:
    b = Bench(Recompute(gate="off"))
    hold(b.ssd, "abcd")
    b.ask("q", ABCD)
    assert b.begin("q", ABCD) == 2.0


# Waiting for another request's load


def test_a_request_waits_no_longer_for_anothers_load_than_its_own_could_take() -> None:
    b = Bench()
    hold(b.ssd, "abcdefgh")
    b.ask("first", keys("abcdefgh"))
    b.begin("first", keys("abcdefgh"))
    # The engine defers it while `ab` are being loaded.
    assert b.ask("second", keys("ab")) == "hh"
    b.clock.now += 0.09
    assert b.ask("second", keys("ab")) == "hh"
    b.clock.now += 0.02
    assert b.ask("second", keys("ab")) == "mm"
    assert b.counted("tier_cut_blocks_total", "ssd", "waited") == 2


def test_a_request_that_waits_for_room_keeps_its_hits() -> None:
    b = Bench()
    hold(b.ssd, "abcdefgh")
    assert b.ask("q", ABCD) == "hhhh"
    b.clock.now += 5.0
    assert b.ask("q", ABCD) == "hhhh"
    b.ask("another", keys("efgh"))
    b.begin("another", keys("efgh"))
    b.clock.now += 4.0
    assert b.ask("q", ABCD) == "hhhh"


def test_only_what_is_behind_the_awaited_block_is_given_up() -> None:
    b = Bench()
    hold(b.ssd, "abcdefgh")
    b.ask("first", keys("cd"))
    b.begin("first", keys("cd"))
    b.ask("q", ABCD)
    b.clock.now += 1.0
    assert b.ask("q", ABCD) == "hhmm"


# Tiers that do not work


def test_a_tier_that_is_down_answers_nothing() -> None:
    b = Bench()
    hold(b.ssd, "abcd")
    hold(b.pins, "ab")
    b.tell("ssd", TierState.DOWN)
    assert b.ask("q", ABCD) == "hhmm"
    assert b.manager.source("q", ABCD[0]) == "pins"
    assert b.counted("tier_cut_blocks_total", "ssd", "tier_down") == 4
    b.tell("ssd", TierState.HEALTHY)
    assert b.ask("r", ABCD) == "hhhh"


def test_a_further_load_comes_from_tiers_that_are_surely_open() -> None:
    b = Bench()
    hold(b.ssd, "ab")
    hold(b.pins, "cd")
    b.tell("pins", TierState.OPENING)
    assert b.ask("q", ABCD) == "hhhh"
    b.begin("q", ABCD)
    b.end("q", ABCD, c=BlockStatus.TIER_ERROR)
    assert b.ask("q", ABCD) == "hhmm"


def test_who_waited_for_a_late_load_does_not_wait_for_its_blocks_again() -> None:
    b = Bench()
    hold(b.ssd, "abcd")
    b.ask("q", ABCD)
    b.begin("q", ABCD)
    b.end("q", ABCD, d=BlockStatus.TIMED_OUT)  # `abc` came
    assert b.ask("r", ABCD) == "mmmm"
    assert b.counted("tier_cut_blocks_total", "ssd", "backoff") == 4
    b.clock.now += 5.1
    assert b.ask("s", ABCD) == "hhhh"


def test_blocks_beside_one_that_is_lost_are_loaded_all_the_same() -> None:
    b = Bench()
    hold(b.ssd, "abcd")
    b.ask("q", ABCD)
    b.begin("q", ABCD)
    b.end("q", ABCD, c=BlockStatus.CORRUPT)
    assert b.ask("q", ABCD) == "hhmh"
    b.begin("q", ABCD[:2])
    b.end("q", ABCD[:2])
    b.manager.on_request_finished("q")
    assert b.manager.audit() == ()
