"""How the conformance suite opens the store; child processes import it."""

from __future__ import annotations

from sqlite_tier import backend

from tiered_kv.contracts import BlockStore, MaintenanceContext, StoreContext, StoreMaintenance
from tiered_kv.testing.conformance.stores import StoreArguments, StoreCase


def settings(arguments: StoreArguments) -> object:
    assert backend.settings is not None
    return backend.settings()(
        name="rows", type="sqlite", path=arguments.path, capacity=arguments.capacity
    )


def open_sqlite(arguments: StoreArguments) -> BlockStore:
    assert backend.open_store is not None
    where, what = settings(arguments), (arguments.namespace, arguments.geometry)
    return backend.open_store(StoreContext("rows", where, *what, arguments.writable))


def look_after_sqlite(arguments: StoreArguments) -> StoreMaintenance:
    assert backend.open_maintenance is not None
    context = MaintenanceContext("rows", settings(arguments), arguments.writable)
    return backend.open_maintenance(context)


SQLITE = StoreCase(open_sqlite, plain_bytes=False, open_maintenance=look_after_sqlite)
