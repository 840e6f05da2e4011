"""Several directories as one nvme tier: spread, told apart, and lost one at a time."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.faults.tracing import injected
from tests.stores.nvme_parts import (
    MIB,
    look_after_nvme,
    look_after_striped,
    open_below,
    open_nvme,
    open_striped,
    random_block,
    segment_files,
    stripes_of,
)
from tests.stores.nvme_parts import settings as nvme_settings
from tiered_kv.config import Deployment, SizeOrPercent, volumes
from tiered_kv.contracts import BlockStore
from tiered_kv.errors import IdentityError, NoSpace, TierError, TierGone
from tiered_kv.index import BlockIndex, Transaction
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
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
from tiered_kv.values import BlockStatus
from tiered_kv_nvme import stripes as stripes_module
from tiered_kv_nvme.directory import probe
from tiered_kv_nvme.posix import DirectMode
from tiered_kv_nvme.segments import SegmentFiles
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.spreading import place_of, segment_number, shares
from tiered_kv_nvme.store import NvmeStore

LARGE = 64 * MIB


@pytest.fixture
def arguments(tmp_path: Path) -> StoreArguments:
    return StoreArguments(tmp_path / "tier", LARGE)


Keep = Callable[[BlockStore], BlockStore]


@pytest.fixture
def keep() -> Iterator[Keep]:
    """Has a store closed after the test."""
    stores: list[BlockStore] = []

    def kept(store: BlockStore) -> BlockStore:
        stores.append(store)
        return store

    yield kept
    for store in stores:
        store.close()


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories that failed are tried again with the next call."""
    monkeypatch.setattr(stripes_module, "RETRY_SECONDS", 0.0)


def over(arguments: StoreArguments, *paths: Path, **more: object) -> StoreArguments:
    return arguments.with_(extra=(("paths", paths), *more.items()))


def directory_of(store: BlockStore, numbers: Sequence[int]) -> dict[int, int]:
    """By block, in which of the tier's directories it lies."""
    assert isinstance(store, NvmeStore)
    with store.reading(keys(numbers), [BLOCK_BYTES] * len(numbers)) as batch:
        return {numbers[one.position]: place_of(one.spot.extent.number) for one in batch.found}


def fill(store: BlockStore, batches: int, size: int = 16, first: int = 0) -> range:
    numbers = range(first, first + batches * size)
    for number in numbers[::size]:
        put(store, range(number, number + size))
    return numbers


def paths_mode(store: BlockStore) -> str:
    return store.stat().modes["paths"]


# ------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("given", [{}, {"path": "/a", "paths": ("/b", "/c")}, {"paths": ()}])
def test_either_path_or_paths(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="either `path`"):
        NvmeSettings.model_validate({"name": "ssd", **given})


