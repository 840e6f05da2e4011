"""The worker half over the real gpu handlers and a store that tests can hold up."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import pytest
import torch

import tiered_kv_gpu
from tests.unit.device_stand_in import StandIn
from tests.unit.doubles import FastSpec, Journal, MemoryStore, key
from tiered_kv.connector import ConnectorMetadata, WorkerConnector, WorkerPlan, WorkerReport
from tiered_kv.engine import EngineLimits, register_store_handlers
from tiered_kv.errors import IdentityError, RefuseToStart, TierError, UnsupportedError
from tiered_kv.memory import KVCaches
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import (
    CpuSpec,
    GpuBlock,
    GpuSpec,
    HopResult,
    JobResult,
    LoadJob,
    Part,
    Parts,
    SlotRef,
    StoreJob,
    StoreTargets,
    TransferSpec,
)
from tiered_kv.values import BlockStatus, CacheGeometry, Fingerprint, JobId
from tiered_kv_gpu.handlers import CpuToGpuHandler, GpuToCpuHandler

ENGINE_BLOCKS = 64
PATIENCE = 30.0


class HeldGather(GpuToCpuHandler):
    """The real gather, which waits until the test lets it go on."""

    may_go_on = threading.Event()
    begun = threading.Event()

    def _store(self, spec: TransferSpec[GpuSpec, CpuSpec]) -> HopResult:
        self.begun.set()
        assert self.may_go_on.wait(PATIENCE)
        return super()._store(spec)


@dataclass
class Rig:
    """One rank with two layers of float32 caches, a host tier and the tier "fast"."""

    hold: bool = False
    opening: Exception | None = None
    retry_after: float = PATIENCE
    host_name: str | None = None
    journal: Journal = field(default_factory=Journal)

    def __post_init__(self) -> None:
        HeldGather.may_go_on.clear()
        HeldGather.begun.clear()
        registry = TransferRegistry()
        assert tiered_kv_gpu.backend.register is not None
        tiered_kv_gpu.backend.register(registry)
        if self.hold:
            registry.register(GpuSpec, CpuSpec, HeldGather, provider="test", override=True)
        register_store_handlers(registry, FastSpec, "test")
        self.store = MemoryStore("fast", self.journal)
        generator = torch.Generator().manual_seed(1)
        self.layers = {
            name: torch.rand(ENGINE_BLOCKS, 2, 64, generator=generator) for name in ("one", "two")
        }
        self.plan = WorkerPlan(
            fingerprint=Fingerprint.of({"model": "m"}),
            rank=0,
            world_size=1,
            group_layers=(("one", "two"),),
            group_tokens=(16,),
            chunk=1,
            host_bytes=32 * 4096,
            staging_bytes=8 * 4096,
            tiers={"fast": FastSpec},
            open_store=self._open,
            registry=registry,
            limits=EngineLimits(
                load_deadline=PATIENCE,
                store_deadline=PATIENCE,
                store_queue_bytes=1 << 30,
                write_behind_share=1.0,
                retry_after=self.retry_after,
            ),
            drain_seconds=5.0,
            host_tier=self.host_name,
        )
        self.worker = WorkerConnector(self.plan)
        self.worker.register_kv_caches(self.layers)

    def _open(self, tier: str, geometry: CacheGeometry, epoch: bytes) -> MemoryStore:
        if self.opening is not None:
            raise self.opening
        return self.store

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        HeldGather.may_go_on.set()
        self.worker.shutdown()

    def bytes_of(self, block: int) -> bytes:
        return b"".join(layer[block].numpy().tobytes() for layer in self.layers.values())

    def results(self, count: int) -> list[JobResult]:
        """Step the engine until this many jobs are done."""
        done: list[JobResult] = []
        for _ in range(3000):
            self.worker.get_finished(set())
            done += self.worker.take_completed()
            if len(done) >= count:
                return done
            threading.Event().wait(0.01)
        raise AssertionError(f"{len(done)} of {count} jobs ended")


def store_job(number: int, *blocks: int, behind: bool = True, request: str = "r") -> StoreJob:
    slots = CpuSpec(tuple(SlotRef(block, 1) for block in blocks))
    spec = FastSpec("fast", tuple(key(block) for block in blocks))
    parts = (Part(spec, tuple(range(len(blocks)))),) if behind else ()
    return StoreJob(
        JobId(number),
        request,
        tuple(key(block) for block in blocks),
        GpuSpec(tuple(GpuBlock(0, (block,)) for block in blocks)),
        StoreTargets(slots, parts),
    )


def load_job(number: int, source: tuple[int, ...], target: tuple[int, ...]) -> LoadJob:
    keys = tuple(key(block) for block in source)
    part = Part(FastSpec("fast", keys), tuple(range(len(keys))))
    blocks = tuple(GpuBlock(0, (block,)) for block in target)
    return LoadJob(JobId(number), "r", keys, Parts((part,)), GpuSpec(blocks))


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


def test_blocks_go_to_the_store_and_come_back_into_other_engine_blocks(rig: Rig) -> None:
    rig.worker.prepare_store_kv(ConnectorMetadata(stores=(store_job(1, 0, 1, 2),)))
    rig.worker.start_kv_transfers(ConnectorMetadata())
    [stored] = rig.results(1)
    assert stored.ok
    assert rig.worker.drain(PATIENCE)
    assert set(rig.store.rows) == {key(0), key(1), key(2)}
    rig.worker.start_kv_transfers(ConnectorMetadata(loads=(load_job(2, (2, 0), (40, 41)),)))
    [loaded] = rig.results(1)
    assert loaded.ok
    assert [rig.bytes_of(40), rig.bytes_of(41)] == [rig.bytes_of(2), rig.bytes_of(0)]
    report = rig.worker.take_report()
    assert report is not None
    assert {slot for _, slot in report.released} == {SlotRef(n, 1) for n in range(3)}
    assert rig.worker.take_report() is None


def test_a_store_waits_for_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # The timer, which stands in for a step that does not come, is not what is looked at.
    monkeypatch.setattr("tiered_kv.connector.submission.DEFERRED_STORE_SECONDS", PATIENCE)
    with Rig(hold=True) as held:
        held.worker.prepare_store_kv(ConnectorMetadata(stores=(store_job(1, 0),)))
        assert not HeldGather.begun.is_set()
        held.worker.handle_preemptions(ConnectorMetadata())
        assert HeldGather.begun.wait(PATIENCE)


def test_a_store_that_no_step_follows_is_submitted_by_a_timer(rig: Rig) -> None:
    rig.worker.prepare_store_kv(ConnectorMetadata(stores=(store_job(1, 0),)))
    rig.journal.wait_for("fast.publish goes on")
    assert rig.worker.drain(PATIENCE)
    assert set(rig.store.rows) == {key(0)}


class Fences:
    """Stands in for a device: numbers its fences, and notes which job came after which."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded_by: list[int] = []
        self.jobs: dict[int, tuple[object | None, int]] = {}
        """By job: the fence, and the thread that submitted it."""
        self._submit = rig.worker.engine.submit
        monkeypatch.setattr(KVCaches, "fence", self._fence)
        monkeypatch.setattr(rig.worker.engine, "submit", self._submitted)

    def _fence(self) -> str:
        self.recorded_by.append(threading.get_ident())
        return f"fence {len(self.recorded_by)}"

    def _submitted(self, job: LoadJob | StoreJob, after: object | None = None) -> None:
        self.jobs[job.id] = (after, threading.get_ident())
        self._submit(job, after)


