"""Chooses one cell of a grid, says why, and writes the deployment that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tiered_kv.config import GIB, MIB, format_bytes, readable_bytes
from tiered_kv.planning.figures import RATED_YEARS, SECONDS_PER_DAY, Drive, Figures

__all__ = ["ENOUGH", "Recommendation", "deployment_yaml", "lifetime", "recommend"]

ENOUGH = 0.9
"""The smallest capacity is recommended that brings this share of what the best one brings."""

WORTH = 0.01
"""Less than this share of the tokens is not worth a tier."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do, and why."""

    figures: Figures
    ssd: bool
    """Whether an SSD is worth it."""
    headline: str
    reasons: tuple[str, ...]
    write_budget: int = 0
    """Bytes per day that keep the SSD within its rating; 0: no limit is needed."""


def recommend(figures: Sequence[Figures], drive: Drive, preferred: str) -> Recommendation:
    """The smallest capacity that brings `ENOUGH` of what the best cell brings and that its drive
    bears; where none is borne, one with a write budget. Of policies that bring the same the
    `preferred` one, which is what a configuration has that names none.

    Args:
        figures: of all cells; among them one without an SSD.
        drive: what is known of the SSD.
        preferred: name of a policy.
    """

    def order(one: Figures) -> tuple[float, ...]:
        shown = round(one.loaded, 3)
        other = one.cell.policy != preferred
        return (one.cell.ssd_bytes, one.cell.host_bytes, -shown, other)

    best = max(one.loaded for one in figures)
    enough = [one for one in figures if one.loaded >= ENOUGH * best]
    bare = max((one for one in figures if not one.cell.ssd_bytes), key=lambda one: one.loaded)
    if best < WORTH:
        return Recommendation(
            bare,
            False,
            "Tiers would bring next to nothing for this trace.",
            (
                (
                    f"The best of all cells loads {best:.1%} of the tokens: the prompts share too "
                    "little, or what they share is computed faster than it is loaded."
                ),
            ),
        )
    borne = [one for one in enough if (one.years(drive) or RATED_YEARS) >= RATED_YEARS]
    chosen = min(borne or enough, key=order)
    reasons = [_gain(chosen, bare)]
    if not chosen.cell.ssd_bytes:
        reasons.append(
            f"An SSD adds less than a tenth to that: the best of all cells loads {best:.1%}."
        )
        headline = f"Host memory alone is enough: it loads {chosen.loaded:.1%} of the tokens."
        return Recommendation(chosen, False, headline, tuple(reasons))
    size = readable_bytes(chosen.cell.ssd_bytes)
    headline = (
        f"Take {size} of SSD with the policy {chosen.cell.policy}: {chosen.loaded:.1%} of the "
        "prompts' tokens are loaded in place of being computed, where host memory alone brings "
        f"{bare.loaded:.1%}."
    )
    reasons.append(_size(chosen, figures, best))
    budget = 0
    wear, years = chosen.ssd_drive_writes, chosen.years(drive)
    if wear is not None and years is not None:
        rate = wear * chosen.cell.ssd_bytes / SECONDS_PER_DAY
        said = (
            f"It would be written {wear:.2g} times over a day ({readable_bytes(int(rate))}/s); a "
            f"drive rated {drive.rated_dwpd:g} DWPD ({drive.rated_from}) for {RATED_YEARS:g} years "
        )
        if borne:
            reasons.append(said + f"lasts {lifetime(years)}.")
        else:
            budget = max(MIB, int(drive.rated_dwpd * chosen.cell.ssd_bytes) // MIB * MIB)
            reasons.append(
                said
                + f"would last {lifetime(years)}. So the configuration has a write budget that "
                "keeps to the rating, and stores only what was wanted before once that runs "
                "short: hits will be fewer than shown, and all of them with a drive rated for "
                f"{wear:.2g} DWPD."
            )
    return Recommendation(chosen, True, headline, tuple(reasons), budget)


def lifetime(years: float) -> str:
    """How long a drive lasts, for people."""
    if years > 20:
        return "> 20 years"
    if years >= 1:
        return f"{years:.1f} years"
    return f"{years * 12:.1f} months" if years >= 1 / 12 else f"{years * 365:.1f} days"


def _gain(chosen: Figures, bare: Figures) -> str:
    parts: list[str] = []
    token, before = chosen.first_token, bare.first_token
    if token is not None and before is not None and chosen is not bare:
        parts.append(
            f"the mean time to the first token is {token.mean:.2f} s ({before.mean:.2f} s with "
            f"host memory alone), the 99th percentile {token.p99:.2f} s ({before.p99:.2f} s)"
        )
    elif token is not None:
        parts.append(
            f"the mean time to the first token is {token.mean:.2f} s, the 99th percentile "
            f"{token.p99:.2f} s"
        )
    if chosen.saved_gpu_seconds is not None and chosen.gpu_seconds is not None:
        whole = chosen.saved_gpu_seconds + chosen.gpu_seconds
        parts.append(
            f"of the {whole:.2f} engines that would be busy with these prompts, "
            f"{chosen.saved_gpu_seconds:.2f} are saved"
        )
    text = "; ".join(parts) or f"{chosen.loaded:.1%} of the tokens are loaded"
    return text[0].upper() + text[1:] + "."


def _size(chosen: Figures, figures: Sequence[Figures], best: float) -> str:
    sizes = sorted({one.cell.ssd_bytes for one in figures})
    larger = [size for size in sizes if size > chosen.cell.ssd_bytes]
    if chosen.loaded >= best - 1e-9 or not larger:
        return "No other capacity of the grid brings more."
    return (
        f"It is the smallest of the grid that brings {ENOUGH:.0%} of what the best one brings "
        f"({best:.1%}, with {readable_bytes(_best_size(figures))})."
    )


def _best_size(figures: Sequence[Figures]) -> int:
    most = max(one.loaded for one in figures)
    return min(one.cell.ssd_bytes for one in figures if one.loaded >= most - 1e-9)


def deployment_yaml(
    recommendation: Recommendation,
    *,
    trace: str,
    ranks: int,
    ssd_type: str,
    ssd_path: Path,
    ssd_has_policy: bool,
) -> str:
    """The recommended deployment as text for a YAML file.

    Args:
        recommendation: what to write down.
        trace: what it was planned from, for the comment.
        ranks: over which the host memory is divided.
        ssd_type: `type` of the SSD's tier.
        ssd_path: its directory.
        ssd_has_policy: whether that type takes an `eviction.policy`.
    """
    cell = recommendation.figures.cell
    tiers: list[dict[str, object]] = []
    if cell.host_bytes:
        per_rank = cell.host_bytes // ranks // MIB * MIB
        tiers.append(
            {
                "name": "host",
                "type": "cpu",
                "capacity": format_bytes(max(MIB, per_rank)),
                "eviction": {"policy": cell.policy},
            }
        )
    if recommendation.ssd or not tiers:
        ssd: dict[str, object] = {
            "name": "ssd",
            "type": ssd_type,
            "path": str(ssd_path),
            "capacity": format_bytes(max(cell.ssd_bytes, GIB)),
        }
        if ssd_has_policy:
            ssd["eviction"] = {"policy": cell.ssd_policy}
        if recommendation.write_budget:
            ssd["write_budget"] = format_bytes(recommendation.write_budget)
        tiers.append(ssd)
    comment = f"# Recommended by `tiered-kv plan` for {' '.join(trace.split())}.\n"
    lines = "# The host's capacity is per rank.\n" if ranks > 1 and cell.host_bytes else ""
    return comment + lines + yaml.safe_dump({"tiers": tiers}, sort_keys=False)
