"""One rank's transfer engine over one real store: what reaches the engine's cache, and what not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

import tiered_kv_gpu
from tests.stores.lmdb_parts import open_into_map, open_lmdb
from tests.stores.nvme_parts import open_nvme
from tiered_kv.contracts import BlockStore, VerifyMode
from tiered_kv.engine import EngineLimits, TransferEngine, register_store_handlers
from tiered_kv.memory import HostBlockPool, KVCaches
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import GpuBlock, GpuSpec, KeySpec, LoadJob, Part, Parts
from tiered_kv.stats import StatsRecorder
from tiered_kv.testing.conformance.blocks import StoreArguments, content, key, keys, put
from tiered_kv.testing.conformance.children import Opener
from tiered_kv.values import BlockStatus, CacheGeometry, JobId
from tiered_kv_lmdb import LmdbSpec
from tiered_kv_nvme import NvmeSpec

__all__ = ["KINDS", "LENGTH", "POISON", "Bench", "Kind", "Place", "found_in_files"]

PATIENCE = 60.0
LENGTH = 8_192
"""Bytes of a block."""
POISON = 0x5A
_GROUP = 100


@dataclass(frozen=True, slots=True)
class Kind:
    """A store of ours, as it is opened here."""

    name: str
    open: Opener
    spec: type[KeySpec]


KINDS = [
    Kind("nvme", open_nvme, NvmeSpec),
    Kind("lmdb", open_lmdb, LmdbSpec),
    Kind("lmdb-map", open_into_map, LmdbSpec),
]


@dataclass
class Bench:
    """The store, opened, and an engine whose blocks are full of poison before every load."""

    kind: Kind
    path: Path
    length: int = LENGTH
    capacity: int = 64 * 2**20
    verify: Mapping[str, VerifyMode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arguments = StoreArguments(self.path, self.capacity, block_bytes=(self.length,))
        registry = TransferRegistry()
        assert tiered_kv_gpu.backend.register is not None
        tiered_kv_gpu.backend.register(registry)
        register_store_handlers(registry, self.kind.spec, "ours")
        self.rows = torch.empty((_GROUP, self.length), dtype=torch.uint8)
        self.store: BlockStore = self.kind.open(self.arguments)
        geometry: CacheGeometry = self.arguments.geometry
        self.pool = HostBlockPool(1, 32, geometry.slot_bytes)
        self.stats = StatsRecorder("rank 0")
        self.engine = TransferEngine(
            registry=registry,
            geometry=geometry,
            memory=self.pool,
            tiers={"tier": self.kind.spec},
            limits=EngineLimits(
                load_deadline=PATIENCE, store_deadline=PATIENCE, store_queue_bytes=2**30
            ),
            stats=self.stats,
            caches=KVCaches.from_named({"layer": self.rows}, [["layer"]]),
            verify=self.verify,
        )
        self.engine.attach("tier", self.store)
        self._jobs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self.engine.close(PATIENCE)
        self.store.close()
        self.pool.close()

    def put(self, numbers: Sequence[int]) -> list[int]:
        """Store blocks as they are told by their numbers; those that were not there."""
        new: list[int] = []
        for start in range(0, len(numbers), _GROUP):
            new += put(self.store, numbers[start : start + _GROUP], length=self.length)
        return new

    def load(self, numbers: Sequence[int]) -> dict[int, BlockStatus]:
        """Load blocks into the engine's cache; what became of each.

        Raises:
            AssertionError: the engine's cache holds anything but the right bytes of those that are
                OK, and poison in place of the others.
        """
        found: dict[int, BlockStatus] = {}
        for start in range(0, len(numbers), _GROUP):
            found |= self._load(numbers[start : start + _GROUP])
        return found

    def _load(self, numbers: Sequence[int]) -> dict[int, BlockStatus]:
        self.rows.fill_(POISON)
        self._jobs += 1
        part = Part(self.kind.spec("tier", tuple(keys(numbers))), tuple(range(len(numbers))))
        blocks = GpuSpec(tuple(GpuBlock(0, (i,)) for i in range(len(numbers))))
        job = LoadJob(JobId(self._jobs), "r", tuple(keys(numbers)), Parts((part,)), blocks)
        self.engine.submit(job)
        assert not self.engine.wait([job.id], PATIENCE)
        [result] = self.engine.finished()
        poison = bytes([POISON]) * self.length
        for i, (number, status) in enumerate(zip(numbers, result.statuses, strict=True)):
            right = content(number, length=self.length) if status is BlockStatus.OK else poison
            assert self.rows[i].numpy().tobytes() == right, f"block {number}, which is {status}"
        return dict(zip(numbers, result.statuses, strict=True))

    def there(self, numbers: Sequence[int]) -> list[int]:
        """Which of these blocks the store holds."""
        seen = self.store.contains([key(number) for number in numbers])
        return [number for number, is_there in zip(numbers, seen, strict=True) if is_there]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block lies on the disk."""

    file: Path
    start: int
    """Where its first byte is, or would be."""
    first: int
    """The bytes before this one lie elsewhere: in its row."""


def found_in_files(path: Path, numbers: Sequence[int], length: int) -> dict[int, Place]:
    """Where each block lies. Our stores begin it at a page of the file, or have its first 16 bytes
    in the row, and the others where they would be then."""
    found: dict[int, Place] = {}
    for first in (0, 16):
        bodies = {content(number, length=length)[first:]: number for number in numbers}
        heads = {body[:32] for body in bodies}
        for file in sorted(path.rglob("*")):
            data = file.read_bytes() if file.is_file() else b""
            for page in range(0, len(data), 4096):
                if data[page + first : page + first + 32] in heads:
                    number = bodies.get(data[page + first : page + length])
                    if number is not None:
                        found.setdefault(number, Place(file, page, first))
    return found
