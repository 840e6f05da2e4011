"""Where one side is a key-addressed store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import BlockStore, NewBlock, Place
from tiered_kv.errors import NoSpace, TierError
from tiered_kv.specs import HopResult, KeySpec, LoadStoreSpec
from tiered_kv.testing.conformance.contract import HandlerPromise, owe
from tiered_kv.testing.conformance.handlers.bench import Bench, Hop
from tiered_kv.testing.conformance.handlers.case import HandlerCase
from tiered_kv.testing.conformance.handlers.fixtures import HandlerFixtures, MakeBench
from tiered_kv.testing.conformance.handlers.sides import Block, Side, SlotSide, StoreSide
from tiered_kv.testing.conformance.handlers.sides import Fault as Damage
from tiered_kv.testing.faults import Effect, Fault, Faults, FaultyStore, Method
from tiered_kv.values import BlockStatus

__all__ = ["StoreDestinationChecks", "StoreSourceChecks", "TravellingChecks"]

OK = BlockStatus.OK


def _faulty_bench(case: HandlerCase, make: MakeBench) -> tuple[Bench, FaultyStore, Faults]:
    """A bench whose handler has a store in which things go wrong; the sides have the sound one."""
    if not case.any_store:
        pytest.skip("the case declares any_store=False")
    faults = Faults(tier=case.tier)
    stores: list[FaultyStore] = []

    def wrap(inner: BlockStore) -> BlockStore:
        stores.append(FaultyStore(inner, faults))
        return stores[0]

    bench = make(wrap_store=wrap)
    if not stores:
        raise ValueError("the case has no store")
    return bench, stores[0], faults


def _attempt(bench: Bench, hop: Hop) -> HopResult | Exception:
    try:
        return bench.call(hop)
    except Exception as error:  # noqa: BLE001 - which errors may come out is what is looked at
        return error


_RAISED = {
    Effect.TIER_ERROR: TierError,
    Effect.NO_SPACE: NoSpace,
    Effect.EIO: OSError,
    Effect.ENOSPC: OSError,
    Effect.BUG: RuntimeError,
}


def _is_of(outcome: object, effect: Effect) -> bool:
    """Whether it is the error that was injected."""
    return isinstance(outcome, _RAISED[effect])


class TravellingChecks(HandlerFixtures):
    """Between host memory and a store: the checksum of the capture travels along."""

    @pytest.mark.parametrize("fault", [None, *(f for f in Damage if f is not Damage.GONE)], ids=str)
    def test_the_checksum_travels_unchanged(self, make: MakeBench, fault: Damage | None) -> None:
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
        hop = bench.hop(bench.blocks(6), faults={0: Damage.GONE, 4: Damage.GONE})
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
        hop = bench.hop(bench.blocks(3), faults=dict.fromkeys(range(3), Damage.GONE))
        result = bench.run(hop)
        due = HopResult((BlockStatus.MISSING,) * 3, 0)
        owe(result == due, HandlerPromise.MISSING, f"the answer was {result}")
        bench.judge_bytes(hop, [])

    @pytest.mark.parametrize("effect", [Effect.TIER_ERROR, Effect.EIO, Effect.BUG])
    def test_a_store_that_fails_leaves_nothing_behind(
        self, case: HandlerCase, make: MakeBench, effect: Effect
    ) -> None:
        """Whatever it raises comes out, or is the answer for every block; nothing counts as
        there. The next call works."""
        bench, _, faults = _faulty_bench(case, make)
        hop = bench.hop(bench.blocks(3))
        faults.inject(Fault(method=Method.READ, effect=effect))
        outcome = _attempt(bench, hop)
        owe(
            _is_of(outcome, effect)
            or (
                isinstance(outcome, HopResult) and set(outcome.statuses) == {BlockStatus.TIER_ERROR}
            ),
            HandlerPromise.TIER_ERROR,
            f"a store whose read failed with {effect} led to {outcome!r}",
        )
        bench.judge_bytes(hop, [])
        faults.inject()
        again = bench.hop(bench.blocks(3, first=10))
        bench.judge(again, bench.run(again), [OK] * 3)

    def test_the_stores_answers_are_handed_on(self, case: HandlerCase, make: MakeBench) -> None:
        """TIER_ERROR for one block stays that block's. Its recency is lost without harm."""
        bench, _, faults = _faulty_bench(case, make)
        hop = bench.hop(bench.blocks(3))
        faults.inject(
            Fault(method=Method.TOUCH, effect=Effect.TIER_ERROR),
            Fault(method=Method.READ, effect=Effect.BLOCK_ERROR, positions=(1,)),
        )
        expected = [OK, BlockStatus.TIER_ERROR, OK]
        bench.judge(hop, bench.run(hop), expected, HandlerPromise.IN_ORDER)

    def test_a_store_that_does_not_say_its_checksum_is_not_believed(
        self, case: HandlerCase, make: MakeBench
    ) -> None:
        """A row without one cannot be verified."""
        bench, _, faults = _faulty_bench(case, make)
        hop = bench.hop(bench.blocks(2))
        faults.inject(Fault(method=Method.READ, effect=Effect.NO_ROW))
        outcome = _attempt(bench, hop)
        owe(
            isinstance(outcome, TierError)
            or (isinstance(outcome, HopResult) and OK not in outcome.statuses),
            HandlerPromise.OK_MEANS_THERE,
            f"blocks without a checksum led to {outcome!r}",
        )
        bench.judge_bytes(hop, [])

    @pytest.mark.parametrize(
        "effect", [Effect.FLIP, Effect.SHORT, Effect.LIE, Effect.FOREIGN], ids=str
    )
    def test_wrong_bytes_never_count_as_right(
        self, case: HandlerCase, make: MakeBench, effect: Effect
    ) -> None:
        """F3: the store says OK of two blocks whose bytes are not theirs. In the engine's cache
        nothing of them arrives, and the answer says so; in a host slot they may lie, as long as
        what they are bound to shows it to whoever reads them there."""
        bench, _, faults = _faulty_bench(case, make)
        hop = bench.hop(bench.blocks(6))
        wrong = (1, 4)
        faults.inject(Fault(method=Method.READ, effect=effect, positions=wrong))
        result = bench.run(hop)
        met = faults.injected_blocks()[Method.READ, effect]
        owe(met == len(wrong), HandlerPromise.VERIFIED_FIRST, f"{met} blocks were tampered with")
        arrived = [i for i, status in enumerate(result.statuses) if status is OK]
        for i in range(6):
            if i not in wrong:
                owe(i in arrived, HandlerPromise.PER_BLOCK, f"block {i}, a sound one, did not come")
        told = [i for i in wrong if i in arrived]
        bound = [i for i in told if _verifies(bench, hop, i)]
        owe(
            not bound and (not told or isinstance(bench.destination, SlotSide)),
            HandlerPromise.VERIFIED_FIRST,
            f"blocks {told} count as whole after a read that brought other bytes ({effect})",
        )
        statuses = [result.statuses[i].value for i in wrong]
        print(f"2 blocks with {effect} of a read of 6 ended as {statuses}")
        if not told:
            bench.judge_bytes(hop, arrived)


