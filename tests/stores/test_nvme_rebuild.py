"""A lost index is made again from the header tables of the segments."""

from __future__ import annotations

import logging
import random
import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stores.nvme_parts import open_below, open_nvme, segment_files
from tiered_kv.contracts import BlockStore
from tiered_kv.errors import TierError
from tiered_kv.index import Transaction, Trust
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    NAMESPACE,
    ODD_BYTES,
    OTHER_NAMESPACE,
    StoreArguments,
    aligned_copy,
    assert_held,
    content,
    disk_bytes,
    get,
    key,
    keys,
    new_block,
    put,
    reserved,
)
from tiered_kv.values import PAGE_BYTES, BlockStatus, Fingerprint, Namespace
from tiered_kv_nvme import space as space_module
from tiered_kv_nvme import store as store_module
from tiered_kv_nvme.headers import SegmentHeader, SegmentLayout, SlotEntry
from tiered_kv_nvme.segments import SegmentFiles
from tiered_kv_nvme.tables import read_entries


@pytest.fixture
def arguments(tmp_path: Path) -> StoreArguments:
    return StoreArguments(tmp_path / "tier")


def lose_index(path: Path) -> None:
    shutil.rmtree(path / "index")


def held(store: BlockStore, numbers: Iterable[int]) -> list[int]:
    """Those of the blocks that are visible, all of which must be whole."""
    asked = list(numbers)
    there = [n for n, yes in zip(asked, store.contains(keys(asked)), strict=True) if yes]
    assert_held(store, there)
    return there


def entries_of(path: Path, number: int) -> list[tuple[Path, SegmentHeader, int, SlotEntry]]:
    """(file, header, slot, entry) of every entry of a block, also of those that do not count."""
    found = []
    for file in segment_files(path):
        header = SegmentHeader.unpack(file.read_bytes()[:PAGE_BYTES])
        assert header is not None
        with file.open("rb") as opened:
            found += [
                (file, header, slot, entry)
                for slot, entry in read_entries(opened.fileno(), header.layout)
                if entry.key == key(number)
            ]
    return found


# --------------------------------------------------------------------------------- what comes back


