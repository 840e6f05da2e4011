"""The two hops between the engine's KV cache and host slots, and the checksum that is bound there.

A store takes each block's checksum from the slot, once, when the block was captured. A load
verifies all blocks of the call before the first byte reaches the engine. Blocking work runs in the
context's executor, once per call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import HandlerContext
from tiered_kv.errors import IdentityError, TierError, UnsupportedError
from tiered_kv.memory import GroupLayout, KVCaches, layouts_of
from tiered_kv.specs import CpuSpec, GpuBlock, GpuSpec, HopResult, LoadStoreSpec, TransferSpec
from tiered_kv.values import BlockStatus, ChecksumKind
from tiered_kv_gpu.copies import Copies, Copy, HostCopies, Moves, Slot, copies_for

__all__ = ["CpuToGpuHandler", "GpuToCpuHandler"]

logger = logging.getLogger(__name__)

_Group = tuple[GroupLayout, list[int]]  # blocks that are moved together, by position in the spec


class GpuToCpuHandler:
    """Gathers blocks out of the engine's cache into host slots (the first hop of a store).

    Statuses: OK; CANCELLED where the slot was handed out anew, or where the spec does not name one
    whole block inside the cache (only whole blocks are stored). A cancelled block left no trace.
    """

    def __init__(self, context: HandlerContext) -> None:
        """See `HandlerContext`; `caches` must be a `tiered_kv.memory.KVCaches`.

        Raises:
            UnsupportedError: there are no caches.
            IdentityError: the caches are not what the geometry says.
        """
        self._common = _Common(context)

    async def transfer(self, spec: TransferSpec[GpuSpec, CpuSpec]) -> HopResult:
        """Copy, take checksums, bind.

        Raises:
            TierError: the device failed.
            ValueError: source, destination and keys are not equally long.
        """
        return await self._common.run(spec, lambda: self._store(spec))

    def modes(self) -> Mapping[str, str]:
        """`{"copy": ..., "checksum": ...}`: the way of copying, on a device with "pinned" or
        "pageable" as the host pool is now; and what is taken of blocks captured from now on."""
        return self._common.modes()

    def close(self) -> None:
        """Let go of the engine's tensors."""
        self._common.close()

    def _store(self, spec: TransferSpec[GpuSpec, CpuSpec]) -> HopResult:
        common, memory, rank = self._common, self._common.memory, self._common.rank
        copies = common.copies
        statuses = [BlockStatus.CANCELLED] * len(spec)
        views: dict[int, memoryview] = {}
        sound = common.sound_positions(spec.src.blocks, GroupLayout.problem_of_whole)
        for i in sound:
            view = memory.begin(spec.dst.slots[i])
            if view is not None:
                views[i] = view
        copied = 0

        def begun(moves: Moves) -> Iterator[tuple[Copy, _Group]]:
            for layout, positions in common.groups(spec.src.blocks, views):
                blocks = [spec.src.blocks[i] for i in positions]
                slots = [Slot(spec.dst.slots[i].number, views[i]) for i in positions]
                yield moves.gather(layout, blocks, slots), (layout, positions)

        with copies.begin(spec.after) as moves:
            for layout, positions in _in_order(begun(moves), copies.depth):
                copied += len(positions) * layout.block_bytes
                for i in positions:
                    data = views[i][: layout.block_bytes]
                    checksum = BlockChecksum.capture(spec.keys[i], rank, data, common.capture())
                    if memory.bind(spec.dst.slots[i], checksum):
                        statuses[i] = BlockStatus.OK
        return HopResult(tuple(statuses), copied)


class CpuToGpuHandler:
    """Scatters verified blocks from host slots to the engine's cache (the last hop of a load).

    Only the engine blocks that the spec names are written; the whole block is verified all the
    same, unless the spec says that it was compared before. Statuses: OK; MISSING where nothing is
    bound under the slot's generation, or where the slot was handed out anew before the copy was
    over; CORRUPT where length or checksum differ (nothing of the block is written then); CANCELLED
    where the spec names no part of a block inside the cache.
    """

    def __init__(self, context: HandlerContext) -> None:
        """See `HandlerContext`; `caches` must be a `tiered_kv.memory.KVCaches`.

        Raises:
            UnsupportedError: there are no caches.
            IdentityError: the caches are not what the geometry says.
        """
        self._common = _Common(context)

    async def transfer(self, spec: TransferSpec[CpuSpec, GpuSpec]) -> HopResult:
        """Verify all blocks, then copy those that are right.

        Raises:
            TierError: the device failed.
            ValueError: source, destination and keys are not equally long.
        """
        return await self._common.run(spec, lambda: self._load(spec))

    def modes(self) -> Mapping[str, str]:
        """`{"copy": ..., "checksum": ...}`: the way of copying, on a device with "pinned" or
        "pageable" as the host pool is now; and what is taken of blocks captured from now on."""
        return self._common.modes()

    def close(self) -> None:
        """Let go of the engine's tensors."""
        self._common.close()

    def _load(self, spec: TransferSpec[CpuSpec, GpuSpec]) -> HopResult:
        common, memory = self._common, self._common.memory
        copies = common.copies
        statuses = [BlockStatus.CANCELLED] * len(spec)
        verified: dict[int, tuple[memoryview, BlockChecksum]] = {}
        for i in common.sound_positions(spec.dst.blocks, GroupLayout.problem_of):
            checksum = memory.checksum(spec.src.slots[i])
            view = memory.view(spec.src.slots[i])
            if checksum is None or view is None:
                statuses[i] = BlockStatus.MISSING
                continue
            length = common.layouts[spec.dst.blocks[i].group].block_bytes
            right = checksum.length == length and (
                spec.compared or checksum.verifies(spec.keys[i], common.rank, view)
            )
            if right:
                verified[i] = view, checksum
            elif memory.checksum(spec.src.slots[i]) != checksum:
                statuses[i] = BlockStatus.MISSING  # rewritten while it was read, not rotten
            else:
                statuses[i] = BlockStatus.CORRUPT
        copied = 0

        def unchanged(i: int) -> bool:
            return memory.checksum(spec.src.slots[i]) == verified[i][1]

        def begun(moves: Moves) -> Iterator[tuple[Copy, _Group]]:
            # The slot's owner may hand it out again at any time. A block is right only if its
            # slot has the same content after the copy as it had when it was verified; looking
            # before the copy as well keeps foreign bytes out of the engine wherever possible.
            for layout, positions in common.groups(spec.dst.blocks, verified):
                still = [i for i in positions if unchanged(i)]
                blocks = [spec.dst.blocks[i] for i in still]
                slots = [Slot(spec.src.slots[i].number, verified[i][0]) for i in still]
                yield moves.scatter(layout, slots, blocks), (layout, still)

        for i in verified:
            statuses[i] = BlockStatus.MISSING
        with copies.begin(spec.after) as moves:
            for layout, still in _in_order(begun(moves), copies.depth):
                for i in still:
                    copied += len(spec.dst.blocks[i].block_ids) * layout.engine_block_bytes
                    if unchanged(i):
                        statuses[i] = BlockStatus.OK
        return HopResult(tuple(statuses), copied)


