"""One rank with caches, pool, store and the handler under test, all watched."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import BlockStore, DeviceStaging, HandlerContext
from tiered_kv.memory import HostBlockPool
from tiered_kv.specs import (
    CpuSpec,
    GpuSpec,
    HopResult,
    KeySpec,
    LoadStoreSpec,
    SlotRef,
    TransferSpec,
)
from tiered_kv.testing.conformance.blocks import StoreArguments
from tiered_kv.testing.conformance.contract import BrokenPromise, HandlerPromise, owe
from tiered_kv.testing.conformance.handlers.caches import CacheShape, geometry_of
from tiered_kv.testing.conformance.handlers.case import HandlerCase
from tiered_kv.testing.conformance.handlers.sides import (
    Block,
    CacheSide,
    Fault,
    Side,
    SlotSide,
    StoreSide,
)
from tiered_kv.threads import DaemonExecutor
from tiered_kv.values import BlockKey, BlockStatus

__all__ = ["Bench", "Gate", "Hop", "WatchedPool"]

P = ParamSpec("P")
T = TypeVar("T")

RANK, RANKS = 1, 2
PATIENCE = 30.0
"""Seconds after which a check gives up; none takes that long."""


class Gate:
    """A place where a thread waits until it is let through."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, *_: object) -> None:
        """Wait at the gate."""
        self.reached.set()
        if not self._open.wait(PATIENCE):
            raise TimeoutError("nobody opened the gate")

    def open(self) -> None:
        """Let everybody through, from now on."""
        self._open.set()


class WatchedPool(HostBlockPool):
    """A host block pool that calls `before` with the method and each slot, before each call of a
    method of `HostMemory`, whether for one slot or for several."""

    before: Callable[[str, SlotRef], object] = staticmethod(lambda method, slot: None)

    def begin_all(self, slots: Sequence[SlotRef]) -> list[memoryview | None]:
        """See `HostMemory`."""
        self._announce("begin", slots)
        return super().begin_all(slots)

    def bind_all(self, slots: Sequence[SlotRef], checksums: Sequence[BlockChecksum]) -> list[bool]:
        """See `HostMemory`."""
        self._announce("bind", slots)
        return super().bind_all(slots, checksums)

    def checksums(self, slots: Sequence[SlotRef]) -> list[BlockChecksum | None]:
        """See `HostMemory`."""
        self._announce("checksum", slots)
        return super().checksums(slots)

    def views(self, slots: Sequence[SlotRef]) -> list[memoryview | None]:
        """See `HostMemory`."""
        self._announce("view", slots)
        return super().views(slots)

    def _announce(self, method: str, slots: Sequence[SlotRef]) -> None:
        for slot in slots:
            self.before(method, slot)


