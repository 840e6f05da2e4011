"""Streams, events, registered memory and staging of a real device."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

from tests.gpu.device import need_device
from tests.unit.gpu_rig import OK, geometry_of, keys_of, random_bytes, slots_of
from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import HandlerContext
from tiered_kv.memory import HostBlockPool, KVCaches, TorchStaging, device_of, make_staging
from tiered_kv.specs import CpuSpec, GpuBlock, GpuSpec, TransferSpec
from tiered_kv.threads import DaemonExecutor
from tiered_kv.values import PAGE_BYTES, BlockKey, ChecksumKind
from tiered_kv_gpu.handlers import CpuToGpuHandler, GpuToCpuHandler

DEVICE = need_device()
BUSY_CYCLES = 200_000_000
"""How long the engine's stream is kept busy: a tenth of a second or two."""


def caches_on_device(blocks: int, page: int, layers: int) -> KVCaches:
    named = {
        str(i): torch.from_numpy(random_bytes((blocks, page), i)).to(DEVICE) for i in range(layers)
    }
    return KVCaches.from_named(named, [list(named)])


def keep_busy() -> None:
    """Give the current stream something to do."""
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]  # torch's


def block_bytes(caches: KVCaches, number: int) -> bytes:
    return b"".join(tensor[number].cpu().numpy().tobytes() for tensor in caches.tensors)


class TestDevice:
    def test_a_mark_is_behind_what_a_lane_was_given(self) -> None:
        device = device_of(DEVICE)
        assert device is not None
        target = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        engine, lane = torch.cuda.Stream(DEVICE), device.lane()  # type: ignore[no-untyped-call]  # torch's
        with torch.cuda.stream(engine):
            keep_busy()
            target.fill_(7)
            fence = device.fence()
            keep_busy()
            target.fill_(8)
        host = device.host_tensor(1)
        assert host.is_pinned()
        lane.after(fence)
        lane.run(lambda: host.copy_(target, non_blocking=True))
        lane.mark().wait()
        assert int(host[0]) == 7, "after the fence, before what came later"
        device.synchronize()
        assert int(target.item()) == 8

    def test_a_fence_of_another_device_is_refused(self) -> None:
        device = device_of(DEVICE)
        assert device is not None
        with pytest.raises(TypeError, match=r"KVCaches\.fence"):
            device.lane().after(object())

    def test_the_pool_is_registered_chunk_by_chunk_and_given_back(self) -> None:
        """F25."""
        device = device_of(DEVICE)
        assert device is not None
        pool = HostBlockPool(
            700, 20, 1 << 20, register=device.register_host, unregister=device.unregister_host
        )
        pool.grow()
        assert pool.wait_grown(60)
        print(pool.modes())
        assert pool.pinned
        assert len({pool.chunk_of(number) for number in range(720)}) > 1
        array = torch.from_numpy(pool.as_array(699))
        assert array.is_pinned()
        del array
        pool.close()

    def test_a_refused_registration_leaves_the_device_in_order(self) -> None:
        """The runtime keeps an error for the next launch; ours must not become somebody else's."""
        device = device_of(DEVICE)
        assert device is not None
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"cannot pin .* for cuda:0"):
                device.register_host(0, PAGE_BYTES)
            with pytest.raises(RuntimeError, match=r"cannot unpin .* for cuda:0"):
                device.unregister_host(PAGE_BYTES)
            assert int(torch.ones(5, device=DEVICE).sum().item()) == 5


