"""What the durability setting promises, seen from the order of flushes and from a changed boot."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.stores.lmdb_parts import open_lmdb
from tests.stores.nvme_parts import open_nvme, segment_files
from tests.stores.traced_life import STEPS
from tiered_kv.contracts import BlockStore
from tiered_kv.index import directory
from tiered_kv.testing.conformance.blocks import StoreArguments, assert_held, get, keys, put
from tiered_kv.testing.conformance.children import run_until_stage

MODES = ("none", "batch", "full")
Opener = Callable[[StoreArguments], BlockStore]

# ------------------------------------------------------------------------------------ the order

_CALLS = (
    "openat,pwritev2,pwritev,pwrite64,writev,write,"
    "fdatasync,fsync,msync,sync_file_range,syncfs,sync"
)
_FLUSHES = {"fdatasync", "fsync", "msync", "sync_file_range", "syncfs", "sync"}
_LINE = re.compile(r"^\d+ +(\w+)\((?:(\d+)<([^>]*)>)?(.*)$")
_OPENED = re.compile(r".*/index/data\.mdb\", ([A-Z_|]+).* = (\d+)<")


@dataclass(frozen=True, slots=True)
class Call:
    """One system call on a file of the tier."""

    what: str
    """"write" or "flush"."""
    where: str
    """"segment", "index", "marker", "directory"."""
    synchronous: bool = False
    """Whether the file was opened so that a write returns when it is on the disk."""


def life(path: Path, durability: str, trace: Path) -> dict[str, list[Call]]:
    """By step, the calls of a real store that stores one batch and closes, in order. It moves one
    group at a time, on the thread that asks for it, so that calls do not overlap."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace")
    command = [strace, "-f", "-y", "-qq", "-s", "16", "-e", f"trace={_CALLS}", "-o", str(trace)]
    command += [sys.executable, "-m", "tests.stores.traced_life", str(path), durability]
    paths = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=90,
    )
    if "ptrace" in done.stderr and not trace.exists():
        pytest.skip(f"may not trace: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return parse(trace.read_text(), path)


def parse(text: str, tier: Path) -> dict[str, list[Call]]:
    steps: dict[str, list[Call]] = {name: [] for name in STEPS}
    now: list[Call] = []
    synchronous: set[str] = set()
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or "<unfinished" in line:
            assert match is None or str(tier) not in line, f"calls overlap: {line}"
            continue
        call, fd, file, rest = match.groups()
        if call == "write" and (told := re.match(r', "step (\w+)', rest)):
            now = steps[told[1]]
        elif call == "openat" and (opened := _OPENED.match(rest)):
            (synchronous.add if "O_DSYNC" in opened[1] else synchronous.discard)(opened[2])
        elif call != "openat" and (where := place_of(file, tier)):
            assert re.search(r"\) += \d+$", line) or "EINVAL" in line, line
            what = "flush" if call in _FLUSHES else "write"
            now.append(Call(what, where, where == "index" and fd in synchronous))
        else:
            assert call == "openat" or call not in {"sync", "syncfs"}, line
    return steps


def place_of(file: str | None, tier: Path) -> str | None:
    if file is None or not file.startswith(str(tier)):
        return None
    name = file[len(str(tier)) :].lstrip("/")
    if name in ("", "index"):
        return "directory"
    if name.startswith("segment-"):
        return "segment"
    if name.startswith("#"):
        return None  # the nameless file that direct I/O is tried with
    if name == "index/users.lock":
        return None  # who writes now: of no use to another boot
    return {"index/data.mdb": "index"}.get(name, "marker")


def short(calls: list[Call]) -> list[str]:
    """The calls in order, repetitions left out."""
    told = [f"{call.what} {call.where}" + " synchronously" * call.synchronous for call in calls]
    return [one for n, one in enumerate(told) if n == 0 or told[n - 1] != one]


@pytest.mark.parametrize("durability", MODES)
def test_data_is_on_the_disk_before_its_index_entry(tmp_path: Path, durability: str) -> None:
    """Space, data and entries; then their flush; only then the index's pages, their flush, and the
    page that makes them valid."""
    steps = life(tmp_path / "tier", durability, tmp_path / "trace")
    for name, calls in steps.items():
        print(f"{durability} {name}: {', '.join(short(calls))}")
    commit = {
        "none": ["write index"],
        "batch": ["write index", "flush index", "write index"],
        "full": ["write index", "flush index", "write index synchronously"],
    }[durability]
    flushed = durability != "none"
    made = ["write segment", *["flush segment", "flush directory"] * flushed]
    assert short(steps["reserve"]) == [*made, *commit]
    assert short(steps["write"]) == ["write segment"]
    assert short(steps["publish"]) == ["write segment", *["flush segment"] * flushed, *commit]
    # A clean close promises the same in every mode: all is there at the next boot.
    closed = short(steps["close"])
    mark = ["write marker", "flush marker", "flush directory"]
    left = [*commit, "flush index", *["flush segment"] * (not flushed), *mark]
    assert closed == [one for n, one in enumerate(left) if n == 0 or left[n - 1] != one]


def test_without_durability_nothing_is_flushed_between_open_and_close(tmp_path: Path) -> None:
    steps = life(tmp_path / "tier", "none", tmp_path / "trace")
    between = [call for name in ("reserve", "write", "publish") for call in steps[name]]
    print(f"{len(between)} writes between open and close")
    assert len(between) > 5
    assert not [call for call in between if call.what == "flush" or call.synchronous]


def test_a_close_whose_flush_fails_is_not_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then a crash of the machine makes the tier start empty, as without a close."""
    arguments = StoreArguments(tmp_path / "tier")
    store = open_nvme(arguments)
    put(store, range(8))

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        store.close()
    assert "Input/output error" in caplog.text
    marker = json.loads((arguments.path / "index" / directory.MARKER).read_text())
    assert marker["clean"] is False
    assert boot_again(arguments.path) == 1
    store = open_nvme(arguments)
    assert not any(store.contains(keys(range(8))))
    store.close()


# -------------------------------------------------------------------------------------- the boot


def boot_again(path: Path) -> int:
    """As if the machine had started anew since the tier was used; how many markers say so now."""
    markers = list(path.rglob(directory.MARKER))
    for marker in markers:
        fields = json.loads(marker.read_text())
        marker.write_text(json.dumps(fields | {"boot_id": "0" * 32}))
    return len(markers)


@pytest.fixture(params=[open_nvme, open_lmdb], ids=["nvme", "lmdb"])
def opener(request: pytest.FixtureRequest) -> Opener:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("durability", MODES)
def test_after_a_crash_of_the_machine_as_much_is_there_as_was_promised(
    tmp_path: Path, opener: Opener, durability: str
) -> None:
    arguments = StoreArguments(tmp_path / "tier", extra=(("durability", durability),))
    _, published = run_until_stage(opener, arguments, 0, 30)
    assert len(published) >= 20
    assert boot_again(arguments.path)
    store = opener(arguments)
    there = sum(store.contains(keys(published)))
    print(f"{there} of {len(published)} blocks are there with durability {durability}")
    if durability == "none":
        assert there == 0
        assert store.stat().blocks == 0
    else:
        assert_held(store, published)
    put(store, range(1000, 1008))
    assert_held(store, range(1000, 1008))
    store.close()


@pytest.mark.parametrize("durability", MODES)
def test_after_a_clean_close_all_is_there_at_the_next_boot(
    tmp_path: Path, opener: Opener, durability: str
) -> None:
    arguments = StoreArguments(tmp_path / "tier", extra=(("durability", durability),))
    store = opener(arguments)
    put(store, range(24))
    store.close()
    assert boot_again(arguments.path)
    store = opener(arguments)
    assert_held(store, range(24))
    assert not any(read.result.unproven for read in get(store, range(24)))
    store.close()


@pytest.mark.parametrize("durability", MODES)
def test_after_a_crash_of_the_process_all_is_there(
    tmp_path: Path, opener: Opener, durability: str
) -> None:
    arguments = StoreArguments(tmp_path / "tier", extra=(("durability", durability),))
    _, published = run_until_stage(opener, arguments, 0, 30)
    store = opener(arguments)
    assert_held(store, published)
    assert not any(read.result.unproven for read in get(store, published))
    store.close()


def test_nothing_in_segments_is_believed_when_index_and_machine_are_gone(tmp_path: Path) -> None:
    """Without durability a lost index is not made again from what a crash of the machine left."""
    arguments = StoreArguments(tmp_path / "tier")
    _, published = run_until_stage(open_nvme, arguments, 0, 30)
    assert published
    assert segment_files(arguments.path)
    boot_again(arguments.path)
    (arguments.path / "index" / "data.mdb").unlink()
    store = open_nvme(arguments)
    assert not any(store.contains(keys(published)))
    assert segment_files(arguments.path) == []
    store.close()


@pytest.mark.parametrize("first", ["reader", "writer"])
def test_rows_are_unproven_after_a_crash_of_the_machine(tmp_path: Path, first: str) -> None:
    """With `batch` the last transaction may be undone: one that gave a block's slot to another
    block, whose bytes are there. The checksum tells; it is asked whatever `verify` says."""
    arguments = StoreArguments(tmp_path / "tier", extra=(("durability", "batch"),))
    _, published = run_until_stage(open_nvme, arguments, 0, 30)
    boot_again(arguments.path)
    store = open_nvme(arguments.with_(writable=first == "writer"))
    other = open_nvme(arguments)
    put(other, range(1000, 1004))
    for one in (store, other):
        assert all(read.result.unproven and read.sound for read in get(one, published))
        assert not any(read.result.unproven for read in get(one, range(1000, 1004)))
    other.close()
    store.close()
    store = open_nvme(arguments)
    assert all(read.result.unproven for read in get(store, published))
    assert not any(read.result.unproven for read in get(store, range(1000, 1004)))
    store.close()
