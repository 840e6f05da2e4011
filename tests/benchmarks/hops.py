"""Our side as it is used: the hops between host slots and a store, driven like the transfer engine
drives them.

A batch is cut into groups of `EngineLimits.behind_bytes` (stores) or `group_bytes` (loads); up to
`threads_per_tier` of them are in flight. A store is reserve, write, publish; a load is read, then
verification of every block's checksum.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from tests.benchmarks.harness import Batch, keys_of
from tiered_kv.checksum import BlockChecksum
from tiered_kv.complaints import Complaints
from tiered_kv.contracts import BlockStore, HandlerContext, StoreContext, VerifyAlways
from tiered_kv.engine import EngineLimits, register_store_handlers
from tiered_kv.engine.attached import Attached
from tiered_kv.engine.health import HealthBoard
from tiered_kv.engine.hops import LiveHop
from tiered_kv.engine.loop import LoopThread
from tiered_kv.engine.outcome import groups_of
from tiered_kv.engine.waiting import Patience, Permits, RightOfWay
from tiered_kv.memory import HostBlockPool
from tiered_kv.registry import TransferRegistry
from tiered_kv.routing import CPU_ENDPOINT, Endpoint, Hop
from tiered_kv.specs import CpuSpec, HopResult, KeySpec, SlotRef, TransferSpec
from tiered_kv.stats import StatsRecorder
from tiered_kv.threads import DaemonExecutor
from tiered_kv.values import (
    PAGE_BYTES,
    BlockStatus,
    CacheGeometry,
    Fingerprint,
    GroupGeometry,
    Namespace,
)

__all__ = ["Hops", "geometry_of", "store_context"]

TIER = "bench"
WAIT_SECONDS = 120.0


def geometry_of(batch: Batch) -> CacheGeometry:
    """One group, one rank, blocks of the batch's size."""
    return CacheGeometry((GroupGeometry(0, batch.block_bytes, 1, 16),), 0, 1)


def store_context(batch: Batch, settings: Any) -> StoreContext:
    """What a backend opens its store with."""
    namespace = Namespace(Fingerprint.of({"model": "bench"}))
    return StoreContext(TIER, settings, namespace, geometry_of(batch))


