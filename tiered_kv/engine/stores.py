"""The hops between host slots and any key-addressed store: whoever implements `BlockStore` gets
them for free."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import BlockStore, HandlerContext, NewBlock, Place, no_room
from tiered_kv.engine.hops import drop_corrupt
from tiered_kv.errors import NoSpace, TieredKVError, TierError, reason_in
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import CpuSpec, HopResult, KeySpec, LoadStoreSpec, SlotRef, TransferSpec
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
        again. NO_SPACE, or OVER_BUDGET, holds for the whole call: room is given to all or none.
        """
        return await self._run(spec, lambda: self._put(spec))

    def _put(self, spec: TransferSpec[CpuSpec, KeySpec]) -> HopResult:
        statuses = [BlockStatus.CANCELLED] * len(spec)
        slots, keys = spec.src.slots, spec.keys
        bound = self._memory.checksums(slots)
        # Positions in the spec, of blocks that may still be stored, and what is asked for them.
        asked = [i for i, checksum in enumerate(bound) if checksum is not None]
        new = [
            NewBlock(key, checksum)
            for key, checksum in zip(keys, bound, strict=True)
            if checksum is not None
        ]
        try:
            places = self._store.reserve(new)
        except NoSpace as error:
            logger.debug(
                "tier %s has no room for %d blocks: %s",
                self._tier,
                len(new),
                reason_in(self._tier, error),
            )
            for i in asked:
                statuses[i] = no_room(error)
            return HopResult(tuple(statuses), 0)
        taken: dict[int, Place] = {}
        for i, place in zip(asked, places, strict=True):
            if place is None:
                statuses[i] = BlockStatus.OK
            else:
                taken[i] = place
        unpublished: Mapping[int, Place] = taken
        try:
            written = self._write(slots, taken)
            kept = self._kept(spec, written)
            published = list(kept.values())
            self._store.publish(published)
            self._verification.replaced([place.block for place in published])
            for i in kept:
                statuses[i] = BlockStatus.OK
            unpublished = {i: place for i, place in taken.items() if i not in kept}
        finally:
            self._store.abandon(list(unpublished.values()))
        copied = sum([place.block.checksum.length for place in written.values()])
        return HopResult(tuple(statuses), copied)

    def _write(self, slots: Sequence[SlotRef], places: Mapping[int, Place]) -> dict[int, Place]:
        """Write what is still bound; which blocks that were."""
        views = self._memory.views([slots[i] for i in places])
        written: dict[int, Place] = {}
        memory: list[memoryview] = []
        for (i, place), view in zip(places.items(), views, strict=True):
            if view is not None and view.nbytes == place.block.checksum.length:
                written[i] = place
                memory.append(view)
        self._store.write(list(written.values()), memory)
        return written

    def _kept(
        self, spec: TransferSpec[CpuSpec, KeySpec], written: Mapping[int, Place]
    ) -> Mapping[int, Place]:
        """Which of the written blocks still are what they were when they were read."""
        if not spec.commit():
            return {}
        slots = spec.src.slots
        now = self._memory.checksums([slots[i] for i in written])
        if now == [place.block.checksum for place in written.values()]:
            return written
        return {
            i: place
            for (i, place), checksum in zip(written.items(), now, strict=True)
            if checksum == place.block.checksum
        }


class StoreToCpuHandler(_StoreHandler):
    """Reads blocks from a store into host slots and binds them to their rows' checksums.

    It does not compute the checksums: the transfer engine does, after every such hop, as far as the
    tier's settings ask for it. Only where the store says that a block is unproven is it compared
    here, whatever they ask for; CORRUPT ones are dropped.
    """

    async def transfer(self, spec: TransferSpec[KeySpec, CpuSpec]) -> HopResult:
        """Read the blocks; see `TransferHandler.transfer`."""
        return await self._run(spec, lambda: self._get(spec))

    async def transfer_and_then(
        self, spec: TransferSpec[KeySpec, CpuSpec], then: Callable[[HopResult], HopResult]
    ) -> HopResult:
        """See `ReadsAndThen`."""
        return await self._run(spec, lambda: then(self._get(spec)))

    def _get(self, spec: TransferSpec[KeySpec, CpuSpec]) -> HopResult:
        statuses = [BlockStatus.CANCELLED] * len(spec)
        slots, keys = spec.dst.slots, spec.keys
        begun: list[int] = []
        views: list[memoryview] = []
        for i, view in enumerate(self._memory.begin_all(slots)):
            if view is not None:
                begun.append(i)
                views.append(view)
        found = self._store.read([keys[i] for i in begun], views)
        copied = 0
        corrupt: list[NewBlock] = []
        right: dict[int, BlockChecksum] = {}
        for i, view, result in zip(begun, views, found, strict=True):
            if result.status is not BlockStatus.OK:
                statuses[i] = result.status
                continue
            checksum = result.checksum
            if checksum is None:
                raise TierError(
                    f"tier {self._tier!r} read block {keys[i].hex()} without saying which "
                    "checksum it must have; the backend breaks the BlockStore contract",
                    tier=self._tier,
                )
            copied += checksum.length
            if result.unproven and not self._verifies(keys[i], view, checksum):
                statuses[i] = BlockStatus.CORRUPT
                corrupt.append(NewBlock(keys[i], checksum))
            else:
                right[i] = checksum
        bound = self._memory.bind_all([slots[i] for i in right], list(right.values()))
        for i, is_bound in zip(right, bound, strict=True):
            if is_bound:
                statuses[i] = BlockStatus.OK
        if corrupt:
            drop_corrupt(self._store, corrupt, self._tier)
        self._touch([keys[i] for i, is_bound in zip(right, bound, strict=True) if is_bound])
        return HopResult(tuple(statuses), copied)

    def _verifies(self, key: BlockKey, view: memoryview, checksum: BlockChecksum) -> bool:
        return checksum.verifies(key, self._rank, view[: checksum.length])

    def _touch(self, keys: Sequence[BlockKey]) -> None:
        try:
            self._store.touch(keys)
        except TieredKVError as error:  # the blocks are in place; only their recency is lost
            logger.debug("tier %s did not note a use: %s", self._tier, reason_in(self._tier, error))
