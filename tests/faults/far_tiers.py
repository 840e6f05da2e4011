"""A simulated engine over a host tier and a real store that is believed to be slow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.faults.simulated import STORES, Site
from tests.unit.simulation_rig import far
from tiered_kv.testing.faults import PATIENCE
from tiered_kv.testing.simulation import Simulation

__all__ = ["KINDS", "PATIENCE", "far_tier", "store_all"]

KINDS = STORES
"""Types of the slow tier."""


def far_tier(
    path: Path,
    kind: str,
    host_slots: int,
    *,
    staging_slots: int = 32,
    write: tuple[str, ...] | None = None,
    lookup_wait_far: float = 600.0,
) -> Site:
    """A deployment with the tiers "host" and "ssd"; `store_all` makes the latter far."""
    return Site(
        path,
        kind,
        host_slots,
        staging_slots=staging_slots,
        write=write,
        load_deadline=PATIENCE,
        lookup_wait_far=lookup_wait_far,
        retry_backoff=5.0,
    )


def store_all(sim: Simulation, prompts: Sequence[Sequence[int]], block_seconds: float) -> None:
    """Compute prompts, wait until all their blocks are found in the tier "ssd", forget them
    everywhere else, and have it believed from then on that a block takes so long."""
    assert sim.wait_ready()
    for prompt in prompts:
        sim.add(prompt)
        sim.run()
        assert sim.settle()
        assert sim.wait_found(prompt, "ssd")
    sim.forget_device_cache()
    far(sim, block_seconds)
