"""On what an engine lives: tiers on real directories, with small capacities, and a model."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.faults.soak.troubles import VictimTier, remove_directory
from tests.faults.soak.watching import Watch, watched
from tiered_kv.config import (
    CpuSettings,
    Deployment,
    Limits,
    Recompute,
    SizeOrPercent,
    TierSettings,
)
from tiered_kv.connector.assembly import Assembly
from tiered_kv.contracts import Backend
from tiered_kv.plugins import Plugins
from tiered_kv.testing.faults import Faults, faulty_backend
from tiered_kv.testing.memory_tier import MemoryDisk, MemorySettings, MemoryTiers
from tiered_kv.testing.simulation import (
    Pace,
    RealTime,
    SimulatedGroup,
    SimulatedModel,
    StepCost,
    VirtualTime,
)
from tiered_kv_lmdb.settings import LmdbSettings
from tiered_kv_nvme.settings import NvmeSettings

__all__ = ["LOAD_DEADLINE", "Scene"]

MIB = 2**20
SLOT = 4096
NO_FLOOR = SizeOrPercent(percent=0.0)
LOAD_DEADLINE = 0.25

_FULL = SimulatedGroup(layers=2, tokens=4)
_WINDOW = SimulatedGroup(layers=1, tokens=4, window=12)
MODELS = (
    SimulatedModel(blocks=26),
    SimulatedModel(blocks=30, ranks=2, chunk=2),
    SimulatedModel(groups=(_FULL, _WINDOW), blocks=36),
    SimulatedModel(groups=(_FULL, _WINDOW), blocks=36, ranks=2, chunk=2),
)
"""One and two ranks, one and two KV groups; pools that hold two or three requests."""
LAYOUTS = (
    ("host", "ssd", "map", "mem"),
    ("host", "ssd"),
    ("ssd", "map"),
    ("host", "map", "mem"),
    ("host", "mem", "ssd"),
    ("map",),
)
"""Tiers, nearest first."""
_COST = StepCost(prefill_token=2e-3, decode_step=10e-3)


@dataclass(slots=True)
class Scene:
    """One deployment and one model, on directories of their own; several lives follow on them."""

    number: int
    folder: Path
    model: SimulatedModel
    layout: tuple[str, ...]
    virtual: bool
    assembly: Assembly
    victims: Mapping[str, VictimTier] = field(default_factory=dict)

    @classmethod
    def of(cls, number: int, seed: int, folder: Path, tiny: Path | None) -> Scene:
        """The scene of a number: its model and layout go round, what else it is comes from the
        seed. `tiny`: a small file system that one of its tiers may have to itself."""
        draw = random.Random(f"{seed} scene {number}")
        layout = LAYOUTS[number % len(LAYOUTS)]
        model = MODELS[(number + number // len(LAYOUTS)) % len(MODELS)]
        virtual = draw.random() < 0.5
        folder.mkdir(parents=True)
        stores = [name for name in layout if name not in ("host", "mem")]
        alone = draw.choice(stores) if tiny is not None and stores else None
        memory = MemoryTiers()
        victims: dict[str, VictimTier] = {}
        tiers: list[TierSettings] = []
        for name in layout:
            place = folder if name != alone or tiny is None else tiny / folder.name
            path = place / name
            filler = place.parent / "filler" if name == alone else None
            match name:
                case "host":
                    tiers.append(CpuSettings(name=name, capacity=20 * SLOT))
                case "mem":
                    disk = memory.disk(name)
                    tiers.append(MemorySettings(name=name, capacity=120 * SLOT))
                    victims[name] = VictimTier(
                        name, disk.faults, Watch(), partial(_clear, disk), disk=disk
                    )
                case "ssd":
                    tiers.append(
                        NvmeSettings(name=name, path=path, capacity=2 * MIB, min_free=NO_FLOOR)
                    )
                case _:
                    tiers.append(
                        LmdbSettings(name=name, path=path, capacity=5 * MIB, min_free=NO_FLOOR)
                    )
            if name in stores:
                victims[name] = VictimTier(
                    name,
                    Faults(tier=name),
                    Watch(),
                    partial(remove_directory, path),
                    files=path if name == "ssd" else None,
                    filler=filler,
                )
        deployment = Deployment(
            tiers=tuple(tiers),
            limits=Limits(
                load_deadline=LOAD_DEADLINE,
                store_deadline=1.0,
                retry_backoff=0.2,
                staging=16 * SLOT,
                drain=1.0,
            ),
            recompute=Recompute(gate="measured" if virtual else "off"),
        )
        return cls(
            number,
            folder,
            model,
            layout,
            virtual,
            Assembly(deployment, _backends(deployment, memory, victims)),
            victims,
        )

    def pace(self) -> Pace:
        """Of one life."""
        return VirtualTime(_COST) if self.virtual else RealTime()

    def __str__(self) -> str:
        model = self.model
        time = "virtual" if self.virtual else "real"
        return (
            f"scene {self.number}: {' > '.join(self.layout)}, {model.ranks} ranks, "
            f"{len(model.groups)} groups, {time} time"
        )


def _clear(disk: MemoryDisk) -> None:
    with disk.lock:
        disk.rows.clear()


def _backends(
    deployment: Deployment, memory: MemoryTiers, victims: Mapping[str, VictimTier]
) -> dict[str, Backend]:
    types = {tier.type for tier in deployment.tiers}
    found = dict(Plugins().deployed(types - {"memory"}))
    for type_ in types & {"nvme", "lmdb"}:
        found[type_] = faulty_backend(
            watched(found[type_], lambda context: victims[context.tier].watch),
            lambda context: victims[context.tier].faults,
        )
    if "memory" in types:
        found["memory"] = watched(memory.backend, lambda context: victims[context.tier].watch)
    return found
