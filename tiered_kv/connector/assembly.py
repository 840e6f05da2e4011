"""Builds the two halves from a deployment's configuration."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from tiered_kv.config import CpuSettings, Deployment, StoreSettings, TierSettings
from tiered_kv.connector.books import ManagerLimits
from tiered_kv.connector.care import care_of
from tiered_kv.connector.manager import Manager
from tiered_kv.connector.plan import WorkerPlan
from tiered_kv.connector.views import TierView
from tiered_kv.contracts import (
    Backend,
    BlockStore,
    MaintenanceContext,
    Policy,
    Recency,
    Scoring,
    StoreContext,
    StoreMaintenance,
)
from tiered_kv.engine import EngineLimits, register_store_handlers
from tiered_kv.errors import PluginError
from tiered_kv.index import Mirror
from tiered_kv.placement import BUILT_IN, DEFAULT_POLICY, Policies
from tiered_kv.plugins import build_registry
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import KeySpec
from tiered_kv.values import CacheGeometry, Fingerprint, Namespace

__all__ = ["Assembly"]


@dataclass(frozen=True, slots=True)
class Assembly:
    """A deployment with the backends and the eviction policies that it names.

    Making one raises `ConfigError` where a tier's `eviction.policy` does not exist, or not for a
    tier of its kind, and `PluginError` where it cannot be loaded.
    """

    deployment: Deployment
    backends: Mapping[str, Backend]
    """Backends by the `type` of their tiers; at least those that the deployment names."""
    policies: Policies = field(default_factory=Policies)

    def __post_init__(self) -> None:
        for tier in self.deployment.tiers:
            if isinstance(tier, CpuSettings):
                self._policy(tier)
            elif isinstance(tier, StoreSettings):
                self._scoring(tier)

    def _policy(self, tier: CpuSettings) -> Policy:
        return self.policies.get(tier.eviction.policy, self._where(tier))

    def _scoring(self, tier: StoreSettings) -> Scoring:
        chosen = tier.eviction
        return self.policies.scoring(chosen.policy, chosen.half_life, self._where(tier))

    def _where(self, tier: TierSettings) -> str:
        place = self.deployment.tiers.index(tier)
        return f"tiers.{place}.eviction.policy (tier {tier.name!r})"

    def specs(self) -> dict[str, type[KeySpec]]:
        """Spec class of each store tier, nearest first.

        Raises:
            PluginError: a tier's backend brings no store.
        """
        return {tier.name: self._spec(tier.type) for tier in self.deployment.stores}

    def _spec(self, backend: str) -> type[KeySpec]:
        spec = self.backends[backend].spec
        if spec is None or self.backends[backend].open_store is None:
            raise PluginError(
                f"backend {backend!r} brings no store, so it can't be the type of a tier"
            )
        return spec

    def registry(self) -> TransferRegistry:
        """A registry with the handlers of all loaded backends.

        Raises:
            PluginError: two backends claim the same pair.
        """
        registry = build_registry(self.backends)
        for name in dict.fromkeys(tier.type for tier in self.deployment.stores):
            register_store_handlers(registry, self._spec(name), provider=name)
        return registry

    def open_store(
        self, tier: str, geometry: CacheGeometry, fingerprint: Fingerprint, *, writable: bool
    ) -> BlockStore:
        """Open the store of a tier. Blocks on the tier's medium.

        Raises:
            RefuseToStart: the tier cannot be used as configured.
            TierError: the medium does not work.
        """
        return self.open_namespace(tier, geometry, Namespace(fingerprint), writable=writable)

    def open_namespace(
        self, tier: str, geometry: CacheGeometry, namespace: Namespace, *, writable: bool
    ) -> BlockStore:
        """As `open_store`, for a namespace that may have an epoch."""
        settings = self.deployment.tier(tier)
        opener = self.backends[settings.type].open_store
        if opener is None:
            raise PluginError(f"backend {settings.type!r} of tier {tier!r} brings no store")
        return opener(
            StoreContext(
                tier=tier,
                settings=settings,
                namespace=namespace,
                geometry=geometry,
                writable=writable and settings.writable,
                scoring=(
                    self._scoring(settings) if isinstance(settings, StoreSettings) else Recency()
                ),
            )
        )

    def open_maintenance(self, tier: str, *, writable: bool) -> StoreMaintenance:
        """Open what looks after all namespaces of a tier. Blocks on the tier's medium.

        Raises:
            PluginError: its backend brings nothing of the kind.
            RefuseToStart: the tier cannot be used as configured.
            TierError: the medium does not work.
        """
        settings = self.deployment.tier(tier)
        opener = self.backends[settings.type].open_maintenance
        if opener is None:
            raise PluginError(
                f"backend {settings.type!r} of tier {tier!r} cannot say what the tier holds: it "
                "brings no open_maintenance"
            )
        return opener(MaintenanceContext(tier, settings, writable and settings.writable))

    def limits(self) -> EngineLimits:
        """The transfer engine's limits."""
        limits = self.deployment.limits
        return EngineLimits(
            load_deadline=limits.load_deadline,
            store_deadline=limits.store_deadline,
            store_queue_bytes=int(limits.store_queue),
            store_queue_seconds=limits.store_queue_time,
            retry_after=limits.retry_backoff,
        )

    def manager(
        self,
        fingerprint: Fingerprint,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> Manager:
        """The scheduler's half. Opens nothing yet. `clock` tells monotonic seconds."""
        writable = {tier.name for tier in self.deployment.write_order}
        host = self.deployment.cpu
        limits = self.deployment.limits

        def mirror_of(tier: str, geometry: CacheGeometry, epoch: bytes) -> Mirror:
            # The mirror follows whole blocks of all ranks; which rank's parts its store would
            # read does not matter.
            anywhere = replace(geometry, rank=0)
            namespace = Namespace(fingerprint, epoch)
            return Mirror(
                lambda: self.open_namespace(tier, anywhere, namespace, writable=False), tier=tier
            )

        return Manager(
            fingerprint=fingerprint,
            host_tier=None if host is None else host.name,
            host_write=host is not None and host.name in writable,
            tiers=[
                TierView(
                    name=tier.name,
                    spec=self._spec(tier.type),
                    write=tier.name in writable,
                    mirror=partial(mirror_of, tier.name),
                )
                for tier in self.deployment.stores
            ],
            limits=ManagerLimits(
                lookup_wait=limits.lookup_wait,
                retry_backoff=limits.retry_backoff,
                load_deadline=limits.load_deadline,
                lookup_wait_far=limits.lookup_wait_far,
            ),
            world_size=world_size,
            min_uses=self.deployment.placement.admit.min_uses,
            on_reset=self.deployment.on_reset,
            recompute=self.deployment.recompute,
            trace=self.deployment.trace,
            policy=(BUILT_IN[DEFAULT_POLICY] if host is None else self._policy(host)).make,
            half_life=None if host is None else host.eviction.half_life,
            pin_budget=0.0 if host is None else host.pin_budget,
            clock=clock,
        )

    def worker_plan(
        self,
        fingerprint: Fingerprint,
        *,
        rank: int,
        world_size: int,
        group_layers: tuple[tuple[str, ...], ...],
        group_tokens: tuple[int, ...],
        chunk: int,
    ) -> WorkerPlan:
        """What one rank's half is built from.

        Args:
            fingerprint: as computed in the worker's process.
            rank: of `world_size`.
            world_size: number of ranks.
            group_layers: layer names of each KV group.
            group_tokens: tokens per engine block of each KV group.
            chunk: engine blocks per block.
        """
        host = self.deployment.cpu
        return WorkerPlan(
            fingerprint=fingerprint,
            rank=rank,
            world_size=world_size,
            group_layers=group_layers,
            group_tokens=group_tokens,
            chunk=chunk,
            host_bytes=0 if host is None else int(host.capacity),
            staging_bytes=int(self.deployment.limits.staging),
            tiers=self.specs(),
            open_store=lambda tier, geometry, epoch: self.open_namespace(
                tier, geometry, Namespace(fingerprint, epoch), writable=True
            ),
            registry=self.registry(),
            limits=self.limits(),
            drain_seconds=self.deployment.limits.drain,
            care=care_of(self.deployment),
            host_tier=None if host is None else host.name,
            probe=True,
            erase=self.deployment.on_reset == "erase",
        )
