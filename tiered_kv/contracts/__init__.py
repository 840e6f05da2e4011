"""Who owes what: the contracts between the core, its backends and third parties' plug-ins."""

from tiered_kv.contracts.backend import API_VERSION, Backend, StoreContext
from tiered_kv.contracts.device import DeviceBuffer, DeviceStaging
from tiered_kv.contracts.handler import (
    HandlerContext,
    HandlerFactory,
    HostMemory,
    TransferHandler,
)
from tiered_kv.contracts.maintenance import (
    MaintenanceContext,
    Reconciliation,
    StoredNamespace,
    StoreMaintenance,
)
from tiered_kv.contracts.policy import (
    EvictionPolicy,
    Policy,
    PolicyContext,
    Recency,
    Scoring,
    WatchesNeed,
)
from tiered_kv.contracts.store import (
    BlockStore,
    ChangeBatch,
    KeepsBlocks,
    NewBlock,
    Place,
    RanksByUse,
    ReadResult,
    StoreStat,
    no_room,
)
from tiered_kv.contracts.verification import Verification, VerifyAlways, VerifyMode

__all__ = [
    "API_VERSION",
    "Backend",
    "BlockStore",
    "ChangeBatch",
    "DeviceBuffer",
    "DeviceStaging",
    "EvictionPolicy",
    "HandlerContext",
    "HandlerFactory",
    "HostMemory",
    "KeepsBlocks",
    "MaintenanceContext",
    "NewBlock",
    "Place",
    "Policy",
    "PolicyContext",
    "RanksByUse",
    "ReadResult",
    "Recency",
    "Reconciliation",
    "Scoring",
    "StoreContext",
    "StoreMaintenance",
    "StoreStat",
    "StoredNamespace",
    "TransferHandler",
    "Verification",
    "VerifyAlways",
    "VerifyMode",
    "WatchesNeed",
    "no_room",
]
