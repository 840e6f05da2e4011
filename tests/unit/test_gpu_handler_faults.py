"""gpu <-> cpu: wrong bytes, slots that are handed out anew meanwhile, and the contract."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.gpu_rig import (
    CANCELLED,
    CORRUPT,
    MISSING,
    OK,
    BothWays,
    Rig,
    keys_of,
    simple,
    slots_of,
    strided,
)
from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import HandlerContext
from tiered_kv.errors import IdentityError, TierError, UnsupportedError
from tiered_kv.memory import HostBlockPool
from tiered_kv.specs import CpuSpec, GpuBlock, GpuSpec, HopResult, SlotRef, TransferSpec
from tiered_kv.threads import DaemonExecutor
from tiered_kv.values import BlockKey, CacheGeometry, GroupGeometry
from tiered_kv_gpu.copies import DeviceCopies, HostCopies
from tiered_kv_gpu.handlers import CpuToGpuHandler, GpuToCpuHandler
from tiered_kv_gpu.layout import GroupLayout


class TestWrongBytes(BothWays):
    def test_a_block_that_fails_verification_is_not_written(self, make: Callable[..., Rig]) -> None:
        """F1, F3: the good ones of the call are."""
        rig = make(simple(), [2])
        blocks = [GpuBlock(10, (2 * i, 2 * i + 1)) for i in range(4)]
        rig.store(keys_of(4), blocks, slots_of(4))
        before = rig.cache_bytes()
        for tensor in rig.caches.tensors:
            tensor.fill_(0x5A)
        rig.pool.as_array(1)[100] ^= 4
        size = rig.geometry.groups[0].block_bytes
        result = rig.load(keys_of(4), slots_of(4), blocks)
        assert result == HopResult((OK, CORRUPT, OK, OK), 3 * size)
        for was, now in zip(before, rig.cache_bytes(), strict=True):
            assert (now[[2, 3]] == 0x5A).all()
            np.testing.assert_array_equal(now[[0, 1, 4, 5, 6, 7]], was[[0, 1, 4, 5, 6, 7]])

    def test_every_single_bit_counts(self) -> None:
        rig = Rig(simple(4, 16, 1), [1])
        rig.store(keys_of(1), [GpuBlock(10, (0,))], slots_of(1))
        array = rig.pool.as_array(0)
        for bit in range(16 * 8):
            array[bit // 8] ^= 1 << (bit % 8)
            assert rig.load(keys_of(1), slots_of(1), [GpuBlock(10, (1,))]).statuses == (CORRUPT,)
            array[bit // 8] ^= 1 << (bit % 8)
        assert rig.load(keys_of(1), slots_of(1), [GpuBlock(10, (1,))]).statuses == (OK,)
        print("flipped 128 bits, found 128")
        rig.close()

    def test_another_key_rank_or_length_is_found(self, make: Callable[..., Rig]) -> None:
        """F4, F5."""
        rig = make(strided(), [4, 2])
        rig.store(keys_of(1), [GpuBlock(10, (0, 1, 2, 3))], slots_of(1))
        target = [GpuBlock(10, (4, 5, 6, 7))]
        other_rank = make(rig.caches, [4, 2], rank=1, pool=rig.pool)
        before = rig.cache_bytes()
        assert rig.load([BlockKey(b"other")], slots_of(1), target).statuses == (CORRUPT,)
        assert other_rank.load(keys_of(1), slots_of(1), target).statuses == (CORRUPT,)
        assert rig.load(keys_of(1), slots_of(1), [GpuBlock(11, (4, 5))]).statuses == (CORRUPT,)
        for was, now in zip(before, rig.cache_bytes(), strict=True):
            np.testing.assert_array_equal(now, was)
        assert rig.load(keys_of(1), slots_of(1), target).statuses == (OK,)

    def test_the_cache_may_be_reused_after_a_store(self, make: Callable[..., Rig]) -> None:
        """F10."""
        rig = make(simple(), [1])
        before = rig.cache_bytes()
        rig.store(keys_of(2), [GpuBlock(10, (1,)), GpuBlock(10, (2,))], slots_of(2))
        for tensor in rig.caches.tensors:
            tensor.fill_(1)
        rig.load(keys_of(2), slots_of(2), [GpuBlock(10, (5,)), GpuBlock(10, (6,))])
        for was, now in zip(before, rig.cache_bytes(), strict=True):
            np.testing.assert_array_equal(now[[5, 6]], was[[1, 2]])

    def test_slots_without_a_block(self, make: Callable[..., Rig]) -> None:
        rig = make(simple(), [1])
        rig.store(keys_of(1), [GpuBlock(10, (1,))], slots_of(1))
        assert rig.pool.begin(SlotRef(1, 1)) is not None
        asked = [SlotRef(0, 1), SlotRef(0, 2), SlotRef(0, 0), SlotRef(1, 1), SlotRef(2, 1)]
        result = rig.load([keys_of(1)[0]] * 5, asked, [GpuBlock(10, (i,)) for i in range(8, 13)])
        assert result.statuses == (OK, MISSING, MISSING, MISSING, MISSING)


class Meddling(HostBlockPool):
    """Hands a slot out anew, and fills it, right before the n-th call of a method."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        super().__init__(slots, 0, slot_bytes)
        self.plan: dict[tuple[str, int, int], int] = {}
        self.calls: dict[tuple[str, int], int] = {}
        self.meddled = 0

    def meddle(self, method: str, slot: int, call: int) -> None:
        self.plan[method, slot, call] = 1

    def _before(self, method: str, slot: SlotRef) -> None:
        call = self.calls[method, slot.number] = self.calls.get((method, slot.number), 0) + 1
        if self.plan.pop((method, slot.number, call), None):
            self.meddled += 1
            newer = SlotRef(slot.number, slot.generation + 1)
            view = super().begin(newer)
            assert view is not None
            view[:] = b"\xee" * view.nbytes
            assert super().bind(newer, BlockChecksum.capture(BlockKey(b"new"), 0, view))

    def begin(self, slot: SlotRef) -> memoryview | None:
        self._before("begin", slot)
        return super().begin(slot)

    def bind(self, slot: SlotRef, checksum: BlockChecksum) -> bool:
        self._before("bind", slot)
        return super().bind(slot, checksum)

    def checksum(self, slot: SlotRef) -> BlockChecksum | None:
        self._before("checksum", slot)
        return super().checksum(slot)

    def view(self, slot: SlotRef) -> memoryview | None:
        self._before("view", slot)
        return super().view(slot)


