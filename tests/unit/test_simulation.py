"""The simulated engine itself: that it does what an engine does, and sees what it must not."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from tests.unit.simulation_rig import (
    CROSS_LAYERS,
    FULL,
    TWO_GROUPS,
    WINDOW,
    Stage,
    load_prompt,
    store_prompt,
    tokens,
)
from tiered_kv.connector import ConnectorMetadata, WorkerConnector
from tiered_kv.errors import UnsupportedError
from tiered_kv.specs import CpuSpec, GpuBlock, GpuSpec, LoadJob, Part, Parts, SlotRef
from tiered_kv.testing.simulation import (
    ContentMismatch,
    Phase,
    SimulatedGroup,
    SimulatedModel,
    Simulation,
    Workload,
    crossed,
)
from tiered_kv.values import BlockKey, JobId

MODELS = {
    "one group": SimulatedModel(blocks=40),
    "one group, two ranks": SimulatedModel(blocks=40, ranks=2, chunk=2),
    "two groups": TWO_GROUPS,
    "two groups of other lengths": SimulatedModel(
        groups=(FULL, SimulatedGroup(layers=3, tokens=8, window=20)), ranks=2, blocks=40
    ),
    "all layers in one tensor": CROSS_LAYERS,
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_stored_and_loaded_in_every_shape(name: str) -> None:
    model = MODELS[name]
    prompt = tokens(1, 32)
    with Simulation(Stage().assembly, model) as sim:
        store_prompt(sim, prompt)
        request = load_prompt(sim, prompt)
        print(sim.counts)
        assert request.phase is Phase.FINISHED
        assert len(request.output) == 4
        assert sim.counts.loads == 1
        assert sim.counts.loaded_blocks["ssd"] >= 32 // 4 // model.chunk - 1
        assert sim.counts.failed_loads == 0
        assert sim.check_device_cache()
        assert sim.audit() == ()


@pytest.mark.parametrize("name", MODELS)
def test_what_is_stored_is_what_was_computed(name: str) -> None:
    stage, model = Stage(), MODELS[name]
    prompt = tokens(2, 32)
    with Simulation(stage.assembly, model) as sim:
        store_prompt(sim, prompt)
        compared = 0
        for rank in range(model.ranks):
            for key, data in sim.blocks(prompt, rank).items():
                assert stage.disk.content(key, rank) in (data, None)
                compared += stage.disk.content(key, rank) == data
        print("compared:", compared)
        assert compared >= 32 // 4 // model.chunk * model.ranks


def test_a_life_at_random_leaves_nothing_behind() -> None:
    with Simulation(Stage().assembly, TWO_GROUPS, seed=3) as sim:
        assert sim.wait_ready()
        sim.live(Workload(), 250)
        sim.run()
        assert sim.settle()
        print(sim.counts)
        assert sim.counts.preemptions
        assert sim.counts.flushes
        assert sim.counts.loaded_blocks["host"]
        assert sim.counts.loaded_blocks["ssd"]
        assert sim.counts.finished + sim.counts.aborts.total() == sim.counts.requests
        assert sim.audit() == ()


def test_the_same_seed_asks_the_same() -> None:
    def asked(seed: int) -> tuple[int, int, int]:
        stage = Stage(stores=())
        with Simulation(stage.assembly, TWO_GROUPS, seed=seed, lockstep=True) as sim:
            sim.live(Workload(), 60)
            sim.run()
            counts = sim.counts
            return counts.requests, counts.computed_tokens, counts.loads

    first = asked(5)
    print(first)
    assert first == asked(5)
    assert first != asked(6)


def test_another_life_finds_what_one_before_it_stored() -> None:
    stage = Stage()
    prompt = tokens(4, 24)
    with Simulation(stage.assembly, TWO_GROUPS) as sim:
        store_prompt(sim, prompt)
    with Simulation(stage.assembly, TWO_GROUPS) as sim:
        assert sim.wait_found(prompt)
        load_prompt(sim, prompt, None)
        assert sim.counts.loaded_tokens >= 16


# The oracle


def test_a_block_that_was_overwritten_is_found_with_both_owners_named() -> None:
    with Simulation(Stage(stores=()).assembly, SimulatedModel(blocks=40)) as sim:
        mine = sim.add(tokens(1, 8), 8, name="mine")
        other = sim.add(tokens(2, 8), 8, name="other")
        sim.step()
        caches = sim.caches(0)
        caches.copy(other.tables[0][1], mine.tables[0][1])
        with pytest.raises(ContentMismatch, match=r"must hold the KV of mine, token 4.*") as error:
            sim.step()
        print(error.value)
        assert f"engine block {mine.tables[0][1]} (rank 0, group 0, layer 0)" in str(error.value)
        assert "holds that of other, token 4 (rank 0, group 0, layer 0)" in str(error.value)


def test_a_block_that_was_never_written_is_found() -> None:
    with Simulation(Stage(stores=()).assembly, SimulatedModel(blocks=40)) as sim:
        request = sim.add(tokens(1, 8), 8)
        sim.step()
        sim.caches(0).poison([request.tables[0][0]])
        with pytest.raises(ContentMismatch, match="not written since it was given out"):
            sim.step()


def test_a_single_flipped_bit_is_found_in_the_devices_cache_too() -> None:
    with Simulation(Stage(stores=()).assembly, SimulatedModel(blocks=40)) as sim:
        sim.add(tokens(1, 8))
        sim.run()
        assert sim.check_device_cache() == 2
        sim.caches(0).tensors[1][1:, 77] ^= 1
        with pytest.raises(ContentMismatch, match="bytes that nobody computed"):
            sim.check_device_cache()


def test_ranks_layers_and_weights_have_other_bytes() -> None:
    seen: set[bytes] = set()
    with Simulation(Stage(stores=()).assembly, TWO_GROUPS) as sim:
        for _ in range(2):
            for rank in range(2):
                seen.update(sim.blocks(tokens(1, 8), rank).values())
            sim.reset(new_weights=True)
    assert len(seen) == 2 * 2 * 2


# The border


@dataclass(frozen=True)
class Message:
    content: object


@dataclass
class Changeable:
    content: int


def test_only_frozen_values_cross_the_border() -> None:
    source = Parts((Part(CpuSpec((SlotRef(1, 2),)), (0,)),))
    block = GpuSpec((GpuBlock(0, (1,)),))
    job = LoadJob(JobId(1), "r", (BlockKey(b"k"),), source, block)
    message = ConnectorMetadata(loads=(job,), flush=frozenset({JobId(3)}))
    there = crossed(message)
    assert there == message
    assert there is not message
    assert there.loads[0] is not job
    lists: list[object] = [[1], {1: 2}, Changeable(1), threading.Lock(), bytearray(b"x"), print]
    for content in lists:
        with pytest.raises(TypeError, match=r"Message\.content"):
            crossed(Message(content))


# What is refused


def test_nonsense_is_refused() -> None:
    bad: list[tuple[Mapping[str, object], str]] = [
        ({"ranks": 0}, "a rank"),
        ({"groups": ()}, "needs a group"),
        ({"page_bytes": 100}, "cut into 4 tokens"),
        ({"blocks": 1}, "beside block 0"),
        ({"groups": (FULL, WINDOW), "cross_layers": True}, "one KV group"),
        ({"groups": (SimulatedGroup(layers=0),)}, "has no layers"),
        ({"groups": (SimulatedGroup(window=0),)}, "no window"),
    ]
    for changed, why in bad:
        with pytest.raises(ValueError, match=why):
            SimulatedModel(**changed)  # type: ignore[arg-type]
    with Simulation(Stage(stores=()).assembly, SimulatedModel(blocks=5)) as sim:
        with pytest.raises(ValueError, match="needs 5 engine blocks of 4"):
            sim.add(tokens(1, 16), 1)
        sim.add(tokens(1, 4), 1, name="r")
        with pytest.raises(ValueError, match="'r' is there already"):
            sim.add(tokens(1, 4), 1, name="r")


def test_one_tensor_for_all_layers_is_refused_where_there_are_two_groups() -> None:
    with Simulation(Stage(stores=()).assembly, TWO_GROUPS) as sim:
        worker = WorkerConnector(sim.workers[0].plan)
        with pytest.raises(UnsupportedError, match="2 KV groups, but registered caches for 1"):
            worker.register_cross_layers_kv_cache(sim.caches(0).tensors[0])


def test_a_pool_that_hardly_fits_one_request_ends_all_of_them() -> None:
    # Loads hold engine blocks before anything can be computed with them.
    model = SimulatedModel(blocks=14)
    prompts = [tokens(number, 40) for number in range(6)]
    with Simulation(Stage(host_slots=80).assembly, model, most_running=6) as sim:
        for prompt in prompts:
            store_prompt(sim, prompt)
        for prompt in prompts:
            sim.add(prompt, 8)
        sim.run()
        assert sim.settle()
        print(sim.counts)
        assert sim.counts.loads >= 6
        assert sim.counts.finished == 12
        assert sim.audit() == ()
