"""Runs chains: the transfer engine of one rank."""

from tiered_kv.engine.core import TransferEngine
from tiered_kv.engine.direct import DeviceStagingFactory
from tiered_kv.engine.health import NOT_IN_USE, OPENING
from tiered_kv.engine.limits import GROUP_BYTES, EngineLimits
from tiered_kv.engine.probing import PROBE_BYTES
from tiered_kv.engine.stores import (
    CpuToStoreHandler,
    StoreToCpuHandler,
    register_store_handlers,
)

__all__ = [
    "GROUP_BYTES",
    "NOT_IN_USE",
    "OPENING",
    "PROBE_BYTES",
    "CpuToStoreHandler",
    "DeviceStagingFactory",
    "EngineLimits",
    "StoreToCpuHandler",
    "TransferEngine",
    "register_store_handlers",
]
