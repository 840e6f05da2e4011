"""The default policy: least worth first, by what was learned of blocks like these.

What is worth keeping is a matter of who asks: a conversation that grew by a little is asked for
again more probably than one that began with a long document, and a prefix that many share, more
than either. So blocks are classed by how often they were used, old uses counting less, and by how
much of the request that used them last was new; of each class it is counted at which ages its
blocks are used again, and the worth of a block is what keeping it can bring per second
(`HazardTable`).

Blocks that a request uses together, of one class, are one *run*: they have one age and one worth,
so that most of the work is done once per run. Of a run the end goes first.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from tiered_kv.placement.hazard import AGES, HazardTable
from tiered_kv.placement.lru import oldest_first

__all__ = ["PrefixPolicy"]

K = TypeVar("K", bound=Hashable)

HALF_LIFE = 1200.0
"""Seconds, where none is given."""

USES = (1.25, 1.75, 2.5, 3.5, 5.0, 8.0, 14.0, 25.0, 50.0, 100.0)
"""Edges of the families: how often a block was used, aged."""

NEW = (1, 2, 3, 5, 9, 17, 33)
"""Edges of the classes of a family: blocks of the request that were new."""

LAST = (len(USES) + 1) * (len(NEW) + 1)
"""Class of the last block of a request that was new: it is used again only where the request is
repeated or goes on exactly there. A family of its own."""

ALL_WEIGHT = 10.0
FAMILY_WEIGHT = 3000.0
"""Blocks that a class must have been seen of to count as much as its family."""

LEARN_EVERY = 16
"""Requests after which some classes are brought up to date ..."""

LEARN_CLASSES = 4
"""... so many of those that have blocks."""

AGE_EVERY = 1.0
"""Seconds after which the ages of runs are brought up to date."""

LEAST_MEMORY = 262_144
"""Keys that are remembered, whether they are here or not, at least ..."""

MEMORY = 4
"""... and as a multiple of the capacity."""


class _Run(Generic[K]):
    """Blocks that were used last by the same request, and had been used alike before."""

    __slots__ = ("age", "count", "forgotten", "here", "keys", "kind", "left", "since")

    def __init__(self, keys: Sequence[K], kind: int, since: float, count: float) -> None:
        self.keys = keys
        self.kind = kind
        """Class."""
        self.since = since
        self.count = count
        """Aged uses, at `since`."""
        self.age = 0
        self.left = len(keys)
        """Blocks that no later run has."""
        self.here: list[K] = []
        """Those that were stored, in order; some may have gone."""
        self.forgotten = False
        """Whether those that are not here are."""


class PrefixPolicy(Generic[K]):
    """An `EvictionPolicy`; most of its work is done once per run. Not thread-safe."""

    def __init__(self, capacity: int, half_life: float | None = None) -> None:
        """For a tier of so many blocks; uses count half after so many seconds.

        Raises:
            ValueError: the half-life is not above 0.
        """
        self._half_life = HALF_LIFE if half_life is None else half_life
        if not self._half_life > 0:
            raise ValueError(f"a half-life is above 0 seconds, not {half_life}")
        self._memory = max(LEAST_MEMORY, MEMORY * capacity)
        families = [kind // (len(NEW) + 1) for kind in range(LAST)]
        self._table = HazardTable(
            [*families, families[-1] + 1], all_weight=ALL_WEIGHT, family_weight=FAMILY_WEIGHT
        )
        self._runs: dict[K, _Run[K]] = {}
        """Run of every key that is remembered."""
        self._here: set[K] = set()
        self._history: deque[_Run[K]] = deque()
        """Runs whose keys are remembered, oldest first."""
        self._aging: list[deque[_Run[K]]] = [deque() for _ in range(len(AGES) - 1)]
        """Runs by age, oldest first."""
        self._places: dict[tuple[int, int], OrderedDict[_Run[K], None]] = {}
        """Runs that have blocks here, by class and age, oldest first."""
        self._order: list[tuple[float, int, int]] = []
        """(worth, -age, class) of all places, least worth first."""
        self._now = self._aged = -math.inf
        self._requests = self._learned = 0

    # Uses

    def wanted(self, keys: Sequence[K], now: float) -> None:
        """A use of each block, also of those that are not here."""
        if not keys:
            return
        self._now = max(now, self._now)
        if self._now - self._aged >= AGE_EVERY:
            self._aged = self._now
            self._age()
        self._use(keys)
        self._requests += 1
        if self._requests % LEARN_EVERY == 0:
            self._learn()
        self._forget()

    def _use(self, keys: Sequence[K]) -> None:
        known = [self._runs.get(key) for key in keys]
        new = known.count(None)
        fresh = bisect_right(NEW, new)
        end = len(keys) if new == 0 else len(keys) - 1
        start = 0
        for position in range(1, end + 1):
            if position == end or known[position] is not known[start]:
                if start < end:
                    self._begin(keys[start:position], known[start], fresh)
                start = position
        if end < len(keys):
            self._begin(keys[end:], known[end], fresh, LAST)

    def _begin(
        self, keys: Sequence[K], old: _Run[K] | None, fresh: int, kind: int | None = None
    ) -> None:
        """Blocks of a run, or new ones, are used together."""
        count = 1.0
        if old is not None:
            count += old.count * 2.0 ** ((old.since - self._now) / self._half_life)
            old.left -= len(keys)
            self._table.used(old.kind, old.age, len(keys))
        if kind is None:
            kind = bisect_right(USES, count) * (len(NEW) + 1) + fresh
        run = _Run(keys, kind, self._now, count)
        self._runs.update(dict.fromkeys(keys, run))
        self._table.came(kind, 0, len(keys))
        self._history.append(run)
        self._aging[0].append(run)
        if not self._here.isdisjoint(keys):
            run.here = [key for key in keys if key in self._here]
            self._place(run)

    def _place(self, run: _Run[K]) -> None:
        name = (run.kind, run.age)
        place = self._places.get(name)
        if place is None:
            place = self._places[name] = OrderedDict()
            insort(self._order, (self._table.worth[run.kind][run.age], -run.age, run.kind))
        place[run] = None

    # Ages, and what is learned

    def _age(self) -> None:
        last = len(self._aging) - 1
        places, came = self._places, self._table.came
        for age in reversed(range(last)):
            aging = self._aging[age]
            born = self._now - AGES[age + 1]
            while aging and aging[0].since <= born:
                run = aging.popleft()
                place = places.get((run.kind, age)) if run.here else None
                placed = place is not None and run in place
                if place is not None and placed:
                    del place[run]
                run.age = age + 1
                if run.left:
                    came(run.kind, age + 1, run.left)
                    if age + 1 < last:
                        self._aging[age + 1].append(run)
                    if placed:
                        self._place(run)

    def _learn(self) -> None:
        kinds = sorted({kind for kind, _ in self._places})
        for _ in range(min(LEARN_CLASSES, len(kinds))):
            self._learned += 1
            self._table.learn(kinds[self._learned % len(kinds)])
        self._places = {name: place for name, place in self._places.items() if place}
        worth = self._table.worth
        self._order = sorted((worth[kind][age], -age, kind) for kind, age in self._places)

    def _forget(self) -> None:
        """Keep what is remembered bounded."""
        runs, history = self._runs, self._history
        while len(runs) > self._memory and history:
            run = history.popleft()
            run.forgotten = True
            for key in run.keys if run.left else ():
                if runs.get(key) is run and key not in self._here:
                    del runs[key]
                    run.left -= 1
        if len(history) > 2 * len(runs) + LEARN_EVERY:
            self._history = deque(run for run in history if run.left)

    # What is here

    def add(self, keys: Sequence[K]) -> None:
        """Blocks are here now."""
        new = [key for key in keys if key not in self._runs]
        if new:
            self._use(new)
        for key in keys:
            if key not in self._here:
                self._here.add(key)
                run = self._runs[key]
                if not run.here or run not in self._places.get((run.kind, run.age), ()):
                    self._place(run)
                run.here.append(key)

    def remove(self, key: K) -> None:
        """A block is here no more; unknown keys are ignored."""
        if key in self._here:
            self._here.remove(key)
            run = self._runs[key]
            if run.forgotten:
                del self._runs[key]
                run.left -= 1

    def victims(self) -> Iterator[K]:
        """Keys of the runs of least worth first, of the oldest of those first, and of each run its
        end first.

        Where the end of a run stays, the blocks before it are probably needed by it, and are given
        when all others have been.
        """
        yield from self._victims(whole=False)
        yield from self._victims(whole=True)

    def _victims(self, *, whole: bool) -> Iterator[K]:
        index = 0
        while index < len(self._order):
            _, negative_age, kind = self._order[index]
            place = self._places[kind, -negative_age]
            for run in oldest_first(place):
                yield from self._victims_of(run, whole=whole)
                if not run.here:
                    del place[run]
            if place:
                index += 1
            else:
                del self._places[kind, -negative_age]
                del self._order[index]

    def _victims_of(self, run: _Run[K], *, whole: bool) -> Iterator[K]:
        for position in reversed(range(len(run.here))):
            key = run.here[position]
            if key in self._here and self._runs[key] is run:
                yield key
                if key in self._here:
                    if whole:
                        continue
                    return
            del run.here[position]

    def admits(self, key: K, victim: K) -> bool:
        """Whether a block is worth as much as another one."""
        run, other = self._runs.get(key), self._runs.get(victim)
        if run is None or other is None:
            return True
        worth = self._table.worth
        return worth[run.kind][run.age] >= worth[other.kind][other.age]

    def __len__(self) -> int:
        """Number of keys that are here."""
        return len(self._here)
