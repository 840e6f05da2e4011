"""The frozen messages that the manager half and the worker half exchange.

The engine carries them; nothing else is shared between the halves but the stores' directories.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.specs import LoadJob, SlotRef, StoreJob
from tiered_kv.values import BlockKey, BlockStatus, JobId

__all__ = ["ConnectorMetadata", "FailedBlock", "WorkerReport"]


@dataclass(frozen=True, slots=True)
class ConnectorMetadata:
    """Manager -> worker, once per engine step."""

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    flush: frozenset[JobId] = frozenset()
    """Stores whose engine blocks are about to be reused: they must have been read, or be given
    up, before the step goes on."""


@dataclass(frozen=True, slots=True)
class FailedBlock:
    """A block of a job that did not end well on one rank."""

    key: BlockKey
    status: BlockStatus
    request: str


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Worker -> manager, on whatever step comes next; only news."""

    failed_loads: tuple[FailedBlock, ...] = ()
    failed_stores: tuple[FailedBlock, ...] = ()
    released: tuple[tuple[int, SlotRef], ...] = ()
    """(rank, slot): this rank does not read the slot any more."""

    def __bool__(self) -> bool:
        return bool(self.failed_loads or self.failed_stores or self.released)

    def merged(self, other: WorkerReport) -> WorkerReport:
        """The report of two ranks, or of two steps, as one."""
        return WorkerReport(
            self.failed_loads + other.failed_loads,
            self.failed_stores + other.failed_stores,
            self.released + other.released,
        )
