"""One rank with engine caches, a pool and both gpu handlers; used by the tests of the handlers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.unit.device_stand_in import StandIn
from tiered_kv.contracts import HandlerContext, HostMemory, TransferHandler
from tiered_kv.memory import GroupLayout, HostBlockPool, KVCaches
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import CpuSpec, GpuBlock, GpuSpec, HopResult, SlotRef, TransferSpec
from tiered_kv.threads import DaemonExecutor
from tiered_kv.values import BlockKey, BlockStatus, CacheGeometry, ChecksumKind, GroupGeometry
from tiered_kv_gpu import backend
from tiered_kv_gpu.copies import Copies, DeviceCopies, HostCopies

OK, MISSING, CORRUPT = BlockStatus.OK, BlockStatus.MISSING, BlockStatus.CORRUPT
CANCELLED = BlockStatus.CANCELLED

Kind = Callable[[KVCaches, Mapping[int, GroupLayout], HostMemory], Copies]
KINDS: dict[str, Kind] = {
    "host": lambda caches, layouts, _: HostCopies(caches, layouts),
    "device": lambda caches, layouts, memory: DeviceCopies(caches, layouts, memory, StandIn()),
}


def random_bytes(shape: Sequence[int], seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def byte_tensor(rows: npt.NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(rows)


def geometry_of(caches: KVCaches, chunks: Sequence[int], rank: int = 0) -> CacheGeometry:
    """Groups are numbered from 10 on."""
    groups = tuple(
        GroupGeometry(10 + i, caches.block_bytes(i, chunk), chunk, chunk * 16)
        for i, chunk in enumerate(chunks)
    )
    return CacheGeometry(groups, rank, 2)


class Rig:
    """One rank: caches, pool and both handlers."""

    def __init__(
        self,
        caches: KVCaches,
        chunks: Sequence[int],
        monkeypatch: pytest.MonkeyPatch | None = None,
        *,
        kind: str = "host",
        slots: int = 8,
        rank: int = 0,
        pool: HostBlockPool | None = None,
        capture: Callable[[], ChecksumKind] = lambda: ChecksumKind.XXH3,
    ) -> None:
        self.caches = caches
        self.geometry = geometry_of(caches, chunks, rank)
        self.pool = pool or HostBlockPool(slots, 0, self.geometry.slot_bytes)
        self.executor = DaemonExecutor(1, "test-gpu")
        context = HandlerContext(
            self.geometry, self.pool, self.executor, "cpu", caches=caches, capture=capture
        )
        if monkeypatch is not None:
            monkeypatch.setattr("tiered_kv_gpu.handlers.copies_for", KINDS[kind])
        registry = TransferRegistry()
        assert backend.register is not None
        backend.register(registry)
        self.store_handler: TransferHandler[GpuSpec, CpuSpec] = registry.handler(
            GpuSpec, CpuSpec, context
        )
        self.load_handler: TransferHandler[CpuSpec, GpuSpec] = registry.handler(
            CpuSpec, GpuSpec, context
        )

    def store(
        self, keys: Sequence[BlockKey], blocks: Sequence[GpuBlock], slots: Sequence[SlotRef]
    ) -> HopResult:
        spec = TransferSpec(GpuSpec(tuple(blocks)), CpuSpec(tuple(slots)), tuple(keys))
        return asyncio.run(self.store_handler.transfer(spec))

    def load(
        self, keys: Sequence[BlockKey], slots: Sequence[SlotRef], blocks: Sequence[GpuBlock]
    ) -> HopResult:
        spec = TransferSpec(CpuSpec(tuple(slots)), GpuSpec(tuple(blocks)), tuple(keys))
        return asyncio.run(self.load_handler.transfer(spec))

    def cache_bytes(self) -> list[npt.NDArray[np.uint8]]:
        return [t.view(torch.uint8).numpy().copy() for t in self.caches.tensors]

    def expected(self, group: int, block_ids: Sequence[int]) -> bytes:
        """The documented layout, written out page by page."""
        return b"".join(
            self.caches.tensors[ref.tensor_index][i, : ref.page_bytes]
            .contiguous()
            .view(torch.uint8)
            .numpy()
            .tobytes()
            for i in block_ids
            for ref in self.caches.groups[group]
        )

    def close(self) -> None:
        for _ in range(2):
            self.store_handler.close()
            self.load_handler.close()
        self.executor.shutdown()


def keys_of(count: int) -> list[BlockKey]:
    return [BlockKey(b"key %d" % i) for i in range(count)]


def slots_of(count: int, generation: int = 1) -> list[SlotRef]:
    return [SlotRef(i, generation) for i in range(count)]


def simple(num_blocks: int = 16, page: int = 96, layers: int = 3) -> KVCaches:
    caches = {f"layer.{i}": byte_tensor(random_bytes((num_blocks, page), i)) for i in range(layers)}
    return KVCaches.from_named(caches, [list(caches)])


def strided(num_blocks: int = 16) -> KVCaches:
    """Two groups: layers packed in one tensor, and tensors of their own with padded rows."""
    packed = byte_tensor(random_bytes((num_blocks, 3, 64), 1))
    padded = byte_tensor(random_bytes((num_blocks, 100), 2))[:, 12:60]
    own = byte_tensor(random_bytes((num_blocks, 33), 3))
    named = {f"packed.{i}": packed[:, i] for i in range(3)} | {"padded": padded, "own": own}
    return KVCaches.from_named(named, [["packed.0", "packed.2"], ["padded", "own", "packed.1"]])


class BothWays:
    """Base of test classes whose tests run once per way of copying."""

    @pytest.fixture(params=sorted(KINDS))
    def kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def make(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
        """Makes rigs that are closed after the test."""
        with contextlib.ExitStack() as stack:

            def build(caches: KVCaches, chunks: Sequence[int], **options: Any) -> Rig:
                rig = Rig(caches, chunks, monkeypatch, kind=kind, **options)
                stack.callback(rig.close)
                return rig

            yield build
