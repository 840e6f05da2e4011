"""Whole blocks between segment files and staging on the engine's device.

Each call holds the areas of all its blocks at once, and gives them back when no I/O uses them any
more: where I/O hangs they stay out of use.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tiered_kv.config import format_bytes
from tiered_kv.contracts import DeviceStaging, HandlerContext, NewBlock, Place
from tiered_kv.errors import IdentityError, TieredKVError, TierError, UnsupportedError, reason_in
from tiered_kv.specs import HopResult, LoadStoreSpec, TransferSpec
from tiered_kv.values import PAGE_BYTES, BlockKey, BlockStatus, ChecksumKind
from tiered_kv_nvme.engines import kvikio_for_gpu
from tiered_kv_nvme.faults import OUT_OF_SPACE
from tiered_kv_nvme.headers import round_up
from tiered_kv_nvme.kvikio_io import Move, probe, run
from tiered_kv_nvme.reading import Found
from tiered_kv_nvme.store import NvmeStore
from tiered_kv_nvme.writing import Spot

__all__ = ["StagedIo"]

STAGING_SECONDS = 2.0
"""How long a call waits for areas; those of the calls before it come back when their I/O does."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Extent:
    """Whole pages of one block, in a file and in an area."""

    fd: int
    offset: int
    nbytes: int
    area: int


