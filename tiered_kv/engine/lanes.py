"""Whose threads a hop uses, and what goes before what on a tier."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.engine.limits import EngineLimits
from tiered_kv.engine.waiting import Permits, RightOfWay
from tiered_kv.routing import CPU_ENDPOINT, GPU_ENDPOINT, Hop
from tiered_kv.threads import DaemonExecutor

__all__ = ["COPY_YIELD", "Lane", "Lanes", "is_load"]

COPY_YIELD = 0.05
"""Seconds that a copy out of the engine's cache gives way at most to copies into it: the engine may
wait for it, since it reuses the blocks."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Daemon threads, and as many permits; the loads of a store may have a thread more, for
    background reads, which take no permit."""

    executor: DaemonExecutor
    permits: Permits
    way: RightOfWay
    """Of the tier."""


class Lanes:
    """One per tier and direction, so that loads never wait for stores; a direct hop has one of its
    own, so that the way through the host stays open where its calls hang. The hops of a tier have
    their right of way in common: its loads go before its stores."""

    def __init__(self, limits: EngineLimits, *, spare: int) -> None:
        """`spare`: threads for background reads."""
        self._limits = limits
        self._spare = spare
        self._lanes: dict[tuple[str, ...], Lane] = {}
        self._ways: dict[str, RightOfWay] = {}

    def of(self, hop: Hop) -> Lane:
        """The lane of a hop; made when first asked for."""
        load = is_load(hop)
        name = (hop.tier, "load" if load else "store", *(("direct",) if hop.direct else ()))
        if name not in self._lanes:
            threads, way = self._limits.threads_per_tier, self._way(hop)
            spare = self._spare if load and not hop.direct else 0
            executor = DaemonExecutor(threads + spare, f"tiered-kv-{'-'.join(name)}")
            self._lanes[name] = Lane(executor, Permits(threads, None if load else way), way)
        return self._lanes[name]

    def _way(self, hop: Hop) -> RightOfWay:
        if hop.tier not in self._ways:
            copies = hop.tier == CPU_ENDPOINT.tier
            self._ways[hop.tier] = RightOfWay(COPY_YIELD if copies else self._limits.yield_seconds)
        return self._ways[hop.tier]

    def shutdown(self) -> None:
        """Begin no further call, and wait for none."""
        for lane in self._lanes.values():
            lane.executor.shutdown(wait=False, cancel_futures=True)


def is_load(hop: Hop) -> bool:
    """Whether it moves blocks towards the engine's cache."""
    return hop.dst == GPU_ENDPOINT or (hop.dst == CPU_ENDPOINT and hop.src != GPU_ENDPOINT)
