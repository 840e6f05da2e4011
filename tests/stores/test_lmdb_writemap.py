"""The lmdb store where it writes into its map: it owes the same, and never dies of a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.stores.lmdb_parts import open_into_map, open_lmdb
from tiered_kv.config import SizeOrPercent
from tiered_kv.testing.conformance.blocks import StoreArguments, assert_held, disk_bytes, put

MIB = 2**20
ROOT = Path(__file__).parents[2]


@pytest.fixture
def arguments(tmp_path: Path) -> StoreArguments:
    return StoreArguments(tmp_path / "tier")


def test_it_takes_the_whole_capacity_at_once(arguments: StoreArguments) -> None:
    store = open_into_map(arguments)
    taken = disk_bytes(arguments.path)
    assert store.stat().modes["writemap"] == "on"
    assert 0.9 * arguments.capacity < taken <= arguments.capacity
    put(store, range(100))
    assert disk_bytes(arguments.path) - taken < MIB
    assert store.stat().used_bytes <= arguments.capacity
    store.close()


def test_a_file_that_is_to_be_smaller_is_cut_and_keeps_what_it_holds(
    arguments: StoreArguments,
) -> None:
    store = open_into_map(arguments)
    put(store, range(20))
    store.close()
    before = disk_bytes(arguments.path)
    for capacity in (8 * MIB, 12 * MIB):
        store = open_into_map(arguments.with_(capacity=capacity))
        assert store.stat().modes["writemap"] == "on"
        assert_held(store, range(20))
        store.close()
        assert disk_bytes(arguments.path) <= capacity < before


def test_a_file_that_holds_more_than_it_may_starts_empty(arguments: StoreArguments) -> None:
    store = open_into_map(arguments)
    put(store, range(120))
    store.close()
    store = open_into_map(arguments.with_(capacity=6 * MIB))
    assert store.stat().blocks == 0
    assert put(store, range(20)) == list(range(20))
    assert_held(store, range(20))
    store.close()


CHILD = """
import sys
from pathlib import Path
from tests.stores.lmdb_parts import open_into_map
from tiered_kv.testing.conformance.blocks import StoreArguments, put

path, capacity, first, end = sys.argv[1:]
store = open_into_map(StoreArguments(Path(path)).with_(capacity=int(capacity)))
put(store, range(int(first), int(end)))
print(store.stat().modes["writemap"], store.stat().blocks)
store.close()
"""


def elsewhere(arguments: StoreArguments, capacity: int, numbers: range) -> str:
    """Open the store in another process, store blocks, and close it; what it says then."""
    child = [str(arguments.path), str(capacity), str(numbers.start), str(numbers.stop)]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *child],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_process_with_a_smaller_budget_leaves_the_file_of_another_as_it_is(
    arguments: StoreArguments,
) -> None:
    # LMDB would cut it, and the next write behind its end kills the process (SIGBUS).
    store = open_into_map(arguments)
    put(store, range(5))
    before = disk_bytes(arguments.path)
    assert elsewhere(arguments, 8 * MIB, range(0)) == "on 5"
    assert disk_bytes(arguments.path) >= before
    stored = put(store, range(5, 120))  # beyond what the smaller budget would have left
    print(f"stored {len(stored)} more")
    assert len(stored) == 115
    store.close()


def test_a_process_that_takes_over_a_larger_map_does_not_cut_a_still_larger_one(
    arguments: StoreArguments,
) -> None:
    small = arguments.with_(capacity=8 * MIB)
    store = open_into_map(small)
    put(store, range(5))
    assert elsewhere(small, 16 * MIB, range(5, 120)) == "on 120"
    file = arguments.path / "values" / "data.mdb"
    os.truncate(file, 32 * MIB)  # a third process has opened it, and not written yet
    assert_held(store, range(120))
    assert file.stat().st_size == 32 * MIB
    store.close()


def test_both_ways_of_writing_read_each_others_blocks(arguments: StoreArguments) -> None:
    for opener, numbers in ((open_into_map, range(10)), (open_lmdb, range(10, 20))):
        store = opener(arguments)
        put(store, numbers)
        assert_held(store, range(numbers.stop))
        store.close()
    store = open_into_map(arguments)
    assert_held(store, range(20))
    store.close()


@pytest.mark.parametrize("durability", ["batch", "full"])
def test_it_is_off_where_something_is_to_survive_the_machine(
    arguments: StoreArguments, durability: str
) -> None:
    store = open_into_map(arguments.with_(extra=(("durability", durability),)))
    assert store.stat().modes["writemap"] == f"off (durability {durability})"
    store.close()


def test_it_is_off_where_the_free_space_floor_would_not_hold(arguments: StoreArguments) -> None:
    disk = os.statvfs(arguments.path.parent)
    floor = SizeOrPercent(size=disk.f_bavail * disk.f_frsize - arguments.capacity // 2)
    store = open_into_map(arguments.with_(extra=(("min_free", floor),)))
    assert store.stat().modes["writemap"] == "off (the disk has no room for the whole capacity)"
    assert disk_bytes(arguments.path) < MIB
    store.close()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a tmpfs")
def test_it_is_off_on_a_file_system_that_promises_no_room() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        store = open_into_map(StoreArguments(Path(directory) / "tier"))
        assert store.stat().modes["writemap"] == "off (the file system does not promise room)"
        put(store, range(5))
        assert_held(store, range(5))
        store.close()
