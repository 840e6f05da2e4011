"""The store against a model: random histories, compared to a dict after each step."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tiered_kv.contracts import BlockStore, Place
from tiered_kv.testing.conformance.blocks import (
    ODD_BYTES,
    StoreArguments,
    aligned_copy,
    content,
    get,
    key,
    keys,
    new_block,
)
from tiered_kv.testing.conformance.contract import StorePromise, owe
from tiered_kv.testing.conformance.stores.case import StoreCase, StoreFixtures
from tiered_kv.testing.conformance.stores.following import KeyMirror
from tiered_kv.values import BlockStatus

__all__ = ["ModelChecks"]

RANKS = 2
NUMBERS = st.integers(0, 11)
SOME = st.lists(NUMBERS, max_size=5, unique=True)
RANK = st.integers(0, RANKS - 1)


class _Flight:
    """Places between `reserve` and `publish`."""

    def __init__(self, rank: int, numbers: Sequence[int], places: Sequence[Place]) -> None:
        self.rank = rank
        self.numbers = numbers
        self.places = places
        self.written = False


class StoreMachine(RuleBasedStateMachine):
    """Two ranks and a follower over one directory; `parts` is what each rank has published. All
    of it fits the capacity, so nothing is evicted."""

    def __init__(self, case: StoreCase, folder: Path) -> None:
        super().__init__()
        self.case = case
        self.arguments = StoreArguments(folder / "tier", case.capacity, world_size=RANKS)
        self.parts: list[set[int]] = [set() for _ in range(RANKS)]
        self.flights: list[_Flight] = []
        self.ranks = [self._open(rank) for rank in range(RANKS)]
        self.follower = self._open(0, writable=False)
        self.mirror = KeyMirror(self.follower)

    def _open(self, rank: int, *, writable: bool = True) -> BlockStore:
        return self.case.open(self.arguments.with_(rank=rank, writable=writable))

    @property
    def whole(self) -> set[int]:
        """Numbers of the blocks that are visible."""
        return set.intersection(*self.parts)

    @initialize(rank=RANK, numbers=SOME)
    def begin_with_something(self, rank: int, numbers: list[int]) -> None:
        """Not every history begins empty."""
        self.store(rank, numbers)

    @rule(rank=RANK, numbers=SOME)
    def reserve(self, rank: int, numbers: list[int]) -> None:
        """Take places; None exactly for what this rank has published."""
        answers = self.ranks[rank].reserve([new_block(n, rank, ODD_BYTES) for n in numbers])
        known = [n for n, place in zip(numbers, answers, strict=True) if place is None]
        expected = [n for n in numbers if n in self.parts[rank]]
        owe(known == expected, StorePromise.ALREADY, f"None came for {known}, not {expected}")
        places = [place for place in answers if place is not None]
        if places:
            new = [n for n in numbers if n not in known]
            self.flights.append(_Flight(rank, new, places))

    @precondition(lambda self: any(not flight.written for flight in self.flights))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Write all places of a flight."""
        waiting = [flight for flight in self.flights if not flight.written]
        flight = data.draw(st.sampled_from(waiting))
        memory = [aligned_copy(content(n, flight.rank, ODD_BYTES)) for n in flight.numbers]
        self.ranks[flight.rank].write(flight.places, memory)
        flight.written = True

    @precondition(lambda self: any(flight.written for flight in self.flights))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """Publish a written flight, also when another has published its keys meanwhile."""
        flight = data.draw(st.sampled_from([f for f in self.flights if f.written]))
        self.flights.remove(flight)
        self.ranks[flight.rank].publish(flight.places)
        self.parts[flight.rank].update(flight.numbers)

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        """Give a flight up, written or not."""
        flight = data.draw(st.sampled_from(self.flights))
        self.flights.remove(flight)
        self.ranks[flight.rank].abandon(flight.places)

    @rule(rank=RANK, numbers=SOME)
    def store(self, rank: int, numbers: list[int]) -> None:
        """All steps at once."""
        before = len(self.flights)
        self.reserve(rank, numbers)
        for flight in self.flights[before:]:
            self.flights.remove(flight)
            memory = [aligned_copy(content(n, rank, ODD_BYTES)) for n in flight.numbers]
            self.ranks[rank].write(flight.places, memory)
            self.ranks[rank].publish(flight.places)
            self.parts[rank].update(flight.numbers)

    @rule(rank=RANK, numbers=SOME)
    def delete(self, rank: int, numbers: list[int]) -> None:
        """Drop blocks, whole ones and parts."""
        whole, some = self.whole & set(numbers), set.union(*self.parts) & set(numbers)
        count = self.ranks[rank].delete(keys(numbers))
        owe(
            len(whole) <= count <= len(some),
            StorePromise.DELETE,
            f"{count} were counted where {len(whole)} whole blocks were",
        )
        for part in self.parts:
            part.difference_update(numbers)

    @rule(rank=RANK, numbers=SOME, same=st.booleans())
    def discard(self, rank: int, numbers: list[int], same: bool) -> None:
        """Drop blocks by this rank's checksum, or fail to by another."""
        length = ODD_BYTES if same else ODD_BYTES - 1
        count = self.ranks[rank].discard([new_block(n, rank, length) for n in numbers])
        gone = self.parts[rank] & set(numbers) if same else set()
        owe(
            len(self.whole & gone) <= count <= len(gone),
            StorePromise.DISCARD,
            f"{count} were counted where {len(gone)} rows had the checksum",
        )
        for part in self.parts:
            part.difference_update(gone)

    @rule(rank=RANK, numbers=SOME)
    def touch(self, rank: int, numbers: list[int]) -> None:
        """Changes nothing that can be seen."""
        self.ranks[rank].touch(keys(numbers))

    @precondition(lambda self: self.case.reopens)
    @rule()
    def reopen(self) -> None:
        """Everybody closes, also with places in flight, and opens again."""
        for store in (*self.ranks, self.follower):
            store.close()
        self.flights.clear()
        self.ranks = [self._open(rank) for rank in range(RANKS)]
        self.follower = self._open(0, writable=False)
        self.mirror = KeyMirror(self.follower)

    @invariant()
    def everybody_sees_the_truth(self) -> None:
        """The model, the mirror, `scan`, `contains`, `stat` and `read` agree."""
        expected = {key(n) for n in self.whole}
        owe(
            self.mirror.follow() == expected,
            StorePromise.CHANGES,
            f"the follower knows {len(self.mirror.keys)} keys of {len(expected)}",
        )
        for rank, store in enumerate(self.ranks):
            owe(set(store.scan()) == expected, StorePromise.SCAN, "scan finds other keys")
            seen = store.contains(keys(range(12)))
            owe(
                seen == [n in self.whole for n in range(12)],
                StorePromise.ALL_RANKS,
                f"contains answered {seen} where {sorted(self.whole)} are whole",
            )
            owe(
                store.stat().blocks == len(expected),
                StorePromise.STAT_BLOCKS,
                f"stat tells {store.stat().blocks} blocks of {len(expected)}",
            )
            for number, read in enumerate(get(store, range(12), rank, ODD_BYTES)):
                if number in self.whole:
                    right = read.sound and read.data == content(number, rank, ODD_BYTES)
                    owe(right, StorePromise.READ, f"block {number} was read as {read.result}")
                elif number not in self.parts[rank]:
                    owe(
                        read.result.status is BlockStatus.MISSING,
                        StorePromise.READ,
                        f"block {number}, which is not there, was read as {read.result}",
                    )

    def teardown(self) -> None:
        """Close everything."""
        for store in (*self.ranks, self.follower):
            store.close()


class ModelChecks(StoreFixtures):
    """Histories that nobody thought of."""

    def test_random_histories_agree_with_a_model(self, case: StoreCase, tmp_path: Path) -> None:
        """A hypothesis state machine of two ranks and a follower; see `StoreMachine`."""

        class Machine(StoreMachine):
            def __init__(self) -> None:
                super().__init__(case, Path(tempfile.mkdtemp(dir=tmp_path)))

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=case.examples,
                stateful_step_count=30,
                deadline=None,
                database=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            ),
        )
