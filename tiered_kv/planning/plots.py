"""Line charts as SVG text, to stand in a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["COLOURS", "Line", "chart"]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555", "#000000")
"""Told apart also by those who see few colours (Okabe and Ito)."""

_WIDTH, _HEIGHT = 860, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 14, 46
"""Margins; the left one and the lower one are larger where labels need it."""
_LETTER = 7.0
"""At most, on the average of a label, in the size that is used."""
_TURN = 40
"""Degrees by which labels are turned that would overlap side by side."""
_LINE = 19.0
"""What turned labels need each, from one to the next."""
_MARKERS = ("circle", "square", "diamond", "triangle")


@dataclass(frozen=True, slots=True)
class Line:
    """A line through one value per column."""

    name: str
    values: Sequence[float | None]
    """None: no point."""
    dashed: bool = False
    """Drawn without points: what is compared with."""


def chart(
    title: str,
    columns: Sequence[str],
    lines: Sequence[Line],
    *,
    axis: str,
    shown: Callable[[float], str],
    marked: int | None = None,
    decades: bool = False,
) -> str:
    """An SVG element with its legend above.

    Args:
        title: what it shows, for those who hear the page.
        columns: what stands below the columns.
        lines: at most as many as there are colours.
        axis: what the columns are.
        shown: a value of the other axis, as text.
        marked: column that is set off.
        decades: whether equal steps of the other axis are equal ratios; all values are above 0.
    """
    values = [value for line in lines for value in line.values if value is not None]
    ticks = _decades(values) if decades else _ticks(max(values, default=0))
    top, bottom = ticks[-1], ticks[0]
    left = max(_LEFT, _width([shown(tick) for tick in ticks]) + 16)
    inner = _WIDTH - left - _RIGHT
    step = inner / max(1, len(columns))
    turned = _width(columns) + 6 > step
    depth = _width(columns) * math.sin(math.radians(_TURN)) if turned else 0.0
    height = _HEIGHT + depth
    every = max(1, math.ceil(_LINE / step)) if turned else 1

    def x(column: int) -> float:
        return left + step * (column + 0.5)

    def y(value: float) -> float:
        share = math.log(value / bottom) / math.log(top / bottom) if decades else value / top
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share)

    parts = [
        (
            f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}" '
            'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12">'
        )
    ]
    if marked is not None:
        parts.append(
            f'<rect x="{x(marked) - step / 2:.1f}" y="{_TOP}" width="{step:.1f}" '
            f'height="{_HEIGHT - _TOP - _BOTTOM}" fill="#fff3d6"/>'
        )
    for tick in ticks:
        at = y(tick)
        parts.append(
            f'<line x1="{left:.1f}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" '
            f'stroke="{"#888" if tick == bottom else "#e2e2e2"}"/>'
            f'<text x="{left - 8:.1f}" y="{at + 4:.1f}" text-anchor="end" fill="#555">'
            f"{escape(shown(tick))}</text>"
        )
    for column, label in enumerate(columns):
        if column != marked and (column % every or _close(column, marked, every)):
            continue
        weight = ' font-weight="bold"' if column == marked else ""
        middle, below = f"{x(column):.1f}", _HEIGHT - _BOTTOM + 18
        how = 'text-anchor="middle"'
        if turned:
            how = f'text-anchor="end" transform="rotate(-{_TURN} {middle} {below})"'
        parts.append(
            f'<text x="{middle}" y="{below}" {how} fill="#333"{weight}>{escape(label)}</text>'
        )
    parts.append(
        f'<text x="{left + inner / 2:.1f}" y="{height - 8:.1f}" text-anchor="middle" fill="#555">'
        f"{escape(axis)}</text>"
    )
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        points = [(x(i), y(v)) for i, v in enumerate(line.values) if v is not None]
        if line.dashed and len(points) == len(columns):  # from edge to edge
            points = [(left, points[0][1]), *points, (_WIDTH - _RIGHT, points[-1][1])]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}>'
            f"<title>{escape(line.name)}</title></polyline>"
        )
        if not line.dashed:
            for index, value in enumerate(line.values):
                if value is not None:
                    what = f"{line.name}, {columns[index]}: {shown(value)}"
                    parts.append(_marker(number, x(index), y(value), colour, what))
    parts.append("</svg>")
    return f'<div class="legend">{_legend(lines)}</div>\n' + "\n".join(parts)


def _width(labels: Sequence[str]) -> float:
    """Of the longest one."""
    return _LETTER * max(map(len, labels), default=0)


def _close(column: int, marked: int | None, every: int) -> bool:
    """Whether its label would lie on the marked one's."""
    return marked is not None and abs(column - marked) < every


def _legend(lines: Sequence[Line]) -> str:
    entries: list[str] = []
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        dash = ' stroke-dasharray="5 3"' if line.dashed else ""
        marker = "" if line.dashed else _marker(number, 14, 7, colour, line.name)
        entries.append(
            '<span><svg width="28" height="14" xmlns="http://www.w3.org/2000/svg">'
            f'<line x1="0" x2="28" y1="7" y2="7" stroke="{colour}" stroke-width="2"{dash}/>'
            f"{marker}</svg> {escape(line.name)}</span>"
        )
    return "".join(entries)


def _marker(number: int, x: float, y: float, colour: str, what: str) -> str:
    """A point; its shape tells lines apart that lie on one another."""
    title = f"<title>{escape(what)}</title>"
    paint = f'fill="white" stroke="{colour}" stroke-width="2"'
    match _MARKERS[number % len(_MARKERS)]:
        case "square":
            return (
                f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" {paint}>{title}</rect>'
            )
        case "diamond":
            corners = f"{x:.1f},{y - 5.5:.1f} {x + 5.5:.1f},{y:.1f} {x:.1f},{y + 5.5:.1f}"
            corners += f" {x - 5.5:.1f},{y:.1f}"
        case "triangle":
            corners = f"{x:.1f},{y - 5.5:.1f} {x + 5:.1f},{y + 4:.1f} {x - 5:.1f},{y + 4:.1f}"
        case _:
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {paint}>{title}</circle>'
    return f'<polygon points="{corners}" {paint}>{title}</polygon>'


def _ticks(most: float) -> list[float]:
    """From 0 on, evenly spaced, by 1, 2 or 5 times a power of ten, up to `most` at least."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    return [step * number for number in range(math.ceil(most / step * 0.999) + 1)]


def _decades(values: Sequence[float]) -> list[float]:
    """Powers of ten around the values, the first below all of them."""
    low = math.ceil(math.log10(min(values, default=1))) - 1  # so that no line lies on the axis
    high = math.ceil(math.log10(max(values, default=1)))
    return [10.0**power for power in range(low, max(high, low + 1) + 1)]
