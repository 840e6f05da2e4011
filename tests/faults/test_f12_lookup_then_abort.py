"""F12: a lookup protects blocks for a while, and the end of its request ends that."""

from __future__ import annotations

import pytest

from tests.unit.simulation_rig import Stage, tokens
from tiered_kv.connector import Answer
from tiered_kv.placement import HostCatalog
from tiered_kv.testing.simulation import Phase, SimulatedModel, Simulation

PROMPT = tokens(1, 32)


def catalog_of(sim: Simulation) -> HostCatalog:
    catalog = sim.manager._books.catalog
    assert catalog is not None
    return catalog


@pytest.mark.faults
def test_f12_ten_thousand_lookups_of_requests_that_are_aborted_pin_nothing() -> None:
    with Simulation(Stage(stores=()).assembly, SimulatedModel(blocks=40)) as sim:
        sim.add(PROMPT)
        sim.run()
        assert sim.settle()
        catalog, hits = catalog_of(sim), 0
        for number in range(10_000):
            hits += sim.lookup(PROMPT).count(Answer.HIT)
            assert catalog.pinned == 0
            if number % 1000 == 0:
                assert catalog.counts.leased == 0
        print("hits:", hits, catalog.counts)
        assert hits == 80_000
        assert catalog.counts.leased == 0
        assert sim.audit() == ()
        sim.step()
        assert sim.manager_stats.tier("host").pinned_blocks == 0


@pytest.mark.faults
def test_f12_requests_that_find_everything_and_never_get_blocks_pin_nothing() -> None:
    stage = Stage(stores=())
    model = SimulatedModel(blocks=14)
    other = tokens(2, 40)
    with Simulation(stage.assembly, model) as sim:
        for prompt in (PROMPT, other):
            sim.add(prompt)
            sim.run()
            assert sim.settle()
        sim.forget_device_cache()
        stage.scatter.shut()
        holder = sim.add(other, 4)
        sim.step()
        assert holder.phase is Phase.LOADING, "it has 10 blocks of 13, until the copy ends"
        catalog = catalog_of(sim)
        pinned, found = catalog.pinned, 0
        for _ in range(1000):
            request = sim.add(PROMPT, 4)
            plan = sim._scheduler.schedule()
            assert request.phase is Phase.WAITING
            found += sim.manager.source(request.name, request.key(0, 0)) == "host"
            sim.abort(request)
            sim._turn(plan)
            assert catalog.pinned == pinned
        print("requests that found their blocks and got none:", found)
        assert found == 1000
        stage.scatter.open()
        sim.run()
        assert sim.settle()
        print(sim.counts)
        assert sim.free_blocks == model.blocks - 1
        assert sim.audit() == ()
        assert sim.lookup(PROMPT) == [Answer.HIT] * 8, "the hit rate has not decayed"


@pytest.mark.faults
def test_f12_loads_of_one_block_side_by_side_count_its_pins_up_and_down() -> None:
    stage = Stage(stores=())
    with Simulation(stage.assembly, SimulatedModel(blocks=120), most_running=16) as sim:
        sim.add(PROMPT)
        sim.run()
        assert sim.settle()
        catalog, keys = catalog_of(sim), list(sim.blocks(PROMPT))
        seen: set[int] = set()
        for number in range(300):
            names = [f"r{number}-{i}" for i in range(3)]
            for name in names:
                sim.manager.on_new_request(name, None)
                sim.manager.lookup(name, keys, 0)
                sim.manager.prepare_load(name, keys)
            seen.add(catalog.pinned)
            for name in reversed(names):
                sim.manager.on_request_finished(name)
                sim.manager.complete_load(name, keys)
                assert 0 <= catalog.pinned <= len(keys)
            assert catalog.pinned == 0
        print("slots pinned:", seen)
        assert seen == {len(keys)}
        assert sim.audit() == ()
