"""Up to where the gate of `recompute` would load what a request finds: asked of the code that
serves, `tiered_kv.placement.choose_cut`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.config import Limits
from tiered_kv.placement import CutReason, GroupPrefix, TierLoad, choose_cut
from tiered_kv.planning.speeds import ENGINE, HOST, SSD, Speeds
from tiered_kv.stats import LoadRate
from tiered_kv.values import GroupGeometry

__all__ = ["LONGEST_LOAD", "PlannedCut", "PlannedGate"]

LONGEST_LOAD: float = Limits().load_deadline
"""Seconds: `limits.load_deadline` of a deployment that does not say."""


@dataclass(frozen=True, slots=True)
class PlannedCut:
    """Where a request is cut."""

    loaded: int
    """Tokens that are loaded from the tiers."""
    computed: int
    """Tokens that are computed."""
    seconds: float
    """Until its first token: of loading, then of computing what is behind."""
    late: bool
    """Whether more would be loaded if loads could take longer than `PlannedGate.longest`."""


@dataclass(frozen=True, slots=True)
class PlannedGate:
    """Cuts requests of a plan. No other load is in the tiers' way."""

    speeds: Speeds
    block_tokens: int
    """Tokens of a block of the trace."""
    bytes_per_token: float
    """Over all ranks."""
    longest: float = LONGEST_LOAD
    """Seconds after which a load is given up."""

    @property
    def block_bytes(self) -> float:
        """Of a block of the trace, over all ranks."""
        return self.block_tokens * self.bytes_per_token

    def cut(self, sources: Sequence[str], tokens: int) -> PlannedCut:
        """Of a request of `tokens` tokens.

        Args:
            sources: tier of each block that it finds, in order; the engine's own cache may be that
                of the first ones. The last one may be partly filled: it then comes with as many
                bytes as its tokens have.
            tokens: of its prompt.
        """
        size, prefill = self.block_tokens, self.speeds.prefill
        count = len(sources)
        held = sources.count(ENGINE)
        first = min(held * size, tokens)
        tail = max(0, tokens - (count - 1) * size) if count * size > tokens else 0
        wanted = sources[held:]
        whole = wanted[:-1] if tail else wanted
        at, seconds, late = first, 0.0, False
        if whole:
            prefix = GroupPrefix(GroupGeometry(0, round(self.block_bytes), 1, size), whole)
            tiers = {name: TierLoad(self._rates[name]) for name in dict.fromkeys(whole)}
            chosen = choose_cut([prefix], first, tokens, tiers, prefill, self.longest)
            at, seconds = chosen.at, chosen.load_seconds
            late = chosen.reason is CutReason.DEADLINE
        if tail and wanted:
            loading = self._seconds(wanted, tail)
            if loading <= seconds + (tokens - at) / prefill:
                late = loading > self.longest
                if not late:
                    at, seconds = tokens, loading
        return PlannedCut(at - first, tokens - at, seconds + (tokens - at) / prefill, late)

    @property
    def _rates(self) -> dict[str, LoadRate]:
        return {HOST: self.speeds.host, SSD: self.speeds.ssd}

    def _seconds(self, sources: Sequence[str], tail: int) -> float:
        """Of loading blocks of which the last one has `tail` tokens."""
        seconds = 0.0
        for name, rate in self._rates.items():
            blocks = sources.count(name)
            if blocks:
                left_out = self.block_tokens - tail if sources[-1] == name else 0
                tokens = blocks * self.block_tokens - left_out
                seconds = max(seconds, rate.seconds(round(tokens * self.bytes_per_token)))
        return seconds
