"""The order of a store by scores: prefixes go from their ends, and what is used often stays."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.test_index_blocks import row
from tiered_kv.contracts import Recency, Scoring
from tiered_kv.index import BlockIndex, Environment
from tiered_kv.index.log import Counters
from tiered_kv.index.order import Order
from tiered_kv.placement import AgedFrequency
from tiered_kv.testing.conformance.blocks import NAMESPACE
from tiered_kv.values import BlockKey, CacheGeometry, GroupGeometry


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    opened = Environment.open(
        tmp_path / "index", kind="test", tier="ssd", max_bytes=16 * 2**20, writable=True
    )
    yield opened
    opened.close()


@pytest.mark.parametrize("scoring", [Recency(), AgedFrequency(600.0)])
def test_what_is_left_of_prefixes_that_are_used_whole_can_be_used(
    environment: Environment, scoring: Scoring
) -> None:
    geometry = CacheGeometry((GroupGeometry(0, 4096, 1, 16),), 0, 1)
    index = BlockIndex(environment, NAMESPACE, geometry, scoring=scoring)
    chance = random.Random(3)
    here: set[bytes] = set()
    evicted = 0
    for number in range(300):
        path = [chance.randrange(3) for _ in range(chance.randrange(1, 7))]
        keys = [BlockKey(bytes([9, *path[: end + 1]])) for end in range(len(path))]
        new = [key for key in keys if key not in here]
        with environment.write() as txn:
            index.publish(txn, [(key, row(number)) for key in new])
        here.update(new)
        index.touch(keys)  # a use of the whole prefix, its new end included
        index.flush()
        with environment.write() as txn:
            for full in index.oldest(txn, 0, max(0, len(here) - 20)):
                index.remove(txn, [full])
                here.remove(full[8:])
                evicted += 1
        assert set(index.scan()) == here
        assert all(key[:end] in here for key in here for end in range(2, len(key)))
    print(f"{evicted} blocks were evicted, {len(here)} are left")
    assert evicted > 100


def test_what_is_used_often_stays_longer_than_what_was_used_last(environment: Environment) -> None:
    geometry = CacheGeometry((GroupGeometry(0, 4096, 1, 16),), 0, 1)
    index = BlockIndex(environment, NAMESPACE, geometry, scoring=AgedFrequency(600.0))
    often, last = BlockKey(b"often"), BlockKey(b"last")
    with environment.write() as txn:
        index.publish(txn, [(often, row(1))])
    for _ in range(3):
        index.touch([often])
        index.flush()
    with environment.write() as txn:
        index.publish(txn, [(last, row(2))])
        assert [full[8:] for full in index.oldest(txn, 0, 2)] == [last, often]


@pytest.mark.parametrize(
    "name",
    [b"\xff\xff\xff\xff" + bytes(16), b"\xff\xff", b"\0\0\1", b"\0\0\0\1" + b"\xff" * 9],
)
def test_a_damaged_number_of_a_class_is_one_among_others(
    environment: Environment, name: bytes
) -> None:
    geometry = CacheGeometry((GroupGeometry(0, 4096, 1, 16),), 0, 1)
    index = BlockIndex(environment, NAMESPACE, geometry)
    with environment.write() as txn:
        for slot_class in (0, 1, 300):
            index.publish(txn, [(BlockKey(b"%d" % slot_class), row(1, slot_class))])
    order = Order(environment, Counters(environment))
    with environment.write() as txn:
        txn.put(name, b"damaged", db=environment.database("order"))
        found = order.classes(txn)
    print(found, index.kept())
    assert sorted(set(found)) == found
    assert {0, 1, 300} <= set(found) <= {0, 1, 300, int.from_bytes(name[:4].ljust(4, b"\0"), "big")}
