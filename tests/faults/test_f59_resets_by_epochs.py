"""A reset ends what one engine sees of a shared tier: not what others see, nor what lies there."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from tests.faults.simulated import MODEL, STORES, Site, go_on, until
from tests.unit.doubles import PATIENCE, FastSpec, MemoryStore, SlowSpec, key
from tests.unit.engine_rig import Rig
from tests.unit.simulation_rig import load_prompt, store_prompt, tokens
from tiered_kv.connector import Answer, submission
from tiered_kv.testing.faults import Effect, Fault, Method
from tiered_kv.testing.simulation import Phase, Simulation, Workload
from tiered_kv.values import CacheGeometry, GroupGeometry, Namespace

pytestmark = pytest.mark.faults

SHARED = tokens(1, 48)
MISS, HIT = {Answer.MISS}, {Answer.HIT}


def rows(site: Site, epoch: bytes = b"") -> int:
    """Whole blocks of the model in an epoch of its namespace."""
    geometry = CacheGeometry(
        tuple(
            GroupGeometry(
                index,
                MODEL.chunk * group.layers * MODEL.page_bytes,
                MODEL.chunk,
                MODEL.chunk_tokens(index),
            )
            for index, group in enumerate(MODEL.groups)
        ),
        0,
        MODEL.ranks,
    )
    namespace = Namespace(MODEL.fingerprint, epoch)
    store = site.assembly.open_namespace("ssd", geometry, namespace, writable=False)
    try:
        return len(list(store.scan()))
    finally:
        store.close()


@pytest.mark.parametrize("kind", STORES)
def test_f59_one_engine_resets_and_the_other_still_hits(kind: str, tmp_path: Path) -> None:
    site = Site(tmp_path / "tier", kind)
    with (
        Simulation(site.assembly, MODEL, seed=1) as one,
        Simulation(site.assembly, MODEL, seed=2) as other,
    ):
        store_prompt(one, SHARED)
        assert other.wait_found(SHARED, "ssd")
        one.reset()
        before = set(one.lookup(SHARED))
        go_on(one)
        store_prompt(one, tokens(2, 48))  # its tiers go on, in the new epoch
        later = set(one.lookup(SHARED))
        assert before <= MISS | {Answer.RETRY}, "its mirror of the new epoch may not be ready yet"
        assert later == MISS
        load_prompt(one, tokens(2, 48))
        load_prompt(other, SHARED)
        print(
            f"the one that reset loaded {dict(one.counts.loaded_blocks)}, the other "
            f"{dict(other.counts.loaded_blocks)}"
        )
        assert one.counts.loaded_blocks["ssd"] == 6
        assert other.counts.loaded_blocks["ssd"] == 6
        assert set(other.lookup(tokens(2, 48))) == MISS, "the new epoch is the one's own"
        assert one.audit() == other.audit() == ()
    with Simulation(site.assembly, MODEL, seed=3) as again:
        assert again.wait_ready()
        assert set(again.lookup(SHARED, "ssd")) == HIT, "a restart returns to what was left"
        load_prompt(again, SHARED)
        assert again.counts.loaded_blocks["ssd"] == 6


@pytest.mark.parametrize("host_slots", [64, 0], ids=["host", "no-host"])
@pytest.mark.parametrize("kind", STORES)
def test_f59_after_an_in_place_change_of_weights_all_tiers_miss(
    kind: str, host_slots: int, tmp_path: Path
) -> None:
    site = Site(tmp_path / "tier", kind, host_slots)
    with Simulation(site.assembly, MODEL, seed=4) as sim:
        store_prompt(sim, SHARED)
        # What is being written when the weights change must not appear behind it.
        site.faults.inject(Fault(method=Method.PUBLISH, effect=Effect.HANG, times=2))
        sim.add(tokens(2, 40))
        sim.run()
        held = until(lambda: site.faults.held == 2)
        sim.reset(new_weights=True)
        assert set(sim.lookup(SHARED)) == set(sim.lookup(tokens(2, 40))) == MISS
        site.faults.let_go()
        go_on(sim)
        assert sim.settle()
        assert set(sim.lookup(SHARED)) == set(sim.lookup(tokens(2, 40))) == MISS
        loads = sim.counts.loads
        load_prompt(sim, SHARED, None)
        load_prompt(sim, tokens(2, 40), None)
        print(f"{loads} loads of older blocks; while {site.faults.injected()} publications hung")
        assert held
        assert loads == 0
        # They are computed with the new weights now, stored, and hit: the bytes are compared.
        assert sim.wait_found(SHARED, "ssd")
        sim.forget_device_cache()
        load_prompt(sim, SHARED)
        assert sim.counts.loaded_blocks["ssd"] >= 6
        sim.check_device_cache()
        assert sim.audit() == ()


@pytest.mark.parametrize("kind", STORES)
def test_f59_on_reset_says_what_becomes_of_what_was_stored(kind: str, tmp_path: Path) -> None:
    def erased(site: Site) -> bool:
        return rows(site) == 0

    found: dict[str, tuple[int, int, bool]] = {}
    for on_reset in ("leave", "keep", "erase"):
        site = Site(tmp_path / on_reset, kind, on_reset=on_reset)
        with Simulation(site.assembly, MODEL, seed=5) as sim:
            store_prompt(sim, SHARED)
            stored = rows(site)
            sim.reset()
            host = set(sim.lookup(SHARED, "host"))
            go_on(sim)
            store_prompt(sim, tokens(2, 16))
            if on_reset == "erase":
                until(partial(erased, site))
            hits = set(sim.lookup(SHARED, "ssd")) == HIT
            found[on_reset] = stored, rows(site), hits
            assert host == MISS
            assert sim.audit() == ()
    print(f"(rows before the reset, of them left after it, hits): {found}")
    assert found == {"leave": (6, 6, False), "keep": (6, 8, True), "erase": (6, 0, False)}


@pytest.mark.parametrize("kind", STORES)
def test_f59_random_lives_with_resets_and_new_weights(kind: str, tmp_path: Path) -> None:
    """Every byte that is read is compared with what the weights of that moment make of it."""
    site = Site(tmp_path / "tier", kind, host_slots=24)
    source = random.Random(6)
    with Simulation(site.assembly, MODEL, seed=6) as sim:
        assert sim.wait_ready()
        for life in range(12):
            hang = source.choice((Method.WRITE, Method.PUBLISH, Method.READ, Method.OPEN))
            site.faults.inject(Fault(method=hang, effect=Effect.HANG, chance=0.3, times=3))
            sim.live(Workload(abort=0.1, preempt=0.05), 25)
            sim.reset(new_weights=source.random() < 0.7)
            sim.live(Workload(abort=0.1), 5)
            site.faults.inject()
            site.faults.let_go()
            sim.live(Workload(abort=0.05), 20)
            go_on(sim)
            assert sim.settle()
            # What the life meets in the tier is chance: this is read from it for certain.
            prompt = tokens(100 + life, 16)
            store_prompt(sim, prompt)
            load_prompt(sim, prompt)
        assert sim.wait_ready()
        sim.check_device_cache()
        print(f"{sim.counts}\n{dict(site.faults.injected())}")
        assert sim.counts.resets == 12
        assert sim.counts.loaded_blocks["ssd"] >= 24
        assert sim.counts.loaded_blocks["host"] > 0
        assert sim.audit() == ()


@pytest.mark.parametrize("end", ["abort", "finish"])
@pytest.mark.parametrize("kind", STORES)
def test_f59_what_a_reset_found_being_loaded_is_not_stored(
    kind: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reset the engine forgets that the blocks are still to come, and offers them as
    computed when the request ends."""
    monkeypatch.setattr(submission, "FLUSH_SECONDS", 0.05)
    site = Site(tmp_path / "tier", kind)
    prompt = tokens(1, 24)
    with Simulation(site.assembly, MODEL, seed=1) as sim:
        store_prompt(sim, prompt)
        site.faults.inject(Fault(method=Method.READ, effect=Effect.HANG))
        request = sim.add(prompt, 4, tiers=("ssd",))
        while request.phase is not Phase.LOADING:
            sim.step()
        sim.step()
        sim.reset(preempt=False)
        stored = sim.counts.stored_blocks
        if end == "abort":
            sim.abort(request)
            sim.step()
        site.faults.inject()
        site.faults.let_go()
        go_on(sim)
        assert sim.settle()
        found = set(sim.lookup(prompt))
        stored = sim.counts.stored_blocks - stored
        print(f"{stored} blocks stored; {sim.counts.failed_loads} loads failed")
        assert found == MISS
        load_prompt(sim, prompt, None)
        assert sim.wait_found(prompt, "ssd")
        assert sim.audit() == ()


