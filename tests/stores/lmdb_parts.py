"""How the tests open the lmdb store; importable by the child processes that they start."""

from __future__ import annotations

from tiered_kv.config import SizeOrPercent
from tiered_kv.contracts import BlockStore, MaintenanceContext, StoreContext, StoreMaintenance
from tiered_kv.testing.conformance.blocks import StoreArguments
from tiered_kv_lmdb import backend
from tiered_kv_lmdb.settings import LmdbSettings


def context_of(arguments: StoreArguments) -> StoreContext:
    fields: dict[str, object] = {
        "name": "pins",
        "path": arguments.path,
        "capacity": arguments.capacity,
        "min_free": SizeOrPercent(size=0),
        **dict(arguments.extra),
    }
    return StoreContext(
        "pins",
        LmdbSettings.model_validate(fields),
        arguments.namespace,
        arguments.geometry,
        arguments.writable,
    )


def open_lmdb(arguments: StoreArguments) -> BlockStore:
    assert backend.open_store is not None
    return backend.open_store(context_of(arguments))


def look_after_lmdb(arguments: StoreArguments) -> StoreMaintenance:
    assert backend.open_maintenance is not None
    settings = context_of(arguments).settings
    return backend.open_maintenance(MaintenanceContext("pins", settings, arguments.writable))


def open_into_map(arguments: StoreArguments) -> BlockStore:
    """The store that writes into its map, where the file system allows it."""
    return open_lmdb(arguments.with_(extra=(("writemap", "auto"), *arguments.extra)))


def look_after_map(arguments: StoreArguments) -> StoreMaintenance:
    return look_after_lmdb(arguments.with_(extra=(("writemap", "auto"), *arguments.extra)))
