"""The simulated engine's time and priorities."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from tests.unit.simulation_rig import Stage, tokens
from tiered_kv.connector import Manager
from tiered_kv.testing.simulation import (
    Pace,
    Phase,
    RealTime,
    SimulatedModel,
    Simulation,
    StepCost,
    VirtualTime,
    Workload,
)

COST = StepCost(prefill_token=0.01, decode_step=0.5)
PROMPT = tokens(1, 32)


# Time


def test_virtual_time_passes_by_what_steps_cost_and_not_by_itself() -> None:
    with Simulation(
        Stage(stores=()).assembly,
        SimulatedModel(blocks=40),
        token_budget=20,
        pace=VirtualTime(COST),
    ) as sim:
        assert sim.pace() == 0.0
        request = sim.add(PROMPT, 3)
        sim.step()
        assert sim.pace() == pytest.approx(0.2)  # 20 tokens of the prompt
        assert request.first_token is None
        sim.step()
        assert request.first_token == pytest.approx(0.32)
        sim.step()
        sim.step()
        assert request.phase is Phase.FINISHED
        assert request.ended == pytest.approx(1.32)  # and two tokens more
        assert request.arrived == 0.0


def test_a_step_that_prefills_and_decodes_costs_both_and_hours_pass_in_seconds() -> None:
    with Simulation(
        Stage(stores=()).assembly,
        SimulatedModel(blocks=60),
        pace=VirtualTime(StepCost(prefill_token=1.0, decode_step=60.0)),
    ) as sim:
        sim.add(tokens(1, 8), 40)
        sim.step()
        before = sim.pace()
        sim.add(tokens(2, 8), 2)
        sim.step()
        assert sim.pace() - before == pytest.approx(68.0)
        began = time.monotonic()
        sim.run()
        print(f"{sim.pace():.0f} s, in {time.monotonic() - began:.2f} s")
        assert sim.pace() > 38 * 60


def test_what_the_engine_waits_for_a_transfer_passes_in_virtual_time_too() -> None:
    stage = Stage()
    with Simulation(stage.assembly, SimulatedModel(blocks=40), pace=VirtualTime(COST)) as sim:
        assert sim.wait_ready()
        sim.add(PROMPT)
        sim.run()
        assert sim.settle()
        assert sim.wait_found(PROMPT, "ssd")
        sim.forget_device_cache()
        stage.disk.reading.shut()
        request = sim.add(PROMPT, 1, tiers={"ssd"})
        before, began = sim.pace(), time.monotonic()
        for _ in range(5):
            sim.step()
        waited = time.monotonic() - began
        assert request.phase is Phase.LOADING
        assert 0 < sim.pace() - before <= waited
        stage.disk.reading.open()
        sim.run()


def test_the_managers_waits_go_by_the_simulations_time() -> None:
    # In the machine's time this lookup would be given up long before the store is done.
    stage = Stage(lookup_wait=100.0)
    with Simulation(
        stage.assembly,
        SimulatedModel(blocks=60),
        pace=VirtualTime(StepCost(prefill_token=0.0, decode_step=60.0)),
    ) as sim:
        assert sim.wait_ready()
        stage.gather.shut()
        sim.add(PROMPT, 1)
        sim.step()
        sim.step()
        assert stage.gather.wait_held()
        sim.forget_device_cache()
        other = sim.add(tokens(2, 4), 10, tiers=())
        waiting = sim.add(PROMPT, 1)
        phases: list[Phase] = []
        for _ in range(4):
            sim.step()
            phases.append(waiting.phase)
        print(f"{sim.pace():.0f} s", phases)
        assert phases[:2] == [Phase.WAITING, Phase.WAITING]
        assert phases[3] is not Phase.WAITING, "after 100 s it is computed"
        assert not other.phase.over
        stage.open()
        sim.run()
        assert sim.settle()


def test_in_real_time_a_step_takes_at_least_what_it_costs() -> None:
    pace = RealTime(StepCost(prefill_token=0.0, decode_step=0.01))
    with Simulation(Stage(stores=()).assembly, SimulatedModel(blocks=40), pace=pace) as sim:
        request = sim.add(PROMPT, 6)
        began = time.monotonic()
        sim.run()
        assert time.monotonic() - began >= 0.05
        assert request.first_token is not None
        assert request.ended is not None
        assert request.ended - request.first_token >= 0.05


@pytest.mark.parametrize("pace", [VirtualTime(COST), RealTime()], ids=["virtual", "real"])
def test_the_manager_hears_how_long_prompts_take(
    pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[int, float]] = []

    def note_step(manager: Manager, count: int, seconds: float) -> None:
        heard.append((count, seconds))

    monkeypatch.setattr(Manager, "note_step", note_step, raising=False)
    with Simulation(
        Stage(stores=()).assembly, SimulatedModel(blocks=40), token_budget=20, pace=pace
    ) as sim:
        sim.add(PROMPT, 4)
        sim.run()
    print(heard)
    assert [count for count, _ in heard] == [20, 12], "steps that only decode are not told"
    assert all(seconds > 0 for _, seconds in heard)
    if isinstance(pace, VirtualTime):
        assert [seconds for _, seconds in heard] == pytest.approx([0.2, 0.12])


# Priorities


def test_the_most_urgent_request_begins_first_and_the_others_by_arrival() -> None:
    with Simulation(
        Stage(stores=()).assembly, SimulatedModel(blocks=80), most_running=1, by_priority=True
    ) as sim:
        urgency = [2, 0, 1, 0, 2]
        requests = [
            sim.add(tokens(number, 8), 1, priority=priority)
            for number, priority in enumerate(urgency)
        ]
        sim.run()
        began = sorted(requests, key=lambda request: request.ended or 0.0)
        assert [request.arrival for request in began] == [1, 3, 2, 0, 4]


def test_the_least_urgent_request_is_preempted_and_of_these_the_latest() -> None:
    with Simulation(
        Stage(stores=()).assembly, SimulatedModel(blocks=31), token_budget=200, by_priority=True
    ) as sim:
        priorities = [1, 2, 2, 0]
        requests = [
            sim.add(tokens(number, 24), 16, priority=priority)
            for number, priority in enumerate(priorities)
        ]
        preempted: list[int] = []
        running = {request.arrival for request in requests}
        sim.step()
        assert all(request.phase is Phase.RUNNING for request in requests)
        while sim.has_work:
            sim.step()
            now = {r.arrival for r in requests if r.phase is not Phase.WAITING}
            preempted += sorted(running - now)
            running = now
        print("preempted:", preempted, "counted:", sim.counts.preemptions)
        assert preempted[0] == 2
        assert {0, 3}.isdisjoint(preempted)
        assert all(request.phase is Phase.FINISHED for request in requests)
        assert sim.settle()
        assert sim.audit() == ()


def test_a_victim_that_had_its_share_of_the_step_already_loses_it() -> None:
    # The least urgent one arrived, and is scheduled, before the one that takes its blocks.
    with Simulation(Stage(stores=()).assembly, SimulatedModel(blocks=14), by_priority=True) as sim:
        first = sim.add(tokens(1, 22), 8, priority=5)
        sim.step()
        urgent = sim.add(tokens(2, 24), 8, priority=0)
        sim.step()
        computed = sim.counts.computed_tokens
        while not sim.counts.preemptions:
            assert {first.phase, urgent.phase} == {Phase.RUNNING}
            computed = sim.counts.computed_tokens
            sim.step()
        assert sim.counts.preemptions == 1
        assert sim.counts.computed_tokens - computed == 1, "the urgent one's token alone"
        assert (first.phase, urgent.phase) == (Phase.WAITING, Phase.RUNNING)
        sim.run()
        assert sim.settle()
        assert sim.audit() == ()


def test_a_life_by_priorities_among_aborts_and_preemptions_leaves_nothing() -> None:
    model = SimulatedModel(blocks=30, ranks=2, chunk=2)
    with Simulation(
        Stage().assembly, model, seed=8, by_priority=True, pace=VirtualTime(COST)
    ) as sim:
        assert sim.wait_ready()
        sim.live(Workload(priorities=3, arrivals=0.8, abort=0.05), 800)
        sim.run()
        assert sim.settle()
        print(sim.counts)
        assert sim.counts.aborts
        assert sim.counts.preemptions >= 20
        assert sim.counts.preemptions_in_loads <= sim.counts.preemptions
        assert 0 < sim.counts.completed_loads <= sim.counts.loads
        assert 0 < sim.counts.completed_stores <= sim.counts.stores
        assert sim.counts.finished + sim.counts.aborts.total() == sim.counts.requests
        sim.check_device_cache()
        assert sim.audit() == ()


def test_times_of_a_request_come_in_order() -> None:
    with Simulation(
        Stage(stores=()).assembly, SimulatedModel(blocks=60), pace=VirtualTime(COST)
    ) as sim:
        requests = [sim.add(tokens(number, 12), 3) for number in range(4)]
        sim.run()
        for request in requests:
            times = (request.arrived, request.first_token or -1.0, request.ended or -1.0)
            assert all(one <= other for one, other in pairwise(times))
