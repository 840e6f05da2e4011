"""sqlite -> gpu: loads that pass the host block pool by, where the engine is in host memory."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Mapping

from sqlite_tier.store import SqliteStore

from tiered_kv.contracts import DeviceBuffer, HandlerContext, NewBlock
from tiered_kv.errors import TierError, UnsupportedError
from tiered_kv.specs import GpuSpec, HopResult, KeySpec, TransferSpec
from tiered_kv.values import BlockStatus

__all__ = ["SqliteToGpuHandler"]

LEASE_SECONDS = 1.0


class SqliteToGpuHandler:
    """Reads rows into the engine's staging, verifies them there, and scatters them."""

    def __init__(self, context: HandlerContext) -> None:
        store = context.store
        if not isinstance(store, SqliteStore):
            raise UnsupportedError(f"tier {context.tier} is no sqlite tier")
        if not store.settings.direct:
            raise UnsupportedError(f"tier {context.tier} says `direct: false`")
        self._staging = context.staging()
        if self._staging.device != "cpu":
            raise UnsupportedError(
                f"the engine computes on {self._staging.device}; SQLite fills host memory only"
            )
        self._store = store
        self._tier = context.tier
        self._verification = context.verification
        self._chunks = {group.index: group.chunk for group in context.geometry.groups}
        self._executor = context.executor
        self._closed = False

    async def transfer(self, spec: TransferSpec[KeySpec, GpuSpec]) -> HopResult:
        """See `TransferHandler.transfer`."""
        if not len(spec.keys) == len(spec.src) == len(spec.dst):
            raise ValueError(
                f"{len(spec.keys)} keys, {len(spec.src)} sources, {len(spec.dst)} destinations"
            )
        if self._closed:
            raise TierError(f"tier {self._tier}: its handler is closed", tier=self._tier)
        if not spec.keys:
            return HopResult((), 0)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._load, spec)

    def _load(self, spec: TransferSpec[KeySpec, GpuSpec]) -> HopResult:
        statuses = [BlockStatus.MISSING] * len(spec)
        copied = 0
        start = 0
        while start < len(spec):
            areas = self._staging.lease(len(spec) - start, LEASE_SECONDS)
            if areas is None:
                raise TierError(f"tier {self._tier}: no staging is free", tier=self._tier)
            try:
                positions = range(start, start + len(areas))
                copied += self._load_some(spec, positions, areas, statuses)
            finally:
                self._staging.release(areas)
            start += len(areas)
        return HopResult(tuple(statuses), copied)

    def _load_some(
        self,
        spec: TransferSpec[KeySpec, GpuSpec],
        positions: range,
        areas: tuple[int, ...],
        statuses: list[BlockStatus],
    ) -> int:
        staging, keys = self._staging, [spec.keys[i] for i in positions]
        spans = [staging.span(area, staging.area_bytes) for area in areas]
        results = self._store.read(keys, [host_view(span) for span in spans])
        right: list[tuple[int, int, int]] = []
        for position, area, key, result in zip(positions, areas, keys, results, strict=True):
            statuses[position] = result.status
            checksum = result.checksum
            if result.status is not BlockStatus.OK or checksum is None:
                continue
            if self._is_right(NewBlock(key, checksum), area):
                right.append((position, area, checksum.length))
            else:
                statuses[position] = BlockStatus.CORRUPT
                self._store.discard([NewBlock(key, checksum)])
        if not right:
            return 0
        if not spec.commit():
            for position, _, _ in right:
                statuses[position] = BlockStatus.CANCELLED
            return 0
        blocks = [spec.dst.blocks[position] for position, _, _ in right]
        written = staging.scatter([area for _, area, _ in right], blocks, spec.after)
        for (position, _, _), done in zip(right, written, strict=True):
            statuses[position] = BlockStatus.OK if done else BlockStatus.CANCELLED
        return sum(
            length // self._chunks[block.group] * len(block.block_ids)
            for (_, _, length), block, done in zip(right, blocks, written, strict=True)
            if done
        )

    def _is_right(self, block: NewBlock, area: int) -> bool:
        """Whether the area holds what was stored; not asked where the tier's `verify` says so."""
        if self._verification.due([block]) == [False]:
            return True
        bound = block.checksum
        if self._staging.checksum(block.key, area, bound.length, bound.kind) != bound:
            return False
        self._verification.passed([block])
        return True

    def modes(self) -> Mapping[str, str]:
        """`{"way": "sqlite to engine"}`."""
        return {"way": "sqlite to engine"}

    def close(self) -> None:
        """Take no more calls."""
        self._closed = True


def host_view(buffer: DeviceBuffer) -> memoryview:
    """The bytes of a buffer in host memory, writable; valid while `buffer` lives."""
    address, _ = buffer.__cuda_array_interface__["data"]
    return memoryview((ctypes.c_uint8 * buffer.nbytes).from_address(address)).cast("B")
