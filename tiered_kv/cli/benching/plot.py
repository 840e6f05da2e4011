"""Draws what `tiered-kv bench` measured: a row of panels per tier, GiB/s over the block size.

matplotlib is imported here alone; `tiered-kv[plot]` brings it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tiered_kv.cli.benching.figures import Figure, Move, TierResult
from tiered_kv.config import readable_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Told apart by people who see colours differently, too (Okabe and Ito)."""
_LIMIT_STYLES = {"memcpy": "--", "disk write": ":", "disk read": ":"}
_PANEL_INCHES = (4.6, 3.6)


@dataclass(frozen=True, slots=True)
class _Panel:
    """One direction of a tier, with blocks in the page cache or not."""

    direction: str
    cache: str
    title: str


_PANELS = (
    _Panel("store", "", "store"),
    _Panel("load", "", "load"),
    _Panel("load", "cold", "load, not in the page cache"),
    _Panel("load", "warm", "load, from the page cache"),
)


def draw(file: Path, results: Sequence[TierResult]) -> None:
    """Draw the medians into a .png or .svg file; nothing where nothing was measured.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure as Picture

    rows = [(result, _panels(result)) for result in results if result.sizes]
    if not rows:
        return
    across = max(len(panels) for _, panels in rows)
    width, height = _PANEL_INCHES
    picture = Picture(
        figsize=(width * across + 0.6, height * len(rows) + 0.5), layout="constrained"
    )
    axes = picture.subplots(len(rows), across, squeeze=False)
    for (result, panels), line in zip(rows, axes, strict=True):
        for panel, place in zip(panels, line, strict=False):
            _draw_panel(place, result, panel)
        for place in line[len(panels) :]:
            place.set_axis_off()
    picture.suptitle("Medians of what each hop and chain moves, and what the machine does at most")
    picture.savefig(file, dpi=150)


def _panels(result: TierResult) -> list[_Panel]:
    seen = {
        (figure.move.direction, figure.move.cache) for one in result.sizes for figure in one.figures
    }
    return [panel for panel in _PANELS if (panel.direction, panel.cache) in seen]


def _draw_panel(axes: Axes, result: TierResult, panel: _Panel) -> None:
    sizes = [one.block_bytes for one in result.sizes]
    lines: dict[Move, list[float]] = {}
    for one in result.sizes:
        for figure in one.figures:
            if figure.move.kind == "limit" or _belongs(figure, panel):
                lines.setdefault(figure.move, []).append(figure.median_gib_per_second)
    names = list(dict.fromkeys(move.name for move in lines if move.kind != "limit"))
    wanted = {move.limit for move in lines if move.kind != "limit"}
    for move, values in lines.items():
        if move.kind == "limit":
            if move.name in wanted and len(values) == len(sizes):
                style = _LIMIT_STYLES.get(move.name, "--")
                axes.plot(
                    sizes,
                    values,
                    color="0.35",
                    linestyle=style,
                    marker="_",  # a single size has no line
                    label=f"limit: {move.name}",
                )
        else:
            colour = _COLOURS[names.index(move.name) % len(_COLOURS)]
            verified = move.verify != "never"
            how = {"always": ", verified", "never": ", not verified"}
            axes.plot(
                sizes[: len(values)],
                values,
                color=colour,
                marker="o",
                markersize=4,
                linestyle="-" if verified else "--",
                markerfacecolor=colour if verified else "white",
                label=move.name + how.get(move.verify, ""),
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [readable_bytes(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("block size")
    axes.set_ylabel("GiB/s")
    axes.set_title(f"{result.tier} ({result.type}): {panel.title}", fontsize=10)
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        fontsize=7.5,
        frameon=False,
        ncols=2,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),  # below, where it hides no line
    )


def _belongs(figure: Figure, panel: _Panel) -> bool:
    return (figure.move.direction, figure.move.cache) == (panel.direction, panel.cache)
