"""Child processes of the tests of what looks after tiers, and of write budgets. Imports neither
pytest nor torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

from tiered_kv.errors import NoSpace, WriteBudgetSpent
from tiered_kv.testing.conformance.blocks import (
    StoreArguments,
    aligned_copy,
    content,
    new_block,
    put,
    reserved,
)
from tiered_kv.testing.conformance.children import Opener

__all__ = ["fill_until_spent", "reserve_and_stay", "write_until_told"]


def write_until_told(
    opener: Opener, arguments: Sequence[StoreArguments], told: Connection, out: Connection
) -> None:
    """Child process: an engine's ranks, that store, read, evict and delete until they are told to
    stop; tells when it began and how much it did."""
    stores = [opener(one) for one in arguments]
    rng = random.Random(1)
    stored = wrong = found = refused = 0
    first = 1000
    while not told.poll():
        numbers = list(range(first, first + 4))
        for rank, store in enumerate(stores):
            places = reserved(store, [new_block(n, rank) for n in numbers])
            try:
                store.write(places, [aligned_copy(content(n, rank)) for n in numbers])
                store.publish(places)
            except NoSpace:  # long readers keep an lmdb tier from using freed pages again
                store.abandon(places)
                refused += 1
        stored += len(numbers)
        first += 4
        number = rng.randrange(1000, first)
        for rank, store in enumerate(stores):
            block = new_block(number, rank)
            memory = aligned_copy(bytes(block.checksum.length))
            [result] = store.read([block.key], [memory])
            if result.checksum is not None:
                found += 1
                wrong += bytes(memory) != content(number, rank)
        if stored == 40:
            out.send("began")
    evicted = sum(store.stat().evicted_blocks for store in stores)
    for store in stores:
        store.close()
    out.send((stored, refused, found, wrong, evicted))


def reserve_and_stay(
    opener: Opener, arguments: StoreArguments, numbers: Sequence[int], out: Connection
) -> None:
    """Child process: is about to store, when it is killed."""
    store = opener(arguments)
    places = reserved(store, [new_block(n) for n in numbers])
    store.write(places, [aligned_copy(content(n)) for n in numbers])
    out.send("written")
    out.poll(60)


def fill_until_spent(opener: Opener, arguments: StoreArguments, first: int, gate: Barrier) -> None:
    """Child process: stores blocks one by one, at once with others, until the write budget of the
    day is spent."""
    store = opener(arguments)
    gate.wait()
    for number in range(first, first + 40):
        try:
            put(store, [number])
        except WriteBudgetSpent:
            break
    store.close()
