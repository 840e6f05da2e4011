"""Runs chains: the transfer engine of one rank."""

from tiered_kv.engine.core import TransferEngine
from tiered_kv.engine.limits import EngineLimits
from tiered_kv.engine.stores import (
    CpuToStoreHandler,
    StoreToCpuHandler,
    register_store_handlers,
)

__all__ = [
    "CpuToStoreHandler",
    "EngineLimits",
    "StoreToCpuHandler",
    "TransferEngine",
    "register_store_handlers",
]
