"""Nothing waits for ever: not for a store that never ends, nor for a load, nor for its turn."""

from __future__ import annotations

import pytest

from tests.faults.giving_up import MEASURED, all_end
from tests.unit.doubles import SlowSpec, fast
from tests.unit.engine_rig import Rig
from tests.unit.simulation_rig import Stage, store_prompt, tokens
from tiered_kv.testing.simulation import SimulatedModel, Simulation
from tiered_kv.values import BlockStatus, JobId

MODEL = SimulatedModel(blocks=80)
PROMPT = tokens(1, 32)


def test_f13_blocks_whose_store_never_ends_are_computed_by_the_next_request() -> None:
    stage = Stage()
    with Simulation(stage.assembly, MODEL) as sim:
        assert sim.wait_ready()
        stage.gather.shut()
        first = sim.add(PROMPT, 1)
        assert all_end(sim, [first])
        assert stage.gather.wait_held()
        sim.forget_device_cache()
        second = sim.add(PROMPT, 1)
        ended, held = all_end(sim, [second]), stage.gather.held
        stage.open()
        print(f"{held} copies of a store hung while the second request was answered")
        assert ended
        assert held
        assert second.output == first.output
        sim.run()
        assert sim.settle()
        assert sim.audit() == ()


@pytest.mark.parametrize("known", [False, True])
def test_f13_a_read_that_never_ends_is_given_up(known: bool) -> None:
    """After `load_deadline`, or sooner where computing the blocks is known to take less."""
    stage = Stage(load_deadline=600.0 if known else 0.5, recompute=MEASURED, retry_backoff=60.0)
    with Simulation(stage.assembly, MODEL) as sim:
        store_prompt(sim, PROMPT)
        if known:
            sim.manager.note_step(1000, 5.0)
        stage.disk.reading.shut()
        requests = [sim.add(PROMPT, 1, tiers={"ssd"}), sim.add(tokens(2, 8), 1)]
        ended, held = all_end(sim, requests), stage.disk.reading.held
        stage.open()
        print(f"{held} reads hung; {dict(sim.counts.failed_blocks)}")
        assert ended
        assert held
        assert sim.counts.failed_blocks == {"timed_out": 8}
        sim.run()
        assert sim.settle()
        sim.check_device_cache()
        assert sim.audit() == ()


@pytest.mark.parametrize("direct", [False, True])
def test_f13_a_load_is_over_at_its_own_deadline_and_writes_nothing_later(direct: bool) -> None:
    with Rig(direct=direct, through_host=not direct, group_blocks=2, threads=2) as rig:
        rig.fast.fill(range(12))
        rig.cache.blocks = dict.fromkeys(range(12), b"new owner")
        valve = rig.cache.direct if direct else rig.fast.reading
        valve.shut()
        rig.engine.submit(rig.load(1, {fast(*range(12)): range(12)}, deadline=0.3))
        late = rig.engine.wait([JobId(1)], 10.0)
        valve.open()
        assert not late
        [result] = rig.results(JobId(1))
        begun = sum(e.startswith(f"{valve.name} begins") for e in rig.journal.entries())
        print(f"{begun} of 6 reads had begun; the host pool leased {rig.pool.most_leased} slots")
        assert set(result.statuses) == {BlockStatus.TIMED_OUT}
        assert begun
        assert rig.engine.drain(10.0)
        assert rig.cache.blocks == dict.fromkeys(range(12), b"new owner")
        # The tier was given less time than it may take, and serves on.
        assert rig.engine.health()["fast"][0]
        assert rig.run(rig.load(2, {fast(0): [0]}, deadline=10.0))[0].ok


def test_f13_a_slow_tier_gets_no_new_deadline_for_every_group() -> None:
    with Rig(threads=1, group_blocks=1) as rig:
        rig.fast.fill(range(8))
        rig.fast.reading.shut()
        rig.engine.submit(rig.load(1, {fast(*range(8)): range(8)}, deadline=0.4))
        rig.journal.wait_for("fast.read begins key-000000")
        late = rig.engine.wait([JobId(1)], 10.0)
        rig.fast.reading.open()
        assert not late
        [result] = rig.results(JobId(1))
        assert rig.engine.drain(10.0)
        begun = sum(entry.startswith("fast.read begins") for entry in rig.journal.entries())
        print(f"{begun} of 8 reads had begun")
        assert set(result.statuses) == {BlockStatus.TIMED_OUT}
        assert begun == 1


def test_f13_a_load_does_not_wait_for_ever_for_the_last_copy_of_another() -> None:
    with Rig(threads=1) as rig:
        rig.slow.fill([0])
        rig.fill_slots([1])
        rig.cache.scattering.shut()
        rig.engine.submit(rig.load_from(1, [0], SlowSpec))
        rig.journal.wait_for("cpu->gpu begins key-000000")
        rig.engine.submit(rig.load(2, {rig.fill_slots([0]): [0]}, deadline=0.3))
        late = rig.engine.wait([JobId(2)], 10.0)
        first = rig.engine.wait([JobId(1)], 0.0)
        rig.cache.scattering.open()
        assert not late
        assert first == {JobId(1)}, "a last copy that has begun is awaited"
        one, two = rig.results(JobId(1), JobId(2))
        print("the copy that hung:", one.statuses, "the one behind it:", two.statuses)
        assert one.ok
        assert two.statuses == (BlockStatus.TIMED_OUT,)
