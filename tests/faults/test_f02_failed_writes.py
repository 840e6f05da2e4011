"""A store that fails at whatever step leaves nothing: no block is found, none is half there, its
room is free again, and the next store of it works."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import lmdb
import pytest

from tests.faults.loading import KINDS, Kind
from tiered_kv.contracts import BlockStore
from tiered_kv.errors import NoSpace, TierError
from tiered_kv.index import Environment
from tiered_kv.index.environment import Transaction
from tiered_kv.testing.conformance.blocks import (
    StoreArguments,
    aligned_copy,
    assert_held,
    content,
    get,
    keys,
    new_block,
    put,
)
from tiered_kv.values import BlockStatus

CAPACITY = 16 * 2**20
OLD, NEW = range(4), range(10, 60)
MOST_SITES = 60
CALLS = ("pwritev", "pwrite", "fdatasync", "fsync", "posix_fallocate", "ftruncate")


def disk_error(call: str) -> lmdb.Error:
    """What py-lmdb raises where the file cannot be written."""
    error = lmdb.Error(f"{call}: Input/output error")
    cast(Any, error).code = errno.EIO  # final for all but LMDB itself
    return error


class Sites:
    """The places at which a store writes, in the order in which it comes to them: one can be made
    to fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached: list[str] = []
        self.fails: int | None = None
        """Which one, from now on; None: none, and they are not counted."""
        for name in CALLS:
            patch.setattr(os, name, self._call(name, getattr(os, name)))
        patch.setattr(Environment, "write", self._transaction(Environment.write))

    def here(self, name: str) -> bool:
        """Whether the call that is about to be made is to fail."""
        if self.fails is None:
            return False
        self.reached.append(name)
        return len(self.reached) == self.fails

    def _call(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self.here(name):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*arguments)

        return call

    def _transaction(self, real: Callable[[Environment], Any]) -> Callable[[Environment], Any]:
        @contextmanager
        def write(environment: Environment) -> Iterator[Transaction]:
            name = "values" if environment.path.name == "values" else "index"
            with real(environment) as txn:
                if self.here(f"change of {name}"):
                    raise disk_error("mdb_put")
                yield txn
                if self.here(f"commit of {name}"):
                    raise disk_error("mdb_txn_commit")

        return write


def store_in_steps(store: BlockStore) -> None:
    """What the engine does for a batch; a batch that fails is abandoned."""
    places = [place for place in store.reserve([new_block(n) for n in NEW]) if place is not None]
    assert len(places) == len(NEW)
    published = False
    try:
        store.write(places, [aligned_copy(content(n)) for n in NEW])
        store.publish(places)
        published = True
    finally:
        if not published:
            store.abandon(places)


@pytest.mark.parametrize("durability", ["none", "batch"])
@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.name)
def test_f02_each_write_fails_in_turn_and_nothing_remains(
    kind: Kind, durability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = Sites(monkeypatch)
    failed: list[str] = []
    for number in range(1, MOST_SITES):
        folder = tmp_path / f"tier-{number}"
        arguments = StoreArguments(folder, CAPACITY, extra=(("durability", durability),))
        store = kind.open(arguments)
        put(store, OLD)
        sites.reached, sites.fails = [], number
        try:
            store_in_steps(store)
        except (TierError, NoSpace) as error:
            sites.fails = None
            failed.append(sites.reached[number - 1])
            assert_nothing(store, error)
            store.close()
            store = kind.open(arguments)
            assert_nothing(store, error)
            assert put(store, NEW) == list(NEW)
            assert_held(store, [*OLD, *NEW])
            # No room was lost either: a third of the capacity beside, without an eviction.
            third = range(100, 100 + CAPACITY // 3 // 65_536)
            put(store, third)
            assert store.stat().evicted_blocks == 0
            assert_held(store, [*OLD, *NEW, *third])
        else:
            # It was done although a step of tidying up failed, or there are no further ones.
            sites.fails = None
            assert_held(store, [*OLD, *NEW])
        store.close()
        if len(sites.reached) < number:
            break
    else:
        pytest.fail(f"there are more than {MOST_SITES} sites")
    print(f"{kind.name}, {durability}: {len(failed)} sites failed in turn: {failed}")
    assert len(failed) >= (9 if kind.name == "nvme" else 6)


def assert_nothing(store: BlockStore, error: Exception) -> None:
    """Only what was stored before is there."""
    assert not any(store.contains(keys(NEW))), error
    assert sorted(store.scan()) == sorted(keys(OLD)), error
    assert {read.result.status for read in get(store, NEW)} == {BlockStatus.MISSING}, error
    assert store.stat().blocks == len(OLD), error
    assert_held(store, OLD)
