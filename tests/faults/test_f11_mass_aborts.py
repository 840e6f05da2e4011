"""F11: requests that are aborted while blocks are loaded and stored for them leave nothing in use,
and what ends after them is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.simulation_rig import Stage, store_prompt, tokens
from tiered_kv.config import SizeOrPercent
from tiered_kv.testing.simulation import Phase, SimulatedModel, Simulation
from tiered_kv_lmdb.settings import LmdbSettings
from tiered_kv_nvme.settings import NvmeSettings

MODEL = SimulatedModel(blocks=40, ranks=2, chunk=2)
NO_FLOOR = SizeOrPercent(percent=0.0)
PROMPTS = [tokens(number, 24) for number in range(6)]


def stage_of(kind: str, path: Path) -> Stage:
    if kind == "memory":
        return Stage(host_slots=24)
    settings = NvmeSettings if kind == "nvme" else LmdbSettings
    tier = settings(name="ssd", path=path, capacity=64 << 20, min_free=NO_FLOOR)
    return Stage(host_slots=24, stores=(), tiers=(tier,))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("kind", "aborts"), [("memory", 1000), ("nvme", 300), ("lmdb", 300), ("host alone", 300)]
)
def test_f11_mass_aborts_during_loads_and_stores_leave_nothing_in_use(
    kind: str, aborts: int, tmp_path: Path
) -> None:
    stage = Stage(stores=()) if kind == "host alone" else stage_of(kind, tmp_path)
    with Simulation(stage.assembly, MODEL, seed=1, late_outputs=0.2, by_priority=True) as sim:
        for prompt in PROMPTS:
            store_prompt(sim, prompt, "host" if kind == "host alone" else "ssd")
        draw = sim.random
        while sim.counts.aborts.total() < aborts:
            batch = [
                sim.add(
                    (*draw.choice(PROMPTS), *tokens(sim.counts.requests, 8)),
                    4,
                    priority=draw.randrange(3),
                )
                for _ in range(draw.randint(1, 10))
            ]
            for _ in range(draw.randrange(4)):
                sim.step()
            for request in batch:
                sim.abort(request)
            if draw.random() < 0.3:
                sim.forget_device_cache()
        sim.run()
        assert sim.settle()
        print(sim.counts)
        assert sim.free_blocks == MODEL.blocks - 1
        assert sim.audit() == ()
        assert sim.manager.tracked_requests == 0
        wanted = max(5, aborts // 50)
        assert min(sim.counts.aborts[phase] for phase in ("waiting", "loading", "running")) > wanted
        assert sim.counts.stores > wanted
        survivor = sim.add(PROMPTS[0], 4)
        sim.run()
        assert survivor.phase is Phase.FINISHED


@pytest.mark.faults
def test_f11_a_load_that_ends_after_its_request_gives_everything_back() -> None:
    stage = Stage(host_slots=24)
    with Simulation(stage.assembly, MODEL) as sim:
        for prompt in PROMPTS:
            store_prompt(sim, prompt)
        late = 0
        for number in range(50):
            stage.scatter.shut()
            request = sim.add(PROMPTS[number % len(PROMPTS)], 4)
            sim.step()
            if request.phase is Phase.LOADING:
                assert stage.scatter.wait_held()
                late += 1
            sim.abort(request)
            sim.step()
            assert sim.free_blocks < MODEL.blocks - 1, "a copy may still write into its blocks"
            stage.scatter.open()
            sim.run()
            assert sim.settle()
            assert sim.free_blocks == MODEL.blocks - 1
            assert sim.audit() == ()
            sim.forget_device_cache()
        print("loads that ended after their request:", late)
        assert late == 50
