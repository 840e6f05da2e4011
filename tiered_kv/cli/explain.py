"""`tiered-kv explain`: which way blocks take, what it costs, when that is worth it, and what the
tiers may hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tiered_kv.cli.output import (
    BlockSize,
    BlockTokens,
    Config,
    Json,
    Ranks,
    bytes_text,
    print_json,
    print_table,
    read_size,
    warn,
)

if TYPE_CHECKING:
    from tiered_kv.config import Deployment, TierSettings
    from tiered_kv.plugins import Plugins
    from tiered_kv.registry import TransferRegistry
    from tiered_kv.routing import Chain, Hop, HopCost, RouteReport

__all__ = ["explain"]


def explain(
    config: Config,
    block_size: BlockSize = "2MiB",
    block_tokens: BlockTokens = 16,
    ranks: Ranks = 1,
    as_json: Json = False,
) -> None:
    """Show tiers, totals and chains of a configuration. Opens nothing and writes nothing."""
    from tiered_kv.config import load, shortages, volumes
    from tiered_kv.plugins import Plugins

    block_bytes = read_size(block_size)
    plugins = Plugins()
    deployment = load(config, plugins)
    unusable = _unusable(deployment, plugins)
    routes = _routes(deployment, plugins, unusable, block_bytes)
    warnings = [f"tier {name!r} cannot be used: {why}" for name, why in unusable.items()]
    warnings += shortages(volumes(deployment, ranks))
    tiers = [_tier(deployment, place, ranks) for place in range(len(deployment.tiers))]
    gate = _gate(deployment, routes, block_tokens)
    if as_json:
        print_json(
            {
                "config": str(config),
                "block_bytes": block_bytes,
                "block_tokens": block_tokens,
                "ranks": ranks,
                "tiers": tiers,
                "total_bytes": sum(tier["total_bytes"] for tier in tiers),
                "routes": [_route(report) for report in routes],
                "recompute": gate,
                "warnings": warnings,
            }
        )
        return
    print_table(
        f"Tiers of {config}, {ranks} rank(s)",
        ("tier", "type", "capacity", "in all", "stores", "directories"),
        (
            (
                tier["name"],
                tier["type"],
                f"{bytes_text(tier['capacity_bytes'])} per {tier['per']}",
                bytes_text(tier["total_bytes"]),
                "yes" if tier["write"] else "no",
                "\n".join(tier["directories"]) or "-",
            )
            for tier in tiers
        ),
    )
    print_table(
        f"Chains for a block of {bytes_text(block_bytes)}",
        ("from", "to", "chain", "per block", "hops", "chosen"),
        (row for report in routes for row in _rows(report)),
    )
    print_table(
        f"Load or recompute: gate {gate['gate']}, {_MODES[gate['gate']]}",
        ("tier", "load rate", "loaded while the engine computes less than", "gate"),
        (
            (
                tier["name"],
                f"{tier['bytes_per_second'] / 1e9:.2f} GB/s {tier['reason']}",
                f"{tier['break_even_tokens_per_second']:.0f} tokens/s",
                "-" if tier["loaded"] is None else "loads" if tier["loaded"] else "recomputes",
            )
            for tier in gate["tiers"]
        ),
    )
    for message in warnings:
        warn(message)


_MODES = {
    "measured": "by the load rates and the prefill rate that the engine measures",
    "fixed": "by the load rates that the engine measures and the prefill rate that is configured",
    "off": "whatever is found is loaded",
}


def _gate(deployment: Deployment, routes: list[RouteReport], block_tokens: int) -> dict[str, Any]:
    """When loading a long prefix from a tier takes as long as computing it."""
    from tiered_kv.routing import CPU_ENDPOINT, GPU_ENDPOINT

    prefill = deployment.recompute.tokens_per_second
    tiers: list[dict[str, Any]] = []
    for report in routes:
        chain = report.chosen
        if report.dst != GPU_ENDPOINT or chain is None:
            continue
        host = deployment.cpu if report.src == CPU_ENDPOINT else None
        slowest = min(chain.costs, key=lambda cost: cost.bytes_per_second)
        even = block_tokens / chain.seconds_per_block
        tiers.append(
            {
                "name": str(report.src) if host is None else host.name,
                "bytes_per_second": slowest.bytes_per_second,
                "latency_seconds": sum(cost.latency_seconds for cost in chain.costs),
                "reason": slowest.reason,
                "break_even_tokens_per_second": even,
                "loaded": None if prefill is None else prefill <= even,
            }
        )
    return {
        "gate": deployment.recompute.gate,
        "tokens_per_second": prefill,
        "tiers": tiers,
    }


def _tier(deployment: Deployment, place: int, ranks: int) -> dict[str, Any]:
    tier = deployment.tiers[place]
    per_rank = tier is deployment.cpu
    return {
        "name": tier.name,
        "type": tier.type,
        "capacity_bytes": tier.capacity,
        "per": "rank" if per_rank else "machine",
        "total_bytes": tier.capacity * ranks if per_rank else tier.capacity,
        "write": tier in deployment.write_order,
        "directories": [str(directory) for directory in tier.directories.values()],
    }


def _unusable(deployment: Deployment, plugins: Plugins) -> dict[str, str]:
    """Why a store tier cannot be used, by its name."""
    from tiered_kv.errors import PluginError

    found: dict[str, str] = {}
    for tier in deployment.stores:
        try:
            plugins.usable(tier.type)
        except PluginError as error:
            found[tier.name] = str(error)
    return found


def _routes(
    deployment: Deployment, plugins: Plugins, unusable: dict[str, str], block_bytes: int
) -> list[RouteReport]:
    """Every tier, to and from the engine."""
    from tiered_kv.engine import GROUP_BYTES, register_store_handlers
    from tiered_kv.plugins import build_registry
    from tiered_kv.routing import CPU_ENDPOINT, Router, assumed_cost

    usable = (tier.type for tier in deployment.stores if tier.name not in unusable)
    registry = build_registry(plugins.deployed(usable))
    specs = {tier.name: plugins.get(tier.type).spec for tier in deployment.stores}
    stores = {name: spec for name, spec in specs.items() if spec is not None}
    for backend, spec in {t.type: stores[t.name] for t in deployment.stores}.items():
        register_store_handlers(registry, spec, provider=backend)
    settings = {tier.name: tier for tier in deployment.stores}

    def cost(hop: Hop) -> HopCost:
        known = assumed_cost(hop)
        reason = unusable.get(hop.tier)
        if reason is None and hop.tier in settings:
            reason = _missing(registry, hop, settings[hop.tier])
        return known if reason is None else replace(known, healthy=False, reason=reason)

    group = max(1, GROUP_BYTES // block_bytes)
    reports = Router(registry, stores, cost, block_bytes, group).explain()
    if deployment.cpu is not None:
        return list(reports)
    return [report for report in reports if CPU_ENDPOINT not in (report.src, report.dst)]


def _missing(registry: TransferRegistry, hop: Hop, settings: TierSettings) -> str | None:
    from tiered_kv.engine import NOT_IN_USE

    try:
        missing = registry.pair(hop.src.spec, hop.dst.spec).missing(settings)
    except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; the rest is shown
        missing = f"{hop.provider} cannot tell whether it works: {error!r}"
    return None if missing is None else f"{NOT_IN_USE}: {missing}"


def _rows(report: RouteReport) -> list[tuple[str, ...]]:
    ends = (str(report.src), str(report.dst))
    rows: list[tuple[str, ...]] = []
    if report.chosen is not None:
        others = "cheapest that works" if report.rejected else "the only one"
        rows.append((*ends, *_cells(report.chosen), f"yes: {others}"))
    elif not report.rejected:
        rows.append((*ends, "none", "-", "-", report.text))
    rows.extend((*ends, *_cells(chain), f"no: {why}") for chain, why in report.rejected)
    return rows


def _cells(chain: Chain) -> tuple[str, str, str]:
    hops = (
        f"{hop.label} by {hop.provider}: {_speed(cost)}"
        for hop, cost in zip(chain.hops, chain.costs, strict=True)
    )
    return chain.label, f"{chain.seconds_per_block * 1e6:.0f}us", "\n".join(hops)


def _speed(cost: HopCost) -> str:
    if not cost.healthy:
        return "not usable"
    latency = f"{cost.latency_seconds * 1e6:.0f}us"
    return f"{cost.bytes_per_second / 1e9:.2f} GB/s and {latency} per call, {cost.reason}"


def _route(report: RouteReport) -> dict[str, Any]:
    chosen = report.chosen
    return {
        "from": str(report.src),
        "to": str(report.dst),
        "chain": None if chosen is None else _chain(chosen),
        "rejected": [{**_chain(chain), "why": why} for chain, why in report.rejected],
        "text": report.text,
    }


def _chain(chain: Chain) -> dict[str, Any]:
    return {
        "label": chain.label,
        "hops": [
            {
                "from": str(hop.src),
                "to": str(hop.dst),
                "provider": hop.provider,
                "bytes_per_second": cost.bytes_per_second,
                "latency_seconds": cost.latency_seconds,
                "usable": cost.healthy,
                "reason": cost.reason,
            }
            for hop, cost in zip(chain.hops, chain.costs, strict=True)
        ],
        "seconds_per_block": chain.seconds_per_block,
        "reason": chain.reason,
    }
