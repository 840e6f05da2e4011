"""Ways to open a good store badly; importable by child processes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tests.stores.lmdb_parts import look_after_lmdb, open_lmdb
from tiered_kv.contracts import BlockStore, Reconciliation, StoredNamespace, StoreMaintenance
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


def open_forgetful(arguments: StoreArguments) -> BlockStore:
    """Of each process that died, whoever opens the store next forgets a block."""
    store = open_lmdb(arguments)
    for file in arguments.path.parent.glob("alive-*"):
        try:
            os.kill(int(file.name.partition("-")[2]), 0)
        except ProcessLookupError:
            file.unlink()
            store.delete(list(store.scan())[:1])
    if arguments.writable:
        (arguments.path.parent / f"alive-{os.getpid()}").touch()
    return store


class BadMaintenance:
    """Looks after an lmdb tier as it should, where the subclass does not say otherwise."""

    def __init__(self, arguments: StoreArguments) -> None:
        self.arguments = arguments
        self.inner: StoreMaintenance = look_after_lmdb(arguments)

    def namespaces(self) -> Sequence[StoredNamespace]:
        return self.inner.namespaces()

    def reconcile(self, *, repair: bool) -> Reconciliation:
        return self.inner.reconcile(repair=repair)

    def drop(self, namespace_id: bytes) -> int:
        return self.inner.drop(namespace_id)

    def close(self) -> None:
        self.inner.close()


class RepairsNothing(BadMaintenance):
    def reconcile(self, *, repair: bool) -> Reconciliation:
        return self.inner.reconcile(repair=False)


class RepairsWhatItShows(BadMaintenance):
    def reconcile(self, *, repair: bool) -> Reconciliation:
        found = self.inner.reconcile(repair=True).found
        return Reconciliation(found)


class RepairsTooMuch(BadMaintenance):
    """What it finds, it takes for a reason to drop a block."""

    def reconcile(self, *, repair: bool) -> Reconciliation:
        done = self.inner.reconcile(repair=repair)
        if repair:
            store = open_lmdb(self.arguments)
            store.delete(list(store.scan())[:1])
            store.close()
        return done
