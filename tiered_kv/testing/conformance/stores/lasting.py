"""What is left after a restart and after SIGKILL."""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from pathlib import Path

import pytest

from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    ODD_BYTES,
    StoreArguments,
    assert_held,
    disk_bytes,
    get,
    key,
    keys,
    put,
)
from tiered_kv.testing.conformance.children import BATCH, run_until_stage
from tiered_kv.testing.conformance.contract import StorePromise, owe
from tiered_kv.testing.conformance.stores.case import OpenStore, StoreCase, StoreFixtures
from tiered_kv.testing.conformance.stores.following import KeyMirror
from tiered_kv.values import BlockStatus

__all__ = ["LastingChecks"]


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class LastingChecks(StoreFixtures):
    """F21, F22: all that was published, and nothing else."""

    def test_closing_lets_go(self, open_store: OpenStore) -> None:
        """Opened, used and closed three times: no thread and no file descriptor is left over."""
        open_store().close()
        before = threading.active_count(), _descriptors()
        for first in range(0, 24, 8):
            store = open_store()
            put(store, range(first, first + 8))
            assert_held(store, range(first, first + 8))
            store.close()
            store.close()
        after = threading.active_count(), _descriptors()
        owe(
            after == before,
            StorePromise.CLOSE,
            f"there were {before[0]} threads and {before[1]} descriptors, now there are {after}",
        )

    @pytest.mark.parametrize("lacking", ["O_DIRECT", "fallocate"])
    def test_a_plain_file_system_is_no_obstacle(
        self,
        case: StoreCase,
        open_store: OpenStore,
        monkeypatch: pytest.MonkeyPatch,
        lacking: str,
    ) -> None:
        """F27: a file system that refuses direct I/O, or to take space ahead, costs speed only."""
        case.needs("plain_files")
        refusals = 0
        really_open = os.open

        def fail(*_: object) -> None:
            nonlocal refusals
            refusals += 1
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        def open_buffered(
            path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
        ) -> int:
            if flags & os.O_DIRECT:
                fail()
            return really_open(path, flags, mode, dir_fd=dir_fd)

        if lacking == "O_DIRECT":
            monkeypatch.setattr(os, "open", open_buffered)
        else:
            monkeypatch.setattr(os, "posix_fallocate", fail)
        store = open_store()
        put(store, range(8))
        assert_held(store, range(8))
        print(f"{lacking} was refused {refusals} times; in effect: {dict(store.stat().modes)}")

    def test_blocks_survive_a_restart(self, case: StoreCase, open_store: OpenStore) -> None:
        """Closed twice, opened again; a cursor of before goes on or asks for a restart."""
        case.needs("reopens")
        store = open_store()
        put(store, range(10))
        put(store, range(20, 25), length=ODD_BYTES)
        cursor = store.changes(None).cursor
        store.delete(keys([3]))
        store.close()
        store.close()
        store = open_store()
        held = [n for n in range(10) if n != 3]
        assert_held(store, held)
        assert_held(store, range(20, 25), length=ODD_BYTES)
        found = sorted(store.scan())
        owe(
            found == sorted(keys([*held, *range(20, 25)])),
            StorePromise.OUTLIVES,
            f"scan finds {len(found)} keys of {len(held) + 5}",
        )
        batch = store.changes(cursor)
        owe(
            batch.restart or batch.changes == ((key(3), False),),
            StorePromise.CHANGES,
            f"the cursor of before was answered with {batch}",
        )
        owe(put(store, [3]) == [3], StorePromise.DELETE, "a deleted block came back")

    def test_files_are_private(
        self, case: StoreCase, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        """F45: files can be read by their owner only, and folders entered."""
        case.needs("directory")
        put(open_store(), range(4))
        found = [arguments.path, *arguments.path.rglob("*")]
        owe(len(found) > 1, StorePromise.OUTLIVES, f"there is no file in {arguments.path}")
        for file in found:
            mode = stat.S_IMODE(file.stat().st_mode)
            due = 0o700 if file.is_dir() else 0o600
            owe(mode == due, StorePromise.OUTLIVES, f"{file} has mode {mode:o}, expected {due:o}")

    def test_a_killed_process_leaves_all_that_it_published_and_nothing_else(
        self, case: StoreCase, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        """A child stores without end and is killed at a random step, `kills` times. Between the
        kills everything is deleted, so that what a dead process had reserved shows as room that
        is missing."""
        case.needs("survives_kill")
        choice = random.Random(23)
        stages: list[str] = []
        sizes: list[int] = []
        committed = torn = first = 0
        for _ in range(case.kills):
            last, published = run_until_stage(case.open, arguments, first, choice.randrange(2, 60))
            stages.append(last)
            committed += len(published)
            in_doubt = first + len(published)
            possible = range(first, in_doubt + 2 * BATCH)
            first = possible.stop
            store = open_store()
            assert_held(store, published)
            visible = set(store.scan())
            numbers = [n for n in possible if key(n) in visible]
            owe(
                len(numbers) == len(visible) == store.stat().blocks,
                StorePromise.NOTHING_BEHIND,
                f"{len(visible)} keys are visible, {len(numbers)} of them were ever stored",
            )
            torn += sum(not read.sound for read in get(store, numbers))
            owe(torn == 0, StorePromise.NOTHING_BEHIND, f"{torn} visible blocks are torn")
            unseen = [n for n in possible if n not in numbers]
            statuses = {read.result.status for read in get(store, unseen)} - {BlockStatus.MISSING}
            owe(not statuses, StorePromise.NOTHING_BEHIND, f"invisible blocks read as {statuses}")
            mirror = KeyMirror(store)
            store.delete(list(visible))
            owe(mirror.follow() == set(), StorePromise.CHANGES, "a deleted key is not told")
            store.close()
            sizes.append(disk_bytes(arguments.path))
        print(f"killed after {stages}: {committed} blocks published, 0 torn, disk {sizes}")
        store = open_store()
        half = range(10**6, 10**6 + arguments.capacity // (2 * BLOCK_BYTES))
        for start in range(half.start, half.stop, 8):
            put(store, range(start, min(start + 8, half.stop)))
        assert_held(store, half)
        if case.bounded:
            evicted = store.stat().evicted_blocks
            owe(
                evicted == 0,
                StorePromise.NOTHING_BEHIND,
                f"{evicted} blocks were evicted to hold half of the capacity",
            )
        if case.directory:
            owe(
                max(*sizes, disk_bytes(arguments.path)) <= arguments.capacity,
                StorePromise.BUDGET,
                f"{sizes} bytes were on the disk after the kills",
            )
        owe(committed > 0, StorePromise.OUTLIVES, "no block was published before a kill")
