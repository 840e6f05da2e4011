"""Two chains for one pair, directly and through the host: which is taken, and what happens when it
fails in the middle of a job."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.unit.doubles import (
    BLOCK_BYTES,
    PATIENCE,
    FastSpec,
    SlowSpec,
    content,
    fast,
    key,
    slow,
)
from tests.unit.engine_rig import Rig
from tiered_kv.contracts import DeviceStaging
from tiered_kv.errors import DeadlineExceeded, NoSpace, TierError, UnsupportedError
from tiered_kv.memory import KVCaches
from tiered_kv.routing import GPU_ENDPOINT, Endpoint, Hop, HopCost
from tiered_kv.specs import JobResult, LoadJob, LoadStoreSpec
from tiered_kv.stats import HopStats
from tiered_kv.values import BlockKey, BlockStatus, CacheGeometry, ChecksumKind, JobId

OK = BlockStatus.OK
DEADLINE = 2.0
"""Of loads and stores where calls hang: half of it passes before they are given up."""

DIRECT, READ, COPY = ("fast", "gpu", "fast"), ("fast", "cpu", "fast"), ("cpu", "gpu", "cpu")
DIRECT_STORE, GATHER = ("gpu", "fast", "fast"), ("gpu", "cpu", "cpu")
WRITE = ("cpu", "fast", "fast")


class Breaks:
    """Makes a hop fail from its n-th call on."""

    def __init__(self, hop: str, after: int = 0, error: Exception | None = None) -> None:
        self.hop = hop
        self.after = after
        self.error = error or TierError("no direct path any more", tier="fast")
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, hop: str) -> None:
        with self._lock:
            self.calls[hop] += 1
            broken = hop == self.hop and self.calls[hop] > self.after
        if broken:
            raise self.error


def hops(rig: Rig) -> dict[tuple[str, str, str], int]:
    """Blocks that each hop moved."""
    found: dict[tuple[str, str, str], HopStats] = dict(rig.snapshot().hops())
    return {hop: stats.blocks for hop, stats in found.items() if stats.blocks}


def load(rig: Rig, job: int, count: int) -> LoadJob:
    return rig.load(job, {fast(*range(count)): range(count)})


def prefer_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain through the host costs less."""
    monkeypatch.setattr(
        "tiered_kv.engine.health.assumed_cost",
        lambda hop: HopCost(1e6 if hop.direct else 1e9, 0.0, True, "assumed"),
    )


# ---------------------------------------------------------------------------------------- loads


@pytest.mark.parametrize("working", [0, 2, 5])
@pytest.mark.parametrize("group", [1, 3])
def test_a_load_whose_direct_chain_breaks_ends_well_by_the_host(working: int, group: int) -> None:
    with Rig(direct=True, group_blocks=group, threads=1) as rig:
        rig.fast.fill(range(12))
        breaks = Breaks("fast->gpu", after=working)
        rig.cache.trouble = breaks
        [result] = rig.run(load(rig, 1, 12))
        assert result.ok
        assert rig.cache.blocks == {i: content(i) for i in range(12)}
        assert result.copied_bytes == 12 * BLOCK_BYTES
        moved = hops(rig)
        direct = min(working * group, 12)
        print(f"{direct} blocks went directly, {12 - direct} through the host")
        expected = {DIRECT: direct, READ: 12 - direct, COPY: 12 - direct}
        assert moved == {hop: blocks for hop, blocks in expected.items() if blocks}
        if direct < 12:
            assert breaks.calls["fast->gpu"] == working + 1  # the others did not even try
            reason = "fast->gpu: unhealthy: no direct path any more"
            assert rig.engine.health()["fast"] == (True, reason)
        [again] = rig.run(load(rig, 2, 12))
        assert again.ok


