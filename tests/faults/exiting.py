"""An engine with a tier that hangs for ever, run as a process of its own that is to end."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

from tests.faults.simulated import MODEL, Site, until
from tests.unit.simulation_rig import store_prompt, tokens
from tiered_kv.testing.faults import Effect, Fault, Method
from tiered_kv.testing.simulation import Simulation

__all__ = ["DRAIN", "LOADS", "STORES_IN_FLIGHT"]

DRAIN = 2.0
LOADS = 10
STORES_IN_FLIGHT = 100


def busy(sim: Simulation, site: Site) -> str:
    """Have loads and stores in flight when every call of the tier begins to hang."""
    for number in range(LOADS):
        store_prompt(sim, tokens(number, 16))
    site.faults.inject(
        *(
            Fault(method=method, effect=Effect.HANG)
            for method in Method
            if method is not Method.OPEN
        )
    )
    loads, stores = sim.counts.loads, sim.counts.stores
    for number in range(LOADS):
        sim.add(tokens(number, 16), 1, tiers={"ssd"})
        sim.step()
    for number in range(STORES_IN_FLIGHT * 4):
        if sim.counts.stores - stores >= STORES_IN_FLIGHT:
            break
        sim.add(tokens(2000 + number, 16), 1, tiers=())
        sim.step()
    hang = until(lambda: site.faults.held >= 2)
    return f"{sim.counts.loads - loads} loads, {sim.counts.stores - stores} stores, hang {hang}"


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(folder: Path, kind: str, way: str) -> None:
    """End in one of several ways."""
    site = Site(folder, kind, host_slots=512, drain=DRAIN, load_deadline=60.0)
    model = replace(MODEL, ranks=1, blocks=1000)
    sim = Simulation(site.assembly, model, token_budget=4096, most_running=64)
    if way == "handler":  # as vLLM's processes do
        signal.signal(signal.SIGTERM, _exit)
    try:
        print(busy(sim, site), flush=True)
        if way in ("handler", "plain"):
            signal.pause()
        if way == "exception":
            raise RuntimeError("something else went wrong")
    finally:
        if way in ("handler", "closed"):
            sim.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
