"""gpu <-> cpu on a device: the order of launches, transfers and waits.

The stand-in device runs nothing before a thread waits for it, and records what it is given and
does. Every test here fails when the line of the implementation that it is about is taken out.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from tests.unit.device_stand_in import StandIn, StandInMark
from tests.unit.gpu_rig import (
    CORRUPT,
    OK,
    Rig,
    byte_tensor,
    geometry_of,
    keys_of,
    random_bytes,
    simple,
    slots_of,
    strided,
)
from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import HandlerContext
from tiered_kv.errors import TierError, UnsupportedError
from tiered_kv.memory import HostBlockPool, KVCaches, layouts_of
from tiered_kv.specs import CpuSpec, GpuBlock, GpuSpec, HopResult, SlotRef, TransferSpec
from tiered_kv.threads import DaemonExecutor
from tiered_kv.values import PAGE_BYTES, BlockKey, ChecksumKind
from tiered_kv_gpu import copies as copies_module
from tiered_kv_gpu.copies import DeviceCopies
from tiered_kv_gpu.handlers import CpuToGpuHandler, GpuToCpuHandler


class RecordingPool(HostBlockPool):
    """Writes what is asked of it into a device's record."""

    def __init__(self, slots: int, slot_bytes: int, device: StandIn) -> None:
        super().__init__(slots, 0, slot_bytes)
        self._device = device
        self.chunk_slots = slots
        self.registered = False

    @property
    def pinned(self) -> bool:
        return self.registered

    def chunk_of(self, number: int) -> int:
        return number // self.chunk_slots

    def view(self, slot: SlotRef) -> memoryview | None:
        self._device.record.append(f"pool: view {slot.number}")
        return super().view(slot)

    def bind(self, slot: SlotRef, checksum: BlockChecksum) -> bool:
        self._device.record.append(f"pool: bind {slot.number}")
        return super().bind(slot, checksum)


