"""Bytes in, the same bytes out; and arguments that break the contract."""

from __future__ import annotations

import pytest

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import NewBlock, ReadResult
from tiered_kv.errors import TierError
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    ODD_BYTES,
    StoreArguments,
    aligned_copy,
    assert_held,
    content,
    get,
    key,
    keys,
    new_block,
    page_aligned,
    put,
    reserved,
)
from tiered_kv.testing.conformance.contract import StorePromise, owe, refused
from tiered_kv.testing.conformance.stores.case import OpenStore, StoreCase, StoreFixtures
from tiered_kv.values import BlockStatus, ChecksumKind

__all__ = ["ReadingChecks"]

POISON = 0xA5
PAGE = 4096


class ReadingChecks(StoreFixtures):
    """What comes out of a store, and what is refused at its door."""

    def test_a_stored_block_comes_back_bit_for_bit(self, open_store: OpenStore) -> None:
        """Blocks of two KV groups, stored and read in batches."""
        store = open_store()
        owe(
            put(store, range(20)) == list(range(20)),
            StorePromise.ALREADY,
            "a new block was answered with None",
        )
        put(store, range(100, 105), length=ODD_BYTES)
        assert_held(store, range(20))
        assert_held(store, range(100, 105), length=ODD_BYTES)
        assert_held(store, [19, 3, 11])

    def test_empty_batches_do_nothing(self, open_store: OpenStore) -> None:
        """F50. Every method takes an empty batch."""
        store = open_store()
        before = store.stat().blocks
        store.write([], [])
        store.publish([])
        store.abandon([])
        store.touch([])
        answers = (store.reserve([]), store.contains([]), store.read([], []))
        counts = (store.delete([]), store.discard([]))
        owe(answers == ([], [], []), StorePromise.EMPTY, f"the answers were {answers}")
        owe(counts == (0, 0), StorePromise.EMPTY, f"{counts} blocks were removed")
        owe(store.stat().blocks == before == 0, StorePromise.EMPTY, "there are blocks now")
        owe(list(store.scan()) == [], StorePromise.EMPTY, "scan finds blocks")

    def test_every_length_comes_back_and_nothing_behind_it_is_touched(
        self, case: StoreCase, open_store: OpenStore
    ) -> None:
        """F28: 1 byte, around the page size, several MiB; read into memory that is just as long,
        longer, and longer by pages."""
        store = open_store(block_bytes=case.sizes)
        numbers = range(len(case.sizes))
        blocks = [new_block(n, length=size) for n, size in zip(numbers, case.sizes, strict=True)]
        sources = [aligned_copy(content(n, length=size)) for n, size in enumerate(case.sizes)]
        places = reserved(store, blocks)
        store.write(places, sources)
        owe(
            all(
                bytes(source) == content(n, length=source.nbytes)
                for n, source in enumerate(sources)
            ),
            StorePromise.WRITE,
            "the caller's memory was changed",
        )
        store.publish(places)
        for more in (0, 1, 2 * PAGE):
            memory = [page_aligned(size + more + PAGE) for size in case.sizes]
            for view in memory:
                view[:] = bytes([POISON]) * view.nbytes
            offered = [v[: size + more] for v, size in zip(memory, case.sizes, strict=True)]
            results = store.read([block.key for block in blocks], offered)
            for number, (block, view) in enumerate(zip(blocks, memory, strict=True)):
                size = block.checksum.length
                expected = ReadResult(BlockStatus.OK, block.checksum)
                owe(
                    results[number] == expected,
                    StorePromise.ROW_CHECKSUM,
                    f"a block of {size} bytes was read as {results[number]}",
                )
                owe(
                    bytes(view[:size]) == content(number, length=size),
                    StorePromise.READ,
                    f"a block of {size} bytes came back with other bytes",
                )
                owe(
                    bytes(view[size:]) == bytes([POISON]) * (view.nbytes - size),
                    StorePromise.READ_BEHIND,
                    f"memory behind a block of {size} bytes was written",
                )
        print(f"{len(case.sizes)} lengths of {min(case.sizes)} to {max(case.sizes)} bytes, 3 times")

    @pytest.mark.parametrize("kind", list(ChecksumKind))
    def test_the_row_keeps_the_checksum_that_was_bound(
        self, open_store: OpenStore, kind: ChecksumKind
    ) -> None:
        """The store hands out what it was given, of either kind, and computes nothing anew: here it
        is given a checksum that does not fit."""
        store = open_store()
        bound = BlockChecksum(BLOCK_BYTES, 0xFEED_FACE_0000_0001, kind)
        places = reserved(store, [NewBlock(key(1), bound)])
        store.write(places, [aligned_copy(content(1))])
        store.publish(places)
        (result,) = store.read([key(1)], [page_aligned(BLOCK_BYTES)])
        owe(
            result == ReadResult(BlockStatus.OK, bound),
            StorePromise.ROW_CHECKSUM,
            f"a block that was bound to {bound} was read as {result}",
        )

    def test_unknown_blocks_are_missing(self, open_store: OpenStore) -> None:
        """MISSING is the answer for what is not there, and for that alone; it is no TIER_ERROR."""
        store = open_store()
        put(store, [1])
        seen = store.contains(keys([0, 1, 2]))
        owe(seen == [False, True, False], StorePromise.CONTAINS, f"contains answered {seen}")
        statuses = [read.result.status for read in get(store, [0, 1, 2])]
        expected = [BlockStatus.MISSING, BlockStatus.OK, BlockStatus.MISSING]
        owe(statuses == expected, StorePromise.READ, f"read answered {statuses}")

    def test_memory_that_is_too_short_is_a_miss_and_stays_untouched(
        self, open_store: OpenStore
    ) -> None:
        """One byte less than the block has, beside memory that is long enough."""
        store = open_store()
        put(store, [1, 2])
        short, enough = page_aligned(BLOCK_BYTES - 1), page_aligned(BLOCK_BYTES)
        results = store.read(keys([1, 2]), [short, enough])
        statuses = [result.status for result in results]
        expected = [BlockStatus.MISSING, BlockStatus.OK]
        owe(statuses == expected, StorePromise.READ_SHORT, f"read answered {statuses}")
        owe(not any(short), StorePromise.READ_SHORT, "the memory was written")
        owe(bytes(enough) == content(2), StorePromise.READ, "the other block has other bytes")
        assert_held(store, [1])

    def test_arguments_of_unequal_length_are_refused(self, open_store: OpenStore) -> None:
        """F50. Nothing of such a call takes effect."""
        store = open_store()
        (place,) = reserved(store, [new_block(1)])
        memory = aligned_copy(content(1))
        for wrong in (
            lambda: store.write([place], []),
            lambda: store.write([], [memory]),
            lambda: store.write([place], [memory[:100]]),
            lambda: store.write([place], [page_aligned(2 * BLOCK_BYTES)]),
            lambda: store.read(keys([1, 2]), [page_aligned(BLOCK_BYTES)]),
            lambda: store.read([], [page_aligned(BLOCK_BYTES)]),
        ):
            refused(wrong, ValueError, StorePromise.ERRORS)
        store.write([place], [memory])
        store.publish([place])
        assert_held(store, [1])

    def test_a_closed_store_answers_nothing(self, open_store: OpenStore) -> None:
        """Every method raises `TierError` then, but for closing again."""
        store = open_store()
        put(store, [1])
        (place,) = reserved(store, [new_block(2)])
        store.close()
        store.close()
        for name, late in (
            ("contains", lambda: store.contains(keys([1]))),
            ("reserve", lambda: store.reserve([new_block(3)])),
            ("write", lambda: store.write([place], [aligned_copy(content(2))])),
            ("publish", lambda: store.publish([place])),
            ("read", lambda: store.read(keys([1]), [page_aligned(BLOCK_BYTES)])),
            ("discard", lambda: store.discard([new_block(1)])),
            ("delete", lambda: store.delete(keys([1]))),
            ("touch", lambda: store.touch(keys([1]))),
            ("scan", lambda: list(store.scan())),
            ("changes", lambda: store.changes(None)),
            ("stat", store.stat),
        ):
            refused(late, TierError, StorePromise.CLOSED)
            print(f"{name} was refused")

    def test_a_store_opened_for_following_refuses_to_change(
        self, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        """`writable=False`: it looks up, reads and follows, and refuses the rest."""
        store = open_store()
        put(store, [1])
        follower = open_store(writable=False)
        for change in (
            lambda: follower.reserve([new_block(2)]),
            lambda: follower.delete(keys([1])),
            lambda: follower.discard([new_block(1)]),
        ):
            refused(change, ValueError, StorePromise.READ_ONLY)
        follower.touch(keys([1]))
        assert_held(follower, [1])
        owe(list(follower.scan()) == keys([1]), StorePromise.SCAN, "scan finds something else")
        stat = follower.stat()
        owe(
            (stat.blocks, stat.capacity_bytes) == (1, arguments.capacity),
            StorePromise.STAT_BLOCKS,
            f"stat answered {stat}",
        )
