"""From a source to a destination: the graph of registered pairs and its cheapest healthy chain.

Nodes are endpoints: the engine's cache (`GPU`), the host block pool (`CPU`) and every tier. Edges
are the pairs that handlers were registered for. A chain passes through host slots at most: they
are the only places that can be leased in between. So two chains at most lead from one end to the
other: the direct one, and the one through the host.

Pure computation. What a hop costs, and whether it works, is asked of the function that the router
was made with: `assumed_cost` where nothing runs, the transfer engine's own measurements where it
does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tiered_kv.errors import TierError
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import CpuSpec, GpuSpec, KeySpec, LoadStoreSpec

__all__ = [
    "CPU_ENDPOINT",
    "GPU_ENDPOINT",
    "MEMORY_COST",
    "STORE_COST",
    "Chain",
    "Endpoint",
    "Hop",
    "HopCost",
    "RouteReport",
    "Router",
    "Tried",
    "assumed_cost",
    "endpoint_of",
]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a chain can begin or end: a medium, and which tier of it."""

    spec: type[LoadStoreSpec]
    tier: str
    """Name of the tier; "gpu" and "cpu" for the two media that have one instance only."""

    def __str__(self) -> str:
        return self.tier


GPU_ENDPOINT = Endpoint(GpuSpec, str(GpuSpec.medium))
"""The engine's own KV cache."""

CPU_ENDPOINT = Endpoint(CpuSpec, str(CpuSpec.medium))
"""The rank's host block pool, whether or not a cpu tier is configured."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One move between two endpoints, done by one handler."""

    src: Endpoint
    dst: Endpoint
    provider: str
    """Name of the backend whose handler does it."""

    @property
    def tier(self) -> str:
        """The tier that the hop touches; "cpu" for gpu <-> cpu."""
        for side in (self.src, self.dst):
            if side not in (GPU_ENDPOINT, CPU_ENDPOINT):
                return side.tier
        return CPU_ENDPOINT.tier

    @property
    def direct(self) -> bool:
        """Whether it connects the engine's cache to a store, past host memory."""
        sides = (self.src, self.dst)
        return GPU_ENDPOINT in sides and CPU_ENDPOINT not in sides

    @property
    def label(self) -> str:
        """The hop's name in stats, logs and `explain`: `ssd->cpu`."""
        return f"{self.src}->{self.dst}"

    def __str__(self) -> str:
        return f"{self.label} ({self.provider})"


@dataclass(frozen=True, slots=True)
class HopCost:
    """What is known of a hop now."""

    bytes_per_second: float
    latency_seconds: float
    """What one handler call takes beside the bytes."""
    healthy: bool
    reason: str
    """Where the figures come from ("measured over 64 MiB", "assumed"), or why the hop is not to
    be used ("opening", "unhealthy: ...")."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Hops that lead from a source to a destination."""

    hops: tuple[Hop, ...]
    costs: tuple[HopCost, ...]
    """What is known of each hop, in the same order."""
    seconds_per_block: float
    """Estimated: the slowest hop's time for a block, since hops overlap, and the block's share of
    every hop's latency."""
    reason: str
    """Where the estimate comes from."""

    @property
    def label(self) -> str:
        """`ssd->cpu->gpu`."""
        return "->".join([str(self.hops[0].src), *(str(hop.dst) for hop in self.hops)])


Tried = frozenset[tuple[Hop, ...]]
"""Chains, by their hops, that are out of the question: a job has tried them."""

_Question = tuple[Endpoint, Endpoint, Tried]


@dataclass(frozen=True, slots=True)
class RouteReport:
    """Which chain serves a pair of endpoints, and why the others do not."""

    src: Endpoint
    dst: Endpoint
    chosen: Chain | None
    rejected: tuple[tuple[Chain, str], ...]
    """(chain, why it was not chosen)."""
    text: str
    """The same in one line per chain, for people."""


MEMORY_COST = HopCost(20e9, 20e-6, True, "assumed")
"""Of a hop between the engine and host memory."""
STORE_COST = HopCost(5e9, 100e-6, True, "assumed")
"""Of a hop to or from a store."""


def assumed_cost(hop: Hop) -> HopCost:
    """The cost of a hop that nobody has measured, or not for a long while.

    On the optimistic side: a hop that looks good is used, and thereby measured.
    """
    memory = all(side in (GPU_ENDPOINT, CPU_ENDPOINT) for side in (hop.src, hop.dst))
    return MEMORY_COST if memory else STORE_COST


def endpoint_of(spec: LoadStoreSpec) -> Endpoint:
    """The endpoint that a spec's places belong to."""
    return Endpoint(type(spec), spec.tier)


