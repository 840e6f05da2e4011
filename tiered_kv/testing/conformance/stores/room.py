"""Budgets are hard; whoever needs room evicts whole blocks."""

from __future__ import annotations

import random
import threading
from collections import Counter

from tiered_kv.errors import NoSpace
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    ODD_BYTES,
    StoreArguments,
    aligned_copy,
    assert_held,
    content,
    disk_bytes,
    get,
    keys,
    new_block,
    page_aligned,
    put,
    reserved,
)
from tiered_kv.testing.conformance.contract import StorePromise, owe, refused
from tiered_kv.testing.conformance.stores.case import OpenStore, StoreCase, StoreFixtures
from tiered_kv.values import BlockStatus

__all__ = ["RoomChecks"]

LATE_SECONDS = 60.0


class RoomChecks(StoreFixtures):
    """`reserve` under pressure, and what `stat` tells of it."""

    def test_the_directory_never_outgrows_its_budget(
        self, case: StoreCase, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        """F19: four times the capacity is stored, with a restart in between; `du` after each
        batch. What is stored is there at once, and at least half of the budget is of use."""
        case.needs("bounded", "directory")
        store = open_store()
        batch = 8
        rounds = 4 * arguments.capacity // (batch * BLOCK_BYTES)
        largest = 0
        for number in range(rounds):
            if number == rounds // 2 and case.reopens:
                store.close()
                store = open_store()
            numbers = range(number * batch, (number + 1) * batch)
            put(store, numbers)
            assert_held(store, numbers)
            largest = max(largest, disk_bytes(arguments.path))
            owe(
                largest <= arguments.capacity,
                StorePromise.BUDGET,
                f"{largest} bytes are on the disk, the capacity is {arguments.capacity}",
            )
        held = store.stat().blocks
        print(
            f"{rounds * batch} blocks of {BLOCK_BYTES} bytes stored, {held} held, at most "
            f"{largest} of {arguments.capacity} bytes on the disk"
        )
        owe(
            held * BLOCK_BYTES > arguments.capacity // 2,
            StorePromise.EVICTS_WHOLE,
            f"only {held} blocks are held in {arguments.capacity} bytes",
        )

    def test_blocks_of_changing_lengths_keep_the_budget(
        self, case: StoreCase, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        """Five times the capacity, in blocks of three lengths."""
        case.needs("bounded", "directory")
        store = open_store(block_bytes=(BLOCK_BYTES, ODD_BYTES, 4 * BLOCK_BYTES))
        choice = random.Random(9)
        stored = number = largest = 0
        while stored < 5 * arguments.capacity:
            length = choice.choice((BLOCK_BYTES, ODD_BYTES, 4 * BLOCK_BYTES))
            put(store, range(number, number + 6), length=length)
            assert_held(store, range(number, number + 6), length=length)
            number += 6
            stored += 6 * length
            largest = max(largest, disk_bytes(arguments.path))
        print(
            f"{stored} bytes stored, {store.stat().evicted_blocks} evicted, {largest} on the disk"
        )
        owe(
            largest <= arguments.capacity,
            StorePromise.BUDGET,
            f"{largest} bytes were on the disk, the capacity is {arguments.capacity}",
        )

    def test_the_statistics_are_true(
        self, case: StoreCase, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        """Blocks as `scan` finds them, bytes as `du` finds them, evictions as they happened."""
        store = open_store()
        put(store, range(30))
        put(store, range(100, 110), length=ODD_BYTES)
        store.delete(keys([1, 2]))
        (place,) = reserved(store, [new_block(500)])
        stat = store.stat()
        visible = len(list(store.scan()))
        owe(
            stat.blocks == visible == 38,
            StorePromise.STAT_BLOCKS,
            f"stat tells {stat.blocks} blocks, scan finds {visible}, 38 were published",
        )
        owe(
            stat.capacity_bytes == arguments.capacity,
            StorePromise.BUDGET,
            f"stat tells a capacity of {stat.capacity_bytes}, not {arguments.capacity}",
        )
        owe(stat.evicted_blocks == 0, StorePromise.STAT_EVICTED, f"{stat.evicted_blocks} evicted")
        if case.directory:
            real = disk_bytes(arguments.path)
            owe(
                abs(stat.used_bytes - real) <= max(2**20, real // 10),
                StorePromise.STAT_USED,
                f"stat tells {stat.used_bytes} bytes, du finds {real}",
            )
        owe(
            all(str(part) == part != "" for item in stat.modes.items() for part in item),
            StorePromise.STAT_USED,
            f"modes are not text: {stat.modes}",
        )
        store.abandon([place])
        if case.bounded:
            for first in range(1000, 1000 + 2 * arguments.capacity // BLOCK_BYTES, 8):
                put(store, range(first, first + 8))
            stat = store.stat()
            stored = 38 + 2 * arguments.capacity // BLOCK_BYTES
            owe(
                stored - stat.evicted_blocks == stat.blocks == len(list(store.scan())),
                StorePromise.STAT_EVICTED,
                f"{stored} blocks were published, {stat.blocks} are there, but "
                f"{stat.evicted_blocks} count as evicted",
            )
            owe(
                stat.used_bytes <= stat.capacity_bytes,
                StorePromise.BUDGET,
                f"stat tells {stat.used_bytes} bytes of {stat.capacity_bytes}",
            )

    def test_the_least_recently_used_go_first(
        self, case: StoreCase, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        """Four blocks are touched before each batch of twice the capacity, and stay."""
        case.needs("bounded", "recency")
        store = open_store()
        put(store, range(8))
        for number in range(8, 2 * arguments.capacity // BLOCK_BYTES, 4):
            store.touch(keys(range(4)))
            put(store, range(number, number + 4))
        evicted = store.stat().evicted_blocks
        owe(evicted > 0, StorePromise.STAT_EVICTED, "no block counts as evicted")
        seen = store.contains(keys(range(8)))
        owe(
            seen == [True] * 4 + [False] * 4,
            StorePromise.TOUCH,
            f"of 4 touched blocks and 4 others these are left after {evicted} evictions: {seen}",
        )
        assert_held(store, range(4))

    def test_a_batch_that_can_never_fit_is_refused_whole(
        self, case: StoreCase, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        """Refused three times; then half of the capacity fits, so nothing of it was kept."""
        case.needs("bounded")
        store = open_store()
        many = 2 * arguments.capacity // BLOCK_BYTES
        for _ in range(3):
            refused(
                lambda: store.reserve([new_block(n) for n in range(100, 100 + many)]),
                NoSpace,
                StorePromise.ALL_OR_NOTHING,
            )
        half = range(1000, 1000 + arguments.capacity // (2 * BLOCK_BYTES))
        places = reserved(store, [new_block(n) for n in half])
        store.write(places, [aligned_copy(content(n)) for n in half])
        store.publish(places)
        assert_held(store, half)
        seen = [n for n in range(100, 100 + many) if store.contains(keys([n]))[0]]
        owe(not seen, StorePromise.ALL_OR_NOTHING, f"blocks {seen} of a refused batch are visible")

    def test_evicted_blocks_lose_all_ranks_parts(
        self, case: StoreCase, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        """F56: two ranks store twice the capacity; whatever is visible has both parts."""
        case.needs("bounded")
        ranks = [open_store(rank=rank, world_size=2) for rank in range(2)]
        for first in range(0, arguments.capacity // BLOCK_BYTES, 8):
            for rank, store in enumerate(ranks):
                put(store, range(first, first + 8), rank)
        whole = list(ranks[0].scan())
        evicted = sum(store.stat().evicted_blocks for store in ranks)
        print(f"{len(whole)} whole blocks held, {evicted} evicted")
        owe(evicted > 0, StorePromise.STAT_EVICTED, "no block counts as evicted")
        owe(len(whole) > 8, StorePromise.EVICTS_WHOLE, f"only {len(whole)} whole blocks are left")
        for rank, store in enumerate(ranks):
            results = store.read(whole, [page_aligned(BLOCK_BYTES) for _ in whole])
            statuses = Counter(result.status for result in results)
            owe(
                set(statuses) == {BlockStatus.OK},
                StorePromise.EVICTS_WHOLE,
                f"rank {rank} reads visible blocks as {dict(statuses)}",
            )

    def test_reads_that_race_with_eviction_are_right_or_missing(
        self, case: StoreCase, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        """F8: two threads store twice the capacity, two read what was just stored or is old."""
        case.needs("bounded")
        store = open_store()
        batches = arguments.capacity // (8 * BLOCK_BYTES)
        done = threading.Event()
        stored = [8, 8]
        counts: Counter[str] = Counter()
        troubles: list[str] = []

        def write(which: int) -> None:
            try:
                for batch in range(batches):
                    first = which * 10_000 + batch * 8
                    try:
                        put(store, range(first, first + 8))
                    except NoSpace:
                        counts["refused"] += 1  # the other thread holds what little there is
                        continue
                    stored[which] = batch * 8 + 8
            except Exception as error:  # noqa: BLE001 - a thread tells of every failure
                troubles.append(f"storing failed: {error!r}")

        def read(seed: int) -> None:
            choice = random.Random(seed)
            try:
                while not done.is_set():
                    which, end = seed, stored[seed]
                    window = range(max(0, end - 140), end)
                    numbers = [which * 10_000 + choice.choice(window) for _ in range(8)]
                    for number, found in zip(numbers, get(store, numbers), strict=True):
                        counts[found.result.status.value] += 1
                        if found.result.status is BlockStatus.OK and not found.sound:
                            troubles.append(f"block {number} was OK with other bytes")
            except Exception as error:  # noqa: BLE001 - a thread tells of every failure
                troubles.append(f"reading failed: {error!r}")

        writers = [threading.Thread(target=write, args=(which,)) for which in range(2)]
        readers = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
        for thread in writers + readers:
            thread.start()
        for thread in writers:
            thread.join(LATE_SECONDS)
        done.set()
        for thread in readers:
            thread.join(LATE_SECONDS)
        evicted = store.stat().evicted_blocks
        print(f"reads and refusals: {dict(counts)}; {evicted} blocks evicted meanwhile")
        owe(not troubles, StorePromise.READ_RACE, f"{len(troubles)} troubles: {troubles[:3]}")
        owe(counts["ok"] > 0, StorePromise.THREADS, "no read found anything")
        owe(evicted > 0, StorePromise.STAT_EVICTED, "no block counts as evicted")
