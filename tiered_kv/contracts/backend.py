"""What a plug-in package announces under the entry-point group `tiered_kv.backends`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tiered_kv.contracts.maintenance import MaintenanceContext, StoreMaintenance
from tiered_kv.contracts.policy import Recency, Scoring
from tiered_kv.contracts.store import BlockStore
from tiered_kv.specs import KeySpec
from tiered_kv.values import CacheGeometry, Medium, Namespace

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["API_VERSION", "Backend", "StoreContext"]

API_VERSION = 1
"""Version of the contracts in this package. It grows when a plug-in has to change."""


@dataclass(frozen=True, slots=True)
class StoreContext:
    """What a store is opened with. One store object serves one namespace and one rank."""

    tier: str
    """Name of the tier."""
    settings: Any
    """The tier's settings: an instance of the backend's settings model."""
    namespace: Namespace
    geometry: CacheGeometry
    """Which rank's parts this store reads and writes, and how many ranks make a whole block."""
    writable: bool = True
    """False in the scheduler half, which only follows `scan` and `changes`."""
    scoring: Scoring = field(default_factory=Recency)
    """By which the store orders its blocks, where it can follow one."""


@dataclass(frozen=True, slots=True)
class Backend:
    """Descriptor of a backend. Importing it must import no driver: `requires` names what the
    backend needs, and the callables import it when they are called.

    A backend either brings a store (`settings`, `spec`, `open_store`; the hops cpu <-> store come
    for free), or handlers (`register`), or both.
    """

    name: str
    """Value of `type` in a tier's YAML."""
    medium: Medium
    api_version: int
    description: str
    """One line for `tiered-kv backends`."""
    settings: Callable[[], type[BaseModel]] | None = None
    """Gives the settings model of a tier of this type; a subclass of
    `tiered_kv.config.TierSettings`, for stores best of `tiered_kv.config.StoreSettings`."""
    spec: type[KeySpec] | None = None
    open_store: Callable[[StoreContext], BlockStore] | None = None
    register: Callable[[Any], None] | None = None
    """Called with the `TransferRegistry`; registers the backend's own handlers."""
    open_maintenance: Callable[[MaintenanceContext], StoreMaintenance] | None = None
    """Opens what looks after all namespaces of a tier at once; without it, `ls`, `stat`, `verify`
    and `gc` cannot say what the tier holds."""
    requires: tuple[tuple[str, str], ...] = ()
    """(importable module, what to install) pairs."""
