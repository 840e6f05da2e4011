"""An archive into a tier that is smaller, or full of others' blocks: what is used most stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import Cli
from tests.stores.upkeep_tiers import RANKS, Tiers
from tiered_kv.contracts import RanksByUse
from tiered_kv.testing.conformance.blocks import NAMESPACE, assert_held, keys
from tiered_kv.values import BlockKey

BLOCKS = 120


@pytest.fixture(params=["nvme", "lmdb"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def order(tiers: Tiers, tier: str) -> list[BlockKey]:
    with tiers.opened(tier, 0) as store:
        assert isinstance(store, RanksByUse)
        return list(store.hottest())


def archived(cli: Cli, tiers: Tiers) -> Path:
    archive = tiers.folder / "archive"
    namespace = NAMESPACE.id.hex()
    ran = cli("export", tiers.config, archive, "--tier", "a", "--namespace", namespace)
    assert ran.code == 0, ran.err
    return archive


def test_a_smaller_tier_keeps_what_is_used_most_and_says_that_it_is_full(
    cli: Cli, kind: str, tmp_path: Path
) -> None:
    tiers = Tiers(kind, tmp_path)
    tiers.fill("a", range(BLOCKS))
    with tiers.opened("a", 0) as store:
        store.touch(keys([7, 2, 5]))
    expected = order(tiers, "a")
    archive = archived(cli, tiers)

    tight = Tiers(kind, tmp_path, capacity="8MiB")
    ran = cli("import", tight.config, archive, "--tier", "b", "--new-namespace", "--json")
    held = order(tight, "b")
    print(f"{kind}: {ran.json}, {len(held)} held; {ran.err}")
    assert ran.code == 1
    assert "tier 'b' is full, the rest of" in ran.err
    assert "of the same file" in ran.json["full"]
    assert 0 < ran.json["evicted_blocks"] < ran.json["parts"] // RANKS < BLOCKS
    # What the last batch drove out was of the least used.
    kept = len(held) * 9 // 10
    assert held[:kept] == expected[:kept]


def test_a_tier_full_of_kept_blocks_is_full(cli: Cli, kind: str, tmp_path: Path) -> None:
    """They are there already; the others of the file would drive out one another."""
    tiers = Tiers(kind, tmp_path)
    tiers.fill("a", range(BLOCKS))
    archive = archived(cli, tiers)
    tight = Tiers(kind, tmp_path, capacity="8MiB")
    keep = ("--keep", "1d", "--keep-share", "100", "--json")
    ran = cli("warm", "--from", tmp_path / "a", "--config", tight.config, "--tier", "b", *keep)
    assert ran.json["tiers"]["b"]["kept_blocks"] > 20, ran.err
    ran = cli("import", tight.config, archive, "--tier", "b", "--json")
    print(f"{kind}: {ran.json}; {ran.err}")
    assert ran.code == 1
    assert ran.json["present"] > 40
    assert ran.json["evicted_blocks"] < 20


def test_a_full_tier_gives_up_what_it_held_before(cli: Cli, kind: str, tmp_path: Path) -> None:
    tiers = Tiers(kind, tmp_path, capacity="8MiB")
    tiers.fill("a", range(20))
    archive = archived(cli, tiers)
    for start in range(100, 100 + BLOCKS, 20):
        tiers.fill("b", range(start, start + 20))
    before = order(tiers, "b")
    ran = cli("import", tiers.config, archive, "--tier", "b", "--json")
    held = order(tiers, "b")
    print(f"{kind}: {ran.json}, {len(before)} held before, {len(held)} after")
    assert ran.code == 0, ran.err
    assert not ran.json["full"]
    assert ran.json["evicted_blocks"] > 0
    assert held[:20] == order(tiers, "a")
    for rank in range(RANKS):
        with tiers.opened("b", rank) as store:
            assert_held(store, range(20), rank)
