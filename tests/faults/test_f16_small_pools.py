"""However small the pools are and however many want them, loads get their memory and their turn,
and nobody asks over and over for what is not there."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.far_tiers import KINDS, far_tier, store_all
from tests.unit.doubles import FastSpec, SlowSpec, content
from tests.unit.engine_rig import Rig
from tests.unit.simulation_rig import blocks_read, promoted, tokens
from tiered_kv.memory import HostBlockPool
from tiered_kv.specs import SlotRef, StoreJob
from tiered_kv.testing.simulation import Phase, SimulatedModel, Simulation
from tiered_kv.values import BlockStatus


def test_f16_a_large_load_ends_while_16_threads_store_through_2_staging_slots() -> None:
    """Stores hold all the staging they can get, and do not let go of it, and the load ends;
    nobody asks for staging over and over meanwhile."""
    writers, each = 16, 5
    with Rig(staging_slots=2, tier_slots=0, group_blocks=4, threads=4) as rig:
        rig.fast.fill(range(100))
        rig.slow.writing.shut()
        jobs = [
            [
                rig.store(1 + writer * each + i, [100 + writer * each + i], SlowSpec, slots=False)
                for i in range(each)
            ]
            for writer in range(writers)
        ]
        start = threading.Barrier(writers + 1)

        def submit(mine: list[StoreJob]) -> None:
            start.wait()
            for job in mine:
                rig.engine.submit(job)

        threads = [threading.Thread(target=submit, args=(mine,)) for mine in jobs]
        for thread in threads:
            thread.start()
        start.wait()
        rig.journal.wait_for("slow.write begins")
        load = rig.load_from(1000, range(100), FastSpec)
        rig.engine.submit(load)
        assert not rig.engine.wait([load.id], 60.0)
        for thread in threads:
            thread.join(60.0)
        [loaded] = [result for result in rig.engine.finished() if result.id == load.id]
        held = rig.pool.leased
        assert loaded.ok
        assert {i: rig.cache.blocks[i] for i in range(100)} == {i: content(i) for i in range(100)}
        assert held == 1, "a store hangs in its slot to the end"
        rig.slow.writing.open()
        assert rig.engine.drain(60.0)
        print(
            f"loaded {len(loaded.keys)} blocks through {rig.pool.most_leased} staging slots while "
            f"{writers} threads submitted {writers * each} stores; {len(rig.slow.rows)} stored; "
            f"asked for staging {rig.pool.asked} times"
        )
        assert rig.pool.most_leased == 2
        assert len(rig.slow.rows) == writers * each
        # Each block takes a lease, and each lease asked for, or given back, serves both lines.
        blocks = 100 + writers * each
        assert blocks <= rig.pool.asked <= 5 * blocks


def test_f16_promotions_that_hang_leave_a_turn_for_loads() -> None:
    with Rig(threads=2) as rig:
        rig.fast.fill(range(4))
        rig.fast.reading.shut()
        for job in range(3):
            rig.engine.promote(rig.promotion(job, [job]))
        rig.journal.wait_for("fast.read begins key-000000")
        load = rig.load_from(0, [3], FastSpec)
        rig.engine.submit(load)
        rig.journal.wait_for("fast.read begins key-000003")
        begun = [e for e in rig.journal.entries() if e.startswith("fast.read begins")]
        assert len(begun) == 2, "one promotion and the load"
        rig.fast.reading.open()
        assert rig.results(load.id)[0].ok
        assert rig.promoted(3) == dict.fromkeys(range(3), (BlockStatus.OK,))
        print(f"begun while a promotion hung: {begun}")


@pytest.mark.parametrize("kind", KINDS)
def test_f16_stores_that_hang_leave_host_slots_for_promotions(kind: str, tmp_path: Path) -> None:
    """Copies out of the engine's cache hang in all host slots that stores can get. What lies in the
    slow tier is brought and loaded all the same."""
    slots, hits = 8, 2
    model = SimulatedModel(blocks=200)
    prompt = tokens(1, hits * 4)
    with Simulation(far_tier(tmp_path, kind, slots, write=("ssd",)).assembly, model) as before:
        store_all(before, [prompt], 0.06)
    tier = far_tier(tmp_path, kind, slots, lookup_wait_far=10.0)
    with Simulation(tier.assembly, model) as sim:
        store_all(sim, [], 0.06)
        assert sim.wait_found(prompt, "ssd")
        tier.gather.shut()
        busy = [sim.add(tokens(seed, slots * 4), 4) for seed in range(2, 6)]
        while any(request.phase is not Phase.FINISHED for request in busy):
            sim.step()
        hanging = sim.counts.stored_blocks
        request = sim.add(prompt)
        while request.phase is not Phase.FINISHED:
            sim.step()
        print(
            f"{hanging} of {slots} slots hang in stores; {promoted(sim):g} blocks were promoted, "
            f"loaded {dict(sim.counts.loaded_blocks)}"
        )
        assert sim.counts.loaded_blocks == {"host": hits}
        assert hanging == slots - hits
        tier.gather.open()
        sim.run()
        assert sim.settle()
        assert sim.audit() == ()


@pytest.mark.parametrize("kind", KINDS)
def test_f16_16_requests_end_with_2_host_slots_and_2_staging_slots(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them loads 100 blocks, the others one block each, and all are stored."""
    asked: Counter[str] = Counter()
    lease = HostBlockPool.lease

    def counted(pool: HostBlockPool, count: int, *, leave: int = 0) -> tuple[SlotRef, ...] | None:
        asked["leases"] += 1
        return lease(pool, count, leave=leave)

    monkeypatch.setattr(HostBlockPool, "lease", counted)
    model = SimulatedModel(blocks=400)
    large, small = tokens(1, 400), [tokens(seed, 4) for seed in range(2, 17)]
    with Simulation(far_tier(tmp_path, kind, 200, write=("ssd",)).assembly, model) as before:
        store_all(before, [large, *small], 0.2)
    tier = far_tier(tmp_path, kind, 2, staging_slots=2)
    with Simulation(tier.assembly, model) as sim:
        store_all(sim, [], 0.2)
        assert sim.wait_found(small[-1], "ssd")
        asked.clear()
        steps = sim.counts.steps
        requests = [sim.add(prompt, 12) for prompt in (*small[:7], large, *small[7:])]
        sim.run()
        assert sim.settle()
        steps = sim.counts.steps - steps
        assert {request.phase for request in requests} == {Phase.FINISHED}
        assert [worker.memory.staging_slots for worker in sim.workers] == [2]
        print(
            f"{len(requests)} requests in {steps} steps: loaded {dict(sim.counts.loaded_blocks)}, "
            f"{promoted(sim):g} promoted, {blocks_read(sim, kind)} blocks read, "
            f"{sim.counts.stored_blocks} stored; asked for staging {asked['leases']} times"
        )
        assert sim.counts.loaded_blocks["ssd"] >= 100
        assert promoted(sim) >= 1
        assert sim.counts.stored_blocks >= 1
        assert blocks_read(sim, kind) == [sim.counts.loaded_blocks["ssd"] + promoted(sim)]
        # Each group takes a lease; each that is asked for or given back serves both lines.
        assert asked["leases"] <= 5 * (sim.counts.loaded_blocks["ssd"] + 1)
        assert sim.audit() == ()
