"""F33: many processes that store the same keys at once leave each of them once, whole."""

from __future__ import annotations

import multiprocessing
from contextlib import closing
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from tests.stores.many_blocks import KINDS, Kind
from tiered_kv.testing.conformance.blocks import (
    StoreArguments,
    aligned_copy,
    assert_held,
    content,
    new_block,
)

PROCESSES = 8
KEYS = 200
BATCH = 25
LENGTH = 16_384
LATE_SECONDS = 90.0


def store_together(
    kind: Kind, arguments: StoreArguments, together: Barrier, counts: Queue[int]
) -> None:
    """Child process: has room for a batch when all the others have as well, then publishes it;
    tells how many places it was given."""
    store = kind.open(arguments)
    given = 0
    for first in range(0, KEYS, BATCH):
        together.wait(LATE_SECONDS)
        numbers = range(first, first + BATCH)
        answers = store.reserve([new_block(n, length=LENGTH) for n in numbers])
        places = [place for place in answers if place is not None]
        together.wait(LATE_SECONDS)
        store.write(
            places,
            [
                aligned_copy(content(n, length=LENGTH))
                for n, place in zip(numbers, answers, strict=True)
                if place is not None
            ],
        )
        store.publish(places)
        given += len(places)
    counts.put(given)
    store.close()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_f33_processes_that_store_the_same_keys_at_once(kind: Kind, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = StoreArguments(tmp_path / "tier", capacity=64 * 2**20, block_bytes=(LENGTH,))
    together = context.Barrier(PROCESSES)
    counts: Queue[int] = context.Queue()
    children = [
        context.Process(target=store_together, args=(kind, arguments, together, counts))
        for _ in range(PROCESSES)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(LATE_SECONDS)
    assert [child.exitcode for child in children] == [0] * PROCESSES
    given = sum(counts.get(timeout=LATE_SECONDS) for _ in children)
    with closing(kind.look_after(arguments.with_(writable=False))) as maintenance:
        left = maintenance.reconcile(repair=False).found
    store = kind.open(arguments)
    found = list(store.scan())
    print(
        f"{kind}: {PROCESSES} processes were given {given} places for {KEYS} keys, "
        f"{len(found)} blocks are there"
    )
    assert given == PROCESSES * KEYS
    assert left == {}, "room of those who came later is neither free nor anybody's"
    assert store.stat().blocks == len(found) == len(set(found)) == KEYS
    assert_held(store, range(KEYS), length=LENGTH)
    store.close()
