"""Visible means whole: every interruption of reserve, write, publish and abandon."""

from __future__ import annotations

import pytest

from tiered_kv.contracts import BlockStore
from tiered_kv.errors import NoSpace, TieredKVError
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    StoreArguments,
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
from tiered_kv.testing.conformance.contract import BrokenPromise, StorePromise, owe, refused
from tiered_kv.testing.conformance.stores.case import OpenStore, StoreCase, StoreFixtures
from tiered_kv.values import BlockStatus

__all__ = ["PublishingChecks"]


def _assert_invisible(store: BlockStore, numbers: list[int], promise: StorePromise) -> None:
    seen = [n for n, there in zip(numbers, store.contains(keys(numbers)), strict=True) if there]
    owe(not seen, promise, f"contains finds blocks {seen}")
    scanned = set(store.scan()) & set(keys(numbers))
    owe(not scanned, promise, f"scan finds {len(scanned)} of blocks {numbers}")
    statuses = {read.result.status for read in get(store, numbers)}
    owe(statuses == {BlockStatus.MISSING}, promise, f"read answered {statuses}")


class PublishingChecks(StoreFixtures):
    """F2: a block can be found only when all its bytes are written and it was published."""

    def test_a_block_is_invisible_until_published(self, open_store: OpenStore) -> None:
        """Looked for after each step, from the same store and from another."""
        store, other = open_store(), open_store()
        (place,) = reserved(store, [new_block(1)])
        for viewer in (store, other):
            _assert_invisible(viewer, [1], StorePromise.PUBLISH)
        store.write([place], [aligned_copy(content(1))])
        for viewer in (store, other):
            _assert_invisible(viewer, [1], StorePromise.PUBLISH)
        store.publish([place])
        for viewer in (store, other):
            assert_held(viewer, [1])

    def test_a_place_that_was_not_written_cannot_be_published(self, open_store: OpenStore) -> None:
        """Not alone and not in a batch with written ones; the written ones can be, afterwards."""
        store = open_store()
        unwritten, written = reserved(store, [new_block(1), new_block(2)])
        store.write([written], [aligned_copy(content(2))])
        refused(lambda: store.publish([unwritten]), ValueError, StorePromise.PUBLISH_WRITTEN)
        refused(
            lambda: store.publish([written, unwritten]), ValueError, StorePromise.PUBLISH_WRITTEN
        )
        _assert_invisible(store, [1, 2], StorePromise.PUBLISH_WRITTEN)
        store.abandon([unwritten])
        store.publish([written])
        assert_held(store, [2])
        owe(put(store, [1]) == [1], StorePromise.ABANDON, "its place was not given again")

    def test_an_abandoned_block_leaves_no_trace(
        self, case: StoreCase, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        """Three times the capacity is reserved, half written, and abandoned, twice each; nothing
        has to be evicted for it, and nothing is found of it."""
        store = open_store()
        put(store, [1000])
        rounds = 3 * arguments.capacity // (8 * BLOCK_BYTES)
        for number in range(rounds):
            try:
                places = reserved(store, [new_block(n) for n in range(8)])
            except NoSpace as error:
                found = f"there is no room after {number} rounds: {error}"
                raise BrokenPromise.of(StorePromise.ABANDON, found) from error
            store.write(places[:4], [aligned_copy(content(n)) for n in range(4)])
            store.abandon(places)
            store.abandon(places)
        print(f"{rounds * 8} blocks abandoned, three times the capacity")
        _assert_invisible(store, list(range(8)), StorePromise.ABANDON)
        if case.bounded:
            evicted = store.stat().evicted_blocks
            owe(evicted == 0, StorePromise.ABANDON, f"{evicted} blocks were evicted for it")
        owe(
            put(store, range(8)) == list(range(8)),
            StorePromise.ABANDON,
            "an abandoned block counts as published",
        )
        assert_held(store, [*range(8), 1000])

    def test_part_of_a_batch_may_be_published_and_the_rest_abandoned(
        self, open_store: OpenStore
    ) -> None:
        """Places of one `reserve` have fates of their own."""
        store = open_store()
        places = reserved(store, [new_block(n) for n in range(6)])
        store.write(places[1:5], [aligned_copy(content(n)) for n in range(1, 5)])
        store.publish([places[4], places[2]])
        store.abandon([places[n] for n in (0, 1, 3, 5)])
        _assert_invisible(store, [0, 1, 3, 5], StorePromise.ABANDON)
        assert_held(store, [2, 4])

    @pytest.mark.parametrize("stage", ["reserved", "written", "published"])
    def test_closing_between_two_steps_leaves_whole_blocks_only(
        self, case: StoreCase, open_store: OpenStore, arguments: StoreArguments, stage: str
    ) -> None:
        """A store is closed with places in flight, and opened again: what was published is there,
        the rest is not, and its room is free."""
        case.needs("reopens")
        store = open_store()
        put(store, [100])
        count = arguments.capacity // (3 * BLOCK_BYTES)
        numbers = list(range(count))
        places = reserved(store, [new_block(n) for n in numbers])
        if stage != "reserved":
            store.write(places, [aligned_copy(content(n)) for n in numbers])
        if stage == "published":
            store.publish(places)
        store.close()
        store = open_store()
        assert_held(store, [100])
        if stage == "published":
            assert_held(store, numbers)
        else:
            _assert_invisible(store, numbers, StorePromise.NOTHING_BEHIND)
            put(store, numbers)
            assert_held(store, [100, *numbers])
            owe(
                store.stat().evicted_blocks == 0,
                StorePromise.NOTHING_BEHIND,
                f"{store.stat().evicted_blocks} blocks were evicted for a third of the capacity",
            )

    def test_a_published_block_is_not_stored_again(self, open_store: OpenStore) -> None:
        """`reserve` answers None for it, at its place in the batch; also under other bytes."""
        store = open_store()
        put(store, [1, 2])
        blocks = [new_block(1), new_block(3), new_block(2, length=100)]
        answers = store.reserve(blocks)
        given = [place is not None for place in answers]
        owe(given == [False, True, False], StorePromise.ALREADY, f"places were given as {given}")
        store.abandon([place for place in answers if place is not None])
        assert_held(store, [1, 2])

    def test_of_two_writers_of_one_key_one_stays(self, open_store: OpenStore) -> None:
        """F33. Both reserve and write before either publishes; both may go on."""
        one, two = open_store(), open_store()
        first = reserved(one, [new_block(1), new_block(2)])
        second = reserved(two, [new_block(2), new_block(1)])
        one.write(first, [aligned_copy(content(1)), aligned_copy(content(2))])
        two.write(second, [aligned_copy(content(2)), aligned_copy(content(1))])
        one.publish(first)
        two.publish(second)
        for store in (one, two):
            assert_held(store, [1, 2])
            owe(
                (store.stat().blocks, sorted(store.scan())) == (2, sorted(keys([1, 2]))),
                StorePromise.TWO_WRITERS,
                f"there are {store.stat().blocks} blocks of 2 keys",
            )
        owe(two.delete(keys([1])) == 1, StorePromise.DELETE, "not one block was deleted")
        owe(
            one.contains(keys([1, 2])) == [False, True],
            StorePromise.TWO_WRITERS,
            "the other writer's block is still there after the key was deleted",
        )

    def test_a_writer_that_gives_up_does_not_take_the_others_block(
        self, open_store: OpenStore
    ) -> None:
        """Two write one key; one publishes, the other abandons."""
        one, two = open_store(), open_store()
        first, second = reserved(one, [new_block(1)]), reserved(two, [new_block(1)])
        for store, places in ((one, first), (two, second)):
            store.write(places, [aligned_copy(content(1))])
        one.publish(first)
        two.abandon(second)
        for store in (one, two):
            assert_held(store, [1])

    def test_a_key_twice_in_a_batch_is_stored_once(self, open_store: OpenStore) -> None:
        """Whatever `reserve` answers for the second, the block is there, once."""
        store = open_store()
        put(store, [1, 2, 1])
        assert_held(store, [1, 2])
        owe(store.stat().blocks == 2, StorePromise.STAT_BLOCKS, f"stat: {store.stat().blocks}")

    def test_a_place_is_published_once(self, open_store: OpenStore) -> None:
        """Publishing or abandoning a place again neither harms its block nor brings it back."""
        store = open_store()
        places = reserved(store, [new_block(1)])
        store.write(places, [aligned_copy(content(1))])
        store.publish(places)
        store.abandon(places)
        assert_held(store, [1])
        store.delete([key(1)])
        try:
            store.publish(places)
        except (ValueError, TieredKVError) as error:
            print(f"refused: {error}")
        _assert_invisible(store, [1], StorePromise.DELETE)
