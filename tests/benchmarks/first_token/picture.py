"""Draws what was measured."""

# pyright: reportMissingImports=false
# (matplotlib is not there where the types are checked.)

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.first_token.starts import Starts
from tests.benchmarks.first_token.throughput import CLIENTS, Throughput
from tests.benchmarks.first_token.tokens import WAYS, Tokens

__all__ = ["draw", "missing_matplotlib"]

PLAIN, TIERED, LIMIT = "#8c8c8c", "#1f6fb4", "#59a14f"


def missing_matplotlib() -> str:
    """Why no picture can be drawn; empty where one can."""
    if importlib.util.find_spec("matplotlib") is not None:
        return ""
    return "matplotlib is not there: pip install --no-deps -r tests/benchmarks/lock-plot.txt"


def draw(
    file: Path, tokens: Tokens | None, throughput: Throughput | None, starts: Starts | None
) -> None:
    """One panel for each part that was measured; nothing without any."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [part for part in (tokens, throughput, starts) if part is not None]
    if not panels:
        return
    widths = [1.5 if isinstance(part, Tokens) else 1.0 for part in panels]
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(4.2 * sum(widths), 3.6),
        width_ratios=widths,
        squeeze=False,
        layout="constrained",
    )
    for axis, part in zip(axes[0], panels, strict=True):
        axis.spines[["top", "right"]].set_visible(False)
        if isinstance(part, Tokens):
            _tokens(axis, part)
        elif isinstance(part, Throughput):
            _throughput(axis, part)
        else:
            _starts(axis, part)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: sorted(values)[len(values) // 2] for name, values in seconds.items() if values}


def _tokens(axis: Any, tokens: Tokens) -> None:
    colours = {"computed": PLAIN, "limit": LIMIT}
    ways = [way for way in WAYS if tokens.seconds[way]][::-1]
    slowest = max(max(tokens.seconds[way]) for way in ways)
    fastest = min(min(tokens.seconds[way]) for way in ways)
    for place, way in enumerate(ways):
        seconds, colour = tokens.seconds[way], colours.get(way, TIERED)
        axis.hlines(place, min(seconds), max(seconds), color=colour, linewidth=2, alpha=0.5)
        axis.plot(tokens.median(way), place, "o", color=colour, markersize=8)
        axis.annotate(
            f"{tokens.median(way):.2f} s",
            (max(seconds), place),
            (8, 0),
            textcoords="offset points",
            va="center",
        )
    axis.set_yticks(range(len(ways)), [WAYS[way] for way in ways])
    axis.set_xscale("log")
    axis.set_xlim(fastest / 1.5, slowest * 2.5)
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if fastest / 1.5 < t < slowest * 2.5]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.grid(axis="x", alpha=0.3)
    axis.set_xlabel("seconds: medians, and fastest to slowest round")
    shortest = min(tokens.prompt_tokens)
    axis.set_title(f"First token of a prompt of {shortest:,} tokens", loc="left")


def _throughput(axis: Any, throughput: Throughput) -> None:
    plain = _medians({str(n): throughput.plain[n] for n in CLIENTS})
    tiered = _medians({str(n): throughput.tiered[n] for n in CLIENTS})
    places = range(len(CLIENTS))
    axis.bar([p - 0.2 for p in places], list(plain.values()), 0.4, color=PLAIN, label="vLLM")
    bars = axis.bar(
        [p + 0.2 for p in places], list(tiered.values()), 0.4, color=TIERED, label="with tiers"
    )
    axis.bar_label(bars, [f"×{throughput.ratio(n):.2f}" for n in CLIENTS], padding=2)
    axis.set_xticks(list(places), [str(n) for n in CLIENTS])
    axis.set_xlabel("clients")
    axis.set_ylabel("tokens/s")
    axis.set_ylim(top=1.25 * max(*plain.values(), *tiered.values()))
    axis.legend(frameon=False, loc="upper left", ncols=2)
    axis.set_title("Half of each prompt is shared", loc="left")


def _starts(axis: Any, starts: Starts) -> None:
    times = _medians(starts.seconds)
    bars = axis.bar(list(times), list(times.values()), color=[PLAIN, *(TIERED for _ in times)])
    axis.bar_label(bars, [f"{seconds:.1f} s" for seconds in times.values()], padding=2)
    axis.set_ylim(top=1.2 * max(times.values()))
    axis.set_ylabel("seconds to the first answer")
    axis.set_title("Start, by size of the tiers", loc="left")
