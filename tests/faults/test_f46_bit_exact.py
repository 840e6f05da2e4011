"""Blocks come back bit for bit, whatever numbers the engine keeps in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiered_kv_gpu
from tests.faults.loading import KINDS, Kind
from tiered_kv.engine import EngineLimits, TransferEngine, register_store_handlers
from tiered_kv.memory import HostBlockPool, KVCaches
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import (
    CpuSpec,
    GpuBlock,
    GpuSpec,
    JobResult,
    LoadJob,
    LoadStoreSpec,
    Part,
    Parts,
    SlotRef,
    StoreJob,
    StoreTargets,
)
from tiered_kv.stats import StatsRecorder
from tiered_kv.testing.conformance.blocks import StoreArguments, keys
from tiered_kv.values import CacheGeometry, GroupGeometry, JobId

PATIENCE = 60.0
BLOCKS = 8
CHUNK = 2
DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.int8,
    torch.uint8,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_f46_every_dtype_comes_back_bit_for_bit(
    kind: Kind, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Engine -> host -> store -> host -> engine, and engine -> host -> engine: random bytes, so
    NaNs of every kind, infinities and subnormal numbers among them; layers of two sizes."""
    random = torch.Generator().manual_seed(46)
    shapes = {"keys": (3 * BLOCKS * CHUNK, 2, 16, 64), "values": (3 * BLOCKS * CHUNK, 7, 12)}
    octets = {
        name: torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=random)
        for name, shape in shapes.items()
    }
    layers = {name: every.view(dtype).squeeze(-1) for name, every in octets.items()}
    floats = [layer.to(torch.float32) for layer in layers.values()]
    odd = sum(int((~torch.isfinite(layer)).sum()) for layer in floats)
    caches = KVCaches.from_named(layers, [list(layers)])

    def held(block: int) -> bytes:
        rows = slice(block * CHUNK, (block + 1) * CHUNK)
        return b"".join(every[rows].numpy().tobytes() for every in octets.values())

    size = caches.block_bytes(0, CHUNK)
    geometry = CacheGeometry((GroupGeometry(0, size, CHUNK, 32),), 0, 1)
    registry = TransferRegistry()
    assert tiered_kv_gpu.backend.register is not None
    tiered_kv_gpu.backend.register(registry)
    register_store_handlers(registry, kind.spec, "ours")
    store = kind.open(StoreArguments(tmp_path / "tier", block_bytes=(size,)))
    pool = HostBlockPool(BLOCKS, 2, geometry.slot_bytes)
    engine = TransferEngine(
        registry=registry,
        geometry=geometry,
        memory=pool,
        tiers={"tier": kind.spec},
        limits=EngineLimits(
            load_deadline=PATIENCE,
            store_deadline=PATIENCE,
            store_queue_bytes=2**30,
            write_behind_share=1.0,
        ),
        stats=StatsRecorder("rank 0"),
        caches=caches,
    )
    engine.attach("tier", store)
    names = tuple(keys(range(BLOCKS)))
    places = tuple(range(BLOCKS))
    slots = CpuSpec(tuple(SlotRef(i, 1) for i in range(BLOCKS)))
    below = kind.spec("tier", names)

    def blocks(first: int) -> GpuSpec:
        numbers = range(first * CHUNK, (first + BLOCKS) * CHUNK, CHUNK)
        return GpuSpec(tuple(GpuBlock(0, tuple(range(n, n + CHUNK))) for n in numbers))

    def run(job: StoreJob | LoadJob) -> JobResult:
        engine.submit(job)
        assert not engine.wait([job.id], PATIENCE)
        [result] = engine.finished()
        assert result.ok, result
        return result

    def load(number: int, source: LoadStoreSpec, first: int) -> None:
        parts = Parts((Part(source, places),))
        run(LoadJob(JobId(number), "r", names, parts, blocks(first)))

    originals = [held(block) for block in range(BLOCKS)]
    targets = StoreTargets(slots, (Part(below, places),))
    run(StoreJob(JobId(1), "r", names, blocks(0), targets))
    assert engine.drain(PATIENCE)
    assert all(store.contains(names))
    load(2, below, BLOCKS)
    load(3, slots, 2 * BLOCKS)
    assert [held(block) for block in range(3 * BLOCKS)] == originals * 3
    print(f"{kind.name}, {dtype}: {2 * BLOCKS} blocks of {size} bytes, {odd} values not finite")
    assert engine.close(PATIENCE)
    store.close()
    pool.close()
