"""A rank of an engine that stores blocks and then takes no further step; run as a process of its
own to be killed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch

from tiered_kv.config import CpuSettings, Deployment, SizeOrPercent, TierSettings
from tiered_kv.connector import ConnectorMetadata, WorkerConnector
from tiered_kv.connector.assembly import Assembly
from tiered_kv.plugins import Plugins
from tiered_kv.specs import (
    CpuSpec,
    GpuBlock,
    GpuSpec,
    LoadJob,
    Part,
    Parts,
    SlotRef,
    StoreJob,
    StoreTargets,
)
from tiered_kv.values import BlockKey, Fingerprint, JobId
from tiered_kv_lmdb.settings import LmdbSettings
from tiered_kv_nvme.settings import NvmeSettings

__all__ = ["BLOCKS", "FINGERPRINT", "TIERS", "Rank", "assembly_of", "names"]

TIERS = ("ssd", "pins")
BLOCKS = 12
MIB = 2**20
FINGERPRINT = Fingerprint.of({"model": "idle"})


def assembly_of(folder: Path, *, host: bool) -> Assembly:
    """A deployment with an nvme and an lmdb tier in this folder."""
    room = SizeOrPercent(size=0)
    tiers: list[TierSettings] = [
        NvmeSettings(name="ssd", path=folder / "ssd", capacity=64 * MIB, min_free=room),
        LmdbSettings(name="pins", path=folder / "pins", capacity=32 * MIB, min_free=room),
    ]
    if host:
        tiers.insert(0, CpuSettings(name="host", capacity=4 * MIB))
    return Assembly(Deployment(tiers=tuple(tiers)), Plugins().deployed(t.type for t in tiers))


class Rank:
    """The worker half, over caches that hold the same in every process."""

    def __init__(self, folder: Path, *, host: bool) -> None:
        self.host = host
        self.assembly = assembly_of(folder, host=host)
        source = torch.Generator().manual_seed(53)
        self.layers = {
            name: torch.randint(0, 256, (3 * BLOCKS, 20_480), dtype=torch.uint8, generator=source)
            for name in ("one", "two")
        }
        self.worker = WorkerConnector(
            self.assembly.worker_plan(
                FINGERPRINT,
                rank=0,
                world_size=1,
                group_layers=(("one", "two"),),
                group_tokens=(16,),
                chunk=1,
            )
        )
        self.worker.register_kv_caches(self.layers)
        self.specs = self.assembly.specs()

    def held(self, block: int) -> bytes:
        """The bytes of an engine block."""
        return b"".join(layer[block].numpy().tobytes() for layer in self.layers.values())

    def store(self) -> None:
        """Have the engine's one step store the first blocks, and take no further step."""
        keys, places = names(), tuple(range(BLOCKS))
        first = CpuSpec(tuple(SlotRef(i, 1) for i in places)) if self.host else None
        parts = tuple(Part(self.specs[tier](tier, keys), places) for tier in TIERS)
        blocks = GpuSpec(tuple(GpuBlock(0, (i,)) for i in places))
        job = StoreJob(JobId(1), "r", keys, blocks, StoreTargets(first, parts))
        metadata = ConnectorMetadata(stores=(job,))
        self.worker.handle_preemptions(metadata)
        self.worker.start_kv_transfers(metadata)
        self.worker.prepare_store_kv(metadata)

    def load(self, job: int, tier: str, first: int) -> LoadJob:
        """A load of all blocks from a tier, to the engine blocks from `first` on."""
        keys = names()
        part = Part(self.specs[tier](tier, keys), tuple(range(BLOCKS)))
        blocks = GpuSpec(tuple(GpuBlock(0, (first + i,)) for i in range(BLOCKS)))
        return LoadJob(JobId(job), "r", keys, Parts((part,)), blocks)


def names() -> tuple[BlockKey, ...]:
    return tuple(BlockKey(b"idle-%d" % number) for number in range(BLOCKS))


if __name__ == "__main__":
    rank = Rank(Path(sys.argv[1]), host=sys.argv[2] == "True")
    rank.store()
    print("the step is over", flush=True)
    while True:
        signal.pause()
