from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.stores.lmdb_parts import open_lmdb
from tiered_kv.contracts import BlockStore, ChangeBatch
from tiered_kv.errors import TierError
from tiered_kv.index import Mirror
from tiered_kv.testing.conformance.blocks import StoreArguments, key, keys, put
from tiered_kv.values import BlockKey


class ListedStore:
    """The part of a store that a mirror uses, over a list; a test holds and breaks it."""

    def __init__(self, numbers: Sequence[int] = ()) -> None:
        self.log: list[tuple[BlockKey, bool]] = [(key(n), True) for n in numbers]
        self.broken: Exception | None = None
        self.scan_may_go_on = threading.Event()
        self.scan_may_go_on.set()
        self.contains_may_answer = threading.Event()
        self.contains_may_answer.set()
        self.asked: list[BlockKey] = []
        self.closed = 0
        self.forgets_log = False

    @property
    def stored(self) -> set[BlockKey]:
        return {k for k, added in dict(self.log).items() if added}

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.asked.extend(keys)
        self.contains_may_answer.wait(20)
        return [k in self.stored for k in keys]

    def scan(self) -> Iterator[BlockKey]:
        for name in sorted(self.stored):
            if self.broken:
                raise self.broken
            yield name
            # The mirror's thread answers questions between keys, so this wait is short.
            self.scan_may_go_on.wait(0.002)

    def changes(self, cursor: int | None) -> ChangeBatch:
        if self.broken:
            raise self.broken
        now = len(self.log)
        if cursor is None:
            return ChangeBatch(now, ())
        if self.forgets_log and cursor < now:
            return ChangeBatch(now, (), restart=True)
        return ChangeBatch(now, tuple(self.log[cursor:]))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[], object]], Mirror]]:
    mirrors: list[Mirror] = []

    def make(open_store: Callable[[], object]) -> Mirror:
        def opened() -> BlockStore:
            store: BlockStore = open_store()  # type: ignore[assignment]
            return store

        mirrors.append(Mirror(opened, tier="ssd", poll_seconds=0.01))
        return mirrors[-1]

    yield make
    for mirror in mirrors:
        assert mirror.close()


Start = Callable[[Callable[[], object]], Mirror]


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll a condition that another thread or process brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.002)


def test_it_fills_and_follows(start: Start) -> None:
    store = ListedStore(range(100))
    mirror = start(lambda: store)
    assert mirror.wait_ready(20)
    assert mirror.state == "ready"
    assert mirror.lookup(keys([0, 99, 100])) == [True, True, False]
    assert mirror.lookup([]) == []
    assert len(mirror) == 100
    store.log += [(key(100), True), (key(0), False), (key(101), True), (key(101), False)]
    mirror.poll_now()
    wait_until(lambda: mirror.lookup(keys([100])) == [True])
    assert mirror.lookup(keys([0, 100, 101])) == [False, True, False]
    assert store.asked == [], "a full mirror never asks the store"


def test_what_is_stored_anew_before_it_is_forgotten_is_found(start: Start) -> None:
    # The log is polled between the two: it says once that the block is back.
    store = ListedStore(range(3))
    mirror = start(lambda: store)
    assert mirror.wait_ready(20)
    store.log += [(key(1), False), (key(1), True), (key(3), True), (key(2), False)]
    mirror.poll_now()
    wait_until(lambda: mirror.lookup(keys([2, 3])) == [False, True])
    mirror.forget(keys([1, 2]))
    assert mirror.lookup(keys([1, 2])) == [False, False]
    wait_until(lambda: mirror.lookup(keys([1])) == [True])
    print("asked:", sorted(set(store.asked)))
    assert mirror.lookup(keys([1, 2])) == [True, False]


def test_while_it_fills_unknown_keys_are_asked_for(start: Start) -> None:
    store = ListedStore(range(2000))
    store.scan_may_go_on.clear()
    mirror = start(lambda: store)
    wait_until(lambda: mirror.state == "filling")
    last = max(store.stored)
    (first,) = mirror.lookup([last])
    wait_until(lambda: mirror.lookup([last, key(5000)]) == [True, False])
    assert mirror.state == "filling"
    print(f"answered {first} at first, then asked the store for {len(store.asked)} keys")
    assert last in store.asked
    store.scan_may_go_on.set()
    assert mirror.wait_ready(20)
    assert mirror.lookup([last, key(5000)]) == [True, False]