class StagedIo:
    """KvikIO between a store's files and staging on the engine's device, for one handler."""

    def __init__(self, context: HandlerContext) -> None:
        """Find out whether the direct way is in use, and try it in the tier's directory.

        Raises:
            UnsupportedError: it is not, and why.
            IdentityError: a block is larger than an area of the staging.
        """
        if not isinstance(context.store, NvmeStore):
            raise UnsupportedError(
                f"the store of tier {context.tier} is a {type(context.store).__name__}; the direct "
                "way between device and disk needs an NvmeStore"
            )
        self.store: NvmeStore = context.store
        self.tier = context.tier
        self.verification = context.verification
        self._executor = context.executor
        try:
            self._kvikio = kvikio_for_gpu(self.store.settings)
        except UnsupportedError as error:
            raise UnsupportedError(f"tier {self.tier}: {error}") from error
        staging = context.staging()
        if self.store.settings.gpu_direct == "auto" and not staging.device.startswith("cuda"):
            raise UnsupportedError(
                f"tier {self.tier}: the engine's cache is in {staging.device} memory, and "
                "`gpu_direct: auto` is for CUDA devices"
            )
        self.block_bytes = {group.index: group.block_bytes for group in context.geometry.groups}
        if max(self.block_bytes.values()) > staging.area_bytes:
            raise IdentityError(
                f"tier {self.tier}: a block has {max(self.block_bytes.values())} bytes, but an "
                f"area of the device staging has {staging.area_bytes}"
            )
        self._turn = threading.Lock()
        self._staging: DeviceStaging | None = staging
        try:
            self._kvikio.register(staging.buffer)
            self._probe(staging)
        except OSError as error:
            self.close()
            raise UnsupportedError(
                f"tier {self.tier}: KvikIO cannot move bytes between {staging.device} memory and "
                f"{', '.join(str(path) for path in self.store.stripes.paths)}: {error.strerror}"
            ) from error

    def _probe(self, staging: DeviceStaging) -> None:
        stripes = self.store.stripes
        for place in stripes.storing if self.store.settings.writable else ():
            try:
                probe(stripes.paths[place], staging.span(0, staging.area_bytes))
            except OSError as error:
                if error.errno not in OUT_OF_SPACE:  # a full disk can be read all the same
                    raise

    @property
    def staging(self) -> DeviceStaging:
        """The areas.

        Raises:
            TierError: the handler was closed.
        """
        if self._staging is None:
            raise TierError(f"tier {self.tier}: the direct handler is closed", tier=self.tier)
        return self._staging

    async def run(
        self, spec: TransferSpec[LoadStoreSpec, LoadStoreSpec], call: Callable[[], HopResult]
    ) -> HopResult:
        """Run `call` in the executor.

        Raises:
            TierError: the device failed.
            ValueError: source, destination and keys are not equally long.
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
            return await loop.run_in_executor(self._executor, call)
        except (RuntimeError, MemoryError) as error:  # what torch raises when a device fails
            raise TierError(
                f"tier {self.tier}: copying between the engine's cache and its staging failed: "
                f"{error}",
                tier=self.tier,
            ) from error

    @contextmanager
    def leased(self, count: int) -> Iterator[list[int]]:
        """At most `count` areas, as many as there are in time."""
        areas = self._lease(min(count, self.staging.areas))
        try:
            yield areas
        finally:
            self.staging.release(areas)

    def _lease(self, count: int) -> list[int]:
        areas: list[int] = []
        until = time.monotonic() + STAGING_SECONDS
        # One call at a time: two that hold a part each would wait for each other.
        if count and self._turn.acquire(timeout=STAGING_SECONDS):
            try:
                while len(areas) < count:
                    left = max(0.0, until - time.monotonic())
                    more = self.staging.lease(count - len(areas), left)
                    if more is None:
                        break
                    areas.extend(more)
            finally:
                self._turn.release()
        return areas

    def without_area(self, wanted: int, *, load: bool) -> BlockStatus:
        """The status of a block for which a call of `wanted` blocks got no area."""
        if load and wanted <= self.staging.areas:
            return BlockStatus.TIMED_OUT
        return BlockStatus.NO_SPACE

    def read(self, read: Sequence[Found], areas: Sequence[int]) -> dict[int, OSError]:
        """Fill areas with the blocks, in their order; by position, why a block was not read."""
        extents = [
            _extent(one.spot, one.checksum.length, area)
            for one, area in zip(read, areas, strict=False)
        ]
        failed: dict[int, OSError] = {}
        again: list[int] = []
        runs = list(_neighbours(extents, self.staging.area_bytes))
        for place, error in self._run(extents, runs, writing=False).items():
            if len(runs[place]) == 1:
                failed[read[runs[place][0]].position] = error
            else:
                again += runs[place]
        alone = [[i] for i in again]
        for place, error in self._run(extents, alone, writing=False).items():
            failed[read[again[place]].position] = error
        return failed

    def write(self, places: Sequence[Place], areas: Sequence[int]) -> None:
        """Write areas to places.

        Raises:
            NoSpace: the disk is full after all.
            TierError: the disk failed, or a segment's file has vanished.
        """
        with self.store.writing(places) as spots:
            extents = sorted(
                (
                    _extent(spot, place.block.checksum.length, area)
                    for place, spot, area in zip(places, spots, areas, strict=True)
                ),
                key=lambda extent: (extent.fd, extent.offset),
            )
            runs = list(_neighbours(extents, self.staging.area_bytes))
            failed = self._run(extents, runs, writing=True)
            extent_of = {spot.fd: spot.extent for spot in spots}
            self.store.raise_first(
                {runs[place][0]: error for place, error in failed.items()},
                [extent_of[extent.fd] for extent in extents],
            )

    def _run(
        self, extents: Sequence[_Extent], runs: Sequence[Sequence[int]], *, writing: bool
    ) -> dict[int, OSError]:
        moves: list[Move] = []
        for places in runs:
            first = extents[places[0]]
            nbytes = sum(extents[i].nbytes for i in places)
            moves.append(Move(first.fd, first.offset, self.staging.span(first.area, nbytes)))
        return run(self.store.kvikio_files, moves, writing=writing)

    def discard(self, blocks: Sequence[NewBlock]) -> None:
        """Drop blocks that are not what was captured."""
        logger.warning(
            "tier %s: %d blocks do not match their checksums and are dropped: %s",
            self.tier,
            len(blocks),
            ", ".join(block.key.hex() for block in blocks[:3]),
        )
        if not self.store.settings.writable:
            return
        try:
            self.store.discard(blocks)
        except TieredKVError as error:  # the blocks stay, and are found out again
            logger.warning(
                "tier %s: they could not be dropped: %s", self.tier, reason_in(self.tier, error)
            )

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Note that blocks were used."""
        try:
            self.store.touch(keys)
        except TieredKVError as error:  # the blocks are in place; only their recency is lost
            logger.debug("tier %s did not note a use: %s", self.tier, reason_in(self.tier, error))

    def modes(self) -> Mapping[str, str]:
        """What is in effect."""
        staging = self.staging
        return {
            **self.store.stat().modes,
            "engine": "kvikio",
            "gds": str(self._kvikio),
            "gpu_direct": "in use",
            "staging": f"{staging.areas} areas of {format_bytes(staging.area_bytes)} "
            f"in {staging.device} memory",
            "checksum": str(ChecksumKind.WSUM),
        }

    def close(self) -> None:
        """Let go of the staging. Idempotent."""
        staging, self._staging = self._staging, None
        if staging is not None:
            try:
                self._kvikio.deregister(staging.buffer)
            except OSError as error:
                logger.warning("tier %s: the staging stays registered: %s", self.tier, error)


def _extent(spot: Spot, length: int, area: int) -> _Extent:
    return _Extent(spot.fd, spot.extent.offset, round_up(length, PAGE_BYTES), area)


def _neighbours(extents: Iterable[_Extent], area_bytes: int) -> Iterator[list[int]]:
    """Places of the extents that one call can move: what follows on each other in a file, and in
    areas that are filled to their ends."""
    places: list[int] = []
    before: _Extent | None = None
    for place, extent in enumerate(extents):
        joins = (
            before is not None
            and extent.fd == before.fd
            and extent.offset == before.offset + before.nbytes
            and extent.area == before.area + 1
            and before.nbytes == area_bytes
        )
        if places and not joins:
            yield places
            places = []
        places.append(place)
        before = extent
    if places:
        yield places
