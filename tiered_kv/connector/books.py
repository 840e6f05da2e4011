"""What the parts of the manager half share: who holds what, and what is known of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiered_kv.connector.backoff import Backoff
from tiered_kv.connector.conditions import Conditions
from tiered_kv.connector.requests import RequestState
from tiered_kv.connector.views import Mirrors, TierView
from tiered_kv.connector.wear import Wear
from tiered_kv.connector.write_only import WriteOnlyWatch
from tiered_kv.placement import CutReason, HostCatalog
from tiered_kv.specs import SlotRef
from tiered_kv.stats import StatsRecorder, TierState
from tiered_kv.values import BlockKey, CacheGeometry

__all__ = ["Books", "ManagerLimits"]


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """Waits of the manager, in seconds."""

    lookup_wait: float
    retry_backoff: float
    lookup_wait_far: float = 2.0
    lease: float = 10.0
    """How long a lookup's answer protects host blocks that are not loaded yet."""
    load_deadline: float = 2.0
    """Longest that a load may take, and that a request waits for that of another one."""


class Books:
    """The manager's memory. Not thread-safe: the scheduler's thread owns it."""

    def __init__(
        self,
        *,
        host_tier: str | None,
        tiers: Sequence[TierView],
        limits: ManagerLimits,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Empty books; for the arguments see `Manager`."""
        self.host_tier = host_tier
        self.tiers = tuple(tiers)
        self.limits = limits
        self.world = world_size
        self.clock = clock
        self.geometry: CacheGeometry | None = None
        """That of the ranks; None until they have reported."""
        self.catalog: HostCatalog | None = None
        """The slots of the host tier; None without one, and until the ranks have reported."""
        self.mirrors = Mirrors()
        self.conditions = Conditions()
        self.requests: dict[str, RequestState] = {}
        self.backoff = Backoff(clock)
        self.storing: dict[BlockKey, SlotRef | None] = {}
        """Blocks whose first hop has not ended on all ranks, with their host slot."""
        self.epoch = b""
        """Of the namespace that stores are looked up in; see `Namespace.epoch`."""
        self.resets = 0
        """So far; what the ranks say of jobs from before the last one means nothing any more."""
        self.loading: Counter[BlockKey] = Counter()
        """How many running loads bring each block; blocks that none brings are not in it."""
        self.loading_bytes: Counter[str] = Counter()
        """By tier, what running loads bring from it, per rank."""
        self.failures = 0
        """Failed blocks of loads so far, of all requests."""
        self.stats = StatsRecorder("manager")
        self.wear = Wear(wall)
        self.watch = WriteOnlyWatch(self.stats, clock)

    @property
    def tier_names(self) -> tuple[str, ...]:
        """All tiers, nearest first."""
        host = () if self.host_tier is None else (self.host_tier,)
        return host + tuple(tier.name for tier in self.tiers)

    def versions(self) -> tuple[object, ...]:
        """Of all that lookups ask; equal while none would be answered in another way."""
        catalog = None if self.catalog is None else self.catalog.version
        return catalog, *[mirror.version for mirror in self.mirrors.values()]

    def state(self, request: str) -> RequestState:
        """What is remembered of a request."""
        return self.requests.setdefault(request, RequestState(None))

    def allows(self, state: RequestState, tier: str | None) -> bool:
        """Whether blocks of the request may come from, or go to, a tier."""
        if tier is None or (state.host_only and tier != self.host_tier):
            return False
        return state.tiers is None or tier in state.tiers

    def barred(self, state: RequestState, tier: str) -> CutReason | None:
        """Why a tier answers nothing to the request now; None where it does. A request whose load
        has failed is not sent to a tier that is not surely open."""
        found = self.conditions.state(tier)
        if found is TierState.DOWN or (state.failed_loads and found is TierState.OPENING):
            return CutReason.TIER_DOWN
        return None

    def end_lease(self, request: str) -> None:
        """What a lookup of the request protected is protected no more."""
        if self.catalog is not None:
            self.catalog.end_lease(request)

    def forget(self, tier: str, key: BlockKey) -> None:
        """A tier turned out not to have a block."""
        if tier == self.host_tier and self.catalog is not None:
            self.catalog.forget([key])
        elif tier in self.mirrors:
            self.mirrors[tier].forget([key])
