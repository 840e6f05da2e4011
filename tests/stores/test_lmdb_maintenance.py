"""Maintenance of an lmdb tier: what it holds, what differs, what can be dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.stores.lmdb_parts import context_of, open_into_map, open_lmdb
from tiered_kv.contracts import BlockStore, MaintenanceContext, Reconciliation, StoreMaintenance
from tiered_kv.errors import TierError
from tiered_kv.index import Database, Environment
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    NAMESPACE,
    OTHER_NAMESPACE,
    StoreArguments,
    assert_held,
    get,
    keys,
    new_block,
    put,
)
from tiered_kv.testing.conformance.children import start
from tiered_kv.values import BlockStatus
from tiered_kv_lmdb import backend

Opener = Callable[[StoreArguments], BlockStore]


@pytest.fixture
def arguments(tmp_path: Path) -> StoreArguments:
    return StoreArguments(tmp_path / "tier")


@contextmanager
def maintenance(arguments: StoreArguments, *, writable: bool = True) -> Iterator[StoreMaintenance]:
    assert backend.open_maintenance is not None
    settings = context_of(arguments).settings
    opened = backend.open_maintenance(MaintenanceContext("pins", settings, writable))
    try:
        yield opened
    finally:
        opened.close()
        opened.close()


@contextmanager
def database(path: Path, name: str) -> Iterator[tuple[Environment, Database]]:
    values = name == "values"
    environment = Environment.open(
        path / "values" if values else path,
        kind="lmdb-values" if values else "lmdb",
        tier="test",
        max_bytes=2**26,
        writable=True,
        own_budget=("values",),
    )
    yield environment, environment.database(name)
    environment.close()


def test_namespaces_are_listed_with_what_they_hold(arguments: StoreArguments) -> None:
    store = open_lmdb(arguments)
    put(store, range(7))
    other = open_lmdb(arguments.with_(namespace=OTHER_NAMESPACE))
    put(other, range(3))
    other.close()
    with maintenance(arguments) as tier:
        found = {one.namespace: one for one in tier.namespaces()}
    assert [one.namespace.id for one in found.values()] == sorted(one.id for one in found)
    ours, theirs = found[NAMESPACE], found[OTHER_NAMESPACE]
    assert (ours.blocks, ours.used_bytes, ours.in_use) == (7, 7 * BLOCK_BYTES, True)
    assert (theirs.blocks, theirs.used_bytes, theirs.in_use) == (3, 3 * BLOCK_BYTES, False)
    assert ours.geometry == replace(arguments.geometry, rank=0)
    store.close()


@pytest.mark.parametrize("opener", [open_lmdb, open_into_map])
def test_a_sound_tier_has_nothing_to_put_right(arguments: StoreArguments, opener: Opener) -> None:
    store = opener(arguments)
    put(store, range(20))
    store.delete(keys(range(5)))
    with maintenance(arguments) as tier:
        assert tier.reconcile(repair=True) == Reconciliation()
    store.close()
    for writable in (True, False):
        with maintenance(arguments, writable=writable) as tier:
            assert tier.reconcile(repair=False) == Reconciliation()


def break_in_all_ways(arguments: StoreArguments) -> None:
    """3 values gone, 2 of another length, 4 without a row, 5 reserved by a killed process."""
    with database(arguments.path, "rows") as (environment, rows), environment.write() as txn:
        names = list(txn.cursor(rows).iternext(values=False))
        gone, short, lost = names[:3], names[3:5], names[5:9]
        numbers = {name: txn.get(name, b"", db=rows) for name in names}
        for name in lost:
            txn.delete(name, db=rows)
    with database(arguments.path, "values") as (environment, values), environment.write() as txn:
        all_numbers = list(txn.cursor(values).iternext(values=False))
        for name in gone:
            number = next(n for n in all_numbers if n in numbers[name])
            txn.delete(number, db=values)
        for name in short:
            number = next(n for n in all_numbers if n in numbers[name])
            txn.put(number, b"short", db=values)


BROKEN = {
    "rows without a value": 3,
    "rows whose value has another length": 2,
    "values without a row": 4,
    "reservations of dead processes": 5,
}


def reserve_and_die(arguments: StoreArguments) -> None:
    """Child process."""
    store = open_lmdb(arguments)
    store.reserve([new_block(n) for n in range(1000, 1005)])


def test_what_is_wrong_is_found_and_put_right(arguments: StoreArguments) -> None:
    store = open_lmdb(arguments)
    put(store, range(20))
    store.close()
    child = start(reserve_and_die, arguments)
    child.join()
    break_in_all_ways(arguments)
    with maintenance(arguments, writable=False) as tier:
        found = tier.reconcile(repair=False)
        print(found)
        assert found == Reconciliation(BROKEN)
        with pytest.raises(ValueError, match="reading only"):
            tier.reconcile(repair=True)
        with pytest.raises(ValueError, match="reading only"):
            tier.drop(NAMESPACE.id)
    with maintenance(arguments) as tier:
        assert tier.reconcile(repair=True) == Reconciliation(BROKEN, BROKEN)
        assert tier.reconcile(repair=True) == Reconciliation()
    store = open_lmdb(arguments)
    found_again = [one.result.status for one in get(store, range(20))]
    assert found_again.count(BlockStatus.OK) == 20 - 3 - 2 - 4
    put(store, range(20))
    assert_held(store, range(20))
    store.close()


def test_it_works_beside_a_storing_engine(arguments: StoreArguments) -> None:
    """Values without rows, and rows being evicted, are what an engine's work looks like."""
    store = open_lmdb(arguments)
    with maintenance(arguments) as tier:
        for turn in range(12):
            first = turn * 40
            places = store.reserve([new_block(n) for n in range(first, first + 40)])
            held = [place for place in places if place is not None]
            assert tier.reconcile(repair=True) == Reconciliation()
            store.abandon(held)
            put(store, range(first, first + 40))
            assert tier.reconcile(repair=True) == Reconciliation()
    print(f"{store.stat().evicted_blocks} blocks evicted meanwhile")
    assert store.stat().evicted_blocks > 40
    assert_held(store, range(470, 480))
    store.close()


def test_a_namespace_is_dropped_unless_it_is_in_use(arguments: StoreArguments) -> None:
    store = open_lmdb(arguments)
    put(store, range(6))
    other = open_lmdb(arguments.with_(namespace=OTHER_NAMESPACE))
    put(other, range(9))
    other.close()
    with maintenance(arguments) as tier:
        with pytest.raises(ValueError, match="in use by a running process"):
            tier.drop(NAMESPACE.id)
        with pytest.raises(ValueError, match="8 bytes"):
            tier.drop(b"short")
        assert tier.drop(OTHER_NAMESPACE.id) == 9
        assert tier.drop(OTHER_NAMESPACE.id) == 0
        assert [one.namespace for one in tier.namespaces()] == [NAMESPACE]
        assert tier.reconcile(repair=False) == Reconciliation()
    assert_held(store, range(6))
    store.close()
    with database(arguments.path, "values") as (environment, values), environment.read() as txn:
        assert txn.stat(values)["entries"] == 6


def test_a_directory_without_a_tier_is_not_made_one(arguments: StoreArguments) -> None:
    with pytest.raises(TierError, match="nothing was stored"), maintenance(arguments):
        pass
    assert not arguments.path.exists()


def test_a_closed_one_says_so(arguments: StoreArguments) -> None:
    open_lmdb(arguments).close()
    with maintenance(arguments) as tier:
        tier.close()
        for call in (tier.namespaces, lambda: tier.reconcile(repair=False)):
            with pytest.raises(TierError, match="closed"):
                call()
