"""What LMDB in particular can do to the store; `test_conformance` has what every store owes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.stores.conformance_cases import LMDB
from tests.stores.lmdb_parts import context_of, open_lmdb
from tiered_kv.config import SizeOrPercent
from tiered_kv.contracts import StoreContext
from tiered_kv.errors import IdentityError, NoSpace, TierError
from tiered_kv.index import Environment, Owner
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    StoreArguments,
    aligned_copy,
    assert_held,
    content,
    get,
    keys,
    new_block,
    put,
)
from tiered_kv.testing.conformance.stores import StoreCase
from tiered_kv.testing.conformance.stores.case import OpenStore, StoreFixtures
from tiered_kv.values import BlockStatus, Medium
from tiered_kv_lmdb import LmdbSpec, backend
from tiered_kv_lmdb.store import LmdbStore

MIB = 2**20


@contextmanager
def file_of(path: Path, database: str) -> Iterator[tuple[Environment, object]]:
    """One of the tier's two files, for damaging it behind the store's back."""
    values = database == "values"
    environment = Environment.open(
        path / "values" if values else path,
        kind="lmdb-values" if values else "lmdb",
        tier="test",
        max_bytes=64 * MIB,
        writable=True,
        own_budget=("values",),
    )
    yield environment, environment.database(database)
    environment.close()


class TestLmdbStore(StoreFixtures):
    @pytest.fixture
    def case(self) -> StoreCase:
        return LMDB

    # -------------------------------------------------------------------------------------- turns

    def test_a_load_that_hangs_does_not_keep_others_waiting(self, open_store: OpenStore) -> None:
        store = open_store()
        assert isinstance(store, LmdbStore)
        put(store, [1, 2, 3])
        with store._turn:  # of a load that never comes back
            assert {r.result.status for r in get(store, [1, 2, 3])} == {BlockStatus.OK}
            assert store._turn.locked(), "the turn of another load was given away"
        assert_held(store, [1, 2, 3])
        assert not store._turn.locked()

    # ------------------------------------------------------------------------------------ readers

    def test_a_store_waits_for_those_who_read(self, tmp_path: Path) -> None:
        """What is read keeps pages of the file from being used again, in a small one all of
        them."""
        arguments = StoreArguments(tmp_path / "tier", capacity=4 * MIB, block_bytes=(16_384,))
        store = open_lmdb(arguments)
        reads, ended = [0], threading.Event()

        def read() -> None:
            with file_of(arguments.path, "blocks") as (index, _):
                while not ended.is_set():
                    with index.read():
                        reads[0] += 1
                        time.sleep(0.15)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for first in range(0, 12 * 60, 12):
                put(store, range(first, first + 12), length=16_384)
        finally:
            ended.set()
            reader.join()
        evicted = store.stat().evicted_blocks
        print(f"{evicted} of {12 * 60} blocks evicted beside {reads[0]} reads")
        assert evicted > 400
        assert reads[0] > 5
        store.close()

    # --------------------------------------------------------------------- damage behind its back

    def test_a_row_without_its_value_is_a_miss_and_stored_again(
        self, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        store = open_store()
        put(store, [1, 2, 3])
        with (
            file_of(arguments.path, "values") as (environment, values),
            environment.write() as txn,
        ):
            txn.drop(values, delete=False)  # type: ignore[arg-type]
        assert {r.result.status for r in get(store, [1, 2, 3])} == {BlockStatus.MISSING}
        assert store.contains(keys([1, 2, 3])) == [False] * 3
        put(store, [4])
        assert put(store, [1, 2, 3]) == [1, 2, 3]
        assert_held(store, range(1, 5))

    def test_values_of_damaged_rows_do_not_fill_the_file(
        self, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        store = open_store()
        put(store, range(10))
        store.close()
        with file_of(arguments.path, "rows") as (environment, rows):
            with environment.read() as txn, txn.cursor(rows) as cursor:  # type: ignore[arg-type]
                names = list(cursor.iternext(values=False))
            with environment.write() as txn:
                for name in names[:6]:
                    txn.delete(name, db=rows)  # type: ignore[arg-type]
        store = open_store()
        put(store, [20])
        with file_of(arguments.path, "values") as (environment, values), environment.read() as txn:
            left = txn.stat(values)["entries"]  # type: ignore[arg-type]
        print(f"6 of 10 rows were lost, {left} values left after storing one more")
        assert left == 5

    @pytest.mark.parametrize("file", ["data.mdb", "values/data.mdb"])
    @pytest.mark.parametrize("damage", ["truncated", "garbage", "missing"])
    def test_a_damaged_file_starts_the_tier_empty(
        self, open_store: OpenStore, arguments: StoreArguments, file: str, damage: str
    ) -> None:
        store = open_store()
        put(store, range(20))
        cursor = store.changes(None).cursor
        store.close()
        data = arguments.path / file
        if damage == "truncated":
            os.truncate(data, data.stat().st_size // 2)
        elif damage == "garbage":
            data.write_bytes(os.urandom(50_000))
        else:
            data.unlink()
        store = open_store()
        assert store.contains(keys(range(20))) == [False] * 20
        assert list(store.scan()) == []
        assert store.stat().blocks == 0
        assert store.changes(cursor).restart
        assert put(store, range(20)) == list(range(20))
        assert_held(store, range(20))

    def test_random_files_in_the_directory_are_only_misses(
        self, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        store = open_store()
        put(store, range(5))
        store.close()
        for number in range(300):
            (arguments.path / f"{number:04}.bin").write_bytes(os.urandom(50))
            (arguments.path / "values" / f"{number:04}.bin").write_bytes(os.urandom(50))
        store = open_store()
        assert_held(store, range(5))
        assert store.contains(keys(range(100, 200))) == [False] * 100

    # ---------------------------------------------------------------------------------- the room

    def test_a_block_of_whole_pages_takes_no_page_more(
        self, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        store = open_store()
        put(store, range(10))
        with file_of(arguments.path, "values") as (environment, values), environment.read() as txn:
            taken = txn.stat(values)["overflow_pages"] * environment.page_bytes  # type: ignore[arg-type]
        print(f"10 blocks of {BLOCK_BYTES} bytes take {taken}")
        assert BLOCK_BYTES % environment.page_bytes == 0
        assert taken == 10 * BLOCK_BYTES

    def test_what_a_dead_process_reserved_is_given_to_others(
        self,
        open_store: OpenStore,
        arguments: StoreArguments,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("tiered_kv_lmdb.store._SWEEP_AGAIN_SECONDS", 0.0)
        store = open_store()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        child = context.Process(target=reserve_and_wait, args=(arguments, theirs))
        child.start()
        held = ours.recv()
        many = [new_block(n) for n in range(1000, 1000 + held)]
        with pytest.raises(NoSpace, match="promised to others"):
            store.reserve(many)
        child.kill()
        child.join()
        places = [place for place in store.reserve(many) if place is not None]
        print(f"{held} places of a killed process, {len(places)} given again")
        assert len(places) == held
        store.abandon(places)

    def test_a_place_that_was_reclaimed_is_never_published(
        self, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another process may be wrong about our being dead."""
        store = open_store()
        (early, late) = (p for p in store.reserve([new_block(1), new_block(2)]) if p is not None)
        store.write([late], [aligned_copy(content(2))])
        with monkeypatch.context() as patch:
            patch.setattr(Owner, "alive", lambda _: False)
            open_store().close()
        with pytest.raises(NoSpace, match="reclaimed"):
            store.write([early], [aligned_copy(content(1))])
        with pytest.raises(NoSpace, match="reclaimed"):
            store.publish([late])
        store.abandon([early, late])
        assert store.contains(keys([1, 2])) == [False, False]
        assert put(store, [1, 2]) == [1, 2]
        assert_held(store, [1, 2])

    def test_room_that_could_not_be_given_back_is_given_back_later(
        self, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_store()
        count = LMDB.capacity // (2 * BLOCK_BYTES)
        places = [p for p in store.reserve([new_block(n) for n in range(count)]) if p is not None]

        def fail(_: Environment) -> None:
            raise TierError("the disk hangs", tier="pins")

        with monkeypatch.context() as patch:
            patch.setattr(Environment, "write", fail)
            store.abandon(places)
        again = store.reserve([new_block(n) for n in range(count)])
        assert None not in again
        store.abandon([p for p in again if p is not None])

    def test_the_free_space_floor_is_kept(
        self, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        disk = os.statvfs(arguments.path.parent)
        floor = SizeOrPercent(size=disk.f_bavail * disk.f_frsize + 10 * 2**30)
        store = open_store(extra=(("min_free", floor),))
        with pytest.raises(NoSpace, match=r"disk has \d+ bytes free, of which \d+ stay free"):
            store.reserve([new_block(1)])
        store.close()
        store = open_store()
        put(store, [1])
        assert_held(store, [1])

    def test_existence_never_reads_blocks(
        self, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        count = 120
        store = open_store()
        put(store, range(count))
        store.close()
        for data in arguments.path.rglob("data.mdb"):
            fd = os.open(data, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        start = bytes_read()
        store = open_store(writable=False)
        before = bytes_read()
        assert store.contains(keys(range(count))) == [True] * count
        assert len(list(store.scan())) == count
        index = bytes_read() - before
        assert_held(store, range(count))
        print(
            f"{count} cold blocks of {BLOCK_BYTES} bytes: {before - start} bytes read to open, "
            f"{index} for their existence, {bytes_read() - before - index} for the blocks"
        )
        assert index < MIB

    # ------------------------------------------------------------------------- access, settings

    def test_a_read_only_tier_reads_and_changes_nothing(
        self, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        store = open_store()
        put(store, range(5))
        store.close()
        before = {f: f.stat().st_mtime_ns for f in arguments.path.rglob("*.*")}
        store = open_store(extra=(("access", "read"),))
        assert_held(store, range(5))
        store.touch(keys([1]))
        assert store.stat().modes["access"] == "read"
        with pytest.raises(ValueError, match="reading only"):
            store.reserve([new_block(9)])
        store.close()
        changed = [f.name for f, was in before.items() if f.stat().st_mtime_ns != was]
        assert [name for name in changed if name != "lock.mdb"] == []

    def test_a_read_only_tier_that_was_never_written_says_so(self, open_store: OpenStore) -> None:
        with pytest.raises(TierError, match="mounted"):
            open_store(extra=(("access", "read"),))

    @pytest.mark.parametrize("durability", ["batch", "full"])
    def test_each_durability_stores(self, open_store: OpenStore, durability: str) -> None:
        store = open_store(extra=(("durability", durability),))
        put(store, range(5))
        assert_held(store, range(5))
        assert store.stat().modes["durability"] == durability

    def test_another_tiers_directory_is_refused(
        self, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        Environment.open(
            arguments.path, kind="nvme", tier="ssd", max_bytes=MIB, writable=True
        ).close()
        with pytest.raises(IdentityError, match="'nvme', not 'lmdb'"):
            open_store()

    def test_a_capacity_that_other_files_take_is_refused(
        self, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        put(open_store(), [1])
        open_store().close()
        # Closed by the fixture only, so the second tier shares what is open; a new process not.
        (arguments.path / "stray").write_bytes(os.urandom(LMDB.capacity))
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        child = context.Process(target=open_and_tell, args=(arguments, theirs))
        child.start()
        assert "other files" in ours.recv()
        child.join()


def test_the_descriptor_is_light() -> None:
    code = (
        "import sys, tiered_kv_lmdb as t; "
        "print(sorted({'lmdb', 'pydantic', 'tiered_kv.index'} & set(sys.modules)), "
        "t.backend.name, t.backend.settings().__name__)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    output = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert output == "[] lmdb LmdbSettings\n"
    assert backend.spec is LmdbSpec
    assert LmdbSpec.medium == backend.medium == Medium("lmdb")


def test_settings_of_another_type_are_refused(tmp_path: Path) -> None:
    context = context_of(StoreArguments(tmp_path))
    assert backend.open_store is not None
    with pytest.raises(TypeError, match="LmdbSettings"):
        backend.open_store(
            StoreContext("pins", {"path": tmp_path}, context.namespace, context.geometry)
        )


def bytes_read() -> int:
    """Bytes that this process had read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def reserve_and_wait(arguments: StoreArguments, out: Connection) -> None:
    """Child process: holds most of the room until it is killed."""
    store = open_lmdb(arguments)
    count = 4 * arguments.capacity // (10 * BLOCK_BYTES)
    assert None not in store.reserve([new_block(n) for n in range(count)])
    out.send(count)
    out.poll(None)


def open_and_tell(arguments: StoreArguments, out: Connection) -> None:
    """Child process: sends the error with which the store does not open."""
    try:
        open_lmdb(arguments).close()
    except NoSpace as error:
        out.send(str(error))
    else:
        out.send("opened")
