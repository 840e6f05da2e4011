"""gpu <-> cpu: what is special to it; `test_conformance_gpu` has what every handler owes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.gpu_rig import (
    CANCELLED,
    MISSING,
    OK,
    BothWays,
    Rig,
    keys_of,
    simple,
    slots_of,
)
from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import HandlerContext
from tiered_kv.errors import IdentityError, TierError, UnsupportedError
from tiered_kv.memory import DeviceRows, HostBlockPool, HostRows
from tiered_kv.specs import GpuBlock, HopResult, SlotRef
from tiered_kv.threads import DaemonExecutor
from tiered_kv.values import BlockKey, CacheGeometry, GroupGeometry
from tiered_kv_gpu.handlers import CpuToGpuHandler, GpuToCpuHandler


class TestSlotsHandedOutAnew(BothWays):
    """F8, F52."""

    def test_while_its_bytes_are_verified(self, make: Callable[..., Rig]) -> None:
        """The new bytes fail the old checksum: that is no rot, and must not be reported so."""
        pool = HostBlockPool(1, 0, 4096)
        rig = make(simple(), [1], pool=pool)
        rig.store(keys_of(1), [GpuBlock(10, (0,))], slots_of(1))
        known = pool.checksum(SlotRef(0, 1))
        assert known is not None
        rewritten: list[bool] = []

        class Late(BlockChecksum):
            def verifies(self, key: BlockKey, rank: int, data: memoryview) -> bool:
                newer = SlotRef(0, 2)
                view = pool.begin(newer)
                assert view is not None
                view[:] = b"\xee" * view.nbytes
                rewritten.append(pool.bind(newer, BlockChecksum.capture(key, rank, view)))
                return super().verifies(key, rank, data)

        pool._checksums[0] = Late(known.length, known.value)
        result = rig.load(keys_of(1), slots_of(1), [GpuBlock(10, (9,))])
        assert (result, rewritten) == (HopResult((MISSING,), 0), [True])

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
    def test_blocks_that_name_nonsense_are_logged_once_per_handler(
        self, make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
    ) -> None:
        rig = make(simple(), [2])
        parts = [GpuBlock(10, (0,)), GpuBlock(10, (0, 1), 1)]
        for _ in range(2):
            result = rig.store(keys_of(2), parts, slots_of(2))
            assert result == HopResult((CANCELLED,) * 2, 0)
            rig.load(keys_of(1), slots_of(1), [GpuBlock(10, (4, 99))])
        assert len(caplog.records) == 2
        assert "only whole blocks of 2 are stored" in caplog.text
        assert "engine block 99 is outside the cache of 16" in caplog.text

    def test_nothing_wanted_of_a_block_is_nothing_copied(self, make: Callable[..., Rig]) -> None:
        rig = make(simple(), [2])
        rig.store(keys_of(1), [GpuBlock(10, (0, 1))], slots_of(1))
        assert rig.load(keys_of(1), slots_of(1), [GpuBlock(10, (), 2)]) == HopResult((OK,), 0)

    def test_a_device_that_fails_is_a_tier_error(
        self, make: Callable[..., Rig], kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = make(simple(), [1])
        rig.store(keys_of(1), [GpuBlock(10, (0,))], slots_of(1))

        def fail(*_: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        rows = {"host": HostRows, "device": DeviceRows}[kind]
        monkeypatch.setattr(rows, "gather", fail)
        monkeypatch.setattr(rows, "scatter", fail)
        with pytest.raises(TierError, match="illegal memory access") as caught:
            rig.store(keys_of(1), [GpuBlock(10, (0,))], [SlotRef(1, 1)])
        assert (caught.value.tier, type(caught.value.__cause__)) == ("cpu", RuntimeError)
        assert rig.pool.checksum(SlotRef(1, 1)) is None
        with pytest.raises(TierError, match="illegal memory access"):
            rig.load(keys_of(1), slots_of(1), [GpuBlock(10, (0,))])

    def test_what_is_in_effect_is_shown(self, make: Callable[..., Rig], kind: str) -> None:
        rig = make(simple(), [1])
        expected = {"host": "numpy", "device": "stand-in:0 streams, pageable"}[kind]
        for handler in (rig.store_handler, rig.load_handler):
            assert handler.modes() == {"copy": expected, "checksum": "xxh3"}

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
            "assert 'torch' not in sys.modules, sorted(sys.modules)\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
