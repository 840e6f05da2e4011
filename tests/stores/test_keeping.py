"""Blocks that are kept: evicted after all others for a while, also after a restart, and never more
of them than they may be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, cast

import pytest

from tests.command_line import Cli
from tests.stores.upkeep_tiers import OPENERS, Tiers
from tiered_kv.contracts import BlockStore, KeepsBlocks, RanksByUse
from tiered_kv.testing.conformance.blocks import StoreArguments, keys, put

HOUR = 3600.0
MANY = 1_000_000
KINDS = ("nvme", "lmdb")


class Store(BlockStore, KeepsBlocks, RanksByUse, Protocol):
    """What our stores are."""


@contextmanager
def opened(kind: str, folder: Path, *, writable: bool = True) -> Iterator[Store]:
    arguments = StoreArguments(folder / "tier", capacity=12 * 2**20, writable=writable)
    store = OPENERS[kind](arguments)
    assert isinstance(store, KeepsBlocks)
    assert isinstance(store, RanksByUse)
    try:
        yield cast(Store, store)
    finally:
        store.close()


def churn(store: BlockStore, first: int, blocks: int = 400) -> int:
    """Store many blocks, a few at a time; how many had to go."""
    before = store.stat().evicted_blocks
    for start in range(first, first + blocks, 8):
        put(store, range(start, start + 8))
    return store.stat().evicted_blocks - before


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_outlives_all_others_and_a_restart(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as store:
        put(store, range(20))
        assert store.keep(keys([*range(5), 900]), HOUR, MANY) == 5
        assert store.kept() == 5
        evicted = churn(store, 1_000)
    with opened(kind, tmp_path) as store:
        store.touch(keys(range(3)))  # a use takes nothing from it
        store.arrange(keys(range(2)))
        evicted += churn(store, 2_000)
        held = store.contains(keys(range(20)))
        print(f"{evicted} blocks evicted, of the first 20 these are there: {held}")
        assert evicted > 400
        assert held == [True] * 5 + [False] * 15
        assert store.kept() == 5
        assert set(list(store.hottest())[:5]) == set(keys(range(5)))


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_are_kept_than_may_be(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as store:
        put(store, range(20))
        assert store.keep(keys(range(10)), HOUR, 4) == 4
        assert store.keep(keys(range(10, 20)), HOUR, 6) == 2
        assert store.keep(keys(range(10)), 2 * HOUR, 6) == 4  # which are kept already
        assert store.keep(keys(range(10)), HOUR, 0) == 4
        assert store.kept() == 6
        store.delete(keys(range(2)))
        assert store.kept() == 4
        assert churn(store, 1_000) > 200
        assert store.contains(keys(range(20))) == [number in (2, 3, 10, 11) for number in range(20)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_that_keeps_everything_evicts_all_the_same(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as store:
        for start in range(0, 400, 8):
            put(store, range(start, start + 8))
            store.keep(keys(range(start, start + 8)), HOUR, MANY)
        visible = set(store.scan())
        print(f"{len(visible)} blocks are there, {store.kept()} are kept")
        assert store.stat().evicted_blocks > 200
        assert store.kept() == len(visible)
        assert set(keys(range(392, 400))) <= visible


@pytest.mark.parametrize("kind", KINDS)
def test_when_the_time_is_over_it_counts_as_used_then(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as store:
        put(store, range(20))
        assert store.keep(keys(range(5)), 0.05, MANY) == 5
        assert store.keep(keys(range(5, 7)), HOUR, MANY) == 2
        over = time.monotonic() + 0.1
        while time.monotonic() < over:
            time.sleep(0.01)
        assert store.kept() == 2
        assert churn(store, 1_000) > 200
        assert store.contains(keys(range(20))) == [number in (5, 6) for number in range(20)]


@pytest.mark.parametrize("kind", KINDS)
def test_of_what_is_kept_the_end_goes_first(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as store:
        put(store, range(20))
        assert store.keep(keys(range(20)), HOUR, MANY) == 20
        assert list(store.hottest()) == keys(range(20))


@pytest.mark.parametrize("kind", KINDS)
def test_keeping_is_refused_where_nothing_may_be_written(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as store:
        put(store, range(2))
        for seconds in (0.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match="more than 0 seconds"):
                store.keep(keys([0]), seconds, 1)
    with opened(kind, tmp_path, writable=False) as store:
        assert store.kept() == 0
        with pytest.raises(ValueError, match="read"):
            store.keep(keys([0]), HOUR, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_copied_is_kept_as_asked(cli: Cli, kind: str, tmp_path: Path) -> None:
    tiers = Tiers(kind, tmp_path)
    tiers.fill("a", range(10))
    warm = ("warm", "--from", tmp_path / "a", "--config", tiers.config, "--tier", "b")
    ran = cli(*warm, "--keep", "2h", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["tiers"]["b"]["kept_blocks"] == 10
    ran = cli(*warm, "--keep", "7d", "--keep-share", "1")
    print(ran.out)
    assert "10 were there already; 10 blocks kept for 168 h 0 min" in ran.out
    with tiers.opened("b", 0) as store:
        assert isinstance(store, KeepsBlocks)
        assert store.kept() == 10
    tiers.fill("a", range(10, 12))
    ran = cli(*warm, "--keep", "1h", "--keep-share", "1")
    assert "10 of 12 blocks kept for 1 h 0 min (1% of the tier are 1)" in ran.out
    ran = cli(*warm, "--keep", "0s")
    assert (ran.code, "expected more than 0 seconds" in ran.err) == (2, True)
    stat = {one["tier"]: one for one in cli("stat", tiers.config, "--json").json["tiers"]}
    print(stat)
    assert (stat["a"]["kept_blocks"], stat["b"]["kept_blocks"]) == (0, 10)
    assert "10 blocks of tier b are kept" in cli("stat", tiers.config).out