class Router:
    """Chooses chains; answers are kept until `invalidate` says that costs or health changed.

    Thread-safe; nothing here blocks, as long as `cost` does not.
    """

    def __init__(
        self,
        registry: TransferRegistry,
        tiers: Mapping[str, type[KeySpec]],
        cost: Callable[[Hop], HopCost],
        block_bytes: int,
        group_blocks: int = 1,
    ) -> None:
        """`tiers` maps each tier's name to its spec class; chains are compared for blocks of
        `block_bytes`, of which a handler call moves `group_blocks`.

        Raises:
            ValueError: a tier is named like one of the two memory media.
        """
        for reserved in (GPU_ENDPOINT, CPU_ENDPOINT):
            if reserved.tier in tiers:
                raise ValueError(
                    f"a store cannot be named {reserved.tier!r}: that names the {reserved.tier} "
                    "memory itself; give the tier another name"
                )
        self._registry = registry
        self._tiers = {name: Endpoint(spec, name) for name, spec in tiers.items()}
        self._cost = cost
        self._block_bytes = block_bytes
        self._group_blocks = group_blocks
        self._lock = threading.Lock()
        self._version = 0
        self._found: dict[_Question, tuple[int, Chain | None]] = {}

    @property
    def version(self) -> int:
        """Grows with every `invalidate`."""
        return self._version

    def invalidate(self) -> None:
        """Health or costs changed: choose anew when next asked."""
        with self._lock:
            self._version += 1

    def find(self, src: Endpoint, dst: Endpoint, without: Tried = frozenset()) -> Chain | None:
        """The cheapest healthy chain that is not one of `without`, or None."""
        question = (src, dst, without)
        with self._lock:
            version = self._version
            kept = self._found.get(question)
        if kept is not None and kept[0] == version:
            return kept[1]
        healthy, _ = self._judged(src, dst)
        found = next((chain for chain in healthy if chain.hops not in without), None)
        with self._lock:
            self._found[question] = (version, found)
        return found

    def chain(self, src: Endpoint, dst: Endpoint) -> Chain:
        """The cheapest healthy chain.

        Raises:
            TierError: there is none; the message says why each candidate is out.
        """
        found = self.find(src, dst)
        if found is None:
            tier = src.tier if src in self._tiers.values() else dst.tier
            raise TierError(self.report(src, dst).text, tier=tier)
        return found

    def explain(self) -> tuple[RouteReport, ...]:
        """Loads, then stores: the host pool and every tier, to and from the engine."""
        ends = (CPU_ENDPOINT, *self._tiers.values())
        loads = (self.report(end, GPU_ENDPOINT) for end in ends)
        stores = (self.report(GPU_ENDPOINT, end) for end in ends)
        return (*loads, *stores)

    def report(self, src: Endpoint, dst: Endpoint) -> RouteReport:
        """All chains between two endpoints: which is chosen now and why."""
        healthy, rejected = self._judged(src, dst)
        chosen = healthy[0] if healthy else None
        for chain in healthy[1:]:
            more = chain.seconds_per_block - healthy[0].seconds_per_block
            why = f"slower by {more * 1e6:.1f} us per block" if more else "no faster, and longer"
            rejected.append((chain, why))
        return RouteReport(src, dst, chosen, tuple(rejected), _text(src, dst, chosen, rejected))

    def hops(self) -> tuple[Hop, ...]:
        """Every hop that the registered pairs and the tiers give."""
        ends = (GPU_ENDPOINT, CPU_ENDPOINT, *self._tiers.values())
        found = (self._hop(src, dst) for src in ends for dst in ends if src != dst)
        return tuple(hop for hop in found if hop is not None)

    def _candidates(self, src: Endpoint, dst: Endpoint) -> Iterator[tuple[Hop, ...]]:
        direct = self._hop(src, dst)
        if direct is not None:
            yield (direct,)
        if CPU_ENDPOINT in (src, dst):
            return
        first, second = self._hop(src, CPU_ENDPOINT), self._hop(CPU_ENDPOINT, dst)
        if first is not None and second is not None:
            yield (first, second)

    def _hop(self, src: Endpoint, dst: Endpoint) -> Hop | None:
        if (src.spec, dst.spec) not in self._registry:
            return None
        return Hop(src, dst, self._registry.pair(src.spec, dst.spec).provider)

    def _judged(self, src: Endpoint, dst: Endpoint) -> tuple[list[Chain], list[tuple[Chain, str]]]:
        """The healthy chains, cheapest first, and the others with what is wrong with them."""
        healthy: list[Chain] = []
        unhealthy: list[tuple[Chain, str]] = []
        for hops in self._candidates(src, dst):
            chain, trouble = self._judge(hops)
            if trouble:
                unhealthy.append((chain, trouble))
            else:
                healthy.append(chain)
        healthy.sort(key=lambda chain: (chain.seconds_per_block, len(chain.hops)))
        return healthy, unhealthy

    def _judge(self, hops: tuple[Hop, ...]) -> tuple[Chain, str]:
        """The chain, and what is wrong with it (empty: nothing)."""
        costs = tuple(self._cost(hop) for hop in hops)
        slowest = max(self._block_bytes / cost.bytes_per_second for cost in costs)
        seconds = slowest + sum(cost.latency_seconds for cost in costs) / self._group_blocks
        known = "; ".join(
            f"{hop.label} by {hop.provider}: {cost.bytes_per_second / 1e9:.2f} GB/s {cost.reason}"
            for hop, cost in zip(hops, costs, strict=True)
        )
        trouble = "; ".join(
            f"{hop.label}: {cost.reason}"
            for hop, cost in zip(hops, costs, strict=True)
            if not cost.healthy
        )
        return Chain(hops, costs, seconds, known), trouble


def _text(
    src: Endpoint,
    dst: Endpoint,
    chosen: Chain | None,
    rejected: list[tuple[Chain, str]],
) -> str:
    lines = []
    if chosen is not None:
        lines.append(
            f"{chosen.label}: chosen, about {chosen.seconds_per_block * 1e6:.1f} us per block "
            f"({chosen.reason})"
        )
    elif rejected:
        lines.append(f"no chain from {src} to {dst} works now")
    else:
        lines.append(
            f"no chain leads from {src} to {dst}: no backend registered a handler for "
            f"{src.spec.medium} -> {dst.spec.medium}, or for both hops through "
            f"{CPU_ENDPOINT.tier}; `tiered-kv backends` lists what is installed"
        )
    lines.extend(f"{chain.label}: not chosen, {why}" for chain, why in rejected)
    return "\n".join(lines)
