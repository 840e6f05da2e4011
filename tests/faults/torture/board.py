"""What the processes of a round tell each other: shared memory, which outlives whoever is killed.

Every cell has one writer. A number is written whole, and what it counts is written before it.
"""

from __future__ import annotations

import enum
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Board", "Count", "Phase", "Seat", "short"]

_MOST_ACKS = 8_192
_MOST_REMOVALS = 32_768
_NAMESPACE_BYTES = 8


class Phase(enum.IntEnum):
    """What the storing thread of a process is doing."""

    BETWEEN = 0
    """Between two calls of the store."""
    OPEN = 1
    RESERVE = 2
    EVICT = 3
    """Inside `reserve`, or `publish`: from the choice of a block to evict to the end of the
    transaction."""
    DATA = 4
    HEADERS = 5
    """Inside `publish`, before its transaction: header tables, flushes."""
    INDEX = 6
    """The transaction that publishes."""
    CLOSE = 7
    REMOVE = 8
    """Inside `delete`."""
    ENDED = 9


STORING = frozenset({Phase.RESERVE, Phase.EVICT, Phase.DATA, Phase.HEADERS, Phase.INDEX})


class Count(enum.IntEnum):
    """What a process counts, in blocks."""

    STORED = 0
    LOADED = 1
    """Read whole, verified, and compared with the true content."""
    MISSING = 2
    EVICTED = 3
    DELETED = 4
    NO_SPACE = 5
    """Refused by `reserve`."""
    NO_ROOM = 6
    """Refused by `write` or `publish`, though reserved, or by `delete`."""
    WRONG = 7
    """Verified, and not the true content."""
    CORRUPT = 8
    """Did not verify."""
    FAILED = 9
    """Not read, by an error of the tier."""
    OPENED = 10
    """Times that the store was opened."""


_SEAT = np.dtype(
    [
        ("phase", "i8"),
        ("loading", "i8"),
        ("evicts", "i8"),
        ("ready", "i8"),
        ("batches", "i8"),
        ("armed", "i8"),
        ("in_flight", "i8"),
        ("counts", "i8", (len(Count),)),
        ("acked", "i8"),
        ("acks", "i8", (_MOST_ACKS,)),
        ("removed", "i8"),
        ("removals", "u8", (_MOST_REMOVALS,)),
    ]
)


class Seat:
    """The part of one process."""

    def __init__(self, record: npt.NDArray[np.void]) -> None:
        self._record = record
        self._counts = record["counts"]

    @property
    def phase(self) -> Phase:
        """Where its storing thread is, or was when it was killed."""
        return Phase(int(self._record["phase"]))

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._record["phase"] = phase

    @property
    def loading(self) -> bool:
        """Whether its loading thread is inside `read`."""
        return bool(self._record["loading"])

    @loading.setter
    def loading(self, loading: bool) -> None:
        self._record["loading"] = loading

    @property
    def evicts(self) -> bool:
        """Whether the `reserve` before the last had to evict: the tier is full, the next one has
        to, too."""
        return bool(self._record["evicts"])

    @evicts.setter
    def evicts(self, evicts: bool) -> None:
        self._record["evicts"] = evicts

    @property
    def ready(self) -> bool:
        """Whether it has stored, and loaded."""
        return bool(self._record["ready"])

    @ready.setter
    def ready(self, ready: bool) -> None:
        self._record["ready"] = ready

    @property
    def batches(self) -> int:
        """How many batches it has begun."""
        return int(self._record["batches"])

    @batches.setter
    def batches(self, batches: int) -> None:
        self._record["batches"] = batches

    @property
    def armed(self) -> bool:
        """Whether it has set the timer that kills it."""
        return bool(self._record["armed"])

    @property
    def in_flight(self) -> bool:
        """Whether a store, a load and an eviction were under way when it set the timer."""
        return bool(self._record["in_flight"])

    def arm(self, *, in_flight: bool) -> None:
        """Say that the timer is about to be set."""
        self._record["in_flight"] = in_flight
        self._record["armed"] = True

    def count(self, what: Count, blocks: int = 1) -> None:
        """Add to a count."""
        self._counts[what] += blocks

    def counted(self, what: Count) -> int:
        """A count."""
        return int(self._counts[what])

    def acknowledge(self, numbers: Sequence[int]) -> None:
        """`publish` has returned for these blocks."""
        acked = int(self._record["acked"])
        end = acked + len(numbers)
        self._record["acks"][acked:end] = numbers
        self._record["acked"] = end

    def acknowledged(self) -> list[int]:
        """The blocks for which `publish` has returned, in order."""
        acked = int(self._record["acked"])
        found: list[int] = self._record["acks"][:acked].tolist()
        return found

    def remove(self, blocks: Sequence[bytes]) -> None:
        """These blocks, by their full keys, are about to be removed from the index."""
        removed = int(self._record["removed"])
        end = removed + len(blocks)
        self._record["removals"][removed:end] = [short(one[_NAMESPACE_BYTES:]) for one in blocks]
        self._record["removed"] = end

    def removals(self) -> set[int]:
        """The first bytes of the keys of all blocks that `remove` was told of."""
        return set(self._record["removals"][: int(self._record["removed"])].tolist())


def short(key: bytes) -> int:
    """A key's first bytes, which are enough to tell it by."""
    return int.from_bytes(key[:8], "big")


class Board:
    """Made before the processes are forked."""

    def __init__(self, seats: int) -> None:
        stop = mmap.PAGESIZE
        self._memory = mmap.mmap(-1, stop + seats * _SEAT.itemsize)
        self._head = np.frombuffer(self._memory, "i8", 1)
        durations = np.frombuffer(self._memory, "f8", len(Phase), 64)
        self.durations: npt.NDArray[np.float64] = durations
        """About how long each phase takes, in seconds; whoever measures writes."""
        self._table = np.frombuffer(self._memory, _SEAT, seats, stop)
        self.seats = [Seat(record) for record in self._table]

    def clear(self) -> None:
        """For the next round; durations are kept."""
        self._head[0] = 0
        self._table[:] = np.zeros(1, _SEAT)
        self._table["phase"] = Phase.ENDED

    @property
    def stopped(self) -> bool:
        """Whether the processes are to close their stores and end."""
        return bool(self._head[0])

    def stop(self) -> None:
        """Ask them to."""
        self._head[0] = 1

    def in_flight(self) -> bool:
        """Whether a store, a load and an eviction are under way. A `reserve` of a process whose
        last one had to evict is both a store and an eviction, whether it has the index's lock or
        waits for it: there is one such lock, so that nobody else could evict in a transaction that
        publishes."""
        phases = [(seat, seat.phase) for seat in self.seats]
        stores = any(phase in STORING for _, phase in phases)
        loads = any(seat.loading for seat in self.seats)
        evicts = any(
            phase is Phase.EVICT or (phase is Phase.RESERVE and seat.evicts)
            for seat, phase in phases
        )
        return stores and loads and evicts
