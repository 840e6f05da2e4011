"""Handlers that break one promise each; run by `test_saboteurs` in a child process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from tests.conformance.direct import DirectLoad, DirectStore, MemorySpec, direct_case
from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import HandlerContext, NewBlock, Place, TransferHandler
from tiered_kv.engine import CpuToStoreHandler, StoreToCpuHandler
from tiered_kv.specs import CpuSpec, GpuSpec, HopResult, KeySpec, LoadStoreSpec, TransferSpec
from tiered_kv.testing.conformance.contract import HandlerPromise
from tiered_kv.testing.conformance.handlers import (
    CpuToGpuConformance,
    CpuToStoreConformance,
    GpuToCpuConformance,
    GpuToStoreConformance,
    HandlerCase,
    StoreToCpuConformance,
    StoreToGpuConformance,
)
from tiered_kv.testing.conformance.handlers.fixtures import HandlerFixtures
from tiered_kv.values import BlockStatus
from tiered_kv_gpu.handlers import CpuToGpuHandler, GpuToCpuHandler

OK = BlockStatus.OK


class Saboteur(HandlerFixtures):
    """An instance that fails `check`, for breaking `promise`."""

    pair: ClassVar[tuple[type[LoadStoreSpec], type[LoadStoreSpec]]]
    handler: ClassVar[type[TransferHandler[Any, Any]]]
    check: ClassVar[str]
    promise: ClassVar[HandlerPromise]

    @pytest.fixture
    def case(self) -> HandlerCase:
        return direct_case(*self.pair, self.handler)


class GpuToCpu(Saboteur, GpuToCpuConformance):
    pair = GpuSpec, CpuSpec


class CpuToGpu(Saboteur, CpuToGpuConformance):
    pair = CpuSpec, GpuSpec


class CpuToStore(Saboteur, CpuToStoreConformance):
    pair = CpuSpec, MemorySpec


class StoreToCpu(Saboteur, StoreToCpuConformance):
    pair = MemorySpec, CpuSpec


class GpuToStore(Saboteur, GpuToStoreConformance):
    pair = GpuSpec, MemorySpec


class StoreToGpu(Saboteur, StoreToGpuConformance):
    pair = MemorySpec, GpuSpec


# ------------------------------------------------------------------------------- to and from cpu


class TestAnswersOkWithoutBytes(StoreToCpu):
    check = "test_blocks_arrive_bit_for_bit"
    promise = HandlerPromise.OK_MEANS_THERE

    class handler(StoreToCpuHandler):
        def _get(self, spec: TransferSpec[KeySpec, CpuSpec]) -> HopResult:
            kept = [bytes(view) for view in map(self._memory.begin, spec.dst.slots) if view]
            result = super()._get(spec)
            for slot, was in zip(spec.dst.slots, kept, strict=True):
                bound = self._memory.view(slot)
                if bound is not None:
                    # Spoils the pool itself, of which handlers see a protocol without arrays.
                    self._memory.as_array(slot.number)[:] = bytearray(was)  # type: ignore[attr-defined]
            return result


class TestBelievesRowsWithoutChecksum(StoreToCpu):
    check = "test_a_store_that_does_not_say_its_checksum_is_not_believed"
    promise = HandlerPromise.OK_MEANS_THERE

    class handler(StoreToCpuHandler):
        def _get(self, spec: TransferSpec[KeySpec, CpuSpec]) -> HopResult:
            for slot in spec.dst.slots:
                self._memory.begin(slot)
            return HopResult((OK,) * len(spec), 0)


class TestSortsItsAnswers(StoreToCpu):
    check = "test_what_is_not_stored_is_missing"
    promise = HandlerPromise.MISSING

    class handler(StoreToCpuHandler):
        def _get(self, spec: TransferSpec[KeySpec, CpuSpec]) -> HopResult:
            result = super()._get(spec)
            return HopResult(
                tuple(sorted(result.statuses, key=lambda s: s.value)), result.copied_bytes
            )


class TestBindsAChecksumOfItsOwn(StoreToCpu):
    check = "test_the_checksum_travels_unchanged"
    promise = HandlerPromise.CHECKSUM

    class handler(StoreToCpuHandler):
        def __init__(self, context: HandlerContext) -> None:
            super().__init__(context)
            memory, rank = self._memory, context.geometry.rank

            class Anew:
                begin_all = staticmethod(memory.begin_all)

                @staticmethod
                def bind_all(slots: Any, checksums: Sequence[BlockChecksum]) -> list[bool]:
                    anew: list[BlockChecksum] = []
                    for slot, checksum in zip(slots, checksums, strict=True):
                        # Spoils the pool itself, of which handlers see a protocol without arrays.
                        array = memory.as_array(slot.number)  # type: ignore[attr-defined]
                        data = memoryview(array[: checksum.length])
                        anew.append(BlockChecksum.capture(self.keys[slot], rank, data))
                    return memory.bind_all(slots, anew)

            # Stands in with the methods that are called, not with the whole protocol.
            self._memory = Anew  # type: ignore[assignment]

        def _get(self, spec: TransferSpec[KeySpec, CpuSpec]) -> HopResult:
            self.keys = dict(zip(spec.dst.slots, spec.keys, strict=True))
            return super()._get(spec)


class TestVouchesForWhatItRead(StoreToCpu):
    check = "test_wrong_bytes_never_count_as_right"
    promise = HandlerPromise.VERIFIED_FIRST
    handler = TestBindsAChecksumOfItsOwn.handler


class TestWritesForeignSlots(StoreToCpu):
    check = "test_a_slot_that_was_given_out_anew_is_not_written"
    promise = HandlerPromise.OK_MEANS_THERE

    class handler(StoreToCpuHandler):
        def _get(self, spec: TransferSpec[KeySpec, CpuSpec]) -> HopResult:
            for slot in spec.dst.slots:
                # Spoils the pool itself, of which handlers see a protocol without arrays.
                self._memory.as_array(slot.number)[:100] = 0  # type: ignore[attr-defined]
            return super()._get(spec)


class TestReadsAnySlot(CpuToStore):
    check = "test_the_slot_is_looked_at_again_when_its_bytes_were_read"
    promise = HandlerPromise.STALE_READ

    class handler(CpuToStoreHandler):
        def _kept(
            self, spec: TransferSpec[CpuSpec, KeySpec], written: Mapping[int, Place]
        ) -> Mapping[int, Place]:
            return written if spec.commit() else {}


class TestPublishesWhatWasGivenUp(CpuToStore):
    check = "test_a_call_that_is_given_up_leaves_no_trace"
    promise = HandlerPromise.GIVEN_UP

    class handler(CpuToStoreHandler):
        def _kept(
            self, spec: TransferSpec[CpuSpec, KeySpec], written: Mapping[int, Place]
        ) -> Mapping[int, Place]:
            spec.commit()
            return written


class TestNeverAsks(CpuToStore):
    check = "test_commit_is_asked_once_before_anything_arrives"
    promise = HandlerPromise.COMMIT

    class handler(CpuToStoreHandler):
        def _kept(
            self, spec: TransferSpec[CpuSpec, KeySpec], written: Mapping[int, Place]
        ) -> Mapping[int, Place]:
            return written


class TestLeaksPlacesWhenAStepFails(CpuToStore):
    check = "test_each_step_that_fails_leaves_no_trace"
    promise = HandlerPromise.GIVEN_UP

    class handler(CpuToStoreHandler):
        def __init__(self, context: HandlerContext) -> None:
            super().__init__(context)
            store = self._store

            class Leaking:
                reserve, write = staticmethod(store.reserve), staticmethod(store.write)
                publish, stat = staticmethod(store.publish), staticmethod(store.stat)

                @staticmethod
                def abandon(places: list[Place]) -> None:
                    pass

            # Stands in with the methods that are called, not with the whole protocol.
            self._store = Leaking  # type: ignore[assignment]


class TestCountsWhatIsThereAlready(CpuToStore):
    check = "test_what_is_published_already_is_ok_and_not_copied"
    promise = HandlerPromise.COPIED

    class handler(CpuToStoreHandler):
        def _put(self, spec: TransferSpec[CpuSpec, KeySpec]) -> HopResult:
            bound = [self._memory.checksum(slot) for slot in spec.src.slots]
            total = sum(checksum.length for checksum in bound if checksum is not None)
            return HopResult(super()._put(spec).statuses, total)


class TestMovesWhenClosed(CpuToStore):
    check = "test_closing_ends_it"
    promise = HandlerPromise.CLOSED

    class handler(CpuToStoreHandler):
        def close(self) -> None:
            pass


class TestIgnoresItsLengths(CpuToStore):
    check = "test_unequal_lengths_are_refused"
    promise = HandlerPromise.EQUALLY_LONG

    class handler(CpuToStoreHandler):
        async def transfer(self, spec: TransferSpec[CpuSpec, KeySpec]) -> HopResult:
            shortest = range(min(len(spec.keys), len(spec.src), len(spec.dst)))
            keys = tuple(spec.keys[i] for i in shortest)
            src, dst = spec.src.take(shortest), spec.dst.take(shortest)
            return await super().transfer(TransferSpec(src, dst, keys, spec.commit))


class TestCallsItsThreadsPerBlock(CpuToStore):
    check = "test_blocking_work_is_given_to_the_executor_per_call"
    promise = HandlerPromise.EXECUTOR

    class handler(CpuToStoreHandler):
        async def transfer(self, spec: TransferSpec[CpuSpec, KeySpec]) -> HopResult:
            results = [
                await super(type(self), self).transfer(
                    TransferSpec(spec.src.take([i]), spec.dst.take([i]), (key,), spec.commit)
                )
                for i, key in enumerate(spec.keys)
            ]
            statuses = tuple(status for result in results for status in result.statuses)
            return HopResult(statuses, sum(result.copied_bytes for result in results))


class TestReturnsBeforeItsThread(CpuToStore):
    check = "test_a_call_returns_after_its_last_copy"
    promise = HandlerPromise.RETURNS_LAST

    class handler(CpuToStoreHandler):
        async def transfer(self, spec: TransferSpec[CpuSpec, KeySpec]) -> HopResult:
            self.running = asyncio.ensure_future(super().transfer(spec))
            await asyncio.sleep(0)
            return HopResult((OK,) * len(spec), 0)


# ------------------------------------------------------------------------------ the engine's cache


class TestCopiesTooMuch(CpuToGpu):
    check = "test_blocks_arrive_bit_for_bit"
    promise = HandlerPromise.OK_MEANS_THERE

    class handler(CpuToGpuHandler):
        def __init__(self, context: HandlerContext) -> None:
            super().__init__(context)
            self.tensors = context.caches.tensors

        def _load(self, spec: TransferSpec[CpuSpec, GpuSpec]) -> HopResult:
            result = super()._load(spec)
            last = spec.dst.blocks[-1].block_ids[-1]
            self.tensors[0][(last + 1) % self.tensors[0].shape[0], -1] = 1
            return result


class TestWritesBeforeItVerifies(CpuToGpu):
    check = "test_a_block_that_fails_verification_is_not_written"
    promise = HandlerPromise.OK_MEANS_THERE

    class handler(CpuToGpuHandler):
        def __init__(self, context: HandlerContext) -> None:
            super().__init__(context)
            self.tensors = context.caches.tensors

        def _load(self, spec: TransferSpec[CpuSpec, GpuSpec]) -> HopResult:
            for block in spec.dst.blocks:
                for tensor in self.tensors[:1]:
                    tensor[block.block_ids[0], 0] = 9
            return super()._load(spec)


class TestStoresPartsOfBlocks(GpuToCpu):
    check = "test_what_is_no_whole_block_costs_itself_alone"
    promise = HandlerPromise.OK_MEANS_THERE

    class handler(GpuToCpuHandler):
        def _store(self, spec: TransferSpec[GpuSpec, CpuSpec]) -> HopResult:
            result = super()._store(spec)
            return HopResult((OK,) * len(spec), result.copied_bytes)


class TestLoadsWithoutVerifying(StoreToGpu):
    check = "test_a_block_that_fails_verification_is_not_written"
    promise = HandlerPromise.VERIFIED_FIRST

    class handler(DirectLoad):
        def verifies(self, spec: TransferSpec[Any, Any], i: int, area: int, wanted: Any) -> bool:
            return True


class TestBelievesItsStore(StoreToGpu):
    check = "test_wrong_bytes_never_count_as_right"
    promise = HandlerPromise.VERIFIED_FIRST
    handler = TestLoadsWithoutVerifying.handler


class TestLosesStagingOfWhatWasGivenUp(StoreToGpu):
    check = "test_a_call_that_is_given_up_leaves_no_trace"
    promise = HandlerPromise.PER_BLOCK

    class handler(DirectLoad):
        def move(self, spec: TransferSpec[KeySpec, GpuSpec]) -> HopResult:
            result = super().move(spec)
            if OK not in result.statuses:
                self.staging.lease(2, 0.0)
            return result


class TestGathersAfterItCommitted(GpuToStore):
    check = "test_commit_is_asked_once_before_anything_arrives"
    promise = HandlerPromise.OK_MEANS_THERE

    class handler(DirectStore):
        def gathered(
            self, spec: TransferSpec[GpuSpec, KeySpec], areas: list[int]
        ) -> dict[int, NewBlock]:
            spec.commit()
            return super().gathered(spec, areas)

        def put(
            self,
            spec: TransferSpec[GpuSpec, KeySpec],
            places: Mapping[int, Place],
            areas: list[int],
            statuses: list[BlockStatus],
        ) -> None:
            again = TransferSpec(spec.src, spec.dst, spec.keys)
            super().put(again, places, areas, statuses)


class TestCommitsWhenItIsPublished(GpuToStore):
    check = "test_commit_is_asked_once_before_anything_arrives"
    promise = HandlerPromise.COMMIT_WHEN

    class handler(DirectStore):
        def put(
            self,
            spec: TransferSpec[GpuSpec, KeySpec],
            places: Mapping[int, Place],
            areas: list[int],
            statuses: list[BlockStatus],
        ) -> None:
            again = TransferSpec(spec.src, spec.dst, spec.keys)
            super().put(again, places, areas, statuses)
            spec.commit()
