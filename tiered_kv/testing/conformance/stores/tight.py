"""A store that cannot hold all that is put into it, against a model that knows what it may hold."""

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

from tiered_kv.errors import NoSpace
from tiered_kv.testing.conformance.blocks import Read, disk_bytes, get, keys
from tiered_kv.testing.conformance.contract import StorePromise, owe
from tiered_kv.testing.conformance.remote import StoreProcesses
from tiered_kv.testing.conformance.stores.case import StoreCase, StoreFixtures
from tiered_kv.testing.conformance.stores.seats import (
    METHODS,
    PERCENT,
    RANKS,
    SeatedMachine,
    block_of,
    data_of,
    run_histories,
)
from tiered_kv.values import BlockStatus

__all__ = ["TightChecks"]

MIB = 2**20
CAPACITY = 8 * MIB
LENGTH = CAPACITY // 96
"""48 whole blocks of two ranks would fill the capacity to the last byte; there are 64."""
UNIVERSE = range(64)
BATCH = 8
SOME = st.lists(st.integers(UNIVERSE.start, UNIVERSE.stop - 1), max_size=BATCH, unique=True)
SEAT = st.integers(0, 5)


class TightMachine(SeatedMachine):
    """`parts` is what each rank may hold: what it has published and nobody has removed, as far as
    one can know. `whole` are the blocks that were visible last."""

    length = LENGTH
    length_of_history = 20
    capacity = CAPACITY

    def __init__(
        self,
        case: StoreCase,
        folder: Path,
        processes: StoreProcesses | None,
        happened: Counter[str],
    ) -> None:
        super().__init__(case, folder, processes, happened)
        self.parts: list[set[int]] = [set() for _ in range(RANKS)]
        self.whole: set[int] = set()
        self.may_be_torn = False
        """A process has died that may have been dropping blocks, and does not do that at once."""

    @initialize(method=st.sampled_from(METHODS), percent=PERCENT)
    def begin_full(self, method: str, percent: int) -> None:
        """Every history begins with more than fits, and those of processes with a kill."""
        for first in range(0, UNIVERSE.stop, BATCH):
            self.store_whole(list(range(first, first + BATCH)))
        if self.processes is not None:
            self.crash(0, method, [0, 1, 62, 63], percent)

    def _reserve(self, seat: int, numbers: list[int]) -> set[int] | None:
        """Those that got a place; None where there was no room."""
        rank = self.rank_of[seat]
        try:
            known = self.take(seat, numbers)
        except NoSpace:
            self.happened["refused"] += 1
            return None
        owe(
            self.parts[rank].issuperset(known),
            StorePromise.ALREADY,
            f"None came for {known}, of which {sorted(self.parts[rank])} can be there",
        )
        new = set(numbers) - set(known)
        self.parts[rank] -= new
        self.happened["evictions seen"] += len(self.whole & new)
        self.whole -= new  # evicted, and half of it is about to come back
        return new

    def _put(self, seat: int, numbers: list[int]) -> set[int]:
        """Store one rank's parts, if there is room: those that were not there."""
        before = len(self.flights)
        new = self._reserve(seat, numbers)
        for flight in self.flights[before:]:
            self.fill(flight)
            self.land(flight)
            self.parts[self.rank_of[seat]].update(flight.numbers)
        self.happened["put"] += 1
        return new or set()

    @rule(seat=SEAT, numbers=SOME)
    def put(self, seat: int, numbers: list[int]) -> None:
        """Store one rank's parts, if there is room."""
        self._put(self.seat(seat), numbers)

    @rule(numbers=SOME)
    def store_whole(self, numbers: list[int]) -> None:
        """Store both parts. What was there on neither rank is there at once on both."""
        new = sorted(set.intersection(*(self._put(seat, numbers) for seat in range(RANKS))))
        seen = self.seats[0].contains(keys(new))
        owe(all(seen), StorePromise.CONTAINS, f"blocks {new} were just stored, and are {seen}")
        self.whole.update(new)

    @rule(seat=SEAT, numbers=SOME)
    def take_off(self, seat: int, numbers: list[int]) -> None:
        """Reserve and write; what follows happens while the room is taken."""
        if self.flights:
            return
        seat = self.seat(seat)
        before = len(self.flights)
        self.happened["take off"] += 1
        self._reserve(seat, numbers)
        for flight in self.flights[before:]:
            self.fill(flight)

    @rule(publish=st.booleans())
    def come_down(self, publish: bool) -> None:
        """Publish what is in flight, or give it up."""
        if not self.flights:
            return
        (flight,) = self.flights
        self.happened["publish" if publish else "abandon"] += 1
        if publish:
            self.land(flight)
            self.parts[self.rank_of[flight.seat]].update(flight.numbers)
        else:
            self.flights.clear()
            self.seats[flight.seat].abandon(flight.places)

    @rule(seat=SEAT, numbers=SOME)
    def delete(self, seat: int, numbers: list[int]) -> None:
        """Drop blocks; they are gone then."""
        self.happened["delete"] += 1
        there = self.whole & set(numbers)
        count = self.seats[self.seat(seat)].delete(keys(numbers))
        some = set.union(*self.parts) & set(numbers)
        owe(
            count <= len(some),
            StorePromise.DELETE,
            f"{count} were counted where {len(there)} to {len(some)} blocks were",
        )
        self._gone(numbers)

    @rule(seat=SEAT, numbers=SOME)
    def discard(self, seat: int, numbers: list[int]) -> None:
        """Drop blocks by this rank's checksum. Those that it has no part of stay."""
        self.happened["discard"] += 1
        rank = self.rank_of[self.seat(seat)]
        self.seats[self.seat(seat)].discard([block_of(n, rank, LENGTH) for n in numbers])
        # Where the part was evicted before and the other rank's is a younger one, that one stays.
        self.whole -= set(numbers)
        self.parts[rank] -= set(numbers)

    def _gone(self, numbers: list[int]) -> None:
        self.whole -= set(numbers)
        for part in self.parts:
            part.difference_update(numbers)

    @rule(seat=SEAT, numbers=SOME)
    def touch(self, seat: int, numbers: list[int]) -> None:
        """Changes who goes next, and nothing else."""
        self.happened["touch"] += 1
        self.seats[self.seat(seat)].touch(keys(numbers))

    @precondition(lambda self: self.may_reopen)
    @rule()
    def reopen(self) -> None:
        """Everybody closes, also with places in flight, and opens again."""
        self.happened["reopen"] += 1
        self.close_all()
        self.open_all()

    @precondition(lambda self: self.processes is not None)
    @rule(seat=SEAT, method=st.sampled_from(METHODS), numbers=SOME, percent=PERCENT)
    def crash(self, seat: int, method: str, numbers: list[int], percent: int) -> None:
        """A process dies in a call, which may be evicting, and another one takes its place."""
        seat = self.seat(seat)
        try:
            self.die(seat, method, numbers, percent)
        except NoSpace:
            self.happened["refused"] += 1  # before it came to the kill
            return
        if method == "publish":
            self.parts[self.rank_of[seat]].update(numbers)
            self.whole -= set(numbers)  # one that was evicted unseen may be half there again
        self.may_be_torn = not self.case.drops_at_once

    @invariant()
    def nothing_wrong_nothing_half_nothing_too_much(self) -> None:
        """What is visible can be read by all ranks, bit for bit; what is not visible any more has
        no part left; the budget is kept."""
        self.steps += 1
        reads = [get(self.seats[rank], UNIVERSE, rank, LENGTH) for rank in range(RANKS)]
        seen = self.seats[-1].contains(keys(UNIVERSE))
        for number in UNIVERSE:
            found = [of_rank[number] for of_rank in reads]
            for rank, read in enumerate(found):
                self._judge(number, rank, read)
            there = [read.result.status is BlockStatus.OK for read in found]
            owe(
                all(there) or not seen[number],
                StorePromise.EVICTS_WHOLE,
                f"block {number} is visible, and read as {[str(r.result.status) for r in found]}",
            )
            if number in self.whole and not seen[number]:
                owe(
                    self.may_be_torn or not any(there),
                    StorePromise.EVICTS_WHOLE,
                    f"block {number} was evicted, and left parts behind: {there}",
                )
                self.happened["evictions seen"] += 1
                if not any(there):
                    self._gone([number])
        self.may_be_torn = False
        self.whole = {n for n in UNIVERSE if seen[n]}
        self._judge_budget()

    def _judge(self, number: int, rank: int, read: Read) -> None:
        if read.result.status is BlockStatus.OK:
            self.happened["blocks compared"] += 1
            owe(
                number in self.parts[rank]
                and read.sound
                and read.data == data_of(number, rank, LENGTH),
                StorePromise.READ,
                f"rank {rank} read block {number} as {read.result}: other bytes, or never stored",
            )
        else:
            owe(
                read.result.status is BlockStatus.MISSING,
                StorePromise.READ,
                f"rank {rank} read block {number} as {read.result}",
            )

    def _judge_budget(self) -> None:
        stat = self.seats[-1].stat()
        owe(
            stat.used_bytes <= stat.capacity_bytes == CAPACITY,
            StorePromise.BUDGET,
            f"stat tells {stat.used_bytes} of {stat.capacity_bytes} bytes, {CAPACITY} are allowed",
        )
        if self.case.directory:
            taken = disk_bytes(self.arguments.path)
            owe(
                taken <= CAPACITY,
                StorePromise.BUDGET,
                f"{taken} bytes are on the disk, {CAPACITY} are allowed",
            )


class TightChecks(StoreFixtures):
    """Histories in which whatever comes drives something else out."""

    def test_random_histories_of_a_store_that_is_too_small(
        self, case: StoreCase, tmp_path: Path
    ) -> None:
        """A hypothesis state machine; see `TightMachine`."""
        case.needs("bounded")
        self._run(case, tmp_path, None, max(2, case.examples // 2))

    def test_random_histories_of_processes_that_die_while_they_evict(
        self, case: StoreCase, tmp_path: Path
    ) -> None:
        """The same, of processes that are killed at any line of their calls."""
        case.needs("bounded", "shared_between_processes", "survives_kill")
        with StoreProcesses(case.open) as processes:
            self._run(case, tmp_path, processes, max(2, case.examples // 3))

    def _run(
        self, case: StoreCase, folder: Path, processes: StoreProcesses | None, examples: int
    ) -> None:
        happened = run_histories(TightMachine, case, folder, processes, examples)
        owe(happened["evictions seen"], StorePromise.EVICTS_WHOLE, "nothing was ever evicted")
