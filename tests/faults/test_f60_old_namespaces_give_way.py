"""After a change of the model the old namespace's blocks do not keep the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stores.lmdb_parts import open_lmdb
from tests.stores.nvme_parts import open_nvme
from tiered_kv.contracts import BlockStore
from tiered_kv.errors import NoSpace
from tiered_kv.testing.conformance.blocks import (
    OTHER_NAMESPACE,
    StoreArguments,
    assert_held,
    disk_bytes,
    put,
)

BATCHES = 64
"""Of 8 blocks: more than twice the capacity."""


def fill(store: BlockStore, arguments: StoreArguments) -> int:
    """Store more than fits; how many batches were refused."""
    refused = 0
    for first in range(0, 8 * BATCHES, 8):
        try:
            put(store, range(first, first + 8))
        except NoSpace:
            refused += 1
        assert disk_bytes(arguments.path) <= arguments.capacity
    return refused


@pytest.mark.faults
@pytest.mark.parametrize("opener", [open_nvme, open_lmdb], ids=["nvme", "lmdb"])
def test_f60_a_namespace_that_nobody_uses_gives_all_of_the_budget_back(
    tmp_path: Path, opener: Callable[[StoreArguments], BlockStore]
) -> None:
    """Fill the tier with namespace A, then run B: B reaches what A had reached."""
    old = StoreArguments(tmp_path / "tier")
    new = old.with_(namespace=OTHER_NAMESPACE)
    store = opener(old)
    assert fill(store, old) == 0
    reached = store.stat().blocks
    store.close()

    store = opener(new)
    refused = fill(store, new)
    print(f"A had {reached} blocks, B has {store.stat().blocks}, {refused} batches were refused")
    assert reached > 8 * BATCHES // 8
    assert refused == 0
    assert store.stat().blocks == reached
    assert_held(store, range(8 * BATCHES - 8, 8 * BATCHES))
    left = opener(old)
    assert left.stat().blocks == 0
    left.close()
    store.close()
