"""The connector's rules, as an engine sees them: when stores begin, what is reported, and once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.simulation_rig import (
    CROSS_LAYERS,
    TWO_GROUPS,
    Stage,
    load_prompt,
    store_prompt,
    tokens,
)
from tiered_kv.config import SizeOrPercent
from tiered_kv.connector import ConnectorMetadata
from tiered_kv.specs import CpuSpec, GpuBlock, GpuSpec, SlotRef, StoreJob, StoreTargets
from tiered_kv.stats import StatsSnapshot
from tiered_kv.testing.simulation import (
    EngineBroken,
    Phase,
    SimulatedModel,
    Simulation,
    Workload,
)
from tiered_kv.testing.simulation.offloading import Offloading
from tiered_kv.values import BlockKey, JobId
from tiered_kv_lmdb.settings import LmdbSettings
from tiered_kv_nvme.settings import NvmeSettings

ONE = SimulatedModel(blocks=40)
TWO_RANKS = SimulatedModel(blocks=40, ranks=2, chunk=2)
PROMPT = tokens(1, 32)
NO_FLOOR = SizeOrPercent(percent=0.0)


# Deferral


def test_a_store_begins_after_its_step() -> None:
    stage = Stage(stores=())
    with Simulation(stage.assembly, ONE) as sim:
        judged = 0
        for number in range(30):
            before = stage.gather.passed
            sim.add(tokens(number, 8), 2)
            began = time.monotonic()
            sim.step()
            passed = stage.gather.passed
            if time.monotonic() - began < 0.015:  # before the timer can have helped
                judged += 1
                assert passed == before
            sim.step()
            assert stage.gather.wait_passed(before + 1)
            sim.run()
            assert sim.settle()
        print("steps judged:", judged)
        assert judged
        assert sim.counts.stores == 30


def test_a_store_that_no_step_follows_is_begun_by_a_timer() -> None:
    stage = Stage()
    with Simulation(stage.assembly, ONE) as sim:
        assert sim.wait_ready()
        before = stage.gather.passed
        sim.add(PROMPT, 1)
        sim.step()
        assert sim.counts.stores == 1
        assert stage.gather.wait_passed(before + 1)
        assert stage.disk.publishing.wait_passed()
        assert stage.disk.keys()


# Sent and received


@pytest.mark.parametrize("model", [ONE, TWO_GROUPS], ids=["one rank", "two ranks"])
def test_a_request_is_sent_when_its_last_store_is_done_though_it_finished_earlier(
    model: SimulatedModel,
) -> None:
    stage = Stage(stores=())
    with Simulation(stage.assembly, model, hold_finished=True) as sim:
        stage.gather.shut()
        request = sim.add(PROMPT, 2)
        while not request.phase.over:
            sim.step()
        for _ in range(3):
            sim.step()
        assert stage.gather.wait_held()
        assert sim.counts.sent == 0
        assert sim.free_blocks < model.blocks - 1, "its blocks are not free yet"
        stage.gather.open()
        sim.run()
        assert sim.counts.sent == 1
        assert sim.free_blocks == model.blocks - 1
        nothing = sim.add(tokens(2, 2), 1)
        sim.run()
        assert nothing.phase is Phase.FINISHED
        assert sim.counts.sent == 2, "a request without stores is sent too"
        assert sim.settle()
        assert sim.audit() == ()


def test_a_life_in_which_finished_requests_wait_until_they_are_sent() -> None:
    with Simulation(Stage().assembly, TWO_GROUPS, seed=7, hold_finished=True) as sim:
        assert sim.wait_ready()
        sim.live(Workload(abort=0.15), 250)
        sim.run()
        assert sim.settle()
        print(sim.counts)
        assert sim.counts.sent == sim.counts.requests > 50
        assert sim.counts.loads > 10
        assert sim.audit() == ()


def test_a_request_is_received_once_by_all_ranks_and_loads_one_job_at_a_time() -> None:
    stage = Stage()
    with Simulation(stage.assembly, TWO_RANKS, late_outputs=0.5, seed=1) as sim:
        store_prompt(sim, PROMPT)
        before = sim.counts.loads
        stage.disk.reading.shut()
        request = sim.add(PROMPT, 4, tiers={"ssd"})
        for _ in range(10):
            sim.step()
            assert request.phase is Phase.LOADING
        assert sim.counts.loads == before + 1
        stage.disk.reading.open()
        sim.run()
        print(sim.counts)
        assert sim.counts.late_outputs
        assert sim.counts.loads == before + 1
        assert sim.counts.loaded_blocks == {"ssd": 4}


# Jobs


def test_f55_random_order_duplicates_and_resets_break_no_engine() -> None:
    totals: dict[str, int] = {"late_outputs": 0, "repeated_messages": 0, "resets": 0, "loads": 0}
    for seed in range(4):
        stage = Stage()
        with Simulation(
            stage.assembly, TWO_RANKS, seed=seed, late_outputs=0.3, repeated_messages=0.3
        ) as sim:
            assert sim.wait_ready()
            sim.live(Workload(abort=0.1, reset=0.03), 150)
            sim.run()
            assert sim.settle()
            assert sim.audit() == ()
            assert sim.counts.stores
            for name in totals:
                totals[name] += getattr(sim.counts, name)
    print(totals)
    assert totals["resets"] >= 8
    assert min(totals.values()) >= 8
    assert totals["repeated_messages"] >= 200


def test_a_job_that_is_unknown_or_reported_twice_breaks_the_engine() -> None:
    # What the simulation would not survive, vLLM does not.
    with Simulation(Stage(stores=()).assembly, TWO_RANKS) as sim:
        offloading: Offloading = sim._offloading
        request = sim.add(PROMPT, 4)
        sim.step()
        [job] = offloading.jobs
        offloading.completed(0, job)
        for rank, number in ((0, job), (1, JobId(99))):
            with pytest.raises(EngineBroken, match="unknown or reported"):
                offloading.completed(rank, number)
        with pytest.raises(EngineBroken, match="is not being loaded"):
            sim._scheduler.received(frozenset({request.name}), frozenset())


def test_jobs_and_finished_requests_of_one_rank_are_named_once() -> None:
    with Simulation(Stage(stores=()).assembly, ONE) as sim:
        worker = sim.workers[0]
        named: list[JobId] = []
        sent: list[str] = []
        for number in range(50):
            slots = CpuSpec((SlotRef(number % 8, number + 1),))
            source = GpuSpec((GpuBlock(0, (1,)),))
            keys = (BlockKey(b"key %d" % number),)
            job = StoreJob(JobId(number), f"r{number}", keys, source, StoreTargets(slots))
            message = ConnectorMetadata(stores=(job, job))
            worker.handle_preemptions(message)
            worker.start_kv_transfers(message)
            worker.prepare_store_kv(message)
            sent += sorted(worker.get_finished({f"r{number}"})[0])
            named += [result.id for result in worker.take_completed()]
        assert worker.drain(30.0)
        sent += sorted(worker.get_finished(set())[0])
        named += [result.id for result in worker.take_completed()]
        assert sorted(named) == list(range(50))
        assert sorted(sent) == sorted(f"r{number}" for number in range(50))
        assert worker.get_finished(set()) == (set(), set())
        assert worker.take_completed() == ()


def test_a_flushed_job_whose_message_comes_twice_runs_once() -> None:
    with Simulation(Stage(stores=()).assembly, ONE) as sim:
        worker = sim.workers[0]
        source, slot = GpuSpec((GpuBlock(0, (1,)),)), CpuSpec((SlotRef(0, 1),))
        job = StoreJob(JobId(1), "r", (BlockKey(b"key"),), source, StoreTargets(slot))
        message = ConnectorMetadata(stores=(job,), flush=frozenset({job.id}))
        named: list[JobId] = []
        sent: set[str] = set()
        for finished in ({"r"}, set[str](), set[str]()):
            for _ in range(2):
                worker.handle_preemptions(message if finished else ConnectorMetadata())
                worker.prepare_store_kv(message if finished else ConnectorMetadata())
            assert worker.drain(30.0)
            sent |= worker.get_finished(finished)[0]
            named += [result.id for result in worker.take_completed()]
        assert named == [job.id]
        assert sent == {"r"}


# Statistics


def test_statistics_are_handed_out_once_and_nothing_is_lost() -> None:
    with Simulation(Stage().assembly, TWO_RANKS, seed=9) as sim:
        assert sim.wait_ready()
        sim.live(Workload(), 120)
        sim.run()
        assert sim.settle()
        for rank, worker in enumerate(sim.workers):
            assert worker.get_kv_connector_stats() is None
            total, handed_out = worker.stats.snapshot(), sim.rank_stats(rank)
            assert handed_out.counters == total.counters
            assert handed_out.jobs() == total.jobs()
            assert handed_out.jobs()["store"].outcomes["ok"] == sim.counts.stores
        loaded = sum_of(sim.rank_stats(0), sim.rank_stats(1)).jobs()["load"]
        print(sim.counts, loaded)
        assert sum(loaded.outcomes.values()) == 2 * sim.counts.loads
        assert sim.manager_stats.tier("ssd").hits >= sim.counts.loaded_blocks["ssd"]


def sum_of(one: StatsSnapshot, other: StatsSnapshot) -> StatsSnapshot:
    return one.merge(other)


# Real stores


@pytest.fixture(params=["nvme", "lmdb"])
def real(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    if request.param == "nvme":
        yield Stage(
            host_slots=24,
            stores=(),
            tiers=(NvmeSettings(name="real", path=tmp_path, capacity=64 << 20, min_free=NO_FLOOR),),
        )
    else:
        yield Stage(
            host_slots=24,
            stores=(),
            tiers=(LmdbSettings(name="real", path=tmp_path, capacity=64 << 20, min_free=NO_FLOOR),),
        )


@pytest.mark.parametrize("model", [TWO_GROUPS, CROSS_LAYERS], ids=["two groups", "cross-layer"])
def test_real_tiers_live_through_an_engines_life(real: Stage, model: SimulatedModel) -> None:
    loaded = 0
    for life in range(2):
        with Simulation(real.assembly, model, seed=life) as sim:
            assert sim.wait_ready()
            sim.live(Workload(), 120)
            sim.run()
            assert sim.settle()
            print(sim.counts)
            loaded += sim.counts.loaded_blocks["real"]
            assert sim.counts.failed_blocks["corrupt"] == 0
            sim.check_device_cache()
            assert sim.audit() == ()
    assert loaded >= 20


def test_a_real_tiers_blocks_are_the_computed_ones(real: Stage) -> None:
    with Simulation(real.assembly, replace(TWO_RANKS, page_bytes=1024)) as sim:
        store_prompt(sim, PROMPT, "real")
        load_prompt(sim, PROMPT, {"real"})
        assert sim.counts.loaded_blocks == {"real": 4}
        assert sim.counts.checked_blocks > 32
