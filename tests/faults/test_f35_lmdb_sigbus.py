"""F35: neither a full disk nor a data file that somebody spoiled kills a process that uses LMDB.

What is spoiled before it is opened is told, set aside and replaced by an empty tier. A file that is
cut while it is mapped is beyond any defence in the process; the documentation says so.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import lmdb
import pytest

from tests.faults.namespaces import run_mounted
from tests.stores.lmdb_parts import open_into_map, open_lmdb
from tests.stores.nvme_parts import open_nvme
from tiered_kv.contracts import BlockStore
from tiered_kv.errors import IdentityError
from tiered_kv.testing.conformance.blocks import StoreArguments, assert_held, keys, put
from tiered_kv.testing.conformance.children import start

BLOCKS = 30
Opener = Callable[[StoreArguments], BlockStore]


def cut_to_half(data: Path) -> None:
    os.truncate(data, data.stat().st_size // 2)


def cut_to_its_head(data: Path) -> None:
    os.truncate(data, 3 * 4096)


def emptied(data: Path) -> None:
    os.truncate(data, 0)


def garbage(data: Path) -> None:
    data.write_bytes(os.urandom(100_000))


def garbage_behind_its_head(data: Path) -> None:
    size = data.stat().st_size
    with data.open("r+b") as file:
        file.seek(2 * 4096)
        file.write(os.urandom(min(size - 2 * 4096, 2**20)))


DAMAGES = (cut_to_half, cut_to_its_head, emptied, garbage, garbage_behind_its_head)


def use_each(opener: Opener, damaged: list[StoreArguments], out: Connection) -> None:
    """Child process: open each, say what is left, store, read, close."""
    for arguments in damaged:
        store = opener(arguments)
        left = sum(store.contains(keys(range(BLOCKS))))
        stored = len(put(store, range(100, 100 + BLOCKS)))
        assert_held(store, range(100, 100 + BLOCKS))
        store.close()
        out.send((left, stored))


@pytest.mark.parametrize(
    ("opener", "files"),
    [
        (open_lmdb, ("data.mdb", "values/data.mdb")),
        (open_into_map, ("data.mdb", "values/data.mdb")),
        (open_nvme, ("index/data.mdb",)),
    ],
)
def test_f35_a_spoiled_file_is_set_aside(
    tmp_path: Path, opener: Opener, files: tuple[str, ...]
) -> None:
    arguments = StoreArguments(tmp_path / "tier")
    store = opener(arguments)
    put(store, range(BLOCKS))
    store.close()
    spoiled: list[StoreArguments] = []
    for file in files:
        for damage in DAMAGES:
            copy = arguments.with_(path=tmp_path / f"{file.replace('/', '-')}-{damage.__name__}")
            shutil.copytree(arguments.path, copy.path)
            damage(copy.path / file)
            spoiled.append(copy)
    ours, theirs = get_context("spawn").Pipe()
    child = start(use_each, opener, spoiled, theirs)
    theirs.close()
    seen: list[tuple[int, int]] = []
    while len(seen) < len(spoiled):
        try:
            seen.append(ours.recv())
        except EOFError:
            break
    child.join()
    for copy, (left, stored) in zip(spoiled, seen, strict=False):
        print(f"{copy.path.name}: {left} of {BLOCKS} left, then {stored} stored")
    print(f"exit code {child.exitcode}, {len(seen)} of {len(spoiled)} spoiled tiers opened")
    assert (child.exitcode, len(seen)) == (0, len(spoiled))
    assert all(stored == BLOCKS for _, stored in seen)


@pytest.mark.parametrize("opener", [open_lmdb, open_into_map])
def test_f35_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, opener: Opener) -> None:
    other = lmdb.open(str(tmp_path / "other"), max_dbs=2, lib_version=0)
    with other.begin(write=True) as txn:
        txn.put(b"a", b"precious", db=other.open_db(b"mails", txn))
    other.close()
    foreign = tmp_path / "other" / "data.mdb"
    before = foreign.read_bytes()
    refused = 0
    for file in ("data.mdb", "values/data.mdb"):
        arguments = StoreArguments(tmp_path / f"tier{refused}")
        store = opener(arguments)
        put(store, range(3))
        store.close()
        shutil.copyfile(foreign, arguments.path / file)
        with pytest.raises(IdentityError, match="another directory"):
            opener(arguments)
        refused += 1
        assert (arguments.path / file).read_bytes()[: len(before)] == before
    print(f"{refused} foreign files refused")


@pytest.mark.faults
@pytest.mark.parametrize("writemap", ["auto", "off"])
def test_f35_a_disk_that_others_fill_up(tmp_path: Path, writemap: str) -> None:
    point = tmp_path / "disk"
    point.mkdir()
    module, megabytes = "tests.faults.lmdb_full_disk", "36"
    told = run_mounted(module, str(point), megabytes, writemap, image=True)
    assert "batches stored" in told


@pytest.mark.faults
def test_f35_tiers_that_are_made_on_a_full_disk(tmp_path: Path) -> None:
    point = tmp_path / "disk"
    point.mkdir()
    told = run_mounted("tests.faults.lmdb_full_disk", str(point), "48", "new", image=True)
    assert "tiers made on a full disk" in told
