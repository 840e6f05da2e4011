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
from itertools import compress, islice
from operator import is_not
from typing import Generic, TypeVar

from tiered_kv.placement.hazard import AGES, HazardTable

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


BATCH = 64
"""Keys that are looked at together where one may be removed in between."""


def _oldest_first(order: OrderedDict[K, None]) -> Iterator[K]:
    """The keys of an order whose entries may be removed, each once it was given."""
    passed = 0
    while batch := list(islice(order, passed, passed + BATCH)):
        for key in batch:
            yield key
            passed += key in order


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
        self._needed: set[K] = set()
        self._history: deque[_Run[K]] = deque()
        """Runs whose keys are remembered, oldest first."""
        self._aging: list[deque[_Run[K]]] = [deque() for _ in range(len(AGES) - 1)]
        """Runs by age, oldest first."""
        self._places: dict[tuple[int, int], OrderedDict[_Run[K], None]] = {}
        """Runs that have blocks here, by class and age, oldest first; not those whose end is needed
        by a block of another run."""
        self._held: dict[_Run[K], None] = {}
        """Those; an ordered set."""
        self._freed: list[_Run[K]] = []
        """Those of them that are to have a place again: not before all others were victims."""
        self._order: list[tuple[float, int, int]] = []
        """(worth, -age, class) of all places, least worth first."""
        self._now = self._aged = -math.inf
        self._requests = self._learned = self._removed = 0

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
        ends = [*compress(range(1, end), map(is_not, known, known[1:end])), end]
        for start, position in zip((0, *ends), ends, strict=False):
            if start < position:
                self._begin(keys[start:position], known[start], fresh)
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
        if old is not None and not old.left:
            self._displace(old)
            old.keys, old.here = (), []  # it stays in the history for a while
        elif old is not None and old in self._held:
            self._displace(old)
            self._place(old)
        self._table.came(kind, 0, len(keys))
        self._history.append(run)
        self._aging[0].append(run)
        if not self._here.isdisjoint(keys):
            run.here = [key for key in keys if key in self._here]
            self._place(run)

    def _place(self, run: _Run[K], *, next_one: bool = False) -> None:
        """Put it at the end of its place, or where it is the next one to go."""
        end = self._end(run)
        if end is None:
            return
        if end in self._needed:
            self._held[run] = None
            return
        name = (run.kind, run.age)
        place = self._places.get(name)
        if place is None:
            place = self._places[name] = OrderedDict()
            insort(self._order, (self._table.worth[run.kind][run.age], -run.age, run.kind))
        place[run] = None
        if next_one:
            place.move_to_end(run, last=False)

    def _end(self, run: _Run[K]) -> K | None:
        """The last block of a run that is here."""
        while run.here:
            key = run.here[-1]
            if key in self._here and self._runs[key] is run:
                return key
            run.here.pop()
        return None

    def _displace(self, run: _Run[K]) -> bool:
        """Take a run out of its place; whether it had one."""
        if run in self._held:
            del self._held[run]
            return True
        place = self._places.get((run.kind, run.age))
        if place is None or run not in place:
            return False
        del place[run]
        return True

    def needed(self, key: K, is_needed: bool) -> None:
        """See `WatchesNeed`."""
        (self._needed.add if is_needed else self._needed.discard)(key)
        run = self._runs.get(key) if key in self._here else None
        if run is None or self._end(run) != key:
            return
        if not is_needed:
            self._freed.append(run)
        elif run not in self._held:
            self._displace(run)
            self._place(run)

    def _return_freed(self) -> None:
        for run in self._freed:
            if run in self._held:
                del self._held[run]
                self._place(run, next_one=True)
        self._freed.clear()

    # Ages, and what is learned

    def _age(self) -> None:
        last = len(self._aging) - 1
        for age in reversed(range(last)):
            aging, older = self._aging[age], age + 1
            born = self._now - AGES[older]
            came: dict[int, int] = {}
            while aging and aging[0].since <= born:
                run = aging.popleft()
                placed = bool(run.here) and self._displace(run)
                run.age = older
                if run.left:
                    came[run.kind] = came.get(run.kind, 0) + run.left
                    if older < last:
                        self._aging[older].append(run)
                    if placed:
                        self._place(run)
            for kind, blocks in came.items():
                self._table.came(kind, older, blocks)

    def _learn(self) -> None:
        self._return_freed()
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
                run.here.append(key)
                held = run in self._held
                placed = held or run in self._places.get((run.kind, run.age), ())
                if not placed or held != (key in self._needed):
                    self._displace(run)
                    self._place(run)

    def remove(self, key: K) -> None:
        """A block is here no more; unknown keys are ignored."""
        if key in self._here:
            self._here.remove(key)
            self._removed += 1
            run = self._runs[key]
            if run.forgotten:
                del self._runs[key]
                run.left -= 1

    def victims(self) -> Iterator[K]:
        """Keys of the runs of least worth first, of the oldest of those first, and of each run its
        end first; not those of runs whose end is needed, until that has gone.

        Where the end of a run stays, the blocks before it are probably needed by it, and are given
        when all others have been.
        """
        went = True
        while went:
            removed = self._removed
            self._return_freed()
            for entry in list(self._order):
                yield from self._victims_in(entry, whole=False)
            went = self._removed > removed
        for entry in list(self._order):
            yield from self._victims_in(entry, whole=True)
        for run in list(self._held):
            yield from self._victims_of(run, whole=True)

    def _victims_in(self, entry: tuple[float, int, int], *, whole: bool) -> Iterator[K]:
        _, negative_age, kind = entry
        place = self._places[kind, -negative_age]
        for run in _oldest_first(place):
            yield from self._victims_of(run, whole=whole)
            if self._end(run) is None or run in self._held:
                place.pop(run, None)
        if not place:
            del self._places[kind, -negative_age]
            self._order.remove(entry)

    def _victims_of(self, run: _Run[K], *, whole: bool) -> Iterator[K]:
        position = len(run.here)
        while position := min(position, len(run.here)):
            position -= 1
            key = run.here[position]
            if key in self._here and self._runs[key] is run:
                if not whole and key in self._needed:
                    self._held[run] = None
                    return
                yield key
                if key in self._here:
                    if whole:
                        continue
                    return
            if position < len(run.here):
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
