"""Stores that take another's place while calls run, and caches that do."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from tests.unit.doubles import PATIENCE, EngineCache, FastSpec, MemoryStore, SlowSpec, content, key
from tests.unit.engine_rig import Rig
from tiered_kv.memory import KVCaches
from tiered_kv.values import BlockStatus


def test_a_store_is_replaced_while_it_is_read() -> None:
    with Rig(attach=False) as rig:
        released = threading.Event()
        assert rig.engine.attach("fast", rig.fast, released=released.set)
        rig.fast.fill([0])
        rig.fast.reading.shut()
        rig.engine.submit(rig.load_from(1, [0], FastSpec))
        rig.journal.wait_for("fast.read begins key-000000")
        other = MemoryStore("other", rig.journal)
        assert rig.engine.attach("fast", other)
        other.fill([1])
        [second] = rig.run(rig.load_from(2, [1], FastSpec))
        assert second.ok, "the new store serves while a call on the old one hangs"
        assert not released.is_set()
        rig.fast.reading.open()
        [first] = rig.results(rig.load_from(1, [0], FastSpec).id)
        assert first.ok, "a call ends on the store that it began with"
        assert released.wait(PATIENCE)
        assert rig.cache.blocks[0] == content(0)


def test_a_detached_store_gets_nothing_and_what_waits_for_it_is_dropped() -> None:
    with Rig(attach=False, threads=1) as rig:
        released = threading.Event()
        rig.engine.attach("fast", rig.fast, released=released.set)
        rig.fast.writing.shut()
        [result] = rig.run(rig.store(1, range(4), FastSpec))
        assert result.ok
        rig.journal.wait_for("fast.write begins")
        rig.engine.detach("fast", "opening")
        assert rig.engine.health()["fast"] == (False, "opening")
        assert rig.snapshot().tier("fast").states == ("opening",)
        [result] = rig.run(rig.store(2, range(4, 8), FastSpec))
        assert result.ok, "the blocks are in host slots"
        rig.fast.writing.open()
        assert released.wait(PATIENCE)
        rig.wait_for_released(8)
        assert len(rig.fast.rows) == 1, "what was being written, and nothing else"
        dropped = rig.snapshot().tier("fast").dropped
        assert sum(dropped.values()) == 7


def test_a_store_that_is_not_wanted_any_more_is_let_go_of() -> None:
    with Rig(attach=False) as rig:
        released = threading.Event()
        taken = rig.engine.attach("fast", rig.fast, released=released.set, wanted=lambda: False)
        assert not taken
        assert released.wait(PATIENCE)
        assert rig.engine.health()["fast"] == (False, "opening")


def test_loads_of_an_era_that_is_over_go_on() -> None:
    with Rig() as rig:
        rig.fast.fill([0])
        rig.fast.reading.shut()
        rig.engine.submit(rig.load_from(1, [0], FastSpec))
        rig.journal.wait_for("fast.read begins key-000000")
        rig.engine.poison_stores()
        rig.fast.reading.open()
        [result] = rig.results(rig.load_from(1, [0], FastSpec).id)
        assert result.statuses == (BlockStatus.OK,)


@pytest.mark.parametrize("direct", [False, True])
def test_after_other_caches_were_given_the_old_ones_are_left_alone(direct: bool) -> None:
    with Rig(direct=direct, through_host=not direct) as rig:
        rig.fast.fill([0, 1])
        [result] = rig.run(rig.load_from(1, [0], FastSpec))
        assert result.ok
        old = rig.cache
        before = dict(old.blocks)
        rig.cache = EngineCache(rig.journal)
        rig.engine.use_caches(cast(KVCaches, rig.cache))
        [result] = rig.run(rig.load_from(2, [1], FastSpec))
        assert result.ok
        assert old.blocks == before == {0: content(0)}
        assert rig.cache.blocks == {1: content(1)}
        [result] = rig.run(rig.store(3, [5], SlowSpec))
        assert result.ok
        assert rig.engine.drain(PATIENCE)
        assert rig.slow.rows[key(5)][0] == content(5)
