"""Lookups: which blocks of a request's prefix lie in which tier, asked once for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import not_
from types import MappingProxyType

from tiered_kv.connector.books import Books
from tiered_kv.connector.gating import PrefixGate
from tiered_kv.connector.promoting import Promotions
from tiered_kv.connector.requests import Answer, RequestState
from tiered_kv.connector.uses import note_lookup
from tiered_kv.placement import CutReason
from tiered_kv.values import BlockKey

__all__ = ["NOTHING_FOUND", "Lookups"]

MAX_FAILED_LOADS = 2
"""A request whose loads failed this often is computed: it gets one further load, no more."""

NEWS_SECONDS = 0.25
"""So long answers stand though blocks came to a tier, or went: it is all the time that other
requests store some, and to ask for a whole prefix again at every step of the engine would cost it
more than what is found then."""

NOTHING_FOUND: Mapping[BlockKey, Answer] = MappingProxyType({})
"""Answers to no key."""


class Lookups:
    """Answers lookups from memory. Scheduler's thread only."""

    def __init__(self, books: Books, gate: PrefixGate, promotions: Promotions) -> None:
        self._books = books
        self._gate = gate
        self._promotions = promotions

    def still_holds(self, request: str, computed: int, mark: object) -> bool:
        """Whether the answers of the last `lookup` stand for one with this `computed` and `mark`:
        so often asked that it looks at no key."""
        state = self._books.requests.get(request)
        if state is None or state.mark is None or state.mark != mark:
            return False
        now = self._books.clock()
        waits = self._promotions.nothing_new(state, now)
        if not (state.settled or waits) or not self._is_fresh(state, computed, now):
            return False
        if not waits:
            self._gate.stop_waiting(state)
        return True

    def _is_fresh(self, state: RequestState, computed: int, now: float) -> bool:
        books = self._books
        age = now - state.answered_at
        return (
            state.computed == computed
            and state.failures == books.failures
            and state.conditions == books.conditions.version
            and age < books.limits.lease
            and (age < NEWS_SECONDS or state.seen == books.versions())
        )

    def lookup(
        self,
        request: str,
        keys: Sequence[BlockKey],
        computed: int,
        tokens: int | None = None,
        mark: object = None,
    ) -> None:
        """Ask all tiers about all keys of a request at once; `answer` reads what was found.

        The answers are kept until they are used, until `computed` (tokens that the engine holds
        itself) or the keys change, until a load of any request fails, a tier fails or comes back,
        or until the lease ends; and for `NEWS_SECONDS` where a tier got or lost any block. A
        request that asks again because of that waits for nothing that it would not have waited
        for.
        """
        mark = tuple(keys) if mark is None else mark
        if self.still_holds(request, computed, mark):
            return
        state = self._books.state(request)
        note_lookup(self._books, state, keys, tokens)
        now = self._books.clock()
        again = state.settled and state.mark == mark and state.computed == computed
        again = again and state.failures == self._books.failures
        if state.computed != computed:
            state.cut = state.found_at = None
            state.decided = False
        self._books.end_lease(request)
        first = state.asked_since is None
        if first:
            state.asked_since = now
        waited = again or now - (state.asked_since or now) >= self._books.limits.lookup_wait
        state.computed, state.answered_at, state.failures = computed, now, self._books.failures
        state.mark, state.conditions = mark, self._books.conditions.version
        state.seen = self._books.versions()
        hits: Counter[str] = Counter()
        state.answers.clear()
        state.sources.clear()
        state.settled = True
        if state.failed_loads >= MAX_FAILED_LOADS:
            state.answers.update(dict.fromkeys(keys, Answer.MISS))
        else:
            hits = self._ask(state, keys, now)
            if waited and not state.settled:
                state.settled = True
                for key, answer in state.answers.items():
                    if answer in (Answer.PENDING, Answer.RETRY):
                        state.answers[key] = Answer.MISS
        if again:
            state.withheld.clear()  # they are counted
        elif first:
            self._count(state, hits)
        if state.settled:
            self._gate.decide(request, state, keys, tokens)
        host = self._books.host_tier
        if self._books.catalog is not None and host is not None and hits[host]:
            leased = [key for key, tier in state.sources.items() if tier == host]
            self._books.catalog.lease(leased, request, now + self._books.limits.lease)
        self._promotions.answer(state, keys, now)
        if state.settled:
            state.asked_since = None

    def _ask(self, state: RequestState, keys: Sequence[BlockKey], now: float) -> Counter[str]:
        """Note the answers of all tiers; how many blocks each tier has that is to load them."""
        books, answers, hits = self._books, state.answers, Counter[str]()
        state.withheld.clear()
        left = self._ask_host(state, keys, now, hits)
        for tier in books.tiers:
            if not left or not books.allows(state, tier.name):
                continue
            mirror = books.mirrors.get(tier.name)
            if mirror is None:
                continue
            there = mirror.lookup(left)
            found = there.count(True)
            barred = books.barred(state, tier.name)
            if barred is not None:
                state.withheld[tier.name, barred] += found
                continue
            books.watch.sought(tier.name, len(there), found=found)
            held = books.backoff.held(tier.name, left, now)
            if held:
                withheld = [
                    known is not False and key in held
                    for key, known in zip(left, there, strict=True)
                ]
                state.withheld[tier.name, CutReason.BACKOFF] += sum(withheld)
                there = [
                    False if out else known for known, out in zip(there, withheld, strict=True)
                ]
            self._note(state, tier.name, [*compress(left, there)], hits)
            if None in there:
                state.settled = False
                for key, known in zip(left, there, strict=True):
                    if known is None:
                        answers.setdefault(key, Answer.RETRY)
            left = [*compress(left, map(not_, there))]
        for key in left:
            answers.setdefault(key, Answer.MISS)
        if not state.settled:
            state.settled = not any(a in (Answer.PENDING, Answer.RETRY) for a in answers.values())
        return hits

    def _ask_host(
        self, state: RequestState, keys: Sequence[BlockKey], now: float, hits: Counter[str]
    ) -> Sequence[BlockKey]:
        """Note what lies in the host tier; the other keys."""
        books, host, catalog = self._books, self._books.host_tier, self._books.catalog
        if host is None or not books.allows(state, host) or books.barred(state, host) is not None:
            self._wait_for(state, books.storing.keys() & keys if books.storing else ())
            return keys
        if catalog is None:
            return keys
        ready, storing = catalog.look_up(keys)
        held = books.backoff.held(host, chain(ready, storing), now)
        if held:
            ready = [key for key in ready if key not in held]
            storing = [key for key in storing if key not in held]
        self._wait_for(state, storing)
        if not ready:
            return keys
        self._note(state, host, ready, hits)
        return [key for key in keys if key not in state.sources]

    def _note(
        self, state: RequestState, tier: str, keys: Sequence[BlockKey], hits: Counter[str]
    ) -> None:
        """These are found in a tier."""
        found = dict.fromkeys(keys, tier)
        state.answers.update(dict.fromkeys(found, Answer.HIT))
        state.sources.update(found)
        hits[tier] += len(found)

    def _wait_for(self, state: RequestState, keys: Iterable[BlockKey]) -> None:
        """These are being stored; another tier may have them."""
        waiting = dict.fromkeys(keys, Answer.PENDING)
        state.answers.update(waiting)
        state.settled = state.settled and not waiting

    def _count(self, state: RequestState, hits: Mapping[str, int]) -> None:
        for tier in self._books.tier_names:
            if self._books.allows(state, tier):
                found = hits.get(tier, 0)
                self._books.stats.lookup(tier, hits=found, misses=len(state.answers) - found)

    def answer(self, request: str, key: BlockKey) -> Answer:
        """What the last `lookup` of the request found; MISS for a key that it did not ask."""
        return self.answers(request).get(key, Answer.MISS)

    def answers(self, request: str) -> Mapping[BlockKey, Answer]:
        """The same of all keys that it asked, now and later."""
        state = self._books.requests.get(request)
        return NOTHING_FOUND if state is None else state.answers

    def source(self, request: str, key: BlockKey) -> str | None:
        """Tier that a block of the request's running load, or its last hit, comes from."""
        state = self._books.requests.get(request)
        if state is None:
            return None
        loading = state.loading.get(key)
        return state.sources.get(key) if loading is None else loading.tier
