"""What was read from a slow tier for a request is there when the request gets its turn: however
small the host tier is, and whatever else is stored there meanwhile, each block is read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.far_tiers import KINDS, far_tier, store_all
from tests.faults.giving_up import all_end
from tests.unit.simulation_rig import blocks_read, promoted, tokens
from tiered_kv.testing.simulation import Phase, SimulatedModel, Simulation

REQUESTS = 50
HITS = 8
"""Blocks of each request's prompt."""
SLOTS = 16
RANKS = 2
MODEL = SimulatedModel(blocks=160, ranks=RANKS, chunk=2)
BLOCK_SECONDS = 0.02
"""Eight of them are far."""
LONGEST = 80.0
"""Seconds, of which a run takes a tenth."""
BUSY_ANSWER = 160
"""Tokens of requests without a hit that run for long: 20 blocks, which are stored in the host
tier while the others wait for their turn."""


def serve(path: Path, kind: str, stored: list[tuple[int, ...]], asked: list[int]) -> Simulation:
    """Store prompts in the slow tier, and have a new engine, whose host tier is empty, answer
    requests for them that come all at once, and long ones between them."""
    with Simulation(far_tier(path, kind, 64, write=("ssd",)).assembly, MODEL) as before:
        store_all(before, stored, BLOCK_SECONDS)
    with Simulation(far_tier(path, kind, SLOTS).assembly, MODEL, most_running=2) as sim:
        store_all(sim, [], BLOCK_SECONDS)
        requests = []
        for number, prompt in enumerate(asked):
            requests.append(sim.add(stored[prompt]))
            if number % 10 == 9:
                requests += [sim.add((number, which), BUSY_ANSWER) for which in range(2)]
        assert all_end(sim, requests, LONGEST), "requests keep one another from ending"
        sim.run()
        assert sim.settle()
        assert {request.phase for request in requests} == {Phase.FINISHED}
        assert sim.counts.failed_loads == 0
        assert sim.audit() == ()
    return sim


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, the requests' turns come while their blocks are kept."""
    monkeypatch.setattr("tiered_kv.connector.promoting.KEEP_SECONDS", 600.0)


@pytest.mark.parametrize("kind", KINDS)
def test_f31_blocks_of_fifty_requests_are_read_once_each(kind: str, tmp_path: Path) -> None:
    prompts = [tokens(seed, HITS * 8) for seed in range(REQUESTS)]
    sim = serve(tmp_path, kind, prompts, list(range(REQUESTS)))
    read = blocks_read(sim, kind)
    evicted = sim.manager_stats.counter("tier_evicted_blocks_total", "host")
    print(
        f"{REQUESTS} requests of {HITS} hits through {SLOTS} slots: ranks read {read} blocks, "
        f"{promoted(sim):g} were promoted, {evicted:g} blocks were evicted from the host tier, "
        f"loaded {dict(sim.counts.loaded_blocks)}"
    )
    assert read == [REQUESTS * HITS] * RANKS
    # A few that found no slot, and were near by themselves, came directly.
    assert promoted(sim) == sim.counts.loaded_blocks["host"] > REQUESTS * HITS // 2
    assert sim.counts.loaded_blocks.total() == REQUESTS * HITS
    assert evicted >= REQUESTS * HITS - SLOTS, "the slots were wanted"


@pytest.mark.parametrize("kind", KINDS)
def test_f31_one_prefix_of_fifty_requests_is_read_once(kind: str, tmp_path: Path) -> None:
    sim = serve(tmp_path, kind, [tokens(1, HITS * 8)], [0] * REQUESTS)
    read = blocks_read(sim, kind)
    print(
        f"{REQUESTS} requests for {HITS} blocks through {SLOTS} slots: ranks read {read} blocks, "
        f"loaded {dict(sim.counts.loaded_blocks)}"
    )
    assert read == [HITS] * RANKS
    assert promoted(sim) == HITS
    assert sim.counts.loaded_blocks["host"] >= HITS
