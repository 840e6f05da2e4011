"""Budgets are hard: capacity, free-space floor, other namespaces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.nvme_parts import MIB, open_nvme, random_block, segment_files
from tiered_kv.config import SizeOrPercent
from tiered_kv.contracts import BlockStore
from tiered_kv.errors import ConfigError, NoSpace
from tiered_kv.testing.conformance.blocks import (
    OTHER_NAMESPACE,
    StoreArguments,
    assert_held,
    disk_bytes,
    keys,
    put,
    reserved,
)


@pytest.fixture
def opened() -> Iterator[list[BlockStore]]:
    """Stores that are closed after the test."""
    stores: list[BlockStore] = []
    yield stores
    for store in stores:
        store.close()


def store_megabytes(store: BlockStore, total: int, first: int) -> Iterator[int]:
    """Store blocks of 1 MiB in batches of 8; gives the next number after each batch."""
    for number in range(first, first + total // MIB, 8):
        blocks = [random_block(n, MIB) for n in range(number, number + 8)]
        places = reserved(store, [block for block, _ in blocks])
        store.write(places, [view for _, view in blocks])
        store.publish(places)
        yield number + 8


def test_what_lay_in_the_directory_before_counts(tmp_path: Path, opened: list[BlockStore]) -> None:
    arguments = StoreArguments(tmp_path / "tier")
    open_nvme(arguments).close()
    (arguments.path / "notes").mkdir()
    (arguments.path / "notes" / "old.bin").write_bytes(os.urandom(6 * MIB))
    (arguments.path / "lost+found").mkdir()
    store = open_nvme(arguments)
    opened.append(store)
    for first in range(0, 400, 8):
        put(store, range(first, first + 8))
    used = disk_bytes(arguments.path)
    print(f"{store.stat().blocks} blocks held beside 6 MiB of others, {used} bytes on the disk")
    assert used <= arguments.capacity
    assert store.stat().used_bytes >= 6 * MIB
    assert store.stat().blocks > 0
    assert (arguments.path / "notes" / "old.bin").exists()


def test_a_lowered_capacity_is_kept_from_the_next_start(
    tmp_path: Path, opened: list[BlockStore]
) -> None:
    arguments = StoreArguments(tmp_path / "tier", 32 * MIB)
    store = open_nvme(arguments)
    for first in range(0, 384, 8):
        put(store, range(first, first + 8))
    before = store.stat().blocks
    store.close()
    store = open_nvme(arguments.with_(capacity=16 * MIB))
    opened.append(store)
    used = disk_bytes(arguments.path)
    print(f"{before} blocks in 32 MiB, {store.stat().blocks} in 16 MiB, {used} bytes")
    assert used <= 16 * MIB
    assert_held(store, range(380, 384))
    assert 0 < store.stat().blocks < before
    put(store, range(1000, 1008))
    assert_held(store, range(1000, 1008))


def test_two_live_namespaces_share_by_use(tmp_path: Path, opened: list[BlockStore]) -> None:
    """A fills the tier and goes on using what it stored last; B gets the rest, not that."""
    arguments = StoreArguments(tmp_path / "tier")
    a = open_nvme(arguments)
    b = open_nvme(arguments.with_(namespace=OTHER_NAMESPACE))
    opened += [a, b]
    for first in range(0, 512, 8):
        put(a, range(first, first + 8))
    reached = a.stat().blocks
    for first in range(0, 80, 8):
        put(b, range(first, first + 8))
    print(f"A had {reached} blocks and keeps {a.stat().blocks}, B has {b.stat().blocks}")
    assert_held(b, range(40, 80))
    assert_held(a, range(480, 512))
    assert a.stat().blocks + b.stat().blocks >= reached // 2
    for first in range(512, 1024, 8):
        put(a, range(first, first + 8))
    print(f"then A stored more: {a.stat().blocks} and {b.stat().blocks}")
    assert a.stat().blocks > b.stat().blocks


def test_a_segment_of_other_slots_is_cut_anew(tmp_path: Path, opened: list[BlockStore]) -> None:
    """Blocks of 64 KiB fill the tier, then blocks of 1 MiB need it, then 64 KiB again."""
    arguments = StoreArguments(tmp_path / "tier", 32 * MIB)
    store = open_nvme(arguments)
    opened.append(store)
    for first in range(0, 512, 8):
        put(store, range(first, first + 8))
    small = store.stat().blocks
    for _ in store_megabytes(store, 16 * MIB, 0):
        assert disk_bytes(arguments.path) <= arguments.capacity
    for block, _ in (random_block(n, MIB) for n in range(8, 16)):
        assert store.contains([block.key]) == [True]
    for first in range(600, 1112, 8):
        put(store, range(first, first + 8))
        assert disk_bytes(arguments.path) <= arguments.capacity
    assert_held(store, range(1104, 1112))
    print(f"{small} small blocks, {store.stat().blocks} blocks after the change and back")


def test_the_free_space_floor_is_kept(tmp_path: Path, opened: list[BlockStore]) -> None:
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    floor = SizeOrPercent(size=free + 1024 * MIB)
    arguments = StoreArguments(tmp_path / "tier", extra=(("min_free", floor),))
    store = open_nvme(arguments)
    opened.append(store)
    with pytest.raises(NoSpace, match="min_free"):
        put(store, [1])
    assert store.contains(keys([1])) == [False]
    assert segment_files(arguments.path) == []


def test_a_floor_that_is_broken_later_leads_to_eviction(
    tmp_path: Path, opened: list[BlockStore]
) -> None:
    arguments = StoreArguments(tmp_path / "tier")
    store = open_nvme(arguments)
    for first in range(0, 40, 8):
        put(store, range(first, first + 8))
    store.close()
    size = disk_bytes(arguments.path)
    floor = SizeOrPercent(size=2**60)
    store = open_nvme(arguments.with_(extra=(("min_free", floor),)))
    opened.append(store)
    for first in range(40, 240, 8):
        put(store, range(first, first + 8))
        assert_held(store, range(first, first + 8))
    stat = store.stat()
    print(f"{stat.evicted_blocks} evicted, {stat.blocks} held, nothing grew")
    assert stat.evicted_blocks > 0
    assert disk_bytes(arguments.path) <= size + MIB


def test_a_capacity_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot hold one block of 64KiB") as caught:
        open_nvme(StoreArguments(tmp_path / "tier", 65_536))
    assert caught.value.key == "capacity"
    assert not (tmp_path / "tier").exists()


def test_many_small_blocks_do_not_fill_the_index(tmp_path: Path, opened: list[BlockStore]) -> None:
    """Blocks of one page: the index evicts ahead of need and everything goes on."""
    arguments = StoreArguments(tmp_path / "tier", 8 * MIB)
    store = open_nvme(arguments)
    opened.append(store)
    stored = 0
    for first in range(0, 8000, 500):
        blocks = [random_block(n, 4096) for n in range(first, first + 500)]
        places = reserved(store, [block for block, _ in blocks])
        store.write(places, [view for _, view in blocks])
        store.publish(places)
        stored += len(blocks)
        assert all(store.contains([block.key for block, _ in blocks]))
        assert disk_bytes(arguments.path) <= arguments.capacity
    print(f"{stored} blocks of 4 KiB stored, {store.stat().blocks} held")
    assert store.stat().blocks >= 500
