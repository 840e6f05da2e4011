"""What somebody else does to the tier's directory costs misses, never wrong bytes or a crash."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.faults.tracing import injected
from tests.stores.nvme_parts import MIB, open_nvme, segment_files, slot
from tests.stores.nvme_parts import settings as nvme_settings
from tiered_kv.contracts import BlockStore
from tiered_kv.errors import FormatError, IdentityError, NoSpace, RefuseToStart, TierError
from tiered_kv.index import BlockIndex, Environment, WriteAccount
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
    reserved,
)
from tiered_kv.values import FORMAT_VERSION, BlockStatus
from tiered_kv_nvme.budget import Budget
from tiered_kv_nvme.groups import EndOfFile, Group
from tiered_kv_nvme.headers import MAGIC
from tiered_kv_nvme.posix import PosixIo, probe_direct
from tiered_kv_nvme.segments import SegmentFiles
from tiered_kv_nvme.space import Space
from tiered_kv_nvme.stripes import Stripes
from tiered_kv_nvme.writing import Writer


@pytest.fixture
def arguments(tmp_path: Path) -> StoreArguments:
    return StoreArguments(tmp_path / "tier")


@pytest.fixture
def store(arguments: StoreArguments) -> Iterator[BlockStore]:
    store = open_nvme(arguments)
    yield store
    store.close()


# ------------------------------------------------------------------------------- changed files


def test_a_truncated_segment_is_a_miss_and_is_used_again(
    store: BlockStore, arguments: StoreArguments
) -> None:
    put(store, range(100))
    files = segment_files(arguments.path)
    sizes = [file.stat().st_size for file in files]
    for file, size in zip(files, sizes, strict=True):
        os.truncate(file, size // 2 + 100)
    reads = get(store, range(100))
    missing = [n for n, read in enumerate(reads) if read.result.status is BlockStatus.MISSING]
    assert all(read.sound for read in reads if read.result.status is BlockStatus.OK)
    print(f"{len(files)} files cut in half, {len(missing)} of 100 blocks missing")
    assert 0 < len(missing) < 100
    assert not any(store.contains(keys(missing)))
    assert sorted(put(store, missing)) == missing
    assert_held(store, range(100))


def test_deleted_and_replaced_segments_are_misses(
    store: BlockStore, arguments: StoreArguments
) -> None:
    put(store, range(60))
    store.close()
    files = segment_files(arguments.path)
    assert len(files) >= 3
    files[0].unlink()
    files[1].write_bytes(b"")
    shutil.rmtree(files[2], ignore_errors=True)
    files[2].unlink()
    files[2].mkdir()
    store = open_nvme(arguments)
    reads = get(store, range(60))
    statuses = [read.result.status for read in reads]
    counts = {status.value: statuses.count(status) for status in set(statuses)}
    print(f"one file deleted, one emptied, one made a directory: {counts}")
    assert all(read.sound for read in reads if read.result.status is BlockStatus.OK)
    assert statuses.count(BlockStatus.MISSING) >= 30
    store.close()


def test_a_segment_deleted_between_write_and_publish(
    store: BlockStore, arguments: StoreArguments
) -> None:
    places = reserved(store, [new_block(n) for n in range(8)])
    store.write(places, [aligned_copy(content(n)) for n in range(8)])
    for file in segment_files(arguments.path):
        file.unlink()
    store.publish(places)
    assert not any(store.contains(keys(range(8))))
    places = reserved(store, [new_block(n) for n in range(8)])
    assert put(store, range(20, 24)) == list(range(20, 24))
    store.abandon(places)
    assert_held(store, range(20, 24))


def test_all_segments_deleted_behind_an_open_store(
    store: BlockStore, arguments: StoreArguments
) -> None:
    put(store, range(30))
    store.close()
    store = open_nvme(arguments)
    for file in segment_files(arguments.path):
        file.unlink()
    with pytest.raises(TierError, match="deleted by somebody else"):
        put(store, range(30, 34))
    assert {r.result.status for r in get(store, range(30))} == {BlockStatus.MISSING}
    assert store.stat().blocks == 0
    put(store, range(30))
    assert_held(store, range(30))
    store.close()


def test_a_follower_reports_what_vanished_as_missing(
    store: BlockStore, arguments: StoreArguments
) -> None:
    put(store, range(8))
    follower = open_nvme(arguments.with_(writable=False))
    for file in segment_files(arguments.path):
        file.unlink()
    assert {r.result.status for r in get(follower, range(8))} == {BlockStatus.MISSING}
    assert not any(follower.contains(keys(range(8))))
    follower.close()


# ------------------------------------------------------------------------------- failing calls


def test_a_failing_call_costs_its_blocks_alone(tmp_path: Path) -> None:
    """Groups of a good file, of a file that cannot be read (EBADF) and beyond its end."""
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 32)
    good = os.open(file, os.O_RDONLY)
    write_only = os.open(file, os.O_WRONLY)
    io = PosixIo(2, "ssd", alignment=0)
    views = [slot(4096) for _ in range(4)]
    try:
        failed = io.read_groups(
            [
                Group(good, 0, (views[0],), (0,)),
                Group(write_only, 0, (views[1],), (1,)),
                Group(good, 4096, (views[2][:2048], views[2][2048:]), (2, 2)),
                Group(good, 8000, (views[3][:192], views[3][192:]), (3, 4)),
            ]
        )
    finally:
        assert io.close()
        os.close(good)
        os.close(write_only)
    print({position: str(error) for position, error in failed.items()})
    assert failed.keys() == {1, 4}
    assert isinstance(failed[4], EndOfFile)
    assert bytes(views[3][:192]) == file.read_bytes()[8000:]
    assert bytes(views[0]) == bytes(views[2]) == bytes(range(256)) * 16
    with pytest.raises(TierError, match="closed"):
        io.read_groups([Group(0, 0, (views[0],), (0,))])


@pytest.mark.parametrize("name", ["tiered-kv-ssd-io-loop", "tiered-kv-ssd-io-0"])
def test_a_thread_that_could_not_be_started_is_started_by_the_next_call(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 16 * 8)
    fd = os.open(file, os.O_RDONLY)
    io = PosixIo(4, "ssd", alignment=0)
    start, refused = threading.Thread.start, [name]

    def refuse(thread: threading.Thread) -> None:
        if thread.name in refused:
            refused.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    views = [slot(4096) for _ in range(8)]
    groups = [Group(fd, 4096 * n, (view,), (n,)) for n, view in enumerate(views)]
    with pytest.raises(RuntimeError, match="new thread"):
        io.read_groups(groups)
    assert not refused
    failed: list[dict[int, OSError]] = []
    again = threading.Thread(target=lambda: failed.append(io.read_groups(groups)), daemon=True)
    again.start()
    again.join(30)
    assert failed == [{}], "it hangs"
    assert b"".join(views) == file.read_bytes()
    assert {thread.name for thread in threading.enumerate()} >= {name}
    assert io.close()
    os.close(fd)


def test_closing_waits_for_a_group_on_its_callers_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, released = threading.Event(), threading.Event()
    real = os.pwritev

    def held(fd: int, views: Sequence[memoryview], offset: int) -> int:
        begun.set()
        assert released.wait(30)
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", held)
    io = PosixIo(2, "ssd", alignment=0)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    failed: list[dict[int, OSError]] = []

    def write() -> None:
        failed.append(io.write_groups([Group(file, 0, (slot(4096, 7),), (0,))]))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert begun.wait(30)
        assert not io.close(0.05)
        with pytest.raises(TierError, match="closed"):
            io.write_groups([Group(file, 0, (slot(4096),), (0,))])
    finally:
        released.set()
        thread.join(30)
    assert io.close()
    assert failed == [{}]
    assert os.pread(file, 4096, 0) == bytes([7]) * 4096
    os.close(file)


def ask_child(target: Callable[[Path, Connection], None], path: Path) -> str:
    """What a child process says after `target(path, answer)`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=target, args=(path, theirs))
    child.start()
    theirs.close()
    try:
        return str(ours.recv())
    finally:
        child.join(60)
        ours.close()


