"""Chooses one cell of a grid, says why, and writes the deployment that it stands for."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
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

LEAST_SSD = GIB
"""A smaller tier is not written down."""


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


def recommend(
    figures: Sequence[Figures], drive: Drive, preferred: str, *, budgeted: bool = True
) -> Recommendation:
    """The smallest capacity that brings `ENOUGH` of what the best cell brings and that its drive
    bears; where none is borne, the smallest that brings it, with a write budget. Of policies that
    bring the same the `preferred` one, which is what a configuration has that names none.

    Args:
        figures: of all cells; for each policy and capacity of the host one of them has no SSD.
        drive: what is known of the SSD.
        preferred: name of a policy.
        budgeted: whether the SSD's tier takes a write budget.
    """

    def order(one: Figures) -> tuple[float, ...]:
        shown = round(one.loaded, 3)
        other = one.cell.policy != preferred
        return (one.cell.ssd_bytes, one.cell.host_bytes, -shown, other)

    best = max(one.loaded for one in figures)
    enough = [one for one in figures if one.loaded >= ENOUGH * best]
    if best < WORTH:
        without_ssd = [one for one in figures if not one.cell.ssd_bytes]
        with_host = [one for one in without_ssd if one.cell.host_bytes]
        return Recommendation(
            min(with_host or without_ssd, key=order),
            False,
            "Tiers would bring next to nothing for this trace.",
            (
                (
                    f"Even the best of all cells loads but {best:.1%} of the tokens: the prompts "
                    "share little, or what they share is computed before it would be loaded, is "
                    "held by the engine's own cache, or is more than what was tried has room for."
                ),
            ),
        )
    borne = [one for one in enough if _bears(one, drive)]
    chosen = min(borne or enough, key=order)
    cell = chosen.cell
    if not cell.ssd_bytes:
        return Recommendation(
            chosen,
            False,
            f"Host memory alone is enough: {readable_bytes(cell.host_bytes)} of it, with the "
            f"policy {cell.policy}, load {chosen.loaded:.1%} of the tokens.",
            (
                _gain(chosen, chosen),
                (
                    f"That is at least {ENOUGH:.0%} of what the best of all cells loads "
                    f"({best:.1%})."
                ),
            ),
        )
    bare = next(
        one
        for one in figures
        if (one.cell.policy, one.cell.host_bytes) == (cell.policy, cell.host_bytes)
        and not one.cell.ssd_bytes
    )
    alone = "without host memory for KV"
    if cell.host_bytes:
        alone = (
            f"where {readable_bytes(cell.host_bytes)} of host memory alone bring {bare.loaded:.1%}"
        )
    headline = (
        f"Take {readable_bytes(cell.ssd_bytes)} of SSD with {_policies(chosen)}: "
        f"{chosen.loaded:.1%} of the prompts' tokens {'are' if borne else 'could be'} loaded in "
        f"place of being computed{'' if borne else ' if its drive bore that'}, {alone}."
    )
    gain = _gain(chosen, bare)
    if not borne:
        gain = f"If the SSD took all that is written: {gain[0].lower()}{gain[1:]}"
    reasons = [gain, _size(chosen, figures, drive)]
    budget = 0
    wear, years = chosen.ssd_drive_writes, chosen.years(drive)
    if wear is not None and years is not None:
        rate = wear * cell.ssd_bytes / SECONDS_PER_DAY
        said = (
            f"It would be written {_times(wear)} times over a day ({readable_bytes(int(rate))}/s); "
            f"a drive rated {drive.rated_dwpd:g} DWPD ({drive.rated_from}) for {RATED_YEARS:g} "
            "years "
        )
        if borne:
            reasons.append(f"{said}lasts {lifetime(years)}.")
        else:
            budget = max(1, int(drive.rated_dwpd * cell.ssd_bytes)) if budgeted else 0
            budget -= budget % MIB if budget >= MIB else 0
            reasons.append(f"{said}would last {lifetime(years)}. {_remedy(wear, drive, budgeted)}")
    if cell.ssd_bytes < LEAST_SSD:
        reasons.append(
            f"The configuration gives it {readable_bytes(LEAST_SSD)}: smaller tiers are for tests."
        )
    return Recommendation(chosen, True, headline, tuple(reasons), budget)


def _bears(one: Figures, drive: Drive) -> bool:
    years = one.years(drive)
    return years is None or years >= RATED_YEARS


def _remedy(wear: float, drive: Drive, budgeted: bool) -> str:
    better = f"a drive rated for {_rated(wear)} DWPD"
    if not budgeted:
        return f"Tiers of its type take no write budget, so it needs {better}, or a larger one."
    share = drive.rated_dwpd / wear
    told = f"{share:.1%}" if share >= 0.001 else "less than 0.1%"
    return (
        f"So the configuration has a write budget that keeps to the rating ({told} of what would "
        "be written), and stores only what was wanted before once that runs short: hits will be "
        f"fewer than shown, and all of them with {better} and no budget."
    )


def _rated(wear: float) -> str:
    """The rating that bears so many writes a day, in two digits."""
    step = 10.0 ** (math.floor(math.log10(wear)) - 1)
    return _times(math.ceil(wear / step - 1e-9) * step)


def _times(times: float) -> str:
    return f"{times:,.0f}" if times >= 10 else f"{times:.2g}"


def _policies(one: Figures) -> str:
    """Those that are in effect in a cell with an SSD."""
    cell = one.cell
    if not cell.host_bytes:
        return f"the policy {cell.ssd_policy}"
    if cell.policy == cell.ssd_policy:
        return f"the policy {cell.policy}"
    return f"the policy {cell.policy} in host memory and {cell.ssd_policy} on the SSD"


def lifetime(years: float) -> str:
    """How long a drive lasts, for people; never more than it does."""
    if years > 20:
        return "> 20 years"
    for unit, parts in (("years", 1), ("months", 12)):
        if years * parts >= 1:
            return f"{math.floor(years * parts * 10 + 1e-6) / 10:.1f} {unit}"
    days = math.floor(years * 3650 + 1e-6) / 10
    return f"{days:.1f} days" if days else "less than 0.1 days"


def _gain(chosen: Figures, bare: Figures) -> str:
    """What a cell brings, against the same one without an SSD."""
    parts: list[str] = []
    token, before = chosen.first_token, bare.first_token
    if token is not None and before is not None and chosen is not bare:
        parts.append(
            f"the mean time to the first token is {token.mean:.2f} s ({before.mean:.2f} s without "
            f"an SSD), the 99th percentile {token.p99:.2f} s ({before.p99:.2f} s)"
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


def _size(chosen: Figures, figures: Sequence[Figures], drive: Drive) -> str:
    """Why this capacity."""
    best = max(figures, key=lambda one: (one.loaded, -one.cell.ssd_bytes, -one.cell.host_bytes))
    if chosen.loaded >= best.loaded:
        most = "No cell of the grid loads more."
    else:
        where = "no SSD"
        if best.cell.ssd_bytes:
            where = f"{readable_bytes(best.cell.ssd_bytes)} of SSD"
        if best.cell.host_bytes != chosen.cell.host_bytes:
            where += f" and {readable_bytes(best.cell.host_bytes)} of host memory"
        most = f"The best cell of the grid loads {best.loaded:.1%}, with {where}."
    smaller = [
        one
        for one in figures
        if one.cell.ssd_bytes < chosen.cell.ssd_bytes and one.loaded >= ENOUGH * best.loaded
    ]
    if not smaller:
        return f"{most} None with a smaller SSD loads {ENOUGH:.0%} of that."
    return (
        f"{most} Some with a smaller SSD load {ENOUGH:.0%} of that, too, but such a drive, rated "
        f"{drive.rated_dwpd:g} DWPD, would last less than {RATED_YEARS:g} years."
    )


def deployment_yaml(
    recommendation: Recommendation,
    *,
    trace: str,
    ranks: int,
    ssd_type: str,
    ssd_path: Path,
    ssd_settings: Collection[str],
) -> str:
    """The recommended deployment as text for a YAML file.

    Args:
        recommendation: what to write down.
        trace: what it was planned from, for the comment.
        ranks: over which the host memory is divided.
        ssd_type: `type` of the SSD's tier.
        ssd_path: its directory; a relative one counts from the working directory.
        ssd_settings: the settings that tiers of that type have.
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
            "path": str(ssd_path.absolute()).replace("$", "$$"),  # which is expanded
            "capacity": format_bytes(max(cell.ssd_bytes, LEAST_SSD)),
            "eviction": {"policy": cell.ssd_policy},
        }
        if recommendation.write_budget:
            ssd["write_budget"] = format_bytes(recommendation.write_budget)
        known = {"name", "type", "capacity", *ssd_settings}
        tiers.append({name: value for name, value in ssd.items() if name in known})
    source = "".join(c if c.isprintable() else "?" for c in " ".join(trace.split()))
    lines = f"# Recommended by `tiered-kv plan` for {source}.\n"
    if ranks > 1 and cell.host_bytes:
        lines += "# The host's capacity is per rank.\n"
    if not recommendation.ssd and not cell.host_bytes:
        lines += "# A deployment has at least one tier; this one would bring next to nothing.\n"
    return lines + yaml.safe_dump({"tiers": tiers}, sort_keys=False)
