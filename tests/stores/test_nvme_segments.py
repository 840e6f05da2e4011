"""Segment files are opened by threads that do not wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.stores.nvme_parts import open_below, open_striped
from tiered_kv.testing.conformance.blocks import StoreArguments, put
from tiered_kv_nvme.segments import SegmentFiles
from tiered_kv_nvme.spreading import place_of
from tiered_kv_nvme.store import NvmeStore

PATIENCE = 20.0


class Door:
    """Behind it is one segment: whoever opens that waits until it opens, too."""

    def __init__(self) -> None:
        self.number = -1
        self.opened = threading.Event()
        self._waiting = threading.Semaphore(0)

    def pass_through(self, number: int) -> None:
        if number == self.number and not self.opened.is_set():
            self._waiting.release()
            self.opened.wait(PATIENCE)

    def wait_for(self, count: int) -> None:
        """Until so many are at it."""
        for _ in range(count):
            assert self._waiting.acquire(timeout=PATIENCE)


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    door = Door()
    real = SegmentFiles._open_file

    def open_file(self: SegmentFiles, number: int, flags: int) -> int:
        fd = real(self, number, flags)
        door.pass_through(number)
        return fd

    monkeypatch.setattr(SegmentFiles, "_open_file", open_file)
    yield door
    door.opened.set()


@pytest.fixture
def threads(door: Door) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool
        door.opened.set()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[SegmentFiles]:
    """Of a store that holds segments in three directories, none of which is open."""
    arguments = StoreArguments(tmp_path / "tier")
    with closing(open_striped(arguments)) as store:
        for first in range(0, 48, 16):
            put(store, range(first, first + 16))
    with closing(open_striped(arguments)) as store:
        assert isinstance(store, NvmeStore)
        assert open_below(tmp_path, "tier/first/segment-") == []
        yield store._files
    assert open_below(tmp_path) == []


def use(files: SegmentFiles, *numbers: int) -> set[int]:
    """Those that could be opened."""
    with files.lease(numbers) as leased:
        return set(leased.fds)


def test_a_directory_that_hangs_keeps_nobody_from_the_others(
    files: SegmentFiles, door: Door, threads: ThreadPoolExecutor
) -> None:
    door.number, *others = sorted(files.numbers())
    assert {place_of(door.number), *map(place_of, others)} == {0, 1, 2}
    hanging = threads.submit(use, files, door.number)
    door.wait_for(1)
    assert threads.submit(use, files, *others).result(PATIENCE / 2) == set(others)
    assert not hanging.done()
    door.opened.set()
    assert hanging.result(PATIENCE) == {door.number}


def test_threads_that_open_the_same_file_keep_it_once(
    files: SegmentFiles, door: Door, threads: ThreadPoolExecutor
) -> None:
    door.number = min(files.numbers())
    users = [threads.submit(use, files, door.number) for _ in range(4)]
    door.wait_for(len(users))
    door.opened.set()
    assert [user.result(PATIENCE) for user in users] == [{door.number}] * len(users)
    path = files.path(door.number)
    assert open_below(path.parent, path.name) == [str(path)]


@pytest.mark.parametrize(
    "let_go",
    [
        lambda files, number: files.forget(number),
        lambda files, number: files.forget_in({place_of(number)}),
        lambda files, _: files.close(),
    ],
    ids=["forget", "forget_in", "close"],
)
def test_a_file_that_was_let_go_of_while_it_was_opened_is_not_kept(
    files: SegmentFiles,
    door: Door,
    threads: ThreadPoolExecutor,
    let_go: Callable[[SegmentFiles, int], None],
) -> None:
    door.number = min(files.numbers())
    user = threads.submit(use, files, door.number)
    door.wait_for(1)
    let_go(files, door.number)
    door.opened.set()
    assert user.result(PATIENCE) == {door.number}
    path = files.path(door.number)
    assert open_below(path.parent, path.name) == []
