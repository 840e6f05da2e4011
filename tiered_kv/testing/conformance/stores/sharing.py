"""One directory, several owners: ranks, namespaces, threads, processes."""

from __future__ import annotations

import os
import threading

from tiered_kv.errors import TierError
from tiered_kv.testing.conformance.blocks import (
    OTHER_NAMESPACE,
    StoreArguments,
    assert_held,
    get,
    key,
    keys,
    new_block,
    put,
)
from tiered_kv.testing.conformance.children import replace_blocks, start, store_shuffled
from tiered_kv.testing.conformance.contract import StorePromise, owe
from tiered_kv.testing.conformance.stores.case import OpenStore, StoreCase, StoreFixtures
from tiered_kv.testing.conformance.stores.following import KeyMirror
from tiered_kv.values import BlockStatus, Fingerprint, Namespace

__all__ = ["SharingChecks"]

PROCESSES = 3
SHARED_KEYS = 60
LATE_SECONDS = 60.0


class SharingChecks(StoreFixtures):
    """Who sees whose blocks."""

    def test_a_block_is_visible_when_all_ranks_have_it(self, open_store: OpenStore) -> None:
        """F7: the part of one rank alone is visible to nobody, by no method."""
        ranks = [open_store(rank=rank, world_size=2) for rank in range(2)]
        mirrors = [KeyMirror(store) for store in ranks]
        put(ranks[0], [1, 2], rank=0)
        for store, mirror in zip(ranks, mirrors, strict=True):
            seen = store.contains(keys([1, 2]))
            owe(seen == [False, False], StorePromise.ALL_RANKS, f"contains: {seen} with one rank")
            owe(list(store.scan()) == [], StorePromise.ALL_RANKS, "scan finds half a block")
            owe(mirror.follow() == set(), StorePromise.ALL_RANKS, "changes tell half a block")
            owe(store.stat().blocks == 0, StorePromise.ALL_RANKS, "stat counts half a block")
        put(ranks[1], [2], rank=1)
        for rank, (store, mirror) in enumerate(zip(ranks, mirrors, strict=True)):
            seen = store.contains(keys([1, 2]))
            owe(seen == [False, True], StorePromise.ALL_RANKS, f"contains: {seen} with both ranks")
            owe(list(store.scan()) == keys([2]), StorePromise.ALL_RANKS, "scan finds others")
            owe(mirror.follow() == {key(2)}, StorePromise.ALL_RANKS, "changes tell others")
            assert_held(store, [2], rank)
        owe(
            put(ranks[0], [1, 2], 0) == [] and put(ranks[1], [1, 2], 1) == [1],
            StorePromise.ALREADY,
            "the parts of the other rank were taken for this rank's",
        )
        assert_held(ranks[0], [1, 2], 0)

    def test_removal_takes_all_ranks_parts(self, open_store: OpenStore) -> None:
        """Deleted or discarded by one rank, a block is to be stored again by both."""
        ranks = [open_store(rank=rank, world_size=2) for rank in range(2)]
        for rank, store in enumerate(ranks):
            put(store, [1, 2, 3], rank)
        deleted = ranks[0].delete(keys([1, 7]))
        owe(deleted == 1, StorePromise.DELETE, f"{deleted} were counted of 1")
        dropped = ranks[1].discard([new_block(2, rank=1), new_block(3, rank=0)])
        owe(dropped == 1, StorePromise.DISCARD, f"{dropped} were counted of 1")
        for rank, store in enumerate(ranks):
            seen = store.contains(keys([1, 2, 3]))
            owe(seen == [False, False, True], StorePromise.DELETE, f"contains: {seen}")
            statuses = {read.result.status for read in get(store, [1, 2], rank)}
            owe(
                statuses == {BlockStatus.MISSING},
                StorePromise.DELETE,
                f"rank {rank} reads its parts of removed blocks as {statuses}",
            )
            owe(put(store, [1, 2], rank) == [1, 2], StorePromise.DELETE, "a part had stayed")
        for rank, store in enumerate(ranks):
            assert_held(store, [1, 2, 3], rank)

    def test_namespaces_are_apart(self, open_store: OpenStore) -> None:
        """F4: one field of the fingerprint, or the epoch, differs: always a miss, and nobody
        removes another's blocks."""
        mine = open_store()
        put(mine, [1, 2])
        fingerprint = {"model": "tests/tiny", "dtype": "bfloat16"}
        others = [
            OTHER_NAMESPACE,
            Namespace(Fingerprint.of(fingerprint | {"dtype": "float16"})),
            Namespace(Fingerprint.of(fingerprint | {"layout": "packed"})),
            Namespace(Fingerprint.of(fingerprint), epoch=b"after a reset"),
        ]
        for number, namespace in enumerate(others):
            theirs = open_store(namespace=namespace)
            mirror = KeyMirror(theirs)
            seen = theirs.contains(keys([1, 2]))
            owe(not any(seen), StorePromise.ONE_NAMESPACE, f"contains: {seen} in {namespace}")
            owe(mirror.keys == set(), StorePromise.ONE_NAMESPACE, f"scan finds in {namespace}")
            statuses = {read.result.status for read in get(theirs, [1, 2])}
            owe(
                statuses == {BlockStatus.MISSING},
                StorePromise.ONE_NAMESPACE,
                f"read answered {statuses} in {namespace}",
            )
            removed = theirs.delete(keys([1])) + theirs.discard([new_block(2)])
            owe(removed == 0, StorePromise.ONE_NAMESPACE, f"{removed} removed by {namespace}")
            put(theirs, [100 + number])
            owe(theirs.stat().blocks == 1, StorePromise.STAT_BLOCKS, f"stat in {namespace}")
            owe(mirror.follow() == {key(100 + number)}, StorePromise.CHANGES, f"in {namespace}")
        assert_held(mine, [1, 2])
        owe(mine.stat().blocks == 2, StorePromise.STAT_BLOCKS, "others' blocks are counted")

    def test_threads_may_use_one_store_at_once(self, open_store: OpenStore) -> None:
        """Four threads store, read, touch and delete their own blocks, and store shared ones."""
        store = open_store()
        troubles: list[str] = []
        together = threading.Barrier(4)

        def work(which: int) -> None:
            own = 1000 * (which + 1)
            try:
                together.wait(LATE_SECONDS)
                for first in range(own, own + 24, 4):
                    put(store, range(first, first + 4))
                    assert_held(store, range(first, first + 4))
                    put(store, range(first - own, first - own + 4))
                    store.touch(keys([first]))
                    if store.delete(keys([first, first + 1])) != 2:
                        troubles.append(f"thread {which} did not delete its own blocks")
                    store.stat()
            except Exception as error:  # noqa: BLE001 - a thread tells of every failure
                troubles.append(f"thread {which}: {error!r}")

        threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LATE_SECONDS)
        owe(not troubles, StorePromise.THREADS, f"{len(troubles)} failures: {troubles[:3]}")
        shared = list(range(24))
        own = [1000 * w + n for w in range(1, 5) for n in range(24) if n % 4 >= 2]
        assert_held(store, shared + own)
        owe(
            store.stat().blocks == len(shared) + len(own) == len(list(store.scan())),
            StorePromise.THREADS,
            f"{store.stat().blocks} blocks are told, {len(shared) + len(own)} were stored",
        )

    def test_processes_that_store_the_same_keys(
        self, case: StoreCase, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        """F33: several processes store the same keys in orders of their own; each is there
        once."""
        case.needs("shared_between_processes")
        children = [
            start(store_shuffled, case.open, arguments, SHARED_KEYS, seed)
            for seed in range(PROCESSES)
        ]
        for child in children:
            child.join(LATE_SECONDS)
        codes = [child.exitcode for child in children]
        owe(codes == [0] * PROCESSES, StorePromise.PROCESSES, f"the processes ended with {codes}")
        store = open_store()
        owe(
            store.stat().blocks == SHARED_KEYS == len(list(store.scan())),
            StorePromise.TWO_WRITERS,
            f"{store.stat().blocks} blocks are there of {SHARED_KEYS} keys",
        )
        assert_held(store, range(SHARED_KEYS))

    def test_another_process_sees_and_is_seen(
        self, case: StoreCase, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        """It finds our blocks, removes two and adds one; we follow."""
        case.needs("shared_between_processes")
        store = open_store()
        put(store, range(5))
        mirror = KeyMirror(store)
        child = start(replace_blocks, case.open, arguments)
        child.join(LATE_SECONDS)
        owe(child.exitcode == 0, StorePromise.PROCESSES, f"the process ended with {child.exitcode}")
        owe(
            mirror.follow() == set(keys([2, 3, 4, 50])) == set(store.scan()),
            StorePromise.PROCESSES,
            f"{len(mirror.keys)} keys are known of 4 after the other process's changes",
        )
        seen = store.contains(keys([0, 1, 2, 50]))
        owe(seen == [False, False, True, True], StorePromise.PROCESSES, f"contains: {seen}")
        assert_held(store, [2, 3, 4, 50])

    def test_use_after_fork_is_refused_and_harms_nobody(
        self, case: StoreCase, open_store: OpenStore
    ) -> None:
        """F37: the child gets an error that names the fork; the parent goes on."""
        case.needs("guards_fork")
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
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        owe(
            code == 0,
            StorePromise.ERRORS,
            "a forked child could use the store"
            if code == 1
            else f"the forked child's error does not say why (code {code})",
        )
        put(store, range(4, 8))
        assert_held(store, range(8))
