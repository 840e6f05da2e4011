"""The engine's cache to the disk and back by real KvikIO's device path: scenarios for child
processes.

`python -m tests.stores.kvikio_direct SCENARIO FOLDER`
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.fakes.cuda_driver import DeviceMemory, FakeCudaDriver
from tests.fakes.kvikio_process import DEVICE_READS, perform
from tests.stores.nvme_parts import MIB, segment_files, settings
from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import (
    BlockStore,
    HandlerContext,
    NewBlock,
    StoreContext,
    Verification,
    VerifyAlways,
)
from tiered_kv.engine import EngineLimits, TransferEngine, register_store_handlers
from tiered_kv.errors import TierError, UnsupportedError
from tiered_kv.memory import HostBlockPool, KVCaches, make_staging
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import (
    GpuBlock,
    GpuSpec,
    HopResult,
    JobResult,
    LoadJob,
    Part,
    Parts,
    StoreJob,
    StoreTargets,
    TransferSpec,
)
from tiered_kv.stats import StatsRecorder
from tiered_kv.testing.conformance.blocks import StoreArguments, page_aligned
from tiered_kv.threads import DaemonExecutor
from tiered_kv.values import (
    BlockKey,
    BlockStatus,
    CacheGeometry,
    ChecksumKind,
    GroupGeometry,
    JobId,
)
from tiered_kv_gpu import backend as gpu_backend
from tiered_kv_nvme import NvmeSpec, backend, kvikio_io
from tiered_kv_nvme.direct import GpuToNvmeHandler, NvmeToGpuHandler
from tiered_kv_nvme.kvikio_io import KvikioFiles, Move
from tiered_kv_nvme.store import NvmeStore

OK, MISSING, CORRUPT = BlockStatus.OK, BlockStatus.MISSING, BlockStatus.CORRUPT
CANCELLED, NO_SPACE = BlockStatus.CANCELLED, BlockStatus.NO_SPACE

SIZES = (1, 511, 4095, 4096, 4097, 65_536, 3_098_112, 4 * MIB + 1)
BLOCKS = 24
COPIES = ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2")
PATIENCE = 30.0


def sized(nbytes: int) -> tuple[KVCaches, CacheGeometry]:
    """Blocks of one engine block, `nbytes` long."""
    return _cache([nbytes], 1)


def _cache(pages: Sequence[int], chunk: int) -> tuple[KVCaches, CacheGeometry]:
    tensors = {
        f"layer.{i}": torch.from_numpy(
            np.random.default_rng(i).integers(0, 256, (BLOCKS * chunk, page), np.uint8)
        )
        for i, page in enumerate(pages)
    }
    caches = KVCaches.from_named(tensors, [list(tensors)])
    group = GroupGeometry(0, caches.block_bytes(0, chunk), chunk, 16 * chunk)
    return caches, CacheGeometry((group,), 0, 1)


class Rig:
    """One rank whose cache in host memory stands for a device's, a store, and both handlers."""

    def __init__(
        self,
        folder: Path,
        cache: tuple[KVCaches, CacheGeometry],
        *,
        areas: int = 16,
        gpu_direct: str = "on",
        verification: Verification | None = None,
        **extra: object,
    ) -> None:
        self.caches, self.geometry = cache
        wishes = {"segment": 24 * MIB, "gpu_direct": gpu_direct} | extra
        self.arguments = StoreArguments(folder / "tier", 256 * MIB, extra=tuple(wishes.items()))
        self.tier = settings(self.arguments)
        self.store = self.open()
        self.executor = DaemonExecutor(4, "direct")
        self.staging = make_staging(self.caches, self.geometry, areas * self.geometry.slot_bytes)
        self.pool = HostBlockPool(1, 0, self.geometry.slot_bytes)
        context = HandlerContext(
            self.geometry,
            self.pool,
            self.executor,
            "ssd",
            store=self.store,
            caches=self.caches,
            staging=lambda: self.staging,
            verification=verification or VerifyAlways(),
        )
        self.saver = GpuToNvmeHandler(context)
        self.loader = NvmeToGpuHandler(context)

    def open(self) -> NvmeStore:
        return NvmeStore(
            StoreContext("ssd", self.tier, self.arguments.namespace, self.geometry, True)
        )

    def close(self) -> None:
        assert self.all_areas_are_free(), "areas were not given back"
        self.saver.close()
        self.loader.close()
        self.store.close()
        self.pool.close()

    @property
    def rows(self) -> list[npt.NDArray[np.uint8]]:
        return [tensor.view(torch.uint8).numpy() for tensor in self.caches.tensors]

    def block(self, number: int) -> GpuBlock:
        chunk = self.geometry.groups[0].chunk
        return GpuBlock(0, tuple(range(number * chunk, (number + 1) * chunk)))

    def bytes_of(self, number: int) -> bytes:
        return b"".join(row[i].tobytes() for i in self.block(number).block_ids for row in self.rows)

    def save(
        self, numbers: Sequence[int], commit: Callable[[], bool] = lambda: True, offset: int = 0
    ) -> HopResult:
        """Block `number` of the cache under key `number + offset`."""
        keys = tuple(key(number + offset) for number in numbers)
        blocks = GpuSpec(tuple(self.block(number) for number in numbers))
        spec = TransferSpec(blocks, NvmeSpec("ssd", keys), keys, commit)
        return asyncio.run(self.saver.transfer(spec))

    def load(
        self,
        numbers: Sequence[int],
        into: Sequence[int | GpuBlock],
        commit: Callable[[], bool] = lambda: True,
    ) -> HopResult:
        keys = tuple(key(number) for number in numbers)
        blocks = GpuSpec(tuple(b if isinstance(b, GpuBlock) else self.block(b) for b in into))
        spec = TransferSpec(NvmeSpec("ssd", keys), blocks, keys, commit)
        return asyncio.run(self.loader.transfer(spec))

    def put(self, store: BlockStore, numbers: Sequence[int], kind: ChecksumKind) -> None:
        """Store blocks of the cache from host memory."""
        views = []
        new = []
        for number in numbers:
            data = self.bytes_of(number)
            view = page_aligned(len(data))
            view[:] = data
            views.append(view)
            new.append(NewBlock(key(number), BlockChecksum.capture(key(number), 0, view, kind)))
        places = [place for place in store.reserve(new) if place is not None]
        assert len(places) == len(new)
        store.write(places, views)
        store.publish(places)

    def get(self, store: BlockStore, number: int) -> tuple[bytes, BlockChecksum]:
        """A block in host memory, verified."""
        view = page_aligned(self.geometry.slot_bytes)
        [result] = store.read([key(number)], [view])
        assert result.checksum is not None, result
        data = view[: result.checksum.length]
        assert result.checksum.verifies(key(number), 0, data)
        return bytes(data), result.checksum

    def all_areas_are_free(self) -> bool:
        areas = self.staging.lease(self.staging.areas, 0.0)
        if areas is not None:
            self.staging.release(areas)
        return areas is not None and len(areas) == self.staging.areas

    def flip_bit(self, data: bytes) -> None:
        """In the one place on the disk where a block begins with `data`."""
        found = 0
        for file in segment_files(self.arguments.path):
            at = file.read_bytes().find(data)
            if at >= 0:
                with file.open("r+b") as disk:
                    os.pwrite(disk.fileno(), bytes([data[100] ^ 4]), at + 100)
                    os.fsync(disk.fileno())
                found += 1
        assert found == 1


