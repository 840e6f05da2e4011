"""The frozen messages that the manager half and the worker half exchange.

The engine carries them; nothing else is shared between the halves but the stores' directories.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.specs import LoadJob, PromoteJob, SlotRef, StoreJob
from tiered_kv.stats import TierCondition, TierWear
from tiered_kv.values import BlockKey, BlockStatus, JobId

__all__ = ["ConnectorMetadata", "FailedBlock", "Orders", "WorkerReport"]


@dataclass(frozen=True, slots=True)
class Orders:
    """Manager -> worker, of our own: what the engine knows nothing of."""

    promotions: tuple[PromoteJob, ...] = ()
    epoch: bytes | None = None
    """The epoch that stores belong to from now on (`Namespace.epoch`); None: no change."""
    resets: int = 0
    """How often the cache was reset before this message; its jobs belong to the time since."""

    def __bool__(self) -> bool:
        return bool(self.promotions or self.epoch is not None)


@dataclass(frozen=True, slots=True)
class ConnectorMetadata:
    """Manager -> worker, once per engine step."""

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    flush: frozenset[JobId] = frozenset()
    """Stores whose engine blocks are about to be reused: they must have been read, or be given
    up, before the step goes on."""
    orders: Orders = Orders()


@dataclass(frozen=True, slots=True)
class FailedBlock:
    """A block of a job that did not end well on one rank."""

    key: BlockKey
    status: BlockStatus
    request: str
    resets: int = 0
    """Of the message that its job came with; see `Orders.resets`."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Worker -> manager, on whatever step comes next; only news."""

    failed_loads: tuple[FailedBlock, ...] = ()
    failed_stores: tuple[FailedBlock, ...] = ()
    released: tuple[tuple[int, SlotRef], ...] = ()
    """(rank, slot): this rank does not read the slot any more."""
    promoted: tuple[tuple[int, JobId, tuple[BlockStatus, ...]], ...] = ()
    """(rank, promotion, status of each of its blocks): promotions that have ended on a rank."""
    conditions: tuple[tuple[int, TierCondition], ...] = ()
    """(rank, condition): tiers whose condition has changed on a rank, in order."""
    worn: tuple[tuple[int, TierWear], ...] = ()
    """(rank, what was written): tiers with a write budget, as a rank knows it."""

    def __bool__(self) -> bool:
        return bool(
            self.failed_loads
            or self.failed_stores
            or self.released
            or self.promoted
            or self.conditions
            or self.worn
        )

    def merged(self, other: WorkerReport) -> WorkerReport:
        """The report of two ranks, or of two steps, as one."""
        return WorkerReport(
            self.failed_loads + other.failed_loads,
            self.failed_stores + other.failed_stores,
            self.released + other.released,
            self.promoted + other.promoted,
            self.conditions + other.conditions,
            self.worn + other.worn,
        )
