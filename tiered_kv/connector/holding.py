"""How much of a prefix a store holds, from the answers about its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

__all__ = ["GroupHolding", "block_tokens", "held_tokens", "holdings"]


@dataclass(frozen=True, slots=True)
class GroupHolding:
    """The blocks of one KV group of a prefix."""

    tokens: int
    """Tokens per block."""
    there: Sequence[bool]
    """Whether each is stored, in order."""
    window: int | None = None
    """How many tokens before a position are needed to go on there; None: all."""


def block_tokens(groups: Sequence[int]) -> int:
    """Tokens after which all KV groups have whole blocks, from the tokens per block of each; 0
    without a group."""
    return lcm(*groups) if groups else 0


def holdings(
    there: Sequence[bool], tokens: int, sizes: Sequence[int], windows: Sequence[int | None]
) -> list[GroupHolding]:
    """What is there of a prefix, by KV group.

    Args:
        there: which of all whole blocks are stored, KV group by KV group.
        tokens: length of the prefix.
        sizes: tokens per block of each group.
        windows: how many tokens before a position are needed to go on there, by group; None, as
            for groups that are not named: all.
    """
    groups: list[GroupHolding] = []
    start = 0
    for number, size in enumerate(sizes):
        end = start + tokens // size
        window = windows[number] if number < len(windows) else None
        groups.append(GroupHolding(size, there[start:end], window))
        start = end
    return groups


def held_tokens(groups: Sequence[GroupHolding]) -> int:
    """Tokens from the beginning of a prefix that could be loaded: whole blocks of all groups."""
    step = block_tokens([group.tokens for group in groups])
    if not step:
        return 0
    most = min(len(group.there) * group.tokens for group in groups)
    runs = [_runs(group.there) for group in groups]
    for tokens in range(most // step * step, 0, -step):
        if all(_enough(group, run, tokens) for group, run in zip(groups, runs, strict=True)):
            return tokens
    return 0


def _runs(there: Sequence[bool]) -> list[int]:
    """For each number of blocks, how many at its end are stored without a gap."""
    runs = [0]
    for one in there:
        runs.append(runs[-1] + 1 if one else 0)
    return runs


def _enough(group: GroupHolding, runs: Sequence[int], tokens: int) -> bool:
    blocks = tokens // group.tokens
    wanted = blocks if group.window is None else min(blocks, -(-group.window // group.tokens))
    return runs[blocks] >= wanted