def test_the_cheaper_chain_serves_again_when_it_works_again() -> None:
    with Rig(direct=True, retry_after=0.01) as rig:
        rig.fast.fill(range(4))
        rig.cache.trouble = Breaks("fast->gpu")
        [result] = rig.run(load(rig, 1, 4))
        assert result.ok
        assert DIRECT not in hops(rig)
        rig.cache.trouble = lambda hop: None
        for job in range(2, 1000):
            [result] = rig.run(load(rig, job, 4))
            assert result.ok
            if DIRECT in hops(rig):
                break
        # One call was the trial, and while it ran the others went through the host.
        before = hops(rig)[DIRECT]
        rig.run(load(rig, 1000, 4))
        assert hops(rig)[DIRECT] == before + 4
        assert rig.engine.health()["fast"] == (True, "healthy")


@pytest.mark.parametrize(
    "fault", [BlockStatus.TIER_ERROR, BlockStatus.TIMED_OUT, BlockStatus.NO_SPACE]
)
def test_only_blocks_that_nothing_is_known_of_go_the_other_way(fault: BlockStatus) -> None:
    with Rig(direct=True, group_blocks=8) as rig:
        rig.fast.fill(range(6))
        told = [OK, fault, BlockStatus.MISSING, BlockStatus.CORRUPT, BlockStatus.CANCELLED, fault]
        rig.cache.direct_answers = {
            key(i): status for i, status in enumerate(told) if status is not OK
        }
        read: list[BlockKey] = []
        rig.fast.trouble = lambda method, keys: read.extend(keys if method == "read" else ())
        [result] = rig.run(load(rig, 1, 6))
        assert list(result.statuses) == [OK if status is fault else status for status in told]
        assert read == [key(1), key(5)]
        assert rig.cache.blocks == {i: content(i) for i in (0, 1, 5)}
        assert hops(rig) == {DIRECT: 1, READ: 2, COPY: 2}
        assert result.copied_bytes == 3 * BLOCK_BYTES


@pytest.mark.parametrize(
    "error",
    [NoSpace("no staging"), DeadlineExceeded("slow"), OSError(5, "not translated")],
)
def test_whatever_a_direct_handler_raises_the_host_serves(error: Exception) -> None:
    with Rig(direct=True, threads=1) as rig:
        rig.fast.fill(range(3))
        rig.cache.trouble = Breaks("fast->gpu", error=error)
        [result] = rig.run(load(rig, 1, 3))
        assert result.ok
        assert hops(rig) == {READ: 3, COPY: 3}


def test_what_hangs_before_it_commits_is_given_up_and_comes_through_the_host() -> None:
    with Rig(direct=True, load_deadline=DEADLINE, threads=2, staging_slots=16) as rig:
        rig.fast.fill(range(8))
        rig.cache.direct.shut()
        [result] = rig.run(load(rig, 1, 8))
        assert result.ok
        assert hops(rig) == {READ: 8, COPY: 8}
        begun = [entry for entry in rig.journal.entries() if entry.startswith("fast->gpu begins")]
        print(f"{len(begun)} calls hang, {result.copied_bytes} bytes came through the host")
        # Blocks that waited for their turn went at once, and calls that hang cost no thread of
        # the way through the host.
        assert begun == ["fast->gpu begins key-000000", "fast->gpu begins key-000001"]
        assert rig.cache.committed == []
        assert not rig.engine.drain(0)  # the calls that hang are not forgotten
        for i in range(8):
            rig.cache.blocks[i] = b"new owner"
        rig.cache.direct.open()
        assert rig.engine.drain(PATIENCE)
        assert rig.cache.committed == [False, False]
        assert rig.cache.blocks == dict.fromkeys(range(8), b"new owner")


