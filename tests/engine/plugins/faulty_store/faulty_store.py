"""A plug-in for tests: a store that wraps the real nvme store and fails on request."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from tiered_kv.config import TierSettings
from tiered_kv.contracts import (
    API_VERSION,
    Backend,
    BlockStore,
    ChangeBatch,
    NewBlock,
    Place,
    ReadResult,
    StoreContext,
    StoreStat,
)
from tiered_kv.errors import TierError
from tiered_kv.specs import KeySpec
from tiered_kv.values import BlockKey, BlockStatus, Medium


def _nvme() -> Backend:
    [entry] = entry_points(group="tiered_kv.backends", name="nvme")
    loaded = entry.load()
    assert isinstance(loaded, Backend)
    return loaded


class FaultySpec(KeySpec):
    """Blocks in a faulty store."""

    medium = Medium("faulty")


class FaultySettings(TierSettings, frozen=True):
    """The settings of the wrapped store, and where is said what shall fail."""

    type: Literal["faulty"] = "faulty"
    path: str = Field(description="Directory of the wrapped store.")
    plan: str = Field(description="File with a `Plan` as JSON; nothing fails while it is missing.")


class Plan(BaseModel, frozen=True, extra="forbid"):
    """What fails, counted from the first call that sees this plan."""

    failure: Literal["corrupt", "missing", "tier_error", "raise"] = "corrupt"
    """How a read fails."""
    reads: tuple[tuple[int, ...], ...] = ()
    """Positions that fail, for each read call in turn."""
    every_read: bool = False
    """Every block of every read fails."""
    failing_writes: int = 0
    """How many write calls fail at first."""


class FaultyStore:
    """Counts calls and fails those that the plan names."""

    def __init__(self, inner: BlockStore, settings: FaultySettings) -> None:
        self._inner = inner
        self._settings = settings
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._plan = Plan()
        self._reads = 0
        self._writes = 0

    def _see_plan(self) -> None:
        """Begin to count anew where the file is another one than before."""
        file = Path(self._settings.plan)
        try:
            stat = file.stat()
        except FileNotFoundError:
            return
        seen = stat.st_ino, stat.st_mtime_ns
        if seen != self._seen:
            self._seen, self._plan = seen, Plan.model_validate_json(file.read_bytes())
            self._reads = self._writes = 0

    def read(self, keys: Sequence[BlockKey], memory: Sequence[memoryview]) -> list[ReadResult]:
        with self._lock:
            self._see_plan()
            plan, call = self._plan, self._reads
            self._reads += 1
        results = self._inner.read(keys, memory)
        planned = plan.reads[call] if call < len(plan.reads) else ()
        positions = range(len(keys)) if plan.every_read else planned
        for position in positions:
            results[position] = self._fail(
                plan, keys[position], results[position], memory[position]
            )
        if positions:
            print(f"faulty store: read {call} fails at {list(positions)}", flush=True)
        return results

    def _fail(
        self, plan: Plan, key: BlockKey, result: ReadResult, memory: memoryview
    ) -> ReadResult:
        match plan.failure:
            case "corrupt":
                memory[0] ^= 1
                return result
            case "missing":
                self._inner.delete([key])
                return ReadResult(BlockStatus.MISSING)
            case "tier_error":
                return ReadResult(BlockStatus.TIER_ERROR)
            case "raise":
                raise TierError("injected read error", tier=self._settings.name)

    def write(self, places: Sequence[Place], memory: Sequence[memoryview]) -> None:
        with self._lock:
            self._see_plan()
            plan, call = self._plan, self._writes
            self._writes += 1
        if call < plan.failing_writes:
            print(f"faulty store: write {call} of {len(places)} blocks fails", flush=True)
            raise TierError("injected write error", tier=self._settings.name)
        self._inner.write(places, memory)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._inner.contains(keys)

    def reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        return self._inner.reserve(blocks)

    def publish(self, places: Sequence[Place]) -> None:
        self._inner.publish(places)

    def abandon(self, places: Sequence[Place]) -> None:
        self._inner.abandon(places)

    def discard(self, blocks: Sequence[NewBlock]) -> int:
        dropped = self._inner.discard(blocks)
        print(f"faulty store: {dropped} blocks discarded", flush=True)
        return dropped

    def delete(self, keys: Sequence[BlockKey]) -> int:
        return self._inner.delete(keys)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._inner.touch(keys)

    def scan(self) -> Iterator[BlockKey]:
        return self._inner.scan()

    def changes(self, cursor: int | None) -> ChangeBatch:
        return self._inner.changes(cursor)

    def stat(self) -> StoreStat:
        return self._inner.stat()

    def close(self) -> None:
        self._inner.close()


def open_store(context: StoreContext) -> BlockStore:
    """Open the real nvme store and wrap it."""
    nvme = _nvme()
    assert nvme.settings is not None
    assert nvme.open_store is not None
    settings = context.settings
    assert isinstance(settings, FaultySettings)
    wrapped = nvme.settings()(
        name=settings.name, type="nvme", path=settings.path, capacity=settings.capacity
    )
    inner = nvme.open_store(
        StoreContext(
            context.tier, wrapped, context.namespace, context.geometry, writable=context.writable
        )
    )
    return FaultyStore(inner, settings)


backend = Backend(
    name="faulty",
    medium=Medium("faulty"),
    api_version=API_VERSION,
    description="The nvme store, failing on request.",
    settings=lambda: FaultySettings,
    spec=FaultySpec,
    open_store=open_store,
)
