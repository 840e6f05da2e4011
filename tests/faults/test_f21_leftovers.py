"""F21: what killed processes leave is swept at the next start, and nothing that is not ours."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stores.conformance_cases import KILLS
from tests.stores.lmdb_parts import open_lmdb
from tests.stores.nvme_parts import open_nvme, open_striped, segment_files, stripes_of
from tiered_kv.contracts import BlockStore
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    StoreArguments,
    aligned_copy,
    assert_held,
    content,
    disk_bytes,
    keys,
    new_block,
    put,
    reserved,
)
from tiered_kv.testing.conformance.children import run_until_stage, start

pytestmark = pytest.mark.faults

Open = Callable[[StoreArguments], BlockStore]
STORES: dict[str, Open] = {"nvme": open_nvme, "striped": open_striped, "lmdb": open_lmdb}
NVME = [kind for kind in STORES if kind != "lmdb"]
MARKER = "tiered-kv-directory.json"


def names(path: Path) -> set[str]:
    """Everything below a directory, segments by what they are alone."""
    found = {str(file.relative_to(path)) for file in path.rglob("*")}
    return {re.sub(r"segment-\d+", "segment", name) for name in found}


def memory_names() -> set[str]:
    return {
        file.name
        for folder in ("/dev/shm", tempfile.gettempdir())
        for file in Path(folder).glob("*tiered*")
    }


@pytest.mark.parametrize("kind", STORES)
def test_f21_killed_again_and_again_nothing_grows(kind: str, tmp_path: Path) -> None:
    """A child stores until SIGKILL at a random step; after each kill the tier is opened, and holds
    what was published, in files of the same names as ever."""
    arguments = StoreArguments(tmp_path / "tier")
    store = STORES[kind](arguments)
    put(store, range(16))
    store.close()
    known, before = names(arguments.path), memory_names()
    choice = random.Random(21)
    stages: list[str] = []
    sizes: list[int] = []
    first = 100
    for _ in range(max(2, KILLS - 1)):
        last, published = run_until_stage(STORES[kind], arguments, first, choice.randrange(2, 400))
        stages.append(last)
        first += 10_000
        store = STORES[kind](arguments)
        assert_held(store, published[-8:])
        sizes.append(disk_bytes(arguments.path))
        found = names(arguments.path)
        store.close()
        assert {name for name in found if not name.endswith("segment")} <= known
    print(f"{kind}: killed at {stages}; bytes on the disk {sizes} of {arguments.capacity}")
    assert max(sizes) <= arguments.capacity
    assert memory_names() <= before


def reserve_and_die(kind: str, arguments: StoreArguments, count: int) -> None:
    """Child process: reserves, writes a little, and is gone before it publishes."""
    store = STORES[kind](arguments)
    places = reserved(store, [new_block(n) for n in range(count)])
    store.write(places[:4], [aligned_copy(content(n)) for n in range(4)])
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", STORES)
def test_f21_what_a_dead_process_had_reserved_is_free_again(kind: str, tmp_path: Path) -> None:
    """Half the tier is reserved and lost, twice, beside a store that stays open."""
    arguments = StoreArguments(tmp_path / "tier")
    store = STORES[kind](arguments)
    put(store, range(1000, 1010))
    count = arguments.capacity // BLOCK_BYTES // 2
    for _ in range(2):
        child = start(reserve_and_die, kind, arguments, count)
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        assert not any(store.contains(keys(range(count))))
    if kind == "lmdb":  # it looks for the dead once a minute, and when it is opened
        store.close()
        store = STORES[kind](arguments)
    for first in range(0, count, 8):
        put(store, range(first, first + 8))
    stat = store.stat()
    print(f"2 x {count} slots lost, then {count} blocks stored, {stat.evicted_blocks} evicted")
    assert stat.evicted_blocks == 0
    assert_held(store, range(1000, 1010))
    assert_held(store, range(count))
    assert disk_bytes(arguments.path) <= arguments.capacity
    store.close()


@pytest.mark.parametrize("kind", NVME)
def test_f21_files_of_a_store_that_died_while_making_them_are_swept(
    kind: str, tmp_path: Path
) -> None:
    arguments = StoreArguments(tmp_path / "tier")
    store = STORES[kind](arguments)
    put(store, range(48))
    store.close()
    folders = stripes_of(arguments.path) if kind == "striped" else (arguments.path,)
    ours: list[Path] = []
    others: list[Path] = []
    for place, folder in enumerate(folders):
        known = segment_files(folder)[0]
        empty, copy, foreign, elsewhere = (
            folder / f"segment-{number:06d}"
            for number in (
                (place << 26) + 31,
                (place << 26) + 32,
                (place << 26) + 33,
                ((place + 1) << 26) + 34,
            )
        )
        empty.touch()
        shutil.copy(known, copy)
        foreign.write_bytes(b"mine" * 2000)
        shutil.copy(known, elsewhere)  # its number is of another directory
        probe, marker = folder / "17-17-probe.tmp", folder / f"{MARKER}.new"
        probe.touch()
        marker.touch()
        near = folder / "17-probe.tmp"
        near.touch()
        (folder / "segment-000077").mkdir()
        ours += [empty, copy, probe, marker]
        others += [foreign, elsewhere, near, folder / "segment-000077"]
    store = STORES[kind](arguments)
    left = [file.name for file in ours if file.exists()]
    lost = [file.name for file in others if not file.exists()]
    print(f"{len(ours)} leftovers, {left} left; {len(others)} of others, {lost} deleted")
    assert left == []
    assert lost == []
    assert_held(store, range(48))
    store.close()
