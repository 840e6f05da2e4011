"""Write budgets of real stores: counted in the index, for all processes, across restarts."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stores.lmdb_parts import open_into_map, open_lmdb
from tests.stores.nvme_parts import open_nvme, open_striped
from tests.stores.upkeep_children import fill_until_spent
from tests.unit.simulation_rig import Stage, tokens
from tiered_kv.config import SizeOrPercent
from tiered_kv.connector.wear import Wear
from tiered_kv.contracts import BlockStore, StoreStat
from tiered_kv.errors import NoSpace, WriteBudgetSpent
from tiered_kv.index import Environment, WriteAccount
from tiered_kv.stats.condition import day_of
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    StoreArguments,
    assert_held,
    keys,
    new_block,
    put,
    reserved,
)
from tiered_kv.testing.conformance.children import Opener
from tiered_kv.testing.simulation import SimulatedModel, Simulation
from tiered_kv_nvme.settings import NvmeSettings

OPENERS = {
    "nvme": open_nvme,
    "striped": open_striped,
    "lmdb": open_lmdb,
    "lmdb-map": open_into_map,
}
DAY = 86_400
MOST_BESIDE = 4096
"""Bytes per block that a store may count beside its pages."""

everywhere = pytest.mark.parametrize("open_", OPENERS.values(), ids=OPENERS)


def arguments(path: Path, blocks: int) -> StoreArguments:
    """A budget for so many blocks, and what is written beside them."""
    budget = blocks * (BLOCK_BYTES + MOST_BESIDE)
    return StoreArguments(path, 64 * 2**20, extra=(("write_budget", budget),))


def written(stat: StoreStat) -> tuple[int, int]:
    assert stat.written_bytes is not None
    assert stat.written_today is not None
    return stat.written_bytes, stat.written_today


class Calendar:
    """The day of all accounts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 20_000.0 * DAY
        made = WriteAccount.__init__

        def init(self_: WriteAccount, environment: Environment, tier: str, budget: int) -> None:
            made(self_, environment, tier, budget, lambda: self.now)

        monkeypatch.setattr(WriteAccount, "__init__", init)


@everywhere
def test_what_is_written_is_counted_and_outlives_the_process(open_: Opener, tmp_path: Path) -> None:
    where = arguments(tmp_path / "tier", 100)
    store = open_(where)
    assert written(store.stat()) == (0, 0)
    put(store, range(10))
    ever, today = written(store.stat())
    assert 10 * BLOCK_BYTES <= ever == today <= 10 * (BLOCK_BYTES + MOST_BESIDE)
    put(store, range(10))
    assert written(store.stat()) == (ever, today), "they are there already"
    store.delete(keys(range(5)))
    put(store, range(5))
    again, _ = written(store.stat())
    assert again == ever * 3 // 2, "written twice, though the tier holds them once"
    store.close()
    store = open_(where)
    assert written(store.stat()) == (again, again)
    reader = open_(where.with_(writable=False))
    assert written(reader.stat()) == (again, again)
    reader.close()
    store.close()


