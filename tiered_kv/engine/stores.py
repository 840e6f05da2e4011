"""The hops between host slots and any key-addressed store: whoever implements `BlockStore` gets
them for free."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import BlockStore, HandlerContext, NewBlock, Place
from tiered_kv.errors import NoSpace, TieredKVError, TierError
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import CpuSpec, HopResult, KeySpec, LoadStoreSpec, TransferSpec
from tiered_kv.values import BlockKey, BlockStatus

__all__ = ["CpuToStoreHandler", "StoreToCpuHandler", "register_store_handlers"]

logger = logging.getLogger(__name__)


def register_store_handlers(registry: TransferRegistry, spec: type[KeySpec], provider: str) -> None:
    """Register both hops between host slots and the stores that `spec` addresses.

    Raises:
        PluginError: one of the pairs is taken; see `TransferRegistry.register`.
    """
    registry.register(CpuSpec, spec, CpuToStoreHandler, provider=provider)
    registry.register(spec, CpuSpec, StoreToCpuHandler, provider=provider)


class _StoreHandler:
    """What both directions share."""

    def __init__(self, context: HandlerContext) -> None:
        """Raises ValueError where the context carries no store."""
        if context.store is None:
            raise ValueError(f"tier {context.tier!r} has no store to move blocks to or from")
        self._store: BlockStore = context.store
        self._memory = context.memory
        self._executor = context.executor
        self._tier = context.tier
        self._verification = context.verification
        self._rank = context.geometry.rank
        self._closed = False

    async def _run(
        self, spec: TransferSpec[LoadStoreSpec, LoadStoreSpec], call: Callable[[], HopResult]
    ) -> HopResult:
        """Run `call` in the executor, unless there is nothing to move.

        Raises:
            TierError: the handler was closed.
            ValueError: source, destination and keys are not equally long.
        """
        if not len(spec.keys) == len(spec.src) == len(spec.dst):
            raise ValueError(
                f"a hop of {len(spec.keys)} keys has {len(spec.src)} sources and {len(spec.dst)} "
                "destinations"
            )
        if self._closed:
            raise TierError(f"a handler of tier {self._tier!r} is closed", tier=self._tier)
        if not spec.keys:
            return HopResult((), 0)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def modes(self) -> Mapping[str, str]:
        """What is in effect, as the store tells it."""
        return self._store.stat().modes

    def close(self) -> None:
        """Take no more calls. The store belongs to whoever opened it."""
        self._closed = True


class CpuToStoreHandler(_StoreHandler):
    """Writes blocks from host slots into a store: reserve, write, publish, or leave no trace.

    A slot that was given out anew, before, while or after its bytes were read, makes its block
    CANCELLED, and so does a transfer that was given up.
    """

    async def transfer(self, spec: TransferSpec[CpuSpec, KeySpec]) -> HopResult:
        """Write the blocks; see `TransferHandler.transfer`.

        OK is also the answer for a block that was published before; its bytes are not copied
        again. NO_SPACE holds for the whole call: room is given to all or none.
        """
        return await self._run(spec, lambda: self._put(spec))

    def _put(self, spec: TransferSpec[CpuSpec, KeySpec]) -> HopResult:
        statuses = [BlockStatus.CANCELLED] * len(spec)
        new: list[tuple[int, NewBlock]] = []
        for i, (slot, key) in enumerate(zip(spec.src.slots, spec.keys, strict=True)):
            checksum = self._memory.checksum(slot)
            if checksum is not None:
                new.append((i, NewBlock(key, checksum)))
        try:
            places = self._store.reserve([block for _, block in new])
        except NoSpace as error:
            logger.debug("tier %s has no room for %d blocks: %s", self._tier, len(new), error)
            for i, _ in new:
                statuses[i] = BlockStatus.NO_SPACE
            return HopResult(tuple(statuses), 0)
        taken: dict[int, Place] = {}
        for (i, _), place in zip(new, places, strict=True):
            if place is None:
                statuses[i] = BlockStatus.OK
            else:
                taken[i] = place
        unpublished = dict(taken)
        try:
            copied = self._write(spec, unpublished)
            for i in self._kept(spec, copied):
                statuses[i] = BlockStatus.OK
            published = [i for i in copied if statuses[i] is BlockStatus.OK]
            self._store.publish([taken[i] for i in published])
            self._verification.replaced([taken[i].block for i in published])
            for i in published:
                del unpublished[i]
        finally:
            self._store.abandon(list(unpublished.values()))
        return HopResult(tuple(statuses), sum(taken[i].block.checksum.length for i in copied))

    def _write(
        self, spec: TransferSpec[CpuSpec, KeySpec], places: Mapping[int, Place]
    ) -> dict[int, BlockChecksum]:
        """Write what is still bound; which blocks that were."""
        bound: dict[int, BlockChecksum] = {}
        views: list[memoryview] = []
        for i, place in places.items():
            view = self._memory.view(spec.src.slots[i])
            if view is not None and view.nbytes == place.block.checksum.length:
                bound[i] = place.block.checksum
                views.append(view)
        self._store.write([places[i] for i in bound], views)
        return bound

    def _kept(
        self, spec: TransferSpec[CpuSpec, KeySpec], written: Mapping[int, BlockChecksum]
    ) -> list[int]:
        """Which of the written blocks still are what they were when they were read."""
        if not spec.commit():
            return []
        slots = spec.src.slots
        return [i for i, what in written.items() if self._memory.checksum(slots[i]) == what]


class StoreToCpuHandler(_StoreHandler):
    """Reads blocks from a store into host slots and binds them to their rows' checksums.

    It does not compute the checksums: the transfer engine does, after every such hop, as far as the
    tier's settings ask for it. Only where the store says that a block is unproven is it compared
    here, whatever they ask for; CORRUPT ones are dropped.
    """

    async def transfer(self, spec: TransferSpec[KeySpec, CpuSpec]) -> HopResult:
        """Read the blocks; see `TransferHandler.transfer`."""
        return await self._run(spec, lambda: self._get(spec))

    def _get(self, spec: TransferSpec[KeySpec, CpuSpec]) -> HopResult:
        statuses = [BlockStatus.CANCELLED] * len(spec)
        begun: list[int] = []
        views: list[memoryview] = []
        for i, slot in enumerate(spec.dst.slots):
            view = self._memory.begin(slot)
            if view is not None:
                begun.append(i)
                views.append(view)
        copied = 0
        corrupt: list[NewBlock] = []
        found = self._store.read([spec.keys[i] for i in begun], views)
        for i, view, result in zip(begun, views, found, strict=True):
            statuses[i] = result.status
            if result.status is not BlockStatus.OK:
                continue
            if result.checksum is None:
                raise TierError(
                    f"tier {self._tier!r} read block {spec.keys[i].hex()} without saying which "
                    "checksum it must have; the backend breaks the BlockStore contract",
                    tier=self._tier,
                )
            copied += result.checksum.length
            if result.unproven and not self._verifies(spec.keys[i], view, result.checksum):
                statuses[i] = BlockStatus.CORRUPT
                corrupt.append(NewBlock(spec.keys[i], result.checksum))
            elif not self._memory.bind(spec.dst.slots[i], result.checksum):
                statuses[i] = BlockStatus.CANCELLED
        if corrupt:
            self._discard(corrupt)
        self._touch([spec.keys[i] for i in begun if statuses[i] is BlockStatus.OK])
        return HopResult(tuple(statuses), copied)

    def _verifies(self, key: BlockKey, view: memoryview, checksum: BlockChecksum) -> bool:
        return checksum.verifies(key, self._rank, view[: checksum.length])

    def _discard(self, blocks: Sequence[NewBlock]) -> None:
        try:
            self._store.discard(blocks)
        except (TieredKVError, ValueError) as error:  # read only: they are found out again
            logger.warning("tier %s: unproven blocks could not be dropped: %s", self._tier, error)

    def _touch(self, keys: Sequence[BlockKey]) -> None:
        try:
            self._store.touch(keys)
        except TieredKVError as error:  # the blocks are in place; only their recency is lost
            logger.debug("tier %s did not note a use: %s", self._tier, error)
