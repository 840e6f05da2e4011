"""A flush of the cache while blocks are being loaded: what comes late touches nobody's memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.simulated import MODEL, STORES, Site, until
from tests.unit.simulation_rig import store_prompt, tokens
from tiered_kv.connector import submission
from tiered_kv.testing.faults import Effect, Fault, Method
from tiered_kv.testing.simulation import Phase, Request, Simulation

pytestmark = pytest.mark.faults

TIGHT = replace(MODEL, ranks=1, blocks=12)
"""So few engine blocks that those of the load are given out again at once."""
PROMPT = tokens(1, 32)


@pytest.fixture(autouse=True)
def _short_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "FLUSH_SECONDS", 0.2)


def loading(sim: Simulation) -> Request:
    """A request whose blocks are on their way."""
    request = sim.add(PROMPT, 1, tiers={"ssd"})
    sim.step()
    assert request.phase is Phase.LOADING
    return request


@pytest.mark.parametrize("aborted", [True, False], ids=["aborted", "waiting"])
@pytest.mark.parametrize("kind", STORES)
def test_f41_a_read_that_a_flush_met_reaches_no_new_owner(
    kind: str, aborted: bool, tmp_path: Path
) -> None:
    site = Site(tmp_path / "tier", kind)
    with Simulation(site.assembly, TIGHT, seed=1) as sim:
        store_prompt(sim, PROMPT)
        site.faults.inject(Fault(method=Method.READ, effect=Effect.HANG, calls=(1,)))
        late = loading(sim)
        theirs = set(late.tables[0])
        assert until(lambda: site.faults.held == 1)
        sim.reset(new_weights=aborted, preempt=aborted)
        if not aborted:  # else the change of the weights has done so
            sim.abort(late)
        other = sim.add(tokens(2, 36), 4, tiers=())
        for _ in range(200):
            if other.computed:
                break
            sim.step()
        reused = theirs & set(other.tables[0])
        still = site.faults.held
        site.faults.let_go()
        sim.run()
        assert sim.settle()
        print(f"{len(reused)} blocks had a new owner while {still} read was held: {sim.counts}")
        assert len(reused) >= 4
        assert still == 1
        assert sim.counts.flushed_jobs >= 1
        assert other.phase is Phase.FINISHED
        assert sim.check_device_cache() > 0
        assert sim.audit() == ()


@pytest.mark.parametrize("kind", STORES)
def test_f41_a_copy_to_the_engine_that_a_flush_met_is_awaited(kind: str, tmp_path: Path) -> None:
    site = Site(tmp_path / "tier", kind)
    with Simulation(site.assembly, TIGHT, seed=2) as sim:
        store_prompt(sim, PROMPT)
        site.scatter.shut()
        late = loading(sim)
        theirs = set(late.tables[0])
        assert site.scatter.wait_held()
        sim.reset(new_weights=True)
        other = sim.add(tokens(2, 36), 4, tiers=())
        for _ in range(20):
            sim.step()
        taken = theirs & {block for table in other.tables for block in table}
        site.scatter.open()
        sim.run()
        assert sim.settle()
        print(f"{len(taken)} of {len(theirs)} blocks were given out before: {sim.counts}")
        assert sim.check_device_cache() > 0
        assert not taken
        assert other.phase is Phase.FINISHED
        assert sim.audit() == ()
