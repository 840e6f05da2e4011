"""A simulated engine over a host tier and a real store that is believed to be slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.unit.simulation_rig import SLOT, far
from tiered_kv.config import (
    CpuSettings,
    Deployment,
    Limits,
    Placement,
    Recompute,
    SizeOrPercent,
    TierSettings,
)
from tiered_kv.connector.assembly import Assembly
from tiered_kv.contracts import API_VERSION, Backend
from tiered_kv.plugins import Plugins
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import CpuSpec, GpuSpec
from tiered_kv.testing.faults import PATIENCE, Faults, Valve, faulty_backend, hold_hop
from tiered_kv.testing.simulation import Simulation
from tiered_kv.values import GPU
from tiered_kv_lmdb.settings import LmdbSettings
from tiered_kv_nvme.settings import NvmeSettings

__all__ = ["KINDS", "PATIENCE", "FarTier", "store_all"]

KINDS = ("nvme", "lmdb")
"""Types of the slow tier."""

MIB = 2**20


def _settings(kind: str, path: Path) -> TierSettings:
    room = SizeOrPercent(size=0)
    if kind == "nvme":
        return NvmeSettings(
            name="ssd", path=path, capacity=64 * MIB, min_free=room, io="posix", segment=4 * MIB
        )
    return LmdbSettings(name="ssd", path=path, capacity=32 * MIB, min_free=room)


@dataclass
class FarTier:
    """A deployment with the tiers "host" and "ssd"; `promote` makes the latter far."""

    path: Path
    kind: str
    host_slots: int
    staging_slots: int = 32
    write: tuple[str, ...] | None = None
    lookup_wait_far: float = 600.0
    faults: Faults = field(default_factory=Faults)
    """Of the store."""
    gather: Valve = field(default_factory=Valve)
    """Before the copies out of the engine's cache."""

    def __post_init__(self) -> None:
        tiers = (
            CpuSettings(name="host", capacity=self.host_slots * SLOT),
            _settings(self.kind, self.path),
        )
        deployment = Deployment(
            recompute=Recompute(gate="off"),  # nearly all is slower than to simulate computing
            tiers=tiers,
            placement=Placement(write=self.write),
            limits=Limits(
                load_deadline=PATIENCE,
                store_deadline=PATIENCE,
                lookup_wait_far=self.lookup_wait_far,
                staging=self.staging_slots * SLOT,
                drain=5.0,
            ),
        )
        valves = Backend(
            name="valves",
            medium=GPU,
            api_version=API_VERSION,
            description="Holds the engine's copies.",
            register=self._register,
        )
        backends = dict(Plugins().deployed(tier.type for tier in tiers))
        backends[self.kind] = faulty_backend(backends[self.kind], self.faults)
        self.assembly = Assembly(deployment, {**backends, "valves": valves})

    def _register(self, registry: TransferRegistry) -> None:
        hold_hop(registry, GpuSpec, CpuSpec, self.gather)
        hold_hop(registry, CpuSpec, GpuSpec, Valve())


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
