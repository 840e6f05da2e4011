"""Promotions under a simulated engine: real halves, real ranks, a tier that is believed slow.

Every byte that the engine reads is compared by the simulated engine itself.
"""

from __future__ import annotations

import threading

import pytest

from tests.unit.simulation_rig import (
    TWO_GROUPS,
    Stage,
    blocks_read,
    far,
    load_prompt,
    promoted,
    store_prompt,
    tokens,
)
from tiered_kv.testing.faults import PATIENCE, Effect, Fault, Method
from tiered_kv.testing.simulation import Phase, SimulatedModel, Simulation, Workload
from tiered_kv.values import BlockStatus

RANKS = 2
MODEL = SimulatedModel(blocks=40, ranks=RANKS, chunk=2)
PROMPT = tokens(1, 32)
BLOCKS = 4
"""Whole blocks of the prompt."""


def below(*, retry_backoff: float = 0.2, lookup_wait_far: float = 20.0) -> Stage:
    """A deployment whose blocks are stored in the tier "ssd" alone, so that the host tier has but
    what was promoted."""
    return Stage(write=("ssd",), retry_backoff=retry_backoff, lookup_wait_far=lookup_wait_far)


def hold_reads(stage: Stage) -> None:
    """Every read of the tier hangs from now on."""
    stage.disk.faults.inject(Fault(method=Method.READ, effect=Effect.HANG))


def wait_held(stage: Stage, calls: int = RANKS) -> None:
    """Wait until so many reads hang."""
    pause = threading.Event()
    for _ in range(3000):
        if stage.disk.faults.held >= calls:
            return
        pause.wait(PATIENCE / 3000)
    raise AssertionError(f"{stage.disk.faults.held} reads hang, not {calls}")


def let_go(stage: Stage) -> None:
    """They go on, and no further one hangs."""
    stage.disk.faults.inject()
    stage.disk.faults.let_go()


@pytest.mark.parametrize("repeated", [0.0, 1.0])
def test_blocks_of_a_far_tier_come_through_the_host_tier(repeated: float) -> None:
    stage = below()
    with Simulation(stage.assembly, MODEL, repeated_messages=repeated, late_outputs=0.2) as sim:
        store_prompt(sim, PROMPT)
        far(sim)
        before = sim.manager.stats.snapshot().counter("tier_hits_total", "ssd")
        request = load_prompt(sim, PROMPT, tiers=None)
        assert request.phase is Phase.FINISHED
        assert sim.counts.loaded_blocks == {"host": BLOCKS}
        assert promoted(sim) == BLOCKS
        assert blocks_read(sim) == [BLOCKS] * RANKS
        hits = sim.manager.stats.snapshot().counter("tier_hits_total", "ssd") - before
        assert hits == BLOCKS, "they lay there when they were asked for"
        # And again, from where they are now.
        sim.forget_device_cache()
        load_prompt(sim, PROMPT, tiers=None)
        assert sim.counts.loaded_blocks == {"host": 2 * BLOCKS}
        assert blocks_read(sim) == [BLOCKS] * RANKS
        assert sim.audit() == ()


def test_an_order_goes_out_with_a_step_that_has_no_other_news() -> None:
    """The request waits, nothing else is to be done, and the engine goes on stepping."""
    stage = below()
    with Simulation(stage.assembly, MODEL) as sim:
        store_prompt(sim, PROMPT)
        far(sim)
        hold_reads(stage)
        jobs = sim.counts.loads, sim.counts.stores, sim.counts.computed_tokens
        request = sim.add(PROMPT, 4)
        sim.step()
        assert request.phase is Phase.WAITING
        wait_held(stage)
        assert (sim.counts.loads, sim.counts.stores, sim.counts.computed_tokens) == jobs
        assert sim.free_blocks == MODEL.blocks - 1, "no block of the engine is held meanwhile"
        assert sim.has_work
        let_go(stage)
        sim.run()
        assert sim.settle()
        assert sim.counts.loaded_blocks == {"host": BLOCKS}
        assert sim.audit() == ()


def test_what_does_not_come_in_time_is_computed_and_stays_for_the_next() -> None:
    stage = below(lookup_wait_far=0.5)
    with Simulation(stage.assembly, MODEL) as sim:
        store_prompt(sim, PROMPT)
        far(sim)
        hold_reads(stage)
        before = sim.counts.computed_tokens
        late = sim.add(PROMPT, 4)
        sim.run()
        assert late.phase is Phase.FINISHED
        assert sim.counts.computed_tokens - before >= len(PROMPT)
        let_go(stage)
        assert sim.settle()
        came = int(promoted(sim))
        unpromoted = sim.manager_stats.counter("tier_unpromoted_blocks_total", "ssd", "late")
        print(f"{came} of {BLOCKS} blocks had begun to be read, and stay; {unpromoted:g} were late")
        assert came >= 1
        assert unpromoted == BLOCKS
        sim.forget_device_cache()
        load_prompt(sim, PROMPT, tiers=None)
        assert sim.counts.loaded_blocks["host"] >= 1
        assert sim.counts.failed_loads == 0
        assert sim.audit() == ()


def test_an_aborted_request_does_not_lose_what_is_on_its_way() -> None:
    stage = below()
    with Simulation(stage.assembly, MODEL) as sim:
        store_prompt(sim, PROMPT)
        far(sim)
        hold_reads(stage)
        first = sim.add(PROMPT, 4)
        sim.step()
        wait_held(stage)
        second = sim.add(PROMPT, 4)
        sim.step()
        sim.abort(first)
        sim.step()
        let_go(stage)
        sim.run()
        assert sim.settle()
        assert (first.phase, second.phase) == (Phase.ABORTED, Phase.FINISHED)
        assert sim.counts.loaded_blocks == {"host": BLOCKS}
        assert blocks_read(sim) == [BLOCKS] * RANKS
        assert sim.audit() == ()


