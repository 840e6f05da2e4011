"""What every store owes, as tests: subclass `StoreBehaviour` and give `opener`."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import stat
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar, Protocol

import pytest

from tests.stores.store_parts import (
    BLOCK_BYTES,
    CAPACITY,
    NAMESPACE,
    ODD_BYTES,
    OTHER_NAMESPACE,
    StoreArguments,
    aligned_copy,
    assert_held,
    content,
    disk_bytes,
    get,
    key,
    keys,
    new_block,
    page_aligned,
    put,
)
from tiered_kv.contracts import BlockStore, ChangeBatch
from tiered_kv.errors import NoSpace, TierError
from tiered_kv.values import BlockKey, BlockStatus

Opener = Callable[[StoreArguments], BlockStore]

KILLS = int(os.environ.get("TIERED_KV_TEST_KILLS", "6"))
"""Rounds of the crash test: a few per commit, hundreds at night."""


class OpenStore(Protocol):
    """Opens the test's store; whatever a test opens is closed after it."""

    def __call__(self, **changes: object) -> BlockStore: ...


class StoreBehaviour:
    """Tests of the contract in `tiered_kv.contracts.store`.

    A subclass sets `opener` to a function of its module (child processes import it by name):

    ```python
    def open_mine(arguments: StoreArguments) -> BlockStore: ...


    class TestMine(StoreBehaviour):
        opener = staticmethod(open_mine)
    ```
    """

    @staticmethod
    def opener(arguments: StoreArguments) -> BlockStore:
        raise NotImplementedError

    capacity: ClassVar[int] = CAPACITY

    @pytest.fixture
    def arguments(self, tmp_path: Path) -> StoreArguments:
        return StoreArguments(tmp_path / "tier", self.capacity)

    @pytest.fixture
    def open_store(self, arguments: StoreArguments) -> Iterator[OpenStore]:
        opened: list[BlockStore] = []

        def open_it(**changes: object) -> BlockStore:
            store = type(self).opener(arguments.with_(**changes))
            opened.append(store)
            return store

        yield open_it
        for store in opened:
            store.close()

    # ------------------------------------------------------------------------- store and load

    def test_a_stored_block_comes_back_bit_for_bit(self, open_store: OpenStore) -> None:
        store = open_store()
        assert put(store, range(20)) == list(range(20))
        assert put(store, range(100, 105), length=ODD_BYTES) == list(range(100, 105))
        assert_held(store, range(20))
        assert_held(store, range(100, 105), length=ODD_BYTES)
        assert store.stat().blocks == 25

    def test_empty_batches_do_nothing(self, open_store: OpenStore) -> None:
        store = open_store()
        assert store.reserve([]) == []
        store.write([], [])
        store.publish([])
        store.abandon([])
        assert store.read([], []) == []
        assert store.contains([]) == []
        assert store.delete([]) == 0
        assert store.discard([]) == 0
        store.touch([])
        assert list(store.scan()) == []
        assert store.stat().blocks == 0

    def test_unknown_blocks_are_missing(self, open_store: OpenStore) -> None:
        store = open_store()
        put(store, [1])
        assert store.contains(keys([0, 1, 2])) == [False, True, False]
        read = get(store, [0, 1, 2])
        assert [r.result.status for r in read] == [
            BlockStatus.MISSING,
            BlockStatus.OK,
            BlockStatus.MISSING,
        ]
        assert read[0].result.checksum is None

    def test_memory_that_is_too_short_is_a_miss_and_stays_untouched(
        self, open_store: OpenStore
    ) -> None:
        store = open_store()
        put(store, [1])
        short = page_aligned(BLOCK_BYTES - 1)
        assert [r.status for r in store.read(keys([1]), [short])] == [BlockStatus.MISSING]
        assert not any(short)
        assert_held(store, [1])

    def test_longer_memory_is_filled_at_its_beginning_only(self, open_store: OpenStore) -> None:
        store = open_store()
        put(store, [1], length=ODD_BYTES)
        memory = page_aligned(4 * BLOCK_BYTES)
        (result,) = store.read(keys([1]), [memory])
        assert result.checksum is not None
        assert memory[:ODD_BYTES] == content(1, length=ODD_BYTES)
        assert not any(memory[BLOCK_BYTES:])

    def test_a_block_is_invisible_until_published(self, open_store: OpenStore) -> None:
        store, reader = open_store(), open_store()
        start = reader.changes(None).cursor
        (place,) = store.reserve([new_block(1)])
        assert place is not None
        assert reader.contains(keys([1])) == [False]
        store.write([place], [aligned_copy(content(1))])
        assert reader.contains(keys([1])) == [False]
        assert list(reader.scan()) == []
        assert reader.changes(start).changes == ()
        assert get(reader, [1])[0].result.status is BlockStatus.MISSING
        store.publish([place])
        assert reader.changes(start).changes == ((key(1), True),)
        assert_held(reader, [1])

    def test_an_abandoned_block_leaves_no_trace(self, open_store: OpenStore) -> None:
        store = open_store()
        start = store.changes(None).cursor
        rounds = 3 * self.capacity // (8 * BLOCK_BYTES)
        for _ in range(rounds):
            places = [p for p in store.reserve([new_block(n) for n in range(8)]) if p is not None]
            assert len(places) == 8
            store.write(places[:4], [aligned_copy(content(n)) for n in range(4)])
            store.abandon(places)
            store.abandon(places)
        print(f"{rounds * 8} blocks abandoned, three times the capacity")
        assert store.contains(keys(range(8))) == [False] * 8
        assert store.changes(start).changes == ()
        assert store.stat().evicted_blocks == 0
        put(store, range(8))
        assert_held(store, range(8))

    def test_a_published_block_is_not_stored_again(self, open_store: OpenStore) -> None:
        store = open_store()
        put(store, [1, 2])
        assert put(store, [1, 2, 3]) == [3]
        assert_held(store, [1, 2, 3])

    def test_of_two_writers_of_one_key_one_stays(self, open_store: OpenStore) -> None:
        one, two = open_store(), open_store()
        first = [p for p in one.reserve([new_block(1)]) if p is not None]
        second = [p for p in two.reserve([new_block(1)]) if p is not None]
        assert len(first) == len(second) == 1
        for store, places in ((one, first), (two, second)):
            store.write(places, [aligned_copy(content(1))])
        for store, places in ((one, first), (two, second)):
            store.publish(places)
        assert_held(one, [1])
        assert two.stat().blocks == 1
        assert two.delete(keys([1])) == 1
        assert one.contains(keys([1])) == [False]

    def test_a_key_twice_in_a_batch_is_stored_once(self, open_store: OpenStore) -> None:
        store = open_store()
        put(store, [1, 2, 1])
        assert_held(store, [1, 2])
        assert store.stat().blocks == 2

    # ----------------------------------------------------------------------------- visibility

    def test_a_block_is_visible_when_all_ranks_have_it(self, open_store: OpenStore) -> None:
        ranks = [open_store(rank=rank, world_size=2) for rank in range(2)]
        start = ranks[0].changes(None).cursor
        put(ranks[0], [1, 2], rank=0)
        for store in ranks:
            assert store.contains(keys([1, 2])) == [False, False]
            assert store.changes(start).changes == ()
        put(ranks[1], [2], rank=1)
        for rank, store in enumerate(ranks):
            assert store.contains(keys([1, 2])) == [False, True]
            assert list(store.scan()) == keys([2])
            assert store.changes(start).changes == ((key(2), True),)
            assert_held(store, [2], rank)

    def test_deletion_takes_all_ranks_parts(self, open_store: OpenStore) -> None:
        ranks = [open_store(rank=rank, world_size=2) for rank in range(2)]
        for rank, store in enumerate(ranks):
            put(store, [1, 2], rank)
        assert ranks[0].delete(keys([1, 7])) == 1
        for rank, store in enumerate(ranks):
            assert store.contains(keys([1, 2])) == [False, True]
            assert get(store, [1], rank)[0].result.status is BlockStatus.MISSING
            assert put(store, [1], rank) == [1]
        assert_held(ranks[1], [1, 2], 1)

    def test_namespaces_are_apart(self, open_store: OpenStore) -> None:
        mine, theirs = open_store(), open_store(namespace=OTHER_NAMESPACE)
        start = theirs.changes(None).cursor
        put(mine, [1, 2])
        assert theirs.contains(keys([1, 2])) == [False, False]
        assert list(theirs.scan()) == []
        assert theirs.changes(start).changes == ()
        assert theirs.delete(keys([1])) == 0
        assert get(theirs, [1])[0].result.status is BlockStatus.MISSING
        assert_held(mine, [1, 2])

    def test_discard_needs_the_same_checksum(self, open_store: OpenStore) -> None:
        store = open_store()
        put(store, [1, 2])
        other = new_block(1, length=ODD_BYTES)
        assert store.discard([other]) == 0
        assert_held(store, [1])
        assert store.discard([new_block(1), new_block(5)]) == 1
        assert store.contains(keys([1, 2])) == [False, True]
        assert put(store, [1]) == [1]
        assert_held(store, [1, 2])

    def test_changes_and_scan_agree(self, open_store: OpenStore) -> None:
        store, follower = open_store(), open_store(writable=False)
        cursor = follower.changes(None).cursor
        assert follower.changes(cursor) == ChangeBatch(cursor, ())
        known: set[BlockKey] = set()
        choice = random.Random(7)
        for _ in range(20):
            if choice.random() < 0.6:
                put(store, [choice.randrange(40) for _ in range(4)])
            else:
                store.delete(keys(choice.randrange(40) for _ in range(3)))
            batch = follower.changes(cursor)
            assert not batch.restart
            for name, added in batch.changes:
                assert (name in known) is not added
                (known.add if added else known.remove)(name)
            cursor = batch.cursor
            assert known == set(follower.scan())
        print(f"{len(known)} blocks after 20 rounds")
        assert known

    def test_an_unknown_cursor_asks_for_a_restart(self, open_store: OpenStore) -> None:
        store = open_store()
        put(store, [1])
        now = store.changes(None).cursor
        for cursor in (now + 10**9, 0):
            batch = store.changes(cursor)
            assert batch.restart
            assert batch.cursor == now
            assert batch.changes == ()

    def test_a_store_opened_for_following_refuses_to_write(self, open_store: OpenStore) -> None:
        store = open_store()
        put(store, [1])
        follower = open_store(writable=False)
        for call in (
            lambda: follower.reserve([new_block(2)]),
            lambda: follower.delete(keys([1])),
            lambda: follower.discard([new_block(1)]),
        ):
            with pytest.raises(ValueError, match="read"):
                call()
        assert_held(follower, [1])

    # ------------------------------------------------------------------------------ the budget

    def test_the_directory_never_outgrows_its_budget(
        self, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        store = open_store()
        batch = 8
        rounds = 4 * self.capacity // (batch * BLOCK_BYTES)
        largest = 0
        for number in range(rounds):
            if number == rounds // 2:
                store.close()
                store = open_store()
            numbers = range(number * batch, (number + 1) * batch)
            put(store, numbers)
            assert_held(store, numbers)
            largest = max(largest, disk_bytes(arguments.path))
            assert largest <= self.capacity + batch * BLOCK_BYTES
        held = store.stat().blocks
        print(
            f"{rounds * batch} blocks of {BLOCK_BYTES} bytes stored, {held} held, at most "
            f"{largest} of {self.capacity} bytes on the disk"
        )
        assert largest <= self.capacity
        assert held * BLOCK_BYTES > self.capacity // 2
        assert store.stat().evicted_blocks > 0
        assert store.stat().used_bytes <= self.capacity

    def test_the_least_recently_used_go_first(self, open_store: OpenStore) -> None:
        store = open_store()
        put(store, range(8))
        beyond = 2 * self.capacity // BLOCK_BYTES
        for number in range(8, beyond, 4):
            store.touch(keys(range(4)))
            put(store, range(number, number + 4))
        assert store.stat().evicted_blocks > 0
        assert_held(store, range(4))
        assert not any(store.contains(keys(range(4, 8))))

    def test_a_batch_that_can_never_fit_is_refused_whole(self, open_store: OpenStore) -> None:
        store = open_store()
        put(store, range(4))
        many = 2 * self.capacity // BLOCK_BYTES
        with pytest.raises(NoSpace):
            store.reserve([new_block(n) for n in range(100, 100 + many)])
        assert put(store, [200, 201]) == [200, 201]
        assert_held(store, [200, 201])

    def test_evicted_blocks_lose_all_ranks_parts(self, open_store: OpenStore) -> None:
        ranks = [open_store(rank=rank, world_size=2) for rank in range(2)]
        for first in range(0, 2 * self.capacity // BLOCK_BYTES, 8):
            for rank, store in enumerate(ranks):
                put(store, range(first, first + 8), rank)
        whole = list(ranks[0].scan())
        evicted = sum(store.stat().evicted_blocks for store in ranks)
        print(f"{len(whole)} whole blocks held, {evicted} evicted")
        assert evicted > 0
        assert len(whole) > 8
        for rank, store in enumerate(ranks):
            results = store.read(whole, [page_aligned(BLOCK_BYTES) for _ in whole])
            assert {result.status for result in results} == {BlockStatus.OK}, rank

    # ------------------------------------------------------------------------------ start, stop

    def test_blocks_survive_a_restart(self, open_store: OpenStore) -> None:
        store = open_store()
        put(store, range(10))
        store.delete(keys([3]))
        store.close()
        store.close()
        store = open_store()
        assert store.contains(keys([3])) == [False]
        held = [n for n in range(10) if n != 3]
        assert_held(store, held)
        assert sorted(store.scan()) == sorted(keys(held))

    def test_files_are_private(self, open_store: OpenStore, arguments: StoreArguments) -> None:
        put(open_store(), range(4))
        found = [arguments.path, *arguments.path.rglob("*")]
        assert len(found) > 1
        for file in found:
            mode = stat.S_IMODE(file.stat().st_mode)
            assert mode == (0o700 if file.is_dir() else 0o600), file

    def test_committed_blocks_survive_sigkill_and_nothing_is_torn(
        self, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        """A child stores without end and is killed at random points, `KILLS` times."""
        context = multiprocessing.get_context("spawn")
        choice = random.Random(11)
        committed: set[int] = set()
        sizes: list[int] = []
        first = 0
        for _ in range(KILLS):
            ours, theirs = context.Pipe()
            child = context.Process(
                target=store_for_ever, args=(type(self).opener, arguments, first, theirs)
            )
            child.start()
            theirs.close()
            for _ in range(choice.randrange(3, 20)):
                committed.update(ours.recv())
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            try:
                while True:
                    committed.update(ours.recv())
            except EOFError:
                child.join()
            first = max(committed) + 1
            store = open_store()
            visible = [n for n in range(first + 8) if store.contains([key(n)])[0]]
            for read in get(store, visible):
                assert read.sound
            evictable = set(range(first - self.capacity // (4 * BLOCK_BYTES), first))
            lost = (committed & evictable) - set(visible)
            assert not lost
            assert put(store, [10**6 + first]) == [10**6 + first]
            store.close()
            sizes.append(disk_bytes(arguments.path))
        print(f"{KILLS} kills, {len(committed)} blocks committed, bytes on disk {sizes}")
        assert max(sizes) <= self.capacity

    def test_processes_that_store_the_same_keys(
        self, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        context = multiprocessing.get_context("spawn")
        children = [
            context.Process(target=store_shuffled, args=(type(self).opener, arguments, seed))
            for seed in range(3)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [0] * len(children)
        store = open_store()
        assert store.stat().blocks == SHARED_KEYS
        assert_held(store, range(SHARED_KEYS))

    def test_another_process_sees_and_is_seen(
        self, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        store = open_store()
        put(store, range(5))
        cursor = store.changes(None).cursor
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=replace_blocks, args=(type(self).opener, arguments))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        batch = store.changes(cursor)
        assert dict(batch.changes) == {key(0): False, key(1): False, key(50): True}
        assert store.contains(keys([0, 1, 2, 50])) == [False, False, True, True]
        assert_held(store, [2, 3, 4, 50])

    def test_use_after_fork_is_refused_and_harms_nobody(self, open_store: OpenStore) -> None:
        store = open_store()
        put(store, range(4))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                store.contains(keys([1]))
            except TierError as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        put(store, range(4, 8))
        assert_held(store, range(8))

    def test_nonsense_is_refused(self, open_store: OpenStore) -> None:
        store = open_store()
        (place,) = store.reserve([new_block(1)])
        assert place is not None
        with pytest.raises(ValueError, match="1 places"):
            store.write([place], [])
        with pytest.raises(ValueError, match=str(BLOCK_BYTES)):
            store.write([place], [page_aligned(100)])
        with pytest.raises(ValueError, match="2 keys"):
            store.read(keys([1, 2]), [page_aligned(BLOCK_BYTES)])
        store.abandon([place])
        store.close()
        with pytest.raises(TierError, match="closed"):
            store.contains(keys([1]))


SHARED_KEYS = 60


def store_for_ever(opener: Opener, arguments: StoreArguments, first: int, out: Connection) -> None:
    """Child process: stores batches and sends the numbers after each is published."""
    store = opener(arguments)
    while True:
        numbers = list(range(first, first + 4))
        put(store, numbers)
        out.send(numbers)
        first += 4


def store_shuffled(opener: Opener, arguments: StoreArguments, seed: int) -> None:
    """Child process: stores `SHARED_KEYS` blocks in an order of its own."""
    store = opener(arguments)
    numbers = list(range(SHARED_KEYS))
    random.Random(seed).shuffle(numbers)
    for start in range(0, SHARED_KEYS, 6):
        put(store, numbers[start : start + 6])
    assert_held(store, numbers)
    store.close()


def replace_blocks(opener: Opener, arguments: StoreArguments) -> None:
    """Child process: removes blocks 0 and 1, stores 50."""
    store = opener(arguments)
    assert_held(store, range(5))
    assert store.delete(keys([0, 1])) == 2
    put(store, [50])
    store.close()


__all__ = ["NAMESPACE", "OpenStore", "Opener", "StoreBehaviour"]