def limited_writes(path: Path, answer: Connection) -> None:
    """Child process: the kernel cuts a write short at the file size limit, then refuses."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = open_nvme(StoreArguments(path))
    put(store, range(4))
    (file,) = segment_files(path)
    written = file.stat().st_size
    os.truncate(file, 4 * BLOCK_BYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * BLOCK_BYTES + 512, written * 4))
    try:
        put(store, range(10, 26))
    except (TierError, NoSpace) as error:
        visible = sum(store.contains(keys(range(10, 26))))
        answer.send(f"{type(error).__name__}, {visible} visible")
    else:
        answer.send("stored")


def test_a_short_write_leaves_nothing_visible(tmp_path: Path) -> None:
    assert ask_child(limited_writes, tmp_path / "tier") == "TierError, 0 visible"
    store = open_nvme(StoreArguments(tmp_path / "tier"))
    assert not any(store.contains(keys(range(10, 26))))
    put(store, range(10, 26))
    assert_held(store, range(10, 26))
    store.close()


@pytest.mark.faults
def test_a_write_that_really_fails_leaves_nothing_visible(
    store: BlockStore, arguments: StoreArguments, tmp_path: Path
) -> None:
    put(store, range(8))
    said: list[str] = []
    files = segment_files(arguments.path)
    with injected("pwritev2:error=EIO", paths=files, log=tmp_path / "log") as hits:
        for first in range(100, 164, 16):
            try:
                put(store, range(first, first + 16))
            except TierError as error:
                said.append(str(error))
                assert not any(store.contains(keys(range(first, first + 16))))
    refused = len(said)
    assert all("Input/output error" in text for text in said)
    print(f"{len(hits)} writes failed, {refused} of 4 batches refused")
    assert hits
    assert refused > 0
    put(store, range(100, 164))
    assert_held(store, [*range(8), *range(100, 164)])


@pytest.mark.faults
@pytest.mark.parametrize("call", ["preadv2", "pwritev2"])
def test_calls_that_claim_what_they_did_not_do_are_found_out(
    store: BlockStore, tmp_path: Path, call: str
) -> None:
    """A call that says it moved 512 bytes, and moved none: the rest is moved, and the checksum
    tells."""
    put(store, range(8))
    first = 8 if call == "pwritev2" else 0
    with injected(f"{call}:retval=512:when=1", log=tmp_path / "log") as hits:
        if call == "pwritev2":
            put(store, range(8, 16))
        reads = get(store, range(16))
    bad = [n for n, read in enumerate(reads) if read.result.status is BlockStatus.OK]
    bad = [n for n in bad if not reads[n].sound]
    print(f"{len(hits)} calls were not made, blocks {bad} do not verify")
    assert len(hits) == 1
    assert bad == [first]
    store.discard([new_block(n) for n in bad if call == "pwritev2"])
    put(store, range(16))
    assert_held(store, range(16))


# ------------------------------------------------------------------------------ wrong directory


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "home"
    path.mkdir()
    (path / "thesis.tex").write_text("mine")
    with pytest.raises(IdentityError, match="thesis") as caught:
        open_nvme(StoreArguments(path))
    assert str(path) in str(caught.value)
    assert [file.name for file in path.iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tier").write_text("mine")
    with pytest.raises(IdentityError, match="no directory"):
        open_nvme(StoreArguments(tmp_path / "tier"))


def test_a_directory_of_another_kind_of_store_is_refused(arguments: StoreArguments) -> None:
    open_nvme(arguments).close()
    (marker,) = (
        file
        for file in (arguments.path / "index").iterdir()
        if b'"nvme"' in file.read_bytes()[:4096]
    )
    text = marker.read_text()
    marker.write_text(text.replace('"nvme"', '"lmdb"'))
    with pytest.raises(IdentityError, match="lmdb"):
        open_nvme(arguments)
    data = json.loads(text)
    data["format"] = FORMAT_VERSION + 1
    marker.write_text(json.dumps(data))
    with pytest.raises(FormatError, match=str(FORMAT_VERSION + 1)):
        open_nvme(arguments)
    marker.write_text(text)
    open_nvme(arguments).close()


def test_segments_of_a_newer_format_are_refused_and_kept(arguments: StoreArguments) -> None:
    arguments.path.mkdir()
    newer = arguments.path / "segment-000007"
    newer.write_bytes(MAGIC + (FORMAT_VERSION + 1).to_bytes(4, "big") + bytes(4084))
    with pytest.raises(FormatError, match=f"format {FORMAT_VERSION + 1}") as caught:
        open_nvme(arguments)
    assert str(newer) in str(caught.value)
    assert isinstance(caught.value, RefuseToStart)
    assert newer.exists()


def open_as_nobody(path: Path, answer: Connection) -> None:
    """Child process without root's rights."""
    importlib.import_module("tiered_kv_nvme.store")  # it may lie where only root may read
    if os.geteuid() == 0:
        os.setegid(65_534)
        os.seteuid(65_534)
    try:
        open_nvme(StoreArguments(path))
    except TierError as error:
        answer.send(str(error))
    else:
        answer.send("opened")


