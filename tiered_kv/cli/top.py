"""`tiered-kv top`: what the engines on this machine do with their tiers, as it happens."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiered_kv.cli.output import FAILED, Json, bytes_text, print_json, read_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tiered_kv.connector import LiveView
    from tiered_kv.stats import StatsSnapshot, TierStats

__all__ = ["top"]

Interval = Annotated[
    str, typer.Option("--interval", metavar="TIME", help="Time between two looks, with a unit.")
]
Once = Annotated[bool, typer.Option("--once", help="Look once, and end.")]

COLUMNS = (
    *("tier", "state", "hits", "misses", "loaded", "stored", "evicted", "dropped", "bad"),
    *("waiting", "used", "capacity"),
)


@dataclass(frozen=True, slots=True)
class _Deployment:
    """The halves that share a namespace, put together."""

    namespace: str
    views: Sequence[LiveView]
    stats: StatsSnapshot

    @property
    def processes(self) -> str:
        return ", ".join(f"{view.source} (pid {view.pid})" for view in self.views)

    def state(self, tier: str) -> tuple[str, str]:
        """The worst that a rank says of a tier, and why; the host tier is healthy."""
        told = [view.tiers[tier] for view in self.views if tier in view.tiers]
        worst = max(told, key=lambda one: _BADNESS.index(one.state), default=None)
        return ("", "") if worst is None else (worst.state, worst.reason)

    def moved(self, tier: str) -> tuple[int, int]:
        """Bytes loaded from a tier and stored in it."""
        loaded = stored = 0
        for (src, dst, where), hop in self.stats.hops().items():
            if where == tier:
                loaded += hop.bytes if dst in ("cpu", "gpu") and src != "gpu" else 0
                stored += hop.bytes if src in ("cpu", "gpu") and dst != "gpu" else 0
        return loaded, stored


_BADNESS = ("healthy", "degraded", "opening", "down")


def top(interval: Interval = "2s", once: Once = False, as_json: Json = False) -> None:
    """Show the tiers of the engines that run on this machine: state, hits, bytes moved, what waits
    to be written, how full they are. Asks the processes themselves, so an idle engine answers too;
    only those of the same user (root: everybody's) in the same network namespace."""
    seconds = read_seconds(interval)
    if once or as_json:
        found = _look()
        if as_json:
            print_json({"deployments": [_as_json(one) for one in found]})
        else:
            _print_once(found)
        if not found:
            raise typer.Exit(FAILED)
        return
    _follow(seconds)


def _look() -> list[_Deployment]:
    from tiered_kv.connector import ask_all

    by_namespace: dict[str, list[LiveView]] = {}
    for view in ask_all():
        by_namespace.setdefault(view.namespace, []).append(view)
    return [_together(namespace, views) for namespace, views in by_namespace.items()]


def _together(namespace: str, views: Sequence[LiveView]) -> _Deployment:
    from tiered_kv.stats import StatsSnapshot

    stats = StatsSnapshot(0.0)
    for view in views:
        # Two engines of one model have a rank 0 each.
        gauges = {
            (series, f"{source} of {view.pid}"): gauge
            for (series, source), gauge in view.stats.gauges.items()
        }
        own = StatsSnapshot(view.stats.time, view.stats.counters, gauges, view.stats.histograms)
        stats = stats.merge(own)
    return _Deployment(namespace, views, stats)


def _print_once(found: Sequence[_Deployment]) -> None:
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 160)
    console.print(_drawn(found, {}))


def _follow(seconds: float) -> None:
    from rich.live import Live

    before: dict[tuple[str, str], tuple[float, int, int]] = {}
    with Live(_drawn(_look(), before), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(seconds)
            live.update(_drawn(_look(), before), refresh=True)


def _drawn(
    found: Sequence[_Deployment], before: dict[tuple[str, str], tuple[float, int, int]]
) -> RenderableType:
    """Tables; `before` holds what was moved at the last look, and is brought up to date."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not found:
        return Text("no engine with tiers answers on this machine")
    parts: list[RenderableType] = []
    for one in found:
        title = f"Namespace {one.namespace}: {one.processes}"
        table = Table(title=title, title_justify="left", expand=False)
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in ("tier", "state") else "right")
        reasons: list[str] = []
        for name, tier in one.stats.tiers().items():
            state, reason = one.state(name)
            table.add_row(*(Text(cell) for cell in _row(one, name, tier, state, before)))
            if reason:
                reasons.append(f"{name}: {reason}")
        parts += [table, *(Text(reason) for reason in reasons)]
    return Group(*parts)


def _row(
    one: _Deployment,
    name: str,
    tier: TierStats,
    state: str,
    before: dict[tuple[str, str], tuple[float, int, int]],
) -> Iterable[str]:
    loaded, stored = one.moved(name)
    now = time.monotonic()
    then, loaded_then, stored_then = before.get((one.namespace, name), (now, loaded, stored))
    before[one.namespace, name] = (now, loaded, stored)
    passed = now - then
    return (
        name,
        state,
        str(tier.hits),
        str(tier.misses),
        _moved(loaded, loaded - loaded_then, passed),
        _moved(stored, stored - stored_then, passed),
        str(tier.evicted),
        str(sum(tier.dropped.values())),
        str(sum(tier.corrupt.values())),
        bytes_text(tier.write_behind_bytes),
        bytes_text(tier.used_bytes),
        bytes_text(tier.capacity_bytes),
    )


def _moved(size: int, more: int, seconds: float) -> str:
    shown = bytes_text(size)
    return f"{shown} ({bytes_text(int(more / seconds))}/s)" if seconds and more > 0 else shown


def _as_json(one: _Deployment) -> Mapping[str, Any]:
    tiers: dict[str, Any] = {}
    for name, tier in one.stats.tiers().items():
        loaded, stored = one.moved(name)
        state, reason = one.state(name)
        tiers[name] = {
            "state": state,
            "reason": reason,
            "hits": tier.hits,
            "misses": tier.misses,
            "loaded_bytes": loaded,
            "stored_bytes": stored,
            "evicted_blocks": tier.evicted,
            "dropped_blocks": dict(tier.dropped),
            "corrupt_blocks": dict(tier.corrupt),
            "waiting_bytes": tier.write_behind_bytes,
            "resident_blocks": tier.resident_blocks,
            "used_bytes": tier.used_bytes,
            "capacity_bytes": tier.capacity_bytes,
        }
    return {
        "namespace": one.namespace,
        "processes": [
            {"source": view.source, "pid": view.pid, "time": view.stats.time} for view in one.views
        ],
        "tiers": tiers,
    }
