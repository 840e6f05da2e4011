"""The end while jobs are in flight: bounded, once, whoever asks; and new buffers after a pause."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.faults.exiting import LOADS, STORES_IN_FLIGHT, busy
from tests.faults.simulated import MODEL, STORES, Site
from tests.faults.test_f58_exit_with_a_hung_tier import ended
from tests.unit.test_worker import HeldGather, Rig, load_job, store_job
from tiered_kv.connector import ConnectorMetadata, submission
from tiered_kv.testing.simulation import Simulation
from tiered_kv.values import BlockStatus

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("kind", STORES)
def test_f34_an_exception_ends_the_process_with_100_stores_and_10_loads_in_flight(
    kind: str, tmp_path: Path
) -> None:
    status, said, errors = ended(tmp_path, kind, "exception")
    assert said == f"{LOADS} loads, {STORES_IN_FLIGHT} stores, hang True"
    assert status == 1
    assert "RuntimeError: something else went wrong" in errors
    assert "Fatal" not in errors


@pytest.mark.parametrize("kind", STORES)
def test_f34_a_shutdown_from_several_threads_is_one_and_ends_in_time(
    kind: str, tmp_path: Path
) -> None:
    site = Site(tmp_path, kind, host_slots=512, drain=1.0, load_deadline=60.0)
    sim = Simulation(site.assembly, replace(MODEL, ranks=1, blocks=1000), token_budget=4096)
    [worker] = sim.workers
    said = busy(sim, site)
    threads = [threading.Thread(target=worker.shutdown) for _ in range(4)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    seconds = time.monotonic() - began
    alive = sum(thread.is_alive() for thread in threads)
    worker.shutdown()
    sim.close()
    site.faults.inject()
    site.faults.let_go()
    print(f"{said}; 4 shutdowns took {seconds:.2f} s with a drain of 1 s")
    assert "hang True" in said
    assert alive == 0
    assert seconds < 10.0


# New buffers after a pause (the engine slept, and has other tensors for its KV caches)


def test_f34_after_a_pause_blocks_move_between_the_new_buffers_and_the_same_tiers() -> None:
    with Rig() as rig:
        rig.worker.handle_preemptions(ConnectorMetadata())
        rig.worker.prepare_store_kv(ConnectorMetadata(stores=(store_job(1, 0, 1),)))
        rig.worker.handle_preemptions(ConnectorMetadata())
        assert all(result.ok for result in rig.results(1))
        assert rig.worker.drain(30.0)
        stored = rig.bytes_of(0)
        old, before = dict(rig.layers), {n: t.clone() for n, t in rig.layers.items()}
        rig.layers = {name: torch.zeros_like(tensor) for name, tensor in old.items()}
        rig.worker.register_kv_caches(rig.layers)
        rig.worker.start_kv_transfers(ConnectorMetadata(loads=(load_job(2, (0,), (40,)),)))
        assert all(result.ok for result in rig.results(1))
        print(f"{len(stored)} bytes loaded into the new buffers")
        assert rig.bytes_of(40) == stored
        assert all(torch.equal(old[name], before[name]) for name in old)


def test_f34_what_runs_when_the_buffers_are_replaced_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission, "FLUSH_SECONDS", 0.2)
    with Rig(hold=True) as rig:
        job = store_job(1, 0)
        rig.worker.prepare_store_kv(ConnectorMetadata(stores=(job,)))
        rig.worker.handle_preemptions(ConnectorMetadata())
        assert HeldGather.begun.wait(30.0)
        put_off = store_job(2, 1)
        rig.worker.prepare_store_kv(ConnectorMetadata(stores=(put_off,)))
        rig.layers = {name: torch.ones_like(tensor) for name, tensor in rig.layers.items()}
        rig.worker.register_kv_caches(rig.layers)
        HeldGather.may_go_on.set()
        results = {result.id: result.statuses for result in rig.results(2)}
        assert rig.worker.drain(30.0)
        print(f"reported after the buffers were replaced: {results}")
        assert results == {
            job.id: (BlockStatus.CANCELLED,),
            put_off.id: (BlockStatus.CANCELLED,),
        }
        assert not rig.store.rows


@pytest.mark.parametrize("shape", [(64, 2, 32), (64, 128)], ids=["smaller", "one-layer"])
def test_f34_buffers_that_do_not_fit_end_loading_and_not_the_engine(
    shape: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with Rig() as rig:
        names = ("one", "two") if len(shape) == 3 else ("one",)
        rig.worker.register_kv_caches({name: torch.zeros(shape) for name in names})
        rig.worker.handle_preemptions(ConnectorMetadata())
        rig.worker.start_kv_transfers(ConnectorMetadata(loads=(load_job(1, (0,), (40,)),)))
        rig.worker.prepare_store_kv(ConnectorMetadata(stores=(store_job(2, 3),)))
        results = rig.results(2)
        assert [result.statuses for result in results] == [(BlockStatus.CANCELLED,)] * 2
        assert rig.worker.failed_requests() == {"r"}
        assert "cannot be used" in caplog.text
        report = rig.worker.take_report()
        assert report is not None
        assert len(report.released) == 1