@everywhere
def test_beyond_the_budget_nothing_is_written(
    open_: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calendar = Calendar(monkeypatch)
    where = arguments(tmp_path / "tier", 8)
    store = open_(where)
    put(store, range(8))
    before = written(store.stat())
    with pytest.raises(WriteBudgetSpent, match="write budget") as refused:
        put(store, range(8, 16))
    assert isinstance(refused.value, NoSpace)
    print(refused.value)
    assert written(store.stat()) == before
    assert store.contains(keys(range(16))) == [True] * 8 + [False] * 8
    assert_held(store, range(8))
    assert store.reserve([new_block(n) for n in range(8)]) == [None] * 8, "nothing to be written"
    store.close()
    store = open_(where)
    with pytest.raises(WriteBudgetSpent):
        put(store, range(8, 16))
    calendar.now += DAY
    assert written(store.stat())[1] == 0
    put(store, range(8, 16))
    assert_held(store, range(16))
    ever, today = written(store.stat())
    assert ever == 2 * today == 2 * before[0]
    calendar.now -= DAY  # a clock that is set back begins no day again
    with pytest.raises(WriteBudgetSpent):
        put(store, range(16, 24))
    assert store.stat().evicted_blocks == 0
    store.close()


@everywhere
def test_a_full_tier_evicts_nothing_for_what_may_not_be_written(
    open_: Opener, tmp_path: Path
) -> None:
    where = arguments(tmp_path / "tier", 400).with_(capacity=16 * 2**20)
    store = open_(where)
    for start in range(0, 400, 20):
        put(store, range(start, start + 20))
    assert store.stat().blocks < 300, "more was stored than the tier holds at once"
    held, evicted = store.stat().blocks, store.stat().evicted_blocks
    assert evicted > 0
    for _ in range(3):
        with pytest.raises(WriteBudgetSpent):
            put(store, range(400, 440))
    assert (store.stat().blocks, store.stat().evicted_blocks) == (held, evicted)
    store.close()


@everywhere
def test_room_that_was_given_back_counts_as_well(open_: Opener, tmp_path: Path) -> None:
    store = open_(arguments(tmp_path / "tier", 8))
    store.abandon(reserved(store, [new_block(n) for n in range(6)]))
    with pytest.raises(WriteBudgetSpent):
        put(store, range(6))
    store.close()


@everywhere
def test_processes_together_write_no_more_than_the_budget(open_: Opener, tmp_path: Path) -> None:
    where = arguments(tmp_path / "tier", 30)
    open_(where).close()
    spawn = multiprocessing.get_context("spawn")
    gate = spawn.Barrier(3)
    children = [
        spawn.Process(target=fill_until_spent, args=(open_, where, 1000 * n, gate))
        for n in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0, 0]
    store = open_(where)
    blocks = store.stat().blocks
    ever, _ = written(store.stat())
    print(f"3 processes stored {blocks} blocks, {ever} bytes of {dict(where.extra)}")
    assert 30 <= blocks <= 30 * (BLOCK_BYTES + MOST_BESIDE) // BLOCK_BYTES
    assert ever <= 30 * (BLOCK_BYTES + MOST_BESIDE)
    store.close()


def test_without_a_budget_it_is_counted_all_the_same(tmp_path: Path) -> None:
    counted: list[Callable[[StoreArguments], BlockStore]] = [open_nvme, open_lmdb]
    for number, open_ in enumerate(counted):
        store = open_(StoreArguments(tmp_path / str(number)))
        put(store, range(5))
        assert written(store.stat())[0] >= 5 * BLOCK_BYTES
        store.close()


@pytest.mark.parametrize("counts", [True, False], ids=["the store counts", "the rank counts"])
def test_the_manager_hears_how_much_of_the_budget_is_used(
    counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the index, or from the ranks, to admission: the manager drops before any rank has to."""
    monkeypatch.setattr("tiered_kv.connector.occupancy.PERIOD_SECONDS", 0.02)
    # Late in the day a budget may be nearly used up: for the manager it is six in the morning.
    monkeypatch.setattr(
        "tiered_kv.connector.books.Wear",
        lambda wall: Wear(lambda: (day_of(wall()) + 0.25) * DAY),
    )
    budget = 64 * 1024
    stage = Stage(host_slots=200, write_budget=budget)
    if counts:
        tier = NvmeSettings(
            name="ssd",
            path=tmp_path / "ssd",
            capacity=64 * 2**20,
            min_free=SizeOrPercent(size=0),
            write_budget=budget,
        )
        stage = Stage(host_slots=200, stores=(), tiers=(tier,))
    with Simulation(stage.assembly, SimulatedModel(ranks=2)) as sim:
        assert sim.wait_ready()
        pause = threading.Event()
        for seed in range(500):
            sim.add(tokens(seed, 40))
            sim.run()
            assert sim.settle()
            pause.wait(0.01)  # for the ranks to ask their stores again
            if sim.manager_stats.tier("ssd").dropped.get("wear", 0) > 20:
                break
        by_manager = sim.manager_stats.tier("ssd").dropped
        ranks = [sim.rank_stats(rank).tier("ssd") for rank in range(2)]
        print(f"manager {by_manager}, ranks {[r.dropped for r in ranks]}, {ranks[0]}")
        assert by_manager["wear"] > 20
        assert ranks[0].write_budget_bytes == (budget if counts else budget // 2)
        assert 0 < ranks[0].written_today_bytes <= ranks[0].write_budget_bytes
        assert ranks[0].written_bytes > 0
