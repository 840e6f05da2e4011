"""Stand-ins for stores and for the engine's cache, whose every step a test can hold up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import (
    ChangeBatch,
    HandlerContext,
    NewBlock,
    Place,
    ReadResult,
    StoreStat,
)
from tiered_kv.errors import NoSpace
from tiered_kv.specs import (
    CpuSpec,
    GpuBlock,
    GpuSpec,
    HopResult,
    KeySpec,
    LoadStoreSpec,
    TransferSpec,
)
from tiered_kv.values import (
    BlockKey,
    BlockStatus,
    Medium,
)

BLOCK_BYTES = 4000
"""Not a whole page, so that lengths matter."""

SLOT_BYTES = 4096
PATIENCE = 30.0
"""Seconds after which a test that waits for an event has failed."""


@dataclass(frozen=True, slots=True)
class FastSpec(KeySpec):
    """Blocks in a store of the medium "fast"."""

    medium: ClassVar[Medium] = Medium("fast")


@dataclass(frozen=True, slots=True)
class SlowSpec(KeySpec):
    """Blocks in a store of the medium "slow"."""

    medium: ClassVar[Medium] = Medium("slow")


def key(number: int) -> BlockKey:
    return BlockKey(b"key-%06d" % number)


def content(number: int) -> bytes:
    """Bytes that only block `number` has."""
    return (b"%08d" % number) * (BLOCK_BYTES // 8)


class Journal:
    """What happened, in order; tests wait for entries."""

    def __init__(self) -> None:
        self._entries: list[str] = []
        self._changed = threading.Condition()

    def note(self, entry: str) -> None:
        with self._changed:
            self._entries.append(entry)
            self._changed.notify_all()

    def entries(self) -> list[str]:
        with self._changed:
            return [*self._entries]

    def count(self, entry: str) -> int:
        return self.entries().count(entry)

    def wait_for(self, entry: str, times: int = 1) -> None:
        with self._changed:
            seen = self._changed.wait_for(
                lambda: self._entries.count(entry) >= times, timeout=PATIENCE
            )
        assert seen, f"{entry} was not seen {times} times: {self._entries}"


class Valve:
    """A point that calls pass; shut, it holds them until it is opened."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal = journal
        self.name = name
        self._open = threading.Event()
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def pass_through(self, detail: str = "") -> None:
        self._journal.note(f"{self.name} begins{detail}")
        assert self._open.wait(PATIENCE), f"{self.name} was never opened"
        self._journal.note(f"{self.name} goes on{detail}")


class MemoryStore:
    """A `BlockStore` in a dict."""

    def __init__(self, name: str, journal: Journal, *, capacity: int = 1_000_000) -> None:
        self.rows: dict[BlockKey, tuple[bytes, BlockChecksum]] = {}
        self.reading = Valve(journal, f"{name}.read")
        self.writing = Valve(journal, f"{name}.write")
        self.publishing = Valve(journal, f"{name}.publish")
        self.discarded: list[BlockKey] = []
        self.touched: list[BlockKey] = []
        self.reserved = 0
        """Places that were neither published nor abandoned."""
        self.trouble: Callable[[str, Sequence[BlockKey]], None] = lambda method, keys: None
        """Called at the begin of each method; may raise."""
        self.answers: dict[BlockKey, BlockStatus] = {}
        """What `read` says of these keys instead."""
        self._capacity = capacity
        self._written: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def fill(self, numbers: Iterable[int], rank: int = 0) -> None:
        for number in numbers:
            data = content(number)
            checksum = BlockChecksum.capture(key(number), rank, memoryview(data))
            self.rows[key(number)] = (data, checksum)

    def spoil(self, number: int) -> None:
        """Flip a bit of a stored block."""
        data, checksum = self.rows[key(number)]
        self.rows[key(number)] = (bytes([data[0] ^ 1]) + data[1:], checksum)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [k in self.rows for k in keys]

    def reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        self.trouble("reserve", [block.key for block in blocks])
        with self._lock:
            new = [block for block in blocks if block.key not in self.rows]
            if len(self.rows) + self.reserved + len(new) > self._capacity:
                raise NoSpace(f"the store is full: {self._capacity} blocks")
            self.reserved += len(new)
            return [None if block.key in self.rows else Place(block, object()) for block in blocks]

    def write(self, places: Sequence[Place], memory: Sequence[memoryview]) -> None:
        self.trouble("write", [place.block.key for place in places])
        if not places:
            return
        self.writing.pass_through()
        for place, view in zip(places, memory, strict=True):
            assert view.nbytes == place.block.checksum.length
            self._written[id(place.token)] = bytes(view)

    def publish(self, places: Sequence[Place]) -> None:
        self.trouble("publish", [place.block.key for place in places])
        if not places:
            return
        self.publishing.pass_through()
        with self._lock:
            for place in places:
                data = self._written.pop(id(place.token))
                self.rows[place.block.key] = (data, place.block.checksum)
                self.reserved -= 1

    def abandon(self, places: Sequence[Place]) -> None:
        with self._lock:
            for place in places:
                self._written.pop(id(place.token), None)
                self.reserved -= 1

    def read(self, keys: Sequence[BlockKey], memory: Sequence[memoryview]) -> list[ReadResult]:
        self.trouble("read", keys)
        self.reading.pass_through(f" {keys[0].decode()}" if keys else "")
        results = []
        for k, view in zip(keys, memory, strict=True):
            row = self.rows.get(k)
            if k in self.answers:
                results.append(ReadResult(self.answers[k]))
            elif row is None:
                results.append(ReadResult(BlockStatus.MISSING))
            else:
                data, checksum = row
                view[: len(data)] = data
                results.append(ReadResult(BlockStatus.OK, checksum))
        return results

    def discard(self, blocks: Sequence[NewBlock]) -> int:
        self.trouble("discard", [block.key for block in blocks])
        self.discarded.extend(block.key for block in blocks)
        return self.delete([block.key for block in blocks])

    def delete(self, keys: Sequence[BlockKey]) -> int:
        return sum(self.rows.pop(k, None) is not None for k in keys)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self.trouble("touch", keys)
        self.touched.extend(keys)

    def scan(self) -> Iterator[BlockKey]:
        return iter([*self.rows])

    def changes(self, cursor: int | None) -> ChangeBatch:
        return ChangeBatch(cursor or 0, ())

    def stat(self) -> StoreStat:
        return StoreStat(len(self.rows), 0, 0, 0, {"io": "memory"})

    def close(self) -> None:
        """Nothing to let go of."""


