"""The transfer engine's parts alone: permits, staging, health, the loop."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from tests.unit.clocks import Clock
from tests.unit.doubles import SLOT_BYTES, DirectLoad, FastSpec, Gather, Scatter
from tiered_kv.complaints import Complaints
from tiered_kv.engine import EngineLimits, register_store_handlers
from tiered_kv.engine.breaker import BreakerRules
from tiered_kv.engine.health import HealthBoard, Verdict
from tiered_kv.engine.jobs import Active, Gate
from tiered_kv.engine.loop import LoopThread
from tiered_kv.engine.meter import STALE_SECONDS
from tiered_kv.engine.waiting import Lease, Patience, Permits, Staging
from tiered_kv.memory import HostBlockPool
from tiered_kv.registry import TransferRegistry
from tiered_kv.routing import GPU_ENDPOINT, Endpoint, Hop, HopCost, Router, assumed_cost
from tiered_kv.specs import CpuSpec, GpuSpec, LoadJob, Parts
from tiered_kv.values import JobId


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work(), 30)

    asyncio.run(bounded())


async def settle() -> None:
    """Let everything that can go on without waiting go on."""
    for _ in range(10):
        await asyncio.sleep(0)


def overdue() -> Patience:
    return Patience(deadline=0.0)


def test_permits_go_in_order_and_waiting_ends() -> None:
    async def work() -> None:
        permits = Permits(1)
        assert await permits.take(Patience())
        assert not await permits.take(overdue())
        order: list[int] = []

        async def queue(number: int) -> None:
            assert await permits.take(Patience())
            order.append(number)

        tasks = [asyncio.create_task(queue(i)) for i in range(3)]
        await settle()
        assert order == []
        for _ in range(3):
            permits.give()
            await settle()
        assert order == [0, 1, 2]
        await asyncio.gather(*tasks)
        permits.give()
        assert await permits.take(overdue())

    run(work)


def test_who_is_given_up_leaves_the_line() -> None:
    async def work() -> None:
        permits = Permits(0)
        given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(permits.take(Patience(given_up=given_up)))
        await settle()
        given_up.set_result(None)
        assert not await waiting
        permits.give()
        assert await permits.take(overdue())

    run(work)


def test_staging_serves_loads_before_stores_and_large_requests_too() -> None:
    async def work() -> None:
        pool = HostBlockPool(0, 4, SLOT_BYTES)
        staging = Staging(pool, 1)
        first = await staging.lease("fast", 3, Patience())
        assert first is not None
        served: list[str] = []
        leases: list[Lease] = []

        async def ask(name: str, tenant: str, count: int) -> None:
            lease = await staging.lease(tenant, count, Patience())
            assert lease is not None
            served.append(name)
            leases.append(lease)

        tasks = [
            asyncio.create_task(ask("store", Staging.STORES, 1)),
        ]
        await settle()
        assert served == ["store"]
        tasks += [
            asyncio.create_task(ask("second store", Staging.STORES, 1)),
            asyncio.create_task(ask("large load", "fast", 4)),
            asyncio.create_task(ask("small load", "fast", 1)),
        ]
        await settle()
        first.give_back()
        await settle()
        assert served == ["store"]  # the large load comes first, and holds up the rest
        leases.pop().give_back()
        await settle()
        assert served == ["store", "large load"]
        leases.pop().give_back()
        await settle()
        assert served == ["store", "large load", "small load", "second store"]
        await asyncio.gather(*tasks)
        for lease in leases:
            lease.give_back()
            lease.give_back()
        assert (pool.leased, pool.stray_returns) == (0, 0)
        pool.close()

    run(work)


def test_a_tenant_that_keeps_its_staging_leaves_the_others_theirs() -> None:
    async def work() -> None:
        pool = HostBlockPool(0, 4, SLOT_BYTES)
        staging = Staging(pool, 2)
        assert staging.group("fast", 8) == 1
        hung = await staging.lease("fast", 2, Patience())
        assert hung is not None
        waiting = asyncio.create_task(staging.lease("fast", 1, Patience()))
        await settle()
        other = await staging.lease("slow", 2, overdue())
        assert other is not None
        assert not waiting.done()
        hung.give_back(hung.slots[:1])
        await settle()
        more = waiting.result()
        assert more is not None
        for lease in (hung, other, more):
            lease.give_back()
        assert pool.leased == 0
        with pytest.raises(ValueError, match="beyond the quota of 2"):
            await staging.lease("fast", 3, Patience())
        pool.close()

    run(work)


def test_what_waits_for_a_tier_that_hangs_holds_up_no_other_tier() -> None:
    """F16: not where stores hold all they can, and what hangs holds its quota, either."""

    async def work() -> None:
        pool = HostBlockPool(0, 8, SLOT_BYTES)
        staging = Staging(pool, 2)
        hung = await staging.lease("fast", 2, Patience())
        stores = [await staging.lease(Staging.STORES, 2, Patience()) for _ in range(2)]
        assert pool.free_staging == 2
        given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        more = asyncio.create_task(staging.lease("fast", 2, Patience(given_up=given_up)))
        store = asyncio.create_task(staging.lease(Staging.STORES, 1, Patience()))
        await settle()
        for _ in range(3):  # each tier can always read one group
            group = await staging.lease("slow", staging.group("slow", 8), overdue())
            assert group is not None
            assert len(group.slots) == 2
            group.give_back()
        assert not more.done()
        given_up.set_result(None)
        await settle()
        assert more.result() is None
        assert not store.done(), "the rest is owed to the other tier"
        assert stores[0] is not None
        stores[0].give_back()
        await settle()
        last = store.result()
        for lease in (hung, stores[1], last):
            assert lease is not None
            lease.give_back()
        assert (pool.leased, pool.stray_returns) == (0, 0)
        pool.close()

    run(work)


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 7, 9, 64])
@pytest.mark.parametrize("tiers", [1, 2, 3, 8])
def test_an_idle_staging_pool_serves_every_group(slots: int, tiers: int) -> None:
    async def work() -> None:
        pool = HostBlockPool(0, slots, SLOT_BYTES)
        staging = Staging(pool, tiers)
        for tenant in (Staging.STORES, *map(str, range(tiers))):
            lease = await staging.lease(tenant, staging.group(tenant, 1000), overdue())
            assert lease is not None
            assert lease.slots
            lease.give_back()
        pool.close()

    run(work)


def test_a_waiter_that_leaves_lets_those_behind_it_go_on() -> None:
    async def work() -> None:
        pool = HostBlockPool(0, 2, SLOT_BYTES)
        staging = Staging(pool, 1)
        held = await staging.lease("fast", 1, Patience())
        given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        large = asyncio.create_task(staging.lease("fast", 1, Patience()))
        await settle()
        larger = asyncio.create_task(staging.lease("slow", 2, Patience(given_up=given_up)))
        small = asyncio.create_task(staging.lease("slow", 1, Patience()))
        await settle()
        assert large.done()
        assert not small.done()
        second = large.result()
        assert second is not None
        second.give_back()
        await settle()
        assert not small.done()
        given_up.set_result(None)
        await settle()
        assert larger.result() is None
        third = small.result()
        for lease in (held, third):
            assert lease is not None
            lease.give_back()
        assert pool.leased == 0
        pool.close()

    run(work)


def board(clock: Clock, limit: int = 2) -> tuple[HealthBoard, Hop, list[str]]:
    registry = TransferRegistry()
    registry.register(GpuSpec, CpuSpec, Gather, provider="doubles")
    registry.register(CpuSpec, GpuSpec, Scatter, provider="doubles")
    register_store_handlers(registry, FastSpec, "doubles")
    hops = Router(registry, {"fast": FastSpec}, assumed_cost, SLOT_BYTES).hops()
    changes: list[str] = []
    made = HealthBoard(
        hops,
        limit=limit,
        rules=BreakerRules(retry_after=5.0, longest_retry=30.0),
        changed=lambda: changes.append("changed"),
        clock=clock,
    )
    [hop] = [hop for hop in hops if hop.label == "fast->cpu"]
    return made, hop, changes


def fails(health: HealthBoard, hop: Hop, times: int, *, probe: bool = False) -> None:
    for _ in range(times):
        call = health.began(hop, probe=probe)
        health.ended(call, Verdict.FAILED, reason="EIO")


def works(health: HealthBoard, hop: Hop, *, probe: bool = False) -> None:
    health.ended(health.began(hop, probe=probe), Verdict.WORKED, 10)


def test_a_hop_opens_fails_and_is_tried_again() -> None:
    clock = Clock()
    health, hop, changes = board(clock)
    assert health.cost(hop).reason == "opening"
    assert not health.cost(hop).healthy
    health.open(hop)
    assert health.cost(hop) == assumed_cost(hop)
    fails(health, hop, 2)
    assert health.trouble(hop) is None, "one error, or two, are no reason"
    fails(health, hop, 1)
    assert health.trouble(hop) == "unhealthy: EIO"
    told = len(changes)
    clock.now += 4.9
    health.refresh()
    assert health.trouble(hop) is not None
    assert len(changes) == told
    clock.now += 0.1
    health.refresh()
    assert health.trouble(hop) is None
    assert len(changes) == told + 1
    trial = health.began(hop)
    assert health.trouble(hop) == "unhealthy: EIO", "one call decides, and nobody waits for it"
    health.ended(trial, Verdict.FAILED, reason="still gone")
    assert health.trouble(hop) == "unhealthy: still gone"
    clock.now += 10.0
    works(health, hop)
    clock.now += 50.0
    assert health.trouble(hop) is None
    assert len(changes) >= told + 5


def test_a_call_that_began_before_the_failure_does_not_heal() -> None:
    clock = Clock()
    health, hop, _ = board(clock)
    health.open(hop)
    began = health.began(hop)
    clock.now += 1
    fails(health, hop, 3)
    health.ended(began, Verdict.WORKED, 10)
    assert health.trouble(hop) == "unhealthy: EIO"


def test_where_all_calls_hang_no_more_are_tried() -> None:
    clock = Clock()
    health, hop, _ = board(clock)
    health.open(hop)
    calls = [health.began(hop), health.began(hop)]
    for call in calls:
        clock.now += 2
        health.late(call, 2.0)
    clock.now += 98
    health.refresh()
    assert health.trouble(hop) == "unhealthy: all 2 calls hang"
    assert health.ended(calls[0], Verdict.WORKED, 10) == pytest.approx(102.0)
    assert health.trouble(hop) is None
    works(health, hop)
    health.ended(calls[1], Verdict.FAILED, reason="late news")
    assert health.trouble(hop) is None
    assert health.cost(hop) == assumed_cost(hop), "what hung says nothing of the speed"


def test_probes_are_the_trials_of_a_hop_and_the_others_of_its_tier_wait_for_it() -> None:
    clock = Clock()
    health, hop, _ = board(clock)
    health.probed(hop)
    [write] = [other for other in health.hops if other.label == "cpu->fast"]
    for one in (hop, write):
        health.open(one)
    health.gone("fast", "no such directory")
    assert {health.trouble(one) for one in (hop, write)} == {"unhealthy: no such directory"}
    clock.now += 5.0
    health.refresh()
    assert all(health.trouble(one) for one in (hop, write))
    pulse = health.pulse(hop)
    assert pulse is not None
    assert pulse.due
    works(health, hop, probe=True)
    assert health.trouble(hop) is None
    assert health.trouble(write) is None
    call = health.began(write)
    assert health.trouble(write) is not None, "it is the trial"
    health.ended(call, Verdict.WORKED, 10)
    assert health.trouble(write) is None


def test_a_probe_that_hangs_takes_the_hop_out_at_once_and_brings_it_back() -> None:
    clock = Clock()
    health, hop, _ = board(clock)
    health.probed(hop)
    health.open(hop)
    call = health.began(hop, probe=True)
    health.late(call, 2.0)
    assert health.trouble(hop) == "unhealthy: a call ran for more than 2 s"
    assert health.hanging(hop) == 0
    health.ended(call, Verdict.WORKED, 10)
    pulse = health.pulse(hop)
    assert pulse is not None
    assert pulse.due, "the next one need not wait"


def test_a_new_store_begins_anew() -> None:
    clock = Clock()
    health, hop, _ = board(clock)
    health.open(hop)
    old = health.began(hop)
    health.gone("fast", "no such directory")
    health.unusable(hop, "gone")
    assert health.pulse(hop) is None
    health.open(hop)
    assert health.trouble(hop) is None
    health.ended(old, Verdict.FAILED, reason="its store is gone")
    fails(health, hop, 2)
    assert health.trouble(hop) is None


def test_speeds_are_measured_over_the_time_in_which_calls_run() -> None:
    clock = Clock()
    health, hop, changes = board(clock)
    health.open(hop)
    before = len(changes)
    for _ in range(4):
        calls = health.began(hop), health.began(hop)
        clock.now += 0.5
        for call in calls:
            health.ended(call, Verdict.WORKED, 2**20)
        clock.now += 1  # idle time does not count
    cost = health.cost(hop)
    assert cost.bytes_per_second == pytest.approx(2 * 2**21 / 1.0)
    assert cost.reason == "measured over 8 MiB"
    assert cost.latency_seconds == pytest.approx(0.5 - 2**20 / cost.bytes_per_second)
    rate = health.rate(hop)
    assert rate is not None
    assert rate.bytes_per_second == cost.bytes_per_second
    assert len(changes) > before


class Traffic:
    """A board and a router over it; every job moves 8 MiB by the chain that is chosen."""

    def __init__(self) -> None:
        self.clock = Clock()
        registry = TransferRegistry()
        registry.register(GpuSpec, CpuSpec, Gather, provider="doubles")
        registry.register(CpuSpec, GpuSpec, Scatter, provider="doubles")
        registry.register(FastSpec, GpuSpec, DirectLoad, provider="doubles")
        register_store_handlers(registry, FastSpec, "doubles")
        self.router = Router(registry, {"fast": FastSpec}, self._cost, SLOT_BYTES, 1000)
        self.board = HealthBoard(
            self.router.hops(),
            limit=2,
            rules=BreakerRules(retry_after=5.0, longest_retry=30.0),
            changed=self.router.invalidate,
            clock=self.clock,
        )
        for hop in self.router.hops():
            self.board.open(hop)

    def _cost(self, hop: Hop) -> HopCost:
        return self.board.cost(hop)

    def job(self, **speeds: float) -> str:
        self.board.refresh()
        chain = self.router.chain(Endpoint(FastSpec, "fast"), GPU_ENDPOINT)
        for hop in chain.hops:
            call = self.board.began(hop)
            self.clock.now += 2**23 / speeds[hop.label.replace("->", "_")]
            self.board.ended(call, Verdict.WORKED, 2**23)
        return chain.label

    def jobs(self, count: int, **speeds: float) -> str:
        """D for each job that went directly, h for each that went through the host."""
        return "".join("D" if self.job(**speeds) == "fast->gpu" else "h" for _ in range(count))


def test_each_chain_is_measured_and_the_faster_one_taken() -> None:
    direct_wins = {"fast_gpu": 3e9, "fast_cpu": 2e9, "cpu_gpu": 9e9}
    host_wins = {"fast_gpu": 1e9, "fast_cpu": 2e9, "cpu_gpu": 9e9}
    assert Traffic().jobs(6, **direct_wins) == "DhDDDD"
    traffic = Traffic()
    assert traffic.jobs(6, **host_wins) == "Dhhhhh"
    report = traffic.router.report(Endpoint(FastSpec, "fast"), GPU_ENDPOINT)
    assert report.chosen is not None
    assert [cost.reason for cost in report.chosen.costs] == ["measured over 40 MiB"] * 2
    [(other, why)] = report.rejected
    assert [cost.bytes_per_second for cost in other.costs] == [pytest.approx(1e9)]
    assert why.startswith("slower by ")


def test_a_chain_that_lost_long_ago_is_tried_again() -> None:
    traffic = Traffic()
    host_wins = {"fast_gpu": 1e9, "fast_cpu": 2e9, "cpu_gpu": 9e9}
    assert traffic.jobs(4, **host_wins) == "Dhhh"
    traffic.clock.now += STALE_SECONDS / 2
    assert traffic.jobs(4, **host_wins) == "hhhh"
    traffic.clock.now += STALE_SECONDS / 2
    # Traffic through the host kept its own measurement; the direct one is forgotten.
    assert traffic.jobs(4, **host_wins) == "Dhhh"
    traffic.clock.now += STALE_SECONDS / 2
    assert traffic.jobs(2, **host_wins) == "hh"
    traffic.clock.now += STALE_SECONDS / 2
    direct_wins = {"fast_gpu": 3e9, "fast_cpu": 2e9, "cpu_gpu": 9e9}
    assert traffic.jobs(4, **direct_wins) == "DDDD"  # it has become faster, and that shows


def test_a_call_that_runs_keeps_its_measurement() -> None:
    clock = Clock()
    health, hop, _ = board(clock)
    health.open(hop)
    call = health.began(hop)
    clock.now += 1
    health.ended(call, Verdict.WORKED, 2**21)
    call = health.began(hop)
    clock.now += STALE_SECONDS
    health.refresh()
    assert health.cost(hop).reason == "measured over 2 MiB"
    health.ended(call, Verdict.WORKED, 2**21)
    clock.now += STALE_SECONDS - 1
    health.refresh()
    assert health.cost(hop).reason == "measured over 4 MiB"
    clock.now += 1
    health.refresh()
    assert health.cost(hop) == assumed_cost(hop)


def test_a_gate_lets_one_side_win() -> None:
    active = Active(LoadJob(JobId(1), "r", (), Parts(()), GpuSpec(())))
    gate = Gate(active)
    assert gate.commit()
    assert not gate.close()
    other = Gate(active)
    assert other.close()
    assert not other.commit()
    poisoned = Gate(active)
    active.given_up = True
    assert not poisoned.commit()
    assert poisoned.close()
    assert not gate.commit(), "its job was given up meanwhile"
    assert not gate.close(), "what the first yes allowed may be going on"


def test_complaints_come_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    complaints = Complaints(logging.getLogger("tests"), clock)
    for _ in range(10):
        complaints.about("fast->cpu", KeyError("x"), "nothing")
    complaints.about("fast->cpu", IndexError("x"), "nothing")
    clock.now += 61
    complaints.about("fast->cpu", KeyError("x"), "nothing")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert "10 times since" in messages[2]


def test_a_loop_that_was_stopped_takes_no_more_calls(caplog: pytest.LogCaptureFixture) -> None:
    loop = LoopThread("test-loop")
    assert loop.call(lambda: 1 / 0)
    assert loop.stop(10)
    assert loop.stop(0)
    assert not loop.call(print)
    assert [r.levelno for r in caplog.records] == [logging.ERROR]


def test_a_call_keeps_the_lock_of_the_interpreter() -> None:
    loop = LoopThread("test-loop")
    turns = 0
    over = threading.Event()

    def want_the_lock() -> None:
        nonlocal turns
        while not over.is_set():
            turns += 1
            time.sleep(0)  # lets go of it, and wants it back

    other = threading.Thread(target=want_the_lock, daemon=True)
    other.start()
    answered: list[int] = []
    lost = calls = 0
    interval = sys.getswitchinterval()
    try:
        for number in range(2000):
            sys.setswitchinterval(60)  # nobody is made to let go of it
            before = turns
            loop.call(answered.append, number)
            lost += turns - before
            calls += 1
            sys.setswitchinterval(interval)
            if not number % 8:
                time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
        over.set()
        other.join(10)
    done = threading.Event()
    loop.call(done.set)
    assert done.wait(10)
    assert loop.stop(10)
    print(f"{calls} calls, beside a thread that had {turns} turns")
    assert answered == list(range(calls))
    assert turns > 100
    assert not lost, f"the lock was lost {lost} times"


def test_a_call_that_a_signal_interrupts_silences_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = LoopThread("test-loop")
    interrupted = 0

    def interrupt(fd: int, value: int) -> None:
        nonlocal interrupted
        interrupted += 1
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tiered_kv.engine.loop._eventfd_write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.call(print)
    done = threading.Event()
    loop.call(done.set)
    came = done.wait(10)
    print(f"{interrupted} calls were interrupted; the next one came: {came}")
    assert came
    assert loop.stop(10)


def test_each_call_wakes_the_loop() -> None:
    """Nothing else does: whoever calls waits until it was answered before the next one."""
    loop = LoopThread("test-loop")
    count = 3000
    answered: list[int] = []

    def send() -> None:
        for number in range(count):
            done = threading.Event()
            assert loop.call(done.set)
            if not done.wait(20):
                return
            answered.append(number)

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert loop.stop(10)
    print(f"{len(answered)} calls were answered")
    assert len(answered) == len(threads) * count


def test_calls_from_many_threads_all_come() -> None:
    loop = LoopThread("test-loop")
    came: list[tuple[int, int]] = []
    count = 500

    def send(thread: int) -> None:
        for number in range(count):
            assert loop.call(came.append, (thread, number))
            if not number % 10:
                time.sleep(0)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    done = threading.Event()
    loop.call(done.set)
    assert done.wait(10)
    assert loop.stop(10)
    print(f"{len(came)} calls came")
    for sender in range(len(threads)):
        assert [number for who, number in came if who == sender] == list(range(count))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"load_deadline": 0}, "above 0 seconds"),
        ({"write_behind_share": 1.5}, "not in 0..1"),
        ({"threads_per_tier": 0}, "at least 1"),
    ],
)
def test_limits_are_checked(values: dict[str, float], message: str) -> None:
    given = {"load_deadline": 1.0, "store_deadline": 1.0, "store_queue_bytes": 1, **values}
    with pytest.raises(ValueError, match=message):
        EngineLimits(**given)  # type: ignore[arg-type]
