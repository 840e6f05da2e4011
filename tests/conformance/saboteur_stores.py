"""Stores that break one promise each; run by `test_saboteurs` in a child process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from tests.conformance import bad_openers
from tests.conformance.honest import OVERHEAD, HonestStore, Name, Part, memory_case
from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import ChangeBatch, NewBlock, Place, ReadResult
from tiered_kv.errors import NoSpace
from tiered_kv.testing.conformance.contract import StorePromise
from tiered_kv.testing.conformance.stores import StoreCase, StoreConformance
from tiered_kv.values import BlockKey, BlockStatus


class Saboteur(StoreConformance):
    """An instance that fails `check`, for breaking `promise`."""

    store: ClassVar[type[HonestStore]]
    check: ClassVar[str]
    promise: ClassVar[StorePromise]

    @pytest.fixture
    def case(self) -> StoreCase:
        return memory_case(self.store)


class TestPublishesBeforeItIsTold(Saboteur):
    check = "test_a_block_is_invisible_until_published"
    promise = StorePromise.PUBLISH

    class store(HonestStore):
        def write(self, places: Sequence[Place], memory: Sequence[memoryview]) -> None:
            super().write(places, memory)
            self.publish(places)


class TestPublishesWhatWasNotWritten(Saboteur):
    check = "test_a_place_that_was_not_written_cannot_be_published"
    promise = StorePromise.PUBLISH_WRITTEN

    class store(HonestStore):
        def publish(self, places: Sequence[Place]) -> None:
            for place in places:
                token = self.token(place)
                token.data = token.data or bytes(place.block.checksum.length)
            super().publish(places)


class TestForgetsARank(Saboteur):
    check = "test_a_block_is_visible_when_all_ranks_have_it"
    promise = StorePromise.ALL_RANKS

    class store(HonestStore):
        def whole(self, name: Name) -> bool:
            return bool(self.shelf.blocks.get(name))


class TestLeaksOnAbandon(Saboteur):
    check = "test_an_abandoned_block_leaves_no_trace"
    promise = StorePromise.ABANDON

    class store(HonestStore):
        def abandon(self, places: Sequence[Place]) -> None:
            super().abandon([place for place in places if self.token(place).data is None])


class TestTakesWhatFits(Saboteur):
    check = "test_a_batch_that_can_never_fit_is_refused_whole"
    promise = StorePromise.ALL_OR_NOTHING

    class store(HonestStore):
        def reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
            try:
                return super().reserve(blocks)
            except NoSpace:
                return super().reserve(blocks[: len(blocks) // 3])


class TestEvictsItsOwnPartAlone(Saboteur):
    check = "test_evicted_blocks_lose_all_ranks_parts"
    promise = StorePromise.EVICTS_WHOLE

    class store(HonestStore):
        def whole(self, name: Name) -> bool:
            return bool(self.shelf.blocks.get(name))

        def evict(self, name: Name) -> None:
            self.evicted += 1
            parts = self.shelf.blocks[name]
            parts.pop(self.arguments.rank, None)
            if not parts:
                del self.shelf.blocks[name]
            else:
                self.shelf.blocks[name] = self.shelf.blocks.pop(name)


class TestComputesTheChecksumAnew(Saboteur):
    check = "test_the_row_keeps_the_checksum_that_was_bound"
    promise = StorePromise.ROW_CHECKSUM

    class store(HonestStore):
        def read_one(self, key: BlockKey, view: memoryview) -> ReadResult:
            result = super().read_one(key, view)
            if result.checksum is None:
                return result
            data = view[: result.checksum.length]
            anew = BlockChecksum.capture(key, self.arguments.rank, data)
            return ReadResult(BlockStatus.OK, anew)


class TestFillsAllMemory(Saboteur):
    check = "test_every_length_comes_back_and_nothing_behind_it_is_touched"
    promise = StorePromise.READ_BEHIND

    class store(HonestStore):
        def read_one(self, key: BlockKey, view: memoryview) -> ReadResult:
            result = super().read_one(key, view)
            if result.checksum is not None:
                rest = view[result.checksum.length :]
                rest[:] = bytes(rest.nbytes)
            return result


class TestCutsBlocksToTheMemory(Saboteur):
    check = "test_memory_that_is_too_short_is_a_miss_and_stays_untouched"
    promise = StorePromise.READ_SHORT

    class store(HonestStore):
        def read_one(self, key: BlockKey, view: memoryview) -> ReadResult:
            part = self.shelf.blocks.get(self.name(key), {}).get(self.arguments.rank)
            if part is None:
                return ReadResult(BlockStatus.MISSING)
            count = min(len(part.data), view.nbytes)
            view[:count] = part.data[:count]
            return ReadResult(BlockStatus.OK, part.checksum)


class TestMixesNamespaces(Saboteur):
    check = "test_namespaces_are_apart"
    promise = StorePromise.ONE_NAMESPACE

    class store(HonestStore):
        def name(self, key: BlockKey) -> Name:
            return b"all", key


class TestDiscardsWhatWasReplaced(Saboteur):
    check = "test_discard_needs_the_same_checksum"
    promise = StorePromise.DISCARD

    class store(HonestStore):
        def carries(self, block: NewBlock) -> bool:
            return self.has_part(self.name(block.key))


class TestForgetsToTellRemovals(Saboteur):
    check = "test_a_mirror_of_scan_and_changes_is_the_truth"
    promise = StorePromise.CHANGES

    class store(HonestStore):
        def changes(self, cursor: int | None) -> ChangeBatch:
            batch = super().changes(cursor)
            return ChangeBatch(batch.cursor, tuple(c for c in batch.changes if c[1]))


class TestBringsDeletedBlocksBack(Saboteur):
    check = "test_random_histories_agree_with_a_model"
    promise = StorePromise.READ

    @pytest.fixture
    def case(self) -> StoreCase:
        return replace(memory_case(self.store), examples=100)

    class store(HonestStore):
        def drop(self, name: Name) -> bool:
            rest = {r: p for r, p in self.shelf.blocks[name].items() if r != self.arguments.rank}
            dropped = super().drop(name)
            if rest and not dropped:
                self.shelf.blocks[name] = rest
            return dropped


class TestLosesBlocksAtARestart(Saboteur):
    check = "test_blocks_survive_a_restart"
    promise = StorePromise.CONTAINS

    class store(HonestStore):
        def close(self) -> None:
            super().close()
            self.shelf.blocks.clear()


class TestAnswersWhenClosed(Saboteur):
    check = "test_a_closed_store_answers_nothing"
    promise = StorePromise.CLOSED

    class store(HonestStore):
        def close(self) -> None:
            pass


class TestWritesWhenOpenedForReading(Saboteur):
    check = "test_a_store_opened_for_following_refuses_to_change"
    promise = StorePromise.READ_ONLY

    class store(HonestStore):
        def check(self, *, changing: bool = False) -> None:
            super().check()


class TestTearsUnderThreads(Saboteur):
    check = "test_reads_that_race_with_eviction_are_right_or_missing"
    promise = StorePromise.READ_RACE

    class store(HonestStore):
        reads = 0

        def read_one(self, key: BlockKey, view: memoryview) -> ReadResult:
            result = super().read_one(key, view)
            self.reads += 1
            if result.checksum is not None and self.reads % 7 == 0:
                view[0] ^= 1  # as if the slot had been given to another block meanwhile
            return result


class TestCountsPartsAsBlocks(Saboteur):
    check = "test_the_statistics_are_true"
    promise = StorePromise.STAT_EVICTED

    class store(HonestStore):
        def evict(self, name: Name) -> None:
            super().evict(name)
            self.evicted += 1


class TestSharesAfterAFork(Saboteur):
    check = "test_use_after_fork_is_refused_and_harms_nobody"
    promise = StorePromise.ERRORS

    class store(HonestStore):
        def check(self, *, changing: bool = False) -> None:
            self.pid = os.getpid()
            super().check(changing=changing)


class TestKeepsTheSecondOfTwo(Saboteur):
    check = "test_of_two_writers_of_one_key_one_stays"
    promise = StorePromise.TWO_WRITERS

    class store(HonestStore):
        twice = 0

        def add(self, name: Name, part: Part) -> None:
            self.twice += self.has_part(name)
            super().add(name, part)

        def scan(self) -> Iterator[BlockKey]:
            found = list(super().scan())
            return iter(found + found[: self.twice])


TOO_SMALL = "test_random_histories_of_a_store_that_is_too_small"


class TestEvictsHalfBlocks(Saboteur):
    check = TOO_SMALL
    promise = StorePromise.EVICTS_WHOLE

    class store(HonestStore):
        def evict(self, name: Name) -> None:
            self.evicted += self.whole(name)
            parts = self.shelf.blocks.pop(name)
            if len(parts) > 1:
                del parts[min(parts)]
                self.shelf.blocks[name] = parts


class TestEvictsTooLate(Saboteur):
    check = TOO_SMALL
    promise = StorePromise.BUDGET

    class store(HonestStore):
        def make_room(self, wanted: int) -> None:
            super().make_room(min(wanted, OVERHEAD))


class TestReadsWhatItEvicted(Saboteur):
    check = TOO_SMALL
    promise = StorePromise.READ

    class store(HonestStore):
        def read_one(self, key: BlockKey, view: memoryview) -> ReadResult:
            """Of a block that was evicted, what lies at its old place now."""
            result = super().read_one(key, view)
            if result.status is BlockStatus.OK or not self.evicted:
                return result
            name, parts = next(iter(self.shelf.blocks.items()))
            assert name[1] != key
            (part, *_) = parts.values()
            view[: len(part.data)] = part.data
            return ReadResult(BlockStatus.OK, part.checksum)


# ---------------------------------------------------------------------------- with real files


class OnFiles(StoreConformance):
    check: ClassVar[str]
    promise: ClassVar[StorePromise]
    bad: ClassVar[StoreCase]

    @pytest.fixture
    def case(self) -> StoreCase:
        return self.bad


class TestOutgrowsItsBudget(OnFiles):
    bad = StoreCase(bad_openers.open_with_twice_the_budget, kills=1)
    check = "test_the_directory_never_outgrows_its_budget"
    promise = StorePromise.BUDGET


class TestLosesWhatADeadProcessPublished(OnFiles):
    bad = StoreCase(bad_openers.open_apart_in_each_process, kills=1)
    check = "test_a_killed_process_leaves_all_that_it_published_and_nothing_else"
    promise = StorePromise.CONTAINS


class TestLosesABlockOfADeadProcess(OnFiles):
    bad = StoreCase(bad_openers.open_forgetful, examples=3)
    check = "test_random_histories_among_processes_that_die"
    promise = StorePromise.OUTLIVES


class TestHidesBlocksFromOtherProcesses(OnFiles):
    bad = StoreCase(bad_openers.open_apart_in_each_process, kills=1)
    check = "test_processes_that_store_the_same_keys"
    promise = StorePromise.TWO_WRITERS


class TestLetsEverybodyRead(OnFiles):
    bad = StoreCase(bad_openers.open_readable_by_all, kills=1)
    check = "test_files_are_private"
    promise = StorePromise.OUTLIVES
