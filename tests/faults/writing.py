"""One rank's transfer engine over real stores whose medium is slow, or stands still."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

import tiered_kv_gpu
from tests.faults.loading import PATIENCE, Kind
from tiered_kv.contracts import Place, ReadResult
from tiered_kv.engine import EngineLimits, TransferEngine, register_store_handlers
from tiered_kv.memory import HostBlockPool, KVCaches
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import (
    CpuSpec,
    GpuBlock,
    GpuSpec,
    JobResult,
    LoadJob,
    Part,
    Parts,
    SlotRef,
    StoreJob,
    StoreTargets,
)
from tiered_kv.stats import StatsRecorder, TierStats
from tiered_kv.testing.conformance.blocks import (
    StoreArguments,
    content,
    keys,
    put,
)
from tiered_kv.testing.faults import Faults, FaultyStore
from tiered_kv.values import BlockKey, BlockStatus, CacheGeometry, JobId

LENGTH = 65_536
"""Bytes of a block."""


class Medium:
    """A disk that does one thing after another, in the order in which it is asked, at a rate."""

    def __init__(self) -> None:
        self.rate: float | None = None
        """Bytes per second; None: as fast as it is."""
        self.log: list[str] = []
        """What began and ended, in order."""
        self.sizes: list[int] = []
        """Bytes of each write, in order of their turns."""
        self.most_queued = 0
        """Bytes of writes that were on their way at once."""
        self._queued = 0
        self._changed = threading.Condition()
        self._line: deque[object] = deque()
        self._held = False

    def note(self, entry: str) -> None:
        with self._changed:
            self.log.append(entry)
            self._changed.notify_all()

    def wait_for(self, entry: str, times: int = 1) -> None:
        with self._changed:
            seen = self._changed.wait_for(lambda: self.log.count(entry) >= times, PATIENCE)
        assert seen, f"{entry} was not seen {times} times: {self.log[-20:]}"

    def hold(self) -> None:
        """Whoever has its turn keeps it from now on, and does nothing."""
        with self._changed:
            self._held = True

    def go_on(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def wait_in_line(self, count: int) -> None:
        """Until so many wait for their turn, or have it."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._line) >= count, PATIENCE)

    @contextmanager
    def turn(self, what: str, size: int) -> Iterator[None]:
        me = object()
        is_write = what == "write"
        with self._changed:
            self._line.append(me)
            self._queued += size * is_write
            self.most_queued = max(self.most_queued, self._queued)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._line[0] is me, PATIENCE)
        self.note(f"{what} begins")
        if is_write:
            self.sizes.append(size)
        until = time.monotonic() + (size / self.rate if self.rate else 0.0)
        try:
            with self._changed:
                assert self._changed.wait_for(lambda: not self._held, PATIENCE)
            yield
            # A slow disk is slow by the clock: this wait is the fault, it synchronises nothing.
            threading.Event().wait(max(0.0, until - time.monotonic()))
        finally:
            with self._changed:
                self.log.append(f"{what} ends")
                self._queued -= size * is_write
                self._line.popleft()
                self._changed.notify_all()


class SlowStore(FaultyStore):
    """A real store on such a medium."""

    medium: Medium

    def write(self, places: Sequence[Place], memory: Sequence[memoryview]) -> None:
        with self.medium.turn("write", sum(view.nbytes for view in memory)):
            super().write(places, memory)

    def read(self, keys: Sequence[BlockKey], memory: Sequence[memoryview]) -> list[ReadResult]:
        with self.medium.turn("read", sum(view.nbytes for view in memory)):
            return super().read(keys, memory)


