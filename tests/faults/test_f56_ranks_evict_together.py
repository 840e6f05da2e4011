"""F56: ranks that share a tier evict whole blocks, so what is held stays of use."""

from __future__ import annotations

import multiprocessing
import random
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from tests.stores.many_blocks import KINDS, Kind
from tiered_kv.errors import NoSpace
from tiered_kv.index import Environment
from tiered_kv.testing.conformance.blocks import StoreArguments, assert_held, keys, put

LENGTH = 65_536
CAPACITY = 16 * 2**20
RANKS = 2
BLOCKS = 5 * CAPACITY // (RANKS * LENGTH)
BATCH = 8
STEP = 4
"""Batches after which the ranks wait for each other, as an engine's steps make them do."""
LATE_SECONDS = 60.0


def churn(kind: Kind, arguments: StoreArguments, together: Barrier) -> None:
    """Child process, one per rank: stores the same blocks as the others, in an order of its own
    within a step, and goes on where there is no room."""
    store = kind.open(arguments)
    step = BATCH * STEP
    for first in range(0, BLOCKS, step):
        numbers = list(range(first, min(first + step, BLOCKS)))
        random.Random(first + arguments.rank).shuffle(numbers)
        for place in range(0, len(numbers), BATCH):
            try:
                put(store, numbers[place : place + BATCH], arguments.rank)
            except NoSpace as error:
                print(f"rank {arguments.rank}: {error}")
        together.wait(LATE_SECONDS)
    evicted = store.stat().evicted_blocks
    print(f"{kind}, rank {arguments.rank}: {BLOCKS} parts stored, {evicted} blocks evicted by it")
    store.close()


def count_rows(kind: Kind, path: Path) -> int:
    """Parts of blocks of all ranks that the index lists."""
    environment = Environment.open(
        path / kind.folder, kind=kind.name, tier="count", max_bytes=CAPACITY, writable=False
    )
    rows = environment.database("rows")
    with environment.read() as txn:
        count = txn.stat(rows)["entries"]
    environment.close()
    return count


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_f56_after_churn_nearly_all_rows_are_of_whole_blocks(kind: Kind, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = StoreArguments(
        tmp_path / "tier", capacity=CAPACITY, world_size=RANKS, block_bytes=(LENGTH,)
    )
    together = context.Barrier(RANKS)
    children = [
        context.Process(target=churn, args=(kind, arguments.with_(rank=rank), together))
        for rank in range(RANKS)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(LATE_SECONDS)
    assert [child.exitcode for child in children] == [0] * RANKS
    rows = count_rows(kind, arguments.path)
    ranks = [kind.open(arguments.with_(rank=rank)) for rank in range(RANKS)]
    held = [number for number, k in enumerate(keys(range(BLOCKS))) if ranks[0].contains([k])[0]]
    print(f"{kind}: {len(held)} whole blocks of {BLOCKS} stored, {rows} rows of {RANKS} ranks")
    assert rows > 0
    assert RANKS * len(held) >= 0.95 * rows
    assert len(held) < BLOCKS // 2
    for rank, store in enumerate(ranks):
        assert_held(store, held, rank)
        store.close()
