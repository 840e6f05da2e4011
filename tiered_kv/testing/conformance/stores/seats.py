"""What the state machines share: stores of several ranks over one directory, in this process or in
processes of their own that die in mid-call."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tiered_kv.contracts import BlockStore, NewBlock, Place
from tiered_kv.testing.conformance.blocks import (
    StoreArguments,
    aligned_copy,
    content,
    new_block,
)
from tiered_kv.testing.conformance.contract import StorePromise, owe
from tiered_kv.testing.conformance.remote import ProcessDied, RemoteStore, StoreProcesses
from tiered_kv.testing.conformance.stores.case import StoreCase

__all__ = [
    "METHODS",
    "PERCENT",
    "RANKS",
    "WHICH",
    "Flight",
    "SeatedMachine",
    "block_of",
    "data_of",
    "one_of",
    "run_histories",
]

RANKS = 2
METHODS = ("reserve", "write", "publish", "delete", "discard", "read", "touch", "close")
"""In which a process may die."""
PERCENT = st.integers(0, 100)
WHICH = st.integers(0, 7)
"""Means one of the flights, see `one_of`."""


@lru_cache(maxsize=256)
def data_of(number: int, rank: int, length: int) -> bytes:
    """See `content`; remembered, since a history asks for the same ones after each step."""
    return content(number, rank, length)


@lru_cache(maxsize=256)
def block_of(number: int, rank: int, length: int) -> NewBlock:
    """See `new_block`; remembered likewise."""
    return new_block(number, rank, length)


class Flight:
    """Places between `reserve` and `publish`."""

    def __init__(self, seat: int, numbers: Sequence[int], places: Sequence[Place]) -> None:
        self.seat = seat
        self.numbers = numbers
        self.places = places
        self.written = False


def one_of(flights: Sequence[Flight], which: int) -> list[Flight]:
    """The flight that a drawn number means; none where there are none."""
    return [flights[which % len(flights)]] if flights else []


class SeatedMachine(RuleBasedStateMachine):
    """Seats 0 and 1 are ranks 0 and 1 of an engine; with processes of their own there is a third,
    rank 0 of another engine on the same machine. A crash empties a seat and fills it again.

    What is drawn never depends on what a store answered: where processes die and blocks are evicted
    the same draws may lead elsewhere, and hypothesis takes another choice at the same place for a
    fault of the machine. So rules that have nothing to do do nothing."""

    length: ClassVar[int]
    """Bytes of each block; the subclass says."""
    length_of_history: ClassVar[int]
    """Steps of each history at the most; the subclass says."""

    capacity: ClassVar[int | None] = None
    """Budget in bytes with which the stores are opened; that of the case, if not given."""

    def __init__(
        self,
        case: StoreCase,
        folder: Path,
        processes: StoreProcesses | None,
        happened: Counter[str],
    ) -> None:
        super().__init__()
        self.case = case
        self.happened = happened
        self.arguments = StoreArguments(
            folder / "tier",
            self.capacity or case.capacity,
            world_size=RANKS,
            block_bytes=(self.length,),
        )
        self.processes = processes
        self.flights: list[Flight] = []
        self.steps = 0
        self._opened_at = 0
        self.rank_of = (0, 1) if processes is None else (0, 1, 0)
        self.seats = [self._open(rank) for rank in self.rank_of]
        self.follower = case.open(self.arguments.with_(writable=False))

    def _open(self, rank: int) -> BlockStore:
        arguments = self.arguments.with_(rank=rank)
        if self.processes is None:
            return self.case.open(arguments)
        return RemoteStore(self.processes, arguments)

    @property
    def may_reopen(self) -> bool:
        """Not after each step: there is more to see of stores that are in use."""
        return self.case.reopens and self.steps >= self._opened_at + 4

    def seat(self, drawn: int) -> int:
        """One that there is."""
        return drawn % len(self.seats)

    def close_all(self) -> None:
        """Everybody closes, also with places in flight."""
        for store in (*self.seats, self.follower):
            store.close()
        self.flights.clear()

    def open_all(self) -> None:
        """Everybody opens again."""
        self._opened_at = self.steps
        self.seats = [self._open(rank) for rank in self.rank_of]
        self.follower = self.case.open(self.arguments.with_(writable=False))

    def take(self, seat: int, numbers: Sequence[int]) -> list[int]:
        """Reserve places for blocks: a flight more, unless there is nothing to do. The numbers
        that this rank has published already."""
        rank = self.rank_of[seat]
        answers = self.seats[seat].reserve([block_of(n, rank, self.length) for n in numbers])
        owe(
            len(answers) == len(numbers),
            StorePromise.ONE_ANSWER_EACH,
            f"{len(answers)} answers came for {len(numbers)} blocks",
        )
        known = [n for n, place in zip(numbers, answers, strict=True) if place is None]
        places = [place for place in answers if place is not None]
        if places:
            self.flights.append(Flight(seat, [n for n in numbers if n not in known], places))
        return known

    def fill(self, flight: Flight) -> None:
        """Write all places of a flight."""
        rank = self.rank_of[flight.seat]
        memory = [aligned_copy(data_of(n, rank, self.length)) for n in flight.numbers]
        self.seats[flight.seat].write(flight.places, memory)
        flight.written = True

    def land(self, flight: Flight) -> None:
        """Publish a flight."""
        self.flights.remove(flight)
        self.seats[flight.seat].publish(flight.places)

    def die(self, seat: int, method: str, numbers: Sequence[int], percent: int) -> None:
        """The process of a seat is killed with SIGKILL in a call of `method` for blocks, this far
        on, and another one takes the seat. Its places in flight are nobody's then."""
        store, rank = self.seats[seat], self.rank_of[seat]
        if not isinstance(store, RemoteStore):
            raise TypeError("a store in this process cannot be killed")
        blocks = [block_of(n, rank, self.length) for n in numbers]
        flight = None
        if method in {"write", "publish"}:
            before = len(self.flights)
            self.take(seat, numbers)
            flight = self.flights[-1] if len(self.flights) > before else None
            if flight is None:
                method = "reserve"  # all of it is published: there is nothing to write
            elif method == "publish":
                self.fill(flight)
        store.die_in_next_call(percent / 100)
        try:
            if method == "write" and flight is not None:
                self.fill(flight)
            elif method == "publish" and flight is not None:
                self.land(flight)
            elif method == "reserve":
                store.reserve(blocks)
            elif method == "discard":
                store.discard(blocks)
            elif method == "delete":
                store.delete([block.key for block in blocks])
            elif method == "touch":
                store.touch([block.key for block in blocks])
            elif method == "close":
                store.close()
            else:
                memory = [memoryview(bytearray(self.length)) for _ in blocks]
                store.read([block.key for block in blocks], memory)
        except ProcessDied as died:
            where = "in" if "in step" in str(died) else "after"
            self.happened[f"killed {where} {method}"] += 1
        self.flights = [flight for flight in self.flights if flight.seat != seat]
        self.seats[seat] = self._open(rank)

    def published(self, rank: int, numbers: Sequence[int]) -> set[int]:
        """Which of these parts the store says to have already, asked without changing anything."""
        seat = self.rank_of.index(rank)
        before = len(self.flights)
        known = self.take(seat, numbers)
        for flight in self.flights[before:]:
            self.flights.remove(flight)
            self.seats[seat].abandon(flight.places)
        return set(known)

    def teardown(self) -> None:
        """Close everything."""
        self.happened["histories"] += 1
        try:
            self.close_all()
        finally:
            for store in self.seats:
                if isinstance(store, RemoteStore):
                    store.kill()


def run_histories(
    machine: type[SeatedMachine],
    case: StoreCase,
    folder: Path,
    processes: StoreProcesses | None,
    examples: int,
) -> Counter[str]:
    """Run so many histories of a machine; what happened in all of them. Where there are processes,
    some must have been killed.

    Without deadlines, and with the same draws every time, so that a check that passes is not one
    that fails tomorrow. More examples draw other histories.
    """
    happened: Counter[str] = Counter()

    class Machine(machine):  # type: ignore[misc,valid-type]  # hypothesis calls it without arguments
        def __init__(self) -> None:
            super().__init__(case, Path(tempfile.mkdtemp(dir=folder)), processes, happened)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=machine.length_of_history,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
    print(", ".join(f"{name}: {count}" for name, count in sorted(happened.items())))
    owe(happened["blocks compared"], StorePromise.READ, "no block was ever read")
    if processes is not None:
        kills = sum(count for name, count in happened.items() if name.startswith("killed"))
        owe(kills, StorePromise.OUTLIVES, "no process was killed")
    return happened
