"""Which of a tier's directories a segment lies in, and how a batch is spread over them.

A segment's number says it, so that it need not be looked up.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["place_of", "segment_number", "sequence_of", "shares"]

SHARE_BYTES = 4 * 2**20
"""A batch is split over directories in parts of at least about this size: a call's."""

_PLACE_SHIFT = 26


def place_of(number: int) -> int:
    """Which of the tier's directories a segment lies in, from 0."""
    return number >> _PLACE_SHIFT


def segment_number(place: int, sequence: int) -> int:
    """Number of a segment of a directory."""
    return place << _PLACE_SHIFT | sequence % (1 << _PLACE_SHIFT)


def sequence_of(number: int) -> int:
    """The `sequence` of a segment's number."""
    return number % (1 << _PLACE_SHIFT)


def shares(rooms: Mapping[int, int], count: int, slot_bytes: int) -> dict[int, int]:
    """How many of `count` slots to take in each segment, at most as many as are free in it
    (`rooms`): alike in all directories, as far as each gets a call that is worth it."""
    by_place: dict[int, list[int]] = {}
    for number in sorted(rooms, key=lambda number: -rooms[number]):
        by_place.setdefault(place_of(number), []).append(number)
    free = {place: sum(rooms[n] for n in numbers) for place, numbers in by_place.items()}
    places = sorted(free, key=lambda place: -free[place])
    # The emptiest directories first, so that batches too small to be split take turns.
    wide = max(1, min(len(places), count * slot_bytes // SHARE_BYTES))
    given: dict[int, int] = {}

    def take(place: int, most: int) -> int:
        for number in by_place[place]:
            share = min(most, rooms[number] - given.get(number, 0))
            if share:
                given[number] = given.get(number, 0) + share
                most -= share
        return most

    left = count
    for turn, place in enumerate(reversed(places[:wide])):
        # The fullest first: what it has no room for, the others take.
        quota = -(-left // (wide - turn))
        left -= quota - take(place, quota)
    for place in places:
        left = take(place, left)
    return given