def _verifies(bench: Bench, hop: Hop, i: int) -> bool:
    """Whether block `i` lies in its host slot so that its reader would take it for whole."""
    side = bench.destination
    if not isinstance(side, SlotSide):
        return True
    checksum, data = side.checksum(hop.spec.dst, i), side.data(hop.spec.dst, i)
    if checksum is None or data is None:
        return False
    return checksum.verifies(hop.blocks[i].key, bench.geometry.rank, memoryview(data))


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

    @pytest.mark.parametrize("method", [Method.RESERVE, Method.WRITE, Method.PUBLISH])
    @pytest.mark.parametrize(
        "effect", [Effect.NO_SPACE, Effect.ENOSPC, Effect.TIER_ERROR, Effect.BUG]
    )
    def test_each_step_that_fails_leaves_no_trace(
        self, case: HandlerCase, make: MakeBench, method: Method, effect: Effect
    ) -> None:
        """F2: reserve, write and publish fail in turn: nothing is visible, every place was given
        back, and the same call works afterwards."""
        bench, store, faults = _faulty_bench(case, make)
        hop = bench.hop(bench.blocks(4))
        faults.inject(Fault(method=method, effect=effect))
        outcome = _attempt(bench, hop)
        owe(
            _is_of(outcome, effect)
            or (isinstance(outcome, HopResult) and OK not in outcome.statuses),
            HandlerPromise.OK_MEANS_THERE,
            f"a store whose {method} failed with {effect} led to {outcome!r}",
        )
        bench.judge_bytes(hop, [])
        owe(
            store.open_places == 0,
            HandlerPromise.GIVEN_UP,
            f"{store.open_places} places were neither published nor abandoned",
        )
        faults.inject()
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