def test_a_lookup_never_waits_for_the_store(start: Start) -> None:
    may_open = threading.Event()
    store = ListedStore([1])

    def open_slowly() -> ListedStore:
        may_open.wait(20)
        return store

    mirror = start(open_slowly)
    assert mirror.state == "opening"
    assert mirror.lookup(keys([1, 2])) == [False, False]
    may_open.set()
    assert mirror.wait_ready(20)
    assert mirror.lookup(keys([1, 2])) == [True, False]


def test_what_is_forgotten_is_missing_at_once(start: Start) -> None:
    store = ListedStore([1])
    mirror = start(lambda: store)
    assert mirror.wait_ready(20)
    store.contains_may_answer.clear()
    mirror.forget(keys([1]))
    assert mirror.lookup(keys([1])) == [False]
    store.contains_may_answer.set()
    store.log += [(key(1), True)]
    mirror.poll_now()
    wait_until(lambda: mirror.lookup(keys([1])) == [True])


def test_a_log_that_was_cut_is_followed_by_a_scan(start: Start) -> None:
    store = ListedStore(range(10))
    mirror = start(lambda: store)
    assert mirror.wait_ready(20)
    store.forgets_log = True
    store.log += [(key(n), False) for n in range(5)] + [(key(50), True)]
    mirror.poll_now()
    wait_until(lambda: mirror.lookup(keys([50])) == [True] and mirror.state == "ready")
    assert mirror.lookup(keys([0, 4, 5, 50])) == [False, False, True, True]


def test_a_store_that_fails_answers_nothing_and_is_opened_again(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    stores = [ListedStore([1]), ListedStore([1, 2])]
    opened = iter(stores)
    with caplog.at_level(logging.WARNING):
        mirror = start(lambda: next(opened))
        assert mirror.wait_ready(20)
        stores[0].broken = TierError("tier ssd: the disk is gone", tier="ssd")
        wait_until(lambda: mirror.state.startswith("failed"))
        assert "the disk is gone" in mirror.state
        assert mirror.lookup(keys([1])) == [False]
        wait_until(lambda: mirror.state == "ready")
    assert mirror.lookup(keys([1, 2])) == [True, True]
    assert stores[0].closed == 1
    assert [r.message for r in caplog.records if "the disk is gone" in r.message] != []


def test_closing_closes_the_store_once(start: Start) -> None:
    store = ListedStore([1])
    mirror = start(lambda: store)
    assert mirror.wait_ready(20)
    assert mirror.close()
    assert mirror.close()
    assert store.closed == 1


def test_closing_does_not_wait_for_a_store_that_hangs() -> None:
    go_on = threading.Event()

    def hang() -> BlockStore:
        go_on.wait(20)
        raise TierError("too late", tier="ssd")

    mirror = Mirror(hang, tier="ssd")
    assert not mirror.close(0.01)
    go_on.set()
    assert mirror.close()


def change_and_evict(arguments: StoreArguments) -> None:
    """Child process: adds, removes and then stores three times the capacity."""
    store = open_lmdb(arguments)
    put(store, [1, 2, 3])
    store.delete(keys([2]))
    for first in range(1000, 1000 + 3 * arguments.capacity // 65_536, 8):
        put(store, range(first, first + 8))
    assert store.stat().evicted_blocks > 0
    store.close()


def test_it_follows_another_process_through_its_evictions(tmp_path: Path, start: Start) -> None:
    arguments = StoreArguments(tmp_path / "tier", capacity=4 * 2**20)
    mirror = start(lambda: open_lmdb(arguments.with_(writable=False)))
    assert mirror.wait_ready(20)
    child = multiprocessing.get_context("spawn").Process(target=change_and_evict, args=(arguments,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    store = open_lmdb(arguments.with_(writable=False))
    held = set(store.scan())
    stored = keys([1, 2, 3, *range(1000, 1192)])
    truth = [name in held for name in stored]
    wait_until(lambda: mirror.lookup(stored) == truth)
    print(f"{len(held)} of {len(stored)} blocks held, mirror knows {len(mirror)}")
    assert len(mirror) == len(held)
    assert 0 < len(held) < len(stored)
    store.close()
