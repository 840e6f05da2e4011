"""Between the engine's cache and the disk without passing the host pool.

Blocks pass through staging on the engine's device (`DeviceStaging`): KvikIO reads and writes that,
never the engine's cache. A load is verified there before it is scattered; a store is gathered and
its checksum taken there before it is written. A call commits once, for all its blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import HandlerContext, NewBlock, Place, no_room
from tiered_kv.errors import NoSpace, reason_in
from tiered_kv.specs import GpuSpec, HopResult, KeySpec, TransferSpec
from tiered_kv.values import BlockStatus, ChecksumKind
from tiered_kv_nvme.reading import Found
from tiered_kv_nvme.staged import StagedIo

__all__ = ["GpuToNvmeHandler", "NvmeToGpuHandler"]

logger = logging.getLogger(__name__)


class NvmeToGpuHandler:
    """Reads blocks into staging, verifies them, and scatters them into the engine's cache.

    Statuses: OK; MISSING where there is no row, or not the same any more after reading; CORRUPT
    where length or checksum differ (the block is dropped from the store); CANCELLED where the call
    was given up before the first byte was written to the engine, or where the spec names no part
    of a block inside the cache; TIMED_OUT where no staging was free; TIER_ERROR where the disk
    failed.
    """

    def __init__(self, context: HandlerContext) -> None:
        """See `HandlerContext`.

        Raises:
            UnsupportedError: the direct way is not in use, and why.
            IdentityError: a block is larger than an area of the staging.
        """
        self._io = StagedIo(context)
        self._engine_block_bytes = {
            group.index: group.block_bytes // group.chunk for group in context.geometry.groups
        }

    async def transfer(self, spec: TransferSpec[KeySpec, GpuSpec]) -> HopResult:
        """Move the blocks; see `TransferHandler.transfer`.

        Raises:
            TierError: the device or the index does not work.
        """
        return await self._io.run(spec, lambda: self._load(spec))

    def modes(self) -> Mapping[str, str]:
        """What is in effect."""
        return self._io.modes()

    def close(self) -> None:
        """Let go of the staging."""
        self._io.close()

    def _load(self, spec: TransferSpec[KeySpec, GpuSpec]) -> HopResult:
        io = self._io
        staging = io.staging
        statuses = [BlockStatus.MISSING] * len(spec)
        with io.store.reading(spec.keys, [staging.area_bytes] * len(spec)) as batch:
            ordered = sorted(batch.found, key=lambda one: one.place)
            with io.leased(len(ordered)) as areas:
                area_of = {one.position: area for one, area in zip(ordered, areas, strict=False)}
                read = [one for one in ordered if one.position in area_of]
                failed = io.read(read, areas)
                for i, result in enumerate(batch.results(failed)):
                    statuses[i] = result.status
                for one in ordered[len(areas) :]:
                    statuses[one.position] = io.without_area(len(ordered), load=True)
                right = self._verified(spec, read, area_of, statuses)
                copied = self._scatter(spec, right, area_of, statuses)
        io.touch([spec.keys[i] for i, s in enumerate(statuses) if s is BlockStatus.OK])
        return HopResult(tuple(statuses), copied)

    def _verified(
        self,
        spec: TransferSpec[KeySpec, GpuSpec],
        read: Sequence[Found],
        area_of: Mapping[int, int],
        statuses: list[BlockStatus],
    ) -> list[int]:
        """Positions of the blocks that are what was captured, as far as that is to be found out;
        the others are dropped."""
        io = self._io
        right: list[int] = []
        passed: list[NewBlock] = []
        corrupt: list[NewBlock] = []
        came = [one for one in read if statuses[one.position] is BlockStatus.OK]
        blocks = [NewBlock(spec.keys[one.position], one.checksum) for one in came]
        for one, block, asked_for in zip(came, blocks, io.verification.due(blocks), strict=True):
            i, wanted = one.position, one.checksum
            is_due = asked_for or one.unproven
            length = io.block_bytes.get(spec.dst.blocks[i].group)
            if length is None:
                statuses[i] = BlockStatus.CANCELLED
            elif wanted.length == length and (
                not is_due
                or wanted == io.staging.checksum(block.key, area_of[i], length, wanted.kind)
            ):
                right.append(i)
                if is_due:
                    passed.append(block)
            else:
                statuses[i] = BlockStatus.CORRUPT
                corrupt.append(block)
        io.verification.passed(passed)
        if corrupt:
            io.discard(corrupt)
        return right

    def _scatter(
        self,
        spec: TransferSpec[KeySpec, GpuSpec],
        right: Sequence[int],
        area_of: Mapping[int, int],
        statuses: list[BlockStatus],
    ) -> int:
        """Copy to the engine what is right, unless the call was given up; how many bytes."""
        for i in right:
            statuses[i] = BlockStatus.CANCELLED
        if not right or not spec.commit():
            return 0
        blocks = [spec.dst.blocks[i] for i in right]
        copied = 0
        areas = [area_of[i] for i in right]
        in_place = self._io.staging.scatter(areas, blocks, spec.after)
        for i, block, is_there in zip(right, blocks, in_place, strict=True):
            if is_there:
                statuses[i] = BlockStatus.OK
                copied += len(block.block_ids) * self._engine_block_bytes[block.group]
        return copied


class GpuToNvmeHandler:
    """Gathers blocks into staging, takes their checksums there, writes and publishes them.

    Statuses: OK, also where the block was published before (it is not copied again); NO_SPACE
    where the store or the staging has no room, OVER_BUDGET where it may not be written today;
    CANCELLED where the call was given up before it
    began to write, or where the spec does not name one whole block inside the cache. What is not
    OK has left no trace.
    """

    def __init__(self, context: HandlerContext) -> None:
        """See `HandlerContext`.

        Raises:
            UnsupportedError: the direct way is not in use, and why.
            IdentityError: a block is larger than an area of the staging.
        """
        self._io = StagedIo(context)

    async def transfer(self, spec: TransferSpec[GpuSpec, KeySpec]) -> HopResult:
        """Move the blocks; see `TransferHandler.transfer`.

        Raises:
            TierError: the device, the disk or the index does not work.
        """
        return await self._io.run(spec, lambda: self._store(spec))

    def modes(self) -> Mapping[str, str]:
        """What is in effect."""
        return self._io.modes()

    def close(self) -> None:
        """Let go of the staging."""
        self._io.close()

    def _store(self, spec: TransferSpec[GpuSpec, KeySpec]) -> HopResult:
        io = self._io
        statuses = [BlockStatus.CANCELLED] * len(spec)
        wanted: list[int] = []
        for i, there in enumerate(io.store.contains(spec.keys)):
            if there:
                statuses[i] = BlockStatus.OK
            elif spec.src.blocks[i].group in io.block_bytes:
                wanted.append(i)
        with io.leased(len(wanted)) as areas:
            for i in wanted[len(areas) :]:
                statuses[i] = io.without_area(len(wanted), load=False)
            taken = wanted[: len(areas)]
            copied = self._capture(spec, dict(zip(taken, areas, strict=True)), statuses)
        return HopResult(tuple(statuses), copied)

    def _capture(
        self,
        spec: TransferSpec[GpuSpec, KeySpec],
        area_of: Mapping[int, int],
        statuses: list[BlockStatus],
    ) -> int:
        """Gather, and store what was gathered; how many bytes were."""
        io = self._io
        if not area_of:
            return 0
        blocks = [spec.src.blocks[i] for i in area_of]
        whole = io.staging.gather(blocks, list(area_of.values()), spec.after)
        gathered = {
            i: area for (i, area), is_whole in zip(area_of.items(), whole, strict=True) if is_whole
        }
        lengths = {i: io.block_bytes[spec.src.blocks[i].group] for i in gathered}
        checksums = {
            i: io.staging.checksum(spec.keys[i], area, lengths[i], ChecksumKind.WSUM)
            for i, area in gathered.items()
        }
        try:
            places = self._reserve(spec, checksums, statuses)
        except NoSpace as error:
            logger.debug(
                "tier %s has no room for %d blocks: %s",
                io.tier,
                len(gathered),
                reason_in(io.tier, error),
            )
            for i in gathered:
                statuses[i] = no_room(error)
            return sum(lengths.values())
        published = False
        try:
            if places and spec.commit():
                io.write(list(places.values()), [gathered[i] for i in places])
                io.store.publish(list(places.values()))
                published = True
                io.verification.replaced([place.block for place in places.values()])
        finally:
            if not published:
                io.store.abandon(list(places.values()))
        if published:
            for i in places:
                statuses[i] = BlockStatus.OK
        return sum(lengths.values())

    def _reserve(
        self,
        spec: TransferSpec[GpuSpec, KeySpec],
        checksums: Mapping[int, BlockChecksum],
        statuses: list[BlockStatus],
    ) -> dict[int, Place]:
        """Places for the blocks; those that were published meanwhile are OK and have none."""
        new = [NewBlock(spec.keys[i], checksum) for i, checksum in checksums.items()]
        places: dict[int, Place] = {}
        for i, place in zip(checksums, self._io.store.reserve(new), strict=True):
            if place is None:
                statuses[i] = BlockStatus.OK
            else:
                places[i] = place
        return places