class Hops:
    """A host pool full of blocks, and both hops between it and a store."""

    def __init__(
        self,
        batch: Batch,
        store: BlockStore,
        spec: type[KeySpec],
        *,
        group_bytes: int | None = None,
        threads: int | None = None,
        copies: int = 1,
    ) -> None:
        """The store stays its opener's. Group size and threads as the engine has them, if nothing
        else is said. The pool holds the batch `copies` times, and they take turns: with several
        its bytes are not in the processor's cache."""
        self.limits = EngineLimits(
            load_deadline=WAIT_SECONDS,
            store_deadline=WAIT_SECONDS,
            store_queue_bytes=batch.total_bytes,
        )
        self.load_bytes = group_bytes or self.limits.group_bytes
        self.store_bytes = group_bytes or self.limits.behind_bytes
        self.threads = threads = threads or self.limits.threads_per_tier
        self.batch, self.store = batch, store
        self.keys = keys_of(batch)
        self._spec = spec
        slot_bytes = -(-batch.block_bytes // PAGE_BYTES) * PAGE_BYTES
        self.pool = HostBlockPool(copies * batch.blocks, 0, slot_bytes)
        self._load_group = max(1, self.load_bytes // slot_bytes)
        self._store_group = max(1, self.store_bytes // slot_bytes)
        self._generations = [0] * copies
        self._turn = 0
        self._loop = LoopThread("bench-engine")
        self._executors: list[DaemonExecutor] = []
        self._fill()
        registry = TransferRegistry()
        register_store_handlers(registry, spec, "bench")
        tier = Endpoint(spec, TIER)
        stores, loads = Hop(CPU_ENDPOINT, tier, "bench"), Hop(tier, CPU_ENDPOINT, "bench")
        board = HealthBoard(
            (stores, loads),
            limit=threads,
            rules=self.limits.breaker(),
            changed=lambda: None,
        )
        stats, complaints = StatsRecorder("bench"), Complaints(logging.getLogger("bench"))

        def live(hop: Hop) -> LiveHop:
            executor = DaemonExecutor(threads, f"bench-{hop.label}")
            self._executors.append(executor)
            made = LiveHop(
                hop=hop,
                loop=self._loop,
                board=board,
                stats=stats,
                complaints=complaints,
                memory=self.pool,
                rank=0,
                verification=VerifyAlways(),
                executor=executor,
                permits=Permits(threads),
                way=RightOfWay(1.0),
            )
            context = HandlerContext(geometry_of(batch), self.pool, executor, TIER, store)
            handler = registry.handler(hop.src.spec, hop.dst.spec, context)
            made.attached = Attached(hop.label, handler, store)
            board.open(hop)
            return made

        self._store_hop, self._load_hop = live(stores), live(loads)

    def _fill(self) -> None:
        contents = [memoryview(os.urandom(self.batch.block_bytes)) for _ in self.keys]
        for _ in self._generations:
            for slot, key, content in zip(self._take_turn(), self.keys, contents, strict=True):
                view = self.pool.begin(slot)
                assert view is not None
                data = view[: self.batch.block_bytes]
                data[:] = content
                assert self.pool.bind(slot, BlockChecksum.capture(key, 0, data))

    def _numbers(self, turn: int) -> range:
        first = turn % len(self._generations) * self.batch.blocks
        return range(first, first + self.batch.blocks)

    def _take_turn(self, *, anew: bool = False) -> tuple[SlotRef, ...]:
        """The slots of the copy whose turn it is; `anew`: to be overwritten."""
        turn = self._turn % len(self._generations)
        self._turn += 1
        self._generations[turn] += anew
        return tuple(SlotRef(number, self._generations[turn]) for number in self._numbers(turn))

    # ----------------------------------------------------------------------------------- moving

    def save(self, *, capture: bool = False) -> None:
        """Store all blocks, from the slots in which they lie. Their checksums are known, as they
        are in the host tier; with `capture` each group's are taken first, in the thread that then
        stores it."""
        slots = self._take_turn(anew=capture)

        def spec(part: Sequence[int]) -> TransferSpec[Any, Any]:
            keys = tuple(self.keys[i] for i in part)
            return TransferSpec(
                CpuSpec(tuple(slots[i] for i in part)), self._spec(TIER, keys), keys
            )

        def take_checksums(part: Sequence[int]) -> None:
            refs = tuple(slots[i] for i in part)
            checksums = []
            for i, view in zip(part, self.pool.begin_all(refs), strict=True):
                assert view is not None
                data = view[: self.batch.block_bytes]
                checksums.append(BlockChecksum.capture(self.keys[i], 0, data))
            assert all(self.pool.bind_all(refs, checksums))

        before = take_checksums if capture else None
        self._run(self._store_hop, spec, self._store_group, before=before)

    def capture_and_save(self) -> None:
        """Store all blocks, their checksums taken on the way."""
        self.save(capture=True)

    def load(self, *, verified: bool = True) -> None:
        """Load all blocks into the same slots, under a younger generation, and verify them."""
        slots = self._take_turn(anew=True)

        def spec(part: Sequence[int]) -> TransferSpec[Any, Any]:
            keys = tuple(self.keys[i] for i in part)
            return TransferSpec(
                self._spec(TIER, keys), CpuSpec(tuple(slots[i] for i in part)), keys
            )

        self._run(self._load_hop, spec, self._load_group, verified=verified)

    def load_unverified(self) -> None:
        """Load all blocks as the handler does it, without what the engine does afterwards."""
        self.load(verified=False)

    def forget(self) -> None:
        """Empty the store."""
        self.store.delete(self.keys)

    def wipe(self) -> None:
        """Spoil the slots that are loaded next, so that only the load makes them right again."""
        for number in self._numbers(self._turn):
            self.pool.as_array(number)[:64] = 0

    def _run(
        self,
        hop: LiveHop,
        spec: Callable[[Sequence[int]], TransferSpec[Any, Any]],
        group: int,
        *,
        verified: bool = True,
        before: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        async def call(part: tuple[int, ...]) -> HopResult:
            if before is not None:
                await asyncio.get_running_loop().run_in_executor(hop.executor, before, part)
            if verified:
                return await hop.begin(spec(part), WAIT_SECONDS)
            assert hop.attached is not None
            return await hop.attached.handler.transfer(spec(part))

        async def move(part: tuple[int, ...]) -> HopResult:
            assert await hop.permits.take(Patience())
            try:
                return await call(part)
            finally:
                hop.permits.give()

        async def all_groups() -> list[HopResult]:
            groups = groups_of(self.batch.blocks, group)
            return await asyncio.gather(*(move(tuple(part)) for part in groups))

        future = asyncio.run_coroutine_threadsafe(all_groups(), self._loop.loop)
        results = future.result(WAIT_SECONDS)
        statuses = [status for result in results for status in result.statuses]
        if len(statuses) != self.batch.blocks or set(statuses) != {BlockStatus.OK}:
            raise RuntimeError(f"not every block came through: {set(statuses)}")
        moved = sum(result.copied_bytes for result in results)
        if moved != self.batch.total_bytes:
            raise RuntimeError(f"{moved} bytes were copied, not {self.batch.total_bytes}")

    # -------------------------------------------------------------------------------------- end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.stop(WAIT_SECONDS)
        for executor in self._executors:
            executor.shutdown()
        self.pool.close()