def test_a_call_that_has_committed_is_awaited_and_its_blocks_go_no_other_way() -> None:
    with Rig(direct=True, load_deadline=DEADLINE, group_blocks=4) as rig:
        rig.fast.fill(range(4))
        rig.cache.landing.shut()
        rig.engine.submit(load(rig, 1, 4))
        rig.journal.wait_for("fast->gpu.copy begins")
        assert rig.engine.wait([JobId(1)], DEADLINE) == {JobId(1)}
        assert "more than" in rig.engine.health()["fast"][1]
        rig.cache.landing.open()
        [result] = rig.results(JobId(1))
        assert result.ok
        assert rig.cache.committed == [True]
        assert hops(rig) == {DIRECT: 4}
        assert not [entry for entry in rig.journal.entries() if entry.startswith("fast.read")]


def test_each_chain_is_tried_once() -> None:
    def trouble(method: str, keys: Sequence[BlockKey]) -> None:
        if method == "read":
            read.append(method)
            raise OSError(5, "not translated")

    read: list[str] = []
    with Rig(direct=True, threads=1, faults=100) as rig:  # they stay in use
        rig.fast.fill(range(3))
        breaks = Breaks("fast->gpu", error=ZeroDivisionError("neither"))
        rig.cache.trouble = breaks
        rig.fast.trouble = trouble
        [result] = rig.run(load(rig, 1, 3))
        assert set(result.statuses) == {BlockStatus.TIER_ERROR}
        assert (breaks.calls["fast->gpu"], len(read)) == (3, 3)
        assert not rig.cache.blocks


def test_a_load_that_is_given_up_goes_no_other_way() -> None:
    with Rig(direct=True, group_blocks=4) as rig:
        rig.fast.fill(range(4))
        rig.cache.direct.shut()
        rig.engine.submit(load(rig, 1, 4))
        rig.journal.wait_for("fast->gpu begins key-000000")
        rig.engine.poison([JobId(1)])
        [result] = rig.results(JobId(1))
        assert set(result.statuses) == {BlockStatus.CANCELLED}
        rig.cache.direct.open()
        assert rig.engine.drain(PATIENCE)
        assert not rig.cache.blocks
        assert not hops(rig)


def test_the_direct_chain_takes_over_where_reading_to_the_host_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trouble(method: str, keys: Sequence[BlockKey]) -> None:
        if method == "read" and key(3) in keys:
            raise TierError("the file is gone", tier="fast")

    prefer_the_host(monkeypatch)
    with Rig(direct=True, group_blocks=2, threads=1) as rig:
        rig.fast.fill(range(8))
        rig.fast.trouble = trouble
        [result] = rig.run(load(rig, 1, 8))
        assert result.ok
        assert hops(rig)[READ] == hops(rig)[COPY] >= 2
        assert hops(rig)[DIRECT] == 8 - hops(rig)[READ]
        assert rig.cache.blocks == {i: content(i) for i in range(8)}


def test_the_direct_chain_takes_over_where_the_copy_from_the_host_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefer_the_host(monkeypatch)
    with Rig(direct=True, threads=1) as rig:
        rig.fast.fill(range(6))
        rig.cache.trouble = Breaks("cpu->gpu", after=2)
        [result] = rig.run(load(rig, 1, 6))
        assert result.ok
        assert hops(rig)[COPY] == 2
        assert hops(rig)[DIRECT] == 4


def test_blocks_of_other_parts_stay_where_they_are() -> None:
    with Rig(direct=True, group_blocks=2) as rig:
        rig.fast.fill([0, 1])
        rig.slow.fill([2, 3])
        rig.cache.trouble = Breaks("fast->gpu")
        source = {
            fast(0, 1): [0, 1],
            slow(2, 3): [2, 3],
            rig.fill_slots([4]): [4],
        }
        [result] = rig.run(rig.load(1, source))
        assert result.ok
        assert hops(rig) == {READ: 2, ("slow", "cpu", "slow"): 2, COPY: 5}


# --------------------------------------------------------------------- stores without a cpu tier


def store(rig: Rig, job: int, count: int, *, slow: bool = False) -> JobResult:
    specs = (FastSpec, SlowSpec) if slow else (FastSpec,)
    [result] = rig.run(rig.store(job, range(count), *specs, slots=False))
    return result