class EngineCache:
    """The engine's KV cache: one block of bytes per engine block id."""

    def __init__(self, journal: Journal) -> None:
        self.blocks: dict[int, bytes] = {}
        self.gathering = Valve(journal, "gpu->cpu")
        self.scattering = Valve(journal, "cpu->gpu")
        self.direct = Valve(journal, "fast->gpu")
        self.landing = Valve(journal, "fast->gpu.copy")
        self.taking = Valve(journal, "gpu->fast")
        self.leaving = Valve(journal, "gpu->fast.publish")
        self.trouble: Callable[[str], None] = lambda hop: None
        """Called at the begin of each hop; may raise."""
        self.answer: Callable[[], HopResult] | None = None
        """What cpu -> gpu answers instead of copying."""
        self.direct_answers: dict[BlockKey, BlockStatus] = {}
        """What fast -> gpu says of these keys instead."""
        self.committed: list[bool] = []
        self.unsupported: dict[str, Exception] = {}
        """What making the handler of a hop raises."""
        self.contexts: dict[str, HandlerContext] = {}
        """What the handler of a hop was made with."""
        self.fences: list[tuple[str, object | None]] = []
        """Which hop was to be ordered after what."""
        self.closed = 0

    @property
    def valves(self) -> tuple[Valve, ...]:
        return (
            *(self.gathering, self.scattering),
            *(self.direct, self.landing, self.taking, self.leaving),
        )


class _CacheHandler:
    label: ClassVar[str]

    def __init__(self, context: HandlerContext) -> None:
        self._cache = cast(EngineCache, context.caches)
        self._cache.contexts[self.label] = context
        if self.label in self._cache.unsupported:
            raise self._cache.unsupported[self.label]
        self._context = context
        self._memory = context.memory
        self._rank = context.geometry.rank

    def _begin(self, spec: TransferSpec[LoadStoreSpec, LoadStoreSpec]) -> None:
        self._cache.fences.append((self.label, spec.after))
        self._cache.trouble(self.label)

    def modes(self) -> Mapping[str, str]:
        return {"copy": "bytes"}

    def close(self) -> None:
        self._cache.closed += 1


