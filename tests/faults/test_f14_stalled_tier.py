"""A tier that stalls, fails or vanishes costs its own blocks only: the engine's steps go on, other
tiers serve, and the tier comes back when it works again, found by background reads alone."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.unit.simulation_rig import Stage, store_prompt, tokens
from tiered_kv.config import SizeOrPercent, TierSettings
from tiered_kv.testing.faults import Effect, Fault, Method
from tiered_kv.testing.simulation import SimulatedModel, Simulation
from tiered_kv_lmdb.settings import LmdbSettings
from tiered_kv_nvme.settings import NvmeSettings

MODEL = SimulatedModel(blocks=80, ranks=2, chunk=2)
PROMPTS = [tokens(seed, 32) for seed in range(12)]
MIB = 2**20
PATIENCE = 20.0
NO_FLOOR = SizeOrPercent(percent=0.0)


def eventually(what: Callable[[], bool], sim: Simulation | None = None) -> bool:
    """Wait for what nobody tells, while the engine takes steps; whether it came about."""
    pause, until = threading.Event(), time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() >= until:
            return False
        if sim is not None:
            sim.step()
        pause.wait(0.02)
    return True


def healthy(sim: Simulation, tier: str) -> bool:
    """Whether blocks can be loaded from a tier, on every rank."""
    return all(worker.engine.health()[tier][0] for worker in sim.workers)


def serve(sim: Simulation, prompt: Sequence[int], tier: str) -> int:
    """One request that only this tier may answer; how many blocks came from it."""
    sim.forget_device_cache()
    before = sim.counts.loaded_blocks[tier]
    sim.add(prompt, tiers={tier})
    sim.run()
    return sim.counts.loaded_blocks[tier] - before


def probes(sim: Simulation, tier: str) -> dict[str, int]:
    """Background reads of the first rank."""
    return dict(sim.workers[0].stats.snapshot().tier(tier).probes)


def test_f14_a_tier_that_hangs_costs_two_loads_and_comes_back() -> None:
    """The engine's thread steps on while reads hang: they are let go only behind its last step."""
    stage = Stage(stores=("stalls", "serves"), host_slots=0, load_deadline=1.0, retry_backoff=0.5)
    stalls = stage.memory.disk("stalls")
    with Simulation(stage.assembly, MODEL) as sim:
        for prompt in PROMPTS:
            store_prompt(sim, prompt, "stalls")
            assert sim.wait_found(prompt, "serves")
        assert serve(sim, PROMPTS[0], "stalls") > 0
        stalls.reading.shut()
        came = [serve(sim, prompt, "stalls") for prompt in PROMPTS[1:]]
        others = [serve(sim, prompt, "serves") for prompt in PROMPTS[1:]]
        held, steps = stalls.reading.held, sim.counts.steps
        failed = sim.counts.failed_blocks
        print(f"{steps} steps; blocks of the hung tier: {sum(came)}, of the other one: {others}")
        print(f"{held} reads hang on 2 ranks; failed blocks: {dict(failed)}")
        print(f"conditions: {sim.workers[0].engine.health()['stalls']}; {probes(sim, 'stalls')}")
        assert sum(came) == 0
        assert all(others), "other tiers serve"
        assert held > 0
        assert sim.counts.finished == sim.counts.requests
        assert not healthy(sim, "stalls")
        # Each rank found out by two loads, of four blocks in one call each, or by one probe.
        assert 0 < failed["timed_out"] <= 2 * 2 * 4
        cut = sim.manager_stats.tier("stalls").cut
        print(f"not asked for: {dict(cut)} of each rank, refused at once: {failed['tier_error']}")
        assert failed["tier_error"] + 2 * cut.get("tier_down", 0) >= 8 * 4
        stalls.reading.open()
        assert eventually(lambda: healthy(sim, "stalls"), sim), probes(sim, "stalls")
        assert eventually(lambda: serve(sim, PROMPTS[5], "stalls") > 0)
        print(f"back: {probes(sim, 'stalls')}")
        assert sim.settle()
        assert sim.audit() == ()


