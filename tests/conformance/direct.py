"""Plain direct handlers: between the engine's cache and any store, through device staging."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from tests.conformance.honest import HonestStore
from tiered_kv.contracts import HandlerContext, NewBlock, Place, TransferHandler
from tiered_kv.errors import NoSpace, TierError
from tiered_kv.specs import GpuSpec, HopResult, KeySpec, LoadStoreSpec, TransferSpec
from tiered_kv.testing.conformance.handlers import HandlerCase
from tiered_kv.values import BlockStatus, ChecksumKind, Medium

OK, CANCELLED = BlockStatus.OK, BlockStatus.CANCELLED
Slots = dict[int, int]
"""Area of staging by position in the call."""


@dataclass(frozen=True, slots=True)
class MemorySpec(KeySpec):
    medium: ClassVar[Medium] = Medium("memory")


class DirectHandler:
    def __init__(self, context: HandlerContext) -> None:
        assert context.store is not None
        self.store = context.store
        self.staging = context.staging()
        self.executor = context.executor
        self.geometry = {group.index: group for group in context.geometry.groups}
        self.closed = False

    async def transfer(self, spec: TransferSpec[Any, Any]) -> HopResult:
        if not len(spec.keys) == len(spec.src) == len(spec.dst):
            raise ValueError("a hop of unequal lengths")
        if self.closed:
            raise TierError("the handler is closed", tier="memory")
        if not spec.keys:
            return HopResult((), 0)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, self.move, spec)

    def move(self, spec: TransferSpec[Any, Any]) -> HopResult:
        raise NotImplementedError

    @contextmanager
    def areas(self, count: int) -> Iterator[list[int]]:
        held: list[int] = []
        try:
            while len(held) < count:
                more = self.staging.lease(count - len(held), 2.0)
                if more is None:
                    raise TierError("no staging is free", tier="memory")
                held.extend(more)
            yield held
        finally:
            self.give_back(held)

    def give_back(self, areas: list[int]) -> None:
        self.staging.release(areas)

    def view(self, area: int, length: int) -> memoryview:
        address, _ = self.staging.span(area, length).__cuda_array_interface__["data"]
        return memoryview((ctypes.c_uint8 * length).from_address(address)).cast("B")

    def modes(self) -> Mapping[str, str]:
        return {"way": "direct"}

    def close(self) -> None:
        self.closed = True


class DirectLoad(DirectHandler):
    def move(self, spec: TransferSpec[KeySpec, GpuSpec]) -> HopResult:
        statuses = [BlockStatus.MISSING] * len(spec)
        with self.areas(len(spec)) as areas:
            views = [self.view(area, self.staging.area_bytes) for area in areas]
            results = self.store.read(spec.keys, views)
            right: list[int] = []
            for i, result in enumerate(results):
                statuses[i] = result.status
                group = self.geometry.get(spec.dst.blocks[i].group)
                if result.status is not OK:
                    continue
                if result.checksum is None:
                    raise TierError("a row without a checksum", tier="memory")
                if group is None:
                    statuses[i] = CANCELLED
                elif result.checksum.length == group.block_bytes and self.verifies(
                    spec, i, areas[i], result.checksum
                ):
                    right.append(i)
                else:
                    statuses[i] = BlockStatus.CORRUPT
                    self.store.discard([NewBlock(spec.keys[i], result.checksum)])
            copied = self.scatter(spec, right, areas, statuses)
            return HopResult(tuple(statuses), copied)

    def verifies(self, spec: TransferSpec[Any, Any], i: int, area: int, wanted: Any) -> bool:
        key = spec.keys[i]
        return bool(self.staging.checksum(key, area, wanted.length, wanted.kind) == wanted)

    def scatter(
        self,
        spec: TransferSpec[KeySpec, GpuSpec],
        right: list[int],
        areas: list[int],
        statuses: list[BlockStatus],
    ) -> int:
        if not right:
            return 0
        if not spec.commit():
            for i in right:
                statuses[i] = CANCELLED
            return 0
        blocks = [spec.dst.blocks[i] for i in right]
        written = self.staging.scatter([areas[i] for i in right], blocks, spec.after)
        copied = 0
        for i, block, done in zip(right, blocks, written, strict=True):
            statuses[i] = OK if done else CANCELLED
            group = self.geometry[block.group]
            copied += done * len(block.block_ids) * group.block_bytes // group.chunk
        return copied


class DirectStore(DirectHandler):
    def move(self, spec: TransferSpec[GpuSpec, KeySpec]) -> HopResult:
        statuses = [CANCELLED] * len(spec)
        with self.areas(len(spec)) as areas:
            new = self.gathered(spec, areas)
            try:
                answers = self.store.reserve(list(new.values()))
            except NoSpace:
                for i in new:
                    statuses[i] = BlockStatus.NO_SPACE
                return HopResult(tuple(statuses), 0)
            places: dict[int, Place] = {}
            for i, place in zip(new, answers, strict=True):
                if place is None:
                    statuses[i] = OK
                else:
                    places[i] = place
            self.put(spec, places, areas, statuses)
            copied = sum(place.block.checksum.length for place in places.values())
            return HopResult(tuple(statuses), copied)

    def gathered(
        self, spec: TransferSpec[GpuSpec, KeySpec], areas: list[int]
    ) -> dict[int, NewBlock]:
        whole = self.staging.gather(spec.src.blocks, areas, spec.after)
        return {
            i: NewBlock(
                spec.keys[i],
                self.staging.checksum(
                    spec.keys[i],
                    areas[i],
                    self.geometry[block.group].block_bytes,
                    ChecksumKind.XXH3,
                ),
            )
            for i, block in enumerate(spec.src.blocks)
            if whole[i]
        }

    def put(
        self,
        spec: TransferSpec[GpuSpec, KeySpec],
        places: Mapping[int, Place],
        areas: list[int],
        statuses: list[BlockStatus],
    ) -> None:
        published = False
        try:
            lengths = {i: place.block.checksum.length for i, place in places.items()}
            views = [self.view(areas[i], length) for i, length in lengths.items()]
            self.store.write(list(places.values()), views)
            if spec.commit():
                self.store.publish(list(places.values()))
                published = True
        finally:
            if not published:
                self.store.abandon(list(places.values()))
        if published:
            for i in places:
                statuses[i] = OK


def direct_case(
    src: type[LoadStoreSpec],
    dst: type[LoadStoreSpec],
    make: Callable[[HandlerContext], TransferHandler[Any, Any]],
) -> HandlerCase:
    """A handler over a small store in memory."""
    return HandlerCase(src, dst, make, HonestStore, store_bytes=2**20, any_store=True)