class TestStaging:
    @pytest.fixture(scope="class")
    def staging(self) -> TorchStaging:
        caches = caches_on_device(64, 40_000, 3)
        staging = make_staging(caches, geometry_of(caches, [2]), 4 << 20)
        assert isinstance(staging, TorchStaging)
        return staging

    def test_it_is_registered_as_one_piece_of_device_memory(self, staging: TorchStaging) -> None:
        interface = staging.buffer.__cuda_array_interface__
        assert staging.device == "cuda:0"
        assert interface["data"][0] % PAGE_BYTES == 0
        again = torch.as_tensor(staging.buffer, device=DEVICE)
        assert again.data_ptr() == interface["data"][0]
        assert again.nbytes == staging.areas * staging.area_bytes

    def test_wsum_is_the_hosts_for_every_length(self, staging: TorchStaging) -> None:
        data = random_bytes((staging.area_bytes,), 1)
        torch.as_tensor(staging.span(1, data.nbytes), device=DEVICE).copy_(torch.from_numpy(data))
        torch.cuda.synchronize()
        lengths = [*range(1, 70), *np.random.default_rng(1).integers(70, data.nbytes, 200).tolist()]
        key = BlockKey(b"key")
        for length in [0, *lengths, data.nbytes]:
            for kind in ChecksumKind:
                expected = BlockChecksum.capture(key, 0, data[:length].data, kind)
                assert staging.checksum(key, 1, length, kind) == expected
        print(f"lengths {len(lengths) + 2}")

    def test_copies_come_after_the_engines_work(self) -> None:
        caches = caches_on_device(64, 40_000, 3)
        staging = make_staging(caches, geometry_of(caches, [2]), 4 << 20)
        engine = torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]  # torch's
        with torch.cuda.stream(engine):
            keep_busy()
            caches.tensors[0][5].fill_(3)
            fence = caches.fence()
        assert staging.gather([GpuBlock(10, (5, 6))], [0], fence) == [True]
        got = torch.as_tensor(staging.span(0, 40_000), device=DEVICE)
        assert bool((got == 3).all())
        expected = block_bytes(caches, 5) + block_bytes(caches, 6)
        again = torch.as_tensor(staging.span(0, len(expected)), device=DEVICE)
        assert again.cpu().numpy().tobytes() == expected
        assert staging.scatter([0], [GpuBlock(10, (40, 41))], caches.fence()) == [True]
        assert block_bytes(caches, 40) + block_bytes(caches, 41) == expected


class TestHandlers:
    @pytest.mark.parametrize("pinned", [False, True])
    def test_many_groups_beside_a_busy_engine(self, pinned: bool) -> None:
        """F10, F51: stores see what the engine had computed, and only that; loads come whole."""
        caches = caches_on_device(512, 256 << 10, 4)
        geometry = geometry_of(caches, [1])
        device = device_of(DEVICE)
        assert device is not None
        register = (device.register_host, device.unregister_host) if pinned else (None, None)
        pool = HostBlockPool(
            96, 1, geometry.slot_bytes, register=register[0], unregister=register[1]
        )
        executor = DaemonExecutor(2, "test-gpu")
        context = HandlerContext(geometry, pool, executor, "cpu", caches=caches)
        store, load = GpuToCpuHandler(context), CpuToGpuHandler(context)
        assert pool.pinned is pinned
        mode = f"cuda:0 streams, {'pinned' if pinned else 'pageable'}"
        assert store.modes()["copy"] == load.modes()["copy"] == mode
        ids = np.random.default_rng(3).permutation(256)[:96].tolist()
        keys, slots = tuple(keys_of(96)), tuple(slots_of(96))
        engine = torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]  # torch's
        with torch.cuda.stream(engine):
            keep_busy()
            for tensor in caches.tensors:
                tensor[ids[-1]].fill_(99)
            fence = caches.fence()
        blocks = GpuSpec(tuple(GpuBlock(10, (i,)) for i in ids))
        result = asyncio.run(
            store.transfer(TransferSpec(blocks, CpuSpec(slots), keys, after=fence))
        )
        assert result.statuses == (OK,) * 96
        expected = [block_bytes(caches, i) for i in ids]
        assert set(expected[-1]) == {99}
        for slot, data in zip(slots, expected, strict=True):
            view = pool.view(slot)
            assert view is not None
            assert bytes(view) == data
            view.release()
        targets = GpuSpec(tuple(GpuBlock(10, (256 + i,)) for i in range(96)))
        result = asyncio.run(
            load.transfer(TransferSpec(CpuSpec(slots), targets, keys, after=caches.fence()))
        )
        assert result.statuses == (OK,) * 96
        assert [block_bytes(caches, 256 + i) for i in range(96)] == expected
        store.close()
        load.close()
        executor.shutdown()
        pool.close()

    def test_a_thread_of_its_own_uses_the_caches_device(self) -> None:
        """The executor's threads begin on device 0, whatever device the rank has."""
        seen: list[object] = []
        device = device_of(DEVICE)
        assert device is not None

        def work() -> None:
            lane = device.lane()
            lane.run(lambda: seen.append(torch.cuda.current_stream(DEVICE)))
            lane.mark().wait()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen
        assert seen != [torch.cuda.default_stream(DEVICE)]
