"""Every size comes back bit for bit, and nothing beyond a block's bytes is touched."""

from __future__ import annotations

import mmap
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.nvme_parts import MIB, open_nvme, random_block, reserved, settings, slot
from tests.stores.store_parts import StoreArguments
from tiered_kv.values import BlockStatus
from tiered_kv_nvme.posix import probe_direct

SIZES = (
    *(1, 2, 511, 512, 513, 4095, 4096, 4097, 8191, 65_536, 66_048, 262_144 + 17),
    *(MIB - 1, MIB, 3_098_112, 4 * MIB, 4 * MIB + 1, 8 * MIB),
)
POISON = 0xA5
SMALL = (("segment", 9 * MIB),)


@pytest.fixture(params=["direct", "buffered"])
def arguments(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreArguments]:
    """A tier on the disk (ext4: direct), and one on tmpfs, which buffers silently."""
    if request.param == "direct":
        if not probe_direct(tmp_path).direct:
            pytest.skip(f"{tmp_path} is {probe_direct(tmp_path)}")
        yield StoreArguments(tmp_path / "tier", 160 * MIB, extra=SMALL)
        return
    shared = Path("/dev/shm")
    if not shared.is_dir() or probe_direct(shared).direct:
        pytest.skip("no /dev/shm that buffers")
    folder = Path(tempfile.mkdtemp(dir=shared))
    try:
        yield StoreArguments(folder / "tier", 160 * MIB, extra=SMALL)
    finally:
        shutil.rmtree(folder)


def test_every_size_is_byte_exact_and_touches_nothing_else(arguments: StoreArguments) -> None:
    store = open_nvme(arguments)
    try:
        mode = store.stat().modes["io"]
        blocks = [random_block(number, size) for number, size in enumerate(SIZES)]
        places = reserved(store, [block for block, _ in blocks])
        before = [bytes(view) for _, view in blocks]
        store.write(places, [view for _, view in blocks])
        assert [bytes(view) for _, view in blocks] == before
        store.publish(places)
        slots = [slot(size + 3 * mmap.PAGESIZE, POISON) for size in SIZES]
        for offered in (0, 1, 2 * mmap.PAGESIZE):
            views = [s[: size + offered] for s, size in zip(slots, SIZES, strict=True)]
            results = store.read([block.key for block, _ in blocks], views)
            assert {result.status for result in results} == {BlockStatus.OK}
            for (block, data), whole, result in zip(blocks, slots, results, strict=True):
                length = block.checksum.length
                assert result.checksum == block.checksum
                assert whole[:length] == data
                assert bytes(whole[length:]) == bytes([POISON]) * (whole.nbytes - length)
                assert block.checksum.verifies(block.key, 0, whole[:length])
                whole[:length] = bytes(length)
        print(f"{len(SIZES)} sizes of 1 to {max(SIZES)} bytes, three times, I/O {mode}")
    finally:
        store.close()


def test_many_blocks_in_any_order_and_split_batches(arguments: StoreArguments) -> None:
    """Runs longer than 1,024 pieces, batches read back in another order than written."""
    store = open_nvme(arguments)
    choice = random.Random(5)
    try:
        sizes = [choice.choice((4096, 5000, 4095)) for _ in range(3000)]
        blocks = [random_block(number, size) for number, size in enumerate(sizes)]
        places = reserved(store, [block for block, _ in blocks])
        store.write(places, [view for _, view in blocks])
        store.publish(places)
        choice.shuffle(blocks)
        for part in (blocks[:1], blocks[1:1500], blocks[1500:]):
            views = [slot(block.checksum.length) for block, _ in part]
            results = store.read([block.key for block, _ in part], views)
            for (block, data), view, result in zip(part, views, results, strict=True):
                assert result.checksum == block.checksum
                assert view[: data.nbytes] == data
        print(f"{len(blocks)} blocks read back")
    finally:
        store.close()


def test_direct_io_is_in_effect_on_the_disk_and_shown(tmp_path: Path) -> None:
    expected = probe_direct(tmp_path)
    store = open_nvme(StoreArguments(tmp_path / "tier"))
    modes = store.stat().modes
    store.close()
    print(modes)
    assert modes["io"] == str(expected)
    assert modes["engine"] == "posix"
    assert modes["space"] == "preallocated"


def test_unaligned_memory_and_empty_blocks_are_refused(tmp_path: Path) -> None:
    arguments = StoreArguments(tmp_path / "tier")
    store = open_nvme(arguments)
    try:
        block, _ = random_block(1, 1000)
        (place,) = reserved(store, [block])
        with pytest.raises(ValueError, match="page-aligned"):
            store.write([place], [slot(4096)[1:1001]])
        with pytest.raises(ValueError, match="at least 1 byte"):
            store.reserve([random_block(2, 0)[0]])
        with pytest.raises(ValueError, match="reserved"):
            store.publish([place])
        store.abandon([place])
        with pytest.raises(ValueError, match="not reserved"):
            store.write([place], [slot(1000)[:1000]])
    finally:
        store.close()
    assert settings(arguments).directories == {"path": arguments.path}
