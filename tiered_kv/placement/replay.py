"""Replays a trace of requests on the policies that serve, under the catalog's rules, without
payload, in the time of the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from tiered_kv.contracts import PolicyContext
from tiered_kv.placement.policies import Policies
from tiered_kv.placement.scored import ScoredPolicy
from tiered_kv.placement.shelf import Shelf
from tiered_kv.values import BlockKey

__all__ = ["Replay", "ReplayTier", "TierCounts", "TracedRequest", "tokens_by_source"]


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace."""

    time: float
    """Seconds; never less than that of the request before."""
    keys: tuple[int, ...]
    """Blocks of its prompt, in order; equal keys are equal whole prefixes. The last one may be
    partly filled."""
    tokens: int
    """Of its prompt."""
    output_tokens: int
    """Of its answer."""


@dataclass(frozen=True, slots=True)
class ReplayTier:
    """A tier of a replay."""

    name: str
    capacity: int
    """Blocks."""
    policy: str
    """Name of an eviction policy, as in a configuration."""
    store: bool = False
    """Whether it is a store, whose index keeps one number per block, and not the host tier."""
    half_life: float | None = None
    """Seconds; see `PolicyContext.half_life`."""
    takes_loaded: bool = False
    """Whether what is found in tiers behind it goes into it, too, as into an engine's own cache."""


@dataclass(frozen=True, slots=True)
class TierCounts:
    """What became of a tier since the replay began."""

    stored: int
    """Blocks that were written to it."""
    evicted: int
    """Blocks that had to go."""
    written_bytes: int
    """`stored` times the bytes of a block."""
    resident: int
    """Blocks that it holds now."""


class Replay:
    """Tiers that a trace is played on, which hold no bytes. Not thread-safe.

    A request wants all its blocks of all tiers. It loads the longest prefix that they hold
    together, each block from the nearest tier that has it, and stores the rest in all of them: in
    the last one as its policy admits it, in others on the way there. A tier that takes what is
    loaded is stored that, too.
    """

    def __init__(
        self,
        tiers: Sequence[ReplayTier],
        *,
        block_tokens: int,
        block_bytes: int = 0,
        policies: Policies | None = None,
    ) -> None:
        """Empty `tiers`, nearest first; blocks of so many tokens and bytes; `policies` by name,
        those that are installed where none are given.

        Raises:
            ValueError: two tiers have one name, or `block_tokens` is not above 0.
            ConfigError: a tier's policy is not known, or none for a store.
            PluginError: it cannot be loaded.
        """
        if block_tokens <= 0:
            raise ValueError(f"a block has at least one token, not {block_tokens}")
        if len({tier.name for tier in tiers}) < len(tiers):
            raise ValueError("two tiers have one name")
        self._block_tokens = block_tokens
        known = Policies() if policies is None else policies
        self._tiers = [_Tier(tier, known, block_bytes) for tier in tiers]
        self._resident = [(tier.name, tier.shelf.resident) for tier in self._tiers]

    def request(self, request: TracedRequest) -> Mapping[str, int]:
        """Play one request; the tokens that it finds, by tier, those of a last block that is
        partly filled counted as they are."""
        sources, names = self.play(request), [tier.name for tier in self._tiers]
        counts = tokens_by_source(sources, request.tokens, self._block_tokens, names)
        return dict(zip(names, counts, strict=True))

    def play(self, request: TracedRequest) -> list[str]:
        """Play one request; the tier of each block of the prefix that it finds, in order."""
        now = request.time
        keys = cast("tuple[BlockKey, ...]", request.keys)  # what they are is nothing to a tier
        sources: list[str] = []
        for key in keys:
            for name, resident in self._resident:
                if key in resident:
                    sources.append(name)
                    break
            else:
                break
        last = self._tiers[-1] if self._tiers else None
        for tier in self._tiers:
            tier.shelf.wanted(keys, now)
            first = 0 if tier.takes_loaded else len(sources)
            tier.shelf.store(keys, first, forced=tier is not last)
        return sources

    @property
    def counts(self) -> Mapping[str, TierCounts]:
        """Per tier, since the replay began."""
        return {tier.name: tier.counts for tier in self._tiers}


def tokens_by_source(
    sources: Sequence[str], tokens: int, block_tokens: int, names: Sequence[str]
) -> list[int]:
    """How many tokens were found in each tier of these names, where a prompt of `tokens` tokens
    found blocks in `sources`; of a last block that is partly filled so many as it has."""
    found = [sources.count(name) * block_tokens for name in names]
    left_out = len(sources) * block_tokens - tokens
    if left_out > 0:
        last = names.index(sources[-1])
        found[last] -= left_out
    return found


class _Tier:
    def __init__(self, tier: ReplayTier, policies: Policies, block_bytes: int) -> None:
        self.name = tier.name
        self.takes_loaded = tier.takes_loaded
        where = f"tier {tier.name!r}"
        policy = policies.get(tier.policy, where)
        if not tier.store:
            made = policy.make(PolicyContext(tier.capacity, tier.half_life))
        else:
            made = ScoredPolicy(policies.scoring(tier.policy, tier.half_life, where))
        self.shelf = Shelf(tier.capacity, made)
        self._block_bytes = block_bytes

    @property
    def counts(self) -> TierCounts:
        shelf = self.shelf
        written = shelf.stored * self._block_bytes
        return TierCounts(shelf.stored, shelf.evicted, written, len(shelf.resident))
