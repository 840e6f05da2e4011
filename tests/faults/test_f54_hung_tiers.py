"""A tier that hangs costs one deadline, not one for each request, and a request no more than two
loads."""

from __future__ import annotations

from itertools import islice

from tests.faults.giving_up import MEASURED, all_end
from tests.unit.simulation_rig import Stage, store_prompt, tokens
from tiered_kv.testing.faults import Effect, Fault, Method
from tiered_kv.testing.simulation import Phase, SimulatedModel, Simulation

REQUESTS = 50
MODEL = SimulatedModel(blocks=200)
PREFIX = tokens(1, 32)
DEADLINE = 0.5


def test_f54_requests_that_share_a_prefix_wait_for_a_hung_tier_once() -> None:
    stage = Stage(host_slots=0, load_deadline=DEADLINE, retry_backoff=60.0)
    with Simulation(stage.assembly, MODEL) as sim:
        store_prompt(sim, PREFIX)
        stage.disk.reading.shut()
        requests = [sim.add((*PREFIX, *tokens(number, 4)), 1) for number in range(REQUESTS)]
        sim.step()
        deferred = sum(request.phase is Phase.WAITING for request in requests)
        ended, held = all_end(sim, requests), stage.disk.reading.held
        stage.open()
        print(f"{deferred} requests waited for a load; {sim.counts.loads} loads, {held} reads hung")
        assert ended
        assert held
        assert deferred == REQUESTS - 1
        # Each load costs those that share its blocks a deadline.
        assert sim.counts.loads == 1
        assert sim.counts.failed_blocks == {"timed_out": 8}
        sim.run()
        assert sim.settle()
        sim.check_device_cache()
        assert sim.audit() == ()


def test_f54_loads_that_queue_behind_those_that_hang_are_given_up_with_them() -> None:
    stage = Stage(host_slots=0, load_deadline=DEADLINE, retry_backoff=60.0)
    prompts = [tokens(100 + number, 16) for number in range(12)]
    with Simulation(stage.assembly, MODEL) as sim:
        for prompt in prompts:
            store_prompt(sim, prompt)
        stage.disk.reading.shut()
        requests = [sim.add(prompt, 1) for prompt in prompts]
        sim.step()
        loading = sum(request.phase is Phase.LOADING for request in requests)
        ended, held = all_end(sim, requests), stage.disk.reading.held
        stage.open()
        print(f"{loading} loads, of which {held} had begun to read; {sim.counts.failed_blocks}")
        assert ended
        assert loading == len(prompts)
        assert held < loading
        assert sim.counts.loads == sim.counts.failed_loads == len(prompts)
        sim.run()
        assert sim.settle()
        assert sim.audit() == ()


def test_f54_a_request_gets_one_further_load_and_then_computes() -> None:
    tiers = ("ssd", "pins", "far")
    stage = Stage(host_slots=0, stores=tiers, load_deadline=DEADLINE, retry_backoff=60.0)
    with Simulation(stage.assembly, MODEL) as sim:
        for tier in tiers:
            store_prompt(sim, PREFIX, tier)
        before = sim.counts.loads
        disks = [stage.memory.disk(tier) for tier in tiers]
        for disk in disks:
            disk.reading.shut()
        request = sim.add(PREFIX, 1)
        ended, held = all_end(sim, [request]), [disk.reading.held for disk in disks]
        stage.open()
        loads = sim.counts.loads - before
        print(f"{loads} loads; reads that hung, by tier: {held}")
        assert ended
        assert loads == sim.counts.failed_loads == 2
        assert [bool(count) for count in held] == [True, True, False]
        sim.run()
        assert sim.settle()
        assert sim.audit() == ()


def test_f54_blocks_that_a_tier_could_not_bring_are_asked_of_it_once() -> None:
    """It works otherwise, so that no breaker opens."""
    stage = Stage(host_slots=0, retry_backoff=60.0)
    others = [tokens(100 + number, 16) for number in range(REQUESTS // 5)]
    with Simulation(stage.assembly, MODEL) as sim:
        for prompt in (PREFIX, *others):
            store_prompt(sim, prompt)
        bad = frozenset(islice(sim.blocks(PREFIX), 1))
        stage.disk.faults.inject(Fault(method=Method.READ, effect=Effect.BLOCK_ERROR, keys=bad))
        for number in range(REQUESTS):
            sim.forget_device_cache()
            sim.add((*PREFIX, *tokens(number, 4)), 1)
            if number % 5 == 0:
                sim.add(others[number // 5], 1)
            sim.run()
        refused = stage.disk.faults.injected()[Method.READ, Effect.BLOCK_ERROR]
        print(f"{REQUESTS} requests for a bad block: {refused} reads of it; {sim.counts}")
        assert sim.settle()
        assert sim.counts.loaded_blocks["ssd"] >= 4 * len(others)
        assert sim.counts.failed_loads == refused == 1
        sim.check_device_cache()
        assert sim.audit() == ()


def test_f54_a_short_request_does_not_wait_for_the_load_of_a_long_one() -> None:
    stage = Stage(host_slots=0, load_deadline=60.0, retry_backoff=60.0, recompute=MEASURED)
    long = (*PREFIX, *tokens(2, 400))
    with Simulation(stage.assembly, MODEL) as sim:
        store_prompt(sim, long)
        sim.manager.note_step(1000, 20.0)  # 8 s for the long one, 0.6 s for the short one
        stage.disk.reading.shut()
        first = sim.add(long, 1)
        sim.step()
        assert first.phase is Phase.LOADING
        second = sim.add((*PREFIX, 1, 2, 3), 1)
        sim.step()
        assert second.phase is Phase.WAITING
        ended, still = all_end(sim, [second]), first.phase
        stage.open()
        print(f"the short one ended: {ended}; the long one was {still.value}")
        assert ended
        assert still is Phase.LOADING
        assert sim.counts.loads == 1
        sim.run()
        assert sim.settle()
        sim.check_device_cache()
        assert sim.audit() == ()
