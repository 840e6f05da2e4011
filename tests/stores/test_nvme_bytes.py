"""Every size comes back bit for bit, and nothing beyond a block's bytes is touched."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.nvme_parts import MIB, open_nvme, random_block, settings, slot
from tiered_kv.testing.conformance.blocks import (
    StoreArguments,
    reserved,
)
from tiered_kv_nvme.posix import probe_direct

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
        block, _ = random_block(1, 8192)
        (place,) = reserved(store, [block])
        # What the disk does not ask for is not refused: a buffered file takes any memory.
        if store.stat().modes["io"] == "direct":
            with pytest.raises(ValueError, match="page-aligned"):
                store.write([place], [slot(12288)[1:8193]])
        with pytest.raises(ValueError, match="at least 1 byte"):
            store.reserve([random_block(2, 0)[0]])
        with pytest.raises(ValueError, match="reserved"):
            store.publish([place])
        store.abandon([place])
        with pytest.raises(ValueError, match="not reserved"):
            store.write([place], [slot(8192)])
    finally:
        store.close()
    assert settings(arguments).directories == {"path": arguments.path}
