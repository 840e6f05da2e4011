"""Deployments for the simulated engine, whose every copy and every tier a test can hold up."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tiered_kv.config import (
    CpuSettings,
    Deployment,
    Limits,
    Placement,
    Recompute,
    TierSettings,
    TraceSettings,
)
from tiered_kv.connector import WorkerReport
from tiered_kv.connector.assembly import Assembly
from tiered_kv.contracts import API_VERSION, Backend
from tiered_kv.plugins import Plugins
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import CpuSpec, GpuSpec
from tiered_kv.stats import LoadRate, TierCondition, TierState
from tiered_kv.testing.faults import Valve, hold_hop
from tiered_kv.testing.memory_tier import MemoryDisk, MemorySettings, MemoryTiers
from tiered_kv.testing.simulation import Request, SimulatedGroup, SimulatedModel, Simulation
from tiered_kv.values import GPU

SLOT = 4096

FULL = SimulatedGroup(layers=2, tokens=4)
WINDOW = SimulatedGroup(layers=1, tokens=4, window=12)

TWO_GROUPS = SimulatedModel(groups=(FULL, WINDOW), ranks=2, blocks=40, chunk=2)
CROSS_LAYERS = SimulatedModel(groups=(SimulatedGroup(layers=3),), cross_layers=True, blocks=40)


@dataclass
class Stage:
    """A host tier of `host_slots`, if any, memory tiers, and valves before the engine's copies."""

    host_slots: int = 64
    stores: tuple[str, ...] = ("ssd",)
    write: tuple[str, ...] | None = None
    load_deadline: float = 20.0
    retry_backoff: float = 0.2
    lookup_wait: float = 0.05
    recompute: Recompute = field(default_factory=lambda: Recompute(gate="off"))
    """Off: nearly nothing is slower than a simulated computation."""
    lookup_wait_far: float = 20.0
    write_budget: int = 0
    """Of each memory tier."""
    tiers: tuple[TierSettings, ...] = ()
    """Further tiers, of whatever installed type."""
    trace: TraceSettings | None = None
    memory: MemoryTiers = field(default_factory=MemoryTiers)
    gather: Valve = field(default_factory=Valve)
    """Before gpu -> cpu."""
    scatter: Valve = field(default_factory=Valve)
    """Before cpu -> gpu."""

    def __post_init__(self) -> None:
        host: list[TierSettings] = []
        if self.host_slots:
            host.append(CpuSettings(name="host", capacity=self.host_slots * SLOT))
        stores = [
            MemorySettings(name=name, capacity=2000 * SLOT, write_budget=self.write_budget)
            for name in self.stores
        ]
        deployment = Deployment(
            tiers=(*host, *stores, *self.tiers),
            placement=Placement(write=self.write),
            recompute=self.recompute,
            trace=self.trace,
            limits=Limits(
                load_deadline=self.load_deadline,
                store_deadline=20.0,
                lookup_wait=self.lookup_wait,
                lookup_wait_far=self.lookup_wait_far,
                retry_backoff=self.retry_backoff,
                staging=32 * SLOT,
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
        found = Plugins().deployed(tier.type for tier in self.tiers)
        self.assembly = Assembly(
            deployment, {**found, "valves": valves, "memory": self.memory.backend}
        )

    def _register(self, registry: TransferRegistry) -> None:
        hold_hop(registry, GpuSpec, CpuSpec, self.gather)
        hold_hop(registry, CpuSpec, GpuSpec, self.scatter)

    @property
    def disk(self) -> MemoryDisk:
        """Of the first store."""
        return self.memory.disk(self.stores[0])

    def open(self) -> None:
        """Let everything go that is held."""
        for name in self.stores:
            disk = self.memory.disk(name)
            for valve in (disk.reading, disk.writing, disk.publishing):
                valve.open()
        self.gather.open()
        self.scatter.open()


def far(sim: Simulation, block_seconds: float = 0.06, tier: str = "ssd") -> None:
    """Have the manager believe that a tier takes so long for a block. Two of them, by default, are
    then far, and come in a job of their own each."""
    load = LoadRate(SLOT / block_seconds, 0.0)
    # The slowest rank counts: one that there is not says so, and no measurement takes it back.
    told = (99, TierCondition(tier, TierState.HEALTHY, "", load))
    sim.manager.take_report(WorkerReport(conditions=(told,)))


def blocks_read(sim: Simulation, medium: str = "memory", tier: str = "ssd") -> list[int]:
    """By rank, how many blocks came from a tier into host memory."""
    ranks = range(sim.model.ranks)
    return [sim.rank_stats(rank).hop(medium, "cpu", tier).blocks for rank in ranks]


def promoted(sim: Simulation, tier: str = "ssd") -> float:
    """Blocks that were brought from a tier ahead of their load."""
    return sim.manager_stats.counter("tier_promoted_blocks_total", tier)


def tokens(seed: int, count: int) -> tuple[int, ...]:
    """A prompt."""
    source = random.Random(seed)
    return tuple(source.randrange(50_000) for _ in range(count))


def store_prompt(sim: Simulation, prompt: Sequence[int], tier: str = "ssd") -> None:
    """Compute a prompt, wait until all its blocks are found in `tier`, and forget it on the
    device."""
    assert sim.wait_ready()
    sim.add(prompt)
    sim.run()
    assert sim.settle()
    assert sim.wait_found(prompt, tier)
    sim.forget_device_cache()


def load_prompt(
    sim: Simulation, prompt: Sequence[int], tiers: Collection[str] | None = ("ssd",)
) -> Request:
    """Have the prompt answered."""
    request = sim.add(prompt, 4, tiers=tiers)
    sim.run()
    assert sim.settle()
    return request
