"""Mirrors of a store that several processes write to, evict from, die over and open again: when
the writers rest, every mirror holds what the store holds."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.stores.many_blocks import KINDS, Kind
from tiered_kv.contracts import BlockStore, ChangeBatch
from tiered_kv.index import Mirror
from tiered_kv.index import mirror as mirror_module
from tiered_kv.testing.conformance.blocks import StoreArguments, keys, new_block, put
from tiered_kv.values import BlockKey

NUMBERS = 600
"""Blocks that the writers choose from: most come and go several times."""
LENGTH = 16_384
CAPACITY = 4 * 2**20
CUT_LOG = 2_500
"""More changes than the log of such a tier keeps."""
WRITERS = 3
KILLS = 8 * (10 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 1)
LATE_SECONDS = 60.0


def write_for_ever(
    kind: Kind, arguments: StoreArguments, seed: int, tell: Connection, stop: Connection
) -> None:
    """Child process: stores, deletes, discards, closes and opens again at random; tells the name
    of each thing it did."""
    choice = random.Random(seed)
    store = kind.open(arguments)
    evicted = 0
    while not stop.poll():
        numbers = choice.sample(range(NUMBERS), choice.randint(1, 12))
        what = choice.choices(("put", "delete", "discard", "reopen"), (12, 3, 2, 1))[0]
        if what == "put":
            put(store, numbers, length=LENGTH)
        elif what == "delete":
            store.delete(keys(numbers))
        elif what == "discard":
            store.discard([new_block(n, length=LENGTH) for n in numbers])
        else:
            store.close()
            store = kind.open(arguments)
            evicted = 0
        tell.send((what, store.stat().evicted_blocks - evicted))
        evicted = store.stat().evicted_blocks
    store.close()


class Watched:
    """A store that counts what a mirror asks of it, and hangs in `changes` while it is held."""

    def __init__(self, store: BlockStore, counts: Counter[str], may_go_on: threading.Event) -> None:
        self._store = store
        self._counts = counts
        self._may_go_on = may_go_on

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._counts["keys asked for"] += len(keys)
        return self._store.contains(keys)

    def scan(self) -> Iterator[BlockKey]:
        self._counts["fills"] += 1
        for one in self._store.scan():
            time.sleep(0.002)  # the writers run between any two keys
            yield one

    def changes(self, cursor: int | None) -> ChangeBatch:
        if not self._may_go_on.wait(LATE_SECONDS):
            raise AssertionError("held for ever")
        batch = self._store.changes(cursor)
        self._counts["changes followed"] += len(batch.changes)
        self._counts["cut logs"] += batch.restart
        return batch

    def close(self) -> None:
        self._store.close()


class Writers:
    """The processes that write. A killed one is followed by another."""

    def __init__(self, kind: Kind, arguments: StoreArguments, seed: int) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._kind = kind
        self._arguments = arguments
        self._seed = seed
        self._running: dict[Connection, tuple[BaseProcess, Connection]] = {}
        self.did: Counter[str] = Counter()
        for _ in range(WRITERS):
            self._start()

    def _start(self) -> None:
        self._seed += 1
        ours, theirs = self._context.Pipe(duplex=False)
        stopped, stop = self._context.Pipe(duplex=False)
        child = self._context.Process(
            target=write_for_ever,
            args=(self._kind, self._arguments, self._seed, theirs, stopped),
            daemon=True,
        )
        child.start()
        theirs.close()
        stopped.close()
        self._running[ours] = (child, stop)

    def work(self, steps: int) -> None:
        """Hear of so many things that they did."""
        for _ in range(steps):
            (first, *_) = wait(list(self._running), LATE_SECONDS)
            assert isinstance(first, Connection)
            what, evicted = first.recv()
            self.did[what] += 1
            self.did["evicted"] += evicted

    def kill_one(self, choice: random.Random) -> None:
        """At this moment, wherever it is."""
        tells = choice.choice(list(self._running))
        child, stop = self._running.pop(tells)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join(LATE_SECONDS)
        assert child.exitcode == -signal.SIGKILL
        tells.close()
        stop.close()
        self.did["killed"] += 1
        self._start()

    def rest(self) -> None:
        """Let all of them end."""
        for _, stop in self._running.values():
            stop.send(None)
            stop.close()
        for tells, (child, _) in self._running.items():
            try:
                while True:
                    tells.recv()
            except EOFError:
                tells.close()
            child.join(LATE_SECONDS)
            assert child.exitcode == 0


def wait_until_equal(mirrors: Sequence[Mirror], store: BlockStore) -> int:
    """Until each mirror holds what the store does; how many blocks that is."""
    every = keys(range(NUMBERS))
    held = set(store.scan())
    truth = [one in held for one in every]
    deadline = time.monotonic() + LATE_SECONDS
    for number, mirror in enumerate(mirrors):
        while mirror.lookup(every) != truth or len(mirror) != len(held):
            assert time.monotonic() < deadline, (
                f"mirror {number} ({mirror.state}) holds {len(mirror)} keys of {len(held)}"
            )
            time.sleep(0.01)
    return len(held)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_mirrors_are_exact_when_the_writers_rest(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "_CHUNK_KEYS", 8)  # the log is followed within a fill
    arguments = StoreArguments(tmp_path / "tier", capacity=CAPACITY, block_bytes=(LENGTH,))
    choice = random.Random(kind.name)
    store = kind.open(arguments.with_(writable=False))
    counts: Counter[str] = Counter()
    mirrors: list[Mirror] = []
    free, held = threading.Event(), threading.Event()
    free.set()
    held.set()

    def follow(may_go_on: threading.Event) -> None:
        def open_store() -> BlockStore:
            opened = kind.open(arguments.with_(writable=False))
            return Watched(opened, counts, may_go_on)  # type: ignore[return-value]

        mirrors.append(Mirror(open_store, tier=kind.name, poll_seconds=0.01))

    follow(held)
    writers = Writers(kind, arguments, seed=1)
    behind = 0
    for number in range(KILLS):
        writers.work(choice.randint(10, 60))
        if number == 1:
            assert mirrors[0].wait_ready(LATE_SECONDS)
            held.clear()  # the log is cut before this one goes on
            behind = store.changes(None).cursor
        if number % 3 == 0:
            follow(free)
        # What a mirror says is wrong may come back, or be wrong itself: it is forgotten anyway.
        for mirror in mirrors:
            mirror.forget(keys(choice.sample(range(NUMBERS), 20)))
        writers.kill_one(choice)
    while store.changes(None).cursor < behind + CUT_LOG:
        writers.work(50)
    held.set()
    writers.rest()
    blocks = wait_until_equal(mirrors, store)
    print(f"{kind}: {blocks} blocks at the end, {len(mirrors)} mirrors equal")
    print(f"  writers: {dict(writers.did)}")
    print(f"  mirrors: {dict(counts)}")
    assert writers.did["killed"] == KILLS
    assert writers.did["evicted"] > 0
    assert min(writers.did[what] for what in ("put", "delete", "discard", "reopen")) > 0
    assert counts["cut logs"] > 0
    assert counts["fills"] > len(mirrors)
    assert 0 < blocks < NUMBERS
    for mirror in mirrors:
        assert mirror.close(LATE_SECONDS)
    store.close()


def put_and_close(kind: Kind, arguments: StoreArguments, first: int, count: int) -> None:
    """Child process: stores some blocks."""
    store = kind.open(arguments)
    put(store, range(first, first + count), length=LENGTH)
    store.close()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_mirror_that_only_reads_follows_an_index_that_was_emptied(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `access: read` nothing keeps another process from finding the directory left by a crash
    of the machine, and from starting it empty."""
    arguments = StoreArguments(tmp_path / "tier", capacity=CAPACITY, block_bytes=(LENGTH,))
    put_and_close(kind, arguments, 0, 10)
    reading = arguments.with_(writable=False, extra=(("access", "read"),))
    mirror = Mirror(lambda: kind.open(reading), tier=kind.name, poll_seconds=0.01)
    assert mirror.wait_ready(LATE_SECONDS)
    assert mirror.lookup(keys(range(12))) == [True] * 10 + [False] * 2
    marker = arguments.path / kind.folder / "tiered-kv.json"
    fields = json.loads(marker.read_text()) | {"clean": False, "boot_id": "0" * 32}
    marker.write_text(json.dumps(fields))
    child = multiprocessing.get_context("spawn").Process(
        target=put_and_close, args=(kind, arguments, 5, 7)
    )
    child.start()
    child.join(LATE_SECONDS)
    assert child.exitcode == 0
    deadline = time.monotonic() + LATE_SECONDS
    while mirror.lookup(keys(range(12))) != [False] * 5 + [True] * 7:
        assert time.monotonic() < deadline, mirror.state
        time.sleep(0.01)
    told = [one.message for one in caplog.records if "removed or replaced" in one.message]
    print(f"{kind}: {told}")
    assert len(told) == 1
    assert mirror.close(LATE_SECONDS)
