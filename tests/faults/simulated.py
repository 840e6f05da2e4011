"""Simulated engines over tiers on the disk, whose stores a test can hold up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

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
from tiered_kv.testing.simulation import SimulatedGroup, SimulatedModel, Simulation
from tiered_kv.values import GPU
from tiered_kv_lmdb.settings import LmdbSettings
from tiered_kv_nvme.settings import NvmeSettings

__all__ = ["MIB", "MODEL", "STORES", "Site", "go_on", "until"]

MIB = 2**20
SLOT = 4096

STORES = ("nvme", "lmdb")
"""Types of the tier "ssd"."""

MODEL = SimulatedModel(groups=(SimulatedGroup(layers=2, tokens=4),), ranks=2, blocks=40, chunk=2)


def _store(kind: str, path: Path) -> TierSettings:
    room = SizeOrPercent(size=0)
    if kind == "nvme":
        return NvmeSettings(
            name="ssd", path=path, capacity=64 * MIB, min_free=room, io="posix", segment=4 * MIB
        )
    return LmdbSettings(name="ssd", path=path, capacity=32 * MIB, min_free=room)


@dataclass
class Site:
    """A deployment with the host tier "host", if it has slots, and the tier "ssd" in a folder."""

    path: Path
    kind: str
    host_slots: int = 64
    staging_slots: int = 32
    write: tuple[str, ...] | None = None
    on_reset: Literal["leave", "keep", "erase"] = "leave"
    load_deadline: float = 20.0
    lookup_wait_far: float = 2.0
    retry_backoff: float = 0.2
    drain: float = 5.0
    faults: Faults = field(default_factory=Faults)
    """Of the tier's stores."""
    gather: Valve = field(default_factory=Valve)
    """Before gpu -> cpu."""
    scatter: Valve = field(default_factory=Valve)
    """Before cpu -> gpu."""

    def __post_init__(self) -> None:
        tiers: list[TierSettings] = [_store(self.kind, self.path)]
        if self.host_slots:
            tiers.insert(0, CpuSettings(name="host", capacity=self.host_slots * SLOT))
        deployment = Deployment(
            tiers=tuple(tiers),
            recompute=Recompute(gate="off"),  # nearly all is slower than to simulate computing
            placement=Placement(write=self.write),
            limits=Limits(
                load_deadline=self.load_deadline,
                store_deadline=20.0,
                lookup_wait_far=self.lookup_wait_far,
                retry_backoff=self.retry_backoff,
                staging=self.staging_slots * SLOT,
                drain=self.drain,
            ),
            on_reset=self.on_reset,
        )
        backends = dict(Plugins().deployed(tier.type for tier in tiers))
        backends[self.kind] = faulty_backend(backends[self.kind], self.faults)
        valves = Backend(
            name="valves",
            medium=GPU,
            api_version=API_VERSION,
            description="Holds the engine's copies.",
            register=self._register,
        )
        self.assembly = Assembly(deployment, {**backends, "valves": valves})

    def _register(self, registry: TransferRegistry) -> None:
        hold_hop(registry, GpuSpec, CpuSpec, self.gather)
        hold_hop(registry, CpuSpec, GpuSpec, self.scatter)


def go_on(sim: Simulation, tier: str = "ssd") -> None:
    """After a reset: let the ranks hear of it, and wait until the tier is open anew."""
    sim.add((1, 2, 3))
    sim.run()
    assert sim.wait_ready()
    assert until(lambda: all(worker.engine.health()[tier][0] for worker in sim.workers))


def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Whether it came true within that time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        threading.Event().wait(0.005)
    return True
