"""How the conformance suite opens the store; child processes import it."""

from __future__ import annotations

from sqlite_tier import backend

from tiered_kv.contracts import BlockStore, StoreContext
from tiered_kv.testing.conformance.stores import StoreArguments, StoreCase


def open_sqlite(arguments: StoreArguments) -> BlockStore:
    assert backend.settings is not None
    assert backend.open_store is not None
    settings = backend.settings()(
        name="rows", type="sqlite", path=arguments.path, capacity=arguments.capacity
    )
    return backend.open_store(
        StoreContext("rows", settings, arguments.namespace, arguments.geometry, arguments.writable)
    )


SQLITE = StoreCase(open_sqlite, plain_bytes=False)
