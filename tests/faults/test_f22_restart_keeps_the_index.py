"""A restart finds all that was committed, also where the index itself was lost."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stores.lmdb_parts import open_lmdb
from tests.stores.nvme_parts import open_nvme
from tiered_kv.contracts import BlockStore
from tiered_kv.testing.conformance.blocks import StoreArguments, assert_held, disk_bytes, keys
from tiered_kv.testing.conformance.children import run_until_stage

LIVES = 2


def nothing(path: Path) -> None:
    """The process was killed, and that was all."""


def delete_index(path: Path) -> None:
    shutil.rmtree(path / "index")


def delete_data(path: Path) -> None:
    (path / "index" / "data.mdb").unlink()


def damage_index(path: Path) -> None:
    data = path / "index" / "data.mdb"
    before = data.stat()
    while data.stat().st_mtime_ns == before.st_mtime_ns:  # files' times are those of clock ticks
        data.write_bytes(random.Random(1).randbytes(before.st_size))


def cut_index(path: Path) -> None:
    data = path / "index" / "data.mdb"
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size // 2)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("opener", "lose"),
    [
        (open_nvme, nothing),
        (open_lmdb, nothing),
        (open_nvme, delete_index),
        (open_nvme, delete_data),
        (open_nvme, damage_index),
        (open_nvme, cut_index),
    ],
    ids=[
        "nvme",
        "lmdb",
        "nvme-index-deleted",
        "nvme-index-data-deleted",
        "nvme-index-damaged",
        "nvme-index-cut",
    ],
)
def test_f22_a_killed_store_loses_nothing_that_was_committed(
    tmp_path: Path, opener: Callable[[StoreArguments], BlockStore], lose: Callable[[Path], None]
) -> None:
    """Killed at another stage in each life; the next life goes on beside what is there."""
    arguments = StoreArguments(tmp_path / "tier")
    committed: list[int] = []
    for life in range(LIVES):
        stage, published = run_until_stage(opener, arguments, 1000 * life, 25 + life)
        committed += published
        lose(arguments.path)
        store = opener(arguments)
        there = sum(store.contains(keys(committed)))
        print(f"life {life}: killed before {stage}, {there} of {len(committed)} blocks are there")
        assert there == len(committed)
        assert_held(store, committed)
        assert disk_bytes(arguments.path) <= arguments.capacity
        store.close()
    assert len(committed) >= 20 * LIVES
