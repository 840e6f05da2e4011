"""The manager's side of promotions: what is ordered, what lookups answer, what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.unit.test_manager import Bench, DiskSpec, bench, keys
from tiered_kv.connector import Answer, WorkerReport
from tiered_kv.connector.promoting import HEADROOM_SHARE, KEEP_SECONDS, PROMOTION_SHARE
from tiered_kv.specs import CpuSpec, Part, PromoteJob, SlotRef
from tiered_kv.stats import LoadRate, TierCondition, TierState
from tiered_kv.values import BlockStatus

HIT, RETRY, MISS = Answer.HIT, Answer.RETRY, Answer.MISS
OK = BlockStatus.OK
SLOT = 4096
BLOCK_SECONDS = 0.06
"""Of the slow tier: a single block is near, two are far."""


class Slow:
    """A manager whose tier "ssd" is slow, and all ranks of it."""

    def __init__(
        self, *, slots: int = 16, world: int = 1, block_seconds: float = BLOCK_SECONDS
    ) -> None:
        self.bench: Bench = bench(slots=slots, world=world)
        self.manager = self.bench.manager
        self.world = world
        self.rate(block_seconds)

    def rate(self, block_seconds: float) -> None:
        load = LoadRate(SLOT / block_seconds, 0.0)
        condition = TierCondition("ssd", TierState.HEALTHY, "", load)
        self.manager.take_report(WorkerReport(conditions=((0, condition),)))

    def recompute(self, seconds: Callable[[int], float | None]) -> None:
        self.manager._promotions._recompute_seconds = seconds

    def has(self, *names: str) -> None:
        self.bench.disk.known.update(dict.fromkeys(keys(*names), True))

    def answers(self, request: str, *names: str) -> list[Answer]:
        return self.bench.answers(request, keys(*names))

    def orders(self) -> tuple[PromoteJob, ...]:
        return self.manager.take_orders().promotions

    def end(
        self,
        jobs: Sequence[PromoteJob],
        *,
        rank: int = 0,
        released: bool = True,
        **failed: BlockStatus,
    ) -> None:
        """A rank has run these; `failed` by the name of a block."""
        bad = {keys(name)[0]: status for name, status in failed.items()}
        promoted = tuple(
            (rank, job.id, tuple(bad.get(key, OK) for key in job.keys)) for job in jobs
        )
        slots = tuple((rank, slot) for job in jobs for slot in job.dst.slots)
        self.manager.take_report(
            WorkerReport(promoted=promoted, released=slots if released else ())
        )

    def load(self, request: str, *names: str) -> dict[str, str]:
        """Load blocks and say by tier what came from where."""
        plan = self.manager.prepare_load(request, keys(*names))
        self.manager.complete_load(request, keys(*names))
        return {
            name: part.spec.tier
            for part in plan.parts.parts
            for name in (names[position] for position in part.positions)
        }

    def counted(self, name: str, *labels: str) -> float:
        return self.manager.stats.snapshot().counter(name, *labels)


def named(jobs: Sequence[PromoteJob]) -> list[str]:
    return [key.decode() for job in jobs for key in job.keys]


# Near and far


def test_a_far_hit_waits_for_its_blocks_and_then_comes_from_the_host() -> None:
    slow = Slow()
    slow.has("a", "b", "c")
    assert slow.answers("r", "a", "b", "c", "d") == [RETRY, RETRY, RETRY, MISS]
    jobs = slow.orders()
    assert named(jobs) == ["a", "b", "c"]
    assert all(job.deadline == pytest.approx(2.0) for job in jobs)
    assert [part for job in jobs for part in job.src.parts] == [
        Part(DiskSpec("ssd", job.keys), (0,)) for job in jobs
    ]
    assert slow.answers("r", "a", "b", "c", "d") == [RETRY, RETRY, RETRY, MISS]
    assert slow.orders() == ()
    slow.end(jobs[:1])
    slow.end(jobs[1:], released=False)
    assert slow.answers("r", "a", "b", "c", "d") == [HIT, HIT, HIT, MISS]
    assert slow.load("r", "a", "b", "c") == dict.fromkeys("abc", "cpu")
    assert slow.counted("tier_promoted_blocks_total", "ssd") == 3
    assert slow.counted("tier_hits_total", "ssd") == 3
    assert slow.counted("tier_hits_total", "host") == 0
    slow.end(jobs[1:])
    slow.manager.on_request_finished("r")
    assert slow.manager.audit() == ()


def test_ids_of_promotions_are_used_once_and_grow() -> None:
    slow = Slow()
    slow.has(*"abcd")
    slow.answers("r", "a", "b")
    slow.answers("q", "c", "d")
    ids = [job.id for job in slow.orders()]
    assert ids == sorted(set(ids))
    assert len(ids) == 4


def test_a_near_hit_is_loaded_at_once() -> None:
    slow = Slow()
    slow.has("a", "b", "c")
    assert slow.answers("r", "a") == [HIT]
    slow.rate(BLOCK_SECONDS / 10)
    assert slow.answers("q", "a", "b", "c") == [HIT] * 3
    assert slow.orders() == ()
    assert slow.load("q", "a", "b", "c") == dict.fromkeys("abc", "ssd")


def test_a_tier_of_which_nothing_is_known_is_near() -> None:
    b = bench(slots=16)
    b.disk.known.update(dict.fromkeys(keys(*"abcdefgh"), True))
    assert b.answers("r", keys(*"abcdefgh")) == [HIT] * 8
    assert b.manager.take_orders().promotions == ()


def test_without_a_host_tier_all_are_near() -> None:
    b = bench(host=False)
    load = LoadRate(1.0, 0.0)
    condition = TierCondition("ssd", TierState.HEALTHY, "", load)
    b.manager.take_report(WorkerReport(conditions=((0, condition),)))
    b.disk.known.update(dict.fromkeys(keys("a", "b"), True))
    assert b.answers("r", keys("a", "b")) == [HIT, HIT]
    assert b.manager.take_orders().promotions == ()


def test_a_request_that_may_not_use_the_host_tier_loads_directly() -> None:
    slow = Slow()
    slow.has("a", "b")
    slow.manager.on_new_request("r", frozenset({"ssd"}))
    assert slow.answers("r", "a", "b") == [HIT, HIT]
    assert slow.orders() == ()


def test_only_what_the_engine_can_use_is_promoted() -> None:
    """Not what it has itself, nor what lies behind a gap."""
    slow = Slow()
    slow.has(*"abcde", *"gh")
    slow.manager.lookup("r", keys(*"abcdefgh"), computed=2 * 16)
    assert named(slow.orders()) == ["c", "d", "e"]
    answers = [slow.manager.answer("r", key) for key in keys(*"abcdefgh")]
    assert answers == [HIT, HIT, RETRY, RETRY, RETRY, MISS, HIT, HIT]


def test_a_hit_in_two_tiers_waits_for_the_far_one_alone() -> None:
    slow = Slow()
    slow.has("b", "c")
    slow.bench.store("a")
    slow.bench.pins.known = dict.fromkeys(keys("d"), True)
    assert slow.answers("r", *"abcd") == [HIT, RETRY, RETRY, HIT]
    slow.end(slow.orders())
    assert slow.answers("r", *"abcd") == [HIT] * 4
    assert slow.load("r", *"abcd") == {"a": "cpu", "b": "cpu", "c": "cpu", "d": "pins"}


def test_what_the_request_finds_in_the_host_makes_no_room_for_what_it_waits_for() -> None:
    slow = Slow(slots=4)
    slow.bench.store("w")
    slow.bench.store(*"xyz")
    slow.has("b", "c")
    assert slow.answers("r", *"xyz", "b", "c") == [HIT] * 3 + [RETRY] * 2
    assert named(slow.orders()) == ["b"], "x, y and z are leased to it"
    assert slow.answers("r", *"xyz", "b", "c") == [HIT] * 3 + [RETRY] * 2


# How long


def test_after_its_wait_a_request_has_what_came_and_computes_the_rest() -> None:
    slow = Slow()
    slow.has(*"abcd")
    assert slow.answers("r", *"abcd") == [RETRY] * 4
    jobs = slow.orders()
    slow.end(jobs[:1])
    slow.bench.clock.now += 1.9
    assert slow.answers("r", *"abcd") == [HIT] + [RETRY] * 3
    slow.bench.clock.now += 0.2
    assert slow.answers("r", *"abcd") == [HIT] + [MISS] * 3
    assert slow.counted("tier_unpromoted_blocks_total", "ssd", "late") == 3
    assert slow.load("r", "a") == {"a": "cpu"}
    # It waits once; what comes late is for the next request.
    slow.bench.clock.now += 0.1
    assert slow.answers("r", *"abcd") == [HIT] + [MISS] * 3
    slow.end(jobs[1:])
    assert slow.answers("q", *"abcd") == [HIT] * 4
    assert slow.orders() == ()


def test_nobody_waits_longer_than_computing_takes() -> None:
    slow = Slow()
    slow.recompute(lambda tokens: tokens / 100)
    slow.has(*"abcd")
    assert slow.answers("r", *"abcd") == [RETRY] * 4
    assert {round(job.deadline, 3) for job in slow.orders()} == {4 * 16 / 100}
    slow.bench.clock.now += 0.65
    assert slow.answers("r", *"abcd") == [MISS] * 4


def test_what_would_not_come_in_time_is_computed_at_once() -> None:
    """The tier's line counts: what is ahead of a block takes its time as well."""
    slow = Slow(block_seconds=0.5)
    slow.has(*"abcdefgh")
    assert slow.answers("r", *"ab") == [RETRY] * 2
    assert slow.answers("q", *"cd") == [RETRY] * 2
    assert slow.answers("s", *"ef") == [MISS] * 2
    assert named(slow.orders()) == ["a", "b", "c", "d"]
    assert slow.counted("tier_unpromoted_blocks_total", "ssd", "slow") == 2