def test_a_striped_tier_counts_on_the_volumes_it_uses(tmp_path: Path) -> None:
    """Two directories on one file system, one on another: each file system wants its part, and
    what one has no room for is wanted of the other."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        if Path(memory).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("needs two file systems")
        paths = (tmp_path / "a", Path(memory, "b"), tmp_path / "c")
        tier = NvmeSettings(name="ssd", paths=paths, capacity=8 * MIB)
        one, other = volumes(Deployment(tiers=(tier,)), ranks=1)
        assert (one.wanted_bytes, other.wanted_bytes) == (4 * MIB, 4 * MIB)
        assert one.shortage is None
        assert other.shortage is None
        least = min(one.free_bytes, other.free_bytes)
        tier = NvmeSettings(name="ssd", paths=paths, capacity=2 * least + 64 * MIB)
        wanted = [volume.wanted_bytes for volume in volumes(Deployment(tiers=(tier,)), ranks=1)]
        print(f"of {tier.capacity} bytes: {wanted}")
        assert sum(wanted) == tier.capacity
        assert min(wanted) <= 1.01 * least
        huge = NvmeSettings(name="ssd", paths=paths, capacity=2**60)
        shortages = [v.shortage for v in volumes(Deployment(tiers=(huge,)), ranks=1)]
        assert sum(shortage is not None for shortage in shortages) == 1


# ------------------------------------------------------------------------------------ spreading


def test_a_large_batch_is_spread_and_small_ones_take_turns(
    arguments: StoreArguments, keep: Keep
) -> None:
    store = keep(open_striped(arguments))
    blocks = [random_block(n, MIB) for n in range(12)]
    places = reserved(store, [block for block, _ in blocks])
    store.write(places, [view for _, view in blocks])
    store.publish(places)
    numbers = [getattr(place.token, "number") for place in places]  # noqa: B009 - it is `object`
    large = Counter(place_of(number) for number in numbers)
    fill(store, 9)
    small = Counter(directory_of(store, range(9 * 16)).values())
    print(f"12 blocks of 1 MiB in one batch: {large}; 9 batches of 1 MiB: {small}")
    assert large == {0: 4, 1: 4, 2: 4}
    assert small == {0: 48, 1: 48, 2: 48}
    assert [len(segment_files(path)) for path in stripes_of(arguments.path)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("rooms", "count", "slot_bytes", "expected"),
    [
        ({(0, 1): 9, (1, 2): 9}, 8, MIB, {(0, 1): 4, (1, 2): 4}),
        ({(0, 1): 9, (1, 2): 9}, 7, MIB, {(0, 1): 7}),
        ({(0, 1): 9, (1, 2): 2}, 8, MIB, {(0, 1): 6, (1, 2): 2}),
        ({(0, 1): 9, (1, 2): 2}, 11, MIB, {(0, 1): 9, (1, 2): 2}),
        ({(0, 1): 5, (0, 2): 4, (1, 3): 3}, 10, MIB, {(0, 1): 5, (0, 2): 2, (1, 3): 3}),
        ({(0, 1): 5, (1, 3): 7}, 4, 65_536, {(1, 3): 4}),
        ({(0, 1): 5, (1, 3): 7}, 9, 65_536, {(0, 1): 2, (1, 3): 7}),
        ({(0, 1): 9, (1, 2): 9, (2, 3): 9}, 13, MIB, {(0, 1): 5, (1, 2): 4, (2, 3): 4}),
    ],
)
def test_shares(
    rooms: dict[tuple[int, int], int],
    count: int,
    slot_bytes: int,
    expected: dict[tuple[int, int], int],
) -> None:
    free = {segment_number(*name): slots for name, slots in rooms.items()}
    found = shares(free, count, slot_bytes)
    assert sum(found.values()) == count
    assert all(found[number] <= free[number] for number in found)
    assert sorted(found.values()) == sorted(expected.values())
    assert found.keys() == {segment_number(*name) for name in expected}


def test_all_of_the_capacity_is_used_and_not_more(tmp_path: Path, keep: Keep) -> None:
    arguments = StoreArguments(tmp_path / "tier", 24 * MIB)
    store = keep(open_striped(arguments))
    for first in range(0, 1024, 16):
        put(store, range(first, first + 16))
        assert disk_bytes(arguments.path) <= arguments.capacity
    counts = [len(segment_files(path)) for path in stripes_of(arguments.path)]
    print(f"{store.stat().blocks} blocks; segments in the directories: {counts}")
    assert store.stat().blocks * BLOCK_BYTES > arguments.capacity // 2
    assert max(counts) - min(counts) <= 1
    assert_held(store, range(1008, 1024))


def test_the_index_may_lie_elsewhere(arguments: StoreArguments, tmp_path: Path, keep: Keep) -> None:
    a, b, index = (tmp_path / name for name in ("a", "b", "fast"))
    where = over(arguments, a, b, index=index)
    store = open_nvme(where)
    held = fill(store, 4)
    store.close()
    assert sorted(path.name for path in index.iterdir()) == ["index", "tiered-kv-directory.json"]
    assert not (a / "index").exists()
    store = keep(open_nvme(where))
    assert_held(store, held)
    with pytest.raises(IdentityError, match="its index is not in"):
        open_nvme(over(arguments, a, b, index=tmp_path / "other"))


# ----------------------------------------------------------------------------------- identities


def test_directories_in_another_order_or_of_another_tier_are_refused(
    arguments: StoreArguments, tmp_path: Path
) -> None:
    a, b, c, d = (tmp_path / name for name in "abcd")
    store = open_nvme(over(arguments, a, b))
    held = fill(store, 4)
    store.close()
    other = open_nvme(over(arguments, c, d))
    fill(other, 4)
    other.close()
    before = disk_bytes(tmp_path)
    with pytest.raises(IdentityError, match=r"/b was directory 2 of its tier.*directory 1"):
        open_nvme(over(arguments, b, a))
    with pytest.raises(IdentityError, match="/d belongs to another tier"):
        open_nvme(over(arguments, a, d))
    with pytest.raises(IdentityError, match="/c belongs to another tier"):
        open_nvme(over(arguments, a, b, c))
    with pytest.raises(IdentityError, match="its index is not in"):
        open_nvme(over(arguments, tmp_path / "e", d))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("mine")
    with pytest.raises(IdentityError, match="thesis"):
        open_nvme(over(arguments, a, b, mine))
    assert disk_bytes(tmp_path) - disk_bytes(mine) - disk_bytes(tmp_path / "e") <= before + 65_536
    for paths in ((a, b), (c, d)):
        store = open_nvme(over(arguments, *paths))
        assert_held(store, held)
        store.close()


def test_directories_are_added_and_taken_away_at_the_end(
    arguments: StoreArguments, tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    store = open_nvme(arguments.with_(path=a))
    held = fill(store, 4)
    store.close()
    store = open_nvme(over(arguments, a, b))
    assert_held(store, held)
    more = range(1000, 1016)
    put(store, more)
    put(store, range(2000, 2016))
    where = directory_of(store, [*held, *more, *range(2000, 2016)])
    store.close()
    lost = [n for n, place in where.items() if place == 1]
    store = open_nvme(arguments.with_(path=a))
    there = store.contains(keys(list(where)))
    print(f"{len(lost)} of {len(where)} blocks lay in the directory that was taken away")
    assert lost
    assert there == [n not in lost for n in where]
    store.close()
    store = open_nvme(over(arguments, a, b))
    assert segment_files(b) == []
    put(store, lost)
    assert_held(store, list(where))
    store.close()


def test_a_disk_that_was_replaced_gets_another_directory(
    arguments: StoreArguments, tmp_path: Path, keep: Keep
) -> None:
    a, b, new = (tmp_path / name for name in ("a", "b", "new"))
    store = open_nvme(over(arguments, a, b))
    held = fill(store, 4)
    where = directory_of(store, held)
    store.close()
    shutil.rmtree(b)
    store = keep(open_nvme(over(arguments, a, new)))
    kept = [n for n, place in where.items() if place == 0]
    assert store.contains(keys(held)) == [n in kept for n in held]
    assert 0 < len(kept) < len(held)
    put(store, list(held))
    assert_held(store, held)
    assert segment_files(new)


# ------------------------------------------------------------------------------ lost and found


def test_a_directory_that_goes_away_costs_its_blocks_until_it_is_back(
    arguments: StoreArguments, keep: Keep, no_backoff: None
) -> None:
    store = keep(open_striped(arguments))
    held = fill(store, 12)
    where = directory_of(store, held)
    second = stripes_of(arguments.path)[1]
    away = [n for n, place in where.items() if place == 1]
    others = [n for n in held if n not in away]
    cursor = store.changes(None).cursor
    store.close()
    store = keep(open_striped(arguments))  # no descriptor is open
    assert not store.changes(cursor).restart, "opening is no news"
    second.rename(second.with_name("elsewhere"))

    statuses = Counter(read.result.status for read in get(store, held))
    assert statuses == {BlockStatus.OK: len(others), BlockStatus.MISSING: len(away)}
    assert store.contains(keys(held)) == [n not in away for n in held]
    assert_held(store, others)
    assert store.stat().blocks == len(held), "rows were dropped"
    print(paths_mode(store))
    assert paths_mode(store).startswith(f"2 of 3 in use; {second} failed: ")
    new = fill(store, 4, first=1000)
    assert_held(store, new)
    assert set(directory_of(store, new).values()) == {0, 2}
    again = away[:8]
    assert sorted(put(store, again)) == again, "what is out of reach can be stored anew"
    assert_held(store, again)
    assert not second.exists()

    second.with_name("elsewhere").rename(second)
    assert_held(store, [*held, *new])
    assert paths_mode(store) == "3 in use"
    assert store.changes(cursor).restart, "those who took the blocks for lost must look again"
    assert 1 in directory_of(store, fill(store, 6, first=2000)).values()


def test_a_directory_that_was_removed_is_missed_and_one_in_its_place_is_taken(
    arguments: StoreArguments, keep: Keep, no_backoff: None
) -> None:
    store = keep(open_striped(arguments))
    held = fill(store, 12)
    where = directory_of(store, held)
    third = stripes_of(arguments.path)[2]
    away = [n for n, place in where.items() if place == 2]
    shutil.rmtree(third)
    places = reserved(store, [new_block(n) for n in range(1000, 1016)])
    stored = 0
    for _ in range(8):
        try:
            store.write(places, [aligned_copy(content(n)) for n in range(1000, 1016)])
            store.publish(places)
        except NoSpace as error:
            print(error)
        stored = sum(store.contains(keys(range(1000, 1016))))
        if stored:
            break
        store.abandon(places)
        places = reserved(store, [new_block(n) for n in range(1000, 1016)])
    assert_held(store, range(1000, 1016))
    fill(store, 4, first=2000)
    # Files that were open are read as long as nobody has noticed.
    assert all(r.sound or r.result.status is BlockStatus.MISSING for r in get(store, held))
    third.mkdir()
    fill(store, 4, first=3000)
    print(paths_mode(store), f"{len(away)} blocks lay there")
    assert paths_mode(store) == "3 in use"
    assert store.contains(keys(held)) == [n not in away for n in held]
    assert segment_files(third)
    put(store, away)
    assert_held(store, held)


def test_a_tier_opens_without_one_of_its_directories(
    arguments: StoreArguments, keep: Keep, no_backoff: None
) -> None:
    store = open_striped(arguments)
    held = fill(store, 12)
    where = directory_of(store, held)
    store.close()
    third = stripes_of(arguments.path)[2]
    hidden = third.with_name("hidden")
    third.rename(hidden)
    third.write_text("not a directory any more")
    with pytest.raises(IdentityError, match="is no directory"):
        open_striped(arguments)
    third.unlink()
    third.symlink_to(third)  # ELOOP: it cannot even be looked at
    store = keep(open_striped(arguments))
    here = [n for n, place in where.items() if place != 2]
    assert_held(store, here)
    assert paths_mode(store).startswith("2 of 3 in use")
    assert store.stat().blocks == len(held)
    third.unlink()
    hidden.rename(third)
    assert_held(store, held)


def test_a_whole_tier_that_goes_away_keeps_its_rows(
    tmp_path: Path, keep: Keep, no_backoff: None, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = StoreArguments(tmp_path / "tier")
    store = keep(open_nvme(arguments))
    held = fill(store, 4)
    store.close()
    store = keep(open_nvme(arguments))
    arguments.path.rename(tmp_path / "elsewhere")
    statuses = {read.result.status for read in get(store, held)}
    assert statuses == {BlockStatus.MISSING}
    for call in (lambda: get(store, held), lambda: put(store, [999])):
        with pytest.raises(TierError, match=str(arguments.path)):
            call()
    with pytest.raises(TierGone, match="was removed or replaced"):
        store.stat()
    (tmp_path / "elsewhere").rename(arguments.path)
    assert_held(store, held)
    put(store, [999])
    assert_held(store, [999])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) > 1
    assert all(text.count("tier ssd: ") == 1 for text in said), said


def test_a_lost_index_comes_back_from_all_directories_or_not_at_all(
    arguments: StoreArguments, keep: Keep
) -> None:
    store = open_striped(arguments)
    held = fill(store, 12)
    assert set(directory_of(store, held).values()) == {0, 1, 2}
    store.close()
    first, second, _ = stripes_of(arguments.path)
    files = segment_files(arguments.path)
    shutil.rmtree(first / "index")
    hidden = second.with_name("hidden")
    second.rename(hidden)
    second.symlink_to(second)
    with pytest.raises(TierError, match=r"not all directories are there.*2 of 3 in use"):
        open_striped(arguments)
    second.unlink()
    hidden.rename(second)
    assert segment_files(arguments.path) == files, "leftovers were seen where there were none"
    store = keep(open_striped(arguments))
    assert_held(store, held)
    new = fill(store, 4, first=1000)
    assert_held(store, [*held, *new])


def test_a_lost_index_is_not_made_again_without_a_directory_that_is_gone(
    arguments: StoreArguments, keep: Keep
) -> None:
    """A disk that is not mounted, with the tier's directory below its mount point."""
    store = open_striped(arguments)
    held = fill(store, 12)
    store.close()
    first, second, _ = stripes_of(arguments.path)
    shutil.rmtree(first / "index")
    hidden = second.with_name("hidden")
    second.rename(hidden)
    for _ in range(2):
        with pytest.raises(TierError, match=r"not all directories are there.*second is not there"):
            open_striped(arguments)
        assert not second.exists()
    hidden.rename(second)
    store = keep(open_striped(arguments))
    assert_held(store, held)