def test_all_abort_and_the_blocks_stay_for_the_next() -> None:
    stage = below()
    with Simulation(stage.assembly, MODEL) as sim:
        store_prompt(sim, PROMPT)
        far(sim)
        hold_reads(stage)
        sim.abort(sim.add(PROMPT, 4))
        for _ in range(3):
            request = sim.add(PROMPT, 4)
            sim.step()
            sim.abort(request)
            sim.step()
        let_go(stage)
        assert sim.settle()
        assert sim.audit() == ()
        load_prompt(sim, PROMPT, tiers=None)
        assert sim.counts.loaded_blocks == {"host": BLOCKS}
        assert blocks_read(sim) == [BLOCKS] * RANKS


@pytest.mark.parametrize("bad", [0, 2])
def test_a_corrupt_block_is_found_out_before_the_load_and_computed(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A background read would find it out as well.
    monkeypatch.setattr("tiered_kv.engine.probing.ACTIVE_SECONDS", 3600.0)
    monkeypatch.setattr("tiered_kv.engine.probing.AGAIN_SECONDS", 3600.0)
    stage = below(retry_backoff=60.0)
    with Simulation(stage.assembly, MODEL) as sim:
        store_prompt(sim, PROMPT)
        far(sim)
        key = list(sim.blocks(PROMPT))[bad]
        stage.disk.spoil(key)
        request = load_prompt(sim, PROMPT, tiers=None)
        assert request.phase is Phase.FINISHED
        assert sim.counts.loaded_blocks["host"] == bad
        assert sim.counts.failed_loads == 0, "no load was begun that could fail"
        # The rank that finds it drops it, and the other one may miss it then.
        reasons = [
            sim.manager_stats.counter("tier_unpromoted_blocks_total", "ssd", status.value)
            for status in (BlockStatus.CORRUPT, BlockStatus.MISSING)
        ]
        assert sum(reasons) == 1
        found = [
            sim.rank_stats(rank).counter("tier_corrupt_blocks_total", "ssd", "load")
            for rank in range(RANKS)
        ]
        print(f"ranks found {found} corrupt blocks")
        assert sum(found) >= 1
        # What was computed is stored again, and right.
        assert sim.wait_found(PROMPT, "ssd")
        assert stage.disk.content(key, 0) == sim.blocks(PROMPT, 0)[key]
        assert sim.audit() == ()


def test_a_preempted_request_finds_its_blocks_in_the_host_tier() -> None:
    stage = below()
    with Simulation(stage.assembly, MODEL) as sim:
        store_prompt(sim, PROMPT)
        far(sim)
        request = sim.add(PROMPT, 8)
        while request.phase in (Phase.WAITING, Phase.LOADING):
            sim.step()
        sim.preempt(request)
        sim.forget_device_cache()
        sim.run()
        assert sim.settle()
        assert request.phase is Phase.FINISHED
        assert sim.counts.preemptions == 1
        assert sim.counts.loaded_blocks == {"host": 2 * BLOCKS}
        assert blocks_read(sim) == [BLOCKS] * RANKS
        assert sim.audit() == ()


def test_a_reset_while_blocks_are_on_their_way() -> None:
    stage = below()
    with Simulation(stage.assembly, MODEL) as sim:
        store_prompt(sim, PROMPT)
        far(sim)
        hold_reads(stage)
        request = sim.add(PROMPT, 4)
        sim.step()
        wait_held(stage)
        sim.reset(new_weights=True)
        let_go(stage)
        sim.run()
        assert sim.settle()
        assert request.phase is Phase.FINISHED
        assert sim.counts.loaded_blocks == {}
        assert promoted(sim) == 0
        assert sim.audit() == ()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("host_slots", [8, 40])
@pytest.mark.parametrize("model", [SimulatedModel(blocks=40, ranks=2), TWO_GROUPS])
def test_requests_at_random_over_a_far_tier(
    model: SimulatedModel, host_slots: int, seed: int
) -> None:
    stage = Stage(host_slots=host_slots, write=("ssd",) if seed else None, lookup_wait_far=3.0)
    workload = Workload(
        arrivals=0.6, prefixes=12, prefix_tokens=(16, 48), prompt_tokens=(0, 4), preempt=0.1
    )
    with Simulation(
        stage.assembly,
        model,
        seed=seed,
        late_outputs=0.1,
        repeated_messages=0.1,
        most_running=3,
    ) as sim:
        assert sim.wait_ready()
        far(sim, 0.11)
        for _ in range(10):
            sim.live(workload, 40)
            sim.forget_device_cache()
        sim.run()
        assert sim.settle()
        reasons = ("late", "slow", "large")
        print(
            f"{sim.counts.finished} requests, {sim.counts.preemptions} preemptions, "
            f"{sim.counts.aborts.total()} aborts; {promoted(sim):g} blocks promoted, not for "
            + ", ".join(
                f"{sim.manager_stats.counter('tier_unpromoted_blocks_total', 'ssd', reason):g} "
                f"{reason}"
                for reason in reasons
            )
            + f"; loaded {dict(sim.counts.loaded_blocks)}"
        )
        assert sim.counts.finished > 30  # fewer come where the machine is slow
        assert promoted(sim) > 0
        assert sim.counts.loaded_blocks.total() > 0
        assert sim.audit() == ()