def test_whose_blocks_are_on_their_way_waits_for_them_however_little_time_is_left() -> None:
    slow = Slow(block_seconds=0.5)
    slow.has(*"abcd")
    assert slow.answers("r", *"abc") == [RETRY] * 3
    jobs = slow.orders()
    slow.end(jobs[:1])
    slow.bench.clock.now += 1.5
    assert slow.answers("r", *"abc") == [HIT, RETRY, RETRY]
    assert slow.answers("q", *"abcd") == [HIT, RETRY, RETRY, RETRY]
    slow.end(jobs[1:])
    assert slow.answers("r", *"abc") == [HIT] * 3
    assert slow.counted("tier_unpromoted_blocks_total", "ssd", "slow") == 0


def test_jobs_are_so_small_that_what_comes_is_heard_of_soon() -> None:
    slow = Slow(block_seconds=0.02)
    slow.has(*"abcdefgh")
    assert slow.answers("r", *"abcdefgh") == [RETRY] * 8
    assert [len(job.keys) for job in slow.orders()] == [5, 3]


# Once per block


def test_a_block_is_read_once_however_many_requests_want_it() -> None:
    slow = Slow(world=2)
    slow.has("a", "b", "c")
    for name in ("r", "q", "s"):
        assert slow.answers(name, "a", "b") == [RETRY, RETRY]
    jobs = slow.orders()
    assert named(jobs) == ["a", "b"]
    slow.manager.on_request_finished("r")
    slow.end(jobs, rank=0)
    assert slow.answers("q", "a", "b") == [RETRY, RETRY], "one rank has not read them"
    slow.end(jobs, rank=1)
    slow.end(jobs, rank=1)
    assert slow.answers("q", "a", "b") == [HIT, HIT]
    assert slow.answers("s", "a", "b") == [HIT, HIT]
    assert slow.orders() == ()
    # A hit that is near by itself waits for a block that is on its way already.
    assert slow.answers("t", "b", "c") == [HIT, HIT]


