"""What of a found prefix is worth loading, and for how long a request may wait for it."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from tiered_kv.config import Recompute
from tiered_kv.connector.books import Books
from tiered_kv.connector.prefill import PrefillRate
from tiered_kv.connector.requests import Answer, RequestState
from tiered_kv.placement import Cut, CutReason, GroupPrefix, TierLoad, choose_cut
from tiered_kv.values import BlockKey, GroupGeometry

__all__ = ["PrefixGate"]

logger = logging.getLogger(__name__)

DEADLINE_SHARE = 1.5
"""A load may take at most so many times as long as computing its tokens is predicted to."""

GIVEN_UP_SHARE, GIVEN_UP_SECONDS = 0.5, 0.2
"""A load that takes longer than this share of computing, and these seconds, is given up, so that
its request, which is computed then, is late by no more than that ..."""

SLACK = 2.0
"""... but not before so many times as long as it was predicted to take: loads that save little are
not measured by what saves much."""

LEAST_DEADLINE = 0.1
"""Seconds. Below it the figures say little: an end is heard of at an engine step, threads change
hands, a disk stalls for some ten milliseconds. A load given up for that would cost its tier a
back-off, and save less than anybody notices."""


class PrefixGate:
    """Cuts prefixes, once for the whole hit of a request. Scheduler's thread only."""

    def __init__(self, books: Books, recompute: Recompute) -> None:
        """`recompute` is what the operator says about it."""
        self._books = books
        self.mode = recompute.gate
        self.prefill = PrefillRate(recompute.tokens_per_second)
        self.windows: tuple[int | None, ...] = ()
        """By KV group, how many tokens before a position are needed to go on there; None, as for
        groups that are not named: all."""

    def recompute_seconds(self, tokens: int) -> float | None:
        """How long the engine is predicted to compute so many tokens; None where that is not known,
        or not to count."""
        return None if self.mode == "off" else self.prefill.seconds(tokens)

    # The cut

    def decide(
        self, request: str, state: RequestState, keys: Sequence[BlockKey], tokens: int | None
    ) -> None:
        """The request's blocks were asked for and all answers are settled: those that are not worth
        loading miss from now on. What was decided stays the most until its answers are forgotten.

        Without `tokens`, the length of the request so far, nothing is known of how its keys lie in
        it, and nothing is cut.
        """
        self._count_withheld(state)
        state.keys, state.tokens = keys, tokens
        if not state.sources or not self._fits(state):
            return
        if state.found_at is None:
            state.found_at = self._books.clock()
        off = self.mode == "off"
        prefill = None if off else self.prefill.tokens_per_second
        longest = math.inf if off else self._books.limits.load_deadline
        cut = choose_cut(
            self._prefixes(state), state.computed, tokens or 0, self._tiers(state), prefill, longest
        )
        state.load_seconds = cut.load_seconds
        state.patience = self.deadline(cut.hit - state.computed, cut.load_seconds)
        again, state.decided = state.decided, True
        if state.cut is not None and state.cut[0] < cut.at:
            self._cut(state, *state.cut, counted=again)
        elif cut.reason is not None:
            if not again:
                self._log(request, state, cut, prefill)
            self._cut(state, cut.at, cut.reason, counted=again)
        if not again:
            at = cut.at if state.cut is None else state.cut[0]
            outcome = "whole" if at >= cut.hit else "part" if at > state.computed else "none"
            self._books.stats.gate(outcome)

    def _tiers(self, state: RequestState) -> dict[str, TierLoad]:
        books = self._books
        return {
            name: TierLoad(books.conditions.load_rate(name), books.loading_bytes[name])
            for name in dict.fromkeys(state.sources.values())
        }

    def _log(self, request: str, state: RequestState, cut: Cut, prefill: float | None) -> None:
        behind = "an unknown time"
        if cut.compute_seconds is not None:
            behind = f"{cut.compute_seconds:.3f} s at {prefill:.0f} tokens/s"
        logger.debug(
            "request %s: of %d tokens found behind %d, %d are loaded (%s): all would take %.3f s, "
            "these take %.3f s, and the %d behind them %s",
            request,
            cut.hit - state.computed,
            state.computed,
            cut.at - state.computed,
            cut.reason,
            cut.whole_seconds,
            cut.load_seconds,
            (state.tokens or 0) - cut.at,
            behind,
        )

    def _cut(
        self, state: RequestState, at: int, reason: CutReason, *, counted: bool = False
    ) -> None:
        """Nothing behind token `at` is loaded; `counted` where that is no news."""
        state.cut = at, reason
        missed: Counter[str] = Counter()
        for group, row in self._rows(state):
            begin = state.computed // group.tokens
            if at > state.computed:
                begin = -(-at // group.tokens)
            for key in row[begin:]:
                tier = state.sources.pop(key, None)
                if tier is not None:
                    state.answers[key] = Answer.MISS
                    missed[tier] += 1
        for tier, blocks in missed.items() if not counted else ():
            self._books.stats.cut(tier, reason.value, blocks)

    def _count_withheld(self, state: RequestState) -> None:
        for (tier, reason), blocks in state.withheld.items():
            self._books.stats.cut(tier, reason.value, blocks)
        state.withheld.clear()

    # Waiting

    def deadline(self, tokens: int, predicted: float) -> float:
        """Seconds that a load of so many tokens may take that is `predicted` to take so long."""
        longest = self._books.limits.load_deadline
        seconds = self.recompute_seconds(tokens)
        if seconds is None:
            return longest
        harmless = max(GIVEN_UP_SHARE * seconds + GIVEN_UP_SECONDS, SLACK * predicted)
        return min(longest, max(LEAST_DEADLINE, min(DEADLINE_SHARE * seconds, harmless)))

    def load_deadline(self, state: RequestState, keys: Sequence[BlockKey]) -> float:
        """The same for the blocks of a load that the request begins now."""
        if not self._fits(state):
            return self._books.limits.load_deadline
        wanted = set(keys)
        end = state.computed
        for group, row in self._rows(state):
            last = next((i for i in reversed(range(len(row))) if row[i] in wanted), -1)
            end = max(end, (last + 1) * group.tokens)
        return self.deadline(end - state.computed, state.load_seconds)

    def block_bytes(self, state: RequestState) -> dict[BlockKey, int]:
        """Of the blocks that the request asked for last, as far as that is known."""
        if not self._fits(state):
            return {}
        return {key: group.block_bytes for group, row in self._rows(state) for key in row}

    def stop_waiting(self, state: RequestState) -> None:
        """The request was answered before and asks again. The engine lets it wait while another one
        loads its blocks: it computes them where that takes longer than its own load might."""
        now = self._books.clock()
        if state.found_at is None or not self._books.loading:
            state.found_at = now
        if not state.sources or now - state.found_at < state.patience:
            return
        state.found_at = now
        awaited = [
            index * group.tokens
            for group, row in self._rows(state)
            for index, key in enumerate(row)
            if key in state.sources and self._books.loading[key]
        ]
        if awaited:
            self._cut(state, max(state.computed, min(awaited)), CutReason.WAITED)

    # How the keys lie in the request

    def _fits(self, state: RequestState) -> bool:
        """Whether the keys are those of all whole blocks of a request of this length."""
        geometry = self._books.geometry
        if geometry is None or state.tokens is None:
            return False
        return len(state.keys) == sum(state.tokens // g.tokens for g in geometry.groups)

    def _rows(self, state: RequestState) -> Iterator[tuple[GroupGeometry, Sequence[BlockKey]]]:
        """Each KV group with the request's blocks of it, in order."""
        geometry = self._books.geometry
        start = 0
        for group in geometry.groups if geometry is not None else ():
            count = (state.tokens or 0) // group.tokens
            yield group, state.keys[start : start + count]
            start += count

    def _prefixes(self, state: RequestState) -> list[GroupPrefix]:
        prefixes: list[GroupPrefix] = []
        for number, (group, row) in enumerate(self._rows(state)):
            sources = [*map(state.sources.get, row[state.computed // group.tokens :])]
            window = self.windows[number] if number < len(self.windows) else None
            prefixes.append(GroupPrefix(group, sources, window))
        return prefixes
