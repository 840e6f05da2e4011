"""What `tiered-kv warm` says in the end: as text, as JSON, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from tiered_kv.cli.output import bytes_text
from tiered_kv.cli.traffic import traffic
from tiered_kv.cli.warm_keep import Kept
from tiered_kv.cli.warming import Warmed

__all__ = ["complaints", "print_report", "report_as_json"]


def report_as_json(
    warmed: Warmed,
    types: Mapping[str, str],
    files: list[str],
    seconds: float,
    kept: Mapping[str, Kept],
) -> dict[str, Any]:
    """One object. `types`: the type of each tier that was warmed, by its name."""
    moved = traffic(types, *warmed.stats)
    tiers = moved.tiers_as_json()
    for tier, lacking in warmed.lacking.items():
        tiers[tier] |= {"held_tokens": warmed.tokens - lacking, "lacking_tokens": lacking}
    for tier, one in kept.items():
        tiers[tier] |= {"kept_blocks": one.blocks}
    return {
        "files": files,
        "prompts": warmed.prompts,
        "short_prompts": warmed.short,
        "prompt_tokens": warmed.prompt_tokens,
        "block_tokens": warmed.tokens,
        "present_tokens": warmed.present_tokens,
        "computed_tokens": warmed.computed_tokens,
        "tiers": tiers,
        "hops": moved.hops_as_json(),
        "sample": [
            {
                "file": one.origin.file,
                "line": one.origin.line,
                "tier": one.tier,
                "prompt_tokens": one.prompt_tokens,
                "expected_tokens": one.expected_tokens,
                "loaded_tokens": one.loaded_tokens,
            }
            for one in warmed.sampled
        ],
        "complete": warmed.complete,
        "hit": warmed.hit,
        "seconds": seconds,
    }


def print_report(warmed: Warmed, types: Mapping[str, str]) -> None:
    """Tables of what moved, and what it comes to, to stdout."""
    moved = traffic(types, *warmed.stats)
    moved.print_tables()
    typer.echo(
        f"{warmed.prompts} prompts, {warmed.prompt_tokens} tokens, {warmed.tokens} of them in "
        f"whole blocks: {warmed.present_tokens} were there already, {warmed.computed_tokens} were "
        "computed"
    )
    for tier, lacking in warmed.lacking.items():
        stored = bytes_text(moved.stored(tier).bytes)
        loaded = [one for one in warmed.sampled if one.tier == tier]
        checked = (
            f"; of {len(loaded)} prompts loaded back {sum(one.loaded_tokens for one in loaded)} "
            f"of {sum(one.expected_tokens for one in loaded)} tokens came"
            if loaded
            else ""
        )
        typer.echo(
            f"tier {tier}: holds {warmed.tokens - lacking} of {warmed.tokens} tokens, {stored} "
            f"stored now{checked}"
        )


def complaints(warmed: Warmed, types: Mapping[str, str]) -> list[str]:
    """What is not as it should be, one line each."""
    if not warmed.tokens:
        return ["no prompt is as long as a block, so nothing could be stored"]
    found: list[str] = []
    if warmed.short:
        found.append(
            f"not kept, since they are shorter than a block: {warmed.short} of the prompts"
        )
    moved = traffic(types, *warmed.stats)
    for tier, lacking in warmed.lacking.items():
        if not lacking:
            continue
        now = moved.stats.tier(tier)
        reasons = [
            f"{blocks} blocks dropped: {why}" for why, blocks in now.dropped.items() if blocks
        ]
        if now.evicted:
            reasons.append(
                f"{now.evicted} blocks evicted: the tier is smaller than what it is given"
            )
        why = "; ".join(reasons) or "no reason was counted"
        found.append(
            f"tier {tier} lacks {lacking} of {warmed.tokens} tokens ({why}); the same command goes "
            "on from here"
        )
    found.extend(
        f"{one.origin}: {one.loaded_tokens} of {one.expected_tokens} tokens came back from tier "
        f"{one.tier}"
        for one in warmed.sampled
        if not one.loaded_tokens >= one.expected_tokens > 0
    )
    return found
