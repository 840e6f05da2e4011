"""How fast the engine computes, and how fast tiers bring blocks: given, measured, or assumed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiered_kv.connector import LiveView
from tiered_kv.errors import TraceError
from tiered_kv.routing import MEMORY_COST, STORE_COST
from tiered_kv.stats import LoadRate

__all__ = ["ASSUMED_PREFILL", "ENGINE", "HOST", "SSD", "Speeds", "live_speeds", "read_speeds"]

HOST, SSD = "host", "ssd"
"""The tiers of a plan."""

ENGINE = "engine"
"""The engine's own cache, where it is replayed, too: least recently used goes first, as in vLLM."""

PREFILL = "prefill_tokens_per_second"
"""Name of the gauge."""

MOST_RATE = 1e18
"""What is more is no measured rate."""

ASSUMED_PREFILL = 8000.0
"""Tokens per second. No figure of any engine: of the right size for a model of 70 billion
parameters on four to eight datacentre GPUs."""


_ASSUMED_HOST = LoadRate(MEMORY_COST.bytes_per_second, MEMORY_COST.latency_seconds)
_ASSUMED_SSD = LoadRate(STORE_COST.bytes_per_second, STORE_COST.latency_seconds)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one engine, all ranks together."""

    prefill: float = ASSUMED_PREFILL
    """Tokens of prompts that are computed per second."""
    host: LoadRate = _ASSUMED_HOST
    ssd: LoadRate = _ASSUMED_SSD
    prefill_from: str = "assumed"
    """Where the figure comes from, for people."""
    host_from: str = "assumed"
    ssd_from: str = "assumed"

    @property
    def assumed(self) -> tuple[str, ...]:
        """Figures that nobody gave or measured."""
        told = {
            "the prefill rate": self.prefill_from,
            "the load rate of host memory": self.host_from,
            "the load rate of the SSD": self.ssd_from,
        }
        return tuple(what for what, source in told.items() if _is_assumed(source))


def _is_assumed(source: str) -> bool:
    """Whether a figure is assumed: by us, or by the engine or file that it is from."""
    return source.partition(":")[0] == "assumed"


def read_speeds(file: Path, speeds: Speeds) -> Speeds:
    """`speeds` with the load rates of a file: the output of `tiered-kv bench --json` or of
    `tiered-kv explain --json`.

    Of several tiers that are stores the slowest counts, which is said.

    Raises:
        TraceError: it cannot be read, or holds no load rate.
    """
    try:
        values: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"{file}: cannot be read: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        raise TraceError(f"{file}:{error.lineno}: is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise TraceError(f"{file}: is not JSON: {error}") from error
    except ValueError as error:
        raise TraceError(f"{file}: is not UTF-8 text: {error}") from error
    if not isinstance(values, dict):
        raise TraceError(f"{file}: holds a {type(values).__name__}, not the output of a command")
    rates = list(_explained(values)) or list(_benched(values))
    if not rates:
        raise TraceError(
            f"{file}: tells of no load rate; expected what `tiered-kv bench --json` or `tiered-kv "
            "explain --json` prints"
        )
    return _with_rates(speeds, rates, str(file))


_Known = tuple[str, bool, LoadRate, str]
"""Name of a tier, whether it is the host's, its rate, and how that is known."""


def _with_rates(speeds: Speeds, rates: Iterable[_Known], source: str) -> Speeds:
    """Of each kind the slowest."""
    for name, host, rate, how in sorted(rates, key=lambda one: -one[2].bytes_per_second):
        told = f"{how}: tier {name}, {source}"
        if host:
            speeds = replace(speeds, host=rate, host_from=told)
        else:
            speeds = replace(speeds, ssd=rate, ssd_from=told)
    return speeds


def _positive(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < MOST_RATE else None


def _explained(values: Mapping[str, Any]) -> Iterable[_Known]:
    """Of `tiered-kv explain --json`."""
    gate = values.get("recompute")
    kinds = {
        tier.get("name"): tier.get("type")
        for tier in _dicts(values.get("tiers"))
        if isinstance(tier.get("name"), str)
    }
    for tier in _dicts(gate.get("tiers") if isinstance(gate, dict) else None):
        rate, latency = _positive(tier.get("bytes_per_second")), tier.get("latency_seconds")
        name = str(tier.get("name"))
        if rate is not None:
            how = "measured" if tier.get("reason") != STORE_COST.reason else "assumed"
            yield name, kinds.get(name) == "cpu", LoadRate(rate, _positive(latency) or 0.0), how


def _dicts(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def live_speeds(view: LiveView, speeds: Speeds) -> Speeds:
    """`speeds` with what a running engine measured, as its manager tells."""
    source = f"pid {view.pid}"
    rates = view.stats.gauges
    prefill = [g.value for (series, _), g in rates.items() if series[0] == PREFILL]
    if prefill:
        speeds = replace(speeds, prefill=prefill[-1], prefill_from=f"measured by {source}")
    if view.cache is None:
        return speeds
    ranks, host = view.cache.ranks, view.cache.host_tier
    known = [
        (
            name,
            name == host,
            replace(rate, bytes_per_second=rate.bytes_per_second * ranks),
            "measured",
        )
        for name, rate in view.load_rates.items()
    ]
    return _with_rates(speeds, known, source)


def _benched(values: Mapping[str, Any]) -> Iterable[_Known]:
    """Of `tiered-kv bench --json`: the best median of the ways that load from each tier."""
    for tier in _dicts(values.get("tiers")):
        host = tier.get("type") == "cpu"
        best = 0.0
        for size in _dicts(tier.get("sizes")):
            for figure in _dicts(size.get("figures")):
                if _loads(figure, host):
                    best = max(best, _positive(figure.get("median_gib_per_second")) or 0.0)
        if best:
            cost = MEMORY_COST if host else STORE_COST
            yield (
                str(tier.get("tier")),
                host,
                LoadRate(best * 2**30, cost.latency_seconds),
                "measured",
            )


def _loads(figure: Mapping[str, Any], host: bool) -> bool:
    """Whether it is of a whole way from a tier to the engine (from the host's that is one hop),
    verified, that no page cache helped."""
    return (
        figure.get("kind") in (("chain", "hop") if host else ("chain",))
        and figure.get("direction") == "load"
        and figure.get("verify") != "never"
        and figure.get("cache") != "warm"
    )
