"""The nvme tier: blocks in preallocated segment files on a local disk.

Importing this package imports neither lmdb nor aiofiles; opening a store does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tiered_kv.contracts import API_VERSION, Backend, BlockStore, StoreContext
from tiered_kv.specs import KeySpec
from tiered_kv.values import Medium

if TYPE_CHECKING:
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


backend = Backend(
    name="nvme",
    medium=NvmeSpec.medium,
    api_version=API_VERSION,
    description="Segment files on a local disk, direct vectored I/O, found again after a restart.",
    settings=_settings,
    spec=NvmeSpec,
    open_store=_open_store,
    requires=(("lmdb", "lmdb>=3,<4"), ("aiofiles", "aiofiles>=23.2")),
)
