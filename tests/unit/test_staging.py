"""Staging on the engine's device: areas, copies in every layout, checksums, order."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.device_stand_in import StandIn
from tests.unit.gpu_rig import byte_tensor, geometry_of, random_bytes, simple, strided
from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import DeviceBuffer, DeviceStaging
from tiered_kv.errors import IdentityError, UnsupportedError
from tiered_kv.memory import (
    HOST_STAGING_NAME,
    CacheRef,
    HostStaging,
    KVCaches,
    TorchStaging,
    make_staging,
)
from tiered_kv.specs import GpuBlock
from tiered_kv.values import PAGE_BYTES, BlockKey, ChecksumKind

KEY = BlockKey(b"key")
Make = Callable[..., DeviceStaging]


def on_host(caches: KVCaches, *chunks: int, nbytes: int = 8 * PAGE_BYTES) -> DeviceStaging:
    return make_staging(caches, geometry_of(caches, chunks), nbytes)


def on_device(
    caches: KVCaches, *chunks: int, nbytes: int = 10 * PAGE_BYTES, device: StandIn | None = None
) -> DeviceStaging:
    return TorchStaging(caches, geometry_of(caches, chunks), nbytes, device or StandIn())


@pytest.fixture(params=["host", "device"])
def make(request: pytest.FixtureRequest) -> Make:
    return {"host": on_host, "device": on_device}[request.param]


def bytes_of(buffer: DeviceBuffer) -> bytes:
    interface = buffer.__cuda_array_interface__
    assert interface["shape"] == (buffer.nbytes,)
    assert interface["typestr"] == "|u1"
    assert interface["version"] == 3
    address, readonly = interface["data"]
    assert not readonly
    return ctypes.string_at(address, buffer.nbytes)


def fill(buffer: DeviceBuffer, data: bytes) -> None:
    assert len(data) <= buffer.nbytes
    ctypes.memmove(buffer.__cuda_array_interface__["data"][0], data, len(data))


def layout_bytes(caches: KVCaches, group: int, ids: tuple[int, ...]) -> bytes:
    return b"".join(
        caches.tensors[ref.tensor_index][i, : ref.page_bytes].numpy().tobytes()
        for i in ids
        for ref in caches.groups[group]
    )


class TestAreas:
    def test_areas_are_pages_of_one_buffer(self, make: Make) -> None:
        staging = make(simple(), 1)
        assert (staging.device, staging.area_bytes, staging.areas) == ("cpu", PAGE_BYTES, 8)
        whole = staging.buffer.__cuda_array_interface__["data"][0]
        assert staging.buffer.nbytes == 8 * PAGE_BYTES
        assert whole % PAGE_BYTES == 0
        for first in range(8):
            span = staging.span(first, 100)
            assert span.nbytes == 100
            assert span.__cuda_array_interface__["data"][0] == whole + first * PAGE_BYTES
        assert staging.span(3, 5 * PAGE_BYTES).nbytes == 5 * PAGE_BYTES

    def test_two_areas_at_the_least(self, make: Make) -> None:
        assert make(simple(8, 2 * PAGE_BYTES, 2), 2, nbytes=1).areas == 2

    def test_a_span_outlives_its_staging(self, make: Make) -> None:
        staging = make(simple(), 1)
        span = staging.span(1, 3)
        fill(span, b"abc")
        del staging
        assert bytes_of(span) == b"abc"

    def test_spans_outside_are_refused(self, make: Make) -> None:
        staging = make(simple(), 1)
        for first, nbytes in [(-1, 1), (8, 1), (7, PAGE_BYTES + 1), (0, 0), (0, -1)]:
            with pytest.raises(ValueError, match="outside the 8 areas"):
                staging.span(first, nbytes)

    def test_leases_are_runs_of_neighbours(self, make: Make) -> None:
        staging = make(simple(), 1)
        assert staging.lease(3, 0) == (0, 1, 2)
        assert staging.lease(2, 0) == (3, 4)
        assert staging.lease(1, 0) == (5,)
        staging.release((1,))
        staging.release((3, 4))
        assert staging.lease(2, 0) == (3, 4), "the first run that is long enough"
        staging.release((4,))
        assert staging.lease(5, 0) == (6, 7), "the longest, where none is long enough"
        assert staging.lease(1, 0) == (1,)
        assert staging.lease(9, 0) == (4,)
        assert staging.lease(1, 0) is None
        assert staging.lease(1, 0.01) is None
        staging.release(range(8))
        assert staging.lease(99, 0) == tuple(range(8))

    def test_nonsense_is_refused(self, make: Make) -> None:
        staging = make(simple(), 1)
        with pytest.raises(ValueError, match="cannot lease 0"):
            staging.lease(0, 1)
        staging.lease(2, 0)
        for areas in [(2,), (0, 8), (1, -1)]:
            with pytest.raises(ValueError, match="not on lease"):
                staging.release(areas)
        assert staging.lease(8, 0) == (2, 3, 4, 5, 6, 7), "0 and 1 were kept"

    def test_a_waiting_lease_gets_what_is_released(self, make: Make) -> None:
        staging = make(simple(), 1)
        held = staging.lease(8, 0)
        got: list[tuple[int, ...] | None] = []
        asking = threading.Event()

        def ask() -> None:
            asking.set()
            got.append(staging.lease(4, 30))

        thread = threading.Thread(target=ask)
        thread.start()
        assert asking.wait(30)
        assert held == tuple(range(8))
        staging.release((5, 6))
        thread.join(30)
        assert got == [(5, 6)]

    def test_threads_never_lease_one_area_twice(self, make: Make) -> None:
        staging = make(simple(), 1)
        owners = [0] * 8
        clashes: list[int] = []
        done = [0] * 4
        start = threading.Barrier(4)

        def work(me: int) -> None:
            start.wait()
            for i in range(300):
                areas = staging.lease(1 + i % 3, 30)
                assert areas is not None
                for area in areas:
                    owners[area] += 1
                    clashes.extend([area] * (owners[area] != 1))
                for area in areas:
                    owners[area] -= 1
                staging.release(areas)
                done[me] += 1

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"leases {done}, clashes {len(clashes)}")
        assert (done, clashes) == ([300] * 4, [])

    def test_host_staging_is_a_mapping_with_a_name(self) -> None:
        """So that whoever looks at the process sees which of its memory this is."""
        staging = on_host(simple(), 1)
        assert isinstance(staging, HostStaging)
        address = staging.buffer.__cuda_array_interface__["data"][0]
        named = []
        for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
            if f"/memfd:{HOST_STAGING_NAME}" in line:
                begin, end = (int(x, 16) for x in re.split("[- ]", line)[:2])
                named.append((begin, end))
        assert (address, address + staging.buffer.nbytes) in named

    def test_caches_that_do_not_fit_the_geometry_are_refused(self, make: Make) -> None:
        geometry = geometry_of(simple(), [1])
        other = simple(page=128)
        with pytest.raises(IdentityError, match="manager's geometry"):
            make_staging(other, geometry, 1 << 20)
        with pytest.raises(IdentityError, match="manager's geometry"):
            TorchStaging(other, geometry, 1 << 20, StandIn())

    def test_memory_that_is_not_to_be_had(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        geometry = geometry_of(simple(), [1])
        monkeypatch.setattr(os, "ftruncate", refuse)
        with pytest.raises(UnsupportedError, match=r"cannot map .* for direct transfers"):
            make_staging(simple(), geometry, 1 << 20)
        monkeypatch.undo()

        def full(*_: object, **__: object) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(torch, "zeros", full)
        with pytest.raises(
            UnsupportedError, match=r"cannot take .* of stand-in:0 .* out of memory"
        ):
            TorchStaging(simple(), geometry, 1 << 20, StandIn())

    def test_other_devices_are_refused(self) -> None:
        caches = KVCaches(
            (torch.empty((4, 8), dtype=torch.int8, device="meta"),), ((CacheRef(0, 8),),)
        )
        with pytest.raises(UnsupportedError, match=r"is on meta; .* CUDA"):
            make_staging(caches, geometry_of(caches, [1]), 1 << 20)
        with pytest.raises(UnsupportedError, match="is on meta"):
            caches.fence()

    def test_host_caches_need_no_fence(self) -> None:
        assert simple().fence() is None


class TestCopies:
    def test_groups_strides_and_chunks(self, make: Make) -> None:
        """F48: blocks of several groups, packed and padded, in one call."""
        caches = strided()
        staging = make(caches, 4, 2)
        blocks = [
            GpuBlock(10, (3, 4, 5, 6)),
            GpuBlock(11, (15, 0)),
            GpuBlock(10, (9, 1, 2, 8)),
            GpuBlock(10, (11, 10, 14, 13)),
        ]
        areas = [5, 1, 2, 3]
        assert staging.gather(blocks, areas, None) == [True] * 4
        for block, area in zip(blocks, areas, strict=True):
            expected = layout_bytes(caches, block.group - 10, block.block_ids)
            assert bytes_of(staging.span(area, len(expected))) == expected
        before = [tensor.clone() for tensor in caches.tensors]
        for tensor in caches.tensors:
            tensor.zero_()
        assert staging.scatter(areas, blocks, None) == [True] * 4
        for i, (was, now) in enumerate(zip(before, caches.tensors, strict=True)):
            group = 0 if i in {0, 1} else 1
            ids = [j for b in blocks if b.group == 10 + group for j in b.block_ids]
            rest = [j for j in range(16) if j not in ids]
            assert torch.equal(now[ids], was[ids])
            assert not now[rest].any()

    def test_parts_of_blocks(self, make: Make) -> None:
        caches = simple(24, 40, 3)
        staging = make(caches, 4)
        data = random_bytes((3, 4 * 120), 9)
        for area in range(3):
            fill(staging.span(area, data.shape[1]), data[area].tobytes())
        before = [tensor.clone() for tensor in caches.tensors]
        blocks = [GpuBlock(10, (3, 20), 2), GpuBlock(10, (4, 5, 7, 6)), GpuBlock(10, (9,), 1)]
        assert staging.scatter([0, 1, 2], blocks, None) == [True] * 3
        for area, block in enumerate(blocks):
            pages = data[area].reshape(4, 3, 40)
            for j, number in enumerate(block.block_ids):
                for i, tensor in enumerate(caches.tensors):
                    expected = torch.from_numpy(pages[block.first + j, i]).view(torch.int8)
                    assert torch.equal(tensor[number], expected)
        written = [i for block in blocks for i in block.block_ids]
        rest = [i for i in range(24) if i not in written]
        for was, now in zip(before, caches.tensors, strict=True):
            assert torch.equal(now[rest], was[rest])

    def test_blocks_that_name_nonsense_are_left_out(self, make: Make) -> None:
        caches = simple()
        staging = make(caches, 2)
        bad = [
            GpuBlock(10, (0,)),
            GpuBlock(10, (0, 16)),
            GpuBlock(10, (-1, 0)),
            GpuBlock(11, (0, 1)),
            GpuBlock(10, (0, 1), 1),
        ]
        good = GpuBlock(10, (4, 5))
        marked = b"\xa5" * staging.buffer.nbytes
        fill(staging.buffer, marked)
        assert staging.gather([*bad, good], range(6), None) == [False] * 5 + [True]
        assert bytes_of(staging.span(0, 5 * PAGE_BYTES)) == marked[: 5 * PAGE_BYTES]
        before = [tensor.clone() for tensor in caches.tensors]
        targets = [GpuBlock(10, (6,), 2), GpuBlock(10, (6, 99)), GpuBlock(9, (6, 7))]
        assert staging.scatter([5, 5, 5], targets, None) == [False] * 3
        assert staging.scatter([5], [GpuBlock(10, (), 1)], None) == [True]
        for was, now in zip(before, caches.tensors, strict=True):
            assert torch.equal(was, now)
        for areas in [[0], [0, 1], [8]]:
            blocks = [good] * (1 if areas != [0] else 2)
            with pytest.raises(ValueError, match="area"):
                staging.gather(blocks, areas, None)

    @pytest.mark.parametrize("page", [1, 2, 6, 12, 24])
    def test_words_of_every_width(self, make: Make, page: int) -> None:
        caches = simple(12, page, 2)
        staging = make(caches, 3)
        block = GpuBlock(10, (7, 0, 11))
        assert staging.gather([block], [4], None) == [True]
        expected = layout_bytes(caches, 0, block.block_ids)
        assert bytes_of(staging.span(4, len(expected))) == expected
        assert staging.scatter([4], [GpuBlock(10, (1, 2, 3))], None) == [True]
        assert layout_bytes(caches, 0, (1, 2, 3)) == expected


class TestChecksum:
    @given(
        length=st.integers(0, 3 * PAGE_BYTES),
        seed=st.integers(0, 2**32 - 1),
        kind=st.sampled_from(list(ChecksumKind)),
    )
    def test_it_is_the_hosts(self, length: int, seed: int, kind: ChecksumKind) -> None:
        caches = simple(8, 3 * PAGE_BYTES, 1)
        data = random_bytes((3 * PAGE_BYTES,), seed).tobytes()
        expected = BlockChecksum.capture(KEY, 0, memoryview(data)[:length], kind)
        for make in (on_host, on_device):
            staging = make(caches, 1)
            fill(staging.span(1, len(data)), data)
            assert staging.checksum(KEY, 1, length, kind) == expected

    def test_what_lies_behind_does_not_count(self, make: Make) -> None:
        staging = make(simple(), 1)
        for length in (1, 7, 8, 9, 15, 4095):
            seen = set()
            for behind in (b"\0", b"\xff"):
                fill(staging.span(0, PAGE_BYTES), b"\x5a" * length + behind * (4096 - length))
                seen.add(staging.checksum(KEY, 0, length, ChecksumKind.WSUM))
            assert len(seen) == 1

    def test_every_bit_counts(self, make: Make) -> None:
        staging = make(simple(), 1)
        data = bytearray(random_bytes((20,), 1).tobytes())
        right = BlockChecksum.capture(KEY, 0, memoryview(data), ChecksumKind.WSUM)
        found = 0
        for bit in range(20 * 8):
            data[bit // 8] ^= 1 << bit % 8
            fill(staging.span(0, 20), bytes(data))
            found += staging.checksum(KEY, 0, 20, ChecksumKind.WSUM) != right
            data[bit // 8] ^= 1 << bit % 8
        print(f"flipped 160 bits, found {found}")
        assert found == 160

    def test_more_than_an_area_is_refused(self, make: Make) -> None:
        staging = make(simple(), 1)
        with pytest.raises(ValueError, match="no first"):
            staging.checksum(KEY, 0, PAGE_BYTES + 1, ChecksumKind.WSUM)
        with pytest.raises(ValueError, match="outside"):
            staging.checksum(KEY, 8, 8, ChecksumKind.WSUM)


class TestOrder:
    """On a device that does nothing before it is waited for."""

    def test_gathering_comes_after_compute(self) -> None:
        """F10."""
        device = StandIn()
        caches = simple()
        staging = on_device(caches, 1, device=device)
        block = GpuBlock(10, (3,))
        device.compute.run(lambda: caches.tensors[0].fill_(1))
        fence = device.fence()
        device.compute.run(lambda: caches.tensors[0].fill_(2))
        assert staging.gather([block], [0], fence) == [True]
        assert bytes_of(staging.span(0, 96)) == b"\1" * 96
        assert device.record.index("compute: marked") < device.record.index("lane 0: work")
        assert device.record[-1] == "lane 0: waited"

    def test_scattering_comes_after_compute(self) -> None:
        """F51: the blocks' last owner has read them; the bytes are in place on return."""
        device = StandIn()
        caches = simple()
        staging = on_device(caches, 1, device=device)
        fill(staging.span(2, 288), b"\7" * 288)
        read: list[torch.Tensor] = []
        was = caches.tensors[1][5].clone()
        device.compute.run(lambda: read.append(caches.tensors[1][5].clone()))
        assert staging.scatter([2], [GpuBlock(10, (5,))], device.fence()) == [True]
        assert torch.equal(read[0], was)
        assert (caches.tensors[1][5] == 7).all()

    def test_without_a_fence_everything_is_waited_for(self) -> None:
        device = StandIn()
        caches = simple()
        staging = on_device(caches, 1, device=device)
        device.compute.run(lambda: caches.tensors[0].fill_(9))
        staging.gather([GpuBlock(10, (3,))], [0], None)
        assert bytes_of(staging.span(0, 96)) == b"\x09" * 96
        assert "synchronised" in device.record

    def test_a_fence_of_another_kind_is_refused(self) -> None:
        staging = on_device(simple(), 1)
        with pytest.raises(TypeError, match="no mark"):
            staging.gather([GpuBlock(10, (3,))], [0], object())

    def test_new_memory_is_used_after_the_engine_is_done_with_it(self) -> None:
        """What the allocator hands out may still have the engine's work before it."""
        device = StandIn()
        device.compute.run(lambda: None)
        staging = on_device(simple(), 1, device=device)
        staging.checksum(KEY, 0, 8, ChecksumKind.WSUM)
        assert device.record.index("compute: marked") < device.record.index("lane 0: work")

    def test_one_launch_moves_a_group_of_blocks(self) -> None:
        """However many blocks; layers cut out of one allocation share it."""
        whole = byte_tensor(random_bytes((4, 16, 64), 1))
        cut = {str(i): whole[i] for i in range(4)}
        crossed = {str(i): whole.view(16, 4, 64)[:, i] for i in range(4)}
        apart = {str(i): whole[i].clone() for i in range(4)}
        for named, expected in [(cut, 1), (crossed, 1), (apart, 4)]:
            caches = KVCaches.from_named(named, [list(named)])
            staging = on_device(caches, 2)
            assert isinstance(staging, TorchStaging)
            assert staging.launches(10) == expected
            blocks = [GpuBlock(10, (2 * i + 1, 2 * i)) for i in range(8)]
            staging.gather(blocks, range(8), None)
            for area, block in enumerate(blocks):
                data = layout_bytes(caches, 0, block.block_ids)
                assert bytes_of(staging.span(area, len(data))) == data

    def test_threads_take_turns(self) -> None:
        """Each gets its own blocks, though the numbers travel through one buffer."""
        caches = simple(64, 96, 2)
        staging = on_device(caches, 2)
        wrong: list[int] = []
        done = [0] * 4

        def work(me: int) -> None:
            rng = np.random.default_rng(me)
            for _ in range(50):
                ids = tuple(int(i) for i in rng.choice(64, 2, replace=False))
                staging.gather([GpuBlock(10, ids)], [me], None)
                data = layout_bytes(caches, 0, ids)
                expected = BlockChecksum.capture(KEY, 0, memoryview(data), ChecksumKind.WSUM)
                found = staging.checksum(KEY, me, len(data), ChecksumKind.WSUM)
                wrong.extend([me] * (found != expected))
                done[me] += 1

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        print(f"gathered {sum(done)}, wrong {len(wrong)}")
        assert (sum(done), wrong) == (200, [])

    def test_a_device_that_fails_says_so(self) -> None:
        device = StandIn()
        staging = on_device(simple(), 1, device=device)
        device.failure = "CUDA error: an illegal memory access was encountered"
        with pytest.raises(RuntimeError, match="illegal memory access"):
            staging.gather([GpuBlock(10, (3,))], [0], None)

    def test_a_launch_that_fails_half_way_is_waited_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        device = StandIn()
        staging = on_device(simple(), 1, device=device)
        [lane] = device.lanes
        run, done = lane.run, list[str]()

        def refuse(work: Callable[[], object]) -> None:
            run(lambda: done.append("the first band"))
            raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(lane, "run", refuse)
        with pytest.raises(RuntimeError, match="out of memory"):
            staging.scatter([0], [GpuBlock(10, (3,))], device.fence())
        assert done == ["the first band"]
        assert device.record[-1] == f"{lane.name}: waited"
