"""The transfer engine over real stores: an nvme tier and an lmdb tier, with an engine's cache in
host memory that the real gpu handlers copy to and from."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch

import tiered_kv_gpu
from tests.stores.lmdb_parts import open_lmdb
from tests.stores.nvme_parts import open_nvme
from tiered_kv.contracts import BlockStore, HandlerContext, Place, TransferHandler
from tiered_kv.engine import EngineLimits, TransferEngine, register_store_handlers
from tiered_kv.errors import TierError
from tiered_kv.memory import HostBlockPool, KVCaches
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import (
    CpuSpec,
    GpuBlock,
    GpuSpec,
    HopResult,
    JobResult,
    LoadJob,
    LoadStoreSpec,
    Part,
    Parts,
    SlotRef,
    StoreJob,
    StoreTargets,
    TransferSpec,
)
from tiered_kv.stats import StatsRecorder
from tiered_kv.testing.conformance.blocks import StoreArguments
from tiered_kv.values import BlockKey, BlockStatus, JobId
from tiered_kv_lmdb import LmdbSpec
from tiered_kv_nvme import NvmeSpec

PATIENCE = 30.0
ENGINE_BLOCKS = 96
BLOCK_BYTES = 65_536
OK = BlockStatus.OK


def key(number: int) -> BlockKey:
    return BlockKey(b"transfer-%06d" % number)


def content(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class Span:
    """One handler call: where it stands in the order of all begins and ends."""

    hop: str
    first: BlockKey
    begin: int
    end: int


class Trace:
    """What handler calls began and ended, in order; a test can hold the calls of a hop."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._events = 0
        self._begun: dict[tuple[str, BlockKey], threading.Event] = {}
        self._held: dict[tuple[str, BlockKey], tuple[str, BlockKey]] = {}
        self._lock = threading.Lock()

    def hold(self, hop: str, number: int, until: tuple[str, int]) -> None:
        """Keep the call of `hop` whose first block is `number` from its end until the call that is
        named by `until` has begun."""
        self._held[hop, key(number)] = (until[0], key(until[1]))

    def begin(self, hop: str, first: BlockKey) -> int:
        with self._lock:
            self._events += 1
            self._event(hop, first).set()
            return self._events

    def begun(self, hop: str, number: int) -> threading.Event:
        """Set once the call of `hop` whose first block is `number` has begun."""
        with self._lock:
            return self._event(hop, key(number))

    def wait(self, hop: str, first: BlockKey) -> None:
        """Called in the call's own thread, when its work is done."""
        until = self._held.get((hop, first))
        if until is not None:
            with self._lock:
                event = self._event(*until)
            assert event.wait(PATIENCE), f"{hop} waited in vain for {until}"

    def end(self, hop: str, first: BlockKey, begin: int) -> None:
        with self._lock:
            self._events += 1
            self.spans.append(Span(hop, first, begin, self._events))

    def _event(self, hop: str, first: BlockKey) -> threading.Event:
        return self._begun.setdefault((hop, first), threading.Event())


class Traced:
    """Wraps a handler."""

    def __init__(self, inner: TransferHandler[Any, Any], trace: Trace, executor: Any) -> None:
        self._inner = inner
        self._trace = trace
        self._executor = executor

    async def transfer(self, spec: TransferSpec[Any, Any]) -> HopResult:
        hop, first = f"{spec.src.tier}->{spec.dst.tier}", spec.keys[0]
        begin = self._trace.begin(hop, first)
        result = await self._inner.transfer(spec)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._trace.wait, hop, first)
        self._trace.end(hop, first, begin)
        return result

    def modes(self) -> Mapping[str, str]:
        return self._inner.modes()

    def close(self) -> None:
        self._inner.close()