@pytest.mark.parametrize("slots", [True, False])
def test_f59_stores_from_before_a_reset_publish_nothing_after_it(slots: bool) -> None:
    with Rig(threads=1, staging_slots=16) as rig:
        for store in (rig.fast, rig.slow):
            store.writing.shut()
        rig.engine.submit(rig.store(1, range(4), FastSpec, SlowSpec, slots=slots))
        rig.journal.wait_for("fast.write begins")
        rig.journal.wait_for("slow.write begins")
        rig.engine.poison_stores()
        other = MemoryStore("other", rig.journal)
        rig.engine.attach("fast", other)
        for store in (rig.fast, rig.slow):
            store.writing.open()
        assert rig.engine.drain(PATIENCE)
        assert not rig.fast.rows
        assert not rig.slow.rows
        assert not other.rows
        assert [result.request for result in rig.engine.finished()] == ["request 1"]
        [result] = rig.run(rig.store(2, [9], FastSpec, SlowSpec, slots=slots))
        assert result.ok
        assert rig.engine.drain(PATIENCE)
        assert set(other.rows) == set(rig.slow.rows) == {key(9)}


def test_f59_a_row_lands_in_the_store_that_it_was_reserved_in() -> None:
    with Rig() as rig:
        rig.fast.publishing.shut()
        rig.run(rig.store(1, [0], FastSpec))
        rig.journal.wait_for("fast.publish begins")
        rig.engine.poison_stores()
        other = MemoryStore("other", rig.journal)
        rig.engine.attach("fast", other)
        rig.fast.publishing.open()
        assert rig.engine.drain(PATIENCE)
        assert set(rig.fast.rows) == {key(0)}
        assert not other.rows
