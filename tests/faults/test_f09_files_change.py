"""F9: files that vanish or are replaced behind our back cost misses, and the index learns of it."""

from __future__ import annotations

import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.namespaces import run_mounted
from tests.faults.tracing import injected
from tests.stores.lmdb_parts import open_into_map, open_lmdb
from tests.stores.nvme_parts import MIB, open_nvme, open_striped, segment_files, stripes_of
from tiered_kv.contracts import BlockStore
from tiered_kv.errors import IdentityError, NoSpace, TierError
from tiered_kv.testing.conformance.blocks import (
    StoreArguments,
    aligned_copy,
    assert_held,
    content,
    get,
    keys,
    new_block,
    put,
    reserved,
)
from tiered_kv.values import BlockStatus

pytestmark = pytest.mark.faults

BLOCKS = range(160)
CHANGES = 40
Open = Callable[[StoreArguments], BlockStore]
NVME: dict[str, Open] = {"nvme": open_nvme, "striped": open_striped}
LMDB: dict[str, Open] = {"lmdb": open_lmdb, "lmdb into the map": open_into_map}


@pytest.fixture
def arguments(tmp_path: Path) -> StoreArguments:
    return StoreArguments(tmp_path / "tier", 32 * MIB)


@pytest.fixture
def opened() -> Iterator[list[BlockStore]]:
    """Stores that are closed after the test."""
    stores: list[BlockStore] = []
    yield stores
    for store in stores:
        store.close()


class Vandal:
    """Changes files that others use; what it makes is of the same names."""

    def __init__(self, seed: int) -> None:
        self._choice = random.Random(seed)
        self.done: Counter[str] = Counter()

    def change(self, files: list[Path], *, cut: bool = True) -> None:
        """Change one of the files. `cut`: also its content, in place."""
        file = self._choice.choice(files)
        ways = ["delete", "chmod", "replace by garbage", "replace by another", "replace by a link"]
        if cut:
            ways += ["cut", "overwrite"]
        way = self._choice.choice(ways)
        self.done[way] += 1
        new = file.with_name("new")
        if way == "delete":
            file.unlink()
        elif way == "chmod":
            file.chmod(0)
        elif way == "replace by garbage":
            new.write_bytes(self._choice.randbytes(100_000))
            new.rename(file)
        elif way == "replace by another":
            shutil.copyfile(self._choice.choice(files), new)
            new.rename(file)
        elif way == "replace by a link":
            new.symlink_to("/etc/hostname")
            new.rename(file)
        elif way == "cut":
            with file.open("r+b") as out:
                out.truncate(self._choice.randrange(1 + file.stat().st_size))
        else:
            with file.open("r+b") as out:
                out.seek(self._choice.randrange(1 + file.stat().st_size))
                out.write(self._choice.randbytes(70_000))


def outcome(store: BlockStore) -> Counter[str]:
    """What reading all blocks gave: "sound", "bad" (its checksum tells) or a status."""
    found: Counter[str] = Counter()
    for number, read in zip(BLOCKS, get(store, BLOCKS), strict=True):
        if read.result.status is BlockStatus.OK:
            assert not read.sound or read.data == content(number), "wrong bytes that verify"
        is_ok = read.result.status is BlockStatus.OK
        found[("sound" if read.sound else "bad") if is_ok else read.result.status.value] += 1
    return found


def put_all(store: BlockStore, blocks: range = BLOCKS) -> int:
    """Store all blocks in batches of 16; how many batches were refused."""
    refused = 0
    for first in range(0, len(blocks), 16):
        try:
            put(store, blocks[first : first + 16])
        except (NoSpace, TierError) as error:
            refused += 1
            print(error)
    return refused


