from __future__ import annotations

import pytest

from tiered_kv.cli.traffic import Traffic, loaded_bytes, tiers_that_supplied, traffic
from tiered_kv.specs import HopResult
from tiered_kv.stats import HopStats, StatsRecorder, StatsSnapshot
from tiered_kv.values import BlockStatus

TIERS = {"host": "cpu", "ssd": "nvme", "pins": "lmdb"}
OK, BAD = BlockStatus.OK, BlockStatus.CORRUPT


def engine(*hops: tuple[str, str, str, int]) -> StatsSnapshot:
    """An engine whose hops each moved some blocks of 100 bytes."""
    recorder = StatsRecorder("test")
    for src, dst, tier, blocks in hops:
        recorder.hop(src, dst, tier, HopResult((OK,) * blocks, 100 * blocks), 0.5)
    return recorder.snapshot()


def test_blocks_that_pass_the_host_on_their_way_are_not_the_host_tiers() -> None:
    moved = Traffic(
        TIERS,
        engine(
            ("gpu", "cpu", "cpu", 9),
            ("cpu", "nvme", "ssd", 8),
            ("cpu", "lmdb", "pins", 7),
            ("nvme", "cpu", "ssd", 3),
            ("lmdb", "cpu", "pins", 2),
            ("cpu", "gpu", "cpu", 6),
        ),
    )
    assert {name: moved.stored(name).blocks for name in TIERS} == {"host": 9, "ssd": 8, "pins": 7}
    assert {name: moved.loaded(name).blocks for name in TIERS} == {"host": 1, "ssd": 3, "pins": 2}
    assert {name: moved.loaded(name).bytes for name in TIERS} == {
        "host": 100,
        "ssd": 300,
        "pins": 200,
    }


def test_a_straight_way_into_the_engine_is_the_stores() -> None:
    moved = Traffic(TIERS, engine(("nvme", "gpu", "ssd", 4), ("cpu", "gpu", "cpu", 1)))
    assert moved.loaded("ssd").blocks == 4
    assert moved.loaded("host").blocks == 1
    assert moved.hops().keys() == {"ssd->gpu", "cpu->gpu"}


def test_a_tier_that_did_nothing_moved_nothing() -> None:
    moved = Traffic(TIERS, engine())
    assert moved.loaded("host") == moved.loaded("ssd") == moved.stored("pins") == HopStats()
    assert moved.hops() == {}


@pytest.mark.parametrize(
    ("hops", "supplied"),
    [
        ([("cpu", "gpu", "cpu", 2)], ("host",)),
        ([("nvme", "cpu", "ssd", 2), ("cpu", "gpu", "cpu", 2)], ("ssd",)),
        ([("nvme", "cpu", "ssd", 1), ("cpu", "gpu", "cpu", 2)], ("host", "ssd")),
        ([("gpu", "cpu", "cpu", 2), ("cpu", "lmdb", "pins", 2)], ()),
    ],
)
def test_who_supplied_a_request(
    hops: list[tuple[str, str, str, int]], supplied: tuple[str, ...]
) -> None:
    before = [("cpu", "gpu", "cpu", 5), ("lmdb", "cpu", "pins", 5)]
    loaded = loaded_bytes(TIERS, engine(*before), engine(*before, *hops))
    assert tiers_that_supplied(loaded) == supplied
    assert sum(loaded.values()) == sum(100 * hop[3] for hop in hops if hop[1] == "gpu")


def test_several_engines_add_up_and_failures_are_counted() -> None:
    recorder = StatsRecorder("test")
    recorder.hop("nvme", "cpu", "ssd", HopResult((OK, BAD), 100), 1.0)
    moved = traffic(TIERS, engine(("nvme", "cpu", "ssd", 3)), recorder.snapshot())
    assert moved.tiers_as_json()["ssd"] == {
        "type": "nvme",
        "blocks": 4,
        "bytes": 400,
        "seconds": 1.5,
        "failures": 1,
        "stored": {"blocks": 0, "bytes": 0, "seconds": 0.0, "failures": 0},
        "resident_blocks": 0,
        "evicted_blocks": 0,
        "dropped_blocks": {},
    }
    assert moved.hops_as_json() == {
        "ssd->cpu": {"blocks": 4, "bytes": 400, "seconds": 1.5, "failures": 1}
    }


def test_tables_show_every_tier_and_hop(capsys: pytest.CaptureFixture[str]) -> None:
    Traffic(TIERS, engine(("gpu", "cpu", "cpu", 9), ("cpu", "nvme", "ssd", 8))).print_tables()
    out = capsys.readouterr().out
    for text in ("host", "ssd", "pins", "gpu->cpu", "cpu->ssd", "9 blocks", "800B"):
        assert text in out