class TestSlotsHandedOutAnew(BothWays):
    """F8, F52."""

    @pytest.mark.parametrize("method", ["begin", "bind"])
    def test_during_a_store(self, make: Callable[..., Rig], method: str) -> None:
        caches = simple()
        pool = Meddling(3, 4096)
        rig = make(caches, [1], pool=pool)
        pool.meddle(method, 1, 1)
        blocks = [GpuBlock(10, (i,)) for i in range(3)]
        assert rig.store(keys_of(3), blocks, slots_of(3)).statuses == (OK, CANCELLED, OK)
        assert pool.meddled == 1
        assert pool.checksum(SlotRef(1, 1)) is None
        assert pool.checksum(SlotRef(1, 2)) is not None

    @pytest.mark.parametrize(
        ("method", "call", "written"),
        [
            ("checksum", 1, False),
            ("view", 1, False),
            ("checksum", 2, False),  # after it was verified, before the copy
            ("checksum", 3, True),  # after the copy
        ],
    )
    def test_during_a_load(
        self, make: Callable[..., Rig], method: str, call: int, written: bool
    ) -> None:
        pool = Meddling(3, 4096)
        rig = make(simple(), [1], pool=pool)
        blocks = [GpuBlock(10, (i,)) for i in range(3)]
        rig.store(keys_of(3), blocks, slots_of(3))
        before = rig.cache_bytes()
        pool.calls.clear()
        pool.meddle(method, 1, call)
        targets = [GpuBlock(10, (i,)) for i in range(8, 11)]
        result = rig.load(keys_of(3), slots_of(3), targets)
        assert result.statuses == (OK, MISSING, OK)
        assert pool.meddled == 1
        for was, now in zip(before, rig.cache_bytes(), strict=True):
            np.testing.assert_array_equal(now[[8, 10]], was[[0, 2]])
            np.testing.assert_array_equal(now[9], was[1] if written else was[9])

    def test_while_its_bytes_are_verified(self, make: Callable[..., Rig]) -> None:
        """The new bytes fail the old checksum: that is no rot, and must not be reported so."""
        pool = Meddling(1, 4096)
        rig = make(simple(), [1], pool=pool)
        rig.store(keys_of(1), [GpuBlock(10, (0,))], slots_of(1))
        known = pool.checksum(SlotRef(0, 1))
        assert known is not None

        class Late(BlockChecksum):
            def verifies(self, key: BlockKey, rank: int, data: memoryview) -> bool:
                pool.calls.clear()
                pool.meddle("view", 0, 1)
                pool.view(SlotRef(0, 1))
                return super().verifies(key, rank, data)

        pool._checksums[0] = Late(known.length, known.value)
        result = rig.load(keys_of(1), slots_of(1), [GpuBlock(10, (9,))])
        assert (result, pool.meddled) == (HopResult((MISSING,), 0), 1)

    def test_a_writer_beside_loads(self) -> None:
        """Whatever a load says is OK has the bytes of its key; nothing is mixed up."""
        page, rounds = 256 << 10, 100
        rig = Rig(simple(16, page, 4), [1], slots=1)
        key = keys_of(1)[0]
        for i, tensor in enumerate(rig.caches.tensors):
            tensor[0] = i + 1
        own = rig.expected(0, (0,))
        begin, done = threading.Semaphore(0), threading.Semaphore(0)

        def rewrite() -> None:
            """Every second time with the block's own bytes, else with others under its key."""
            for generation in range(2, rounds + 2):
                begin.acquire()
                slot = SlotRef(0, generation)
                view = rig.pool.begin(slot)
                assert view is not None
                data = own if generation % 2 else b"\x77" * len(own)
                view[: len(data)] = data
                assert rig.pool.bind(slot, BlockChecksum.capture(key, 0, view[: len(data)]))
                done.release()

        rig.store([key], [GpuBlock(10, (0,))], [SlotRef(0, 1)])
        thread = threading.Thread(target=rewrite)
        thread.start()
        counts = {(status, beside): 0 for status in (OK, MISSING) for beside in (True, False)}
        for generation in range(1, rounds + 1):
            slot = SlotRef(0, generation)
            for beside in (False, True):
                for tensor in rig.caches.tensors:
                    tensor[5] = 0
                if beside:
                    begin.release()
                (status,) = rig.load([key], [slot], [GpuBlock(10, (5,))]).statuses
                counts[status, beside] += 1
                if status is OK:
                    pages = [row[5] for row in rig.cache_bytes()]
                    expected = [1, 2, 3, 4] if generation % 2 else [0x77] * 4
                    assert [int(page.min()) for page in pages] == expected, "mixed bytes"
                    assert [int(page.max()) for page in pages] == expected, "mixed bytes"
            assert done.acquire(timeout=30)
        thread.join()
        rig.close()
        print(f"loads by (status, beside a rewrite): {counts}")
        assert counts[OK, False] == rounds
        assert counts[MISSING, True] > 0