def test_an_unwritable_directory_is_a_clear_error(tmp_path: Path) -> None:
    # pytest's folders cannot be entered by others at all: the second case.
    with tempfile.TemporaryDirectory() as outside:
        Path(outside).chmod(0o755)
        for folder in (Path(outside), tmp_path):
            path = folder / "tier"
            path.mkdir()
            path.chmod(0o555)
            said = ask_child(open_as_nobody, path)
            print(said)
            assert str(path) in said
            assert "Permission denied" in said
            assert "give the user of this process access" in said


def test_random_files_in_the_directory_are_left_alone(arguments: StoreArguments) -> None:
    store = open_nvme(arguments)
    put(store, range(8))
    store.close()
    choice = random.Random(1)
    names = ["segment-999999", "segment-000500", "segment-12", "segment-0001x", "-probe.tmp"]
    for name in names:
        (arguments.path / name).write_bytes(choice.randbytes(choice.randrange(1, 9000)))
    (arguments.path / "segment-000400").symlink_to("/etc/hostname")
    for number in range(1000):
        (arguments.path / f"{number}.bin").write_bytes(choice.randbytes(20))
    store = open_nvme(arguments)
    assert_held(store, range(8))
    for first in range(100, 400, 8):
        put(store, range(first, first + 8))
    assert_held(store, range(392, 400))
    store.close()
    for name in [*names, "segment-000400"]:
        assert (arguments.path / name).is_symlink() or (arguments.path / name).exists()


