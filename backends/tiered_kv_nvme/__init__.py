"""The nvme tier: blocks in preallocated segment files on a local disk.

Importing this package imports neither lmdb nor aiofiles; opening a store does. KvikIO is optional,
and imported only where it is to be used.
"""

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
    from tiered_kv.registry import TransferRegistry
    from tiered_kv_nvme.settings import NvmeSettings

__all__ = ["NvmeSpec", "backend"]


@dataclass(frozen=True, slots=True)
class NvmeSpec(KeySpec):
    """Blocks in an nvme tier."""

    medium: ClassVar[Medium] = Medium("nvme")


def _settings() -> type[NvmeSettings]:
    from tiered_kv_nvme.settings import NvmeSettings  # noqa: PLC0415 - keeps this module light

    return NvmeSettings


def _open_store(context: StoreContext) -> BlockStore:
    from tiered_kv_nvme.store import NvmeStore  # noqa: PLC0415 - imports lmdb and aiofiles

    return NvmeStore(context)


def _open_maintenance(context: MaintenanceContext) -> StoreMaintenance:
    from tiered_kv_nvme.maintenance import NvmeMaintenance  # noqa: PLC0415 - imports lmdb

    return NvmeMaintenance(context)


def _direct_store(context: HandlerContext) -> TransferHandler[GpuSpec, NvmeSpec]:
    from tiered_kv_nvme.direct import GpuToNvmeHandler  # noqa: PLC0415 - imports lmdb and aiofiles

    return GpuToNvmeHandler(context)


def _direct_load(context: HandlerContext) -> TransferHandler[NvmeSpec, GpuSpec]:
    from tiered_kv_nvme.direct import NvmeToGpuHandler  # noqa: PLC0415 - imports lmdb and aiofiles

    return NvmeToGpuHandler(context)


def _direct_missing(settings: NvmeSettings) -> str | None:
    from tiered_kv_nvme.engines import direct_missing  # noqa: PLC0415 - imports aiofiles

    return direct_missing(settings)


def _register(registry: TransferRegistry) -> None:
    name, missing = backend.name, _direct_missing
    registry.register(GpuSpec, NvmeSpec, _direct_store, provider=name, missing=missing)
    registry.register(NvmeSpec, GpuSpec, _direct_load, provider=name, missing=missing)


backend = Backend(
    name="nvme",
    medium=NvmeSpec.medium,
    api_version=API_VERSION,
    description="Segment files on a local disk, direct vectored I/O, found again after a restart.",
    settings=_settings,
    spec=NvmeSpec,
    open_store=_open_store,
    open_maintenance=_open_maintenance,
    register=_register,
    requires=(("lmdb", "lmdb>=3,<4"), ("aiofiles", "aiofiles>=23.2")),
)
