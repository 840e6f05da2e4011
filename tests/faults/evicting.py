"""Child process: stores so much that everything older is evicted."""

from __future__ import annotations

from tests.faults.loading import PATIENCE, Kind
from tiered_kv.contracts import BlockStore
from tiered_kv.errors import NoSpace
from tiered_kv.testing.conformance.blocks import (
    StoreArguments,
    aligned_copy,
    content,
    new_block,
)
from tiered_kv.testing.conformance.children import start

__all__ = ["evict_all", "evict_from_another_process"]

FIRST = 1_000
_BATCH = 8
_REFUSALS = 4


def evict_all(store: BlockStore, arguments: StoreArguments) -> int:
    """Store twice the capacity; how many blocks were stored. What a reader holds up may leave no
    room for the rest: that is a clean refusal, and after some in a row no more is tried."""
    [length] = arguments.block_bytes
    stored = refused = 0
    for first in range(FIRST, FIRST + 2 * arguments.capacity // length, _BATCH):
        if refused == _REFUSALS:
            break
        numbers = range(first, first + _BATCH)
        try:
            found = store.reserve([new_block(n, length=length) for n in numbers])
        except NoSpace:
            refused += 1
            continue
        places = [place for place in found if place is not None]
        try:
            store.write(places, [aligned_copy(content(n, length=length)) for n in numbers])
            store.publish(places)
        except NoSpace:
            store.abandon(places)
            refused += 1
        else:
            refused = 0
            stored += len(places)
    return stored


def _child(kind: Kind, arguments: StoreArguments) -> None:
    store = kind.open(arguments)
    evict_all(store, arguments)
    store.close()


def evict_from_another_process(kind: Kind, arguments: StoreArguments) -> None:
    """The same, in a process of its own that has ended when this returns."""
    child = start(_child, kind, arguments)
    child.join(PATIENCE)
    assert child.exitcode == 0, f"the process that stores ended with {child.exitcode}"
