"""The transfer engine under everything at once, and its end."""

from __future__ import annotations

import random
import subprocess
import sys
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
from tiered_kv.errors import NoSpace, TierError
from tiered_kv.specs import JobResult, LoadJob, SlotRef, StoreJob
from tiered_kv.values import BlockKey, BlockStatus, JobId, JobKind

GARBAGE = b"new owner".ljust(BLOCK_BYTES)
STORED = 120
JOBS = 60


@pytest.mark.parametrize("seed", range(12))
def test_every_job_is_reported_once_and_nothing_leaks(seed: int) -> None:
    """Loads, stores, poison and errors of every kind, in any order."""
    chance = random.Random(seed)
    lock = threading.Lock()
    faults: Counter[str] = Counter()

    def trouble(method: str, keys: Sequence[BlockKey]) -> None:
        if method != "abandon":
            fail("")

    def direct_trouble(hop: str) -> None:
        if hop in {"fast->gpu", "gpu->fast"}:
            fail("direct ")

    def fail(where: str) -> None:
        with lock:
            dice = chance.random()
            kind = chance.choice(["tier", "space", "mistake"])
            if dice >= 0.05:
                return
            faults[where + kind] += 1
        if kind == "tier":
            raise TierError("the disk is gone", tier="fast")
        if kind == "space":
            raise NoSpace("full")
        raise ZeroDivisionError

    staged = seed % 2 == 1
    with Rig(
        tier_slots=4096,
        staging_slots=6,
        group_blocks=2,
        threads=2,
        share=0.01,
        store_queue_blocks=30,
        load_deadline=0.5,
        retry_after=0.001,
        direct=seed % 3 == 0,
    ) as rig:
        rig.fast.fill(range(STORED))
        rig.slow.fill(range(STORED))
        for number in range(0, STORED, 17):
            rig.fast.spoil(number)
        for store in (rig.fast, rig.slow):
            store.trouble = trouble
        rig.cache.trouble = direct_trouble
        results: list[JobResult] = []
        slots: Counter[SlotRef] = Counter()
        wanted: Counter[SlotRef] = Counter()
        poisoned: set[JobId] = set()
        jobs: dict[JobId, LoadJob | StoreJob] = {}
        begin = STORED
        for number in range(JOBS):
            with lock:
                count = chance.randrange(1, 12)
                kind = chance.randrange(4)
                poison = chance.random() < 0.3
                start = chance.randrange(STORED - 12)
            job: LoadJob | StoreJob
            if kind == 0:
                positions = list(range(count))
                job = rig.load(
                    number,
                    {
                        fast(*positions[::2]): positions[::2],
                        slow(*positions[1::2]): positions[1::2],
                    },
                )
            elif kind == 1:
                spec = FastSpec if start % 2 else SlowSpec
                job = rig.load_from(number, range(start, start + count), spec)
            else:
                blocks = range(begin, begin + count)
                begin += count
                job = rig.store(
                    number, blocks, FastSpec, SlowSpec, slots=not (staged and kind == 3)
                )
                if job.dst.first is not None:
                    wanted.update(job.dst.first.slots)
            jobs[job.id] = job
            rig.engine.submit(job)
            if poison:
                rig.engine.poison([job.id])
                poisoned.add(job.id)
                if isinstance(job, StoreJob):  # the engine gives the blocks to somebody else
                    for block in job.src.blocks:
                        rig.cache.blocks[block.block_ids[0]] = GARBAGE
            results.extend(rig.engine.finished())
            slots.update(rig.engine.released())
        assert rig.engine.drain(PATIENCE)
        results.extend(rig.engine.finished())
        slots.update(rig.engine.released())

        assert sorted(result.id for result in results) == sorted(jobs)
        assert slots == wanted
        assert set(wanted.values()) <= {1}
        assert rig.pool.leased == 0
        tally: Counter[str] = Counter()
        for result in results:
            assert len(result.statuses) == len(result.keys)
            tally.update(f"{result.kind} {status.value}" for status in result.statuses)
            if result.kind is JobKind.LOAD:
                job = jobs[result.id]
                assert isinstance(job, LoadJob)
                for status, block in zip(result.statuses, job.dst.blocks, strict=True):
                    if status is BlockStatus.OK:
                        number = block.block_ids[0]
                        assert rig.cache.blocks[number] == content(number)
        for store in (rig.fast, rig.slow):
            assert store.reserved == 0
            for number in range(STORED, begin):
                row = store.rows.get(key(number))
                assert row is None or row[0] == content(number)
        print(f"seed {seed}: {dict(tally)}, {dict(faults)}, {len(poisoned)} poisoned")
        assert tally["store ok"]
        assert faults
        for store in (rig.fast, rig.slow):
            store.trouble = lambda method, keys: None
        rig.cache.trouble = lambda hop: None
        more = range(JOBS, JOBS + 1000)  # and it serves, once nothing fails any more
        assert any(rig.run(rig.load_from(job, [1, 2], FastSpec))[0].ok for job in more)


