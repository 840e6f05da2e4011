"""Ways to open a good store badly; importable by child processes."""

from __future__ import annotations

import os

from tests.stores.lmdb_parts import open_lmdb
from tiered_kv.contracts import BlockStore
from tiered_kv.testing.conformance.blocks import StoreArguments


def open_with_twice_the_budget(arguments: StoreArguments) -> BlockStore:
    return open_lmdb(arguments.with_(capacity=2 * arguments.capacity))


def open_apart_in_each_process(arguments: StoreArguments) -> BlockStore:
    """What another process published cannot be found."""
    arguments.path.mkdir(mode=0o700, exist_ok=True)
    return open_lmdb(arguments.with_(path=arguments.path / str(os.getpid())))


def open_readable_by_all(arguments: StoreArguments) -> BlockStore:
    store = open_lmdb(arguments)
    (arguments.path / "data.mdb").chmod(0o644)
    return store
