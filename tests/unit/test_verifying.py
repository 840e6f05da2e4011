"""Verifying blocks of a store, without a load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import NewBlock, ReadResult, StoreContext
from tiered_kv.testing.faults import Effect, Fault, Faults, FaultyStore, Method
from tiered_kv.testing.memory_tier import MemoryDisk, MemorySettings, MemoryStore
from tiered_kv.upkeep import verify
from tiered_kv.values import (
    PAGE_BYTES,
    BlockKey,
    CacheGeometry,
    ChecksumKind,
    Fingerprint,
    GroupGeometry,
    Namespace,
)

LENGTH = 5_000
"""No multiple of a page, nor of a word."""
AREA = 8_192


class Watched(MemoryStore):
    """Notes what memory it is given."""

    def __init__(self, disk: MemoryDisk, context: StoreContext) -> None:
        super().__init__(disk, context)
        self.given: list[list[memoryview]] = []

    def read(self, keys: Sequence[BlockKey], memory: Sequence[memoryview]) -> list[ReadResult]:
        self.given.append(list(memory))
        return super().read(keys, memory)


def open_memory(disk: MemoryDisk, rank: int = 0, world_size: int = 1) -> Watched:
    geometry = CacheGeometry((GroupGeometry(0, LENGTH, 1, 16),), rank, world_size)
    namespace = Namespace(Fingerprint.of({"model": "tiny"}))
    return Watched(disk, StoreContext("t", MemorySettings(name="t"), namespace, geometry))


def key(number: int) -> BlockKey:
    return BlockKey(b"block" + number.to_bytes(4, "big"))


def put(
    store: MemoryStore,
    numbers: Iterable[int],
    rank: int = 0,
    kind: Callable[[int], ChecksumKind] = lambda number: list(ChecksumKind)[number % 2],
) -> list[BlockKey]:
    blocks: list[NewBlock] = []
    views: list[memoryview] = []
    for number in numbers:
        view = memoryview(bytes([number % 256, rank]) * (LENGTH // 2))
        checksum = BlockChecksum.capture(key(number), rank, view, kind(number))
        blocks.append(NewBlock(key(number), checksum))
        views.append(view)
    places = [place for place in store.reserve(blocks) if place is not None]
    store.write(places, views)
    store.publish(places)
    return [block.key for block in blocks]


def test_sound_blocks_of_both_kinds_pass_batch_by_batch() -> None:
    store = open_memory(MemoryDisk())
    keys = put(store, range(7))
    batches = list(verify(store, keys, rank=0, block_bytes=LENGTH, drop=True, batch_bytes=3 * AREA))
    assert [batch.blocks for batch in batches] == [3, 3, 1]
    assert [batch.bytes for batch in batches] == [3 * LENGTH, 3 * LENGTH, LENGTH]
    assert all(not batch.corrupt and not batch.missing for batch in batches)
    assert all(len(view) == AREA for views in store.given for view in views)
    assert store.contains(keys) == [True] * 7


def test_a_batch_smaller_than_a_block_is_one_block() -> None:
    store = open_memory(MemoryDisk())
    keys = put(store, range(2))
    batches = list(verify(store, keys, rank=0, block_bytes=LENGTH, drop=False, batch_bytes=1))
    assert [batch.blocks for batch in batches] == [1, 1]


@pytest.mark.parametrize("drop", [True, False])
def test_a_damaged_block_is_named_and_dropped_where_that_is_asked(drop: bool) -> None:
    disk = MemoryDisk()
    store = open_memory(disk)
    keys = put(store, range(6))
    disk.spoil(keys[2])
    disk.spoil(keys[5])
    found = list(verify(store, iter(keys), rank=0, block_bytes=LENGTH, drop=drop))
    assert [batch.corrupt for batch in found] == [(keys[2], keys[5])]
    assert found[0].blocks == 6
    assert store.contains(keys) == [True, True, not drop, True, True, not drop]
    if drop:
        assert put(store, [2, 5]) == [keys[2], keys[5]]
        assert not [c for b in verify(store, keys, rank=0, block_bytes=LENGTH, drop=True)
                    for c in b.corrupt]  # fmt: skip


def test_the_bytes_of_another_rank_do_not_pass() -> None:
    disk = MemoryDisk()
    stores = [open_memory(disk, rank, 2) for rank in range(2)]
    keys, _ = (put(store, range(3), rank) for rank, store in enumerate(stores))
    right = list(verify(stores[1], keys, rank=1, block_bytes=LENGTH, drop=False))
    wrong = list(verify(stores[1], keys, rank=0, block_bytes=LENGTH, drop=False))
    assert [batch.corrupt for batch in right] == [()]
    assert [batch.corrupt for batch in wrong] == [tuple(keys)]


def test_what_is_gone_or_cannot_be_read_is_counted_and_stays() -> None:
    disk = MemoryDisk()
    store = open_memory(disk)
    keys = put(store, range(4))
    store.delete([keys[0]])
    faults = Faults(
        Fault(method=Method.READ, effect=Effect.BLOCK_ERROR, keys=frozenset({keys[1]})), tier="t"
    )
    (found,) = verify(FaultyStore(store, faults), keys, rank=0, block_bytes=LENGTH, drop=True)
    assert (found.blocks, found.missing, found.unreadable, found.corrupt) == (2, 1, 1, ())
    assert store.contains(keys) == [False, True, True, True]


def test_a_block_longer_than_the_longest_is_missing() -> None:
    store = open_memory(MemoryDisk())
    keys = put(store, range(2))
    (found,) = verify(store, keys, rank=0, block_bytes=PAGE_BYTES, drop=True)
    assert (found.blocks, found.missing) == (0, 2)
    assert all(store.contains(keys))


def test_it_is_paced_and_stopped_between_batches() -> None:
    store = open_memory(MemoryDisk())
    keys = put(store, range(10))
    paced: list[int] = []
    given: list[BlockKey] = []

    def handed_out() -> Iterator[BlockKey]:
        for one in keys:
            given.append(one)
            yield one

    batches = list(
        verify(
            store,
            handed_out(),
            rank=0,
            block_bytes=LENGTH,
            drop=False,
            batch_bytes=2 * AREA,
            pace=paced.append,
            stop=lambda: len(paced) == 3,
        )
    )
    assert paced == [2 * LENGTH] * 3
    assert len(batches) == 3
    assert given == keys[:6]


def test_nothing_to_verify_reads_nothing() -> None:
    store = open_memory(MemoryDisk())
    assert list(verify(store, [], rank=0, block_bytes=LENGTH, drop=True)) == []
    assert store.given == []


@pytest.mark.parametrize(("block_bytes", "batch_bytes"), [(0, 1), (1, 0)])
def test_sizes_below_one_are_refused(block_bytes: int, batch_bytes: int) -> None:
    store = open_memory(MemoryDisk())
    with pytest.raises(ValueError, match="at least 1"):
        verify(store, [], rank=0, block_bytes=block_bytes, drop=False, batch_bytes=batch_bytes)
