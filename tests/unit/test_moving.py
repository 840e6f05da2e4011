"""Blocks between stores and archives, on the tier in memory."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

from tests.unit.archives import read_all
from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import BlockStore, MaintenanceContext, NewBlock, Place, StoreContext
from tiered_kv.errors import NoSpace, TierError
from tiered_kv.testing.conformance.blocks import NAMESPACE, aligned_copy, key
from tiered_kv.testing.faults import Effect, Fault, Method
from tiered_kv.testing.memory_tier import MemoryDisk, MemorySettings, MemoryStore, MemoryTiers
from tiered_kv.upkeep import (
    ArchiveContents,
    ArchiveReader,
    ArchiveWriter,
    Exported,
    Imported,
    export_blocks,
    import_blocks,
)
from tiered_kv.values import BlockKey, CacheGeometry, ChecksumKind, GroupGeometry

RANKS = 2
LENGTHS = (5000, 4096)
GEOMETRY = CacheGeometry(
    tuple(GroupGeometry(i, size, 1, 16) for i, size in enumerate(LENGTHS)), 0, RANKS
)
CONTENTS = ArchiveContents(NAMESPACE, GEOMETRY, tuple(range(RANKS)))


class Tiers:
    """Tiers in memory, and blocks in them."""

    def __init__(self) -> None:
        tiers = MemoryTiers()
        self.backend = tiers.backend
        self._tiers = tiers

    def disk(self, tier: str) -> MemoryDisk:
        return self._tiers.disk(tier)

    def stores(self, tier: str, *, writable: bool = True) -> dict[int, BlockStore]:
        settings = MemorySettings(name=tier)
        assert self.backend.open_store is not None
        return {
            rank: self.backend.open_store(
                StoreContext(tier, settings, NAMESPACE, replace(GEOMETRY, rank=rank), writable)
            )
            for rank in range(RANKS)
        }

    def fill(self, tier: str, numbers: Iterable[int]) -> None:
        for rank, store in self.stores(tier).items():
            for number in numbers:
                data = aligned_copy(content(number, rank))
                kind = tuple(ChecksumKind)[number % 2]
                checksum = BlockChecksum.capture(key(number), rank, data, kind)
                [place] = store.reserve([NewBlock(key(number), checksum)])
                assert place is not None
                store.write([place], [data])
                store.publish([place])
            store.close()


def content(number: int, rank: int) -> bytes:
    return bytes([number % 251, rank]) * (LENGTHS[number % len(LENGTHS)] // 2)


class NeverEvicts(MemoryStore):
    """A store that has no room rather than to evict."""

    room: int

    def reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        wanted = sum(block.checksum.length for block in blocks)
        if self.stat().used_bytes + wanted > self.room:
            raise NoSpace("no room")
        return super().reserve(blocks)


def exported(
    stores: dict[int, BlockStore], *, most_bytes: int | None = None, batch_bytes: int = 50_000
) -> tuple[Exported, bytes]:
    stream = io.BytesIO()
    done = export_blocks(
        stores,
        stores[min(stores)].scan(),
        ArchiveWriter(stream, replace(CONTENTS, ranks=tuple(stores))),
        block_bytes=max(LENGTHS),
        most_bytes=most_bytes,
        batch_bytes=batch_bytes,
    )
    return done, stream.getvalue()


def imported(
    data: bytes,
    stores: dict[int, BlockStore],
    *,
    batch_bytes: int = 50_000,
    progress: Callable[[int], None] = lambda parts: None,
) -> Imported:
    reader = ArchiveReader(io.BytesIO(data))
    return import_blocks(reader, stores.__getitem__, batch_bytes=batch_bytes, progress=progress)


@pytest.mark.parametrize("batch_bytes", [1, 50_000, 10**7])
def test_blocks_go_there_and_back(batch_bytes: int) -> None:
    tiers = Tiers()
    tiers.fill("a", range(40))
    stores = tiers.stores("a", writable=False)
    done, data = exported(stores, batch_bytes=batch_bytes)
    size = sum(len(content(number, 0)) for number in range(40)) * RANKS
    assert done == Exported(blocks=40, bytes=size)
    steps: list[int] = []
    target = tiers.stores("b")
    got = imported(data, target, batch_bytes=batch_bytes, progress=steps.append)
    assert got == Imported(parts=80, bytes=size)
    assert sum(steps) == 80
    for number in range(40):
        for rank in range(RANKS):
            assert tiers.disk("b").content(key(number), rank) == content(number, rank)
    assert all(tiers.disk("a").rows[row] == parts for row, parts in tiers.disk("b").rows.items())
    again = imported(data, target)
    assert again == Imported(present=80)


def test_one_rank_at_a_time() -> None:
    tiers = Tiers()
    tiers.fill("a", range(5))
    halves = {}
    for rank, store in tiers.stores("a", writable=False).items():
        done, halves[rank] = exported({rank: store})
        assert done.blocks == 5
    target = tiers.stores("b")
    assert imported(halves[1], target).parts == 5
    assert target[0].contains([key(n) for n in range(5)]) == [False] * 5
    assert imported(halves[0], target).parts == 5
    assert target[0].contains([key(n) for n in range(5)]) == [True] * 5


def test_a_limit_keeps_whole_blocks() -> None:
    tiers = Tiers()
    tiers.fill("a", range(0, 20, 2))  # all of the longer kind
    stores = tiers.stores("a", writable=False)
    done, data = exported(stores, most_bytes=LENGTHS[0] * RANKS * 3 + 9999)
    assert (done.blocks, done.bytes) == (3, LENGTHS[0] * RANKS * 3)
    assert read_all(data, []).parts == 3 * RANKS
    done, data = exported(stores, most_bytes=1)
    assert done.blocks == 0
    assert read_all(data, []).parts == 0


def test_what_does_not_verify_is_left_out() -> None:
    tiers = Tiers()
    tiers.fill("a", range(10))
    tiers.disk("a").spoil(key(3))
    tiers.disk("a").faults.inject(
        Fault(method=Method.READ, effect=Effect.BLOCK_ERROR, keys=frozenset({key(4)})),
        Fault(method=Method.READ, effect=Effect.NOT_FOUND, keys=frozenset({key(5)})),
    )
    done, data = exported(tiers.stores("a", writable=False))
    assert (done.blocks, done.corrupt, done.unreadable, done.missing) == (7, 1, 1, 1)
    found: list[tuple[bytes, int, bytes, ChecksumKind]] = []
    read_all(data, found)
    assert {part[0] for part in found} == {key(n) for n in (0, 1, 2, 6, 7, 8, 9)}


def test_a_block_that_is_damaged_on_one_rank_is_left_out_as_a_whole() -> None:
    tiers = Tiers()
    tiers.fill("a", range(3))
    [row] = [row for row in tiers.disk("a").rows if row[1] == key(1)]
    data, checksum = tiers.disk("a").rows[row][1]
    tiers.disk("a").rows[row][1] = (data[:-1] + b"?", checksum)
    done, written = exported(tiers.stores("a", writable=False))
    assert (done.blocks, done.corrupt) == (2, 1)
    assert read_all(written, []).parts == 4


def test_damage_in_a_file() -> None:
    """Whatever byte is changed or cut: only right bytes are stored, and it shows."""
    tiers = Tiers()
    tiers.fill("a", range(4))
    _, data = exported(tiers.stores("a", writable=False))
    stored, refused, broken = 0, 0, 0
    for place in range(500, len(data), 577):
        for change, spoiled in enumerate(
            (data[:place], data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        ):
            fresh = Tiers()
            got = imported(spoiled, fresh.stores("b"), batch_bytes=(1, 20_000)[place % 2])
            assert got.damage, (place, change)
            for number in range(4):
                for rank in range(RANKS):
                    assert fresh.disk("b").content(key(number), rank) in (
                        None,
                        content(number, rank),
                    )
            assert got.parts + got.refused <= 8
            stored, refused, broken = stored + got.parts, refused + got.refused, broken + 1
    print(f"{broken} damaged files: {stored} parts stored, {refused} refused")
    assert broken > 100
    assert stored > 100
    assert refused > 50


def test_a_full_tier_ends_the_import_with_what_fitted() -> None:
    tiers = Tiers()
    tiers.fill("a", range(10))
    _, data = exported(tiers.stores("a", writable=False))
    small = Tiers()
    target: dict[int, BlockStore] = {}
    for rank in range(RANKS):
        settings = MemorySettings(name="b")
        context = StoreContext("b", settings, NAMESPACE, replace(GEOMETRY, rank=rank))
        store = NeverEvicts(small.disk("b"), context)
        store.room = 5000 * 7
        target[rank] = store
    got = imported(data, target)
    assert "no room" in got.full
    assert not got.damage
    assert small.disk("b").reserved == {}
    whole = [n for n in range(10) if small.disk("b").content(key(n), 0) == content(n, 0)]
    print(f"{got.parts} of 20 parts stored, of blocks {whole}")
    assert got.parts == 7
    assert whole


def test_a_tier_that_fails_is_told() -> None:
    tiers = Tiers()
    tiers.fill("a", range(3))
    stores = tiers.stores("a", writable=False)
    _, data = exported(stores)

    def fail(tier: str, method: Method) -> None:
        tiers.disk(tier).faults.inject(Fault(method=method, effect=Effect.TIER_ERROR))

    fail("a", Method.READ)
    with pytest.raises(TierError, match="injected at read"):
        exported(stores)
    fail("b", Method.RESERVE)
    with pytest.raises(TierError, match="injected at reserve"):
        imported(data, tiers.stores("b"))
    fail("b", Method.WRITE)
    with pytest.raises(TierError, match="injected at write"):
        imported(data, tiers.stores("b"))
    assert tiers.disk("b").reserved == {}


def test_the_same_block_twice_in_a_file() -> None:
    tiers = Tiers()
    tiers.fill("a", range(1))
    stores = tiers.stores("a", writable=False)
    stream = io.BytesIO()
    export_blocks(
        stores,
        [key(0), key(0)],
        ArchiveWriter(stream, CONTENTS),
        block_bytes=max(LENGTHS),
    )
    got = imported(stream.getvalue(), tiers.stores("b"), batch_bytes=10**6)
    assert (got.parts, got.present) == (2, 2)


# What looks after a tier in memory


def test_the_maintenance_of_a_tier_in_memory() -> None:
    tiers = Tiers()
    tiers.fill("a", range(6))
    backend, settings = tiers.backend, MemorySettings(name="a")
    assert backend.open_maintenance is not None
    looking = backend.open_maintenance(MaintenanceContext("a", settings, writable=False))
    changing = backend.open_maintenance(MaintenanceContext("a", settings))
    [stored] = looking.namespaces()
    assert (stored.namespace, stored.geometry) == (NAMESPACE, GEOMETRY)
    assert (stored.blocks, stored.in_use) == (6, False)
    assert stored.used_bytes == RANKS * sum(len(content(n, 0)) for n in range(6))
    stores = tiers.stores("a")
    stores[1].reserve([NewBlock(BlockKey(b"left"), BlockChecksum(100, 1))])
    assert looking.namespaces()[0].in_use
    assert looking.reconcile(repair=False).found == {}
    with pytest.raises(ValueError, match="in use"):
        changing.drop(NAMESPACE.id)
    for store in (*stores.values(), *stores.values()):
        store.close()
    for maintenance in (looking, changing):
        assert maintenance.reconcile(repair=False).found == {"places of closed stores": 1}
    with pytest.raises(ValueError, match="looking only"):
        looking.reconcile(repair=True)
    with pytest.raises(ValueError, match="looking only"):
        looking.drop(NAMESPACE.id)
    assert changing.reconcile(repair=True).repaired == {"places of closed stores": 1}
    assert changing.reconcile(repair=False).found == {}
    assert changing.drop(b"\0" * 8) == 0
    assert changing.drop(NAMESPACE.id) == 6
    assert changing.namespaces() == []
    assert tiers.disk("a").used_bytes == 0
