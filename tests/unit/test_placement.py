"""The catalog of the host tier, against a naive model, and the LRU order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tiered_kv.contracts import EvictionPolicy
from tiered_kv.placement import CatalogCounts, HostCatalog, LruPolicy, SlotState
from tiered_kv.specs import SlotRef
from tiered_kv.values import BlockKey


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def k(*names: str) -> list[BlockKey]:
    return [BlockKey(name.encode()) for name in names]


def catalog(slots: int, clock: Clock | None = None) -> HostCatalog:
    return HostCatalog(slots, LruPolicy(), clock=clock or Clock())


def store(host: HostCatalog, *names: str, ranks: int = 1) -> list[SlotRef]:
    """Allocate, store and release."""
    slots = list(host.allocate(k(*names), ranks).slots.values())
    assert len(slots) == len(names)
    host.stored(slots)
    for slot in slots:
        for rank in range(ranks):
            host.release(slot, rank)
    return slots


def state_of(host: HostCatalog, names: str) -> list[SlotState | None]:
    return [host.lookup(key) for key in k(*names)]


READY, STORING = SlotState.READY, SlotState.STORING


class TestLru:
    def test_least_recently_used_goes_first(self) -> None:
        policy: EvictionPolicy[str] = LruPolicy()
        for key in "abcd":
            policy.add([key])
        policy.wanted(["a", "unknown"], 1.0)
        policy.add(["b"])
        policy.remove("c")
        policy.remove("unknown")
        assert list(policy.victims()) == ["d", "a", "b"]
        assert len(policy) == 3


class TestCatalog:
    def test_a_block_is_found_when_it_is_whole(self) -> None:
        host = HostCatalog(4)
        given = host.allocate(k("a", "b"), 2)
        assert given.slots == {b"a": SlotRef(0, 1), b"b": SlotRef(1, 1)}
        assert given.evicted == ()
        assert state_of(host, "abc") == [STORING, STORING, None]
        assert host.slot(k("a")[0]) is None
        host.stored([given.slots[k("a")[0]]])
        host.store_failed([given.slots[k("b")[0]]])
        assert state_of(host, "ab") == [READY, None]
        assert host.slot(k("a")[0]) == SlotRef(0, 1)
        assert (host.resident, host.free, host.held, host.slots) == (1, 2, 2, 4)
        for slot in given.slots.values():
            host.release(slot, 0)
        assert (host.free, host.held) == (2, 2), "one rank holds them still"
        for slot in given.slots.values():
            host.release(slot, 1)
        assert (host.free, host.held) == (3, 0)
        assert host.audit() == ()

    def test_room_is_made_from_the_oldest_and_generations_grow(self) -> None:
        host = catalog(3)
        store(host, "a", "b", "c")
        given = host.allocate(k("d"), 1)
        assert given.evicted == (b"c",), "the end of a prefix goes before its beginning"
        assert given.slots == {b"d": SlotRef(2, 2)}
        host.wanted(k("a", "b", "c"))
        host.stored(list(given.slots.values()))
        host.release(SlotRef(2, 2), 0)
        assert host.allocate(k("e"), 1).evicted == (b"b",)
        assert host.audit() == ()

    def test_what_does_not_fit_is_left_out_from_the_end(self) -> None:
        host = catalog(2)
        store(host, "a")
        given = host.allocate(k("a", "b", "c", "d", "b"), 1)
        assert list(given.slots) == [b"b"]
        assert given.evicted == (), "a block of the same call does not make room"
        assert list(host.allocate(k("x"), 1).slots) == [b"x"]
        assert host.allocate(k("y"), 1).slots == {}

    def test_empty_batches_and_no_slots(self) -> None:
        """F50."""
        for host in (catalog(0), catalog(2)):
            assert host.allocate([], 1).slots == {}
            assert host.pin([]) == ()
            host.unpin([])
            host.stored([])
            host.store_failed([])
            host.forget([])
            host.wanted([])
            host.lease([], "r", 1.0)
            host.end_lease("r")
            host.reset()
            assert host.audit() == ()
        assert catalog(0).allocate(k("a"), 1).slots == {}
        with pytest.raises(ValueError, match="at least one rank"):
            catalog(1).allocate(k("a"), 0)
        with pytest.raises(ValueError, match="-1 slots"):
            catalog(-1)

    def test_nothing_that_somebody_needs_is_evicted(self) -> None:
        """F8: pins, leases, write-behind."""
        clock = Clock()
        host = catalog(3, clock)
        pinned, leased = store(host, "pinned", "leased")
        held = host.allocate(k("held"), 2).slots[BlockKey(b"held")]
        host.stored([held])
        host.release(held, 0)
        assert host.pin(k("pinned")) == (pinned,)
        host.lease(k("leased"), "request", until=5.0)
        given = host.allocate(k("new"), 1)
        assert (given.slots, given.evicted) == ({}, ())
        host.release(held, 1)
        assert host.allocate(k("n1"), 1).evicted == (b"held",)
        clock.now = 5.0
        assert host.allocate(k("n2"), 1).slots == {b"n2": SlotRef(leased.number, 2)}
        host.unpin([pinned])
        assert host.allocate(k("n3"), 1).slots == {b"n3": SlotRef(pinned.number, 2)}
        assert host.audit() == ()

    def test_pins_are_counted(self) -> None:
        host = catalog(1)
        (slot,) = store(host, "a")
        host.pin(k("a", "a"))
        host.pin(k("a"))
        for expected in (1, 1, 0):
            host.unpin([slot])
            assert host.pinned == expected
        host.unpin([slot])
        assert (host.pinned, host.counts.strays) == (0, 1), "never negative"
        assert host.audit() == ()

    def test_pin_takes_all_or_none(self) -> None:
        host = catalog(3)
        store(host, "a")
        host.allocate(k("storing"), 1)
        for bad in (k("a", "unknown"), k("a", "storing")):
            with pytest.raises(KeyError):
                host.pin(bad)
        assert host.pinned == 0

    def test_a_bad_block_is_forgotten_while_it_is_pinned(self) -> None:
        """The key is stored anew, in another slot, before the failed load is over."""
        host = catalog(2)
        (bad,) = store(host, "a")
        host.pin(k("a"))
        host.forget(k("a", "unknown"))
        assert state_of(host, "a") == [None]
        (fresh,) = store(host, "a")
        assert fresh.number != bad.number
        assert host.pin(k("a")) == (fresh,)
        host.unpin([bad])
        assert (host.pinned, host.free) == (1, 1), "the pin of the fresh one stays"
        host.unpin([fresh])
        assert host.counts == CatalogCounts(2, 1, 0, 1, 0, 0, 0, 0, 0)

    def test_reset_keeps_slots_in_flight_out_of_use(self) -> None:
        """F52: storing, pinned and held ones; the rest is free at once."""
        clock = Clock()
        host = catalog(5, clock)
        store(host, "idle")
        (pinned,) = store(host, "pinned")
        host.pin(k("pinned"))
        held = host.allocate(k("held"), 1).slots[BlockKey(b"held")]
        host.stored([held])
        storing = host.allocate(k("storing"), 2).slots[BlockKey(b"storing")]
        host.lease(k("idle", "storing"), "request", 9.0)
        host.reset()
        assert host.lookup(BlockKey(b"idle")) is None
        counts = host.counts
        assert (counts.free, counts.orphaned, counts.resident, counts.leased) == (2, 3, 0, 0)
        given = host.allocate(k("storing", "n1", "n2"), 1)
        assert list(given.slots) == [b"storing", b"n1"]
        assert not {s.number for s in given.slots.values()} & {
            pinned.number,
            held.number,
            storing.number,
        }
        host.stored([storing])
        assert host.lookup(BlockKey(b"storing")) is STORING, "the old job's end is not the new's"
        host.unpin([pinned])
        host.release(held, 0)
        host.release(storing, 0)
        assert host.free == 2
        host.release(storing, 1)
        assert (host.free, host.counts.orphaned) == (3, 0)
        assert host.audit() == ()

    def test_stale_and_unknown_reports_change_nothing(self) -> None:
        """F55."""
        host = catalog(1)
        (slot,) = store(host, "a")
        given = host.allocate(k("b"), 2)
        before = host.counts
        for stale in (slot, SlotRef(0, 99), SlotRef(7, 1), SlotRef(-1, 1)):
            host.release(stale, 0)
            host.stored([stale])
            host.store_failed([stale])
            host.unpin([stale])
        host.release(given.slots[BlockKey(b"b")], 5)
        assert host.counts.strays == before.strays + 17
        assert state_of(host, "b") == [STORING]
        new = given.slots[BlockKey(b"b")]
        host.stored([new])
        host.stored([new])
        host.store_failed([new])
        assert state_of(host, "b") == [READY]
        assert host.counts.strays == before.strays + 19
        assert host.audit() == ()

    def test_requests_with_one_prefix_do_not_end_each_others_lease(self) -> None:
        clock = Clock()
        host = catalog(1, clock)
        store(host, "a")
        host.lease(k("a"), "one", 10.0)
        host.lease(k("a", "unknown"), "two", 5.0)
        host.end_lease("one")
        host.end_lease("one")
        host.end_lease("nobody")
        assert host.allocate(k("b"), 1).slots == {}
        host.lease(k("a"), "two", 20.0)
        host.lease(k("a"), "two", 7.0)
        clock.now = 19.0
        assert host.allocate(k("b"), 1).slots == {}, "the longest counts"
        clock.now = 20.0
        assert list(host.allocate(k("b"), 1).slots) == [b"b"]
        assert host.audit() == ()

    def test_look_up_then_abort_leaves_nothing(self) -> None:
        """F11, F12."""
        clock = Clock()
        host = catalog(8, clock)
        store(host, *"abcd")
        for i in range(10_000):
            request = f"r{i}"
            host.lease(k(*"abcd"), request, clock.now + 1)
            if i % 3 == 0:
                slots = host.pin(k(*"abcd"))
                host.end_lease(request)
                host.unpin(slots)
            elif i % 3 == 1:
                host.end_lease(request)
            clock.now += 0.01
        clock.now += 1
        counts = host.counts
        print(f"10,000 requests, then {counts}")
        assert (counts.pinned, counts.leased, counts.strays) == (0, 0, 0)
        assert (counts.free, counts.resident) == (4, 4)
        assert host.audit() == ()
        assert len(host.allocate(k(*"stuvwxyz"), 1).slots) == 8


@dataclass
class Use:
    """A slot in the model."""

    ref: SlotRef
    key: BlockKey
    ranks: set[int]
    ready: bool = False
    known: bool = True
    pins: int = 0
    leases: dict[str, float] = field(default_factory=dict)


NAMES = st.lists(st.sampled_from(k(*"abcdefghij")), max_size=6)
SLOTS = 5


class CatalogMachine(RuleBasedStateMachine):
    """Every report may come late, twice or never; the model knows all uses there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.host = catalog(SLOTS, self.clock)
        self.uses: list[Use] = []
        self.order: list[BlockKey] = []

    @initialize()
    def begin(self) -> None:
        assert self.host.free == SLOTS

    def live(self) -> list[Use]:
        """Uses whose slot is not free."""
        return [u for u in self.uses if u.known or u.ranks or u.pins]

    def known(self, key: BlockKey) -> Use | None:
        return next((u for u in self.uses if u.known and u.key == key), None)

    def protected(self, use: Use) -> bool:
        leased = any(until > self.clock.now for until in use.leases.values())
        return bool(use.pins or use.ranks or leased)

    def forget(self, use: Use) -> None:
        use.known = False
        use.leases.clear()
        if use.ready:
            self.order.remove(use.key)

    @rule(keys=NAMES, ranks=st.integers(1, 2))
    def allocate(self, keys: list[BlockKey], ranks: int) -> None:
        busy = {use.ref.number: use for use in self.live()}
        fresh = [key for key in dict.fromkeys(keys) if not self.known(key)]
        evictable = [
            key
            for key in self.order
            if key not in keys and not self.protected(next(filter(None, [self.known(key)])))
        ]
        missing = max(0, len(fresh) - (SLOTS - len(busy)))
        given = self.host.allocate(keys, ranks)
        assert list(given.evicted) == evictable[:missing]
        for key in given.evicted:
            use = self.known(key)
            assert use is not None
            self.forget(use)
        busy = {use.ref.number: use for use in self.live()}
        assert list(given.slots) == fresh[: SLOTS - len(busy)]
        for key, ref in given.slots.items():
            assert ref.number not in busy
            older = [u.ref.generation for u in self.uses if u.ref.number == ref.number]
            assert ref.generation > max(older, default=0)
            self.uses.append(Use(ref, key, set(range(ranks))))
        assert len({ref.number for ref in given.slots.values()}) == len(given.slots)

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def stored(self, data: st.DataObject) -> None:
        use = data.draw(st.sampled_from(self.uses))
        self.host.stored([use.ref])
        if use.known and not use.ready:
            use.ready = True
            self.order.append(use.key)

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def store_failed(self, data: st.DataObject) -> None:
        use = data.draw(st.sampled_from(self.uses))
        self.host.store_failed([use.ref])
        if use.known and not use.ready:
            self.forget(use)

    @precondition(lambda self: self.uses)
    @rule(data=st.data(), rank=st.integers(0, 2))
    def release(self, data: st.DataObject, rank: int) -> None:
        use = data.draw(st.sampled_from(self.uses))
        self.host.release(use.ref, rank)
        use.ranks.discard(rank)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def pin_ready(self, data: st.DataObject) -> None:
        self.pin(data.draw(st.lists(st.sampled_from(self.order), min_size=1, max_size=3)))

    @rule(keys=NAMES)
    def pin_any(self, keys: list[BlockKey]) -> None:
        self.pin(keys)

    def pin(self, keys: list[BlockKey]) -> None:
        uses = [self.known(key) for key in keys]
        ready = [use for use in uses if use is not None and use.ready]
        if len(ready) < len(keys):
            with pytest.raises(KeyError):
                self.host.pin(keys)
            return
        assert self.host.pin(keys) == tuple(use.ref for use in ready)
        for use in ready:
            use.pins += 1

    @rule(keys=NAMES)
    def wanted(self, keys: list[BlockKey]) -> None:
        self.host.wanted(keys)
        for key in reversed(keys):
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        use = data.draw(st.sampled_from(self.uses))
        self.host.unpin([use.ref])
        use.pins = max(0, use.pins - 1)

    @rule(keys=NAMES, holder=st.sampled_from("xy"), seconds=st.integers(0, 3))
    def lease(self, keys: list[BlockKey], holder: str, seconds: int) -> None:
        until = self.clock.now + seconds
        self.host.lease(keys, holder, until)
        for key in keys:
            if use := self.known(key):
                use.leases[holder] = max(until, use.leases.get(holder, until))

    @rule(holder=st.sampled_from("xyz"))
    def end_lease(self, holder: str) -> None:
        self.host.end_lease(holder)
        for use in self.uses:
            use.leases.pop(holder, None)

    @rule(seconds=st.integers(1, 2))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(keys=NAMES)
    def forget_keys(self, keys: list[BlockKey]) -> None:
        self.host.forget(keys)
        for key in keys:
            if use := self.known(key):
                self.forget(use)

    @rule()
    def reset(self) -> None:
        self.host.reset()
        for use in self.uses:
            if use.known:
                self.forget(use)

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.host.audit() == ()

    @invariant()
    def it_answers_as_the_model(self) -> None:
        live = self.live()
        counts = self.host.counts
        assert counts.free == SLOTS - len(live)
        assert counts.resident == self.host.resident == len(self.order)
        assert counts.storing == sum(u.known and not u.ready for u in live)
        assert counts.orphaned == sum(not u.known for u in live)
        assert counts.pinned == sum(u.pins > 0 for u in live)
        assert counts.held == sum(bool(u.ranks) and (u.ready or not u.known) for u in live)
        leased = [u for u in live if any(t > self.clock.now for t in u.leases.values())]
        assert counts.leased == len(leased)
        for key in k(*"abcdefghij"):
            use = self.known(key)
            expected = None if use is None else READY if use.ready else STORING
            assert self.host.lookup(key) is expected
            assert self.host.slot(key) == (use.ref if use is not None and use.ready else None)


TestCatalogMachine = CatalogMachine.TestCase


def test_where_all_is_of_a_higher_priority_nothing_is_looked_for() -> None:
    """A request that may take nobody's place costs nothing, however full the tier is."""

    class Unasked(LruPolicy[BlockKey]):
        asked = 0

        def victims(self) -> Iterator[BlockKey]:
            self.asked += 1
            return super().victims()

    policy = Unasked()
    host = HostCatalog(4, policy)
    store(host, "a", "b", "c", "d")
    assert host.allocate(k("e"), 1, priority=-1).slots == {}
    assert policy.asked == 0
    host.forget(k("d"))
    low = host.allocate(k("e"), 1, priority=-1).slots
    host.stored([*low.values()])
    host.release(low[k("e")[0]], 0)
    assert host.allocate(k("f"), 1, priority=-1).evicted == tuple(k("e"))
    assert policy.asked == 1
    assert host.audit() == ()