class DeviceRig:
    """Both handlers over one stand-in device each; blocks fill their slots (`page` x 2 layers)."""

    def __init__(
        self,
        *,
        slots: int = 16,
        num_blocks: int = 64,
        page: int = PAGE_BYTES // 2,
        threads: int = 1,
        caches: KVCaches | None = None,
        chunks: Sequence[int] = (1,),
    ) -> None:
        self.store_device, self.load_device = StandIn(), StandIn()
        self.caches = caches or simple(num_blocks, page, 2)
        geometry = geometry_of(self.caches, chunks)
        self.pool = RecordingPool(slots, geometry.slot_bytes, self.store_device)
        self.executor = DaemonExecutor(threads, "test-gpu")
        self.kind = ChecksumKind.XXH3
        context = HandlerContext(
            geometry,
            self.pool,
            self.executor,
            "cpu",
            caches=self.caches,
            capture=lambda: self.kind,
        )
        devices = iter((self.store_device, self.load_device))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tiered_kv.memory.caches.device_of", lambda _: None)
            patch.setattr("tiered_kv_gpu.copies.device_of", lambda _: next(devices))
            self.store_handler = GpuToCpuHandler(context)
            self.load_handler = CpuToGpuHandler(context)

    def store(
        self, ids: Sequence[int], slots: Sequence[SlotRef], after: object | None = None
    ) -> HopResult:
        return asyncio.run(
            self.store_handler.transfer(
                TransferSpec(
                    GpuSpec(tuple(GpuBlock(10, (i,)) for i in ids)),
                    CpuSpec(tuple(slots)),
                    tuple(keys_of(len(ids))),
                    after=after,
                )
            )
        )

    def load(
        self, slots: Sequence[SlotRef], ids: Sequence[int], after: object | None = None
    ) -> HopResult:
        self.pool._device = self.load_device
        return asyncio.run(
            self.load_handler.transfer(
                TransferSpec(
                    CpuSpec(tuple(slots)),
                    GpuSpec(tuple(GpuBlock(10, (i,)) for i in ids)),
                    tuple(keys_of(len(ids))),
                    after=after,
                )
            )
        )

    def expected(self, number: int) -> bytes:
        return b"".join(tensor[number].numpy().tobytes() for tensor in self.caches.tensors)

    def stored(self, slot: SlotRef) -> bytes:
        view = self.pool.view(slot)
        assert view is not None
        return bytes(view)

    def close(self) -> None:
        self.store_handler.close()
        self.load_handler.close()
        self.executor.shutdown()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of two blocks."""
    monkeypatch.setattr(copies_module, "STAGING_BYTES", 4 * PAGE_BYTES)


@pytest.fixture
def rig() -> Iterator[DeviceRig]:
    made = DeviceRig()
    yield made
    made.close()


@pytest.fixture
def small_rig(small: None) -> Iterator[DeviceRig]:
    made = DeviceRig()
    yield made
    made.close()


def fence_behind(device: StandIn, work: Callable[[], object]) -> StandInMark:
    device.compute.run(work)
    return device.fence()


def of_lane(record: Sequence[str], lane: str) -> list[str]:
    """What happened to a lane, without its name."""
    return [entry.split(": ")[1] for entry in record if entry.startswith(lane)]


class TestStores:
    def test_the_first_read_comes_after_compute(self, rig: DeviceRig) -> None:
        """F10: what the engine had been given before the store counts, and nothing later."""
        device, tensor = rig.store_device, rig.caches.tensors[0]
        fence = fence_behind(device, lambda: tensor[3].fill_(1))
        device.compute.run(lambda: tensor[3].fill_(2))
        assert rig.store([3], slots_of(1), fence).statuses == (OK,)
        assert rig.stored(SlotRef(0, 1))[: tensor.shape[1]] == b"\1" * tensor.shape[1]
        record = device.record
        assert record.index("compute: marked") < record.index("lane 0: gather")

    def test_without_a_fence_the_device_is_waited_for(self, rig: DeviceRig) -> None:
        device, tensor = rig.store_device, rig.caches.tensors[0]
        device.compute.run(lambda: tensor[3].fill_(2))
        assert rig.store([3], slots_of(1)).statuses == (OK,)
        assert rig.stored(SlotRef(0, 1))[: tensor.shape[1]] == b"\2" * tensor.shape[1]
        assert "synchronised" in device.record

    def test_the_answer_comes_after_the_event_behind_the_last_copy(self, rig: DeviceRig) -> None:
        fence = rig.store_device.fence()
        expected = [rig.expected(i) for i in (3, 4, 9)]
        assert rig.store([3, 4, 9], slots_of(3), fence).statuses == (OK,) * 3
        for tensor in rig.caches.tensors:
            tensor.zero_()  # the engine's blocks may be used anew
        assert [rig.stored(slot) for slot in slots_of(3)] == expected
        done = of_lane(rig.store_device.record, "lane 0")[-5:]
        assert done == ["held back", "gather", "copy_to_host", "marked", "waited"]
        record = rig.store_device.record
        assert record.index("lane 0: waited") < record.index("pool: bind 0")

    def test_groups_overlap_and_a_half_is_not_reused_before_its_event(
        self, small_rig: DeviceRig
    ) -> None:
        rig = small_rig
        ids = [17, 5, 40, 41, 8, 33, 2, 60, 21, 13]
        expected = [rig.expected(i) for i in ids]
        assert rig.store(ids, slots_of(10), rig.store_device.fence()).statuses == (OK,) * 10
        assert [rig.stored(slot) for slot in slots_of(10)] == expected
        record = rig.store_device.record
        for lane, groups in (("lane 0", 3), ("lane 1", 2)):
            order = [e for e in of_lane(record, lane) if e in {"given gather", "waited"}]
            assert order == ["given gather", "waited"] * groups
        first_wait = record.index("lane 0: waited")
        assert record.index("lane 1: given copy_to_host") < first_wait, "the next is under way"
        assert first_wait < record.index("pool: bind 0")

    def test_a_failed_device_leaves_no_copy_running(self, small_rig: DeviceRig) -> None:
        rig = small_rig
        device = rig.store_device
        device.failure = "CUDA error: an illegal memory access was encountered"
        with pytest.raises(TierError, match="illegal memory access"):
            rig.store([1, 2, 3, 4, 5, 6], slots_of(6), device.fence())
        assert not any("bind" in entry for entry in device.record)
        for lane in device.lanes:
            order = [
                e for e in of_lane(device.record, lane.name) if e in {"given gather", "waited"}
            ]
            assert order == ["given gather", "waited"]
        device.failure = None
        slots = slots_of(6, generation=2)
        assert rig.store([1, 2, 3, 4, 5, 6], slots, device.fence()).statuses == (OK,) * 6

    def test_a_launch_that_fails_half_way_is_waited_for(
        self, small_rig: DeviceRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = small_rig
        device = rig.store_device

        launched: list[str] = []
        second = device.lanes[1]
        run = second.run

        def refuse(work: Callable[[], object]) -> None:
            launched.append(work.__name__)
            if work.__name__ == "copy_to_host":
                raise RuntimeError("CUDA error: out of memory")
            run(work)

        monkeypatch.setattr(second, "run", refuse)
        with pytest.raises(TierError, match="out of memory"):
            rig.store([1, 2, 3, 4], slots_of(4), device.fence())
        assert launched == ["gather", "copy_to_host"]
        assert all(of_lane(device.record, lane.name)[-1] == "waited" for lane in device.lanes)


class TestLoads:
    def test_nothing_reaches_the_engine_before_all_is_verified(self, small_rig: DeviceRig) -> None:
        rig = small_rig
        rig.store(range(6), slots_of(6))
        rig.pool.as_array(5)[77] ^= 1
        before = [tensor.clone() for tensor in rig.caches.tensors]
        result = rig.load(slots_of(6), range(20, 26), rig.load_device.fence())
        assert result.statuses == (OK,) * 5 + (CORRUPT,)
        for was, now in zip(before, rig.caches.tensors, strict=True):
            assert torch.equal(now[20:25], was[:5])
            assert torch.equal(now[25:], was[25:])
        record = rig.load_device.record
        views = [i for i, entry in enumerate(record) if entry.startswith("pool: view")]
        given = [i for i, entry in enumerate(record) if entry.endswith("given copy_from_host")]
        assert (len(views), len(given)) == (6, 3)
        assert max(views) < min(given)

    def test_the_first_write_comes_after_compute(self, rig: DeviceRig) -> None:
        """F51: blocks are written when the device is done with what their last owner wanted."""
        rig.store([3], slots_of(1))
        tensor = rig.caches.tensors[0]
        was, read = tensor[40].clone(), []
        fence = fence_behind(rig.load_device, lambda: read.append(tensor[40].clone()))
        assert rig.load(slots_of(1), [40], fence).statuses == (OK,)
        assert torch.equal(read[0], was)
        record = rig.load_device.record
        assert record.index("compute: marked") < record.index("lane 0: scatter")
        done = of_lane(record, "lane 0")[-5:]
        assert done == ["copy_from_host", "held back", "scatter", "marked", "waited"]

    def test_the_bytes_are_in_place_with_the_answer(self, small_rig: DeviceRig) -> None:
        rig = small_rig
        ids = [17, 5, 40, 41, 8, 33, 2, 60, 21]
        rig.store(ids, slots_of(9))
        expected = [rig.expected(i) for i in ids]
        targets = [0, 1, 3, 4, 6, 7, 9, 10, 11]
        result = rig.load(slots_of(9), targets, rig.load_device.fence())
        assert result.statuses == (OK,) * 9
        assert [rig.expected(i) for i in targets] == expected
        for lane, groups in (("lane 0", 3), ("lane 1", 2)):
            order = of_lane(rig.load_device.record, lane)
            order = [e for e in order if e in {"given copy_from_host", "waited"}]
            assert order == ["given copy_from_host", "waited"] * groups
        record = rig.load_device.record
        assert record.index("lane 1: given scatter") < record.index("lane 0: waited")


class TestTransfers:
    """How much one launch and one transfer move."""

    @pytest.fixture
    def sizes(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Bytes of each transfer over the bus."""
        sizes: list[int] = []
        make = copies_module._host_bytes

        def counted(address: int, nbytes: int) -> torch.Tensor:
            sizes.append(nbytes)
            return make(address, nbytes)

        monkeypatch.setattr(copies_module, "_host_bytes", counted)
        return sizes

    def test_neighbouring_slots_are_one_transfer(self, rig: DeviceRig, sizes: list[int]) -> None:
        """In whatever order the spec names them."""
        slots = [SlotRef(i, 1) for i in (6, 1, 2, 9, 0, 5)]
        ids = [10, 11, 12, 13, 14, 15]
        assert rig.store(ids, slots).statuses == (OK,) * 6
        assert sizes == [3 * PAGE_BYTES, 2 * PAGE_BYTES, PAGE_BYTES]
        for slot, i in zip(slots, ids, strict=True):
            assert rig.stored(slot) == rig.expected(i)
        sizes.clear()
        targets = [20, 30, 21, 31, 22, 32]
        assert rig.load(slots, targets).statuses == (OK,) * 6
        assert sizes == [3 * PAGE_BYTES, 2 * PAGE_BYTES, PAGE_BYTES]
        assert [rig.expected(i) for i in targets] == [rig.expected(i) for i in ids]

    def test_a_transfer_ends_where_the_registered_range_does(
        self, rig: DeviceRig, sizes: list[int]
    ) -> None:
        """A driver refuses one copy over memory that it was told of in two parts."""
        rig.pool.chunk_slots = 4
        assert rig.store(range(6), [SlotRef(i, 1) for i in range(2, 8)]).statuses == (OK,) * 6
        assert sizes == [2 * PAGE_BYTES, 4 * PAGE_BYTES]

    def test_what_lies_behind_a_block_is_left_alone(self, sizes: list[int]) -> None:
        rig = DeviceRig(page=100)
        whole = np.concatenate([rig.pool.as_array(i) for i in range(16)])
        assert not whole.any()
        assert rig.store(range(4), slots_of(4)).statuses == (OK,) * 4
        assert sizes == [200] * 4
        for i in range(4):
            assert not rig.pool.as_array(i)[200:].any()
            assert rig.stored(SlotRef(i, 1)) == rig.expected(i)
        rig.close()

    @pytest.mark.parametrize("apart", [False, True])
    def test_one_launch_moves_a_group_of_blocks(
        self, monkeypatch: pytest.MonkeyPatch, apart: bool
    ) -> None:
        """Layers cut out of one allocation share it; layers apart have one each."""
        whole = byte_tensor(random_bytes((4, 32, 64), 1))
        named = {str(i): whole[i].clone() if apart else whole[i] for i in range(4)}
        rig = DeviceRig(caches=KVCaches.from_named(named, [list(named)]))
        launches = []
        index = torch.ops.aten.index.Tensor_out

        class Counting:
            @staticmethod
            def Tensor_out(  # noqa: N802 - as torch calls it
                pages: torch.Tensor, ids: list[torch.Tensor], *, out: torch.Tensor
            ) -> None:
                launches.append(ids[0].numel())
                index(pages, ids, out=out)

        monkeypatch.setattr(torch.ops.aten, "index", Counting)
        assert rig.store(range(16), slots_of(16)).statuses == (OK,) * 16
        assert launches == [16] * (4 if apart else 1)
        rig.close()

    def test_staging_is_bounded_and_taken_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        taken: list[int] = []
        zeros = torch.zeros

        def counted(*args: object, **options: object) -> torch.Tensor:
            made = zeros(*args, **options)  # type: ignore[call-overload]
            assert isinstance(made, torch.Tensor)
            taken.append(made.nbytes)
            return made

        caches = simple(4, 8, 1)
        monkeypatch.setattr(torch, "zeros", counted)
        for slot_bytes, halves, areas in [
            (1 << 20, 2, 16),
            (3 << 20, 2, 5),
            (16 << 20, 2, 1),
            (20 << 20, 1, 1),
            (40 << 20, 1, 1),
        ]:
            taken.clear()
            pool = HostBlockPool(1, 0, slot_bytes)
            layouts = layouts_of(caches, geometry_of(caches, [1]))
            copies = DeviceCopies(caches, layouts, pool, StandIn())
            assert (copies.depth, copies.group_size(layouts[10])) == (halves, areas)
            large = [nbytes for nbytes in taken if nbytes >= 1 << 20]
            assert large == [areas * slot_bytes] * halves
        taken.clear()
        rig = DeviceRig()
        taken.clear()
        rig.store(range(4), slots_of(4))
        rig.load(slots_of(4), range(8, 12))
        assert taken == []
        rig.close()

    def test_new_memory_is_used_after_the_engine_is_done_with_it(self) -> None:
        """What the allocator hands out may still have the engine's work before it."""
        device = StandIn()
        caches = simple(page=PAGE_BYTES)
        geometry = geometry_of(caches, [1])
        pool = HostBlockPool(1, 0, geometry.slot_bytes)
        copies = DeviceCopies(caches, layouts_of(caches, geometry), pool, device)
        for _ in range(2):
            half = copies.take(wait=True)
            assert half is not None
            half.lane.mark().wait()
        for lane in device.lanes:
            order = of_lane(device.record, lane.name)
            assert order == ["given held back", "given marked", "held back", "marked", "waited"]

    def test_a_device_that_is_full_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object, **__: object) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

        caches = simple()
        layouts = layouts_of(caches, geometry_of(caches, [1]))
        pool = HostBlockPool(1, 0, 1 << 20)
        monkeypatch.setattr(torch, "zeros", full)
        with pytest.raises(UnsupportedError, match=r"cannot take 33,554,432 bytes of stand-in:0"):
            DeviceCopies(caches, layouts, pool, StandIn())

    def test_calls_side_by_side_share_the_halves(self, small: None) -> None:
        """More calls than halves, each with several groups: all end, none mixes up its blocks."""
        rig = DeviceRig(slots=48, threads=4)
        ids = np.random.default_rng(1).permutation(64)[:48].tolist()
        specs = [
            TransferSpec(
                GpuSpec(tuple(GpuBlock(10, (i,)) for i in ids[first : first + 8])),
                CpuSpec(tuple(SlotRef(first + j, 1) for j in range(8))),
                tuple(BlockKey(b"%d" % i) for i in ids[first : first + 8]),
                after=rig.store_device.fence(),
            )
            for first in range(0, 48, 8)
        ]

        async def all_of_them() -> list[HopResult]:
            return await asyncio.gather(*(rig.store_handler.transfer(spec) for spec in specs))

        results = asyncio.run(asyncio.wait_for(all_of_them(), 60))
        assert [result.statuses for result in results] == [(OK,) * 8] * 6
        for slot, i in enumerate(ids):
            assert rig.stored(SlotRef(slot, 1)) == rig.expected(i)
        lanes = {entry.split(":")[0] for entry in rig.store_device.record if "gather" in entry}
        print(f"groups {sum('given gather' in e for e in rig.store_device.record)}, lanes {lanes}")
        assert lanes == {"lane 0", "lane 1"}
        rig.close()

    def test_a_caller_without_a_half_waits_for_one(self, small: None) -> None:
        rig = DeviceRig()
        copies = DeviceCopies(
            rig.caches, layouts_of(rig.caches, geometry_of(rig.caches, [1])), rig.pool, StandIn()
        )
        held = [copies.take(wait=True), copies.take(wait=True)]
        assert copies.take(wait=False) is None
        got = []
        thread = threading.Thread(target=lambda: got.append(copies.take(wait=True)))
        thread.start()
        assert held[0] is not None
        copies.give_back(held[0])
        thread.join(30)
        assert got == [held[0]]
        rig.close()


