"""The ledger of an lmdb tier: what it says of its numbers, damaged records included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.stores.lmdb_parts import open_lmdb
from tiered_kv.index import Environment, Owner
from tiered_kv.testing.conformance.blocks import StoreArguments, assert_held, keys, put
from tiered_kv_lmdb.ledger import Ledger, Run, packed

MOST = 2**20
DEAD = bytes(Owner.PACKED_BYTES)
"""A process of another boot, which runs no more."""
ROOM = 4096
LIFTED = [1 << bit for bit in (20, 24, 31)]
"""Bits of a run's size that one flip sets."""


@contextmanager
def index(path: Path) -> Iterator[Environment]:
    environment = Environment.open(
        path, kind="lmdb", tier="test", max_bytes=2**26, writable=True, own_budget=("values",)
    )
    try:
        yield environment
    finally:
        environment.close()


def test_numbers_go_from_reserved_to_freed(tmp_path: Path) -> None:
    with index(tmp_path / "index") as environment:
        ledger = Ledger(environment, "pins")
        with environment.write() as txn:
            assert ledger.reserve(txn, 7, [ROOM, ROOM, 2 * ROOM]) == range(7, 10)
            assert ledger.reserved(txn) == [Run(7, 2, ROOM), Run(9, 1, 2 * ROOM)]
            ledger.settle(txn, [7])
            ledger.release(txn, [8, 9])
            assert ledger.reserved(txn) == []
            freed = ledger.freed(txn)
            assert [run for runs in freed.values() for run in runs] == [
                Run(8, 1, ROOM),
                Run(9, 1, 2 * ROOM),
            ]
            assert ledger.numbers(txn) == {packed(8), packed(9)}
            ledger.forget(txn, freed)
            assert ledger.freed_values(txn) == 0


def test_many_freed_together_lie_in_several_runs(tmp_path: Path) -> None:
    with index(tmp_path / "index") as environment:
        ledger = Ledger(environment, "pins")
        with environment.write() as txn:
            ledger.free(txn, {packed(number): ROOM for number in range(MOST + 10)})
            [runs] = ledger.freed(txn).values()
            assert runs == [Run(0, MOST, ROOM), Run(MOST, 10, ROOM)]


@pytest.mark.parametrize("lifted", LIFTED)
def test_a_run_longer_than_any_that_was_written_is_passed_over(tmp_path: Path, lifted: int) -> None:
    """Whoever deleted its values one by one would be at it for minutes, or hours."""
    arguments = StoreArguments(tmp_path / "tier")
    store = open_lmdb(arguments)
    put(store, range(8))
    store.close()
    run = packed(2**40) + (1 + lifted).to_bytes(4, "big") + packed(ROOM)
    with index(arguments.path) as environment:
        freed, reserved = environment.database("freed"), environment.database("reserved")
        with environment.write() as txn:
            txn.put(packed(2**40), run, db=freed)
            txn.put(packed(2**40), DEAD + run, db=reserved)
        ledger = Ledger(environment, "pins")
        with environment.read() as txn:
            assert ledger.freed(txn) == {packed(2**40): []}
            assert (ledger.reserved(txn), ledger.of_the_dead(txn)) == ([], [])
            assert ledger.numbers(txn) == set()
    store = open_lmdb(arguments)
    put(store, range(8, 12))
    assert_held(store, range(12))
    store.delete(keys(range(2)))
    store.close()
    with index(arguments.path) as environment:
        ledger = Ledger(environment, "pins")
        with environment.read() as txn:
            assert ledger.freed_values(txn) == 0


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("freed", b"1234567"),
        ("reserved", b"12"),
        ("reserved", DEAD + b"1234567"),
        ("freed", packed(2**64 - 1) + (5).to_bytes(4, "big") + packed(ROOM)),
        ("reserved", DEAD + packed(2**64 - 1) + (5).to_bytes(4, "big") + packed(ROOM)),
    ],
)
def test_a_record_that_cannot_be_read_keeps_no_store_from_opening(
    tmp_path: Path, name: str, record: bytes
) -> None:
    arguments = StoreArguments(tmp_path / "tier")
    store = open_lmdb(arguments)
    put(store, range(8))
    store.close()
    with index(arguments.path) as environment:
        database = environment.database(name)
        with environment.write() as txn:
            txn.put(packed(2**40), record, db=database)
    store = open_lmdb(arguments)
    put(store, range(8, 12))
    assert_held(store, range(12))
    store.close()
