"""What one rank of an engine is built from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from tiered_kv.connector.care import TierCare
from tiered_kv.contracts import BlockStore
from tiered_kv.engine import PROBE_BYTES, EngineLimits, TransferEngine
from tiered_kv.errors import UnsupportedError
from tiered_kv.memory import HostBlockPool, KVCaches, device_of
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import KeySpec
from tiered_kv.stats import StatsRecorder, TierCondition
from tiered_kv.values import CacheGeometry, Fingerprint, GroupGeometry

__all__ = ["WorkerPlan"]


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What one rank is built from; made from the deployment's YAML and the engine's settings."""

    fingerprint: Fingerprint
    rank: int
    world_size: int
    group_layers: tuple[tuple[str, ...], ...]
    """Layer names of each KV group."""
    group_tokens: tuple[int, ...]
    """Tokens per engine block of each KV group."""
    chunk: int
    """Engine blocks per block."""
    host_bytes: int
    """Capacity of the cpu tier for this rank; 0 without one."""
    staging_bytes: int
    tiers: Mapping[str, type[KeySpec]]
    """Store tiers, nearest first."""
    open_store: Callable[[str, CacheGeometry, bytes], BlockStore]
    """Opens a tier's store for reading and writing, in the epoch (`Namespace.epoch`) that is
    given. Called on a thread of its own."""
    registry: TransferRegistry
    limits: EngineLimits
    drain_seconds: float
    care: Mapping[str, TierCare] = field(default_factory=dict)
    """By store tier; one that is not named is verified always and not scrubbed."""
    host_tier: str | None = None
    """Name of the cpu tier, if one is configured."""
    probe: bool = False
    """Whether stored blocks are read in the background, to know how the tiers are."""
    erase: bool = False
    """Whether a reset of the cache deletes what the stores hold of this engine's namespace."""

    @property
    def _probe_blocks(self) -> int:
        return len(self.tiers) if self.probe else 0

    def geometry_of(self, caches: KVCaches) -> CacheGeometry:
        """What a block is in these caches.

        Raises:
            UnsupportedError: they have not the KV groups that the engine announced.
        """
        if len(caches.groups) != len(self.group_tokens):
            raise UnsupportedError(
                f"the engine has {len(self.group_tokens)} KV groups, but registered caches for "
                f"{len(caches.groups)}; one tensor for all layers is for one KV group"
            )
        groups = tuple(
            GroupGeometry(
                index=index,
                block_bytes=caches.block_bytes(index, self.chunk),
                chunk=self.chunk,
                tokens=tokens * self.chunk,
            )
            for index, tokens in enumerate(self.group_tokens)
        )
        return CacheGeometry(groups, self.rank, self.world_size)

    def host_slots(self, geometry: CacheGeometry) -> int:
        """Slots of the cpu tier."""
        return self.host_bytes // geometry.slot_bytes

    def pool(self, caches: KVCaches, geometry: CacheGeometry) -> HostBlockPool:
        """The host block pool: the cpu tier's slots, and staging.

        Raises:
            ConfigError: there is no memory for it.
        """
        slot_bytes = geometry.slot_bytes
        # One for each tier that is read from, and one for stores: none can starve another then.
        staging = max(1 + max(1, len(self.tiers)), self.staging_bytes // slot_bytes)
        device = device_of(caches.device)
        return HostBlockPool(
            self.host_slots(geometry),
            staging,
            slot_bytes,
            spare_slots=max(1, PROBE_BYTES // slot_bytes) * self._probe_blocks,
            register=None if device is None else device.register_host,
            unregister=None if device is None else device.unregister_host,
        )

    def engine(
        self,
        caches: KVCaches,
        geometry: CacheGeometry,
        memory: HostBlockPool,
        stats: StatsRecorder,
    ) -> TransferEngine:
        """The transfer engine; its stores are opened by others.

        Raises:
            RefuseToStart: the caches cannot be copied safely.
        """
        return TransferEngine(
            registry=self.registry,
            geometry=geometry,
            memory=memory,
            tiers=self.tiers,
            limits=self.limits,
            stats=stats,
            caches=caches,
            verify={tier: care.verify for tier, care in self.care.items()},
            write_budgets={
                tier: max(1, care.write_budget // self.world_size)
                for tier, care in self.care.items()
                if care.write_budget
            },
        )

    def named(self, conditions: Iterable[TierCondition]) -> tuple[TierCondition, ...]:
        """Conditions of the transfer engine's tiers, by their configured names."""
        found: list[TierCondition] = []
        for condition in conditions:
            tier = condition.tier if condition.tier in self.tiers else self.host_tier
            if tier is not None:
                found.append(replace(condition, tier=tier))
        return tuple(found)