class TestModes:
    def test_what_is_in_effect_is_shown(self, rig: DeviceRig) -> None:
        handlers = (rig.store_handler, rig.load_handler)
        for registered, kind in itertools.product((False, True), ChecksumKind):
            rig.pool.registered, rig.kind = registered, kind
            memory = "pinned" if registered else "pageable"
            expected = {"copy": f"stand-in:0 streams, {memory}", "checksum": kind.value}
            assert [handler.modes() for handler in handlers] == [expected] * 2

    def test_the_checksum_is_the_one_that_is_wanted_then(self, rig: DeviceRig) -> None:
        for generation, kind in enumerate((*ChecksumKind, ChecksumKind.XXH3), 1):
            rig.kind = kind
            slots = slots_of(2, generation)
            assert rig.store([1, 2], slots).statuses == (OK, OK)
            found = [rig.pool.checksum(slot) for slot in slots]
            for i, checksum in enumerate(found):
                data = memoryview(rig.expected(i + 1))
                assert checksum == BlockChecksum.capture(keys_of(2)[i], 0, data, kind)
            assert rig.load(slots, [30, 31]).statuses == (OK, OK)
            assert rig.expected(30) == rig.expected(1)

    def test_the_checksum_on_the_host_too(self) -> None:
        rig = Rig(strided(), [4, 2], capture=lambda: ChecksumKind.WSUM)
        blocks = [GpuBlock(10, (3, 1, 2, 9)), GpuBlock(11, (0, 15))]
        assert rig.store(keys_of(2), blocks, slots_of(2)).statuses == (OK, OK)
        kinds = [checksum and checksum.kind for checksum in map(rig.pool.checksum, slots_of(2))]
        assert kinds == [ChecksumKind.WSUM] * 2
        assert rig.load(keys_of(2), slots_of(2), blocks).statuses == (OK, OK)
        assert rig.store_handler.modes() == {"copy": "numpy", "checksum": "wsum"}
        rig.close()
