"""A tier that is slower than computing is not loaded from, and is again when it is fast again."""

from __future__ import annotations

import pytest

from tests.faults.giving_up import MEASURED, all_end, tell
from tests.unit.simulation_rig import TWO_GROUPS, Stage, store_prompt, tokens
from tiered_kv.config import Recompute
from tiered_kv.stats import LoadRate
from tiered_kv.testing.faults import Effect, Fault, Method
from tiered_kv.testing.simulation import SimulatedModel, Simulation

ONE = SimulatedModel(blocks=40)
PROMPT = tokens(1, 32)
REQUESTS = 5

THROTTLED = Fault(method=Method.READ, effect=Effect.SLOW, seconds=1.0)
SLOW = LoadRate(bytes_per_second=1e4, latency_seconds=1.0)
FAST = LoadRate(bytes_per_second=1e8, latency_seconds=1e-4)
FIXED = Recompute(gate="fixed", tokens_per_second=100.0)


@pytest.mark.parametrize("model", [ONE, TWO_GROUPS], ids=["one group", "two groups"])
@pytest.mark.parametrize("recompute", [MEASURED, FIXED], ids=["measured", "fixed"])
def test_f30_a_throttled_tier_is_left_alone_until_it_is_fast(
    model: SimulatedModel, recompute: Recompute
) -> None:
    stage = Stage(host_slots=0, recompute=recompute)
    with Simulation(stage.assembly, model) as sim:
        store_prompt(sim, PROMPT)
        sim.manager.note_step(1000, 10.0)  # the whole prompt takes 0.3 s
        stage.disk.faults.inject(THROTTLED)
        tell(sim, "ssd", SLOW)
        throttled = [sim.add(PROMPT, 1) for _ in range(REQUESTS)]
        assert all_end(sim, throttled)
        reads = stage.disk.faults.injected()[Method.READ, Effect.SLOW]
        sim.run()
        skipped = sim.manager_stats.tier("ssd").cut
        computed = sim.counts.computed_tokens
        print(f"throttled: {reads} reads, {sim.counts.loads} loads, cut {skipped}")
        assert (reads, sim.counts.loads) == (0, 0)
        assert skipped["slower_than_recompute"] > 0

        stage.disk.faults.inject()
        tell(sim, "ssd", FAST)
        sim.forget_device_cache()
        assert all_end(sim, [sim.add(PROMPT, 1) for _ in range(REQUESTS)])
        sim.run()
        print(f"fast again: {sim.counts.loads} loads of {dict(sim.counts.loaded_blocks)}")
        assert sim.counts.loaded_tokens > 0
        assert sim.counts.computed_tokens - computed < 32 * REQUESTS
        assert sim.settle()
        sim.check_device_cache()
        assert sim.audit() == ()


def test_f30_the_fast_part_of_a_prefix_is_loaded_and_the_slow_one_computed() -> None:
    stage = Stage(host_slots=0, stores=("ssd", "far"), recompute=MEASURED)
    with Simulation(stage.assembly, ONE) as sim:
        assert sim.wait_ready()
        sim.add(PROMPT[:16], 1, tiers=())
        sim.run()
        assert sim.settle()
        far = stage.memory.disk("far")
        store_prompt(sim, PROMPT, "far")
        with stage.disk.lock:  # the ssd has lost the second half
            for row in list(stage.disk.rows)[4:]:
                stage.disk.note(row, added=False)
                del stage.disk.rows[row]
        assert sim.wait_found(PROMPT[:16], "ssd")
        assert len(far.keys()) == 8
        sim.manager.note_step(1000, 10.0)
        far.faults.inject(THROTTLED)
        tell(sim, "ssd", FAST)
        tell(sim, "far", SLOW)
        before = sim.counts.computed_tokens
        request = sim.add(PROMPT, 1)
        assert all_end(sim, [request])
        sim.run()
        cut = sim.manager_stats.tier("far").cut
        print(f"loaded {dict(sim.counts.loaded_blocks)}, cut {cut}")
        assert sim.counts.loaded_blocks == {"ssd": 4}
        assert cut == {"slower_than_recompute": 4}
        assert sim.counts.computed_tokens - before == 16
        assert not far.faults.injected()
        assert sim.settle()
        assert sim.audit() == ()
