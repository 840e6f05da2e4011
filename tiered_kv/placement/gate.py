"""Load or recompute: up to which token a prefix is loaded, and from which on it is computed.

Pure computation. A load brings the parts that lie in different tiers side by side, and the rest of
the request is computed behind it, so a cut at token `c` takes

    max over tiers (latency + bytes of the tier before c / its rate) + tokens from c on / prefill

seconds, of which the least is chosen. Nothing is predicted of other requests' computing, which
computing more of this one would hold up: where both take as long, the longer load is better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, repeat, takewhile
from operator import eq, is_not

from tiered_kv.stats import LoadRate
from tiered_kv.values import GroupGeometry

__all__ = ["Cut", "CutReason", "GroupPrefix", "TierLoad", "choose_cut"]


MOST_POSITIONS = 256
"""Of longer prefixes not every position is looked at, but this many, evenly spaced, and the end."""


class CutReason(StrEnum):
    """Why blocks that were found are not loaded."""

    SLOWER = "slower_than_recompute"
    """Computing them is faster."""
    DEADLINE = "deadline"
    """The load would not come within the load deadline."""
    WAITED = "waited"
    """Another request was loading them for longer than computing them takes."""
    BACKOFF = "backoff"
    """Their tier failed to bring them lately."""
    TIER_DOWN = "tier_down"
    """Their tier does not serve at all."""


@dataclass(frozen=True, slots=True)
class GroupPrefix:
    """What was found of one KV group behind the tokens that the engine holds itself."""

    geometry: GroupGeometry
    sources: Sequence[str | None]
    """Tier of each block; the first is the one that holds the first token which the engine does
    not hold. None: not found."""
    window: int | None = None
    """How many tokens before a position the group is needed of, to go on there; None: all."""


@dataclass(frozen=True, slots=True)
class TierLoad:
    """What a tier can do now."""

    rate: LoadRate | None
    """None: not measured yet. Such a tier is assumed to bring its blocks at once: it is measured
    by using it, and a load that turns out slow is ended by its deadline."""
    waiting_bytes: int = 0
    """What it is bringing already, for other requests; it comes first."""

    def seconds(self, size: int) -> float:
        """Predicted seconds until `size` bytes have come."""
        if not size or self.rate is None:
            return 0.0
        return self.rate.seconds(self.waiting_bytes + size)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a prefix is cut."""

    at: int
    """Tokens up to which it is loaded; those that the engine holds, where nothing is."""
    hit: int
    """Tokens up to which it could be."""
    load_seconds: float
    """Predicted, of what is loaded."""
    compute_seconds: float | None
    """Predicted, of what is computed behind it; None where the prefill rate is not known."""
    whole_seconds: float
    """Predicted, of loading all that could be."""
    reason: CutReason | None
    """None where all is loaded."""


def choose_cut(
    groups: Sequence[GroupPrefix],
    computed: int,
    end: int,
    tiers: Mapping[str, TierLoad],
    prefill: float | None,
    longest: float = math.inf,
) -> Cut:
    """Choose the cut that is predicted to take the least time until token `end` is computed.

    The engine can go on only where all groups have what they need, and at multiples of all groups'
    blocks or at the end of the whole hit: nowhere else is cut.

    Args:
        groups: what was found, of each KV group.
        computed: tokens that the engine holds itself.
        end: tokens of the request.
        tiers: what each tier named in `groups` can do.
        prefill: tokens that the engine computes per second. None: not known, then all is loaded
            that comes in time.
        longest: seconds after which a load is given up: no longer one is chosen.
    """
    at = unlimited = (0.0 if prefill is None else (end - computed) / prefill, computed, 0.0)
    if len(groups) == len(tiers) == 1 and groups[0].window is None:
        # Every block costs the same, and saves the same: where all are better than none, no cut
        # is better than all.
        (group,), (tier,) = groups, tiers.values()
        tokens, found = group.geometry.tokens, _whole(group.sources)
        last = (computed // tokens + found) * tokens
        seconds = tier.seconds(found * group.geometry.block_bytes)
        rest = None if prefill is None else (end - last) / prefill
        total = 0.0 if rest is None else seconds + rest
        if computed < last <= end and seconds <= longest and total <= at[0]:
            return Cut(last, last, seconds, rest, seconds, None)
    hit, whole = computed, 0.0
    for position, loads in _positions(groups, computed, end, tuple(tiers)):
        hit = position
        whole = max((tiers[name].seconds(size) for name, size in loads.items()), default=0.0)
        total = 0.0 if prefill is None else whole + (end - position) / prefill
        if total <= unlimited[0]:
            unlimited = (total, position, whole)
        if total <= at[0] and whole <= longest:
            at = (total, position, whole)
    _, chosen, seconds = at
    reason = None
    if chosen < hit:
        reason = CutReason.SLOWER if chosen == unlimited[1] else CutReason.DEADLINE
    left = None if prefill is None else (end - chosen) / prefill
    return Cut(chosen, hit, seconds, left, whole, reason)


def _positions(
    groups: Sequence[GroupPrefix], computed: int, end: int, tiers: Sequence[str]
) -> Iterator[tuple[int, dict[str, int]]]:
    """Where the engine could go on after a load, in order, and the bytes of each tier up to
    there."""
    sums = [_Sums(group, computed, tiers) for group in groups]
    align = math.lcm(*(group.geometry.tokens for group in groups))
    whole = min((one.hit for one in sums if one.group.window is None), default=end)
    whole = min(whole, end, *(one.known for one in sums))
    aligned = range((computed // align + 1) * align, whole + 1, align)
    stride = -(-len(aligned) // MOST_POSITIONS) or 1
    ends = list(aligned[::-1][::stride][::-1])
    if whole > computed and whole % align:
        ends.append(whole)
    for position in ends:
        if all(one.found(position) for one in sums):
            yield position, {tier: sum(one.bytes(tier, position) for one in sums) for tier in tiers}


def _whole(sources: Sequence[str | None]) -> int:
    """Blocks before the first that is missing."""
    if None not in sources:  # as a rule, and found out sooner
        return len(sources)
    return sum(1 for _ in takewhile(lambda source: source is not None, sources))


class _Sums:
    """Running sums over the blocks of a group, so that any stretch of it is counted at once."""

    def __init__(self, group: GroupPrefix, computed: int, tiers: Sequence[str]) -> None:
        self.group = group
        self._tokens = group.geometry.tokens
        self._first = computed // self._tokens
        sources = group.sources
        self._found: list[int] = list(accumulate(map(is_not, sources, repeat(None)), initial=0))
        self._of: dict[str, list[int]] = {
            tier: list(accumulate(map(eq, sources, repeat(tier)), initial=0)) for tier in tiers
        }

    @property
    def hit(self) -> int:
        """Token at which the first block is missing."""
        sources = self.group.sources
        return (self._first + _whole(sources)) * self._tokens

    @property
    def known(self) -> int:
        """Token up to which blocks were asked for."""
        return (self._first + len(self.group.sources)) * self._tokens

    def _needed(self, position: int) -> tuple[int, int]:
        start = 0
        if self.group.window is not None:
            start = max(0, max(0, position - self.group.window) // self._tokens - self._first)
        return start, max(start, -(-position // self._tokens) - self._first)

    def found(self, position: int) -> bool:
        """Whether all is there that going on at a position needs."""
        start, stop = self._needed(position)
        return self._found[stop] - self._found[start] == stop - start

    def bytes(self, tier: str, position: int) -> int:
        """What a tier would bring of it."""
        start, stop = self._needed(position)
        counts = self._of[tier]
        return (counts[stop] - counts[start]) * self.group.geometry.block_bytes
