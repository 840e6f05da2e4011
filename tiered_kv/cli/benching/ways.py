"""The ways between the engine and a tier, each driven by itself, and which one routing takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from tiered_kv.cli.benching.figures import Way
from tiered_kv.cli.benching.rig import Rig, TierDrive
from tiered_kv.connector.assembly import Assembly
from tiered_kv.contracts import BlockStore, VerifyMode
from tiered_kv.engine import GROUP_BYTES
from tiered_kv.registry import TransferRegistry
from tiered_kv.routing import (
    CPU_ENDPOINT,
    GPU_ENDPOINT,
    Chain,
    Endpoint,
    Hop,
    HopCost,
    Router,
    RouteReport,
    assumed_cost,
)
from tiered_kv.specs import CpuSpec, GpuSpec, KeySpec, LoadStoreSpec

__all__ = ["HostWay", "Ways"]

_Pair = tuple[type[LoadStoreSpec], type[LoadStoreSpec]]


class HostWay:
    """Between the engine and host slots alone. A context manager."""

    def __init__(self, rig: Rig, assembly: Assembly) -> None:
        """Raises RefuseToStart where the caches cannot be copied safely."""
        self._registry = assembly.registry()
        self._rig = rig
        self.drive = TierDrive(rig, self._registry, None, None, None, VerifyMode.ALWAYS)

    def ways(self) -> list[Way]:
        """To and from host slots, by what was measured."""
        return _ways(self._registry, {}, CPU_ENDPOINT, self._rig, _known([self.drive]))

    def modes(self) -> dict[str, Mapping[str, str]]:
        """What is in effect, by hop."""
        return dict(self.drive.engine.modes())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.drive.close()


class Ways:
    """By way of host slots, with and without verification, and directly, where that works here. A
    context manager; the store stays its opener's."""

    def __init__(self, rig: Rig, assembly: Assembly, tier: str, store: BlockStore) -> None:
        """Raises RefuseToStart where the caches cannot be copied safely."""
        spec = assembly.specs()[tier]
        self._rig = rig
        self._spec = spec
        self._tier = tier
        self._store = store
        self._registry = registry = assembly.registry()
        self._end = Endpoint(spec, tier)
        self._stack = ExitStack()
        with self._stack:
            first = self._drive(registry, VerifyMode.ALWAYS)
            self.stores_directly = _goes_directly(first, GPU_ENDPOINT, self._end)
            self.loads_directly = _goes_directly(first, self._end, GPU_ENDPOINT)
            by_host = first
            if self.stores_directly or self.loads_directly:
                registry = without(registry, {(GpuSpec, spec), (spec, GpuSpec)})
                by_host = self._drive(registry, VerifyMode.ALWAYS)
            self.by_host = {
                VerifyMode.ALWAYS: by_host,
                VerifyMode.NEVER: self._drive(registry, VerifyMode.NEVER),
            }
            self.direct: dict[VerifyMode, TierDrive] = {}
            if self.stores_directly or self.loads_directly:
                alone = without(self._registry, {(CpuSpec, spec), (spec, CpuSpec)})
                for verify in (VerifyMode.ALWAYS, VerifyMode.NEVER):
                    self.direct[verify] = self._drive(alone, verify)
            self._first = first
            self._stack = self._stack.pop_all()

    def _drive(self, registry: TransferRegistry, verify: VerifyMode) -> TierDrive:
        drive = TierDrive(self._rig, registry, self._tier, self._spec, self._store, verify)
        self._stack.callback(drive.close)
        return drive

    def ways(self) -> list[Way]:
        """To and from the tier, by what was measured."""
        drives = [self.by_host[VerifyMode.ALWAYS], *self.direct.values(), self._first]
        known = _known(drives)
        return _ways(self._registry, {self._tier: self._spec}, self._end, self._rig, known)

    def modes(self) -> dict[str, Mapping[str, str]]:
        """What is in effect, by hop."""
        return dict(self._first.engine.modes())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


def without(registry: TransferRegistry, pairs: Collection[_Pair]) -> TransferRegistry:
    """The same handlers, but for those of some pairs."""
    fewer = TransferRegistry()
    for pair in registry:
        if (pair.src, pair.dst) not in pairs:
            fewer.register(
                pair.src, pair.dst, pair.factory, provider=pair.provider, missing=pair.missing
            )
    return fewer


def _goes_directly(drive: TierDrive, src: Endpoint, dst: Endpoint) -> bool:
    report = drive.engine.router.report(src, dst)
    return any(
        chain.hops[0].direct and all(cost.healthy for cost in chain.costs)
        for chain in _chains(report)
    )


def _chains(report: RouteReport) -> Iterator[Chain]:
    if report.chosen is not None:
        yield report.chosen
    yield from (chain for chain, _ in report.rejected)


def _known(drives: list[TierDrive]) -> dict[Hop, HopCost]:
    """What each hop costs: of several drives that know it, the first one's word holds, unless it
    only assumes it."""
    known: dict[Hop, HopCost] = {}
    for drive in drives:
        for report in drive.engine.router.explain():
            for chain in _chains(report):
                for hop, cost in zip(chain.hops, chain.costs, strict=True):
                    if hop not in known or known[hop] == assumed_cost(hop):
                        known[hop] = cost
    return known


def _ways(
    registry: TransferRegistry,
    tiers: dict[str, type[KeySpec]],
    end: Endpoint,
    rig: Rig,
    known: Mapping[Hop, HopCost],
) -> list[Way]:
    slot_bytes = rig.batch.geometry.slot_bytes
    router = Router(
        registry, tiers, known.__getitem__, slot_bytes, max(1, GROUP_BYTES // slot_bytes)
    )
    ways: list[Way] = []
    for src, dst in ((GPU_ENDPOINT, end), (end, GPU_ENDPOINT)):
        report = router.report(src, dst)
        chosen = report.chosen
        if chosen is not None:
            seconds = chosen.seconds_per_block
            others = "cheapest that works" if report.rejected else "the only one"
            reason = f"{others}: {chosen.reason}"
            ways.append(Way(str(src), str(dst), chosen.label, True, seconds, reason))
        for chain, why in report.rejected:
            healthy = all(cost.healthy for cost in chain.costs)
            seconds_or_none = chain.seconds_per_block if healthy else None
            ways.append(Way(str(src), str(dst), chain.label, False, seconds_or_none, why))
    return ways