class CountingExecutor(Executor):
    """Counts what it is given."""

    def __init__(self, threads: int) -> None:
        self.inner = DaemonExecutor(threads, "conformance")
        self.calls = 0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run it in the threads below."""
        self.calls += 1
        return self.inner.submit(fn, *args, **kwargs)


@dataclass
class Hop:
    """A call that is to be made, and what was there before it."""

    blocks: Sequence[Block]
    spec: TransferSpec[Any, Any]
    before: object


@dataclass
class Bench:
    """See the module. `source` and `destination` bypass the handler."""

    case: HandlerCase
    shape: CacheShape
    folder: Path
    slots: int = 48
    staging_blocks: int = 16
    threads: int = 1
    wrap_store: Callable[[BlockStore], BlockStore] = field(default=lambda store: store)

    def __post_init__(self) -> None:
        case = self.case
        self.caches = self.shape.build(case.device)
        self.geometry = geometry_of(self.caches, self.shape.chunks, RANK, RANKS)
        self.pool = WatchedPool(self.slots, 0, self.geometry.slot_bytes)
        self.executor = CountingExecutor(self.threads)
        self.store: BlockStore | None = None
        self._peer: BlockStore | None = None
        if case.open_store is not None:
            arguments = StoreArguments(
                self.folder / "tier",
                max(case.store_bytes, 16 * self.geometry.slot_bytes),
                rank=RANK,
                world_size=RANKS,
                block_bytes=tuple(group.block_bytes for group in self.geometry.groups),
            )
            self.store = case.open_store(arguments)
            self._peer = case.open_store(arguments.with_(rank=1 - RANK))
        context = HandlerContext(
            self.geometry,
            self.pool,
            self.executor,
            case.tier,
            store=None if self.store is None else self.wrap_store(self.store),
            caches=self.caches,
            staging=self._staging,
            capture=lambda: case.capture,
        )
        self.handler = case.make(context)
        self.source = self._side(case.src)
        self.destination = self._side(case.dst)

    def _staging(self) -> DeviceStaging:
        nbytes = self.staging_blocks * self.geometry.slot_bytes
        return self.case.staging(self.caches, self.geometry, nbytes)

    def _side(self, spec: type[LoadStoreSpec]) -> Side:
        if issubclass(spec, GpuSpec):
            return CacheSide(self.caches, self.geometry)
        if issubclass(spec, CpuSpec):
            return SlotSide(self.pool, RANK, self.case.capture)
        if issubclass(spec, KeySpec) and self.store is not None and self._peer is not None:
            return StoreSide(spec, self.case.tier, self.store, self._peer, RANK, self.case.capture)
        raise ValueError(f"no side for {spec.__name__}: a KeySpec needs `HandlerCase.open_store`")

    # ---------------------------------------------------------------------------------- blocks

    def blocks(self, count: int, first: int = 0) -> list[Block]:
        """Blocks of all KV groups in turn."""
        groups = self.geometry.groups
        return [
            Block(
                BlockKey(b"block %d" % number),
                groups[number % len(groups)].index,
                random.Random(number).randbytes(groups[number % len(groups)].block_bytes),
            )
            for number in range(first, first + count)
        ]

    def engine_block_bytes(self, block: Block) -> int:
        """Bytes of one engine block of its group."""
        (group,) = (g for g in self.geometry.groups if g.index == block.group)
        return group.block_bytes // group.chunk

    # ------------------------------------------------------------------------------------ hops

    def hop(
        self,
        blocks: Sequence[Block],
        *,
        faults: dict[int, Fault] | None = None,
        gone: Sequence[int] = (),
        commit: Callable[[], bool] | None = None,
    ) -> Hop:
        """Supply blocks and make room for them."""
        src = self.source.supply(blocks, faults) if faults else self.source.supply(blocks)
        dst = self.destination.offer(blocks, gone) if gone else self.destination.offer(blocks)
        return self.hop_between(blocks, src, dst, commit)

    def hop_between(
        self,
        blocks: Sequence[Block],
        src: LoadStoreSpec,
        dst: LoadStoreSpec,
        commit: Callable[[], bool] | None = None,
    ) -> Hop:
        """A hop between places that are there already."""
        keys = tuple(block.key for block in blocks)
        spec = TransferSpec(src, dst, keys, commit or (lambda: True))
        return Hop(blocks, spec, self.destination.remember())

    def call(self, hop: Hop) -> HopResult:
        """Make the call; what it raises comes out."""
        return self.await_(self.handler.transfer(hop.spec))

    def run(self, hop: Hop) -> HopResult:
        """Make a call that has no reason to fail as a whole."""
        try:
            return self.call(hop)
        except Exception as error:
            found = f"a call of {len(hop.blocks)} blocks raised {error!r}"
            raise BrokenPromise.of(HandlerPromise.PER_BLOCK, found) from error

    def await_(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, or fail."""
        return asyncio.run(asyncio.wait_for(call, PATIENCE))

    def judge(
        self,
        hop: Hop,
        result: HopResult,
        expected: Sequence[BlockStatus | tuple[BlockStatus, ...]],
        why: HandlerPromise = HandlerPromise.IN_ORDER,
    ) -> None:
        """Compare the answer, and see that what is OK arrived whole and that nothing else changed.

        Args:
            hop: what was called.
            result: what it answered.
            expected: per block its status, or those of which one is due.
            why: the promise that the statuses prove.
        """
        statuses = result.statuses
        owe(
            len(statuses) == len(hop.blocks),
            HandlerPromise.PER_BLOCK,
            f"{len(statuses)} answers came for {len(hop.blocks)} blocks",
        )
        for i, (status, due) in enumerate(zip(statuses, expected, strict=True)):
            allowed = due if isinstance(due, tuple) else (due,)
            shown = " or ".join(one.value for one in allowed)
            owe(status in allowed, why, f"block {i} is {status.value}, where {shown} is due")
        self.judge_bytes(hop, [i for i, s in enumerate(statuses) if s is BlockStatus.OK])

    def judge_bytes(self, hop: Hop, arrived: Sequence[int]) -> None:
        """See that these blocks arrived whole, and that nothing else changed."""
        found = self.destination.difference(hop.before, hop.spec.dst, hop.blocks, arrived)
        owe(found is None, HandlerPromise.OK_MEANS_THERE, str(found))

    def drain(self) -> None:
        """Wait until the executor's one thread has done all that it was given."""
        self.executor.inner.submit(lambda: None).result(PATIENCE)

    def close(self) -> None:
        """Close everything."""
        self.handler.close()
        self.executor.inner.shutdown(wait=False)
        self.executor.inner.join(PATIENCE)
        for store in (self.store, self._peer):
            if store is not None:
                store.close()
        self.pool.close()
