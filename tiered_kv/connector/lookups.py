"""Lookups: which blocks of a request's prefix lie in which tier, asked once for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tiered_kv.connector.books import Books
from tiered_kv.connector.gating import PrefixGate
from tiered_kv.connector.promoting import Promotions
from tiered_kv.connector.requests import Answer, RequestState
from tiered_kv.placement import CutReason, SlotState
from tiered_kv.values import BlockKey

__all__ = ["Lookups"]

MAX_FAILED_LOADS = 2
"""A request whose loads failed this often is computed: it gets one further load, no more."""


class Lookups:
    """Answers lookups from memory. Scheduler's thread only."""

    def __init__(self, books: Books, gate: PrefixGate, promotions: Promotions) -> None:
        self._books = books
        self._gate = gate
        self._promotions = promotions

    def lookup(
        self, request: str, keys: Sequence[BlockKey], computed: int, tokens: int | None = None
    ) -> None:
        """Ask all tiers about all keys of a request at once; `answer` reads what was found.

        The answers are kept until they are used, until `computed` (tokens that the engine holds
        itself) changes, until a load of any request fails, or until the lease ends.
        """
        state = self._books.state(request)
        now = self._books.clock()
        fresh = state.computed == computed and state.failures == self._books.failures
        fresh = fresh and now - state.answered_at < self._books.limits.lease
        waits = self._promotions.nothing_new(state, now)
        if fresh and (state.settled() or waits) and all(key in state.answers for key in keys):
            if not waits:
                self._gate.stop_waiting(state)
            return
        if state.computed != computed:
            state.cut = state.found_at = None
            state.decided = False
        self._books.end_lease(request)
        first = state.asked_since is None
        if first:
            state.asked_since = now
        waited = now - (state.asked_since or now) >= self._books.limits.lookup_wait
        state.computed, state.answered_at, state.failures = computed, now, self._books.failures
        if state.failed_loads >= MAX_FAILED_LOADS:
            state.answers = dict.fromkeys(keys, Answer.MISS)
        else:
            self._ask(state, keys, now)
            if waited:
                for key, answer in state.answers.items():
                    if answer in (Answer.PENDING, Answer.RETRY):
                        state.answers[key] = Answer.MISS
        if first:
            self._count(state)
        if state.settled():
            self._gate.decide(request, state, keys, tokens)
        if self._books.catalog is not None and self._books.host_tier is not None:
            hits = [k for k, tier in state.sources.items() if tier == self._books.host_tier]
            self._books.catalog.lease(hits, request, now + self._books.limits.lease)
        self._promotions.answer(state, keys, now)
        if state.settled():
            state.asked_since = None

    def _ask(self, state: RequestState, keys: Sequence[BlockKey], now: float) -> None:
        state.answers = {}
        state.sources = {}
        state.withheld.clear()
        open_keys: list[BlockKey] = []
        host = self._books.host_tier if self._books.allows(state, self._books.host_tier) else None
        if host is not None and self._books.barred(state, host) is not None:
            host = None
        for key in keys:
            found = None
            if (
                host is not None
                and self._books.catalog is not None
                and not self._books.backoff.holds(host, key, now)
            ):
                found = self._books.catalog.lookup(key)
            if found is SlotState.READY and host is not None:
                state.answers[key] = Answer.HIT
                state.sources[key] = host
                continue
            if found is SlotState.STORING or (host is None and key in self._books.storing):
                state.answers[key] = Answer.PENDING
            open_keys.append(key)
        for tier in self._books.tiers:
            if not open_keys or not self._books.allows(state, tier.name):
                continue
            mirror = self._books.mirrors.get(tier.name)
            if mirror is None:
                continue
            barred = self._books.barred(state, tier.name)
            if barred is not None:
                found_there = sum(known is True for known in mirror.lookup(open_keys))
                state.withheld[tier.name, barred] += found_there
                continue
            still_open: list[BlockKey] = []
            there = mirror.lookup(open_keys)
            self._books.watch.sought(tier.name, len(there), found=sum(map(bool, there)))
            for key, known in zip(open_keys, there, strict=True):
                if known is not False and self._books.backoff.holds(tier.name, key, now):
                    state.withheld[tier.name, CutReason.BACKOFF] += 1
                    still_open.append(key)
                    continue
                if known:
                    state.answers[key] = Answer.HIT
                    state.sources[key] = tier.name
                    continue
                if known is None:
                    state.answers.setdefault(key, Answer.RETRY)
                still_open.append(key)
            open_keys = still_open
        for key in open_keys:
            state.answers.setdefault(key, Answer.MISS)

    def _count(self, state: RequestState) -> None:
        hits = Counter(state.sources.values())
        for tier in self._books.tier_names:
            if self._books.allows(state, tier):
                self._books.stats.lookup(
                    tier, hits=hits[tier], misses=len(state.answers) - hits[tier]
                )

    def answer(self, request: str, key: BlockKey) -> Answer:
        """What the last `lookup` of the request found; MISS for a key that it did not ask."""
        state = self._books.requests.get(request)
        return Answer.MISS if state is None else state.answers.get(key, Answer.MISS)

    def source(self, request: str, key: BlockKey) -> str | None:
        """Tier that a block of the request's running load, or its last hit, comes from."""
        state = self._books.requests.get(request)
        if state is None:
            return None
        loading = state.loading.get(key)
        return state.sources.get(key) if loading is None else loading.tier