@dataclass
class WriteBench:
    """An engine with `slots` host slots over one store per name."""

    kinds: dict[str, Kind]
    path: Path
    slots: int = 1_200
    queue_bytes: int = 2**30
    share: float = 1.0
    group_blocks: int = 64
    yield_seconds: float = PATIENCE
    stores: dict[str, SlowStore] = field(default_factory=dict)

    def __post_init__(self) -> None:
        registry = TransferRegistry()
        assert tiered_kv_gpu.backend.register is not None
        tiered_kv_gpu.backend.register(registry)
        for kind in {kind.spec: kind for kind in self.kinds.values()}.values():
            register_store_handlers(registry, kind.spec, "ours")
        self.rows = torch.zeros((self.slots, LENGTH), dtype=torch.uint8)
        geometry: CacheGeometry | None = None
        for name, kind in self.kinds.items():
            arguments = StoreArguments(self.path / name, 2**28, block_bytes=(LENGTH,))
            geometry = arguments.geometry
            self.stores[name] = SlowStore(kind.open(arguments), Faults())
            self.stores[name].medium = Medium()
        assert geometry is not None
        self.pool = HostBlockPool(self.slots, 64, geometry.slot_bytes)
        self.pool.grow(lambda _: None)
        self.stats = StatsRecorder("rank 0")
        self.engine = TransferEngine(
            registry=registry,
            geometry=geometry,
            memory=self.pool,
            tiers={name: kind.spec for name, kind in self.kinds.items()},
            limits=EngineLimits(
                load_deadline=PATIENCE,
                store_deadline=PATIENCE,
                store_queue_bytes=self.queue_bytes,
                store_queue_seconds=1000.0,
                write_behind_share=self.share,
                group_bytes=self.group_blocks * LENGTH,
                yield_seconds=self.yield_seconds,
            ),
            stats=self.stats,
            caches=KVCaches.from_named({"layer": self.rows}, [["layer"]]),
        )
        for name, store in self.stores.items():
            self.engine.attach(name, store)
        self._jobs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for store in self.stores.values():
            store.medium.rate = None
            store.medium.go_on()
        clean = self.engine.close(PATIENCE)
        for store in self.stores.values():
            store.close()
        self.pool.close()
        if kind is None:
            assert clean

    def tier(self, name: str) -> TierStats:
        return self.stats.snapshot().tier(name)

    def put(self, name: str, numbers: Sequence[int]) -> None:
        """Store blocks without the engine."""
        put(self.stores[name], numbers, length=LENGTH)

    def next_job(self) -> JobId:
        self._jobs += 1
        return JobId(self._jobs)

    def store(self, numbers: Sequence[int], *tiers: str, generation: int = 1) -> JobResult:
        """Block n lies in engine block n mod `slots`, and goes to that slot; returns when the
        engine's blocks are free again."""
        for n in numbers:
            self.rows[n % self.slots] = _tensor(n)
        names = tuple(keys(numbers))
        first = CpuSpec(tuple(SlotRef(n % self.slots, generation) for n in numbers))
        places = tuple(range(len(numbers)))
        parts = tuple(Part(self.kinds[tier].spec(tier, names), places) for tier in tiers)
        source = GpuSpec(tuple(GpuBlock(0, (n % self.slots,)) for n in numbers))
        job = StoreJob(self.next_job(), "s", names, source, StoreTargets(first, parts))
        self.engine.submit(job)
        return self.result(job.id)

    def wait_written(self, name: str) -> None:
        """Until nothing waits to be written to a tier, or is being written."""
        pause = threading.Event()
        for _ in range(10_000):
            if not self.tier(name).write_behind_blocks:
                return
            pause.wait(PATIENCE / 10_000)  # the engine tells nobody when a write has ended
        raise AssertionError(f"{name} has not been written to in {PATIENCE} s")

    def begin_load(self, name: str, numbers: Sequence[int]) -> JobId:
        """Into engine blocks 0, 1, ..."""
        part = Part(self.kinds[name].spec(name, tuple(keys(numbers))), tuple(range(len(numbers))))
        blocks = GpuSpec(tuple(GpuBlock(0, (i,)) for i in range(len(numbers))))
        job = LoadJob(self.next_job(), "l", tuple(keys(numbers)), Parts((part,)), blocks)
        self.engine.submit(job)
        return job.id

    def result(self, job: JobId) -> JobResult:
        assert not self.engine.wait([job], PATIENCE)
        [result] = self.engine.finished()
        assert result.id == job
        return result

    def check_loaded(self, result: JobResult, numbers: Sequence[int]) -> None:
        assert set(result.statuses) == {BlockStatus.OK}
        for i, n in enumerate(numbers):
            assert self.rows[i].numpy().tobytes() == content(n, length=LENGTH)

    def dropped(self, name: str) -> Counter[str]:
        return Counter(self.tier(name).dropped)


def _tensor(number: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(content(number, length=LENGTH)), dtype=torch.uint8)