def contents(rows: dict[BlockKey, tuple[bytes, object]]) -> dict[BlockKey, bytes]:
    return {k: row[0] for k, row in rows.items()}


@pytest.mark.parametrize("working", [0, 2])
def test_a_store_whose_direct_chain_breaks_ends_well_through_staging(working: int) -> None:
    with Rig(direct=True, tier_slots=0, staging_slots=16, threads=1) as rig:
        rig.cache.trouble = Breaks("gpu->fast", after=working)
        result = store(rig, 1, 6)
        assert result.ok
        assert result.copied_bytes == 6 * BLOCK_BYTES
        assert rig.engine.drain(PATIENCE)
        assert contents(dict(rig.fast.rows)) == {key(i): content(i) for i in range(6)}
        rest = 6 - working
        expected = {DIRECT_STORE: working, GATHER: rest, WRITE: rest}
        assert hops(rig) == {hop: blocks for hop, blocks in expected.items() if blocks}


def test_a_store_that_hangs_before_it_has_gathered_is_given_up_and_awaited() -> None:
    with Rig(
        direct=True, tier_slots=0, staging_slots=16, threads=2, store_deadline=DEADLINE
    ) as rig:
        rig.cache.taking.shut()
        rig.engine.submit(rig.store(1, range(6), FastSpec, slots=False))
        for i in range(6):
            rig.journal.wait_for("fast.publish goes on", i + 1)
        assert set(rig.fast.rows) == {key(i) for i in range(6)}
        # Calls that may be gathering from the engine's blocks keep the job from its end.
        assert rig.engine.wait([JobId(1)], 0.05) == {JobId(1)}
        assert rig.cache.committed == []
        rig.cache.taking.open()
        [result] = rig.results(JobId(1))
        assert result.ok
        assert rig.cache.committed == [False, False]
        assert rig.engine.drain(PATIENCE)
        assert hops(rig) == {GATHER: 6, WRITE: 6}


def test_a_store_that_hangs_after_it_has_gathered_ends_and_goes_no_other_way() -> None:
    with Rig(
        direct=True, tier_slots=0, staging_slots=16, group_blocks=4, store_deadline=DEADLINE
    ) as rig:
        rig.cache.leaving.shut()
        result = store(rig, 1, 4)
        assert set(result.statuses) == {BlockStatus.TIMED_OUT}
        for i in range(4):  # the engine has its blocks back
            rig.cache.blocks[i] = b"new owner"
        assert not rig.engine.drain(0)
        rig.cache.leaving.open()
        assert rig.engine.drain(PATIENCE)
        assert contents(dict(rig.fast.rows)) == {key(i): content(i) for i in range(4)}
        assert hops(rig) == {DIRECT_STORE: 4}


def test_a_store_for_which_there_is_no_room_goes_no_other_way() -> None:
    with Rig(direct=True, tier_slots=0, staging_slots=16) as rig:
        rig.cache.trouble = Breaks("gpu->fast", error=NoSpace("full"))
        result = store(rig, 1, 3)
        assert set(result.statuses) == {BlockStatus.NO_SPACE}
        assert rig.engine.drain(PATIENCE)
        assert not hops(rig)


def test_a_destination_that_fails_leaves_the_other_its_result() -> None:
    with Rig(direct=True, tier_slots=1, staging_slots=0) as rig:  # only direct hops can work
        rig.cache.trouble = Breaks("gpu->fast")
        result = store(rig, 1, 3, slow=True)
        assert not result.ok
    with Rig(direct=True, tier_slots=0, staging_slots=16) as rig:
        rig.fast.trouble = _no_writes
        rig.cache.trouble = Breaks("gpu->fast")
        result = store(rig, 1, 3, slow=True)
        assert result.ok
        assert rig.engine.drain(PATIENCE)
        assert not rig.fast.rows
        assert contents(dict(rig.slow.rows)) == {key(i): content(i) for i in range(3)}
        assert rig.snapshot().hop(*DIRECT_STORE).failures["tier_error"] > 0


