"""Where one side is a key-addressed store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import BlockStore, ChangeBatch, NewBlock, Place, ReadResult, StoreStat
from tiered_kv.errors import NoSpace, TierError
from tiered_kv.specs import HopResult, KeySpec, LoadStoreSpec
from tiered_kv.testing.conformance.contract import HandlerPromise, owe
from tiered_kv.testing.conformance.handlers.bench import Bench, Hop
from tiered_kv.testing.conformance.handlers.case import HandlerCase
from tiered_kv.testing.conformance.handlers.fixtures import HandlerFixtures, MakeBench
from tiered_kv.testing.conformance.handlers.sides import Block, Fault, Side, SlotSide, StoreSide
from tiered_kv.values import BlockKey, BlockStatus

__all__ = ["FailingStore", "StoreDestinationChecks", "StoreSourceChecks", "TravellingChecks"]

OK = BlockStatus.OK


class FailingStore:
    """A store that fails where it is told to, and counts the places that nobody gave back."""

    def __init__(self, inner: BlockStore) -> None:
        self._inner = inner
        self.trouble: Callable[[str], object] = lambda method: None
        """Called with the method before it; may raise."""
        self.answer: Callable[[list[ReadResult]], list[ReadResult]] = lambda results: results
        """What `read` answers instead."""
        self.open_places = 0

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `BlockStore`."""
        return self._inner.contains(keys)

    def reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        """See `BlockStore`."""
        self.trouble("reserve")
        places = self._inner.reserve(blocks)
        self.open_places += sum(place is not None for place in places)
        return places

    def write(self, places: Sequence[Place], memory: Sequence[memoryview]) -> None:
        """See `BlockStore`."""
        self.trouble("write")
        self._inner.write(places, memory)

    def publish(self, places: Sequence[Place]) -> None:
        """See `BlockStore`."""
        self.trouble("publish")
        self._inner.publish(places)
        self.open_places -= len(places)

    def abandon(self, places: Sequence[Place]) -> None:
        """See `BlockStore`."""
        self._inner.abandon(places)
        self.open_places -= len(places)

    def read(self, keys: Sequence[BlockKey], memory: Sequence[memoryview]) -> list[ReadResult]:
        """See `BlockStore`."""
        self.trouble("read")
        return self.answer(self._inner.read(keys, memory))

    def discard(self, blocks: Sequence[NewBlock]) -> int:
        """See `BlockStore`."""
        return self._inner.discard(blocks)

    def delete(self, keys: Sequence[BlockKey]) -> int:
        """See `BlockStore`."""
        return self._inner.delete(keys)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See `BlockStore`."""
        self.trouble("touch")
        self._inner.touch(keys)

    def scan(self) -> Iterator[BlockKey]:
        """See `BlockStore`."""
        return self._inner.scan()

    def changes(self, cursor: int | None) -> ChangeBatch:
        """See `BlockStore`."""
        return self._inner.changes(cursor)

    def stat(self) -> StoreStat:
        """See `BlockStore`."""
        return self._inner.stat()

    def close(self) -> None:
        """See `BlockStore`."""
        self._inner.close()


def _failing_bench(case: HandlerCase, make: MakeBench) -> tuple[Bench, FailingStore]:
    if not case.any_store:
        pytest.skip("the case declares any_store=False")
    stores: list[FailingStore] = []

    def wrap(inner: BlockStore) -> BlockStore:
        stores.append(FailingStore(inner))
        return stores[0]

    bench = make(wrap_store=wrap)
    if not stores:
        raise ValueError("the case has no store")
    return bench, stores[0]


def _attempt(bench: Bench, hop: Hop) -> HopResult | Exception:
    try:
        return bench.call(hop)
    except Exception as error:  # noqa: BLE001 - which errors may come out is what is looked at
        return error


class TravellingChecks(HandlerFixtures):
    """Between host memory and a store: the checksum of the capture travels along."""

    @pytest.mark.parametrize("fault", [None, *(f for f in Fault if f is not Fault.GONE)], ids=str)
    def test_the_checksum_travels_unchanged(self, make: MakeBench, fault: Fault | None) -> None:
        """Nobody computes it anew on the way: a block that was damaged before this hop still shows
        it after it, so the end of the chain finds it."""
        bench = make()
        hop = bench.hop(bench.blocks(2), faults={} if fault is None else {0: fault})
        result = bench.run(hop)
        for i, block in enumerate(hop.blocks):
            if result.statuses[i] is not OK:
                owe(
                    i == 0 and fault is not None,
                    HandlerPromise.PER_BLOCK,
                    f"block {i}, which is sound, is {result.statuses[i].value}",
                )
                continue
            before = _checksum(bench.source, hop.spec.src, hop.blocks, i)
            after = _checksum(bench.destination, hop.spec.dst, hop.blocks, i)
            owe(
                before == after is not None,
                HandlerPromise.CHECKSUM,
                f"block {i} ({fault and fault.value}) was bound to {before} and arrived as {after}",
            )
            print(f"block {i} of key {block.key!r} kept {after}")


def _checksum(
    side: Side, spec: LoadStoreSpec, blocks: Sequence[Block], i: int
) -> BlockChecksum | None:
    if isinstance(side, SlotSide):
        return side.checksum(spec, i)
    if isinstance(side, StoreSide):
        return side.row(blocks[i])
    raise TypeError(f"{spec} is neither host memory nor a store")


class StoreSourceChecks(HandlerFixtures):
    """Loads from a store."""

    def test_what_is_not_stored_is_missing(self, make: MakeBench) -> None:
        """At its place in the answer; the others arrive."""
        bench = make()
        hop = bench.hop(bench.blocks(6), faults={0: Fault.GONE, 4: Fault.GONE})
        result = bench.run(hop)
        expected = [BlockStatus.MISSING if i in {0, 4} else OK for i in range(6)]
        bench.judge(hop, result, expected, HandlerPromise.MISSING)
        due = sum(len(hop.blocks[i].data) for i in (1, 2, 3, 5))
        owe(
            result.copied_bytes == due,
            HandlerPromise.COPIED,
            f"{result.copied_bytes} bytes were told where {due} were copied",
        )

    def test_all_missing(self, make: MakeBench) -> None:
        """Nothing is there: nothing is written."""
        bench = make()
        hop = bench.hop(bench.blocks(3), faults=dict.fromkeys(range(3), Fault.GONE))
        result = bench.run(hop)
        due = HopResult((BlockStatus.MISSING,) * 3, 0)
        owe(result == due, HandlerPromise.MISSING, f"the answer was {result}")
        bench.judge_bytes(hop, [])

    @pytest.mark.parametrize("error", [TierError("it hangs", tier="tier"), RuntimeError("a bug")])
    def test_a_store_that_fails_leaves_nothing_behind(
        self, case: HandlerCase, make: MakeBench, error: Exception
    ) -> None:
        """Whatever it raises comes out, or is the answer for every block; nothing counts as
        there. The next call works."""
        bench, store = _failing_bench(case, make)
        hop = bench.hop(bench.blocks(3))

        def trouble(method: str) -> None:
            if method == "read":
                raise error

        store.trouble = trouble
        outcome = _attempt(bench, hop)
        owe(
            outcome is error
            or (
                isinstance(outcome, HopResult) and set(outcome.statuses) == {BlockStatus.TIER_ERROR}
            ),
            HandlerPromise.TIER_ERROR,
            f"a store that raised {error!r} led to {outcome!r}",
        )
        bench.judge_bytes(hop, [])
        store.trouble = lambda method: None
        again = bench.hop(bench.blocks(3, first=10))
        bench.judge(again, bench.run(again), [OK] * 3)

    def test_the_stores_answers_are_handed_on(self, case: HandlerCase, make: MakeBench) -> None:
        """TIER_ERROR for one block stays that block's. Its recency is lost without harm."""
        bench, store = _failing_bench(case, make)
        hop = bench.hop(bench.blocks(3))

        def trouble(method: str) -> None:
            if method == "touch":
                raise TierError("the index is gone", tier="tier")

        store.trouble = trouble
        store.answer = lambda results: [results[0], ReadResult(BlockStatus.TIER_ERROR), results[2]]
        expected = [OK, BlockStatus.TIER_ERROR, OK]
        bench.judge(hop, bench.run(hop), expected, HandlerPromise.IN_ORDER)

    def test_a_store_that_does_not_say_its_checksum_is_not_believed(
        self, case: HandlerCase, make: MakeBench
    ) -> None:
        """A row without one cannot be verified."""
        bench, store = _failing_bench(case, make)
        hop = bench.hop(bench.blocks(2))
        store.answer = lambda results: [ReadResult(OK) for _ in results]
        outcome = _attempt(bench, hop)
        owe(
            isinstance(outcome, TierError)
            or (isinstance(outcome, HopResult) and OK not in outcome.statuses),
            HandlerPromise.OK_MEANS_THERE,
            f"blocks without a checksum led to {outcome!r}",
        )
        bench.judge_bytes(hop, [])


