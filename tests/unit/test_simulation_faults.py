"""Wrong bytes and leaks that must not happen, provoked under a simulated engine.

Each test fails without the defence that it is named for.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import pytest

from tests.unit.simulation_rig import (
    TWO_GROUPS,
    Stage,
    load_prompt,
    store_prompt,
    tokens,
)
from tiered_kv.connector import Answer, Handshake
from tiered_kv.connector.assembly import Assembly
from tiered_kv.contracts import API_VERSION, Backend
from tiered_kv.errors import IdentityError, TierError
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import CpuSpec, GpuSpec, HopResult, TransferSpec
from tiered_kv.testing.faults import Effect, Fault, Method
from tiered_kv.testing.simulation import Phase, SimulatedModel, Simulation, Workload
from tiered_kv.values import GPU, BlockKey, CacheGeometry
from tiered_kv_gpu.handlers import CpuToGpuHandler, GpuToCpuHandler

ONE = SimulatedModel(blocks=40)
TWO_RANKS = SimulatedModel(blocks=40, ranks=2, chunk=2)
PROMPT = tokens(1, 32)

# F1: a failed load is not a success

WHICH = {"first": [0], "middle": [1], "last": [-1], "all": [0, 1, 2, 3]}


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("kind", ["fails", "is corrupt", "is gone"])
def test_f1_a_block_that_cannot_be_read_is_recomputed(which: str, kind: str) -> None:
    stage = Stage(retry_backoff=60.0)
    with Simulation(stage.assembly, TWO_RANKS) as sim:
        store_prompt(sim, PROMPT)
        keys = list(sim.blocks(PROMPT))
        bad = [keys[i] for i in WHICH[which]]
        if kind == "is corrupt":
            for key in bad:
                stage.disk.spoil(key)
        else:
            effect = Effect.BLOCK_ERROR if kind == "fails" else Effect.VANISH
            fault = Fault(method=Method.READ, effect=effect, keys=frozenset(bad))
            stage.disk.faults.inject(fault)
        request = load_prompt(sim, PROMPT)
        print(sim.counts)
        assert sim.counts.failed_loads == 1
        assert sim.counts.recomputes == 1
        assert sim.counts.failed_blocks.total() == len(bad) * 2
        # The second load brings what lies before the first bad block.
        assert sim.counts.loaded_tokens == keys.index(bad[0]) * 8
        assert request.phase is Phase.FINISHED
        assert sim.audit() == ()
    with Simulation(Stage(stores=()).assembly, TWO_RANKS) as without:
        assert load_prompt(without, PROMPT, None).output == request.output


def test_f1_one_failing_rank_of_two_fails_the_load() -> None:
    stage = Stage()
    with Simulation(stage.assembly, TWO_RANKS) as sim:
        store_prompt(sim, PROMPT)
        [key, *_] = sim.blocks(PROMPT)
        with stage.disk.lock:
            [parts] = [row for (_, name), row in stage.disk.rows.items() if name == key]
            data, checksum = parts[1]
            parts[1] = (data[::-1], checksum)
        load_prompt(sim, PROMPT)
        print(sim.counts)
        # The other rank finds its own part whole, or the row already dropped by this one.
        assert sim.counts.failed_blocks["corrupt"] == 1
        assert set(sim.counts.failed_blocks) <= {"corrupt", "missing"}
        assert sim.counts.loaded_blocks.total() == 0
        assert sim.counts.recomputes == 1
        assert sim.audit() == ()


def test_f1_a_tier_that_fails_altogether_costs_a_recompute_per_request_at_most() -> None:
    stage = Stage(retry_backoff=60.0)
    with Simulation(stage.assembly, ONE) as sim:
        store_prompt(sim, PROMPT)
        stage.disk.faults.inject(
            *(
                Fault(method=method, effect=Effect.TIER_ERROR)
                for method in (Method.RESERVE, Method.WRITE, Method.PUBLISH, Method.READ)
            )
        )
        for _ in range(3):
            load_prompt(sim, PROMPT)
            sim.forget_device_cache()
        print(sim.counts, stage.disk.faults.injected())
        assert stage.disk.faults.injected()[Method.READ, Effect.TIER_ERROR] > 0
        assert sim.counts.failed_loads == 1
        assert sim.audit() == ()


def test_blocks_that_were_recomputed_are_loaded_from_the_host_while_their_tier_is_avoided() -> None:
    stage = Stage(retry_backoff=60.0)
    with Simulation(stage.assembly, ONE) as sim:
        store_prompt(sim, PROMPT)
        sim.manager.reset()  # the host tier is empty; a new life follows
    with Simulation(stage.assembly, ONE) as sim:
        assert sim.wait_found(PROMPT)
        first = frozenset([next(iter(sim.blocks(PROMPT)))])
        stage.disk.faults.inject(Fault(method=Method.READ, effect=Effect.BLOCK_ERROR, keys=first))
        load_prompt(sim, PROMPT, None)
        assert sim.counts.failed_loads == 1
        assert sim.lookup(PROMPT, "host") == [Answer.HIT] * 8
        assert sim.lookup(PROMPT) == [Answer.HIT] * 8
        assert Answer.MISS in sim.lookup(PROMPT, "ssd")


# F5: halves that disagree on what a block is


def manager_hears(stage: Stage, model: SimulatedModel, *handshakes: Handshake) -> None:
    stage.assembly.manager(model.fingerprint, model.ranks).attach(handshakes)


def handshakes(stage: Stage, model: SimulatedModel) -> list[Handshake]:
    with Simulation(stage.assembly, model) as sim:
        return [worker.handshake() for worker in sim.workers]


def test_f5_a_worker_of_another_geometry_is_refused_at_the_handshake() -> None:
    stage = Stage(stores=())
    theirs = handshakes(stage, replace(TWO_RANKS, chunk=1))
    with pytest.raises(IdentityError, match="chunk: scheduler '2', rank 0 '1'"):
        manager_hears(stage, TWO_RANKS, *theirs)
    one, two = handshakes(stage, TWO_RANKS)
    manager_hears(stage, TWO_RANKS, one, two)
    groups = tuple(replace(g, block_bytes=g.block_bytes * 2) for g in two.geometry.groups)
    wider = replace(two, geometry=replace(two.geometry, groups=groups))
    with pytest.raises(IdentityError, match="different shape"):
        manager_hears(stage, TWO_RANKS, one, wider)


@pytest.mark.parametrize("ranks", [[0], [0, 0], [0, 1, 1]])
def test_f5_ranks_that_are_missing_or_report_twice_are_refused(ranks: list[int]) -> None:
    stage = Stage(stores=())
    both = handshakes(stage, TWO_RANKS)
    with pytest.raises(IdentityError, match="expects ranks 0 to 1 of 2"):
        manager_hears(stage, TWO_RANKS, *(both[rank] for rank in ranks))


def test_f5_a_self_test_that_brought_back_another_block_is_refused() -> None:
    # Both say that they agree; what went through the rank's copies shows that they don't.
    stage = Stage(stores=())
    [rank] = handshakes(stage, ONE)
    [group] = rank.geometry.groups
    assert rank.proof is not None
    assert [block.length for block in rank.proof.blocks] == [group.block_bytes]
    halved = (replace(group, block_bytes=group.block_bytes // 2),)
    other = replace(rank, geometry=CacheGeometry(halved, 0, 1))
    with pytest.raises(IdentityError, match=r"\(lengths \[512\]\).*expects \(lengths \[256\]\)"):
        manager_hears(stage, ONE, other)


class SwappedGather(GpuToCpuHandler):
    """Takes every block from one engine block further on."""

    def _store(self, spec: TransferSpec[GpuSpec, CpuSpec]) -> HopResult:
        moved = [
            replace(block, block_ids=tuple(i + 1 for i in block.block_ids))
            for block in spec.src.blocks
        ]
        return super()._store(replace(spec, src=GpuSpec(tuple(moved))))


class StuckScatter(CpuToGpuHandler):
    """Answers that it could not copy."""

    def _load(self, spec: TransferSpec[CpuSpec, GpuSpec]) -> HopResult:
        raise TierError("no such device", tier="cpu")


def with_handler(stage: Stage, handler: type[GpuToCpuHandler] | type[CpuToGpuHandler]) -> Assembly:
    def register(registry: TransferRegistry) -> None:
        if issubclass(handler, GpuToCpuHandler):
            registry.register(GpuSpec, CpuSpec, handler, provider="test", override=True)
        else:
            registry.register(CpuSpec, GpuSpec, handler, provider="test", override=True)

    mine = Backend("broken", GPU, API_VERSION, "Copies badly.", register=register)
    return Assembly(stage.assembly.deployment, {**stage.assembly.backends, "broken": mine})


def test_f5_copies_that_take_the_wrong_block_are_found_before_the_first_request() -> None:
    assembly = with_handler(Stage(stores=()), SwappedGather)
    with pytest.raises(IdentityError, match="self-test of rank 0 failed"):
        Simulation(assembly, ONE)


def test_f5_the_self_tests_result_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), Simulation(Stage(stores=()).assembly, TWO_GROUPS) as sim:
        assert (sim.caches(0).tensors[0].numpy() == 0xDB).all(), "the cache is put back"
        for worker in sim.workers:
            delta = worker.get_kv_connector_stats()
            assert delta is None or delta.jobs() == {}
        assert sim.audit() == ()
    said = [record.getMessage() for record in caplog.records if "self-test" in record.message]
    print(said)
    assert len(said) == 2
    assert "rank 1: blocks of 1024, 512 bytes were stored, loaded back and compared" in said[1]


def test_f5_a_self_test_that_fails_is_an_error_in_the_log_and_the_engine_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(stores=())
    with Simulation(with_handler(stage, StuckScatter), ONE) as sim:
        sim.add(PROMPT, 2)
        sim.run()
        assert sim.counts.finished == 1
    assert "self-test of rank 0: the load failed with tier_error" in caplog.text


def test_f5_a_self_test_that_hangs_ends_in_time(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(stores=())
    stage.gather.shut()
    with Simulation(stage.assembly, ONE) as sim:
        stage.gather.open()
        sim.add(PROMPT, 2)
        sim.run()
        assert sim.settle()
        assert sim.counts.finished == 1
        assert sim.lookup(PROMPT) == [Answer.HIT] * 8
    assert "self-test of rank 0: the store did not end within 2 s" in caplog.text


# F10: engine blocks that are used again before a store has read them


@pytest.mark.parametrize("end", ["finished", "preempted", "aborted"])
def test_f10_a_store_that_is_held_beyond_the_flush_publishes_nothing(end: str) -> None:
    stage = Stage()
    model = SimulatedModel(blocks=12)
    with Simulation(stage.assembly, model) as sim:
        assert sim.wait_ready()
        stage.gather.shut()
        old = sim.add(PROMPT, 1 if end == "finished" else 4, name="old")
        sim.step()
        assert sim.counts.stores == 1
        if end == "preempted":
            sim.preempt(old)
        elif end == "aborted":
            sim.abort(old)
        theirs = set(old.tables[0])
        new = sim.add(tokens(2, 36), 2, name="new", tiers=())
        while not new.computed:
            sim.step()
        reused = theirs & set(new.tables[0])
        print("blocks with a new owner:", sorted(reused))
        assert stage.gather.wait_held()
        if end != "preempted":  # that one comes before the new one
            assert len(reused) >= 4
        stage.gather.open()
        sim.run()
        assert sim.settle()
        print(sim.counts)
        assert sim.counts.unstored_blocks["cancelled"] >= 8
        assert sim.counts.flushes
        mine, published = sim.blocks(PROMPT), stage.disk.keys()
        if end != "preempted":  # that one is computed again, and then stored
            assert published.isdisjoint(mine)
            assert sim.lookup(PROMPT) == [Answer.MISS] * 8
        for key in mine.keys() & published:
            assert stage.disk.content(key) == mine[key]
        sim.forget_device_cache()
        load_prompt(sim, PROMPT, None)
        assert sim.audit() == ()


def test_f10_a_flushed_store_has_read_its_blocks_before_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiered_kv.connector.submission.FLUSH_SECONDS", 30.0)
    stage = Stage()
    with Simulation(stage.assembly, SimulatedModel(blocks=12, ranks=2)) as sim:
        assert sim.wait_ready()
        for number in range(12):
            sim.add(tokens(number, 32), 2)
        sim.run()
        assert sim.settle()
        print(sim.counts)
        assert sim.counts.flushes >= 5
        assert sim.counts.unstored_blocks.total() == 0
        compared = 0
        published = stage.disk.keys()
        for number in range(12):
            for rank in range(2):
                for key, data in sim.blocks(tokens(number, 32), rank).items():
                    if key in published:
                        compared += 1
                        assert stage.disk.content(key, rank) == data
        print("rows compared:", compared)
        assert compared >= 100


def test_f10_a_store_of_blocks_that_have_a_new_owner_already_reads_them_first() -> None:
    # A reset lets a request offer all its blocks again, in the step in which they are given away.
    with Simulation(Stage(stores=()).assembly, SimulatedModel(blocks=12)) as sim:
        request = sim.add(PROMPT, 8)
        sim.step()
        sim.step()
        sim.reset(preempt=False)
        sim.abort(request)
        new = sim.add(tokens(2, 40), 2)
        sim.step()
        assert new.computed == 40
        print(sim.counts)
        assert sim.counts.flushed_jobs in (1, 2), "that of this step, and what the reset left"
        sim.run()
        assert sim.settle()
        sim.forget_device_cache()
        load_prompt(sim, PROMPT, None)
        assert sim.counts.loaded_blocks == {"host": 8}
        assert sim.audit() == ()


# F51: a load that is late


@pytest.mark.parametrize("end", ["deadline", "abort"])
def test_f51_a_read_that_returns_late_writes_into_no_block_of_the_engine(end: str) -> None:
    stage = Stage(load_deadline=1.0 if end == "deadline" else 2.0, retry_backoff=60.0)
    model = SimulatedModel(blocks=12)
    with Simulation(stage.assembly, model) as sim:
        store_prompt(sim, PROMPT)
        stage.disk.reading.shut()
        late = sim.add(PROMPT, 1, name="late", tiers={"ssd"})
        sim.step()
        assert late.phase is Phase.LOADING
        theirs = set(late.tables[0])
        assert stage.disk.reading.wait_held()
        if end == "abort":
            sim.abort(late)
            assert sim.free_blocks == 11 - len(theirs), "not free while a copy may come"
        new = [sim.add(tokens(number, 36), 4, tiers=()) for number in (2, 3)]
        while not new[0].computed:
            sim.step()
        held = theirs & set(new[0].tables[0])
        print("blocks with a new owner while the read is held:", sorted(held))
        assert len(held) >= 4
        assert stage.disk.reading.held
        stage.disk.reading.open()
        sim.run()
        assert sim.settle()
        sim.check_device_cache()
        print(sim.counts)
        assert sim.counts.failed_blocks["timed_out"] == 8
        assert sim.counts.aborts == ({"loading": 1} if end == "abort" else {})
        assert sim.audit() == ()


def test_f51_a_last_copy_that_has_begun_is_awaited() -> None:
    stage = Stage(load_deadline=1.0)
    with Simulation(stage.assembly, SimulatedModel(blocks=12)) as sim:
        store_prompt(sim, PROMPT)
        stage.scatter.shut()
        late = sim.add(PROMPT, 1, tiers={"ssd"})
        sim.step()
        assert stage.scatter.wait_held()
        began = time.monotonic()
        sim.abort(late)
        other = sim.add(tokens(2, 36), 4, tiers=())
        while time.monotonic() < began + 1.2:  # beyond the deadline
            sim.step()
        assert sim.free_blocks == 3, "its blocks are still the copy's"
        assert other.computed == 0
        stage.scatter.open()
        sim.run()
        assert sim.settle()
        assert other.phase is Phase.FINISHED
        sim.check_device_cache()
        assert sim.audit() == ()


# F31, F52: a slot that is used again while it is being read


def test_f52_rows_that_are_written_behind_are_never_of_another_block() -> None:
    stage = Stage(host_slots=32)
    with Simulation(stage.assembly, TWO_RANKS, seed=2) as sim:
        assert sim.wait_ready()
        wanted: dict[tuple[BlockKey, int], set[bytes]] = {}
        for number in range(30):
            prompt = tokens(number % 10, 32)
            for rank in range(2):
                for key, data in sim.blocks(prompt, rank).items():
                    wanted.setdefault((key, rank), set()).add(data)
            stage.disk.writing.shut()
            request = sim.add(prompt, 2)
            sim.step()
            sim.step()
            if number % 3 == 0:
                sim.preempt(request)
            if number in (7, 17):
                sim.reset()
            if number % 2:
                stage.disk.writing.open()
            sim.step()
        stage.open()
        sim.run()
        assert sim.settle()
        rows = 0
        with stage.disk.lock:
            for (_, key), parts in stage.disk.rows.items():
                for rank, (data, _) in parts.items():
                    if (key, rank) in wanted:
                        rows += 1
                        assert data in wanted[key, rank]
        print(sim.counts, "\nrows compared:", rows)
        assert rows >= 40
        assert sim.audit() == ()


def test_f52_after_new_weights_no_older_block_is_served() -> None:
    stage = Stage()
    with Simulation(stage.assembly, TWO_GROUPS, seed=4) as sim:
        assert sim.wait_ready()
        for _ in range(4):
            sim.live(Workload(abort=0.1), 60)
            stage.disk.writing.shut()
            sim.live(Workload(), 10)
            sim.reset(new_weights=True)
            stage.disk.writing.open()
        sim.run()
        assert sim.settle()
        print(sim.counts)
        assert sim.counts.resets == 4
        assert sim.counts.loaded_blocks["host"]
        sim.check_device_cache()
        assert sim.audit() == ()


def test_f31_requests_that_share_a_prefix_load_it_once() -> None:
    stage = Stage(lookup_wait=20.0)  # nobody gives up waiting and computes it
    with Simulation(stage.assembly, ONE) as sim:
        store_prompt(sim, PROMPT)
        stage.disk.reading.shut()
        for number in range(20):
            sim.add((*PROMPT, *tokens(number, 2)), 1, tiers={"ssd"})
        for _ in range(5):
            sim.step()
        assert stage.disk.reading.wait_held()
        stage.disk.reading.open()
        sim.run()
        print(sim.counts)
        assert sim.counts.loaded_blocks == {"ssd": 8}
        assert sim.counts.device_tokens == 19 * 32
