"""A real vLLM serves on while a tier hangs, its disk is full, or its directory is gone."""

from __future__ import annotations

import re

from tests.engine.actions import EngineRun, Metrics, Output
from tests.engine.lives import AFTERWARDS, CROWD, LONG_AND_SHORT, NO_ROOM, ROOM, TROUBLED
from tests.engine.tiers import cached, same_answers

STATE = "vllm:tiered_kv_tier_state"


def plain(last: EngineRun, first: int, count: int) -> tuple[Output, ...]:
    """Answers of an engine without tiers."""
    return last.answers["plain: trouble"][first : first + count]


def stored(before: Metrics, after: Metrics) -> float:
    name, labels = "vllm:tiered_kv_hop_bytes", {"src": "cpu", "tier": "ssd"}
    return after.total(name, **labels) - before.total(name, **labels)


def test_a_full_disk_stores_nothing_and_serves_on(troubled: EngineRun, last: EngineRun) -> None:
    assert "the disk is full: [Errno 28]" in troubled.log
    cold, full = troubled.answers["cold"], troubled.answers["full: ssd"]
    print("cached tokens on the full disk:", cached(full))
    assert same_answers(cold, plain(last, 0, len(TROUBLED)))
    assert same_answers(troubled.answers["no room"], plain(last, 2, len(NO_ROOM)))
    assert same_answers(full, cold)
    # Room came back by itself.
    print("stored when there was room again:", stored(troubled.at["full"], troubled.at["room"]))
    assert stored(troubled.at["full"], troubled.at["room"]) > 1_000_000
    assert cached(troubled.answers["room: ssd"]) == LONG_AND_SHORT
    for name in ("room", "room: ssd"):
        assert same_answers(troubled.answers[name], plain(last, 4, len(ROOM)))


def test_a_deleted_directory_is_noticed_and_made_anew(troubled: EngineRun, last: EngineRun) -> None:
    [told] = re.findall(r"tier ssd is down: gone: .*", troubled.log)
    print(told)
    assert same_answers(troubled.answers["removed: ssd"], troubled.answers["cold"])
    assert troubled.at["anew"].total(STATE, tier="ssd", state="healthy") == 1
    assert cached(troubled.answers["afterwards: ssd"]) == LONG_AND_SHORT
    for name in ("afterwards", "afterwards: ssd"):
        assert same_answers(troubled.answers[name], plain(last, 6, len(AFTERWARDS)))


def test_a_tier_that_hangs_for_ever_stops_nobody(troubled: EngineRun, last: EngineRun) -> None:
    hangs = troubled.log.count("faulty store: hang")
    late = troubled.at["hung"].total("vllm:tiered_kv_hop_failures", tier="bad")
    hung = troubled.answers["hung"]
    print(f"{hangs} reads hang, {late:.0f} blocks did not come; cached tokens: {cached(hung)}")
    assert hangs >= 1
    assert same_answers(hung, plain(last, 8, len(CROWD)))
    assert same_answers(troubled.answers["hung: later"], hung[:3])
    # The tier beside it serves on.
    assert cached(troubled.answers["hung: ssd"]) == LONG_AND_SHORT
    assert same_answers(troubled.answers["hung: ssd"], troubled.answers["afterwards"])