def test_a_near_hit_waits_for_a_block_that_is_on_its_way() -> None:
    slow = Slow()
    slow.has("a", "b")
    slow.answers("r", "a", "b")
    jobs = slow.orders()
    assert slow.answers("q", "b") == [RETRY]
    slow.bench.clock.now += 2.5
    assert slow.answers("q", "b") == [HIT], "it can read the block itself"
    assert slow.load("q", "b") == {"b": "ssd"}
    slow.end(jobs)


# What fails


@pytest.mark.parametrize("status", [BlockStatus.CORRUPT, BlockStatus.TIMED_OUT])
def test_a_block_that_does_not_come_on_one_rank_is_a_miss_for_all_at_once(
    status: BlockStatus,
) -> None:
    slow = Slow(world=2)
    slow.has("a", "b")
    assert slow.answers("r", "a", "b") == [RETRY, RETRY]
    assert slow.answers("q", "a", "b") == [RETRY, RETRY]
    jobs = slow.orders()
    slow.end(jobs, rank=1, a=status, released=False)
    assert slow.answers("r", "a", "b") == [MISS, HIT], "nothing counts behind it"
    assert slow.answers("q", "a", "b") == [MISS, HIT]
    assert slow.answers("new", "a") == [MISS]
    assert slow.counted("tier_unpromoted_blocks_total", "ssd", status.value) == 1
    slow.end(jobs, rank=0)
    assert slow.answers("r", "b") == [HIT]
    assert slow.manager._books.catalog is not None
    assert slow.manager._books.catalog.counts.orphaned == 1, "rank 1 may be writing to it"
    slow.end(jobs, rank=1)
    assert slow.manager._books.catalog.counts.orphaned == 0
    slow.bench.clock.now += 6
    gone = status is BlockStatus.CORRUPT
    assert slow.answers("later", "a") == [MISS if gone else HIT]
    for request in ("r", "q", "new", "later"):
        slow.manager.on_request_finished(request)
    assert slow.manager.audit() == ()


