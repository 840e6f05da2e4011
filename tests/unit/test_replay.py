"""The replay's tiers keep what the catalog that serves keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random

import pytest

from tests.unit.clocks import Clock
from tiered_kv.contracts import EvictionPolicy, PolicyContext
from tiered_kv.placement import BUILT_IN, HostCatalog, TracedRequest
from tiered_kv.placement.replay import Replay, ReplayTier
from tiered_kv.placement.scored import ScoredPolicy
from tiered_kv.placement.shelf import Shelf
from tiered_kv.values import BlockKey

IN_STORES = [f"{name} in a store" for name in BUILT_IN if BUILT_IN[name].scoring is not None]


def made(name: str, capacity: int) -> EvictionPolicy[BlockKey]:
    policy = BUILT_IN[name.removesuffix(" in a store")]
    if name in IN_STORES:
        assert policy.scoring is not None
        return ScoredPolicy(policy.scoring(None))
    return policy.make(PolicyContext(capacity, None))


def prompts(chance: Random, count: int) -> Iterator[tuple[BlockKey, ...]]:
    """Branches of a few trees, some of them longer than a tier."""
    for _ in range(count):
        tree, length = chance.randrange(12), chance.choice((1, 2, 5, 9, 40))
        branch = chance.choice((0, 0, chance.randrange(1, 30)))
        keys = [b"%d/%d" % (tree, place) for place in range(length)]
        keys += [b"%d/%d/%d" % (tree, branch, place) for place in range(branch % 7)]
        yield tuple(map(BlockKey, keys))


def in_catalog(catalog: HostCatalog, keys: Sequence[BlockKey], first: int, *, forced: bool) -> int:
    parents = {key: parent for parent, key in pairwise(keys[max(0, first - 1) :])}
    given = catalog.allocate(keys[first:], 1, parents=parents, forced=None if forced else ())
    catalog.stored([*given.slots.values()])
    for slot in given.slots.values():
        catalog.release(slot, 0)
    return len(given.evicted)


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("capacity", [0, 1, 7, 30, 120, 10_000])
@pytest.mark.parametrize("name", [*BUILT_IN, *IN_STORES])
def test_a_shelf_keeps_what_the_catalog_keeps(name: str, capacity: int, forced: bool) -> None:
    clock, chance = Clock(), Random(f"{name} {capacity} {forced}")
    catalog = HostCatalog(capacity, made(name, capacity), clock=clock)
    shelf = Shelf(capacity, made(name, capacity))
    evicted = 0
    for keys in prompts(chance, 600):
        clock.now += chance.choice((0.0, 0.1, 3.0, 50.0))
        hit = 0
        while hit < len(keys) and catalog.lookup(keys[hit]):
            hit += 1
        first = chance.choice((hit, hit, min(hit, 1), chance.randrange(len(keys) + 1)))
        catalog.wanted(keys)
        shelf.wanted(keys, clock())
        evicted += in_catalog(catalog, keys, first, forced=forced)
        shelf.store(keys, first, forced=forced)
        assert shelf.evicted == evicted
        assert {key for key in keys if key in shelf.resident} == {*catalog.look_up(keys)[0]}
        assert len(shelf.resident) == catalog.resident
    print(f"{shelf.stored} stored, {evicted} evicted, {catalog.resident} here")
    assert catalog.audit() == ()
    assert evicted > 500 or not 1 < capacity < 100


def test_what_is_loaded_is_in_the_engines_own_cache() -> None:
    tiers = [ReplayTier("engine", 3, "lru", takes_loaded=True), ReplayTier("host", 9, "lru")]
    replay = Replay(tiers, block_tokens=10)
    for keys in ((1, 2, 3), (7, 8, 9)):  # which takes the place of the first in the engine
        assert replay.play(TracedRequest(0.0, keys, 30, 0)) == []
    assert replay.play(TracedRequest(1.0, (1, 2, 3), 30, 0)) == ["host"] * 3
    assert replay.play(TracedRequest(2.0, (1, 2, 3), 30, 0)) == ["engine"] * 3
    assert replay.play(TracedRequest(3.0, (1, 2, 3, 4), 40, 0)) == ["engine"] * 3
    assert replay.play(TracedRequest(4.0, (7, 8), 20, 0)) == ["host"] * 2


def test_a_replay_tells_the_tier_of_each_block() -> None:
    tiers = [ReplayTier("host", 2, "lru"), ReplayTier("ssd", 10, "lru", store=True)]
    replay = Replay(tiers, block_tokens=10)
    request = TracedRequest(0.0, (1, 2, 3), 25, 0)
    assert replay.play(request) == []
    assert replay.play(request) == ["host", "host", "ssd"]
    assert replay.play(TracedRequest(1.0, (1, 9, 3), 30, 0)) == ["host"]
    assert Replay([], block_tokens=10).play(request) == []