def _no_writes(method: str, keys: Sequence[BlockKey]) -> None:
    if method == "write":
        raise TierError("the disk is gone", tier="fast")


def test_a_store_goes_directly_where_its_gathering_to_the_host_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefer_the_host(monkeypatch)
    with Rig(direct=True, tier_slots=0, staging_slots=16, threads=1) as rig:
        rig.cache.trouble = Breaks("gpu->cpu", after=1)
        result = store(rig, 1, 6, slow=True)
        assert result.ok
        assert rig.engine.drain(PATIENCE)
        assert hops(rig)[GATHER] == 1
        assert hops(rig)[DIRECT_STORE] == 5
        assert set(rig.fast.rows) == {key(i) for i in range(6)}
        assert set(rig.slow.rows) == {key(0)}


def test_a_poisoned_store_goes_no_other_way() -> None:
    with Rig(direct=True, tier_slots=0, staging_slots=16, group_blocks=4) as rig:
        rig.cache.taking.shut()
        rig.engine.submit(rig.store(1, range(4), FastSpec, slots=False))
        rig.journal.wait_for("gpu->fast begins key-000000")
        rig.engine.poison([JobId(1)])
        assert rig.engine.wait([JobId(1)], 0.05) == {JobId(1)}
        rig.cache.taking.open()
        [result] = rig.results(JobId(1))
        assert set(result.statuses) == {BlockStatus.CANCELLED}
        assert rig.engine.drain(PATIENCE)
        assert not rig.fast.rows


# --------------------------------------------------------------------------- handlers and tiers


def test_a_direct_hop_that_is_not_supported_here_is_no_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tiered_kv.engine")
    with Rig(direct=True, attach=False) as rig:
        rig.cache.unsupported["fast->gpu"] = UnsupportedError("this machine has no GPU")
        rig.cache.unsupported["gpu->fast"] = UnsupportedError("this machine has no GPU")
        rig.engine.attach("fast", rig.fast)
        rig.fast.fill(range(3))
        [result] = rig.run(load(rig, 1, 3))
        assert result.ok
        why = "not in use here: this machine has no GPU"
        healthy, said = rig.engine.health()["fast"]
        assert healthy
        assert said == f"healthy; gpu->fast {why}; fast->gpu {why}"
        assert rig.snapshot().tier("fast").states == ("healthy",)
        report = rig.engine.router.report(Endpoint(FastSpec, "fast"), GPU_ENDPOINT)
        assert report.chosen is not None
        assert report.chosen.label == "fast->cpu->gpu"
        assert f"fast->gpu: not chosen, fast->gpu: {why}" in report.text
        records = [r for r in caplog.records if "this machine has no GPU" in r.getMessage()]
        assert [r.levelno for r in records] == [logging.INFO] * 2
        assert not any(r.exc_info for r in caplog.records)


def test_a_tier_that_is_reached_directly_only_is_down_without_that() -> None:
    with Rig(direct=True, through_host=False, attach=False) as rig:
        for hop in ("fast->gpu", "gpu->fast"):
            rig.cache.unsupported[hop] = UnsupportedError("no GPU")
        rig.engine.attach("fast", rig.fast)
        assert rig.engine.health()["fast"] == (False, "not in use here: no GPU")
        assert rig.snapshot().tier("fast").states == ("down",)


