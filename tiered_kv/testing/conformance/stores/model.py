"""The store against a model: random histories, compared to a dict after each step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)

from tiered_kv.testing.conformance.blocks import ODD_BYTES, get, key, keys
from tiered_kv.testing.conformance.contract import StorePromise, owe
from tiered_kv.testing.conformance.remote import StoreProcesses
from tiered_kv.testing.conformance.stores.case import StoreCase, StoreFixtures
from tiered_kv.testing.conformance.stores.following import KeyMirror
from tiered_kv.testing.conformance.stores.seats import (
    METHODS,
    PERCENT,
    RANKS,
    WHICH,
    Flight,
    SeatedMachine,
    block_of,
    data_of,
    one_of,
    run_histories,
)
from tiered_kv.values import BlockStatus

__all__ = ["ModelChecks"]

UNIVERSE = range(12)
SOME = st.lists(st.integers(UNIVERSE.start, UNIVERSE.stop - 1), max_size=5, unique=True)
SEAT = st.integers(0, 5)


class StoreMachine(SeatedMachine):
    """`parts` is what each rank has published. All of it fits the capacity, so nothing is
    evicted."""

    length = ODD_BYTES
    length_of_history = 30

    def __init__(
        self,
        case: StoreCase,
        folder: Path,
        processes: StoreProcesses | None,
        happened: Counter[str],
    ) -> None:
        super().__init__(case, folder, processes, happened)
        self.parts: list[set[int]] = [set() for _ in range(RANKS)]
        self.mirror = KeyMirror(self.follower)

    @property
    def whole(self) -> set[int]:
        """Numbers of the blocks that are visible."""
        return set.intersection(*self.parts)

    @initialize(seat=SEAT, numbers=SOME, method=st.sampled_from(METHODS), percent=PERCENT)
    def begin_with_something(
        self, seat: int, numbers: list[int], method: str, percent: int
    ) -> None:
        """No history begins empty, and none of stores that can be killed without a kill."""
        for rank in range(RANKS):
            self.store(rank, [0, 1])
        self.store(seat, numbers)
        if self.processes is not None:
            self.crash(seat + 1, method, numbers, percent)

    @rule(seat=SEAT, numbers=SOME)
    def reserve(self, seat: int, numbers: list[int]) -> None:
        """Take places; None exactly for what this rank has published."""
        seat = self.seat(seat)
        self.happened["reserve"] += 1
        known = self.take(seat, numbers)
        expected = [n for n in numbers if n in self.parts[self.rank_of[seat]]]
        owe(known == expected, StorePromise.ALREADY, f"None came for {known}, not {expected}")

    @rule(which=WHICH)
    def write(self, which: int) -> None:
        """Write all places of a flight, if there is one."""
        for flight in one_of([f for f in self.flights if not f.written], which):
            self.happened["write"] += 1
            self.fill(flight)

    @rule(which=WHICH)
    def publish(self, which: int) -> None:
        """Publish a written flight, also when another has published its keys meanwhile."""
        for flight in one_of([f for f in self.flights if f.written], which):
            self._publish(flight)

    def _publish(self, flight: Flight) -> None:
        self.happened["publish"] += 1
        self.land(flight)
        self.parts[self.rank_of[flight.seat]].update(flight.numbers)

    @rule(which=WHICH)
    def abandon(self, which: int) -> None:
        """Give a flight up, written or not."""
        for flight in one_of(self.flights, which):
            self.happened["abandon"] += 1
            self.flights.remove(flight)
            self.seats[flight.seat].abandon(flight.places)

    @rule(seat=SEAT, numbers=SOME)
    def store(self, seat: int, numbers: list[int]) -> None:
        """All steps at once."""
        before = len(self.flights)
        self.reserve(seat, numbers)
        for flight in self.flights[before:]:
            self.fill(flight)
            self.land(flight)
            self.parts[self.rank_of[flight.seat]].update(flight.numbers)
        self.happened["put"] += 1

    @rule(seat=SEAT, numbers=SOME)
    def delete(self, seat: int, numbers: list[int]) -> None:
        """Drop blocks, whole ones and parts."""
        self.happened["delete"] += 1
        whole, some = self.whole & set(numbers), set.union(*self.parts) & set(numbers)
        count = self.seats[self.seat(seat)].delete(keys(numbers))
        owe(
            len(whole) <= count <= len(some),
            StorePromise.DELETE,
            f"{count} were counted where {len(whole)} whole blocks were",
        )
        for part in self.parts:
            part.difference_update(numbers)

    @rule(seat=SEAT, numbers=SOME, same=st.booleans())
    def discard(self, seat: int, numbers: list[int], same: bool) -> None:
        """Drop blocks by this rank's checksum, or fail to by another."""
        self.happened["discard"] += 1
        rank = self.rank_of[self.seat(seat)]
        length = ODD_BYTES if same else ODD_BYTES - 1
        blocks = [block_of(n, rank, length) for n in numbers]
        count = self.seats[self.seat(seat)].discard(blocks)
        gone = self.parts[rank] & set(numbers) if same else set()
        owe(
            len(self.whole & gone) <= count <= len(gone),
            StorePromise.DISCARD,
            f"{count} were counted where {len(gone)} rows had the checksum",
        )
        for part in self.parts:
            part.difference_update(gone)

    @rule(seat=SEAT, numbers=SOME)
    def touch(self, seat: int, numbers: list[int]) -> None:
        """Changes nothing that can be seen."""
        self.happened["touch"] += 1
        self.seats[self.seat(seat)].touch(keys(numbers))

    @precondition(lambda self: self.may_reopen)
    @rule()
    def reopen(self) -> None:
        """Everybody closes, also with places in flight, and opens again."""
        self.happened["reopen"] += 1
        self.close_all()
        self.open_all()
        self.mirror = KeyMirror(self.follower)

    @precondition(lambda self: self.processes is not None)
    @rule(seat=SEAT, method=st.sampled_from(METHODS), numbers=SOME, percent=PERCENT)
    def crash(self, seat: int, method: str, numbers: list[int], percent: int) -> None:
        """A process dies in a call and another one takes its place. What the call was about to
        publish or to drop is there or gone, block by block; all else is as it was."""
        seat = self.seat(seat)
        rank = self.rank_of[seat]
        self.die(seat, method, numbers, percent)
        in_doubt = set(numbers) if method in {"delete", "discard"} else set()
        held = sorted(self.whole - in_doubt)
        seen = self.seats[seat].contains(keys(held))
        owe(
            all(seen),
            StorePromise.OUTLIVES,
            f"of the published blocks {held} are left {seen} after a process died in {method}",
        )
        if method == "publish":
            new = self.published(rank, numbers) - self.parts[rank]
            self.happened["published in doubt, and there"] += len(new)
            self.parts[rank] |= new
        elif method in {"delete", "discard"}:
            self._settle_removal(numbers, had_by=range(RANKS) if method == "delete" else [rank])

    def _settle_removal(self, numbers: list[int], had_by: range | list[int]) -> None:
        """Each of these blocks has all the parts that it had, or none of them; or some, where the
        case says that they do not go at once."""
        now = [self.published(rank, numbers) for rank in range(RANKS)]
        for number in numbers:
            had = [number in part for part in self.parts]
            has = [number in part for part in now]
            may_go = any(had[rank] for rank in had_by)
            owe(
                has == had or (may_go and not (any(has) and self.case.drops_at_once)),
                StorePromise.DELETE,
                f"block {number} had the parts {had} by rank, and {has} after a process died that "
                "was about to drop it",
            )
            for part, left in zip(self.parts, has, strict=True):
                if not left:
                    part.discard(number)

    @invariant()
    def everybody_sees_the_truth(self) -> None:
        """The model, the mirror, `scan`, `contains`, `stat` and `read` agree."""
        self.steps += 1
        expected = {key(n) for n in self.whole}
        owe(
            self.mirror.follow() == expected,
            StorePromise.CHANGES,
            f"the follower knows {len(self.mirror.keys)} keys of {len(expected)}",
        )
        for rank, store in zip(self.rank_of, self.seats, strict=True):
            owe(set(store.scan()) == expected, StorePromise.SCAN, "scan finds other keys")
            seen = store.contains(keys(UNIVERSE))
            owe(
                seen == [n in self.whole for n in UNIVERSE],
                StorePromise.ALL_RANKS,
                f"contains answered {seen} where {sorted(self.whole)} are whole",
            )
            owe(
                store.stat().blocks == len(expected),
                StorePromise.STAT_BLOCKS,
                f"stat tells {store.stat().blocks} blocks of {len(expected)}",
            )
            for number, read in enumerate(get(store, UNIVERSE, rank, ODD_BYTES)):
                self.happened["blocks compared"] += read.sound
                if number in self.whole:
                    right = read.sound and read.data == data_of(number, rank, ODD_BYTES)
                    owe(right, StorePromise.READ, f"block {number} was read as {read.result}")
                elif number not in self.parts[rank]:
                    owe(
                        read.result.status is BlockStatus.MISSING,
                        StorePromise.READ,
                        f"block {number}, which is not there, was read as {read.result}",
                    )


class ModelChecks(StoreFixtures):
    """Histories that nobody thought of."""

    def test_random_histories_agree_with_a_model(self, case: StoreCase, tmp_path: Path) -> None:
        """A hypothesis state machine of two ranks and a follower; see `StoreMachine`."""
        run_histories(StoreMachine, case, tmp_path, None, case.examples)

    def test_random_histories_among_processes_that_die(
        self, case: StoreCase, tmp_path: Path
    ) -> None:
        """Each rank in a process of its own, and rank 0 of a second engine; they are killed with
        SIGKILL at any line of their calls, and come back."""
        case.needs("shared_between_processes", "survives_kill")
        with StoreProcesses(case.open) as processes:
            run_histories(StoreMachine, case, tmp_path, processes, max(2, case.examples // 3))