class NoWrites:
    """A store that loses its disk."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store

    def write(self, places: Sequence[Place], memory: Sequence[memoryview]) -> None:
        raise TierError("the disk is gone", tier="ssd")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@dataclass
class Rig:
    """Tiers "ssd" (nvme) and "pins" (lmdb), both real, host slots, and an engine of one group."""

    path: Path
    group_blocks: int = 4
    staging_slots: int = 32
    tier_slots: int = 64
    ssd_writes: bool = True
    threads: int = 2
    trace: Trace = field(default_factory=Trace)

    def __post_init__(self) -> None:
        registry = TransferRegistry()
        assert tiered_kv_gpu.backend.register is not None
        tiered_kv_gpu.backend.register(registry)
        register_store_handlers(registry, NvmeSpec, "nvme")
        register_store_handlers(registry, LmdbSpec, "lmdb")
        self.rows = torch.zeros((ENGINE_BLOCKS, BLOCK_BYTES), dtype=torch.int8)
        ssd = StoreArguments(self.path / "ssd", capacity=64 * 2**20)
        pins = StoreArguments(self.path / "pins", capacity=32 * 2**20)
        self.ssd, self.pins = open_nvme(ssd), open_lmdb(pins)
        geometry = ssd.geometry
        self.pool = HostBlockPool(self.tier_slots, self.staging_slots, geometry.slot_bytes)
        self.stats = StatsRecorder("rank 0")
        self.engine = TransferEngine(
            registry=self._traced(registry),
            geometry=type(geometry)(geometry.groups[:1], 0, 1),
            memory=self.pool,
            tiers={"ssd": NvmeSpec, "pins": LmdbSpec},
            limits=EngineLimits(
                load_deadline=PATIENCE,
                store_deadline=PATIENCE,
                store_queue_bytes=2**30,
                write_behind_share=1.0,
                group_bytes=self.group_blocks * geometry.slot_bytes,
                behind_bytes=self.group_blocks * geometry.slot_bytes,
                threads_per_tier=self.threads,
            ),
            stats=self.stats,
            caches=KVCaches.from_named({"layer": self.rows}, [["layer"]]),
        )
        lost = cast(BlockStore, NoWrites(self.ssd))
        self.engine.attach("ssd", self.ssd if self.ssd_writes else lost)
        self.engine.attach("pins", self.pins)

    def _traced(self, registry: TransferRegistry) -> TransferRegistry:
        wrapped = TransferRegistry()
        for pair in registry:
            factory = pair.factory

            def make(context: HandlerContext, factory: Any = factory) -> TransferHandler[Any, Any]:
                return Traced(factory(context), self.trace, context.executor)

            wrapped.register(pair.src, pair.dst, make, provider=pair.provider)
        return wrapped

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        clean = self.engine.close(PATIENCE)
        if kind is None:
            assert clean
            assert (self.pool.leased, self.pool.stray_returns) == (0, 0)
        for store in (self.ssd, self.pins):
            store.close()
        self.pool.close()

    def fill(self, numbers: Sequence[int]) -> None:
        """Engine block i holds block number i."""
        for number in numbers:
            self.rows[number] = torch.frombuffer(bytearray(content(number)), dtype=torch.int8)

    def held(self, number: int) -> bytes:
        return self.rows[number].numpy().tobytes()

    def run(self, job: LoadJob | StoreJob) -> JobResult:
        self.engine.submit(job)
        assert not self.engine.wait([job.id], PATIENCE)
        [result] = self.engine.finished()
        return result

    def store(self, job: int, numbers: Sequence[int], *tiers: str, slots: bool = True) -> JobResult:
        self.fill(numbers)
        keys = tuple(key(i) for i in numbers)
        first = CpuSpec(tuple(SlotRef(i, job) for i in range(len(numbers)))) if slots else None
        places = tuple(range(len(numbers)))
        parts = tuple(Part(stored(tier, numbers), places) for tier in tiers)
        blocks = GpuSpec(tuple(GpuBlock(0, (i,)) for i in numbers))
        result = self.run(StoreJob(JobId(job), "r", keys, blocks, StoreTargets(first, parts)))
        assert self.engine.drain(PATIENCE)  # the next store uses the same slots
        return result

    def load(self, job: int, *sources: tuple[LoadStoreSpec, Sequence[int]]) -> JobResult:
        """Block i comes from the source that names it, and goes to engine block i."""
        return self.run(self.load_job(job, *sources))

    def load_job(self, job: int, *sources: tuple[LoadStoreSpec, Sequence[int]]) -> LoadJob:
        """What `load` runs."""
        numbers = sorted(number for _, of_part in sources for number in of_part)
        place = {number: i for i, number in enumerate(numbers)}
        parts = tuple(Part(spec, tuple(place[i] for i in of_part)) for spec, of_part in sources)
        keys = tuple(key(i) for i in numbers)
        blocks = GpuSpec(tuple(GpuBlock(0, (i,)) for i in numbers))
        return LoadJob(JobId(job), "r", keys, Parts(parts), blocks)

    def bytes_moved(self) -> dict[str, int]:
        """By hop."""
        hops = self.stats.snapshot().hops()
        names = {"cpu->ssd", "cpu->pins", "ssd->cpu", "pins->cpu", "gpu->cpu", "cpu->gpu"}
        moved = {_label(*hop): stats.bytes for hop, stats in hops.items() if stats.bytes}
        assert set(moved) <= names
        return moved


def _label(src: str, dst: str, tier: str) -> str:
    """The tier's name in place of its medium's."""
    return "->".join(side if side in {"cpu", "gpu"} else tier for side in (src, dst))


def stored(tier: str, numbers: Sequence[int]) -> LoadStoreSpec:
    spec = {"ssd": NvmeSpec, "pins": LmdbSpec}[tier]
    return spec(tier, tuple(key(i) for i in numbers))


def test_a_store_reaches_every_destination_and_a_load_comes_from_all_of_them(
    tmp_path: Path,
) -> None:
    with Rig(tmp_path) as rig:
        host, ssd, pins = list(range(20)), list(range(20, 50)), list(range(50, 57))
        for job, (numbers, tiers) in enumerate(
            [(ssd, ["ssd"]), (pins, ["ssd", "pins"]), (host, [])], start=1
        ):
            result = rig.store(job, numbers, *tiers)
            assert result.ok
            assert result.copied_bytes == len(numbers) * BLOCK_BYTES
        wanted = [*host, *ssd, *pins]
        assert rig.bytes_moved() == {
            "gpu->cpu": 57 * BLOCK_BYTES,
            "cpu->ssd": 37 * BLOCK_BYTES,
            "cpu->pins": 7 * BLOCK_BYTES,
        }
        assert rig.ssd.contains([key(i) for i in (*ssd, *pins)]) == [True] * 37
        assert rig.pins.contains([key(i) for i in (*ssd, *pins)]) == [False] * 30 + [True] * 7

        rig.rows.fill_(-1)
        slots = CpuSpec(tuple(SlotRef(i, 3) for i in range(len(host))))
        result = rig.load(9, (slots, host), (stored("ssd", ssd), ssd), (stored("pins", pins), pins))
        assert result.ok
        assert result.copied_bytes == 57 * BLOCK_BYTES
        assert [i for i in wanted if rig.held(i) != content(i)] == []
        moved = rig.bytes_moved()
        print("bytes by hop:", moved)
        assert moved["ssd->cpu"] == 30 * BLOCK_BYTES
        assert moved["pins->cpu"] == 7 * BLOCK_BYTES
        assert moved["cpu->gpu"] == 57 * BLOCK_BYTES


def test_a_part_that_is_gone_leaves_the_others_theirs(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        assert rig.store(1, range(8), "ssd").ok
        assert rig.engine.drain(PATIENCE)  # the second store takes the same slots
        assert rig.store(2, range(8, 16), "pins").ok
        assert rig.pins.delete([key(9)]) == 1
        rig.rows.fill_(-1)
        result = rig.load(
            3, (stored("ssd", range(8)), range(8)), (stored("pins", range(8, 16)), range(8, 16))
        )
        missing = [i for i, s in enumerate(result.statuses) if s is BlockStatus.MISSING]
        assert missing == [9]
        assert [i for i in range(16) if rig.held(i) == content(i)] == [
            i for i in range(16) if i != 9
        ]


def test_a_destination_that_fails_does_no_harm_to_the_others(tmp_path: Path) -> None:
    with Rig(tmp_path, ssd_writes=False) as rig:
        result = rig.store(1, range(12), "ssd", "pins")
        assert result.ok  # the host tier has it
        assert len(rig.engine.released()) == 12
        assert rig.ssd.contains([key(i) for i in range(12)]) == [False] * 12
        assert rig.pins.contains([key(i) for i in range(12)]) == [True] * 12
        snapshot = rig.stats.snapshot()
        failed = snapshot.hop("cpu", "nvme", "ssd").failures["tier_error"]
        dropped = snapshot.tier("ssd").dropped
        print(f"ssd: {failed} blocks failed, {dict(dropped)} dropped; pins: {rig.bytes_moved()}")
        assert failed + dropped.get("unhealthy", 0) == 12
        assert snapshot.hop("cpu", "lmdb", "pins").bytes == 12 * BLOCK_BYTES
        assert snapshot.tier("pins").dropped == {}
        rig.rows.fill_(-1)
        assert rig.load(2, (stored("pins", range(12)), range(12))).ok
        assert all(rig.held(i) == content(i) for i in range(12))
        # What failed left no trace, and no room taken.
        assert rig.ssd.stat().blocks == 0


def test_without_a_cpu_tier_staging_serves_both_stores(tmp_path: Path) -> None:
    with Rig(tmp_path, tier_slots=0) as rig:
        assert rig.store(1, range(12), "ssd", "pins", slots=False).ok
        assert rig.bytes_moved() == {
            "gpu->cpu": 12 * BLOCK_BYTES,
            "cpu->ssd": 12 * BLOCK_BYTES,
            "cpu->pins": 12 * BLOCK_BYTES,
        }
        rig.rows.fill_(-1)
        both = (stored("ssd", range(6)), range(6)), (stored("pins", range(6, 12)), range(6, 12))
        assert rig.load(2, *both).ok
        assert all(rig.held(i) == content(i) for i in range(12))


def test_reading_the_next_group_begins_before_copying_the_one_before_has_ended(
    tmp_path: Path,
) -> None:
    groups = 8
    with Rig(tmp_path, group_blocks=4) as rig:
        numbers = range(4 * groups)
        assert rig.store(1, numbers, "ssd").ok
        rig.rows.fill_(-1)
        rig.trace.spans.clear()
        for group in range(groups - 1):  # a copy ends only when the next group is being read
            rig.trace.hold("cpu->gpu", 4 * group, until=("ssd->cpu", 4 * (group + 1)))
        assert rig.load(2, (stored("ssd", numbers), numbers)).ok
        assert all(rig.held(i) == content(i) for i in numbers)
        spans = {(span.hop, span.first): span for span in rig.trace.spans}
        reads = [spans["ssd->cpu", key(4 * group)] for group in range(groups)]
        copies = [spans["cpu->gpu", key(4 * group)] for group in range(groups)]
        overlapping = [
            group for group in range(groups - 1) if reads[group + 1].begin < copies[group].end
        ]
        for read, copy in zip(reads, copies, strict=True):
            print(f"{read.first.decode()}: read {read.begin}-{read.end}, ", end="")
            print(f"copied {copy.begin}-{copy.end}")
            assert read.end < copy.begin
        print(f"{len(overlapping)} of {groups - 1} copies overlap the reading of the next group")
        assert overlapping == list(range(groups - 1))


def _most_at_once(spans: Sequence[Span]) -> int:
    running = most = 0
    for _, change in sorted([(s.begin, 1) for s in spans] + [(s.end, -1) for s in spans]):
        running += change
        most = max(most, running)
    return most


def test_one_big_load_uses_all_of_the_depth(tmp_path: Path) -> None:
    threads, groups = 4, 12
    numbers = range(4 * groups)
    with Rig(tmp_path, threads=threads, staging_slots=96) as rig:
        assert rig.store(1, numbers, "ssd").ok
        rig.trace.spans.clear()
        for group in range(groups - threads):  # a read ends only beside `threads - 1` others
            rig.trace.hold("ssd->cpu", 4 * group, until=("ssd->cpu", 4 * (group + threads - 1)))
        assert rig.load(2, (stored("ssd", numbers), numbers)).ok
        reads = [span for span in rig.trace.spans if span.hop == "ssd->cpu"]
        print(f"{len(reads)} reads of one load, at most {_most_at_once(reads)} at once")
        assert len(reads) == groups
        assert _most_at_once(reads) == threads


def test_a_small_load_is_not_behind_all_of_a_big_one(tmp_path: Path) -> None:
    threads, groups = 2, 20
    big, small = range(4 * groups), range(4 * groups, 4 * groups + 4)
    with Rig(tmp_path, threads=threads, staging_slots=96, tier_slots=96) as rig:
        assert rig.store(1, [*big, *small], "ssd").ok
        rig.rows.fill_(-1)
        rig.trace.spans.clear()
        for group in range(threads):  # no read of the big load ends before the small one is there
            rig.trace.hold("ssd->cpu", 4 * group, until=("small load", 0))
        rig.engine.submit(rig.load_job(2, (stored("ssd", big), big)))
        for group in range(threads):
            assert rig.trace.begun("ssd->cpu", 4 * group).wait(PATIENCE)
        job = rig.load_job(3, (stored("ssd", small), range(4 * groups, 4 * groups + 4)))
        rig.engine.submit(job)
        rig.trace.begun("small load", 0).set()
        assert not rig.engine.wait([JobId(2), JobId(3)], PATIENCE)
        assert all(result.ok for result in rig.engine.finished())
        assert all(rig.held(i) == content(i) for i in (*big, *small))
        reads = sorted(
            (span for span in rig.trace.spans if span.hop == "ssd->cpu"), key=lambda one: one.begin
        )
        ahead = [span.first for span in reads].index(key(small[0]))
        print(f"{ahead} of {groups} groups of the big load were read before the small one's")
        assert len(reads) == groups + 1
        # Those that were read when it came, and those that stood in line.
        assert ahead <= 2 * (2 * threads + 1) < groups