@pytest.mark.parametrize("kind", NVME)
def test_f09_segments_are_changed_at_random_during_loads(
    kind: str, arguments: StoreArguments, opened: list[BlockStore]
) -> None:
    store = NVME[kind](arguments)
    opened.append(store)
    assert put_all(store) == 0
    vandal = Vandal(9)
    found: Counter[str] = Counter()
    failed: list[BaseException] = []
    ended = threading.Event()

    def load() -> None:
        try:
            while not ended.is_set():
                found.update(outcome(store))
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            failed.append(error)

    readers = [threading.Thread(target=load) for _ in range(2)]
    for reader in readers:
        reader.start()
    refused = 0
    for turn in range(CHANGES):
        files = [file for file in segment_files(arguments.path) if file.is_file()]
        if files:
            vandal.change([file for file in files if not file.is_symlink()] or files)
        if turn % 8 == 7:
            store.discard([new_block(n) for n in BLOCKS])
            refused += put_all(store)
    ended.set()
    for reader in readers:
        reader.join(60)
    print(f"{kind}: {dict(vandal.done)}; loads: {dict(found)}; {refused} batches refused")
    assert not failed, failed
    assert found["sound"]
    assert found["missing"]

    # Opened anew, nothing is read by way of files that have no name any more.
    store.close()
    store = NVME[kind](arguments)
    opened.append(store)
    first = outcome(store)
    store.discard([new_block(n) for n in BLOCKS])
    assert put_all(store) <= len(segment_files(arguments.path))
    assert put_all(store) == 0
    print(f"opened anew: {dict(first)}")
    assert_held(store, BLOCKS)


@pytest.mark.parametrize("kind", NVME)
def test_f09_the_index_forgets_what_has_vanished(
    kind: str, arguments: StoreArguments, opened: list[BlockStore]
) -> None:
    store = NVME[kind](arguments)
    assert put_all(store) == 0
    files = segment_files(arguments.path)
    store.close()
    store = NVME[kind](arguments)
    opened.append(store)
    for file in files[::2]:
        file.unlink()
    found = outcome(store)
    held = sum(store.contains(keys(BLOCKS)))
    print(f"{len(files[::2])} of {len(files)} files deleted: {dict(found)}, {held} blocks known")
    assert found["missing"] > 0
    assert held == found["sound"] == store.stat().blocks
    assert put_all(store) == 0
    assert_held(store, BLOCKS)


@pytest.mark.parametrize("kind", NVME)
def test_f09_a_segment_replaced_before_publication(
    kind: str, arguments: StoreArguments, opened: list[BlockStore]
) -> None:
    """What was written into a file that has no name any more does not become visible."""
    store = NVME[kind](arguments)
    opened.append(store)
    numbers = range(1000, 1016)
    places = reserved(store, [new_block(n) for n in numbers])
    store.write(places, [aligned_copy(content(n)) for n in numbers])
    for file in segment_files(arguments.path):
        shutil.copyfile(file, file.with_name("new"))
        file.unlink()
        file.with_name("new").rename(file)
    store.publish(places)
    visible = sum(store.contains(keys(numbers)))
    print(f"{visible} of {len(numbers)} blocks visible")
    assert visible == 0
    put(store, numbers)
    assert_held(store, numbers)


@pytest.mark.parametrize("kind", NVME)
def test_f09_a_file_that_may_not_be_opened_is_no_lost_file(
    kind: str, arguments: StoreArguments, opened: list[BlockStore], tmp_path: Path
) -> None:
    """Its blocks are there again with its rights; the superuser is refused nothing, so strace
    refuses."""
    store = NVME[kind](arguments)
    assert put_all(store) == 0
    store.close()
    store = NVME[kind](arguments)
    opened.append(store)
    files = segment_files(arguments.path)[:2]
    with injected("openat:error=EACCES", paths=files, log=tmp_path / "log") as hits:
        found = outcome(store)
    print(f"{len(hits)} times refused: {dict(found)}")
    assert len(hits) == len(files)
    assert found["tier_error"] > 0
    assert found["sound"] + found["tier_error"] == len(BLOCKS)
    assert_held(store, BLOCKS)


@pytest.mark.parametrize("scenario", ["unmounted", "read_only"])
def test_f09_a_disk_goes_away_under_a_striped_tier(scenario: str, tmp_path: Path) -> None:
    arguments = (scenario, "nvme", str(tmp_path), "ext4")
    assert run_mounted("tests.faults.full_disk", *arguments, image=True).endswith("done\n")


