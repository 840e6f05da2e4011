"""The contract for looking after a tier as a whole: all namespaces, no engine.

A backend may bring it (`Backend.open_maintenance`); without it the command line can still serve
blocks of a namespace that it is told. Reading, checking, exporting and importing blocks goes
through a `BlockStore` that is opened for one of the `namespaces`.

Rules for all methods: as for a `BlockStore`. They are safe beside running engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tiered_kv.values import CacheGeometry, Namespace

__all__ = ["MaintenanceContext", "Reconciliation", "StoreMaintenance", "StoredNamespace"]


@dataclass(frozen=True, slots=True)
class MaintenanceContext:
    """What a tier's maintenance is opened with."""

    tier: str
    """Name of the tier."""
    settings: Any
    """The tier's settings: an instance of the backend's settings model."""
    writable: bool = True
    """False for what only looks: `reconcile(repair=True)` and `drop` are refused then."""


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """A namespace that was ever opened for writing in a tier's directory and not dropped since."""

    namespace: Namespace
    geometry: CacheGeometry
    """What its blocks are, as of rank 0."""
    blocks: int
    """Visible blocks."""
    used_bytes: int
    """Bytes of the parts of its blocks, whole or not."""
    in_use: bool
    """Whether a live process has it open for writing."""


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """What `reconcile` found wrong between the index and what it names. Zero counts are left out,
    so that a sound tier's is empty."""

    found: dict[str, int] = field(default_factory=dict)
    """How many of each kind, named in the words of the medium: `{"slots without a row": 3}`."""
    repaired: dict[str, int] = field(default_factory=dict)
    """How many of them were put right."""

    @property
    def left(self) -> dict[str, int]:
        """How many of each kind are wrong still; kinds of which none is are left out."""
        wrong = {kind: count - self.repaired.get(kind, 0) for kind, count in self.found.items()}
        return {kind: count for kind, count in wrong.items() if count}


class StoreMaintenance(Protocol):
    """Looks after all namespaces of one tier's directory. Thread-safe."""

    def namespaces(self) -> Sequence[StoredNamespace]:
        """What lies there, sorted by namespace id. Costs a pass over the rows of the index, and
        reads no block."""
        ...

    def reconcile(self, *, repair: bool) -> Reconciliation:
        """Compare the index with what it names, structure only: blocks' bytes are not read. With
        `repair`, leftovers of dead processes are removed and rows that lead nowhere are dropped,
        in transactions short enough for engines to go on beside it.

        Raises:
            ValueError: `repair` where it was opened with `writable=False`.
        """
        ...

    def drop(self, namespace_id: bytes) -> int:
        """Remove every block of a namespace, whole or not, and the record of it, and give its
        room back to the file system as far as the medium can; how many blocks. A namespace that is
        not there is 0.

        Raises:
            ValueError: it was opened with `writable=False`, or the namespace is in use.
        """
        ...

    def close(self) -> None:
        """Let go. Idempotent."""
        ...