def test_files_of_an_earlier_index_are_not_taken_for_those_of_the_same_name(
    arguments: StoreArguments,
) -> None:
    """The index is lost, one directory is given up for an empty one, and then is back: for
    whoever only reads, and for an engine."""
    first, second, _ = stripes_of(arguments.path)
    arguments = over(arguments, first, second, verify="never")
    store = open_nvme(arguments)
    old = fill(store, 10)
    store.close()
    hidden = second.with_name("hidden")
    shutil.rmtree(first / "index")
    second.rename(hidden)
    second.mkdir()
    store = open_nvme(arguments)
    new = fill(store, 10, first=1000)
    there = directory_of(store, new)
    names = [{f.name for f in segment_files(path)} for path in (second, hidden)]
    assert names[0] & names[1], "no file has the name of an old one"
    store.close()
    second.rename(second.with_name("newer"))
    hidden.rename(second)
    kept = [n for n, place in there.items() if place == 0]
    maintenance = look_after_nvme(over(arguments, first, second))
    found = maintenance.reconcile(repair=False).found
    maintenance.close()
    assert found["segments whose file is an earlier index's"] > 0, found
    for writable in (False, True):
        store = open_nvme(arguments.with_(writable=writable))
        believed = [read for read in get(store, [*old, *new]) if read.data and not read.sound]
        print(f"{list(there.values()).count(1)} new blocks lay in the directory")
        assert not [read for read in believed if not read.result.unproven]
        store.close()
    with closing(look_after_nvme(over(arguments, first, second))) as maintenance:
        maintenance.reconcile(repair=True)
        assert maintenance.reconcile(repair=False).found == {}
    with closing(open_nvme(arguments)) as store:
        assert_held(store, kept)
        assert not [read for read in get(store, [*old, *new]) if read.data and not read.sound]