def test_blocks_of_all_ranks_and_namespaces_come_back(
    arguments: StoreArguments, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks of one namespace, and another namespace that the opener has never heard of."""
    pair = [arguments.with_(rank=rank, world_size=2) for rank in range(2)]
    other = arguments.with_(namespace=OTHER_NAMESPACE)
    for rank, one in enumerate(pair):
        store = open_nvme(one)
        put(store, range(20), rank)
        put(store, range(100, 105), rank, ODD_BYTES)
        if rank == 0:
            put(store, [50])  # its other half was never stored
        store.close()
    store = open_nvme(other)
    put(store, range(20, 30))
    store.close()
    lose_index(arguments.path)

    with caplog.at_level(logging.WARNING):
        stores = [open_nvme(one) for one in pair]
    (record,) = [r for r in caplog.records if "index was lost" in r.message]
    assert f"{2 * 25 + 1 + 10} blocks' parts of 2 namespaces came back" in record.message
    print(record.message)
    for rank, store in enumerate(stores):
        assert_held(store, range(20), rank)
        assert_held(store, range(100, 105), rank, ODD_BYTES)
        assert store.contains(keys([50])) == [False]
        assert store.stat().blocks == 25
    put(stores[1], [50], rank=1)
    assert_held(stores[0], [50], 0)
    for store in stores:
        store.close()
    store = open_nvme(other)
    assert_held(store, range(20, 30))
    assert sorted(store.scan()) == sorted(keys(range(20, 30)))
    store.close()


def test_the_oldest_goes_first_afterwards(arguments: StoreArguments) -> None:
    store = open_nvme(arguments)
    stored = list(range(8 * 24))
    for first in range(0, len(stored), 8):
        put(store, stored[first : first + 8])
    assert store.stat().evicted_blocks == 0
    store.close()
    lose_index(arguments.path)
    store = open_nvme(arguments)
    assert held(store, stored) == stored
    fresh = 1000
    while store.stat().evicted_blocks < 40:
        put(store, range(fresh, fresh + 8))
        fresh += 8
    left = held(store, stored)
    print(f"{len(stored) - len(left)} evicted after the rebuild, {len(left)} left")
    assert left == stored[len(stored) - len(left) :]
    assert_held(store, range(1000, fresh))
    store.close()


def test_followers_of_the_change_log_scan_again(arguments: StoreArguments) -> None:
    """The scheduler's half may open the new index before a rank makes it again."""
    store = open_nvme(arguments)
    put(store, range(12))
    store.close()
    lose_index(arguments.path)
    follower = open_nvme(arguments.with_(writable=False))
    assert list(follower.scan()) == []
    cursor = follower.changes(None).cursor
    store = open_nvme(arguments)
    batch = follower.changes(cursor)
    assert batch.restart
    assert sorted(follower.scan()) == sorted(keys(range(12)))
    put(store, [20])
    assert follower.changes(batch.cursor).changes == ((key(20), True),)
    follower.close()
    store.close()


def test_segments_keep_their_room_and_new_ones_get_new_names(arguments: StoreArguments) -> None:
    store = open_nvme(arguments)
    for first in range(0, 80, 8):
        put(store, range(first, first + 8))
    store.close()
    before = segment_files(arguments.path)
    lose_index(arguments.path)
    for life in range(3):
        store = open_nvme(arguments)
        assert held(store, range(80)) == list(range(80))
        for first in range(0, 80, 8):
            put(store, range(1000 * (life + 1) + first, 1000 * (life + 1) + first + 8))
        print(f"{len(segment_files(arguments.path))} segments, {len(before)} before")
        assert set(before) <= set(segment_files(arguments.path))
        assert disk_bytes(arguments.path) <= arguments.capacity
        if store.stat().evicted_blocks:
            break
        store.close()
    store.close()


# ------------------------------------------------------------------------------- what is not sound


def test_a_slot_that_was_being_rewritten_serves_no_wrong_bytes(arguments: StoreArguments) -> None:
    """Its entry is the old block's, its bytes are new: the read says that they are unproven."""
    store = open_nvme(arguments)
    put(store, range(16))
    store.delete(keys(range(4)))
    places = reserved(store, [new_block(n) for n in range(100, 104)])
    store.write(places, [aligned_copy(content(n)) for n in range(100, 104)])
    aside = arguments.path.with_name("aside")
    shutil.copytree(arguments.path, aside)
    store.abandon(places)
    store.close()

    rewritten = arguments.with_(path=aside)
    lose_index(aside)
    store = open_nvme(rewritten)
    assert store.contains(keys(range(104)))[:16] == [True] * 16
    reads = get(store, range(16))
    assert all(read.result.unproven for read in reads)
    wrong = [n for n, read in enumerate(reads) if not read.sound]
    print(f"{len(wrong)} rows of 16 lead to other bytes")
    assert wrong == [0, 1, 2, 3]
    assert store.discard([new_block(n) for n in wrong]) == 4
    assert put(store, range(16)) == wrong
    assert_held(store, range(16))
    proven = [n for n, read in enumerate(get(store, range(16))) if not read.result.unproven]
    assert proven == wrong
    store.close()
    store = open_nvme(rewritten)
    assert [n for n, r in enumerate(get(store, range(16))) if not r.result.unproven] == wrong
    store.close()


def test_what_was_dropped_as_corrupt_comes_back_unproven_only(arguments: StoreArguments) -> None:
    store = open_nvme(arguments)
    put(store, range(4))
    ((file, header, slot, _),) = entries_of(arguments.path, 2)
    with file.open("r+b") as opened:
        opened.seek(header.layout.offset(slot) + 77)
        opened.write(b"rotten")
    assert store.discard([new_block(2)]) == 1
    store.close()
    lose_index(arguments.path)
    store = open_nvme(arguments)
    (read,) = get(store, [2])
    assert (read.result.status, read.result.unproven, read.sound) == (BlockStatus.OK, True, False)
    assert held(store, [0, 1, 3]) == [0, 1, 3]
    store.close()


def test_of_two_entries_the_younger_one_counts(arguments: StoreArguments) -> None:
    store = open_nvme(arguments)
    put(store, range(4))
    ((file, header, old, _),) = entries_of(arguments.path, 1)
    store.delete([key(1)])
    held_back = reserved(store, [new_block(50)])  # takes the slot that is free now
    put(store, [1])
    found = entries_of(arguments.path, 1)
    assert sorted(entry.generation for *_, entry in found)[0] < max(e.generation for *_, e in found)
    assert len(found) == 2
    store.abandon(held_back)
    store.close()
    with file.open("r+b") as opened:
        opened.seek(header.layout.offset(old))
        opened.write(bytes(BLOCK_BYTES))
    lose_index(arguments.path)
    store = open_nvme(arguments)
    assert_held(store, range(4))
    store.close()


def test_entries_of_an_earlier_life_of_a_segment_do_not_count(arguments: StoreArguments) -> None:
    """Segments change hands; the first owner's entries are still in the tables."""
    store = open_nvme(arguments)
    for first in range(0, 160, 8):
        put(store, range(first, first + 8))
    store.close()
    other = arguments.with_(namespace=OTHER_NAMESPACE)
    store = open_nvme(other)
    theirs: list[int] = []
    while not store.stat().evicted_blocks:
        theirs.append(1000 + len(theirs))
        put(store, theirs[-1:])
    taken = store.stat().evicted_blocks
    store.close()
    store = open_nvme(arguments)
    left = held(store, range(160))
    store.close()
    stale = sum(
        entry.epoch != header.epoch
        for number in range(160)
        for _, header, _, entry in entries_of(arguments.path, number)
    )
    print(f"{taken} blocks lost to the other namespace, {len(left)} left, {stale} stale entries")
    assert stale
    lose_index(arguments.path)
    store = open_nvme(arguments)
    assert held(store, range(160)) == left
    store.close()
    store = open_nvme(other)
    assert held(store, theirs) == theirs
    store.close()


def test_damaged_files_are_left_out_and_free(arguments: StoreArguments) -> None:
    """A header with a flipped bit, a file cut short, a copy under another name, damaged entries."""
    store = open_nvme(arguments)
    for first in range(0, 160, 8):
        put(store, range(first, first + 8))
    store.close()
    files = segment_files(arguments.path)
    where = {n: entries_of(arguments.path, n)[0][:3] for n in range(160)}
    assert len(files) > 4
    page = bytearray(files[0].read_bytes()[:PAGE_BYTES])
    page[2000] ^= 1
    with files[0].open("r+b") as opened:
        opened.write(page)
    with files[1].open("r+b") as opened:
        opened.truncate(files[1].stat().st_size - PAGE_BYTES)
    copy = arguments.path / "segment-000900"
    shutil.copy(files[2], copy)
    lost = {n for n, (file, *_) in where.items() if file in files[:2]}
    spoilt = [n for n, (file, *_) in where.items() if file == files[3]][:2]
    for n in spoilt:
        file, header, slot = where[n]
        with file.open("r+b") as opened:
            opened.seek(header.layout.entry_offset(slot) + 40)
            opened.write(b"\xff")
    lose_index(arguments.path)
    store = open_nvme(arguments)
    back = held(store, range(160))
    print(f"{len(back)} of 160 came back, {len(lost)} lay in damaged files")
    assert back == [n for n in range(160) if n not in lost and n not in spoilt]
    assert not any(file.exists() for file in (*files[:2], copy))
    store.close()


def test_a_segment_of_a_namespace_that_nobody_describes_is_free(
    arguments: StoreArguments, caplog: pytest.LogCaptureFixture
) -> None:
    """Its description did not fit into the header page. Its own engine knows it, others do not."""
    noise = random.Random(5)
    fields = {f"field{n}": noise.randbytes(40).hex() for n in range(120)}
    large = arguments.with_(namespace=Namespace(Fingerprint.of(fields)))
    store = open_nvme(large)
    put(store, range(8))
    store.close()
    (file,) = segment_files(arguments.path)
    header = SegmentHeader.unpack(file.read_bytes()[:PAGE_BYTES])
    assert header is not None
    assert header.description == b""
    lose_index(arguments.path)
    store = open_nvme(large)
    assert_held(store, range(8))
    store.close()
    lose_index(arguments.path)
    store = open_nvme(arguments)
    assert segment_files(arguments.path) == []
    store.close()
    store = open_nvme(large)
    assert held(store, range(8)) == []
    store.close()


def test_more_blocks_than_the_index_takes_leave_the_youngest(
    arguments: StoreArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = arguments.with_(block_bytes=(PAGE_BYTES,))
    store = open_nvme(small)
    for first in range(0, 2000, 100):
        put(store, range(first, first + 100), length=PAGE_BYTES)
    store.close()
    lose_index(arguments.path)
    monkeypatch.setattr(space_module, "INDEX_SHARE", 0.12)
    store = open_nvme(small)
    there = [n for n, yes in enumerate(store.contains(keys(range(2000)))) if yes]
    print(f"{len(there)} of 2000 blocks had room in the index")
    assert 100 < len(there) < 1900
    assert there == list(range(2000 - len(there), 2000))
    assert_held(store, there, length=PAGE_BYTES)
    store.close()


# -------------------------------------------------------------------------------- when it happens


def test_a_rebuild_that_is_cut_short_is_done_again(
    arguments: StoreArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_nvme(arguments)
    put(store, range(16))
    store.close()
    lose_index(arguments.path)

    def fail(self: Trust, txn: Transaction, newest: int) -> None:
        raise TierError("the power went", tier="ssd")

    with monkeypatch.context() as patched:
        patched.setattr(Trust, "finish", fail)
        with pytest.raises(TierError, match="power"):
            open_nvme(arguments)
    store = open_nvme(arguments)
    assert_held(store, range(16))
    store.close()


def test_whoever_opens_meanwhile_waits_until_it_is_made(
    arguments: StoreArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than anybody waits for a transaction, and all ranks come at once."""
    with closing(open_nvme(arguments)) as store:
        put(store, range(16))
    lose_index(arguments.path)
    monkeypatch.setattr("tiered_kv.index.environment._WRITE_SECONDS", 0.05)
    real = Trust.finish
    making, second_ended = threading.Event(), threading.Event()

    def finish(self: Trust, txn: Transaction, newest: int) -> None:
        making.set()
        second_ended.wait(1.0)  # it should not: in twenty times what anybody waits
        real(self, txn, newest)

    monkeypatch.setattr(Trust, "finish", finish)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(open_nvme, arguments)
        assert making.wait(20.0)
        second = threads.submit(open_nvme, arguments)
        second.add_done_callback(lambda _: second_ended.set())
        stores = [one.result(60.0) for one in (first, second)]
    for store in stores:
        assert_held(store, range(16))
        store.close()


def test_nobody_is_left_with_open_files_where_it_cannot_be_opened(
    arguments: StoreArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_nvme(arguments)) as store:
        put(store, range(16))
    lose_index(arguments.path)

    def fail(*_: object, **__: object) -> None:
        raise TierError("it does not work", tier="ssd")

    monkeypatch.setattr(store_module, "engine_for", fail)
    with pytest.raises(TierError, match="does not work"):
        open_nvme(arguments)
    assert open_below(arguments.path) == []
    monkeypatch.undo()
    with closing(open_nvme(arguments)) as store:
        assert_held(store, range(16))


def test_a_file_that_vanishes_meanwhile_is_an_error_of_the_tier(
    arguments: StoreArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_nvme(arguments)) as store:
        put(store, range(16))
    lose_index(arguments.path)
    real = SegmentFiles.header

    def header(self: SegmentFiles, number: int) -> SegmentHeader | None:
        found = real(self, number)
        self.path(number).unlink()
        return found

    monkeypatch.setattr(SegmentFiles, "header", header)
    with pytest.raises(TierError, match=r"cannot look at .*segment-000000: No such file"):
        open_nvme(arguments)


def test_nothing_is_made_again_while_the_index_is_there(
    arguments: StoreArguments, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_nvme(arguments)
    put(store, range(8))
    store.delete(keys(range(4)))
    store.close()
    with caplog.at_level(logging.WARNING):
        store = open_nvme(arguments)
    assert held(store, range(8)) == [4, 5, 6, 7]
    assert not any(read.result.unproven for read in get(store, range(4, 8)))
    assert caplog.records == []
    store.close()


def test_an_index_deleted_under_a_running_store_is_not_made_again(
    arguments: StoreArguments,
) -> None:
    """The store goes on with the index that it has open, and writes where it says: the segments
    can't belong to two. When it has ended, all it stored comes back."""
    old = open_nvme(arguments)
    put(old, range(8))
    lose_index(arguments.path)
    for _ in range(2):
        with pytest.raises(TierError, match="deleted while other processes use it"):
            open_nvme(arguments)
        put(old, range(20, 28))
        assert_held(old, range(8))
    old.close()
    new = open_nvme(arguments)
    assert_held(new, [*range(8), *range(20, 28)])
    new.close()


def test_a_tier_for_reading_says_that_its_index_is_lost(arguments: StoreArguments) -> None:
    store = open_nvme(arguments)
    put(store, range(4))
    store.close()
    lose_index(arguments.path)
    with pytest.raises(TierError):
        open_nvme(arguments.with_(extra=(("access", "read"),)))
    store = open_nvme(arguments)
    assert_held(store, range(4))
    store.close()


# ---------------------------------------------------------------------------------- header pages


@given(
    st.binary(max_size=3 * PAGE_BYTES),
    st.integers(0, 2**63),
    st.integers(0, 2**31),
)
def test_a_header_page_is_read_as_it_was_written(text: bytes, epoch: int, number: int) -> None:
    header = SegmentHeader(
        bytes(range(16)), number, epoch, 3, NAMESPACE.id, SegmentLayout(8192, 7, 512), text
    )
    page = header.pack()
    assert len(page) == PAGE_BYTES
    again = SegmentHeader.unpack(page)
    assert again is not None
    if len(text) <= SegmentHeader.ROOM_BYTES:
        assert again == header
    else:
        assert again.description in (text, b"")


def test_a_long_description_is_compressed() -> None:
    text = b'{"fields":' + b'"layer.weight":"bfloat16",' * 400
    assert len(text) > 2 * PAGE_BYTES
    header = SegmentHeader(bytes(16), 1, 2, 3, bytes(8), SegmentLayout(8192, 7, 512), text)
    assert SegmentHeader.unpack(header.pack()) == header


def test_every_damaged_byte_of_a_header_page_is_told() -> None:
    page = SegmentHeader(
        bytes(16), 1, 2, 3, bytes(8), SegmentLayout(8192, 7, 512), b"what its blocks are"
    ).pack()
    noise = random.Random(3)
    for place in [*range(300), *noise.sample(range(300, PAGE_BYTES), 200), PAGE_BYTES - 1]:
        if 8 <= place < 12:
            continue  # the format version has an answer of its own
        damaged = bytearray(page)
        damaged[place] ^= 1 << noise.randrange(8)
        assert SegmentHeader.unpack(bytes(damaged)) is None, place
    assert SegmentHeader.unpack(page[:-1]) is None