def test_another_tier_has_the_block_that_did_not_come() -> None:
    slow = Slow()
    slow.has("a", "b")
    slow.bench.pins.known = dict.fromkeys(keys("a"), True)
    slow.answers("r", "a", "b")
    slow.end(slow.orders(), a=BlockStatus.TIER_ERROR)
    assert slow.answers("r", "a", "b") == [HIT, HIT]
    assert slow.load("r", "a", "b") == {"a": "pins", "b": "cpu"}


# Room


def test_promotions_take_no_more_than_their_share() -> None:
    slow = Slow(slots=8, block_seconds=0.11)
    slow.has(*"abcdefgh")
    most = int(8 * PROMOTION_SHARE)
    assert slow.answers("r", *"abc") == [RETRY] * 3
    assert slow.answers("q", *"de") == [RETRY] * 2, "it waits for slots"
    jobs = slow.orders()
    assert named(jobs) == ["a", "b", "c"]
    slow.end(jobs)
    assert slow.answers("q", *"de") == [RETRY] * 2, "what came is kept for its first load"
    assert slow.orders() == ()
    assert slow.answers("r", *"abc") == [HIT] * 3
    slow.load("r", *"abc")
    assert slow.answers("q", *"de") == [RETRY] * 2
    assert named(slow.orders()) == ["d", "e"]
    # A hit that they can never hold is loaded from its tier.
    slow.has(*"stuvwxyz")
    assert slow.answers("large", *"stuvw") == [HIT] * (most + 1)
    assert slow.counted("tier_unpromoted_blocks_total", "ssd", "large") == most + 1


def test_what_was_brought_is_kept_until_its_first_load_or_for_a_while() -> None:
    slow = Slow(slots=4)
    slow.has("a", "b")
    slow.answers("r", "a", "b")
    slow.end(slow.orders())
    slow.manager.on_request_finished("r")
    slow.bench.store("w", "x")
    plan = slow.manager.prepare_store("s", keys("y", "z"))
    assert plan.evicted == tuple(keys("x", "w")), "no block that nobody has used"
    slow.manager.take_report(
        WorkerReport(released=tuple((0, slot) for slot in _slots(plan.targets.first)))
    )
    slow.manager.complete_store(plan.keys)
    assert slow.answers("q", "a", "b") == [HIT, HIT]
    slow.load("q", "a")
    slow.manager.on_request_finished("q")
    assert slow.manager.prepare_store("s2", keys("u", "v")).evicted == tuple(keys("z", "y"))
    slow.bench.clock.now += KEEP_SECONDS
    assert slow.manager.prepare_store("s3", keys("t")).evicted == tuple(keys("b"))


def test_stores_leave_slots_for_promotions_where_a_tier_is_slow() -> None:
    slow = Slow(slots=8)
    plan = slow.manager.prepare_store("s", keys(*"stuvwxyz"))
    headroom = int(8 * HEADROOM_SHARE)
    assert len(plan.keys) == 8 - headroom
    slow.has("a", "b")
    assert slow.answers("r", "a", "b") == [RETRY, RETRY]
    assert named(slow.orders()) == ["a", "b"]
    slow.manager.complete_store(plan.keys)
    assert slow.manager.prepare_store("s", keys("q")).keys == (), "all wait to be written behind"
    slow.manager.take_report(
        WorkerReport(released=tuple((0, slot) for slot in _slots(plan.targets.first)))
    )
    assert slow.manager.prepare_store("s", keys("q")).keys == tuple(keys("q"))
    slow.rate(1e-6)
    assert slow.manager._promotions.store_room() is None, "nothing is worth a promotion"


def _slots(spec: CpuSpec | None) -> tuple[SlotRef, ...]:
    assert spec is not None
    return spec.slots


# The end


def test_a_reset_forgets_promotions_and_their_slots_come_back() -> None:
    slow = Slow(slots=8, world=2)
    slow.has(*"abcd")
    slow.answers("r", "a", "b")
    jobs = slow.orders()
    slow.answers("q", "c", "d")
    slow.manager.reset()
    assert slow.orders() == (), "of what no rank has heard of nothing is left"
    catalog = slow.manager._books.catalog
    assert catalog is not None
    assert (catalog.counts.orphaned, catalog.counts.free) == (2, 6)
    for rank in range(2):
        slow.end(jobs, rank=rank)
    assert catalog.counts.free == 8
    assert catalog.audit() == ()
    slow.manager.on_request_finished("r")
    slow.manager.on_request_finished("q")
    assert slow.manager.audit() == ()
