"""F17: requests whose blocks are loaded hold engine blocks before they compute, in a pool that has
room for one of them. All end, and the engine steps as long as something is to come, and no longer.
"""

from __future__ import annotations

import pytest

from tests.unit.simulation_rig import FULL, WINDOW, Stage, store_prompt, tokens
from tiered_kv.testing.faults import Effect, Fault, Method
from tiered_kv.testing.simulation import Phase, SimulatedModel, Simulation

PROMPTS = [tokens(number, 40) for number in range(6)]
TIGHT = {
    "one group": SimulatedModel(blocks=14),
    "two groups, two ranks": SimulatedModel(groups=(FULL, WINDOW), blocks=27, ranks=2),
}
STEPS = 3000


def all_end(sim: Simulation, steps: int = STEPS) -> bool:
    """Step while something is to come; whether it came to an end."""
    for _ in range(steps):
        if not sim.has_work:
            return True
        sim.step()
    return False


def fill(sim: Simulation) -> None:
    """Have all prompts stored."""
    for prompt in PROMPTS:
        store_prompt(sim, prompt)


def steps_on(sim: Simulation) -> bool:
    """Whether an engine would go on stepping."""
    return sim.has_work


@pytest.mark.faults
@pytest.mark.parametrize("model", TIGHT.values(), ids=TIGHT)
@pytest.mark.parametrize("trouble", ["none", "reads hang", "reads fail"])
def test_f17_loads_into_a_pool_that_holds_no_two_requests_end(
    model: SimulatedModel, trouble: str
) -> None:
    stage = Stage(host_slots=96, retry_backoff=0.2)
    hangs = trouble == "reads hang"
    if hangs:  # only what hangs is to miss the short deadline, however slow the machine is
        with Simulation(stage.assembly, model) as sim:
            fill(sim)
        stage = Stage(host_slots=96, load_deadline=0.3, retry_backoff=0.2, memory=stage.memory)
    with Simulation(stage.assembly, model, most_running=6, seed=3) as sim:
        if hangs:
            assert sim.wait_ready()
            assert all(sim.wait_found(prompt, "ssd") for prompt in PROMPTS)
        else:
            fill(sim)
        before = sim.counts.finished
        if trouble != "none":
            effect = Effect.HANG if hangs else Effect.TIER_ERROR
            stage.disk.faults.inject(Fault(method=Method.READ, effect=effect))
        tiers = None if trouble == "none" else {"ssd"}
        requests = [sim.add(prompt, 8, tiers=tiers) for prompt in PROMPTS for _ in range(2)]
        assert sim.has_work
        ended = all_end(sim)
        print(sim.counts)
        assert ended, [f"{r.name} {r.phase.value}" for r in requests if not r.phase.over]
        assert all(request.phase is Phase.FINISHED for request in requests)
        assert sim.counts.finished == before + 12
        # A tier that fails, or hangs, is soon left alone.
        assert sim.counts.loads >= (6 if trouble == "none" else 2)
        assert (sim.counts.failed_loads > 0) is (trouble != "none")
        stage.disk.faults.inject()
        stage.disk.faults.let_go()
        assert sim.settle()
        assert sim.audit() == ()


@pytest.mark.faults
def test_f17_nobody_waits_for_a_block_that_another_one_never_finishes_storing() -> None:
    stage = Stage()
    with Simulation(stage.assembly, SimulatedModel(blocks=40)) as sim:
        assert sim.wait_ready()
        stage.gather.shut()
        sim.add(PROMPTS[0], 1)
        sim.step()
        sim.step()
        assert stage.gather.wait_held()
        sim.forget_device_cache()
        other = sim.add(PROMPTS[0], 2)
        for _ in range(200):
            sim.step()
            if other.phase.over:
                break
        assert stage.gather.held, "the store hangs all the time"
        assert other.phase is Phase.FINISHED
        print(sim.counts)
        stage.open()
        assert all_end(sim)
        assert sim.settle()
        assert sim.audit() == ()


@pytest.mark.faults
def test_f17_the_engine_steps_as_long_as_something_is_to_come_and_no_longer() -> None:
    stage = Stage(host_slots=48)
    with Simulation(stage.assembly, SimulatedModel(blocks=14)) as sim:
        assert sim.wait_ready()
        assert not steps_on(sim)
        stage.disk.writing.shut()
        stage.gather.shut()
        sim.add(PROMPTS[0], 1)
        sim.step()
        sim.step()
        assert stage.gather.wait_held()
        assert steps_on(sim), "the copy out of the engine's blocks is not reported yet"
        stage.gather.open()
        assert all_end(sim), "write-behind needs no step of the engine"
        steps = sim.counts.steps
        assert stage.disk.writing.wait_held(), "it goes on"
        stage.open()
        assert sim.wait_found(PROMPTS[0], "ssd"), "not even to become visible"
        assert sim.counts.steps == steps
        print(sim.counts)
        assert sim.settle()
        assert sim.audit() == ()
