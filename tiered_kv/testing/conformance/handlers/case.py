"""How a handler is told to its suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from tiered_kv.contracts import (
    Backend,
    BlockStore,
    DeviceStaging,
    HandlerContext,
    TransferHandler,
)
from tiered_kv.engine import register_store_handlers
from tiered_kv.memory import KVCaches, make_staging
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import LoadStoreSpec
from tiered_kv.testing.conformance.blocks import StoreArguments
from tiered_kv.values import CacheGeometry, ChecksumKind

__all__ = ["HandlerCase"]

STORE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class HandlerCase:
    """A handler under test. The last fields say what the suite may do to it."""

    src: type[LoadStoreSpec]
    """Spec class of the source: `GpuSpec`, `CpuSpec`, or a `KeySpec` of a store's medium."""
    dst: type[LoadStoreSpec]
    """Spec class of the destination."""
    make: Callable[[HandlerContext], TransferHandler[Any, Any]]
    """Makes the handler, as the registry would."""
    open_store: Callable[[StoreArguments], BlockStore] | None = None
    """Opens the store, where one side is one."""
    tier: str = "tier"
    """Name of the tier, for specs and errors."""
    store_bytes: int = STORE_BYTES
    """Budget with which the store is opened."""
    device: str = "cpu"
    """torch device of the engine's KV caches."""
    staging: Callable[[KVCaches, CacheGeometry, int], DeviceStaging] = field(default=make_staging)
    """Makes `HandlerContext.staging`, of at most so many bytes."""
    capture: ChecksumKind = ChecksumKind.XXH3
    """What `HandlerContext.capture` says."""
    any_store: bool = False
    """The handler knows nothing of its store but the contract, so the suite puts a store that
    fails between them."""
    bounded_store: bool = True
    """The store keeps to `StoreArguments.capacity`, so it can be filled up."""

    @classmethod
    def of(
        cls, backend: Backend, src: type[LoadStoreSpec], dst: type[LoadStoreSpec], **fields: Any
    ) -> Self:
        """The handler that a backend brings for a pair: its own, or the one between host memory
        and its store that comes for free. `fields` are further fields of the case.

        Raises:
            KeyError: it brings none.
        """
        registry = TransferRegistry()
        free = backend.spec is not None and backend.open_store is not None
        if free and backend.spec is not None:
            register_store_handlers(registry, backend.spec, backend.name)
        pairs = set(registry)
        if backend.register is not None:
            backend.register(registry)
        pair = registry.pair(src, dst)
        values: dict[str, Any] = {"any_store": pair in pairs} | fields
        return cls(src, dst, pair.factory, **values)