class Gather(_CacheHandler):
    """gpu -> cpu."""

    label = "gpu->cpu"

    async def transfer(self, spec: TransferSpec[GpuSpec, CpuSpec]) -> HopResult:
        self._begin(spec)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._context.executor, self._gather, spec)

    def _gather(self, spec: TransferSpec[GpuSpec, CpuSpec]) -> HopResult:
        self._cache.gathering.pass_through(f" {spec.keys[0].decode()}")
        statuses = []
        for block, slot, k in zip(spec.src.blocks, spec.dst.slots, spec.keys, strict=True):
            data = self._cache.blocks[block.block_ids[0]]
            view = self._memory.begin(slot)
            if view is None:
                statuses.append(BlockStatus.CANCELLED)
                continue
            view[: len(data)] = data
            checksum = BlockChecksum.capture(k, self._rank, memoryview(data))
            bound = self._memory.bind(slot, checksum)
            statuses.append(BlockStatus.OK if bound else BlockStatus.CANCELLED)
        return HopResult(tuple(statuses), BLOCK_BYTES * statuses.count(BlockStatus.OK))


class Scatter(_CacheHandler):
    """cpu -> gpu."""

    label = "cpu->gpu"

    async def transfer(self, spec: TransferSpec[CpuSpec, GpuSpec]) -> HopResult:
        self._begin(spec)
        if self._cache.answer is not None:
            return self._cache.answer()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._context.executor, self._scatter, spec)

    def _scatter(self, spec: TransferSpec[CpuSpec, GpuSpec]) -> HopResult:
        self._cache.scattering.pass_through(f" {spec.keys[0].decode()}")
        statuses = []
        for slot, block, k in zip(spec.src.slots, spec.dst.blocks, spec.keys, strict=True):
            checksum, view = self._memory.checksum(slot), self._memory.view(slot)
            if checksum is None or view is None:
                statuses.append(BlockStatus.MISSING)
            elif not (spec.compared or checksum.verifies(k, self._rank, view)):
                statuses.append(BlockStatus.CORRUPT)
            else:
                self._cache.blocks[block.block_ids[0]] = bytes(view)
                statuses.append(BlockStatus.OK)
        return HopResult(tuple(statuses), BLOCK_BYTES * statuses.count(BlockStatus.OK))


class DirectLoad(_CacheHandler):
    """fast -> gpu, by staging of its own."""

    label = "fast->gpu"

    async def transfer(self, spec: TransferSpec[FastSpec, GpuSpec]) -> HopResult:
        self._begin(spec)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._context.executor, self._load, spec)

    def _load(self, spec: TransferSpec[FastSpec, GpuSpec]) -> HopResult:
        store = cast(MemoryStore, self._context.store)
        self._cache.direct.pass_through(f" {spec.keys[0].decode()}")
        found = [store.rows.get(k) for k in spec.keys]
        going_on = spec.commit()
        self._cache.committed.append(going_on)
        if not going_on:
            return HopResult((BlockStatus.CANCELLED,) * len(spec), 0)
        self._cache.landing.pass_through()
        statuses = []
        for row, block, k in zip(found, spec.dst.blocks, spec.keys, strict=True):
            if k in self._cache.direct_answers:
                statuses.append(self._cache.direct_answers[k])
            elif row is None:
                statuses.append(BlockStatus.MISSING)
            elif not row[1].verifies(k, self._rank, memoryview(row[0])):
                statuses.append(BlockStatus.CORRUPT)
            else:
                self._cache.blocks[block.block_ids[0]] = row[0]
                statuses.append(BlockStatus.OK)
        return HopResult(tuple(statuses), BLOCK_BYTES * statuses.count(BlockStatus.OK))


class DirectStore(_CacheHandler):
    """gpu -> fast, by staging of its own."""

    label = "gpu->fast"

    async def transfer(self, spec: TransferSpec[GpuSpec, FastSpec]) -> HopResult:
        self._begin(spec)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._context.executor, self._store, spec)

    def _store(self, spec: TransferSpec[GpuSpec, FastSpec]) -> HopResult:
        store = cast(MemoryStore, self._context.store)
        self._cache.taking.pass_through(f" {spec.keys[0].decode()}")
        gathered = [self._cache.blocks[block.block_ids[0]] for block in spec.src.blocks]
        going_on = spec.commit()
        self._cache.committed.append(going_on)
        if not going_on:
            return HopResult((BlockStatus.CANCELLED,) * len(spec), 0)
        self._cache.leaving.pass_through()
        for k, data in zip(spec.keys, gathered, strict=True):
            checksum = BlockChecksum.capture(k, self._rank, memoryview(data))
            store.rows[k] = (data, checksum)
        return HopResult((BlockStatus.OK,) * len(spec), BLOCK_BYTES * len(spec))


def gpu(numbers: Iterable[int]) -> GpuSpec:
    return GpuSpec(tuple(GpuBlock(0, (number,)) for number in numbers))


def fast(*numbers: int) -> FastSpec:
    return FastSpec("fast", tuple(key(i) for i in numbers))


def slow(*numbers: int) -> SlowSpec:
    return SlowSpec("slow", tuple(key(i) for i in numbers))
