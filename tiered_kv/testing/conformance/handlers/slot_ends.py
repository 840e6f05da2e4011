"""Where one side is the rank's host block pool: slots that are given out anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tiered_kv.specs import CpuSpec, SlotRef
from tiered_kv.testing.conformance.contract import HandlerPromise, owe
from tiered_kv.testing.conformance.handlers.bench import Bench, Hop
from tiered_kv.testing.conformance.handlers.fixtures import HandlerFixtures, MakeBench
from tiered_kv.testing.conformance.handlers.sides import Fault, Side, SlotSide
from tiered_kv.values import BlockStatus

__all__ = ["SlotDestinationChecks", "SlotSourceChecks"]

OK, CANCELLED, MISSING = BlockStatus.OK, BlockStatus.CANCELLED, BlockStatus.MISSING
STALE = (CANCELLED, MISSING)
NOT_OK = tuple(status for status in BlockStatus if status is not OK)


class _Meddler:
    """Gives a slot to another owner right before the n-th call of a method for it."""

    def __init__(self, side: Side, method: str, slot: SlotRef, call: int) -> None:
        if not isinstance(side, SlotSide):
            raise TypeError("only slots can be given out anew")
        self._side = side
        self._method = method
        self._slot = slot
        self._left = call
        self.meddled = False

    def __call__(self, method: str, slot: SlotRef) -> None:
        if self.meddled or (method, slot) != (self._method, self._slot):
            return
        self._left -= 1
        if self._left == 0:
            self.meddled = True
            self._side.give_to_another(slot)


def _meddle(
    make: MakeBench, side: Callable[[Bench], Side], slots: Callable[[Hop], object], method: str
) -> int:
    """Have the second of three slots given out anew before each call of a method in turn, until
    the handler makes no further one; in how many runs it was."""
    for call in range(1, 20):
        bench = make()
        hop = bench.hop(bench.blocks(3))
        spec = slots(hop)
        if not isinstance(spec, CpuSpec):
            raise TypeError(f"{spec} is no place in the host block pool")
        meddler = _Meddler(side(bench), method, spec.slots[1], call)
        bench.pool.before = meddler
        result = bench.run(hop)
        bench.pool.before = lambda method, slot: None
        if not meddler.meddled:
            return call - 1
        found = f"block 1 is {result.statuses[1].value}, its slot was given out before {method}"
        owe(result.statuses[::2] == (OK, OK), HandlerPromise.PER_BLOCK, f"others suffered: {found}")
        if result.statuses[1] is OK:
            bench.judge_bytes(hop, [0, 1, 2])
        else:
            owe(result.statuses[1] in STALE, HandlerPromise.STALE_READ, found)
            assert_others(bench, hop)
    raise AssertionError(f"a handler that calls {method} for each of three slots 20 times")


def assert_others(bench: Bench, hop: Hop) -> None:
    """The first and the third block of the hop arrived."""
    arrived = set(bench.destination.arrived(hop.spec.dst, hop.blocks))
    owe({0, 2} <= arrived, HandlerPromise.OK_MEANS_THERE, f"only {arrived} of 0 and 2 arrived")


class SlotSourceChecks(HandlerFixtures):
    """F8, F52: read only under the generation that was given out."""

    def test_a_slot_that_was_given_out_anew_is_not_read(self, make: MakeBench) -> None:
        """It costs itself alone, and nothing of the new owner's bytes goes out."""
        bench = make()
        hop = bench.hop(bench.blocks(5), faults={0: Fault.GONE, 3: Fault.GONE})
        expected = [STALE if i in {0, 3} else OK for i in range(5)]
        bench.judge(hop, bench.run(hop), expected, HandlerPromise.BEGIN_BIND)

    def test_a_slot_that_nothing_is_bound_to_is_not_read(self, make: MakeBench) -> None:
        """Generations that never were, were, are not yet, and one that is begun only."""
        bench = make()
        blocks = bench.blocks(5)
        src, dst = bench.source.supply(blocks), bench.destination.offer(blocks)
        if not isinstance(src, CpuSpec):
            raise TypeError(f"the source is {src}, not the host block pool")
        begun = SlotRef(bench.slots - 1, 1)
        bench.pool.begin(begun)
        wrong = (SlotRef(0, 0), SlotRef(1, 2), begun, SlotRef(bench.slots - 2, 1))
        hop = bench.hop_between(blocks, CpuSpec((*wrong, src.slots[4])), dst)
        expected = [STALE] * 4 + [OK]
        bench.judge(hop, bench.run(hop), expected, HandlerPromise.BEGIN_BIND)

    @pytest.mark.parametrize("method", ["checksum", "view"])
    def test_a_slot_that_is_given_out_anew_meanwhile(self, make: MakeBench, method: str) -> None:
        """Before each of the handler's looks at it in turn. Whatever it answers, OK means that the
        right bytes arrived."""
        runs = _meddle(make, lambda bench: bench.source, lambda hop: hop.spec.src, method)
        print(f"the slot was given out anew before {runs} calls of {method}, in turn")

    def test_the_slot_is_looked_at_again_when_its_bytes_were_read(self, make: MakeBench) -> None:
        """Given out anew right before the last look: had the handler not looked, it could not
        know. So some look must come after the reading, and tell."""
        found: list[BlockStatus] = []
        for call in range(1, 20):
            bench = make()
            hop = bench.hop(bench.blocks(1))
            meddler = _Meddler(bench.source, "checksum", hop.spec.src.slots[0], call)
            bench.pool.before = meddler
            status = bench.run(hop).statuses[0]
            bench.pool.before = lambda method, slot: None
            if not meddler.meddled:
                break
            found.append(status)
        print(f"given out anew before each look: {[status.value for status in found]}")
        owe(
            len(found) >= 2 and found[-1] in STALE,
            HandlerPromise.STALE_READ,
            f"the slot was looked at {len(found)} times, and given out anew before the last look "
            f"its block was {found[-1].value if found else 'never asked for'}",
        )