def test_jobs_from_many_threads_end_once_each() -> None:
    with Rig(staging_slots=4, tier_slots=400) as rig:
        rig.fast.fill(range(50))
        start = threading.Barrier(8)

        def submit(worker: int) -> None:
            start.wait(PATIENCE)
            for i in range(10):
                number = worker * 10 + i
                if number % 2:
                    rig.engine.submit(rig.load_from(number, range(i, i + 5), FastSpec))
                else:
                    rig.engine.submit(rig.store(number, [100 + number], SlowSpec))

        threads = [threading.Thread(target=submit, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert rig.engine.drain(PATIENCE)
        results = rig.engine.finished()
        assert sorted(result.id for result in results) == list(range(80))
        assert all(result.ok for result in results)
        assert len(rig.slow.rows) == 40


def test_a_hung_tier_does_not_keep_the_engine_from_closing() -> None:
    rig = Rig(load_deadline=2.0, staging_slots=4)
    rig.fast.fill(range(4))
    rig.slow.fill(range(4))
    rig.fast.reading.shut()
    rig.fast.writing.shut()
    [stored] = rig.run(rig.store(1, [10], FastSpec, SlowSpec))
    assert stored.ok
    rig.journal.wait_for("fast.write begins")
    [hung] = rig.run(rig.load(2, {fast(0): [0]}))
    assert hung.statuses == (BlockStatus.TIMED_OUT,)
    [served] = rig.run(rig.load(3, {slow(0): [0]}))
    assert served.ok
    assert not rig.engine.close(0.5)
    assert not rig.engine.close(PATIENCE)  # at once, with the same answer
    leased = rig.pool.leased
    assert leased == 1
    with pytest.raises(RuntimeError, match="engine that closed"):
        rig.engine.submit(rig.load(4, {slow(0): [0]}))
    rig.fast.reading.open()
    rig.fast.writing.open()
    rig.journal.wait_for("fast.read goes on key-000000")
    assert rig.pool.leased == leased  # memory that may have been in use is never lent again
    assert rig.cache.closed == 2  # gpu -> cpu and cpu -> gpu, where nothing hangs
    rig.pool.close()


def test_closing_ends_what_runs_and_reports_it() -> None:
    rig = Rig(threads=1)
    rig.fast.fill(range(10))
    jobs: list[LoadJob | StoreJob] = [rig.load_from(i, range(10), FastSpec) for i in range(10)]
    jobs += [rig.store(100 + i, [20 + i], FastSpec) for i in range(20)]
    for job in jobs:
        rig.engine.submit(job)
    assert rig.engine.close(PATIENCE)
    results = rig.engine.finished()
    assert sorted(result.id for result in results) == sorted(job.id for job in jobs)
    assert all(result.ok for result in results)
    assert len(rig.engine.released()) == 20
    assert len(rig.fast.rows) == 30
    assert rig.cache.closed == 2
    assert rig.engine.close(PATIENCE)
    assert rig.cache.closed == 2
    names = {thread.name for thread in threading.enumerate()}
    assert "tiered-kv-engine" not in names
    rig.pool.close()


def test_closing_gives_up_loads_whose_reads_hang() -> None:
    rig = Rig()
    rig.fast.fill(range(4))
    rig.fast.reading.shut()
    rig.engine.submit(rig.load_from(1, range(4), FastSpec))
    rig.journal.wait_for("fast.read begins key-000000")
    assert not rig.engine.close(0.5)
    [result] = rig.engine.finished()
    assert set(result.statuses) == {BlockStatus.CANCELLED}
    assert not rig.cache.blocks
    rig.fast.reading.open()
    rig.pool.close()


def test_a_store_that_opens_after_the_end_is_ignored() -> None:
    rig = Rig(attach=False)
    assert rig.engine.close(PATIENCE)
    released = threading.Event()
    assert not rig.engine.attach("fast", rig.fast, released=released.set)
    assert released.wait(PATIENCE), "its opener is told that nobody needs it"
    rig.engine.detach_failed("slow", "too late")
    rig.pool.close()


def test_states_of_tiers_are_in_the_statistics() -> None:
    with Rig(attach=False) as rig:
        assert rig.snapshot().tier("fast").states == ("opening",)
        rig.engine.attach("fast", rig.fast)
        rig.engine.detach_failed("slow", "no such directory")
        assert rig.snapshot().tier("fast").states == ("healthy",)
        assert rig.snapshot().tier("slow").states == ("down",)


HANG = """
import sys
from tests.unit import doubles
from tests.unit.doubles import fast
from tests.unit.engine_rig import Rig
doubles.PATIENCE = 600.0  # longer than anybody waits for this process
rig = Rig(load_deadline=2.0)
rig.fast.fill([0])
rig.fast.reading.shut()
[result] = rig.run(rig.load(1, {fast(0): [0]}))
print(result.statuses[0].value, rig.engine.close(0.2), flush=True)
if sys.argv[1] == "error":
    raise ValueError("the end")
"""


@pytest.mark.parametrize("end", ["normal", "error"])
def test_a_process_ends_although_a_tier_hangs(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANG, end],
        capture_output=True,
        text=True,
        timeout=100.0,
        check=False,
    )
    assert done.stdout.split() == ["timed_out", "False"], done.stderr
    assert done.returncode == (1 if end == "error" else 0)
    assert ("ValueError: the end" in done.stderr) is (end == "error")
