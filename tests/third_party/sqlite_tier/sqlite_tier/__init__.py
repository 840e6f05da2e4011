"""A third party's backend: the medium `sqlite`, its store, and a handler straight to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tiered_kv.contracts import (
    API_VERSION,
    Backend,
    BlockStore,
    HandlerContext,
    MaintenanceContext,
    StoreContext,
    StoreMaintenance,
    TransferHandler,
)
from tiered_kv.specs import GpuSpec, KeySpec
from tiered_kv.values import Medium

if TYPE_CHECKING:
    from sqlite_tier.settings import SqliteSettings

    from tiered_kv.registry import TransferRegistry

__all__ = ["SqliteSpec", "backend"]


@dataclass(frozen=True, slots=True)
class SqliteSpec(KeySpec):
    """Blocks in a sqlite tier."""

    medium: ClassVar[Medium] = Medium("sqlite")


def _settings() -> type[SqliteSettings]:
    from sqlite_tier.settings import SqliteSettings

    return SqliteSettings


def _open_store(context: StoreContext) -> BlockStore:
    from sqlite_tier.store import SqliteStore

    return SqliteStore(context)


def _look_after(context: MaintenanceContext) -> StoreMaintenance:
    from sqlite_tier.maintenance import SqliteMaintenance

    return SqliteMaintenance(context)


def _load(context: HandlerContext) -> TransferHandler[SqliteSpec, GpuSpec]:
    from sqlite_tier.direct import SqliteToGpuHandler

    return SqliteToGpuHandler(context)


def _register(registry: TransferRegistry) -> None:
    registry.register(SqliteSpec, GpuSpec, _load, provider=backend.name)


backend = Backend(
    name="sqlite",
    medium=SqliteSpec.medium,
    api_version=API_VERSION,
    description="One SQLite file; loads go straight to an engine in host memory.",
    settings=_settings,
    spec=SqliteSpec,
    open_store=_open_store,
    open_maintenance=_look_after,
    register=_register,
    requires=(("sqlite3", "a Python with sqlite3"),),
)
