"""A host slot that is given out anew while write-behind reads it brings no wrong row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.loading import KINDS, Kind
from tests.faults.writing import LENGTH, WriteBench
from tests.unit.simulation_rig import FULL, Stage, tokens
from tiered_kv.specs import SlotRef
from tiered_kv.testing.conformance.blocks import content, get, keys
from tiered_kv.testing.simulation import Phase, SimulatedModel, Simulation

BLOCKS = range(12)
REUSED = (1, 4, 5, 11)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_f52_a_slot_given_out_anew_is_not_published(kind: Kind, tmp_path: Path) -> None:
    with WriteBench({"ssd": kind}, tmp_path, slots=16) as bench:
        store = bench.stores["ssd"]
        store.medium.hold()
        assert bench.store(BLOCKS, "ssd").ok
        store.medium.wait_for("write begins")
        for number in REUSED:
            view = bench.pool.begin(SlotRef(number, 2))
            assert view is not None
            view[:] = b"\xee" * view.nbytes
        store.medium.go_on()
        assert bench.engine.drain(60.0)
        there = [n for n, seen in zip(BLOCKS, store.contains(keys(BLOCKS)), strict=True) if seen]
        wrong = [
            n
            for n, read in zip(there, get(store, there, length=LENGTH), strict=True)
            if read.data != content(n, length=LENGTH)
        ]
        print(
            f"{kind.name}: {len(REUSED)} slots were given out anew under the write; rows {there}, "
            f"wrong {wrong}; dropped {dict(bench.dropped('ssd'))}"
        )
        assert not wrong
        assert there == [n for n in BLOCKS if n not in REUSED]
        assert bench.dropped("ssd") == {"stale": len(REUSED)}


MODEL = SimulatedModel(groups=(FULL,), ranks=2, blocks=40)


@pytest.mark.parametrize("event", ["evict", "preempt", "reset"])
def test_f52_no_wrong_row_of_a_write_behind_that_is_held(event: str) -> None:
    """Whatever the scheduler does meanwhile: a slot that a rank still reads is not given out."""
    stage = Stage(host_slots=24)
    prompts = [tokens(seed, 40) for seed in range(12)]
    with Simulation(stage.assembly, MODEL, seed=1) as sim:
        assert sim.wait_ready()
        writing = stage.disk.writing
        writing.shut()
        request = sim.add(prompts[0], 60)
        while not writing.held:
            sim.step()
        if event == "preempt":
            assert request.phase is Phase.RUNNING
            sim.preempt(request)
        elif event == "reset":
            sim.reset()
        for prompt in prompts[1:]:
            sim.add(prompt, 2)
        sim.run()
        assert writing.held, "the first write goes on"
        evicted = sim.manager_stats.tier("host").evicted
        held = writing.held
        writing.open()
        assert sim.settle()
        sim.run()
        right = [
            {k: v for p in (*prompts, request.tokens) for k, v in sim.blocks(p, rank).items()}
            for rank in range(MODEL.ranks)
        ]
        rows = stage.disk.keys()
        wrong = [
            (key, rank)
            for key in rows
            for rank in range(MODEL.ranks)
            if stage.disk.content(key, rank) not in (None, right[rank][key])
        ]
        counts = sim.counts
        print(
            f"{event}: {held} writes were held while {counts.stored_blocks} blocks were stored and "
            f"{evicted} evicted, with {counts.preemptions} preemptions and {counts.resets} resets; "
            f"{len(rows)} rows, {len(wrong)} wrong"
        )
        poisoned = sum(sim.rank_stats(r).tier("ssd").dropped.get("poisoned", 0) for r in range(2))
        print(f"{poisoned} blocks were not published, since their time was over")
        assert poisoned > 0 if event == "reset" else rows
        assert not wrong
        assert counts.preemptions >= (event != "evict")
        assert counts.resets == (event == "reset")
        assert evicted > 0
        assert sim.audit() == ()