def key(number: int) -> BlockKey:
    return BlockKey(b"direct" + number.to_bytes(8, "big"))


def statuses(result: HopResult) -> list[BlockStatus]:
    return list(result.statuses)


def the(driver: FakeCudaDriver | None) -> FakeCudaDriver:
    assert driver is not None
    return driver


def sizes(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """Every size is byte-exact: device to disk to device, device to disk to host, host to disk to
    device with both kinds of checksum."""
    moved = 0
    for size in SIZES:
        rig = Rig(folder / str(size), sized(size), areas=8)
        before = the(driver).copies()
        originals = [rig.bytes_of(i) for i in range(9)]
        stored = rig.save(range(3))
        assert statuses(stored) == [OK] * 3
        assert stored.copied_bytes == 3 * size
        rig.put(rig.store, range(3, 6), ChecksumKind.XXH3)
        rig.put(rig.store, range(6, 9), ChecksumKind.WSUM)
        for number in range(3):
            data, checksum = rig.get(rig.store, number)
            assert data == originals[number]
            assert checksum.kind is ChecksumKind.WSUM
        for first in (0, 3, 6):
            loaded = rig.load(range(first, first + 3), range(20, 23))
            assert statuses(loaded) == [OK] * 3, (size, first, loaded)
            assert loaded.copied_bytes == 3 * size
            for i in range(3):
                assert rig.bytes_of(20 + i) == originals[first + i], (size, first)
        assert the(driver).copies() > before
        moved += 12
        rig.close()
    return {"sizes": len(SIZES), "blocks": moved}


def engines(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """What goes directly is read by the host engine `kvikio` as well, and the other way round."""
    rig = Rig(folder, _cache([4096, 512, 100], 3), io="kvikio")
    assert rig.loader.modes()["engine"] == rig.store.stat().modes["engine"] == "kvikio"
    assert statuses(rig.save(range(4))) == [OK] * 4
    rig.put(rig.store, range(4, 8), ChecksumKind.WSUM)
    for number in range(8):
        assert rig.get(rig.store, number)[0] == rig.bytes_of(number)
    originals = [rig.bytes_of(i) for i in range(8)]
    assert statuses(rig.load(range(8), range(8, 16))) == [OK] * 8
    assert [rig.bytes_of(i) for i in range(8, 16)] == originals
    modes = dict(rig.loader.modes())
    assert modes["gpu_direct"] == "in use"
    assert modes["gds"].startswith("compat (")
    rig.close()
    return {"modes": modes}


def parts(folder: Path, _: FakeCudaDriver | None) -> Mapping[str, object]:
    """A part of a block can be wanted; blocks outside the cache are not written, not read."""
    rig = Rig(folder, _cache([4096, 512], 3))
    data = rig.bytes_of(0)
    assert statuses(rig.save([0, 1])) == [OK, OK]
    page = 4096 + 512
    before = [row.copy() for row in rig.rows]
    wanted = [GpuBlock(0, (60,), first=1), GpuBlock(0, (61, 99_999, 62)), GpuBlock(7, (63,))]
    result = rig.load([0, 1, 1], wanted)
    assert statuses(result) == [OK, CANCELLED, CANCELLED]
    assert result.copied_bytes == page
    assert b"".join(row[60].tobytes() for row in rig.rows) == data[page : 2 * page]
    for row, old in zip(rig.rows, before, strict=True):
        assert (np.delete(row, 60, 0) == np.delete(old, 60, 0)).all()
    keys = (key(10), key(11), key(12))
    blocks = (GpuBlock(0, (0,)), GpuBlock(0, (0, 1, 99_999)), GpuBlock(7, (0, 1, 2)))
    spec = TransferSpec(GpuSpec(blocks), NvmeSpec("ssd", keys), keys)
    assert statuses(asyncio.run(rig.saver.transfer(spec))) == [CANCELLED] * 3
    assert rig.store.contains(keys) == [False] * 3
    rig.close()
    return {"copied": result.copied_bytes}


def rotten(folder: Path, _: FakeCudaDriver | None) -> Mapping[str, object]:
    """A bit that was flipped on the disk: found, never scattered, gone, and can be stored again."""
    rig = Rig(folder, sized(65_536))
    assert statuses(rig.save(range(4))) == [OK] * 4
    rig.put(rig.store, range(4, 8), ChecksumKind.XXH3)
    for number in (1, 6):
        rig.flip_bit(rig.bytes_of(number)[:4096])
    before = [rig.bytes_of(i) for i in range(BLOCKS)]
    result = rig.load(range(8), range(8, 16))
    expected = [OK if i not in (1, 6) else CORRUPT for i in range(8)]
    assert statuses(result) == expected
    for i in range(8):
        assert rig.bytes_of(8 + i) == before[i if expected[i] is OK else 8 + i]
    assert rig.store.contains([key(i) for i in range(8)]) == [s is OK for s in expected]
    assert statuses(rig.save([1, 6])) == [OK, OK]
    assert statuses(rig.load([1, 6], [20, 21])) == [OK, OK]
    assert [rig.bytes_of(20), rig.bytes_of(21)] == [before[1], before[6]]
    # The wrong bytes under the right checksum's length: a row that names another length.
    other = NewBlock(key(30), BlockChecksum.capture(key(30), 0, memoryview(b"short")))
    [place] = rig.store.reserve([other])
    assert place is not None
    short = page_aligned(5)
    short[:] = b"short"
    rig.store.write([place], [short])
    rig.store.publish([place])
    assert statuses(rig.load([30], [22])) == [CORRUPT]
    rig.close()
    return {"found": expected.count(CORRUPT), "served": 0}


def given_up(folder: Path, _: FakeCudaDriver | None) -> Mapping[str, object]:
    """A call that was given up leaves no trace, in the engine or in the store."""
    rig = Rig(folder, sized(65_536))
    asked: list[str] = []

    def no() -> bool:
        asked.append("commit")
        return False

    assert statuses(rig.save(range(4), no)) == [CANCELLED] * 4
    assert rig.store.contains([key(i) for i in range(4)]) == [False] * 4
    assert statuses(rig.save(range(4))) == [OK] * 4
    before = [rig.bytes_of(i) for i in range(BLOCKS)]
    assert statuses(rig.load([0, 1, 9], range(8, 11), no)) == [CANCELLED, CANCELLED, MISSING]
    assert [rig.bytes_of(i) for i in range(BLOCKS)] == before
    assert asked == ["commit", "commit"], "each call commits once"
    assert statuses(rig.save(range(4), no)) == [OK] * 4, "they are there: nothing to commit"
    rig.close()
    return {"asked": len(asked)}


def hung(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """A read that hangs: its areas stay out of use, the engine's blocks can be reused, and when it
    returns after it was given up nothing is scattered."""
    rig = Rig(folder, sized(65_536), areas=8)
    assert statuses(rig.save(range(4))) == [OK] * 4
    results: list[HopResult] = []
    is_wanted = True
    with the(driver).hold(*COPIES) as held:
        thread = threading.Thread(
            target=lambda: results.append(
                rig.load(range(4), range(8, 12), commit=lambda: is_wanted)
            )
        )
        thread.start()
        assert held.entered.wait(PATIENCE)
        is_wanted = False
        for tensor in rig.caches.tensors:  # the engine gives the blocks to somebody else
            tensor[8:12] = 77
        free = rig.staging.lease(8, 0.0)
        assert free is not None
        assert len(free) == 4, "areas of I/O that runs were given out again"
        rig.staging.release(free)
        assert not results
        held.release()
        thread.join(PATIENCE)
    [result] = results
    assert statuses(result) == [CANCELLED] * 4
    assert all((row[8:12] == 77).all() for row in rig.rows)
    assert rig.all_areas_are_free()
    assert statuses(rig.load(range(4), range(8, 12))) == [OK] * 4
    rig.close()
    return {"quarantined": 4}


def closing(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """The room of a write that hangs is not given back when its store closes."""
    rig = Rig(folder, sized(65_536), areas=8)
    assert statuses(rig.save([7])) == [OK]
    results: list[BaseException] = []

    def save() -> None:
        try:
            rig.save(range(4))
        except TierError as error:
            results.append(error)

    with the(driver).hold(*COPIES) as held:
        thread = threading.Thread(target=save)
        thread.start()
        assert held.entered.wait(PATIENCE)
        rig.store.close()
        with open_other(rig) as other:
            reserved = _reserved(other)
        held.release()
        thread.join(PATIENCE)
    assert reserved == 4
    assert len(results) == 1
    return {"still reserved": reserved}


class open_other:  # noqa: N801 - a context manager
    """A further store on the same directory."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def __enter__(self) -> NvmeStore:
        self._store = self._rig.open()
        return self._store

    def __exit__(self, *_: object) -> None:
        self._store.close()


def _reserved(store: NvmeStore) -> int:
    """Slots that wait for publication."""
    space = store._space
    assert space is not None
    with space.change() as change:
        return sum(segment.reserved for segment in change.all_segments())


def failing(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """The device refuses to copy: no block is served or published, room and areas come back."""
    rig = Rig(folder, sized(65_536))
    assert statuses(rig.save(range(4))) == [OK] * 4
    before = [rig.bytes_of(i) for i in range(BLOCKS)]
    with the(driver).fail(*COPIES):
        assert statuses(rig.load(range(4), range(8, 12))) == [BlockStatus.TIER_ERROR] * 4
        try:
            rig.save(range(4), offset=50)
        except TierError as error:
            said = str(error)
        else:
            raise AssertionError("a store that failed did not raise")
    assert [rig.bytes_of(i) for i in range(BLOCKS)] == before
    assert rig.store.contains([key(50 + i) for i in range(4)]) == [False] * 4
    assert _reserved(rig.store) == 0
    assert statuses(rig.save(range(4), offset=50)) == [OK] * 4
    assert statuses(rig.load([*range(4), 50, 51], range(8, 14))) == [OK] * 6
    rig.close()
    return {"said": said}


def cut_off(folder: Path, _: FakeCudaDriver | None) -> Mapping[str, object]:
    """A file that was truncated: what lay behind is gone, the rest of the call is read."""
    rig = Rig(folder, sized(65_536))
    assert statuses(rig.save(range(8))) == [OK] * 8
    [file] = segment_files(rig.arguments.path)
    image = file.read_bytes()
    at = [image.index(rig.bytes_of(i)[:4096]) for i in range(8)]
    os.truncate(file, max(at) + 4096)
    last = at.index(max(at))
    result = rig.load(range(8), range(8, 16))
    expected = [MISSING if i == last else OK for i in range(8)]
    assert statuses(result) == expected
    assert rig.store.contains([key(last)]) == [False]
    file.unlink()
    assert statuses(rig.load([i for i in range(8) if i != last], range(8, 15))) == [OK] * 7
    rig.store.close()
    with open_other(rig) as other:
        view = page_aligned(rig.geometry.slot_bytes)
        assert other.read([key((last + 1) % 8)], [view])[0].status is MISSING
    return {"gone": expected.count(MISSING)}


def changed(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """A block that is replaced while it is read is a miss, and not scattered."""
    rig = Rig(folder, sized(65_536))
    assert statuses(rig.save([0, 1])) == [OK, OK]
    before = rig.bytes_of(9)
    results: list[HopResult] = []
    with the(driver).hold(*COPIES) as held, open_other(rig) as other:
        thread = threading.Thread(target=lambda: results.append(rig.load([0, 1], [8, 9])))
        thread.start()
        assert held.entered.wait(PATIENCE)
        other.delete([key(1)])
        rig.put(other, [1], ChecksumKind.XXH3)
        held.release()
        thread.join(PATIENCE)
    assert statuses(results[0]) == [OK, MISSING]
    assert rig.bytes_of(9) == before
    rig.close()
    return {"missing": 1}


def joined(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """Blocks that follow on each other in the file go in one call; and where a call needs more
    areas than there are, the rest is answered, not waited for."""
    rig = Rig(folder, sized(65_536), areas=16)

    def calls() -> int:
        return the(driver).calls().get(DEVICE_READS, 0)

    before = calls()
    assert statuses(rig.save(range(16))) == [OK] * 16
    written = calls() - before
    before = calls()
    originals = [rig.bytes_of(i) for i in range(16)]
    assert statuses(rig.load(range(16), range(15, -1, -1))) == [OK] * 16
    read = calls() - before
    assert [rig.bytes_of(15 - i) for i in range(16)] == originals
    assert (written, read) == (1, 1)
    assert statuses(rig.save(range(20), offset=100)) == [OK] * 16 + [NO_SPACE] * 4
    before = calls()
    assert statuses(rig.load([0, 2, 4], [16, 17, 18])) == [OK] * 3
    assert calls() - before == 3
    rig.close()
    return {"calls written": written, "calls read": read}


def crowded(folder: Path, _: FakeCudaDriver | None) -> Mapping[str, object]:
    """Calls that need all areas, and get them one by one, take turns: no two hold a part each."""
    rig = Rig(folder, sized(65_536), areas=4)
    assert statuses(rig.save(range(4))) == [OK] * 4
    results: list[HopResult] = []
    lease = rig.staging.lease
    changed = threading.Condition()
    holding: list[int] = []

    def lease_one(count: int, timeout: float) -> tuple[int, ...] | None:
        if count < 4:  # give others the chance to take a first one as well
            with changed:
                holding.append(count)
                changed.notify_all()
                changed.wait_for(lambda: holding.count(3) == 2, timeout=0.2)
        return lease(1, timeout)

    rig.staging.lease = lease_one  # type: ignore[method-assign]
    threads = [
        threading.Thread(target=lambda: results.append(rig.load(range(4), range(8, 12))))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [statuses(result) for result in results] == [[OK] * 4] * 2
    assert holding == [3, 2, 1] * 2
    rig.staging.lease = lease  # type: ignore[method-assign]
    rig.close()
    return {"calls": len(results)}


def held(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """A call's memory and file live as long as the call, whoever else lets go of them; and a call
    that failed does not end those beside it."""
    kvikio_io.start()
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, MIB)
    files = KvikioFiles(writable=True)
    memory = DeviceMemory(MIB)
    alive = weakref.ref(memory)
    with the(driver).hold(*COPIES) as held:
        flight = kvikio_io._Flight(files.of(fd), Move(fd, 0, memory), writing=False)
        del memory
        assert held.entered.wait(PATIENCE)
        gc.collect()
        assert alive() is not None, "memory was freed under a thread of KvikIO"
        held.release()
        assert flight.land() is None
    gc.collect()
    assert alive() is None
    closed = os.dup(fd)
    os.close(closed)
    failed: list[dict[int, OSError]] = []
    with the(driver).hold(*COPIES) as held:
        moves = [Move(fd, 0, DeviceMemory(MIB)), Move(closed, 0, DeviceMemory(MIB))]
        thread = threading.Thread(
            target=lambda: failed.append(kvikio_io.run(files, moves, writing=True))
        )
        thread.start()
        assert held.entered.wait(PATIENCE)
        assert not failed, "it returned while a call ran"
        held.release()
        thread.join(PATIENCE)
    assert list(failed[0]) == [1]
    files.forget(fd)
    os.close(fd)
    return {"failed": str(failed[0][1])}


@dataclass
class Rank:
    """A rank of a transfer engine that has one tier, used directly."""

    rig_folder: Path
    rank: int
    threads: int = 4
    stats: StatsRecorder = field(init=False)

    def __post_init__(self) -> None:
        self.caches, geometry = _cache([4096, 512, 4096, 512], 4)
        geometry = replace(geometry, rank=self.rank, world_size=2)
        for tensor in self.caches.tensors:
            tensor.add_(self.rank)
        wishes = (("gpu_direct", "on"),)
        arguments = StoreArguments(self.rig_folder / "tier", 64 * MIB, extra=wishes)
        assert backend.open_store is not None
        self.store = backend.open_store(
            StoreContext("ssd", settings(arguments), arguments.namespace, geometry, True)
        )
        self.pool = HostBlockPool(0, 8, geometry.slot_bytes)
        self.stats = StatsRecorder(f"rank {self.rank}")
        registry = TransferRegistry()
        for one in (gpu_backend, backend):
            assert one.register is not None
            one.register(registry)
        register_store_handlers(registry, NvmeSpec, "nvme")
        self.engine = TransferEngine(
            registry=registry,
            geometry=geometry,
            memory=self.pool,
            tiers={"ssd": NvmeSpec},
            limits=EngineLimits(
                PATIENCE,
                PATIENCE,
                64 * MIB,
                group_bytes=4 * geometry.slot_bytes,
                threads_per_tier=self.threads,
            ),
            stats=self.stats,
            caches=self.caches,
        )
        self.engine.attach("ssd", self.store)

    def block(self, number: int) -> GpuBlock:
        return GpuBlock(0, tuple(range(4 * number, 4 * number + 4)))

    def content(self, first: int, count: int) -> list[bytes]:
        return [
            row[4 * first : 4 * (first + count)].numpy().tobytes() for row in self.caches.tensors
        ]

    def run(self, job: LoadJob | StoreJob) -> JobResult:
        self.engine.submit(job)
        assert not self.engine.wait([job.id], PATIENCE)
        [result] = self.engine.finished()
        return result

    def close(self) -> None:
        assert self.engine.close(PATIENCE)
        self.store.close()
        self.pool.close()


def through_the_engine(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """Two ranks: what the transfer engine stores directly is whole when both have stored, and
    comes back by the direct chain, on the rank that stored it and after a restart."""
    count = 10
    keys = tuple(key(i) for i in range(count))
    there = NvmeSpec("ssd", keys)
    everywhere = Part(there, tuple(range(count)))
    ranks = [Rank(folder, 0), Rank(folder, 1)]
    originals = [rank.content(0, count) for rank in ranks]
    assert originals[0] != originals[1]
    for rank in ranks:
        assert rank.store.contains(keys) == [False] * count
        source = GpuSpec(tuple(rank.block(i) for i in range(count)))
        job = StoreJob(JobId(1), "request", keys, source, StoreTargets(None, (everywhere,)))
        assert rank.run(job).ok
    hops: dict[str, float] = {}
    for turn in range(2):
        for number, rank in enumerate(ranks):
            assert rank.store.contains(keys) == [True] * count
            for tensor in rank.caches.tensors:
                tensor[4 * count :] = 0
            target = GpuSpec(tuple(rank.block(count + i) for i in range(count)))
            result = rank.run(LoadJob(JobId(2), "request", keys, Parts((everywhere,)), target))
            assert result.ok, (turn, result)
            assert rank.content(count, count) == originals[number]
            snapshot = rank.stats.snapshot()
            stored, loaded = snapshot.hop("gpu", "nvme", "ssd"), snapshot.hop("nvme", "gpu", "ssd")
            nbytes = sum(map(len, originals[number]))
            assert loaded.bytes == nbytes
            assert stored.bytes == (0 if turn else nbytes)
            assert snapshot.hop("nvme", "cpu", "ssd").bytes == 0
            hops["gpu->ssd"] = hops.get("gpu->ssd", 0) + stored.bytes
            hops["ssd->gpu"] = hops.get("ssd->gpu", 0) + loaded.bytes
            rank.close()
        if not turn:
            ranks = [Rank(folder, 0), Rank(folder, 1)]
    assert the(driver).copies() > 0
    return hops


def fails_over(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """The device path breaks between two groups of a load: the first came directly, the others
    come by way of host memory, and the job ends right."""
    count = 12
    keys = tuple(key(i) for i in range(count))
    everywhere = Part(NvmeSpec("ssd", keys), tuple(range(count)))
    ranks = [Rank(folder, 0, threads=1), Rank(folder, 1, threads=1)]
    original = ranks[0].content(0, count)
    for rank in ranks:
        source = GpuSpec(tuple(rank.block(i) for i in range(count)))
        job = StoreJob(JobId(1), "request", keys, source, StoreTargets(None, (everywhere,)))
        assert rank.run(job).ok
    rank = ranks[0]
    for tensor in rank.caches.tensors:
        tensor[4 * count :] = 0
    target = GpuSpec(tuple(rank.block(count + i) for i in range(count)))
    load = LoadJob(JobId(2), "request", keys, Parts((everywhere,)), target)
    with ExitStack() as broken:
        with the(driver).hold(*COPIES) as held:
            rank.engine.submit(load)
            assert held.entered.wait(PATIENCE)
            broken.enter_context(the(driver).fail(*COPIES))
        assert not rank.engine.wait([load.id], PATIENCE)
    [result] = rank.engine.finished()
    assert result.ok, result
    assert rank.content(count, count) == original
    snapshot = rank.stats.snapshot()
    directly = snapshot.hop("nvme", "gpu", "ssd").bytes
    by_host = snapshot.hop("nvme", "cpu", "ssd").bytes
    healthy, why = rank.engine.health()["ssd"]
    for rank in ranks:
        rank.close()
    assert directly > 0
    assert by_host > 0
    assert directly + by_host == sum(map(len, original))
    return {"directly": directly, "by way of host memory": by_host, "loads": healthy, "why": why}


def settings_decide(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """`off` is off; `auto` waits for GDS, and for a CUDA device."""
    said: dict[str, str] = {}
    kvikio_io.NVIDIA_FS = folder / "nvidia-fs"
    for name, gpu_direct in (("off", "off"), ("no gds", "auto")):
        try:
            Rig(folder / name, sized(4096), gpu_direct=gpu_direct)
        except UnsupportedError as error:
            said[name] = str(error)
    (folder / "nvidia-fs").touch()
    kvikio_io.TRIAL = ""
    try:
        Rig(folder / "cpu", sized(4096), gpu_direct="auto")
    except UnsupportedError as error:
        said["cpu"] = str(error)
    assert said["off"] == "tier ssd: `gpu_direct: off`"
    assert "GPUDirect Storage is not in effect: the nvidia-fs" in said["no gds"]
    assert "in cpu memory" in said["cpu"]
    assert the(driver).copies() == 0
    return said


SCENARIOS: dict[str, Any] = {
    scenario.__name__: scenario
    for scenario in (
        sizes,
        engines,
        parts,
        rotten,
        given_up,
        hung,
        closing,
        failing,
        cut_off,
        changed,
        joined,
        crowded,
        held,
        through_the_engine,
        fails_over,
        settings_decide,
    )
}

if __name__ == "__main__":
    perform(SCENARIOS)