def test_f09_the_directory_of_the_index_is_deleted(
    arguments: StoreArguments, opened: list[BlockStore]
) -> None:
    """The tier is down, and stores nothing beside another index that is made there meanwhile."""
    store = open_nvme(arguments)
    opened.append(store)
    assert put_all(store) == 0
    shutil.rmtree(arguments.path)
    assert outcome(store) == {"sound": len(BLOCKS)}, "its files are open here"
    new = range(1000, 1320)
    refused = put_all(store, new)
    with pytest.raises(TierError, match=str(arguments.path)):
        store.contains(keys(new))
    print(f"directory deleted: {refused} of 20 batches refused")
    assert refused >= 19
    assert not arguments.path.exists()
    arguments.path.mkdir()
    with pytest.raises(TierError, match=str(arguments.path)):
        get(store, BLOCKS)
    assert list(arguments.path.iterdir()) == []
    store.close()
    store = open_nvme(arguments)
    opened.append(store)
    assert not any(store.contains(keys([*BLOCKS, *new])))
    assert put_all(store) == 0
    assert_held(store, BLOCKS)


def test_f09_markers_of_directories_are_changed(
    arguments: StoreArguments, opened: list[BlockStore]
) -> None:
    store = open_striped(arguments)
    assert put_all(store) == 0
    store.close()
    outcomes: Counter[str] = Counter()
    for place, folder in enumerate(stripes_of(arguments.path)):
        (marker,) = folder.glob("*.json")
        sound = marker.read_bytes()
        for damage in (b"", sound[:-9], sound.replace(b"nvme", b"lmdb"), bytes(len(sound))):
            marker.write_bytes(damage)
            store = open_striped(arguments)
            assert_held(store, BLOCKS)
            store.close()
            assert marker.read_bytes() == sound
            outcomes[f"directory {place}"] += 1
        other = stripes_of(arguments.path)[(place + 1) % 3] / marker.name
        marker.write_bytes(other.read_bytes())
        with pytest.raises(IdentityError, match="expected the same order"):
            open_striped(arguments)
        marker.write_bytes(sound)
    print(f"markers damaged and made again: {dict(outcomes)}; three exchanged ones refused")
    store = open_striped(arguments)
    opened.append(store)
    assert_held(store, BLOCKS)


@pytest.mark.parametrize("kind", LMDB)
def test_f09_lmdb_files_are_replaced_during_loads(
    kind: str, arguments: StoreArguments, opened: list[BlockStore]
) -> None:
    """What has LMDB's files open goes on with them; the next one starts empty, or is refused in
    words, and works."""
    refused: list[str] = []
    outcomes: Counter[str] = Counter()
    for turn in range(8):
        mine = arguments.with_(path=arguments.path / str(turn))
        store = LMDB[kind](mine)
        opened.append(store)
        assert put_all(store) == 0
        vandal = Vandal(turn)
        files = [file for file in mine.path.rglob("data.mdb") if not file.is_symlink()]
        vandal.change(files, cut=False)
        assert outcome(store) == {"sound": len(BLOCKS)}
        store.close()
        try:
            store = LMDB[kind](mine)
        except (IdentityError, TierError) as error:
            refused.append(str(error))
            continue
        opened.append(store)
        outcomes.update(outcome(store))
        store.discard([new_block(n) for n in BLOCKS])
        store.delete(keys(BLOCKS))
        assert put_all(store) == 0
        assert_held(store, BLOCKS)
    print(f"{kind}: {dict(outcomes)} after opening anew; refused: {refused}")
    assert outcomes["missing"]
    assert not outcomes["bad"]


def test_f09_lmdb_values_that_vanish_leave_no_row(
    arguments: StoreArguments, opened: list[BlockStore]
) -> None:
    store = open_lmdb(arguments)
    assert put_all(store) == 0
    store.close()
    shutil.rmtree(arguments.path / "values")
    store = open_lmdb(arguments)
    opened.append(store)
    known = sum(store.contains(keys(BLOCKS)))
    print(f"values deleted: {known} of {len(BLOCKS)} blocks known, {dict(outcome(store))}")
    assert known == 0
    assert put_all(store) == 0
    assert_held(store, BLOCKS)