def test_copies_come_after_what_the_engine_gave_its_device(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fences = Fences(rig, monkeypatch)
    me = threading.get_ident()
    rig.worker.handle_preemptions(ConnectorMetadata())
    rig.worker.start_kv_transfers(ConnectorMetadata())
    rig.worker.prepare_store_kv(ConnectorMetadata())
    assert fences.recorded_by == []  # a step without jobs costs nothing
    rig.worker.prepare_store_kv(ConnectorMetadata(stores=(store_job(1, 0), store_job(2, 1))))
    assert fences.recorded_by == [me]
    rig.worker.start_kv_transfers(ConnectorMetadata(loads=(load_job(3, (0,), (9,)),)))
    flushed = store_job(4, 2)
    step = ConnectorMetadata(stores=(flushed,), flush=frozenset({flushed.id}))
    rig.worker.handle_preemptions(step)
    rig.worker.prepare_store_kv(step)
    rig.results(4)
    assert {job: after for job, (after, _) in fences.jobs.items()} == {
        1: "fence 1",
        2: "fence 1",
        3: "fence 2",
        4: "fence 3",
    }
    assert set(fences.recorded_by) == {me}


def test_the_fence_of_a_deferred_store_is_not_the_timers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fences = Fences(rig, monkeypatch)
    rig.worker.prepare_store_kv(ConnectorMetadata(stores=(store_job(1, 0),)))
    rig.journal.wait_for("fast.publish goes on")
    after, submitter = fences.jobs[1]
    assert after == "fence 1"
    assert fences.recorded_by == [threading.get_ident()]
    assert submitter != threading.get_ident()


def test_a_device_that_failed_does_not_end_the_engine(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failed(caches: KVCaches) -> object:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(KVCaches, "fence", failed)
    rig.worker.prepare_store_kv(ConnectorMetadata(stores=(store_job(1, 0),)))
    rig.worker.start_kv_transfers(ConnectorMetadata())
    [result] = rig.results(1)
    assert result.ok
    assert "illegal memory access" in caplog.text


def test_flushed_stores_have_left_the_engine_before_the_step_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.connector.submission.FLUSH_SECONDS", PATIENCE)
    before = rig.bytes_of(3)
    job = store_job(1, 3)
    step = ConnectorMetadata(stores=(job,), flush=frozenset({job.id}))
    rig.worker.handle_preemptions(step)
    for layer in rig.layers.values():
        layer[3] = 0.0
    rig.worker.prepare_store_kv(step)
    assert len(rig.results(1)) == 1
    assert rig.worker.drain(PATIENCE)
    [(data, _)] = rig.store.rows.values()
    assert data == before
    rig.worker.start_kv_transfers(ConnectorMetadata())
    rig.worker.get_finished(set())
    assert rig.worker.take_completed() == ()


def test_a_store_that_does_not_leave_in_time_is_never_published(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Rig(hold=True) as rig:
        rig.worker.prepare_store_kv(ConnectorMetadata(stores=(store_job(1, 0),)))
        rig.worker.start_kv_transfers(ConnectorMetadata())
        assert HeldGather.begun.wait(PATIENCE)
        rig.worker.handle_preemptions(ConnectorMetadata(flush=frozenset({JobId(1)})))
        for layer in rig.layers.values():
            layer[0] = 0.0
        HeldGather.may_go_on.set()
        [result] = rig.results(1)
        assert result.statuses == (BlockStatus.CANCELLED,)
        assert rig.worker.drain(PATIENCE)
        assert rig.store.rows == {}
        report = rig.worker.take_report()
        assert report is not None
        assert [block.key for block in report.failed_stores] == [key(0)]
        assert [slot for _, slot in report.released] == [SlotRef(0, 1)]
    assert "were given up" in caplog.text


def test_a_request_is_sent_when_its_last_store_is_done() -> None:
    with Rig(hold=True) as rig:
        rig.worker.prepare_store_kv(
            ConnectorMetadata(stores=(store_job(1, 0), store_job(2, 1, request="other")))
        )
        assert rig.worker.get_finished({"r", "untracked"}) == ({"untracked"}, set())
        rig.worker.start_kv_transfers(ConnectorMetadata())
        assert rig.worker.get_finished(set()) == (set(), set())
        HeldGather.may_go_on.set()
        assert rig.worker.engine.wait([JobId(1), JobId(2)], PATIENCE) == frozenset()
        assert rig.worker.get_finished(set()) == ({"r"}, set())
        assert rig.worker.get_finished({"other"}) == ({"other"}, set())


def test_a_failed_load_names_its_blocks_and_its_request(rig: Rig) -> None:
    rig.worker.start_kv_transfers(ConnectorMetadata(loads=(load_job(1, (5, 6), (7, 8)),)))
    assert rig.worker.engine.wait([JobId(1)], PATIENCE) == frozenset()
    assert rig.worker.get_finished(set()) == (set(), {"r"})
    assert rig.worker.failed_requests() == {"r"}
    report = rig.worker.take_report()
    assert report is not None
    assert [(b.key, b.status) for b in report.failed_loads] == [
        (key(5), BlockStatus.MISSING),
        (key(6), BlockStatus.MISSING),
    ]
    assert rig.worker.failed_requests() == set()


def test_a_job_that_contradicts_itself_is_answered_and_not_raised(rig: Rig) -> None:
    job = load_job(1, (5, 6), (7, 8))
    broken = LoadJob(job.id, job.request, job.keys, job.src, job.dst.take([0]))
    rig.worker.start_kv_transfers(ConnectorMetadata(loads=(broken,)))
    [result] = rig.results(1)
    assert result.statuses == (BlockStatus.CANCELLED, BlockStatus.CANCELLED)


def test_statistics_are_handed_out_once(rig: Rig) -> None:
    rig.worker.prepare_store_kv(ConnectorMetadata(stores=(store_job(1, 0, 1),)))
    rig.worker.start_kv_transfers(ConnectorMetadata())
    rig.results(1)
    assert rig.worker.drain(PATIENCE)
    delta = rig.worker.get_kv_connector_stats()
    assert delta is not None
    assert delta.hop("cpu", "fast", "fast").blocks == 2
    assert delta.jobs()["store"].bytes == 2 * len(rig.bytes_of(0))
    rig.worker.start_kv_transfers(ConnectorMetadata(loads=(load_job(2, (0,), (9,)),)))
    rig.results(1)
    second = rig.worker.get_kv_connector_stats()
    assert second is not None
    assert "store" not in second.jobs()
    assert second.jobs()["load"].outcomes == {"ok": 1}


def test_a_tier_that_refuses_its_directory_refuses_the_start() -> None:
    with pytest.raises(IdentityError, match="not ours"):
        Rig(opening=IdentityError("not ours"))


def test_a_tier_that_cannot_be_opened_stays_out_and_the_rest_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Rig(opening=TierError("no such device", tier="fast")) as rig:
        rig.worker.prepare_store_kv(ConnectorMetadata(stores=(store_job(1, 0),)))
        rig.worker.start_kv_transfers(ConnectorMetadata())
        [result] = rig.results(1)
        assert result.ok
        assert rig.worker.drain(PATIENCE)
        healthy, reason = rig.worker.engine.health()["fast"]
        assert not healthy
        assert "no such device" in reason
    assert "tier fast cannot be opened" in caplog.text


def test_caches_of_an_unknown_layout_are_refused() -> None:
    with Rig() as rig:
        overlapping = torch.zeros(ENGINE_BLOCKS, 2, 64).transpose(1, 2)[:, ::2]
        other = WorkerConnector(rig.plan)
        with pytest.raises(UnsupportedError, match="one"):
            other.register_kv_caches({"one": overlapping, "two": rig.layers["two"]})


def test_shutdown_writes_what_waits_and_can_be_called_again(rig: Rig) -> None:
    rig.worker.prepare_store_kv(ConnectorMetadata(stores=(store_job(1, *range(20)),)))
    rig.worker.shutdown()
    print("published at shutdown:", len(rig.store.rows))
    assert len(rig.store.rows) == 20
    rig.worker.shutdown()


def test_reports_of_two_ranks_are_joined() -> None:
    one = WorkerReport(released=((0, SlotRef(1, 1)),))
    both = one.merged(WorkerReport(released=((1, SlotRef(1, 1)),)))
    assert both.released == ((0, SlotRef(1, 1)), (1, SlotRef(1, 1)))
    assert not WorkerReport()


def test_cross_layer_caches_are_one_tensor() -> None:
    with Rig() as rig:
        plan = rig.worker.plan
        other = WorkerConnector(plan)
        try:
            other.register_cross_layers_kv_cache(torch.zeros(ENGINE_BLOCKS, 512))
            assert other.handshake().geometry.groups[0].block_bytes == 512 * 4
        finally:
            other.shutdown()


def test_what_is_in_effect_is_shown_per_hop(rig: Rig) -> None:
    assert set(rig.worker.engine.modes()) >= {"gpu->cpu", "cpu->gpu", "cpu->fast", "fast->cpu"}


def test_the_host_pool_grows_once_the_manager_has_looked_at_the_machine(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tiered_kv")
    assert rig.worker._pool is not None
    assert "host pool" not in caplog.text
    for _ in range(2):
        assert rig.worker.handshake().tier_slots == 32
    assert rig.worker._pool.wait_grown(PATIENCE)
    told = [r.getMessage() for r in caplog.records if "host pool" in r.getMessage()]
    [line] = told
    for part in ("memory pageable (", "pages ", "prefault 160KiB of 160KiB"):
        assert part in line
    delta = rig.worker.get_kv_connector_stats()
    assert delta is not None
    kinds = {k: delta.gauge("host_pool_bytes", k) for k in ("mapped", "resident", "pinned")}
    assert kinds == {"mapped": 40 * 4096, "resident": 40 * 4096, "pinned": 0}


def test_every_tier_and_the_stores_have_staging(rig: Rig) -> None:
    """F16: however little is configured."""
    plan = replace(rig.worker.plan, staging_bytes=0, tiers={"a": FastSpec, "b": FastSpec})
    worker = WorkerConnector(plan)
    worker.register_kv_caches(rig.layers)
    assert worker._pool is not None
    assert worker._pool.staging_slots == 3
    worker.shutdown()


def test_the_host_pool_is_registered_with_the_device_of_the_caches(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F25: exactly the pool, while it lives."""
    device = StandIn()
    monkeypatch.setattr("tiered_kv.connector.plan.device_of", lambda _: device)
    worker = WorkerConnector(rig.worker.plan)
    worker.register_kv_caches(rig.layers)
    worker.handshake()
    pool = worker._pool
    assert pool is not None
    assert pool.wait_grown(PATIENCE)
    assert sum(device.ranges.values()) == 40 * 4096
    assert pool.pinned
    assert pool.modes()["memory"] == "pinned"
    worker.shutdown()
    assert device.ranges == {}


class HeldScatter:
    """The real scatter, which waits until the test lets it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = threading.Event()
        self.begun = 0
        real = CpuToGpuHandler._load

        def held(handler: CpuToGpuHandler, spec: TransferSpec[CpuSpec, GpuSpec]) -> HopResult:
            self.begun += 1
            assert self.may_go_on.wait(PATIENCE)
            return real(handler, spec)

        monkeypatch.setattr(CpuToGpuHandler, "_load", held)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A self-test that gives its copies up at once."""
    monkeypatch.setattr("tiered_kv.connector.proof.PROOF_SECONDS", 1.5)


@pytest.mark.usefixtures("impatient")
def test_a_self_test_never_writes_to_blocks_after_the_start(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    scatter = HeldScatter(monkeypatch)
    before = rig.bytes_of(0)
    wait = rig.worker.engine.wait

    def waited(jobs: Collection[JobId], timeout: float) -> frozenset[JobId]:
        late = wait(jobs, timeout)
        if late and scatter.begun:  # the self-test has given its load up, and waits for its end
            scatter.may_go_on.set()
        return late

    monkeypatch.setattr(rig.worker.engine, "wait", waited)
    proof = rig.worker.handshake().proof
    assert proof is not None
    assert (proof.problem, scatter.begun) == ("the load did not end within 1.5 s", 1)
    assert rig.bytes_of(0) == before
    assert rig.worker.drain(PATIENCE)
    assert rig.worker.get_finished(set()) == (set(), set())
    assert rig.worker.take_completed() == ()
    assert rig.worker.take_report() is None
    assert rig.worker.memory.leased == 0


@pytest.mark.usefixtures("impatient")
def test_a_copy_of_the_self_test_that_hangs_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.connector.proof.HANG_SECONDS", 0.2)
    scatter = HeldScatter(monkeypatch)
    with pytest.raises(RefuseToStart, match=r"rank 0: .* engine's blocks 0 to 0 .* hangs"):
        rig.worker.handshake()
    assert scatter.begun == 1
    scatter.may_go_on.set()


@pytest.mark.usefixtures("impatient")
def test_nobody_hears_of_a_self_tests_store_that_ends_late() -> None:
    with Rig(hold=True) as rig:
        before = rig.bytes_of(0)
        proof = rig.worker.handshake().proof
        assert proof is not None
        assert proof.problem == "the store did not end within 1.5 s"
        assert rig.bytes_of(0) == before
        assert rig.worker.memory.leased == 1
        HeldGather.may_go_on.set()
        assert rig.worker.drain(PATIENCE)
        assert rig.worker.get_finished(set()) == (set(), set())
        assert rig.worker.take_completed() == ()
        assert rig.worker.take_report() is None
        assert rig.worker.memory.leased == 0