def test_what_is_out_of_reach_is_not_repaired_away(arguments: StoreArguments, keep: Keep) -> None:
    store = open_striped(arguments)
    held = fill(store, 12)
    store.close()
    _, second, _ = stripes_of(arguments.path)
    hidden = second.with_name("hidden")
    second.rename(hidden)
    second.symlink_to(second)
    maintenance = look_after_striped(arguments)
    repaired = maintenance.reconcile(repair=True)
    maintenance.close()
    assert repaired.found == {}
    second.unlink()
    hidden.rename(second)
    store = keep(open_striped(arguments))
    assert_held(store, held)


def test_a_directory_that_goes_away_meanwhile_is_not_repaired_away(
    arguments: StoreArguments, keep: Keep
) -> None:
    store = open_striped(arguments)
    held = fill(store, 12)
    store.close()
    _, second, _ = stripes_of(arguments.path)
    hidden = second.with_name("hidden")
    with closing(look_after_striped(arguments)) as maintenance:
        second.rename(hidden)
        assert maintenance.reconcile(repair=True).found == {}
    hidden.rename(second)
    assert_held(keep(open_striped(arguments)), held)


def test_what_came_back_is_compared_until_that_has_worked(
    arguments: StoreArguments, keep: Keep, no_backoff: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = keep(open_striped(arguments))
    held = fill(store, 12)
    where = directory_of(store, held)
    kept = [n for n, place in where.items() if place != 2]
    cursor = store.changes(None).cursor
    shutil.rmtree(put_out(store, arguments, 2))
    real = BlockIndex.restart_log
    tries: list[int] = []

    def full_at_first(self: BlockIndex, txn: Transaction) -> None:
        tries.append(len(tries))
        if len(tries) == 1:
            raise NoSpace("the index is full")
        real(self, txn)

    monkeypatch.setattr(BlockIndex, "restart_log", full_at_first)
    assert_held(store, kept)
    assert tries == [0]
    put(store, [1000])
    assert tries == [0, 1]
    assert store.contains(keys(held)) == [n in kept for n in held]
    assert store.changes(cursor).restart


def put_out(store: BlockStore, arguments: StoreArguments, place: int) -> Path:
    """Have the store find one directory gone, and lay an empty one in its place; where what it held
    is now."""
    assert isinstance(store, NvmeStore)
    directory = stripes_of(arguments.path)[place]
    hidden = directory.with_name("hidden")
    directory.rename(hidden)
    assert store.stripes.failed(place)
    directory.mkdir()
    return hidden


def test_what_others_store_while_a_returned_directory_is_looked_at_is_kept(
    arguments: StoreArguments, keep: Keep, no_backoff: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = keep(open_striped(arguments)), keep(open_striped(arguments))
    held = fill(store, 3)
    third = stripes_of(arguments.path)[2]
    hidden = put_out(store, arguments, 2)
    third.rmdir()
    hidden.rename(third)
    real = SegmentFiles.in_directories
    new: list[int] = []
    made: list[Path] = []

    def listed(self: SegmentFiles, places: Iterable[int]) -> dict[int, dict[int, int]]:
        found = real(self, places)
        if found and not new:
            before = segment_files(third)
            new.extend(fill(other, 25, first=1000))
            made.extend(set(segment_files(third)) - set(before))
        return found

    monkeypatch.setattr(SegmentFiles, "in_directories", listed)
    assert_held(store, held)
    print(f"{len(made)} segments were made there meanwhile")
    assert made
    assert_held(store, new)


def test_a_directory_that_goes_away_again_while_it_is_looked_at_keeps_its_rows(
    arguments: StoreArguments, keep: Keep, no_backoff: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unmount leaves the empty directory below the mount point."""
    store = keep(open_striped(arguments))
    held = fill(store, 12)
    others = [n for n, place in directory_of(store, held).items() if place != 2]
    third = stripes_of(arguments.path)[2]
    hidden = put_out(store, arguments, 2)
    third.rmdir()
    hidden.rename(third)
    real = SegmentFiles.in_directories
    empty: list[Path] = []

    def listed(self: SegmentFiles, places: Iterable[int]) -> dict[int, dict[int, int]]:
        looked_at = list(places)
        if looked_at and not empty:
            third.rename(hidden)
            third.mkdir()
            empty.append(third)
        return real(self, looked_at)

    monkeypatch.setattr(SegmentFiles, "in_directories", listed)
    monkeypatch.setattr(stripes_module, "RETRY_SECONDS", 600.0)
    assert_held(store, others)
    assert empty
    assert paths_mode(store).startswith("2 of 3 in use")
    assert store.stat().blocks == len(held)
    store.close()
    third.rmdir()
    hidden.rename(third)
    assert_held(keep(open_striped(arguments)), held)


def test_a_directory_is_not_waited_for_in_a_transaction(
    arguments: StoreArguments, keep: Keep, no_backoff: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk takes long to fail, and nobody else can store anything meanwhile."""
    store = keep(open_striped(arguments))
    assert isinstance(store, NvmeStore)
    held = fill(store, 3)
    others = [n for n, place in directory_of(store, held).items() if place != 2]
    third = stripes_of(arguments.path)[2]
    environment = store._environment
    within: list[bool] = []

    def failing(path: Path, tier: str, *, writable: bool) -> DirectMode:
        if path == third:
            try:
                with environment.write():
                    within.append(False)
            except ValueError:  # this thread is in one already
                within.append(True)
            raise TierError("it fails", tier=tier)
        return probe(path, tier, writable=writable)

    monkeypatch.setattr("tiered_kv_nvme.stripes.probe", failing)
    assert store.stripes.failed(2)
    assert_held(store, others)
    print(f"it was tried {len(within)} times")
    assert len(within) > 1
    assert not any(within)


def test_whoever_only_reads_lets_go_of_a_disk_that_was_replaced(
    arguments: StoreArguments, keep: Keep, no_backoff: None
) -> None:
    store = open_striped(arguments)
    held = fill(store, 12)
    store.close()
    reader = keep(open_striped(arguments.with_(writable=False)))
    assert_held(reader, held)
    third = stripes_of(arguments.path)[2]
    hidden = put_out(reader, arguments, 2)
    assert open_below(hidden)
    third.rmdir()
    shutil.copytree(hidden, third)
    assert_held(reader, held)
    assert open_below(hidden) == []
    assert open_below(third)


@pytest.mark.faults
def test_a_disk_with_io_errors_is_left_out(
    arguments: StoreArguments, tmp_path: Path, keep: Keep, no_backoff: None
) -> None:
    """Real EIO for all that concerns one directory."""
    store = keep(open_striped(arguments))
    held = fill(store, 12)
    where = directory_of(store, held)
    third = stripes_of(arguments.path)[2]
    others = [n for n, place in where.items() if place != 2]
    failing = ("openat:error=EIO", "preadv2:error=EIO", "pwritev2:error=EIO")
    refused = 0
    with injected(*failing, paths=[third, *segment_files(third)], log=tmp_path / "log") as hits:
        for first in range(1000, 1128, 16):
            try:
                put(store, range(first, first + 16))
            except NoSpace as error:
                refused += 1
                print(error)
        assert_held(store, others)
        statuses = Counter(read.result.status for read in get(store, held))
        mode = paths_mode(store)
    print(f"{len(hits)} calls failed, {refused} of 8 batches refused; {statuses}; {mode}")
    assert hits
    assert refused == 1
    assert statuses == {BlockStatus.OK: len(others), BlockStatus.MISSING: len(held) - len(others)}
    assert "Input/output error" in mode
    assert_held(store, held)
    assert paths_mode(store) == "3 in use"
    assert key(0) in set(store.scan())


@pytest.mark.faults
def test_a_single_bad_read_costs_its_block_once(
    arguments: StoreArguments, tmp_path: Path, keep: Keep
) -> None:
    store = keep(open_striped(arguments))
    held = fill(store, 3)
    where = directory_of(store, held)
    third = stripes_of(arguments.path)[2]
    with injected("preadv2:error=EIO", paths=segment_files(third), log=tmp_path / "log") as hits:
        statuses = {n: read.result.status for n, read in zip(held, get(store, held), strict=True)}
        mode = paths_mode(store)
    bad = [n for n, status in statuses.items() if status is BlockStatus.TIER_ERROR]
    print(f"{len(hits)} reads failed, {len(bad)} blocks could not be read; {mode}")
    assert bad == [n for n, place in where.items() if place == 2]
    assert mode == "3 in use"
    assert_held(store, held)


def test_the_settings_of_the_tests(arguments: StoreArguments) -> None:
    paths = stripes_of(arguments.path)
    settings = nvme_settings(over(arguments, *paths, min_free=SizeOrPercent(size=1)))
    assert settings.folders == paths
    assert settings.directories == {f"paths.{place}": path for place, path in enumerate(paths)}
