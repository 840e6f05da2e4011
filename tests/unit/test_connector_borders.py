"""Odd orders and odd inputs at the connector's borders: nothing leaks, nothing is told twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.doubles import MemoryStore
from tests.unit.test_manager import Bench, bench, keys
from tests.unit.test_worker import PATIENCE, HeldGather, Rig, load_job, store_job
from tiered_kv.connector import Answer, ConnectorMetadata, WorkerReport
from tiered_kv.connector.messages import FailedBlock
from tiered_kv.connector.occupancy import StoreWatch
from tiered_kv.connector.opening import StoreOpener
from tiered_kv.connector.weights import weights_identity
from tiered_kv.contracts import BlockStore, StoreStat
from tiered_kv.placement import HostCatalog
from tiered_kv.specs import SlotRef
from tiered_kv.stats import StatsRecorder
from tiered_kv.threads import Alarm
from tiered_kv.values import BlockKey, BlockStatus, JobId

# The manager's memory


def failed(name: str, request: str, status: BlockStatus = BlockStatus.TIMED_OUT) -> FailedBlock:
    return FailedBlock(BlockKey(name.encode()), status, request)


def test_a_reset_during_the_load_of_a_finished_request_leaves_nothing() -> None:
    b = bench()
    b.store("a")
    for request in ("finished", "running"):
        b.manager.on_new_request(request)
        assert b.answers(request, keys("a")) == [Answer.HIT]
        b.manager.prepare_load(request, keys("a"))
    b.manager.on_request_finished("finished")
    # As vLLM does it: completions of both loads are dropped from now on.
    b.manager.reset()
    b.manager.take_report(WorkerReport(failed_loads=(failed("a", "finished"),)))
    b.manager.on_request_finished("running")
    b.manager.on_request_finished("storing")
    assert b.manager.tracked_requests == 0
    stats = b.manager.take_stats()
    assert stats is not None
    assert stats.tier("host").pinned_blocks == 0


def test_a_load_that_failed_before_a_reset_is_not_held_against_the_next() -> None:
    b = bench()
    b.manager.on_new_request("q")
    for round_ in range(3):
        b.store("a")
        assert b.answers("q", keys("a")) == [Answer.HIT], round_
        b.manager.prepare_load("q", keys("a"))
        b.manager.reset()
        b.manager.take_report(WorkerReport(failed_loads=(failed("a", "q"),)))
    b.store("a")
    assert b.answers("q", keys("a")) == [Answer.HIT]
    b.manager.prepare_load("q", keys("a"))
    b.manager.complete_load("q", keys("a"))
    assert b.answers("q", keys("a")) == [Answer.HIT]


def test_a_request_id_that_is_used_again_does_not_leak_the_pins_of_its_load() -> None:
    b = bench(slots=1)
    b.store("a")
    assert b.answers("q", keys("a")) == [Answer.HIT]
    b.manager.prepare_load("q", keys("a"))
    b.manager.on_new_request("q")
    assert b.manager.prepare_store("r", keys("b")).keys == ()
    b.manager.complete_load("q", keys("a"))
    assert b.manager.prepare_store("r", keys("b")).keys == tuple(keys("b"))


def test_the_end_of_a_prefix_does_not_drive_out_its_beginning() -> None:
    b = bench(slots=4)
    b.store("a", "b")
    b.store("old")
    plan = b.manager.prepare_store("r", keys("a", "b", "c", "d"))
    assert plan.keys == tuple(keys("c", "d"))
    assert plan.evicted == tuple(keys("old"))
    b.manager.complete_store(plan.keys)
    assert b.answers("q", keys("a", "b", "c", "d")) == [Answer.HIT] * 4


def test_one_rank_of_two_that_fails_fails_the_block_whichever_is_last() -> None:
    for last in (0, 1):
        b = bench(world=2)
        b.store("a", ranks=2)
        b.manager.on_new_request("q")
        assert b.answers("q", keys("a")) == [Answer.HIT]
        b.manager.prepare_load("q", keys("a"))
        news = [(failed("a", "q", BlockStatus.CORRUPT),), ()]
        for rank in (1 - last, last):
            b.manager.take_report(WorkerReport(failed_loads=news[rank]))
        b.manager.complete_load("q", keys("a"))
        assert b.answers("q", keys("a")) == [Answer.MISS]
        b.manager.on_request_finished("q")
        b.manager.on_request_finished("storing")
        assert b.manager.tracked_requests == 0


@pytest.mark.parametrize("status", [BlockStatus.TIMED_OUT, BlockStatus.CORRUPT])
def test_requests_that_wait_for_a_load_that_fails_do_not_try_it_again(status: BlockStatus) -> None:
    # Requests that share a prefix: vLLM holds the others back while one of them loads it.
    b = bench()
    b.disk.known = dict.fromkeys(keys("a"), True)
    waiting = [f"q{number}" for number in range(50)]
    for request in waiting:
        assert b.answers(request, keys("a")) == [Answer.HIT]
    b.manager.prepare_load("q0", keys("a"))
    b.manager.take_report(WorkerReport(failed_loads=(failed("a", "q0", status),)))
    b.manager.complete_load("q0", keys("a"))
    assert {b.answers(request, keys("a"))[0] for request in waiting} == {Answer.MISS}


def test_leases_that_ran_out_are_let_go_without_any_store() -> None:
    now = [0.0]
    catalog = HostCatalog(1, clock=lambda: now[0])
    [slot] = catalog.allocate(keys("a"), 1).slots.values()
    catalog.stored([slot])
    for number in range(1000):
        now[0] = float(number)
        catalog.lease(keys("a"), f"r{number}", now[0] + 10)
        catalog.end_lease(f"r{number}")
    print("expiries kept:", len(catalog._expiries))
    assert len(catalog._expiries) <= 10
    assert catalog.audit() == ()


def churn(b: Bench, request: str, names: Sequence[str]) -> None:
    """Look up, load and finish."""
    b.manager.on_new_request(request)
    b.answers(request, keys(*names))
    b.manager.prepare_load(request, keys(*names))
    b.manager.on_request_finished(request)
    b.manager.complete_load(request, keys(*names))


def test_aborts_during_loads_leave_every_slot_free_for_others() -> None:
    b = bench(slots=4)
    b.store("a", "b", "c", "d")
    for number in range(1000):
        churn(b, f"r{number}", ["a", "b", "x"])
    b.manager.on_request_finished("storing")
    assert b.manager.tracked_requests == 0
    plan = b.manager.prepare_store("s", keys("e", "f", "g", "h"))
    assert len(plan.keys) == 4


# The worker's order of calls


def test_a_job_that_is_given_twice_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with Rig(hold=True) as rig:
        rig.worker.take_report()
        job = store_job(1, 3)
        rig.worker.prepare_store_kv(ConnectorMetadata(stores=(job,)))
        rig.worker.handle_preemptions(ConnectorMetadata())
        rig.worker.prepare_store_kv(ConnectorMetadata(stores=(job,)))
        rig.worker.handle_preemptions(ConnectorMetadata())
        rig.worker.get_finished(set())
        assert rig.worker.take_completed() == ()
        assert rig.worker.take_report() is None
        HeldGather.may_go_on.set()
        [result] = rig.results(1)
        assert result.ok
        rig.worker.get_finished(set())
        assert rig.worker.take_completed() == ()
    assert "given twice" in caplog.text


def test_stores_wait_for_the_next_step_where_no_timer_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoAlarm(Alarm):
        def set(self, seconds: float) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr("tiered_kv.connector.submission.Alarm", NoAlarm)
    with Rig() as rig:
        rig.worker.prepare_store_kv(ConnectorMetadata(stores=(store_job(1, 0),)))
        rig.worker.handle_preemptions(ConnectorMetadata())
        [result] = rig.results(1)
        assert result.ok


def test_calls_after_the_shutdown_are_answered() -> None:
    with Rig() as rig:
        rig.worker.shutdown()
        step = ConnectorMetadata(
            loads=(load_job(1, (0,), (9,)),),
            stores=(store_job(2, 1), store_job(3, 2)),
            flush=frozenset({JobId(3)}),
        )
        rig.worker.handle_preemptions(step)
        rig.worker.start_kv_transfers(step)
        rig.worker.prepare_store_kv(step)
        rig.worker.start_kv_transfers(ConnectorMetadata())
        assert rig.worker.get_finished(set()) == (set(), {"r"})
        assert sorted(result.id for result in rig.worker.take_completed()) == [1, 2, 3]
        report = rig.worker.take_report()
        assert report is not None
        assert {slot for _, slot in report.released} == {SlotRef(1, 1), SlotRef(2, 1)}
        assert rig.worker.take_report() is None
        rig.worker.get_kv_connector_stats()


# Stores of plug-ins that raise what they like


class RudeStore(MemoryStore):
    def stat(self) -> StoreStat:
        raise KeyError("no statistics here")

    def close(self) -> None:
        raise KeyError("no end here")


def test_a_store_that_raises_anything_costs_neither_the_tier_nor_the_end() -> None:
    with Rig() as rig:
        rude = RudeStore("fast", rig.journal)
        told: list[str] = []

        def opened(tier: str, store: BlockStore, epoch: bytes) -> None:
            told.append(tier)
            raise KeyError("not that one")

        opener = StoreOpener(
            lambda tier, epoch: rude,
            opened=opened,
            failed=lambda tier, why: told.append(why),
            retry_after=PATIENCE,
        )
        opener.start(["fast"], wait_seconds=PATIENCE)
        assert told == ["fast", "'not that one'"]
        assert opener.close(PATIENCE)
        watch = StoreWatch(
            StatsRecorder("rude"), gone=lambda tier, store, why: told.append(f"{tier} gone")
        )
        watch.add("rude", rude)
        assert watch.close(PATIENCE)
        assert "rude gone" not in told


# What determines a block's bytes


def test_other_settings_beside_the_same_weights_are_another_identity(tmp_path: Path) -> None:
    model, cache = tmp_path / "m", tmp_path / "weights.json"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"12345678")
    found: list[str] = []
    for theta in ("10000", "500000", "10000"):
        (model / "config.json").write_text(f'{{"rope_theta": {theta}}}')
        found.append(weights_identity(model, cache=cache))
    assert found[0] != found[1]
    assert found[0] == found[2]
