"""Crashes of a process, lost indexes, and what is left to rebuild them from."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.nvme_parts import open_nvme, segment_files
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    NAMESPACE,
    StoreArguments,
    aligned_copy,
    assert_held,
    content,
    disk_bytes,
    key,
    keys,
    new_block,
    put,
    reserved,
)
from tiered_kv.testing.conformance.children import run_until_stage
from tiered_kv.values import PAGE_BYTES
from tiered_kv_nvme.headers import SegmentHeader, SlotEntry


def reserve_and_die(arguments: StoreArguments, count: int) -> None:
    """Child process: reserves, writes, and is gone before it publishes."""
    store = open_nvme(arguments)
    places = reserved(store, [new_block(n) for n in range(count)])
    store.write(places[:4], [aligned_copy(content(n)) for n in range(4)])
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_dead_process_had_reserved_is_free_again(tmp_path: Path) -> None:
    """Half the tier is reserved and lost, three times, beside a store that stays open."""
    arguments = StoreArguments(tmp_path / "tier")
    context = multiprocessing.get_context("spawn")
    store = open_nvme(arguments)
    put(store, range(1000, 1010))
    count = arguments.capacity // BLOCK_BYTES // 2
    for _ in range(3):
        child = context.Process(target=reserve_and_die, args=(arguments, count))
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        assert not any(store.contains(keys(range(count))))
    for first in range(0, count, 8):
        put(store, range(first, first + 8))
    stat = store.stat()
    print(f"3 x {count} slots lost, then {count} blocks stored, {stat.evicted_blocks} evicted")
    assert stat.evicted_blocks == 0
    assert_held(store, range(1000, 1010))
    assert_held(store, range(count))
    assert disk_bytes(arguments.path) <= arguments.capacity
    store.close()


def test_segments_without_an_index_are_free_again(tmp_path: Path) -> None:
    arguments = StoreArguments(tmp_path / "tier")
    for _ in range(3):
        store = open_nvme(arguments)
        assert store.stat().blocks == 0
        for first in range(0, 400, 8):
            put(store, range(first, first + 8))
        assert disk_bytes(arguments.path) <= arguments.capacity
        store.close()
        assert len(segment_files(arguments.path)) > 3
        shutil.rmtree(arguments.path / "index")


def test_a_damaged_index_starts_empty(tmp_path: Path) -> None:
    """Killed, then the index is overwritten with garbage: misses, and the space comes back."""
    arguments = StoreArguments(tmp_path / "tier")
    _, published = run_until_stage(open_nvme, arguments, 0, 40)
    first = 1000
    data = arguments.path / "index" / "data.mdb"
    garbage = random.Random(1).randbytes(data.stat().st_size)
    data.write_bytes(garbage)
    store = open_nvme(arguments)
    assert published
    assert not any(store.contains(keys(published)))
    assert segment_files(arguments.path) == []
    for start in range(first, first + 400, 8):
        put(store, range(start, start + 8))
    assert_held(store, range(first + 392, first + 400))
    assert disk_bytes(arguments.path) <= arguments.capacity
    store.close()


def test_files_of_a_store_that_died_while_making_them_are_swept(tmp_path: Path) -> None:
    arguments = StoreArguments(tmp_path / "tier")
    store = open_nvme(arguments)
    put(store, range(8))
    store.close()
    (known,) = segment_files(arguments.path)
    empty = arguments.path / "segment-000031"
    empty.touch()
    unknown = arguments.path / "segment-000032"
    shutil.copy(known, unknown)
    probe = arguments.path / "17-17-probe.tmp"
    probe.touch()
    store = open_nvme(arguments)
    assert not empty.exists()
    assert not unknown.exists()
    assert not probe.exists()
    assert_held(store, range(8))
    store.close()


def table(path: Path) -> Iterator[tuple[SegmentHeader, SlotEntry, bytes]]:
    """All current entries of all segments' header tables, with the bytes of their slots."""
    for file in segment_files(path):
        data = file.read_bytes()
        header = SegmentHeader.unpack(data[:PAGE_BYTES])
        assert header is not None
        assert len(data) == header.layout.file_bytes
        for slot in range(header.layout.slots):
            start = header.layout.entry_offset(slot)
            entry = SlotEntry.unpack(data[start : start + header.layout.stride])
            if entry is not None and entry.epoch == header.epoch:
                begin = header.layout.offset(slot)
                yield header, entry, data[begin : begin + entry.checksum.length]


@pytest.mark.parametrize("durability", ["none", "batch", "full"])
def test_the_header_tables_tell_all_that_was_published(tmp_path: Path, durability: str) -> None:
    """From them alone every block can be found and verified; nothing else is in them."""
    arguments = StoreArguments(tmp_path / "tier", extra=(("durability", durability),))
    store = open_nvme(arguments)
    put(store, range(30))
    put(store, range(100, 105), length=12_345)
    places = reserved(store, [new_block(n) for n in range(200, 204)])
    store.write(places, [aligned_copy(content(n)) for n in range(200, 204)])
    store.abandon(places)
    assert store.stat().modes["durability"] == durability
    store.close()
    found = {}
    for header, entry, data in table(arguments.path):
        assert header.namespace_id == NAMESPACE.id
        assert entry.checksum.verifies(entry.key, entry.rank, memoryview(data))
        found[entry.key] = len(data)
    print(f"{len(found)} blocks in the header tables")
    assert found == {
        **{key(n): BLOCK_BYTES for n in range(30)},
        **{key(n): 12_345 for n in range(100, 105)},
    }


def test_a_segment_header_is_told_from_others() -> None:
    assert SegmentHeader.unpack(bytes(PAGE_BYTES)) is None
    assert SegmentHeader.unpack(b"") is None
    assert SlotEntry.unpack(bytes(512)) is None
    noise = random.Random(2)
    for _ in range(200):
        assert SlotEntry.unpack(b"SLOT" + noise.randbytes(508)) is None
