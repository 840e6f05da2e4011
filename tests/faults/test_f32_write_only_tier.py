"""A tier that is stored to and never answers: the rules agree, and where it happens all the same
the operator is told."""

from __future__ import annotations

import logging
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.simulation_rig import Stage, tokens
from tests.unit.test_manager import Bench, bench
from tiered_kv.connector import Answer
from tiered_kv.connector.write_only import LEAST_BLOCKS, SILENT_SECONDS
from tiered_kv.testing.simulation import SimulatedGroup, SimulatedModel, Simulation
from tiered_kv.values import BlockKey

GROUPS = st.builds(
    SimulatedGroup,
    layers=st.integers(1, 2),
    tokens=st.sampled_from([2, 4, 8]),
    window=st.none() | st.integers(9, 40),
)
MODELS = st.builds(
    SimulatedModel,
    groups=st.lists(GROUPS, min_size=1, max_size=3).map(tuple),
    ranks=st.integers(1, 2),
    chunk=st.integers(1, 3),
    blocks=st.just(400),
    page_bytes=st.just(256),
)
SEEN: list[int] = []


def wait_for_hits(sim: Simulation, prompt: tuple[int, ...], count: int) -> None:
    """Until the manager has heard of so many blocks of the prompt."""
    pause = threading.Event()
    found = 0
    for _ in range(3000):
        found = sim.lookup(prompt, "ssd").count(Answer.HIT)
        if found == count:
            return
        pause.wait(0.01)  # the mirror tells nobody what it hears
    raise AssertionError(f"{found} of {count} stored blocks are found")


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(model=MODELS, length=st.integers(1, 90), host=st.booleans(), budget=st.sampled_from([8, 64]))
def check_what_is_stored_is_found(
    model: SimulatedModel, length: int, host: bool, budget: int
) -> None:
    stage = Stage(host_slots=200 if host else 0)
    prompt = tokens(length, length)
    with Simulation(stage.assembly, model, seed=length, token_budget=budget) as sim:
        assert sim.wait_ready()
        sim.add(prompt)
        sim.run()
        assert sim.settle()
        # Every block that was stored is found ...
        stored = len(stage.disk.keys())
        assert stage.disk.keys() <= set(sim.blocks(prompt))
        wait_for_hits(sim, prompt, stored)
        # ... and the longest prefix that can be loaded is.
        end = length // model.tier_alignment * model.tier_alignment
        if end:
            assert stored
        sim.forget_device_cache()
        again = sim.add((*prompt, *tokens(7, 3)), 1, tiers=("ssd",))
        sim.run()
        assert sim.settle()
        assert again.loaded_tokens == end
        SEEN.append(stored)


def test_f32_whatever_the_store_rule_stores_the_lookup_rule_finds() -> None:
    SEEN.clear()
    check_what_is_stored_is_found()
    print(f"{len(SEEN)} configurations of KV groups, {sum(SEEN)} blocks stored and found")
    assert sum(SEEN) > 100


def names(start: int, count: int) -> list[BlockKey]:
    return [BlockKey(b"%08d" % n) for n in range(start, start + count)]


def live(b: Bench, rounds: int, seconds: float) -> None:
    """Requests whose blocks are looked for, not found, and stored."""
    for number in range(rounds):
        b.clock.now += seconds / rounds
        request = f"r{number}"
        blocks = names(number * 100, 100)
        b.manager.lookup(request, blocks, 0)
        assert b.manager.answer(request, blocks[0]) is Answer.MISS
        plan = b.manager.prepare_store(request, blocks)
        b.manager.complete_store(plan.keys)
        b.manager.on_request_finished(request)


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "only written to" in r.getMessage()]


def state(b: Bench) -> bool:
    return b.manager.stats.snapshot().tier("ssd").write_only


def test_f32_a_tier_that_is_only_written_to_raises_one_alarm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    b = bench(host=False)
    live(b, rounds=100, seconds=SILENT_SECONDS * 0.9)
    assert not alarms(caplog), "it may be that nothing repeats within an hour"
    assert not state(b)
    live(b, rounds=100, seconds=SILENT_SECONDS)
    said = alarms(caplog)
    print(*said)
    assert len(said) == 1
    alarm = said[0]
    assert state(b)
    for word in ("tier ssd", "capacity", "tiered-kv stat", "tiered-kv ls", "placement.write"):
        assert word in alarm
    b.disk.known = dict.fromkeys(names(0, 1), True)
    b.manager.lookup("hit", names(0, 1), 0)
    assert not state(b), "it is found now"
    b.disk.known = {}
    live(b, rounds=100, seconds=SILENT_SECONDS * 2)
    assert len(alarms(caplog)) == 2


@pytest.mark.parametrize("quiet", ["few stores", "few lookups", "a hit"])
def test_f32_no_alarm_where_nothing_can_be_said(
    quiet: str, caplog: pytest.LogCaptureFixture
) -> None:
    b = bench(host=False)
    rounds = LEAST_BLOCKS // 100
    if quiet == "few stores":
        live(b, rounds - 1, SILENT_SECONDS * 2)
    elif quiet == "few lookups":
        for number in range(rounds * 2):
            b.clock.now += SILENT_SECONDS
            b.manager.prepare_store("r", names(number * 100, 100))
    else:
        live(b, rounds, SILENT_SECONDS * 0.9)
        b.disk.known = dict.fromkeys(names(0, 1), True)
        b.manager.lookup("hit", names(0, 1), 0)
        b.disk.known = {}
        live(b, rounds * 2, SILENT_SECONDS * 0.9)
    assert not alarms(caplog)
    assert not state(b)