class SlotDestinationChecks(HandlerFixtures):
    """F8, F52: written only between `begin` and `bind` of the own generation."""

    def test_a_slot_that_was_given_out_anew_is_not_written(self, make: MakeBench) -> None:
        """Its new owner's bytes stay as they are; the other blocks arrive."""
        bench = make()
        hop = bench.hop(bench.blocks(5), gone=[1, 4])
        expected = [CANCELLED if i in {1, 4} else OK for i in range(5)]
        bench.judge(hop, bench.run(hop), expected, HandlerPromise.STALE_BEGIN)

    @pytest.mark.parametrize("method", ["begin", "bind"])
    def test_a_slot_that_is_given_out_anew_meanwhile(self, make: MakeBench, method: str) -> None:
        """Before it is begun, and before it is bound."""
        runs = _meddle(make, lambda bench: bench.destination, lambda hop: hop.spec.dst, method)
        print(f"the slot was given out anew before {runs} calls of {method}, in turn")
        owe(runs > 0, HandlerPromise.BEGIN_BIND, f"no slot is ever written with {method}")

    def test_every_slot_is_begun_and_bound_once(self, make: MakeBench) -> None:
        """In that order, under the generation that the call was given."""
        bench = make()
        hop = bench.hop(bench.blocks(4))
        seen: list[tuple[str, SlotRef]] = []
        bench.pool.before = lambda method, slot: seen.append((method, slot))
        bench.judge(hop, bench.run(hop), [OK] * 4)
        bench.pool.before = lambda method, slot: None
        for slot in hop.spec.dst.slots:
            steps = [method for method, one in seen if one == slot and method in {"begin", "bind"}]
            owe(
                steps == ["begin", "bind"],
                HandlerPromise.BEGIN_BIND,
                f"slot {slot} went through {steps}",
            )