class TestContract(BothWays):
    def test_empty_batch(self, make: Callable[..., Rig]) -> None:
        """F50."""
        rig = make(simple(), [1])
        assert rig.store([], [], []) == HopResult((), 0)
        assert rig.load([], [], []) == HopResult((), 0)

    def test_unequal_lengths_are_refused(self, make: Callable[..., Rig]) -> None:
        rig = make(simple(), [1])
        block = GpuBlock(10, (0,))
        for keys, blocks, slots in [(1, 1, 2), (1, 2, 1), (2, 1, 1), (0, 1, 1)]:
            with pytest.raises(ValueError, match=f"a hop of {keys} keys"):
                rig.store(keys_of(keys), [block] * blocks, slots_of(slots))
            with pytest.raises(ValueError, match=f"a hop of {keys} keys"):
                rig.load(keys_of(keys), slots_of(slots), [block] * blocks)

    def test_a_block_that_names_nonsense_costs_itself_alone(
        self, make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
    ) -> None:
        rig = make(simple(), [2])
        good = GpuBlock(10, (0, 1))
        bad = [
            GpuBlock(10, (0,)),
            GpuBlock(10, (0, 1), 1),
            GpuBlock(10, (0, 1, 2)),
            GpuBlock(10, ()),
            GpuBlock(10, (0, 16)),
            GpuBlock(10, (-1, 0)),
            GpuBlock(0, (0, 1)),
        ]
        size = rig.geometry.groups[0].block_bytes
        result = rig.store(keys_of(8), [*bad, good], slots_of(8))
        assert result == HopResult((CANCELLED,) * 7 + (OK,), size)
        assert all(rig.pool.checksum(slot) is None for slot in slots_of(7))
        before = rig.cache_bytes()
        targets = [
            GpuBlock(10, (4,), 2),
            GpuBlock(10, (4,), -1),
            GpuBlock(10, (4, 5, 6)),
            GpuBlock(10, (4, 99)),
            GpuBlock(11, (4, 5)),
            GpuBlock(10, (8, 9)),
        ]
        result = rig.load([keys_of(8)[7]] * 6, [SlotRef(7, 1)] * 6, targets)
        assert result == HopResult((CANCELLED,) * 5 + (OK,), size)
        for was, now in zip(before, rig.cache_bytes(), strict=True):
            np.testing.assert_array_equal(now[4:7], was[4:7])
        assert len(caplog.records) == 2, "once per handler"
        assert "only whole blocks of 2 are stored" in caplog.text

    def test_a_cancelled_call_goes_on_in_its_thread(self, make: Callable[..., Rig]) -> None:
        """What has begun ends; what has not begun never does."""
        entered, go_on = threading.Event(), threading.Event()

        class Held(HostBlockPool):
            def begin(self, slot: SlotRef) -> memoryview | None:
                entered.set()
                assert go_on.wait(30)
                return super().begin(slot)

        pool = Held(4, 0, 4096)
        rig = make(simple(), [1], pool=pool)

        def spec(i: int) -> TransferSpec[GpuSpec, CpuSpec]:
            return TransferSpec(
                GpuSpec((GpuBlock(10, (i,)),)), CpuSpec((SlotRef(i, 1),)), (keys_of(2)[i],)
            )

        async def cancel() -> None:
            begun = asyncio.ensure_future(rig.store_handler.transfer(spec(0)))
            queued = asyncio.ensure_future(rig.store_handler.transfer(spec(1)))
            await asyncio.to_thread(entered.wait, 30)
            for task in (begun, queued):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert pool.checksum(SlotRef(0, 1)) is None
            go_on.set()
            await asyncio.wrap_future(rig.executor.submit(lambda: None))

        asyncio.run(cancel())
        assert pool.checksum(SlotRef(0, 1)) is not None
        assert pool.checksum(SlotRef(1, 1)) is None

    def test_a_device_that_fails_is_a_tier_error(
        self, make: Callable[..., Rig], kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = make(simple(), [1])
        rig.store(keys_of(1), [GpuBlock(10, (0,))], slots_of(1))

        def fail(*_: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        copies = {"host": HostCopies, "device": DeviceCopies}[kind]
        monkeypatch.setattr(copies, "gather", fail)
        monkeypatch.setattr(copies, "scatter", fail)
        with pytest.raises(TierError, match="illegal memory access") as caught:
            rig.store(keys_of(1), [GpuBlock(10, (0,))], [SlotRef(1, 1)])
        assert (caught.value.tier, type(caught.value.__cause__)) == ("cpu", RuntimeError)
        assert rig.pool.checksum(SlotRef(1, 1)) is None
        with pytest.raises(TierError, match="illegal memory access"):
            rig.load(keys_of(1), slots_of(1), [GpuBlock(10, (0,))])

    def test_modes_and_close(self, make: Callable[..., Rig], kind: str) -> None:
        rig = make(simple(), [1])
        expected = {"host": "numpy", "device": "torch cpu"}[kind]
        for handler in (rig.store_handler, rig.load_handler):
            assert handler.modes() == {"copy": expected, "checksum": "xxh3"}
            handler.close()
            handler.close()
        with pytest.raises(TierError, match="closed"):
            rig.store(keys_of(1), [GpuBlock(10, (0,))], slots_of(1))

    def test_cpu_caches_are_copied_by_numpy(self) -> None:
        rig = Rig(simple(), [1])
        assert rig.store_handler.modes()["copy"] == "numpy"
        rig.close()

    def test_caches_that_do_not_fit_the_geometry_are_refused(self) -> None:
        """F5."""
        caches = simple()
        geometry = CacheGeometry((GroupGeometry(0, caches.block_bytes(0, 2), 2, 32),), 0, 1)
        pool = HostBlockPool(1, 0, geometry.slot_bytes)
        executor = DaemonExecutor(1, "test-gpu")

        def context(**changes: object) -> HandlerContext:
            values: dict[str, object] = {"geometry": geometry, "memory": pool, "caches": caches}
            return HandlerContext(executor=executor, tier="cpu", **(values | changes))  # type: ignore[arg-type]

        for handler in (GpuToCpuHandler, CpuToGpuHandler):
            handler(context()).close()
            with pytest.raises(UnsupportedError, match="NoneType"):
                handler(context(caches=None))
            group = geometry.groups[0]
            wrong = replace(geometry, groups=(replace(group, block_bytes=1),))
            with pytest.raises(IdentityError, match=r"has 576 bytes .* but 1 in"):
                handler(context(geometry=wrong))
            with pytest.raises(IdentityError, match=r"1 KV groups, .* has 2"):
                handler(context(geometry=replace(geometry, groups=(group, group))))
            large = simple(4, 8192)
            big = CacheGeometry((GroupGeometry(0, large.block_bytes(0, 1), 1, 16),), 0, 1)
            with pytest.raises(IdentityError, match="but a host slot has 4096"):
                handler(context(geometry=big, caches=large))

    def test_the_descriptor_imports_no_driver(self) -> None:
        code = (
            "import sys, tiered_kv_gpu\n"
            "assert tiered_kv_gpu.backend.name == 'gpu'\n"
            "assert not {'torch', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_groups_of_blocks_are_bounded_on_a_device(self) -> None:
        layout = GroupLayout(0, 4, 1 << 20, 16, ())
        copies = DeviceCopies(simple())
        assert copies.group_size(layout) == 16
        assert copies.group_size(replace(layout, engine_block_bytes=1 << 30)) == 1