def test_a_handler_that_cannot_be_made_for_any_other_reason_degrades_its_tier(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Rig(direct=True, attach=False) as rig:
        rig.cache.unsupported["fast->gpu"] = ZeroDivisionError("a mistake")
        rig.engine.attach("fast", rig.fast)
        assert rig.snapshot().tier("fast").states == ("degraded",)
        assert rig.engine.health()["fast"][0]
        [record] = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert record.exc_info is not None


def test_blocks_are_captured_with_a_checksum_that_a_direct_hop_can_compute() -> None:
    with Rig(direct=True, attach=False) as rig:
        capture = rig.cache.contexts["gpu->cpu"].capture
        assert capture() is ChecksumKind.XXH3
        rig.engine.attach("slow", rig.slow)
        assert capture() is ChecksumKind.XXH3
        rig.engine.attach("fast", rig.fast)
        assert capture() is ChecksumKind.WSUM
    with Rig(direct=True, attach=False) as rig:
        for hop in ("fast->gpu", "gpu->fast"):
            rig.cache.unsupported[hop] = UnsupportedError("no GPU")
        rig.engine.attach("fast", rig.fast)
        assert rig.cache.contexts["gpu->cpu"].capture() is ChecksumKind.XXH3


def test_direct_hops_share_the_staging_on_the_device() -> None:
    asked: list[int] = []
    made: list[DeviceStaging] = []

    def stage(caches: KVCaches, geometry: CacheGeometry, bytes_: int) -> DeviceStaging:
        assert geometry.slot_bytes == 4096
        asked.append(bytes_)
        staging: DeviceStaging = object()  # type: ignore[assignment]
        made.append(staging)
        return staging

    with Rig(direct=True, device_staging=stage) as rig:
        contexts = rig.cache.contexts
        load_staging, store_staging = contexts["fast->gpu"].staging, contexts["gpu->fast"].staging
        assert [load_staging(), store_staging(), load_staging()] == [made[0], made[1], made[0]]
        assert asked == [32 * 2**20, 32 * 2**20]
        with pytest.raises(UnsupportedError, match="stages nothing"):
            contexts["cpu->gpu"].staging()


@pytest.mark.parametrize("slots", [True, False])
def test_copies_to_and_from_the_engine_are_ordered_after_what_was_given(slots: bool) -> None:
    with Rig(direct=True, staging_slots=16, tier_slots=64 if slots else 0) as rig:
        rig.fast.fill([0])
        rig.slow.fill([1])
        before_load, before_store = object(), object()
        source: dict[LoadStoreSpec, list[int]] = {fast(0): [0], slow(1): [1]}
        rig.engine.submit(rig.load(1, source), before_load)
        rig.results(JobId(1))
        assert sorted(rig.cache.fences, key=str) == sorted(
            [("fast->gpu", before_load), ("cpu->gpu", before_load)], key=str
        )
        rig.cache.fences.clear()
        rig.engine.submit(rig.store(2, [5], FastSpec, SlowSpec, slots=slots), before_store)
        rig.results(JobId(2))
        assert rig.engine.drain(PATIENCE)
        hops_used = {"gpu->cpu"} if slots else {"gpu->cpu", "gpu->fast"}
        assert set(rig.cache.fences) == {(hop, before_store) for hop in hops_used}
        rig.cache.fences.clear()
        rig.run(load(rig, 3, 1))
        assert rig.cache.fences == [("fast->gpu", None)]


def test_direct_hops_have_threads_of_their_own() -> None:
    with Rig(direct=True) as rig:
        executors = {label: context.executor for label, context in rig.cache.contexts.items()}
        assert len({id(executor) for executor in executors.values()}) == 4
        staged = {
            live.executor
            for hop, live in rig.engine._hops.items()
            if hop.tier == "fast" and not hop.direct
        }
        assert not staged.intersection(executors.values())


def test_a_hop_is_direct_that_connects_the_engine_to_a_store() -> None:
    with Rig(direct=True) as rig:
        found = {hop.label: hop.direct for hop in rig.engine.router.hops()}
    assert {label for label, direct in found.items() if direct} == {"fast->gpu", "gpu->fast"}
    between = Hop(Endpoint(FastSpec, "fast"), Endpoint(SlowSpec, "slow"), "rdma")
    assert not between.direct
