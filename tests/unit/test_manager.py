from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest

from tiered_kv.connector import Answer, Handshake, Manager, ManagerLimits, TierView, WorkerReport
from tiered_kv.connector.messages import FailedBlock
from tiered_kv.connector.requests import allowed_tiers
from tiered_kv.contracts import BlockStore, EvictionPolicy, PolicyContext
from tiered_kv.errors import ConfigError, IdentityError, TierError
from tiered_kv.index import Mirror
from tiered_kv.placement import BUILT_IN
from tiered_kv.placement.lru import LruPolicy
from tiered_kv.specs import CpuSpec, KeySpec, Part, SlotRef
from tiered_kv.stats import DropReason, TierCondition, TierState
from tiered_kv.values import (
    BlockKey,
    BlockStatus,
    CacheGeometry,
    Fingerprint,
    GroupGeometry,
    Medium,
)

FINGERPRINT = Fingerprint.of({"model": "m", "dtype": "bf16"})


class DiskSpec(KeySpec):
    medium = Medium("disk")


class PinsSpec(KeySpec):
    medium = Medium("pins")


@dataclass
class MirrorDouble:
    """A mirror whose content the test sets."""

    known: dict[BlockKey, bool | None] = field(default_factory=dict)
    state: str = "ready"
    closed: list[float] = field(default_factory=list)
    """How long each `close` was willing to wait."""
    hangs: bool = False
    version: object = 0

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool | None]:
        return [self.known.get(key, False) for key in keys]

    def forget(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self.known.pop(key, None)

    def close(self, timeout: float) -> bool:
        self.closed.append(timeout)
        return not self.hangs


@dataclass
class Mirrors:
    """Makes the mirrors of one tier, one for each epoch."""

    made: dict[bytes, MirrorDouble] = field(default_factory=dict)

    def __call__(self, geometry: CacheGeometry, epoch: bytes) -> MirrorDouble:
        assert epoch not in self.made, "an epoch is used once"
        self.made[epoch] = MirrorDouble()
        return self.made[epoch]

    @property
    def last(self) -> MirrorDouble:
        return list(self.made.values())[-1]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    manager: Manager
    disks: Mirrors
    all_pins: Mirrors
    clock: Clock

    @property
    def disk(self) -> MirrorDouble:
        """The mirror in use."""
        return self.disks.last

    @property
    def pins(self) -> MirrorDouble:
        """The mirror in use."""
        return self.all_pins.last

    def answers(self, request: str, keys: Sequence[BlockKey], computed: int = 0) -> list[Answer]:
        self.manager.lookup(request, keys, computed)
        return [self.manager.answer(request, key) for key in keys]

    def store(self, *names: str, ranks: int = 1) -> tuple[SlotRef, ...]:
        """Store blocks in the host tier, first hop and write-behind done."""
        request = f"storing {names[0]}"
        plan = self.manager.prepare_store(request, keys(*names))
        assert plan.keys == tuple(keys(*names))
        assert plan.targets.first is not None
        slots = plan.targets.first.slots
        released = tuple((rank, slot) for rank in range(ranks) for slot in slots)
        self.manager.take_report(WorkerReport(released=released))
        self.manager.complete_store(plan.keys)
        self.manager.on_request_finished(request)
        return slots


class AdmitsNone(LruPolicy[BlockKey]):
    """Nothing is worth another block's place."""

    def admits(self, key: BlockKey, victim: BlockKey) -> bool:
        return False


def keys(*names: str) -> list[BlockKey]:
    return [BlockKey(name.encode()) for name in names]


def handshake(rank: int = 0, world: int = 1, slots: int = 4, **changed: int) -> Handshake:
    group = GroupGeometry(0, changed.get("block_bytes", 4096), 1, 16)
    fingerprint = FINGERPRINT
    if "model" in changed:
        fingerprint = Fingerprint.of({"model": "other", "dtype": "bf16"})
    return Handshake(fingerprint, CacheGeometry((group,), rank, world), slots)


def bench(
    *,
    host: bool = True,
    slots: int = 4,
    world: int = 1,
    min_uses: int = 1,
    on_reset: Literal["leave", "keep", "erase"] = "leave",
    policy: Callable[[PolicyContext], EvictionPolicy[BlockKey]] = BUILT_IN["lru"].make,
) -> Bench:
    disks, pins, clock = Mirrors(), Mirrors(), Clock()
    manager = Manager(
        fingerprint=FINGERPRINT,
        host_tier="host" if host else None,
        host_write=host,
        tiers=[
            TierView("ssd", DiskSpec, write=True, mirror=disks),
            TierView("pins", PinsSpec, write=False, mirror=pins),
        ],
        limits=ManagerLimits(lookup_wait=0.05, retry_backoff=5.0),
        world_size=world,
        min_uses=min_uses,
        on_reset=on_reset,
        policy=policy,
        clock=clock,
    )
    manager.attach([handshake(rank, world, slots if host else 0) for rank in range(world)])
    return Bench(manager, disks, pins, clock)


def test_nothing_is_found_before_the_ranks_reported() -> None:
    disk = MirrorDouble({keys("a")[0]: True})
    manager = Manager(
        fingerprint=FINGERPRINT,
        host_tier="host",
        host_write=True,
        tiers=[TierView("ssd", DiskSpec, write=True, mirror=lambda *_: disk)],
        limits=ManagerLimits(0.05, 5.0),
        world_size=1,
    )
    manager.lookup("r", keys("a"), 0)
    assert manager.answer("r", keys("a")[0]) is Answer.MISS
    assert manager.prepare_store("r", keys("a")).keys == ()


def test_halves_or_ranks_that_disagree_are_refused() -> None:
    def attach(*handshakes: Handshake) -> None:
        Manager(
            fingerprint=FINGERPRINT,
            host_tier=None,
            host_write=False,
            tiers=[],
            limits=ManagerLimits(0.05, 5.0),
            world_size=len(handshakes),
        ).attach(handshakes)

    attach(handshake(0, 2), handshake(1, 2))
    with pytest.raises(IdentityError, match=r"model: scheduler 'm', rank 1 'other'"):
        attach(handshake(0, 2), handshake(1, 2, model=1))
    with pytest.raises(IdentityError, match="different shape"):
        attach(handshake(0, 2), handshake(1, 2, block_bytes=8192))
    with pytest.raises(IdentityError, match="4 and 5 host slots"):
        attach(handshake(0, 2), handshake(1, 2, slots=5))


def test_a_block_is_found_when_its_first_hop_is_done_on_all_ranks() -> None:
    b = bench(world=2)
    plan = b.manager.prepare_store("r", keys("a", "b"))
    assert b.answers("q", keys("a")) == [Answer.PENDING]
    b.manager.complete_store(plan.keys)
    assert b.answers("q", keys("a", "b", "c")) == [Answer.HIT, Answer.HIT, Answer.MISS]
    assert b.manager.source("q", keys("a")[0]) == "host"


def test_the_nearest_tier_answers_and_a_hint_narrows_it() -> None:
    b = bench()
    b.store("a")
    b.disk.known = dict.fromkeys(keys("a", "b"), True)
    b.pins.known = dict.fromkeys(keys("a", "b", "c"), True)
    assert b.answers("q", keys("a", "b", "c", "d")) == [Answer.HIT] * 3 + [Answer.MISS]
    assert [b.manager.source("q", k) for k in keys("a", "b", "c")] == ["host", "ssd", "pins"]
    b.manager.on_new_request("only pins", frozenset({"pins"}))
    assert b.answers("only pins", keys("a", "b")) == [Answer.HIT] * 2
    parts = b.manager.prepare_load("only pins", keys("a", "b")).parts
    assert parts.parts == (Part(PinsSpec("pins", tuple(keys("a", "b"))), (0, 1)),)


def test_a_load_names_each_block_where_it_lies_and_pins_the_host() -> None:
    b = bench(slots=2)
    slots = b.store("a", "c")
    b.disk.known = dict.fromkeys(keys("b"), True)
    assert b.answers("q", keys("a", "b", "c")) == [Answer.HIT] * 3
    parts = b.manager.prepare_load("q", keys("a", "b", "c")).parts
    assert set(parts.parts) == {
        Part(CpuSpec(slots), (0, 2)),
        Part(DiskSpec("ssd", tuple(keys("b"))), (1,)),
    }
    # Pinned slots are not given out, whoever asks.
    assert b.manager.prepare_store("r", keys("d", "e")).keys == ()
    b.manager.complete_load("q", keys("a", "b", "c"))
    plan = b.manager.prepare_store("r", keys("d", "e"))
    assert plan.keys == tuple(keys("d", "e"))
    assert set(plan.evicted) == set(keys("a", "c"))


def test_an_answer_protects_host_blocks_until_the_lease_ends() -> None:
    b = bench(slots=1)
    b.store("a")
    assert b.answers("q", keys("a")) == [Answer.HIT]
    assert b.manager.prepare_store("r", keys("b")).keys == ()
    b.manager.on_request_finished("q")
    assert b.manager.prepare_store("r", keys("b")).keys == tuple(keys("b"))


def test_a_slot_in_use_by_write_behind_is_not_given_out() -> None:
    b = bench(slots=1, world=2)
    plan = b.manager.prepare_store("r", keys("a"))
    assert plan.targets.first is not None
    [slot] = plan.targets.first.slots
    b.manager.complete_store(plan.keys)
    b.manager.take_report(WorkerReport(released=((0, slot),)))
    assert b.manager.prepare_store("s", keys("b")).keys == ()
    b.manager.take_report(WorkerReport(released=((1, slot),)))
    again = b.manager.prepare_store("s", keys("b"))
    assert again.targets.first is not None
    assert again.targets.first.slots == (SlotRef(slot.number, slot.generation + 1),)


def test_writes_go_behind_only_to_tiers_that_lack_the_block() -> None:
    b = bench()
    b.disk.known = dict.fromkeys(keys("b"), True)
    plan = b.manager.prepare_store("r", keys("a", "b", "c"))
    assert plan.keys == tuple(keys("a", "b", "c"))
    assert plan.targets.behind == (Part(DiskSpec("ssd", tuple(keys("a", "c"))), (0, 2)),)


def test_a_tier_that_is_down_drives_no_block_out_of_the_host_tier() -> None:
    """Blocks on their way to a tier below take slots whatever the host's policy thinks of them."""
    b = bench(slots=2, policy=lambda _: AdmitsNone())
    b.store("a", "b")
    down = TierCondition("ssd", TierState.DOWN, "it hangs", None)
    b.manager.take_report(WorkerReport(conditions=((0, down),)))
    plan = b.manager.prepare_store("down", keys("c"))
    assert (plan.keys, plan.evicted, plan.targets.behind) == ((), (), ())
    assert b.answers("p", keys("a", "b")) == [Answer.HIT, Answer.HIT]
    b.manager.on_request_finished("p")
    well = TierCondition("ssd", TierState.HEALTHY, "", None)
    b.manager.take_report(WorkerReport(conditions=((0, well),)))
    plan = b.manager.prepare_store("well", keys("c"))
    assert (plan.keys, len(plan.evicted)) == (tuple(keys("c")), 1)
    assert plan.targets.behind == (Part(DiskSpec("ssd", tuple(keys("c"))), (0,)),)


def test_what_the_policy_does_not_admit_is_counted_apart_from_what_finds_no_slot() -> None:
    def dropped(reason: DropReason) -> float:
        snapshot = b.manager.stats.snapshot()
        return snapshot.counter("tier_dropped_blocks_total", "host", str(reason))

    b = bench(slots=2, policy=lambda _: AdmitsNone())
    b.store("a", "b")
    down = TierCondition("ssd", TierState.DOWN, "it hangs", None)
    b.manager.take_report(WorkerReport(conditions=((0, down),)))
    plan = b.manager.prepare_store("r", keys("a", "c", "d", "e"))
    assert plan.keys == ()
    assert (dropped(DropReason.NOT_ADMITTED), dropped(DropReason.SLOTS)) == (3, 0)

    b = bench(slots=2)
    b.manager.prepare_store("first", keys("a", "b"))
    assert b.manager.prepare_store("second", keys("c", "d", "e")).keys == ()
    assert (dropped(DropReason.NOT_ADMITTED), dropped(DropReason.SLOTS)) == (0, 3)


def test_blocks_for_a_tier_that_is_down_are_offered_while_there_is_room() -> None:
    """The ranks know sooner than the manager when it works again."""
    b = bench(slots=2)
    down = TierCondition("ssd", TierState.DOWN, "it hangs", None)
    b.manager.take_report(WorkerReport(conditions=((0, down),)))
    plan = b.manager.prepare_store("r", keys("a"))
    assert plan.targets.behind == (Part(DiskSpec("ssd", tuple(keys("a"))), (0,)),)


def test_without_a_host_tier_only_what_a_store_lacks_is_stored() -> None:
    b = bench(host=False)
    b.disk.known = dict.fromkeys(keys("b"), True)
    plan = b.manager.prepare_store("r", keys("a", "b"))
    assert plan.keys == tuple(keys("a"))
    assert plan.targets.first is None
    assert b.answers("q", keys("a", "b")) == [Answer.PENDING, Answer.HIT]


def test_a_failed_store_leaves_no_trace() -> None:
    b = bench()
    plan = b.manager.prepare_store("r", keys("a", "b"))
    failed = FailedBlock(keys("a")[0], BlockStatus.CANCELLED, "r")
    b.manager.take_report(WorkerReport(failed_stores=(failed,)))
    b.manager.complete_store(plan.keys)
    assert b.answers("q", keys("a", "b")) == [Answer.MISS, Answer.MISS], "b is of no use alone"
    assert b.manager.prepare_store("r", keys("a")).keys == tuple(keys("a"))


def test_a_lost_block_is_forgotten_before_the_request_asks_again() -> None:
    b = bench()
    b.disk.known = dict.fromkeys(keys("a", "b"), True)
    assert b.answers("q", keys("a", "b")) == [Answer.HIT] * 2
    b.manager.prepare_load("q", keys("a", "b"))
    lost = FailedBlock(keys("b")[0], BlockStatus.CORRUPT, "q")
    b.manager.take_report(WorkerReport(failed_loads=(lost,)))
    b.manager.complete_load("q", keys("a", "b"))
    assert b.answers("q", keys("a", "b")) == [Answer.HIT, Answer.MISS]
    # It can be stored again at once.
    plan = b.manager.prepare_store("q", keys("b"))
    assert plan.targets.behind == (Part(DiskSpec("ssd", tuple(keys("b"))), (0,)),)


def test_blocks_of_a_tier_that_failed_are_not_asked_for_a_while() -> None:
    b = bench()
    b.disk.known = dict.fromkeys(keys("a"), True)
    assert b.answers("q", keys("a")) == [Answer.HIT]
    b.manager.prepare_load("q", keys("a"))
    slow = FailedBlock(keys("a")[0], BlockStatus.TIMED_OUT, "q")
    b.manager.take_report(WorkerReport(failed_loads=(slow,)))
    b.manager.complete_load("q", keys("a"))
    assert b.answers("q", keys("a")) == [Answer.MISS]
    assert b.answers("another", keys("a")) == [Answer.MISS]
    b.clock.now += 5.1
    assert b.answers("a third", keys("a")) == [Answer.HIT]


def test_a_request_whose_loads_keep_failing_is_computed() -> None:
    b = bench()
    b.disk.known = dict.fromkeys(keys("a"), True)
    for _ in range(2):
        assert b.answers("q", keys("a")) == [Answer.HIT]
        b.manager.prepare_load("q", keys("a"))
        slow = FailedBlock(keys("a")[0], BlockStatus.TIMED_OUT, "q")
        b.manager.take_report(WorkerReport(failed_loads=(slow,)))
        b.manager.complete_load("q", keys("a"))
        b.clock.now += 5.1
    assert b.answers("q", keys("a")) == [Answer.MISS]
    assert b.answers("another", keys("a")) == [Answer.HIT]


def test_what_is_not_known_yet_is_waited_for_a_bounded_time() -> None:
    b = bench()
    b.disk.known = dict.fromkeys(keys("a"), None)
    assert b.answers("q", keys("a")) == [Answer.RETRY]
    b.clock.now += 0.04
    assert b.answers("q", keys("a")) == [Answer.RETRY]
    b.clock.now += 0.02
    assert b.answers("q", keys("a")) == [Answer.MISS]
    # A new request asks anew.
    b.disk.known = dict.fromkeys(keys("a"), True)
    assert b.answers("other", keys("a")) == [Answer.HIT]


def test_answers_are_kept_until_the_engine_holds_more_itself() -> None:
    b = bench()
    b.disk.known = dict.fromkeys(keys("a", "b"), True)
    assert b.answers("q", keys("a", "b")) == [Answer.HIT] * 2
    b.disk.known.clear()
    assert b.answers("q", keys("a", "b")) == [Answer.HIT] * 2
    assert b.answers("q", keys("a", "b"), computed=16) == [Answer.MISS] * 2


def test_a_block_that_vanished_since_the_lookup_is_still_named() -> None:
    b = bench(host=True, slots=1)
    b.store("a")
    assert b.answers("q", keys("a")) == [Answer.HIT]
    b.manager.on_request_finished("q")
    b.manager.on_new_request("q")
    b.manager.prepare_store("r", keys("b"))
    parts = b.manager.prepare_load("q", keys("a")).parts
    assert len(parts) == 1


def test_only_blocks_computed_often_enough_are_stored() -> None:
    b = bench(min_uses=2)
    assert b.manager.prepare_store("r", keys("a", "b")).keys == ()
    assert b.manager.prepare_store("s", keys("b", "c")).keys == tuple(keys("b"))


def test_blocks_of_an_adapter_without_identity_stay_in_the_host_tier() -> None:
    b = bench()
    b.disk.known = dict.fromkeys(keys("z"), True)
    b.manager.on_new_request("lora")
    b.manager.keep_in_host("lora")
    assert b.answers("lora", keys("z")) == [Answer.MISS]
    plan = b.manager.prepare_store("lora", keys("z", "a"))
    assert plan.keys == tuple(keys("z", "a"))
    assert plan.targets.behind == ()


def test_after_a_reset_no_older_block_is_served() -> None:
    b = bench()
    b.store("a")
    b.disk.known = dict.fromkeys(keys("a", "b"), True)
    assert b.answers("q", keys("a", "b")) == [Answer.HIT] * 2
    b.manager.prepare_load("q", keys("a", "b"))
    pending = b.manager.prepare_store("r", keys("c"))
    old = b.disk
    b.manager.reset()
    assert set(old.closed) == {0.0}
    orders = b.manager.take_orders()
    assert orders.epoch is not None
    assert list(b.disks.made) == list(b.all_pins.made) == [b"", orders.epoch]
    assert orders.resets == 1
    assert not b.manager.take_orders(), "the ranks are told once"
    assert b.answers("q", keys("a", "b", "c")) == [Answer.MISS] * 3
    # Slots in flight stay out of use until their rank has released them.
    plan = b.manager.prepare_store("r", keys("e", "f", "g", "h"))
    assert plan.keys == tuple(keys("e", "f", "g"))
    assert [part.spec.tier for part in plan.targets.behind] == ["ssd"]
    b.disk.known = dict.fromkeys(keys("e"), True)
    assert b.answers("p", keys("e")) == [Answer.HIT], "the new epoch serves"
    assert pending.targets.first is not None
    b.manager.take_report(WorkerReport(released=((0, pending.targets.first.slots[0]),)))
    assert b.manager.prepare_store("r", keys("h")).keys == tuple(keys("h"))


def test_a_reset_that_keeps_the_stores_empties_the_host_tier_alone() -> None:
    b = bench(on_reset="keep")
    b.store("a")
    b.disk.known = dict.fromkeys(keys("b"), True)
    b.manager.reset()
    assert not b.disk.closed
    assert b.answers("q", keys("a", "b")) == [Answer.MISS, Answer.HIT]
    orders = b.manager.take_orders()
    assert orders.epoch is None
    assert orders.resets == 1


def test_what_the_ranks_say_of_jobs_from_before_a_reset_means_nothing() -> None:
    b = bench()
    b.disk.known = dict.fromkeys(keys("a"), True)
    assert b.answers("q", keys("a")) == [Answer.HIT]
    b.manager.prepare_load("q", keys("a"))
    b.manager.prepare_store("r", keys("c"))
    b.manager.reset()
    # The same request loads the same block, and another one stores the same, when they hear late.
    b.disk.known = dict.fromkeys(keys("a"), True)
    assert b.answers("q", keys("a")) == [Answer.HIT]
    b.manager.prepare_load("q", keys("a"))
    b.manager.prepare_store("r", keys("c"))
    lost, failed = BlockStatus.MISSING, BlockStatus.CANCELLED
    b.manager.take_report(
        WorkerReport(
            (FailedBlock(keys("a")[0], lost, "q", 0),),
            (FailedBlock(keys("c")[0], failed, "r", 0),),
        )
    )
    b.manager.complete_load("q", keys("a"))
    b.manager.complete_store(keys("c"))
    assert b.answers("q", keys("a", "c")) == [Answer.HIT] * 2
    # So it is when they are of now.
    b.manager.prepare_load("q", keys("a"))
    b.manager.take_report(WorkerReport((FailedBlock(keys("a")[0], lost, "q", 1),)))
    b.manager.complete_load("q", keys("a"))
    assert b.answers("q", keys("a")) == [Answer.MISS]


def test_a_reset_does_not_wait_for_a_store_that_hangs() -> None:
    """The scheduler's thread calls it. The end waits, a bounded time, for what is left."""
    opening, may_open = threading.Event(), threading.Event()
    mirrors: list[Mirror] = []

    def open_store() -> BlockStore:
        opening.set()
        assert may_open.wait(30.0)
        raise TierError("not today", tier="ssd")

    def mirror(geometry: CacheGeometry, epoch: bytes) -> Mirror:
        mirrors.append(Mirror(open_store, tier="ssd"))
        return mirrors[-1]

    manager = Manager(
        fingerprint=FINGERPRINT,
        host_tier="host",
        host_write=True,
        tiers=[TierView("ssd", DiskSpec, write=True, mirror=mirror)],
        limits=ManagerLimits(lookup_wait=0.05, retry_backoff=5.0),
        world_size=1,
    )
    manager.attach([handshake()])
    assert opening.wait(30.0)
    for _ in range(10):
        manager.reset()
    assert len(mirrors) == 4, "not one more for each reset, while they hang"
    assert manager.states() == {}
    assert all(mirror.close(timeout=0.0) is False for mirror in mirrors), "their stores still hang"
    may_open.set()
    assert all(mirror.close(timeout=30.0) for mirror in mirrors)
    manager.reset()
    assert len(mirrors) == 5
    manager.close()


def test_the_end_waits_for_all_mirrors_together() -> None:
    b = bench()
    for mirrors in (b.disks, b.all_pins):
        mirrors.last.hangs = True
    b.manager.reset()
    b.manager.close()
    b.manager.close()
    for mirror in (*b.disks.made.values(), *b.all_pins.made.values()):
        first, *_, last = mirror.closed
        assert first == 0.0
        assert 0.0 <= last <= 1.0


def test_finished_requests_are_forgotten() -> None:
    b = bench()
    b.disk.known = dict.fromkeys(keys("a"), True)
    for number in range(100):
        request = f"r{number}"
        b.manager.on_new_request(request)
        assert b.answers(request, keys("a")) == [Answer.HIT]
        b.manager.prepare_load(request, keys("a"))
        b.manager.on_request_finished(request)
        b.manager.complete_load(request, keys("a"))
    stats = b.manager.take_stats()
    assert stats is not None
    print("hits:", stats.tier("ssd").hits, "pinned:", stats.tier("host").pinned_blocks)
    assert stats.tier("ssd").hits == 100
    assert stats.tier("host").pinned_blocks == 0
    assert b.manager.tracked_requests == 0


def test_empty_batches_are_allowed() -> None:
    b = bench()
    b.manager.lookup("q", [], 0)
    assert len(b.manager.prepare_load("q", []).parts) == 0
    b.manager.complete_load("q", [])
    assert b.manager.prepare_store("q", []).keys == ()
    b.manager.complete_store([])
    b.manager.take_report(WorkerReport())


@pytest.mark.parametrize(
    ("params", "expected"),
    [(None, None), ({}, None), ({"tiered_kv": {"tiers": ["ssd"]}}, frozenset({"ssd"}))],
)
def test_hints_are_read(params: dict[str, object] | None, expected: object) -> None:
    assert allowed_tiers(params, ("host", "ssd")) == expected


@pytest.mark.parametrize("hint", ["ssd", {"tiers": "ssd"}, {"tier": ["ssd"]}, {"tiers": [1]}])
def test_malformed_hints_are_named(hint: object) -> None:
    with pytest.raises(ConfigError, match="names of tiers"):
        allowed_tiers({"tiered_kv": hint}, ("host", "ssd"))


def test_hints_with_unknown_tiers_list_the_known() -> None:
    with pytest.raises(ConfigError, match=r"nvme.*configured are host, ssd"):
        allowed_tiers({"tiered_kv": {"tiers": ["nvme"]}}, ("host", "ssd"))