class _Common:
    """What both directions share."""

    def __init__(self, context: HandlerContext) -> None:
        if not isinstance(context.caches, KVCaches):
            raise UnsupportedError(
                "the engine's KV caches are not registered as tiered_kv.memory.KVCaches, but as "
                f"{type(context.caches).__name__}; gpu handlers need them"
            )
        self._context = context
        self.memory = context.memory
        self.rank = context.geometry.rank
        self.layouts = layouts_of(context.caches, context.geometry)
        for layout in self.layouts.values():
            if layout.block_bytes > self.memory.slot_bytes:
                raise IdentityError(
                    f"a block of KV group {layout.group} has {layout.block_bytes} bytes, but a "
                    f"host slot has {self.memory.slot_bytes}"
                )
        self._copies: Copies | None = copies_for(context.caches, self.layouts, self.memory)
        self._way = self._copies.way
        self._complained = False

    @property
    def copies(self) -> Copies:
        if self._copies is None:
            raise TierError("the gpu handler is closed", tier=self._context.tier)
        return self._copies

    async def run(
        self, spec: TransferSpec[LoadStoreSpec, LoadStoreSpec], call: Callable[[], HopResult]
    ) -> HopResult:
        """Run `call` in the executor.

        A call that has begun goes on when the awaiting task is cancelled; one that has not is
        dropped.
        """
        if not len(spec.keys) == len(spec.src) == len(spec.dst):
            raise ValueError(
                f"a hop of {len(spec.keys)} keys has {len(spec.src)} sources and {len(spec.dst)} "
                "destinations"
            )
        if not spec.keys:
            return HopResult((), 0)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._context.executor, call)
        except (RuntimeError, MemoryError) as error:  # what torch raises when a device fails
            raise TierError(
                f"copying between the engine's KV cache and host memory failed: {error}",
                tier=self._context.tier,
            ) from error

    def sound_positions(
        self,
        blocks: Sequence[GpuBlock],
        problem_of: Callable[[GroupLayout, GpuBlock], str | None],
    ) -> list[int]:
        """Positions of the blocks that name what they should."""
        sound: list[int] = []
        for i, block in enumerate(blocks):
            layout = self.layouts.get(block.group)
            problem = problem_of(layout, block) if layout else "there is no such KV group"
            if problem is None:
                sound.append(i)
            elif not self._complained:
                self._complained = True
                logger.error(
                    "block %d of %d in a hop (KV group %d) is not moved: %s; "
                    "further ones are not logged",
                    i,
                    len(blocks),
                    block.group,
                    problem,
                )
        return sound

    def groups(
        self, blocks: Sequence[GpuBlock], wanted: Mapping[int, object]
    ) -> Iterator[tuple[GroupLayout, list[int]]]:
        """The wanted positions, cut into groups of one layout that are moved by one call."""
        by_group: dict[int, list[int]] = {}
        for i in wanted:
            by_group.setdefault(blocks[i].group, []).append(i)
        for number, positions in by_group.items():
            layout = self.layouts[number]
            size = self.copies.group_size(layout)
            for start in range(0, len(positions), size):
                yield layout, positions[start : start + size]

    def capture(self) -> ChecksumKind:
        return self._context.capture()

    def modes(self) -> Mapping[str, str]:
        copy = self._way
        if copy != HostCopies.way:
            copy += ", pinned" if self.memory.pinned else ", pageable"
        return {"copy": copy, "checksum": self.capture().value}

    def close(self) -> None:
        self._copies = None


def _in_order(begun: Iterator[tuple[Copy, _Group]], depth: int) -> Iterator[_Group]:
    """The groups, each when its copy is over; `depth` of them are under way at a time."""
    under_way: deque[tuple[Copy, _Group]] = deque()
    for started in begun:
        under_way.append(started)
        if len(under_way) == depth:
            copy, group = under_way.popleft()
            copy.wait()
            yield group
    for copy, group in under_way:
        copy.wait()
        yield group
