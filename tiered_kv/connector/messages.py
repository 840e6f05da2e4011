"""The frozen messages that the manager half and the worker half exchange.

The engine carries them; nothing else is shared between the halves but the stores' directories.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.errors import IdentityError
from tiered_kv.specs import LoadJob, SlotRef, StoreJob
from tiered_kv.values import BlockKey, BlockStatus, CacheGeometry, Fingerprint, JobId

__all__ = ["ConnectorMetadata", "FailedBlock", "Handshake", "WorkerReport"]


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


@dataclass(frozen=True, slots=True)
class Handshake:
    """Worker -> manager, once at start, before the first request."""

    fingerprint: Fingerprint
    geometry: CacheGeometry
    tier_slots: int
    """Host slots of this rank that the manager may give out."""

    def check(self, expected: Fingerprint, others: tuple[Handshake, ...]) -> None:
        """Compare with the manager's fingerprint and with the other ranks.

        Raises:
            IdentityError: the halves, or two ranks, disagree on what a block's bytes are.
        """
        different = expected.differences(self.fingerprint)
        if different:
            mine, theirs = dict(expected.fields), dict(self.fingerprint.fields)
            detail = "; ".join(
                f"{name}: scheduler {mine.get(name)!r}, rank {self.geometry.rank} "
                f"{theirs.get(name)!r}"
                for name in different
            )
            raise IdentityError(f"scheduler and worker disagree on what a block holds: {detail}")
        for other in others:
            if other.geometry.groups != self.geometry.groups:
                raise IdentityError(
                    f"ranks {self.geometry.rank} and {other.geometry.rank} have blocks of "
                    f"different shape: {self.geometry.groups} and {other.geometry.groups}"
                )
            if other.tier_slots != self.tier_slots:
                raise IdentityError(
                    f"ranks {self.geometry.rank} and {other.geometry.rank} have "
                    f"{self.tier_slots} and {other.tier_slots} host slots; all ranks must have the "
                    "same host memory"
                )