def test_a_read_only_tier_is_read_and_never_changed(arguments: StoreArguments) -> None:
    store = open_nvme(arguments)
    put(store, range(20))
    store.close()
    with pytest.raises(TierError, match="not there"):
        open_nvme(arguments.with_(path=arguments.path.parent / "none", extra=(("access", "read"),)))
    shipped = arguments.path.parent / "shipped"
    shutil.copytree(arguments.path, shipped)
    before = {file: file.stat().st_mtime_ns for file in segment_files(shipped)}
    store = open_nvme(arguments.with_(path=shipped, extra=(("access", "read"),)))
    assert_held(store, range(20))
    assert store.stat().modes["access"] == "read"
    assert store.stat().modes["io"] == str(probe_direct(shipped))
    with pytest.raises(ValueError, match="reading only"):
        store.reserve([new_block(50)])
    store.touch(keys([1]))
    store.close()
    assert {file: file.stat().st_mtime_ns for file in segment_files(shipped)} == before


class HeldIo(PosixIo):
    """Writes begin, and end when they are let go."""

    def __init__(self, alignment: int) -> None:
        super().__init__(2, "ssd", alignment=alignment)
        self.begun = threading.Event()
        self.released = threading.Event()

    def write_groups(self, groups: Sequence[Group]) -> dict[int, OSError]:
        self.begun.set()
        assert self.released.wait(30)
        return super().write_groups(groups)


def test_room_of_a_write_that_was_given_up_is_free_when_it_has_ended(
    arguments: StoreArguments,
) -> None:
    """The slots of a write that still runs may not be given to others."""
    settings = nvme_settings(arguments)
    store = open_nvme(arguments)
    put(store, range(4))
    stripes = Stripes(settings, "ssd")
    stripes.find()
    files = SegmentFiles(stripes, "ssd", writable=True, sync=False)
    environment = Environment.open(
        stripes.index_path, kind="nvme", tier="ssd", max_bytes=4 * MIB, writable=True
    )
    stripes.settle(environment)
    index = BlockIndex(environment, arguments.namespace, arguments.geometry)
    space = Space(environment, index, files, arguments.namespace.id)
    io = HeldIo(stripes.alignment)
    budget = Budget(settings, stripes, least_slot=BLOCK_BYTES, largest_slot=BLOCK_BYTES)
    account = WriteAccount(environment, "ssd", 0)
    writer = Writer(settings, space, files, io, budget, account, 0)
    try:
        places = [place for place in writer.reserve([new_block(50)]) if place is not None]
        memory = [aligned_copy(content(50))]
        thread = threading.Thread(target=writer.write, args=(places, memory))
        thread.start()
        assert io.begun.wait(30)
        writer.abandon(places)
        with environment.read() as txn:
            assert txn.stat(space.reserved)["entries"] == 1
        io.released.set()
        thread.join(30)
        with environment.read() as txn:
            assert txn.stat(space.reserved)["entries"] == 0
        with pytest.raises(ValueError, match="not reserved"):
            writer.publish(places)
        assert_held(store, range(4))
    finally:
        io.released.set()
        assert io.close()
        files.close()
        environment.close()
        store.close()