class StoreDestinationChecks(HandlerFixtures):
    """Stores into a store."""

    def test_what_is_published_already_is_ok_and_not_copied(self, make: MakeBench) -> None:
        """At its place in the answer, between new ones."""
        bench = make()
        blocks = bench.blocks(4)
        known = bench.destination.supply(blocks[1:3])
        bench.destination.offer([blocks[0], blocks[3]])
        if not isinstance(known, KeySpec):
            raise TypeError(f"the destination is {known}, not a store")
        src = bench.source.supply(blocks)
        dst = replace(known, keys=tuple(block.key for block in blocks))
        hop = bench.hop_between(blocks, src, dst)
        result = bench.run(hop)
        bench.judge(hop, result, [OK] * 4)
        due = len(blocks[0].data) + len(blocks[3].data)
        owe(
            result.copied_bytes == due,
            HandlerPromise.COPIED,
            f"{result.copied_bytes} bytes were told where {due} were copied",
        )

    def test_a_full_store_takes_all_or_nothing(self, make: MakeBench) -> None:
        """NO_SPACE; nothing of the call is visible. When there is room again it works."""
        bench = make()
        if not bench.case.bounded_store:
            pytest.skip("the case declares bounded_store=False")
        hop = bench.hop(bench.blocks(6))
        taken = _fill_up(bench)
        outcome = _attempt(bench, hop)
        owe(
            isinstance(outcome, NoSpace)
            or (isinstance(outcome, HopResult) and set(outcome.statuses) == {BlockStatus.NO_SPACE}),
            HandlerPromise.NO_SPACE,
            f"a store with {len(taken)} places taken and no room led to {outcome!r}",
        )
        bench.judge_bytes(hop, [])
        _store(bench).abandon(taken)
        # Making room may have cost the other rank's parts of these blocks.
        again = bench.hop_between(hop.blocks, hop.spec.src, bench.destination.offer(hop.blocks))
        bench.judge(again, bench.run(again), [OK] * 6)

    @pytest.mark.parametrize("method", ["reserve", "write", "publish"])
    @pytest.mark.parametrize(
        "error", [NoSpace("full"), TierError("gone", tier="tier"), ZeroDivisionError("a bug")]
    )
    def test_each_step_that_fails_leaves_no_trace(
        self, case: HandlerCase, make: MakeBench, method: str, error: Exception
    ) -> None:
        """F2: reserve, write and publish fail in turn: nothing is visible, every place was given
        back, and the same call works afterwards."""
        bench, store = _failing_bench(case, make)
        hop = bench.hop(bench.blocks(4))

        def trouble(called: str) -> None:
            if called == method:
                raise error

        store.trouble = trouble
        outcome = _attempt(bench, hop)
        owe(
            outcome is error or (isinstance(outcome, HopResult) and OK not in outcome.statuses),
            HandlerPromise.OK_MEANS_THERE,
            f"a store whose {method} raised {error!r} led to {outcome!r}",
        )
        bench.judge_bytes(hop, [])
        owe(
            store.open_places == 0,
            HandlerPromise.GIVEN_UP,
            f"{store.open_places} places were neither published nor abandoned",
        )
        store.trouble = lambda called: None
        bench.judge(hop, bench.run(hop), [OK] * 4)


def _store(bench: Bench) -> BlockStore:
    if bench.store is None:
        raise ValueError("the case has no store")
    return bench.store


def _fill_up(bench: Bench) -> list[Place]:
    """Take all room that the store has."""
    store = _store(bench)
    taken: list[Place] = []
    batch = 256
    number = 10_000
    while batch:
        blocks = [
            NewBlock(block.key, block.checksum(bench.geometry.rank))
            for block in bench.blocks(batch, number)
        ]
        try:
            taken += [place for place in store.reserve(blocks) if place is not None]
            number += batch
        except NoSpace:
            batch //= 2
    return taken
