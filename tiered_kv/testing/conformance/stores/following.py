"""Removing blocks, and following what was added and removed."""

from __future__ import annotations

import random

from tiered_kv.contracts import BlockStore, ChangeBatch
from tiered_kv.testing.conformance.blocks import (
    ODD_BYTES,
    aligned_copy,
    assert_held,
    content,
    get,
    key,
    keys,
    new_block,
    put,
    reserved,
)
from tiered_kv.testing.conformance.contract import StorePromise, owe
from tiered_kv.testing.conformance.stores.case import OpenStore, StoreCase, StoreFixtures
from tiered_kv.values import BlockKey, BlockStatus

__all__ = ["FollowingChecks", "KeyMirror"]


class KeyMirror:
    """The visible keys as a follower knows them: from a scan, and what `changes` told since."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self.restarts = 0
        self.told = 0
        self._fill(store.changes(None))

    def _fill(self, batch: ChangeBatch) -> None:
        owe(batch.changes == (), StorePromise.CHANGES, f"{batch.changes} came without a cursor")
        self._cursor = batch.cursor
        self.keys = set(self._store.scan())

    def follow(self) -> set[BlockKey]:
        """Ask for news; all keys then."""
        batch = self._store.changes(self._cursor)
        if batch.restart:
            self.restarts += 1
            self._fill(ChangeBatch(batch.cursor, batch.changes))
            return self.keys
        for name, added in batch.changes:
            self.told += 1
            owe(
                (name in self.keys) is not added,
                StorePromise.CHANGE_ORDER,
                f"({name.hex()}, {added}) was told of a key that was "
                f"{'there' if name in self.keys else 'not there'}",
            )
            (self.keys.add if added else self.keys.remove)(name)
        self._cursor = batch.cursor
        return self.keys


class FollowingChecks(StoreFixtures):
    """`discard`, `delete`, `touch`, `scan`, `changes`."""

    def test_delete_drops_and_counts(self, open_store: OpenStore) -> None:
        """The count is of those that were there; they can be stored again."""
        store = open_store()
        put(store, range(4))
        deleted = store.delete(keys([1, 9, 2]))
        owe(deleted == 2, StorePromise.DELETE, f"{deleted} were counted of 2")
        seen = store.contains(keys(range(4)))
        owe(seen == [True, False, False, True], StorePromise.DELETE, f"contains: {seen}")
        statuses = {read.result.status for read in get(store, [1, 2])}
        owe(statuses == {BlockStatus.MISSING}, StorePromise.DELETE, f"read: {statuses}")
        deleted = store.delete(keys([1, 2]))
        owe(deleted == 0, StorePromise.DELETE, f"{deleted} were counted the second time")
        owe(put(store, [1, 2]) == [1, 2], StorePromise.ALREADY, "deleted blocks count as published")
        assert_held(store, range(4))

    def test_discard_needs_the_same_checksum(self, open_store: OpenStore) -> None:
        """A block that was replaced meanwhile, or has another length, stays."""
        store = open_store()
        put(store, [1, 2])
        dropped = store.discard([new_block(1, length=ODD_BYTES), new_block(1, rank=3)])
        owe(dropped == 0, StorePromise.DISCARD, f"{dropped} blocks of other checksums were dropped")
        assert_held(store, [1, 2])
        dropped = store.discard([new_block(1), new_block(5)])
        owe(dropped == 1, StorePromise.DISCARD, f"{dropped} were counted of 1")
        seen = store.contains(keys([1, 2]))
        owe(seen == [False, True], StorePromise.DISCARD, f"contains: {seen}")
        owe(put(store, [1]) == [1], StorePromise.ALREADY, "a discarded block counts as published")
        assert_held(store, [1, 2])

    def test_touching_changes_nothing_visible(self, open_store: OpenStore) -> None:
        """Known and unknown keys may be touched."""
        store = open_store()
        put(store, range(3))
        mirror = KeyMirror(store)
        store.touch(keys([2, 0, 77, 2]))
        owe(mirror.follow() == set(keys(range(3))), StorePromise.TOUCH, "other keys are visible")
        assert_held(store, range(3))

    def test_scan_gives_every_visible_key_once(self, open_store: OpenStore) -> None:
        """Published ones; not reserved, written, abandoned or deleted ones."""
        store = open_store()
        put(store, range(30))
        put(store, range(100, 110), length=ODD_BYTES)
        store.delete(keys([3, 101]))
        places = reserved(store, [new_block(n) for n in (200, 201)])
        store.write(places[1:], [aligned_copy(content(201))])
        found = list(store.scan())
        expected = keys(n for n in (*range(30), *range(100, 110)) if n not in {3, 101})
        owe(
            sorted(found) == sorted(expected),
            StorePromise.SCAN,
            f"{len(found)} keys ({len(set(found))} different) were found, expected {len(expected)}",
        )
        store.abandon(places)

    def test_changes_begin_now(self, open_store: OpenStore) -> None:
        """Without a cursor nothing is told; nothing new, nothing told."""
        store, follower = open_store(), open_store(writable=False)
        put(store, [1])
        start = follower.changes(None)
        owe(
            start == ChangeBatch(start.cursor, ()),
            StorePromise.CHANGES,
            f"{start} came without a cursor",
        )
        again = follower.changes(start.cursor)
        owe(
            again.changes == () and not again.restart,
            StorePromise.CHANGES,
            f"{again} came although nothing had changed",
        )

    def test_changes_tell_each_step_in_order(self, case: StoreCase, open_store: OpenStore) -> None:
        """Reserving, writing and abandoning are none; the log is told as it happened."""
        case.needs("keeps_log")
        store, follower = open_store(), open_store(writable=False)
        cursor = follower.changes(None).cursor
        places = reserved(store, [new_block(1), new_block(2)])
        store.write(places, [aligned_copy(content(n)) for n in (1, 2)])
        owe(follower.changes(cursor).changes == (), StorePromise.PUBLISH, "unpublished was told")
        store.publish(places[:1])
        store.abandon(places[1:])
        put(store, [3])
        store.delete(keys([1, 8]))
        put(store, [1])
        store.discard([new_block(3)])
        told = follower.changes(cursor)
        expected = ((key(1), True), (key(3), True), (key(1), False), (key(1), True))
        owe(
            told.changes == (*expected, (key(3), False)),
            StorePromise.CHANGE_ORDER,
            f"5 changes were told as {[(k.hex()[:6], added) for k, added in told.changes]}",
        )

    def test_a_mirror_of_scan_and_changes_is_the_truth(self, open_store: OpenStore) -> None:
        """Twenty random rounds of storing and deleting, followed by another store."""
        store = open_store()
        mirror = KeyMirror(open_store(writable=False))
        choice = random.Random(7)
        for _ in range(20):
            if choice.random() < 0.6:
                put(store, [choice.randrange(40) for _ in range(4)], length=ODD_BYTES)
            else:
                store.delete(keys(choice.randrange(40) for _ in range(3)))
            owe(
                mirror.follow() == set(store.scan()),
                StorePromise.CHANGES,
                "a follower that was told all changes knows other keys than a scan finds",
            )
        print(f"{mirror.told} changes told, {mirror.restarts} restarts, {len(mirror.keys)} left")
        owe(
            mirror.told + mirror.restarts > 0 and mirror.keys,
            StorePromise.CHANGES,
            "nothing was told of 20 rounds",
        )

    def test_an_unknown_cursor_asks_for_a_restart(self, open_store: OpenStore) -> None:
        """One from another life, and one that no log reaches back to."""
        store = open_store()
        put(store, [1])
        now = store.changes(None).cursor
        for cursor in (now + 10**9, -1):
            batch = store.changes(cursor)
            owe(
                batch.restart and batch.changes == (),
                StorePromise.RESTART,
                f"cursor {cursor} was answered with {batch}; now is {now}",
            )
            after = store.changes(batch.cursor)
            owe(
                not after.restart and after.changes == (),
                StorePromise.RESTART,
                f"the cursor of that answer does not go on: {after}",
            )
