"""The lmdb tier: blocks as values of one LMDB file on a local disk, at memory speed while it fits
the page cache.

Importing this package does not import lmdb; opening a store does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tiered_kv.contracts import (
    API_VERSION,
    Backend,
    BlockStore,
    MaintenanceContext,
    StoreContext,
    StoreMaintenance,
)
from tiered_kv.specs import KeySpec
from tiered_kv.values import Medium

if TYPE_CHECKING:
    from tiered_kv_lmdb.settings import LmdbSettings

__all__ = ["LmdbSpec", "backend"]


@dataclass(frozen=True, slots=True)
class LmdbSpec(KeySpec):
    """Blocks in an lmdb tier."""

    medium: ClassVar[Medium] = Medium("lmdb")


def _settings() -> type[LmdbSettings]:
    from tiered_kv_lmdb.settings import LmdbSettings  # noqa: PLC0415 - keeps this module light

    return LmdbSettings


def _open_store(context: StoreContext) -> BlockStore:
    from tiered_kv_lmdb.store import LmdbStore  # noqa: PLC0415 - imports lmdb and numpy

    return LmdbStore(context)


def _open_maintenance(context: MaintenanceContext) -> StoreMaintenance:
    from tiered_kv_lmdb.maintenance import LmdbMaintenance  # noqa: PLC0415 - imports lmdb

    return LmdbMaintenance(context)


backend = Backend(
    name="lmdb",
    medium=LmdbSpec.medium,
    api_version=API_VERSION,
    description="One LMDB file on a local disk, read through the page cache, found again after a "
    "restart.",
    settings=_settings,
    spec=LmdbSpec,
    open_store=_open_store,
    open_maintenance=_open_maintenance,
    requires=(("lmdb", "lmdb>=3,<4"),),
)