def test_f14_what_fails_is_left_alone_and_tried_by_background_reads() -> None:
    stage = Stage(stores=("stalls", "serves"), host_slots=0, retry_backoff=0.2)
    with Simulation(stage.assembly, MODEL) as sim:
        for prompt in PROMPTS:
            store_prompt(sim, prompt, "stalls")
        disk = stage.memory.disk("stalls")
        before = sum(
            w.stats.snapshot().hop("memory", "cpu", "stalls").operations for w in sim.workers
        )
        disk.faults.inject(Fault(method=Method.READ, effect=Effect.TIER_ERROR))
        assert not any(serve(sim, prompt, "stalls") for prompt in PROMPTS)
        assert not healthy(sim, "stalls")
        assert eventually(lambda: probes(sim, "stalls").get("failed", 0) >= 3, sim)
        loads = sum(
            w.stats.snapshot().hop("memory", "cpu", "stalls").operations for w in sim.workers
        )
        print(
            f"{len(PROMPTS)} requests; loads that met the error: {loads - before}; "
            f"background reads: {probes(sim, 'stalls')}"
        )
        assert 0 < loads - before <= 2 * 3
        disk.faults.inject()
        assert eventually(lambda: healthy(sim, "stalls"), sim)
        assert eventually(lambda: serve(sim, PROMPTS[3], "stalls") > 0)


def directory_tier(kind: str, path: Path) -> TierSettings:
    if kind == "nvme":
        return NvmeSettings(name="real", path=path, capacity=64 * MIB, min_free=NO_FLOOR)
    return LmdbSettings(name="real", path=path, capacity=64 * MIB, min_free=NO_FLOOR)


@pytest.mark.parametrize("kind", ["nvme", "lmdb"])
def test_f14_a_directory_that_is_deleted_is_noticed_and_made_anew(
    kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "tier"
    stage = Stage(stores=(), host_slots=0, tiers=(directory_tier(kind, path),), retry_backoff=0.5)
    with Simulation(stage.assembly, MODEL) as sim:
        for prompt in PROMPTS[:6]:
            store_prompt(sim, prompt, "real")
        assert serve(sim, PROMPTS[0], "real") > 0
        seen: list[str] = []

        def noticed() -> bool:
            states = [worker.engine.health()["real"] for worker in sim.workers]
            seen.extend(why for good, why in states if not good)
            return not any(good for good, _ in states)

        began = time.monotonic()
        shutil.rmtree(path)
        sim.add(PROMPTS[1], answer=2)
        assert eventually(noticed, sim), "the tier counts as healthy"
        print(f"noticed after {time.monotonic() - began:.1f} s: {seen[0]}")
        assert "was removed or replaced" in seen[0]
        assert eventually(lambda: healthy(sim, "real"), sim), seen[-1]
        print(f"made anew after {time.monotonic() - began:.1f} s")
        assert path.is_dir()
        sim.run()
        # What was stored before is gone, and nothing of it is promised any more.
        assert eventually(lambda: sim.manager.states() == {"real": "ready"}, sim)
        counted = 0
        for prompt in PROMPTS[6:]:
            store_prompt(sim, prompt, "real")
            counted += serve(sim, prompt, "real")
        print(f"blocks loaded from the new one: {counted}; {sim.counts.failed_blocks}")
        assert counted >= 6 * 4
        assert sim.counts.finished == sim.counts.requests
        assert sim.settle()
        assert sim.audit() == ()


@pytest.mark.parametrize("kind", ["nvme", "lmdb"])
def test_f14_a_disk_that_is_there_later_serves(kind: str, tmp_path: Path) -> None:
    """Its path leads nowhere, until it leads to a directory."""
    path = tmp_path / "tier"
    path.symlink_to(path)
    stage = Stage(stores=(), host_slots=0, tiers=(directory_tier(kind, path),), retry_backoff=0.2)
    with Simulation(stage.assembly, MODEL) as sim:
        _, why = sim.workers[0].engine.health()["real"]
        print(why)
        assert why.startswith("could not be opened: ")
        sim.add(PROMPTS[0], answer=2)
        sim.run()
        path.unlink()
        assert eventually(lambda: healthy(sim, "real"), sim)
        store_prompt(sim, PROMPTS[1], "real")
        assert serve(sim, PROMPTS[1], "real") > 0
