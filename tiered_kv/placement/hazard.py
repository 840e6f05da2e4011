"""How soon blocks come to be wanted again, learned from those that were: counts by class of block
and by age, and from them what keeping one is worth.

The worth of a block of a class at an age is the most uses per second that keeping it can bring,

    max over T of  P(used within T) / E[seconds until it is used, or T]

which is Gittins' index of it (J. C. Gittins: "Bandit processes and dynamic allocation indices",
1979): a block that will probably be wanted in a minute is not worth less after ten seconds without
a use than it was at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["AGES", "HazardTable"]

AGES = (0.0, *(5.0 * 1.3**step for step in range(38)))
"""Edges of the ages, in seconds: from 5 s to a day, each a third longer than the one before. What
is older is of the last age."""

_WIDTHS = tuple(end - begin for begin, end in pairwise(AGES))

MOST_COUNTED = 2_000_000
"""Blocks that are counted before all counts are halved, so that what is learned can change."""

ASSUMED_BLOCKS = 100.0
"""Blocks that count beside those that were seen: a block that was used `t` seconds ago ..."""

_ASSUMED = tuple(0.1 * width / (begin + width) for begin, width in zip(AGES, _WIDTHS, strict=False))
"""... is used with this chance at its age: the longer ago, the less per second."""


class _Counts:
    """Blocks of one class, one family, or all."""

    __slots__ = ("came", "used")

    def __init__(self) -> None:
        self.used = [0.0] * len(_WIDTHS)
        """That were used again at an age."""
        self.came = [0.0] * len(_WIDTHS)
        """That came to an age."""

    def halve(self) -> None:
        self.used = [value / 2 for value in self.used]
        self.came = [value / 2 for value in self.came]

    def chances(self, prior: Sequence[float], weight: float) -> list[float]:
        """Of a use at each age, of a block that comes to it."""
        return [
            (used + weight * before) / (came + weight)
            for used, came, before in zip(self.used, self.came, prior, strict=True)
        ]


class HazardTable:
    """Counts of blocks by class and age. Not thread-safe.

    Each class belongs to a family. Where a class was seen little its family counts, and where that
    was seen little, all blocks do: each with a weight, in blocks.
    """

    def __init__(self, families: Sequence[int], *, all_weight: float, family_weight: float) -> None:
        """The family of each class, numbered from 0."""
        self._all_weight = all_weight
        self._family_weight = family_weight
        self._all = _Counts()
        self._families = [_Counts() for _ in range(max(families) + 1)]
        self._family_of = [self._families[family] for family in families]
        self._classes = [_Counts() for _ in families]
        self._levels = [
            (own, family, self._all)
            for own, family in zip(self._classes, self._family_of, strict=True)
        ]
        self.worth = [_worth(_ASSUMED) for _ in families]
        """By class and age; as of the last `learn` of the class."""

    def came(self, kind: int, age: int, blocks: int) -> None:
        """Blocks of a class came to an age without a use; to age 0 by one."""
        for counts in self._levels[kind]:
            counts.came[age] += blocks

    def used(self, kind: int, age: int, blocks: int) -> None:
        """Blocks were used again at an age."""
        for counts in self._levels[kind]:
            counts.used[age] += blocks

    def learn(self, kind: int) -> None:
        """Bring the `worth` of a class up to date with what was counted."""
        if self._all.came[0] > MOST_COUNTED:
            for counts in (self._all, *self._families, *self._classes):
                counts.halve()
        every = self._all.chances(_ASSUMED, ASSUMED_BLOCKS)
        family = self._family_of[kind].chances(every, self._all_weight)
        self.worth[kind] = _worth(self._classes[kind].chances(family, self._family_weight))


def _worth(chances: Sequence[float]) -> list[float]:
    """The index at each age, from the chance of a use within each.

    From the last age to the first: what follows is added as long as it brings more per second.
    """
    worth = [0.0] * len(chances)
    following: list[tuple[float, float, float]] = []
    for age in reversed(range(len(chances))):
        uses = min(1.0, chances[age])
        seconds = _WIDTHS[age] * (1 - uses / 2)
        left = 1 - uses
        while following and following[-1][0] * seconds > uses * following[-1][1]:
            more_uses, more_seconds, more_left = following.pop()
            uses += left * more_uses
            seconds += left * more_seconds
            left *= more_left
        following.append((uses, seconds, left))
        worth[age] = uses / seconds
    return worth
