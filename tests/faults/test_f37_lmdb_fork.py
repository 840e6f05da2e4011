"""F37: what was open before a fork is not used after it, and a file is opened once per process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stores.lmdb_parts import open_into_map, open_lmdb
from tests.stores.nvme_parts import open_nvme
from tiered_kv.contracts import BlockStore
from tiered_kv.errors import TieredKVError, TierError
from tiered_kv.testing.conformance.blocks import StoreArguments, assert_held, get, keys, put

Opener = Callable[[StoreArguments], BlockStore]
OPENERS = pytest.mark.parametrize("opener", [open_lmdb, open_into_map, open_nvme])


def in_the_child(store: BlockStore, opener: Opener, arguments: StoreArguments) -> int:
    """How many of five calls were refused with our own clear error: with the parent's store, and a
    store of the child's own, for which LMDB would first have to close the parent's."""
    refused = 0
    for call in (
        lambda: store.contains(keys([1])),
        lambda: get(store, [1]),
        lambda: put(store, [50]),
        lambda: list(store.scan()),
        lambda: opener(arguments),
    ):
        try:
            call()
        except TierError as error:
            refused += "before the fork" in str(error)
    store.close()
    return refused


@OPENERS
def test_f37_a_child_of_a_fork_is_told(tmp_path: Path, opener: Opener) -> None:
    arguments = StoreArguments(tmp_path / "tier")
    store = opener(arguments)
    put(store, range(10))
    assert_held(store, range(10))  # its reader's place in LMDB's table is kept from now on
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            code = in_the_child(store, opener, arguments)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(f"the child: {code} of 5 calls refused")
    assert code == 5
    assert_held(store, range(10))
    assert put(store, range(10, 20)) == list(range(10, 20))
    assert_held(store, range(20))
    store.close()


@OPENERS
def test_f37_a_file_is_opened_once_whatever_it_is_called(tmp_path: Path, opener: Opener) -> None:
    """LMDB's locks break where a process opens a file twice."""
    arguments = StoreArguments(tmp_path / "tier")
    store = opener(arguments)
    put(store, range(5))
    (tmp_path / "link").symlink_to(arguments.path)
    names = [arguments.path, tmp_path / "link", tmp_path / "tier" / ".." / "link"]
    others: list[BlockStore] = []
    problems: list[str] = []
    for name in names:
        try:
            others.append(opener(arguments.with_(path=name)))
        except TieredKVError as error:
            problems.append(str(error))
    print(f"{len(others)} of {len(names)} names opened beside the first; {problems}")
    assert len(others) == len(names)
    for number, other in enumerate(others):
        put(other, [10 + number])
    for one in (store, *others):
        assert_held(one, [*range(5), *range(10, 10 + len(names))])
        one.close()
