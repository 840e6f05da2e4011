"""Each fault that can be injected is met by the caller of a store, where and when it is planned."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.conformance.honest import HonestStore
from tests.stores.lmdb_parts import context_of
from tiered_kv.errors import NoSpace, TierError
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    ODD_BYTES,
    StoreArguments,
    aligned_copy,
    assert_held,
    content,
    get,
    keys,
    new_block,
    page_aligned,
    put,
    reserved,
)
from tiered_kv.testing.faults import (
    Effect,
    Fault,
    FaultPlan,
    Faults,
    FaultyStore,
    Injection,
    Method,
    faulty_backend,
)
from tiered_kv.testing.faults.plan import POSSIBLE, RAISING
from tiered_kv.values import BlockStatus
from tiered_kv_lmdb import backend as lmdb

LATE = 30.0


class Rig:
    def __init__(self, path: Path) -> None:
        self.inner = HonestStore(StoreArguments(path))
        self.faults = Faults(tier="shelf")
        self.store = FaultyStore(self.inner, self.faults)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def fault(method: Method, effect: Effect, **fields: object) -> Fault:
    return Fault.model_validate({"method": method, "effect": effect, **fields})


def calls_of(rig: Rig) -> dict[Method, Callable[[], object]]:
    """A call of each method, for blocks 1 and 2, that a sound store answers."""
    store = rig.store
    blocks = [new_block(1), new_block(2)]

    def write() -> None:
        places = [place for place in rig.inner.reserve(blocks) if place is not None]
        store.write(places, [aligned_copy(content(n)) for n in (1, 2)])

    def publish() -> None:
        places = [place for place in rig.inner.reserve(blocks) if place is not None]
        rig.inner.write(places, [aligned_copy(content(n)) for n in (1, 2)])
        store.publish(places)

    return {
        Method.CONTAINS: lambda: store.contains(keys([1, 2])),
        Method.RESERVE: lambda: store.reserve(blocks),
        Method.WRITE: write,
        Method.PUBLISH: publish,
        Method.ABANDON: lambda: store.abandon([]),
        Method.READ: lambda: store.read(keys([1, 2]), [page_aligned(BLOCK_BYTES)] * 2),
        Method.DISCARD: lambda: store.discard(blocks),
        Method.DELETE: lambda: store.delete(keys([1, 2])),
        Method.TOUCH: lambda: store.touch(keys([1, 2])),
        Method.SCAN: store.scan,
        Method.CHANGES: lambda: store.changes(None),
        Method.STAT: store.stat,
        Method.CLOSE: store.close,
    }


def test_without_faults_it_is_the_store(rig: Rig) -> None:
    put(rig.store, range(5))
    assert_held(rig.store, range(5))
    assert rig.store.delete(keys([1])) == 1
    assert rig.store.stat() == rig.inner.stat()
    assert set(rig.store.scan()) == set(keys([0, 2, 3, 4]))
    assert rig.store.open_places == 0
    assert rig.faults.injected() == {}
    assert rig.faults.calls()[Method.READ] == 1


ERRORS: dict[Effect, tuple[type[Exception], int | None]] = {
    Effect.TIER_ERROR: (TierError, errno.EIO),
    Effect.NO_SPACE: (NoSpace, errno.ENOSPC),
    Effect.EIO: (OSError, errno.EIO),
    Effect.ENOSPC: (OSError, errno.ENOSPC),
    Effect.BUG: (RuntimeError, None),
}


@pytest.mark.parametrize("method", [m for m in Method if m is not Method.OPEN])
@pytest.mark.parametrize("effect", sorted(RAISING))
def test_every_method_raises_what_is_planned(rig: Rig, method: Method, effect: Effect) -> None:
    call = calls_of(rig)[method]
    rig.faults.inject(fault(method, effect, calls=(1,)))
    kind, code = ERRORS[effect]
    with pytest.raises(kind) as raised:
        call()
    cause = raised.value if isinstance(raised.value, OSError) else raised.value.__cause__
    assert (cause.errno if isinstance(cause, OSError) else None) == code
    call()  # the second call is sound
    assert rig.faults.injected() == {(method, effect): 1}
    assert rig.faults.calls()[method] == 2


def test_a_call_can_fail_after_it_was_carried_out(rig: Rig) -> None:
    rig.faults.inject(fault(Method.PUBLISH, Effect.TIER_ERROR, done=True))
    with pytest.raises(TierError, match="injected at publish of tier 'shelf'"):
        put(rig.store, [1])
    assert rig.inner.contains(keys([1])) == [True]
    rig.faults.inject(fault(Method.PUBLISH, Effect.TIER_ERROR))
    with pytest.raises(TierError):
        put(rig.store, [2])
    assert rig.inner.contains(keys([2])) == [False]
    assert rig.store.open_places == 1


def test_which_calls(rig: Rig) -> None:
    def failing(count: int) -> list[int]:
        failed = []
        for number in range(1, count + 1):
            try:
                rig.store.stat()
            except TierError:
                failed.append(number)
        return failed

    for fields, expected in (
        ({}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"calls": (2, 5)}, [2, 5]),
        ({"every": 3}, [3, 6]),
        ({"after": 5}, [6, 7, 8]),
        ({"after": 2, "times": 2}, [3, 4]),
        ({"every": 2, "after": 3}, [4, 6, 8]),
    ):
        rig.faults.inject(fault(Method.STAT, Effect.TIER_ERROR, **fields))
        assert failing(8) == expected, fields
    drawn = []
    for seed in (1, 1, 2):
        rig.faults.inject(fault(Method.STAT, Effect.TIER_ERROR, chance=0.3), seed=seed)
        drawn.append(failing(100))
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(10 < len(one) < 60 for one in drawn)
    rig.faults.inject()
    assert failing(8) == []


def test_which_blocks(rig: Rig) -> None:
    put(rig.store, range(4))
    only = frozenset(keys([2]))
    rig.faults.inject(fault(Method.READ, Effect.BLOCK_ERROR, keys=only))
    bad, ok = BlockStatus.TIER_ERROR, BlockStatus.OK
    assert [r.result.status for r in get(rig.store, range(4))] == [ok, ok, bad, ok]
    assert [r.result.status for r in get(rig.store, [0, 1])] == [ok, ok]
    assert rig.faults.injected() == {(Method.READ, Effect.BLOCK_ERROR): 1}
    rig.faults.inject(fault(Method.READ, Effect.TIER_ERROR, keys=only))
    get(rig.store, [0, 1])
    with pytest.raises(TierError):
        get(rig.store, [1, 2])
    rig.faults.inject(fault(Method.READ, Effect.BLOCK_ERROR, positions=(0, 3)))
    assert [r.result.status for r in get(rig.store, range(4))] == [bad, ok, ok, bad]


@pytest.mark.parametrize("effect", [Effect.FLIP, Effect.SHORT, Effect.FOREIGN, Effect.LIE])
@pytest.mark.parametrize("method", [Method.READ, Method.WRITE])
def test_wrong_bytes(rig: Rig, method: Method, effect: Effect) -> None:
    if method is Method.READ:
        put(rig.store, range(4))
    rig.faults.inject(fault(method, effect, positions=(1,)))
    if method is Method.WRITE:
        put(rig.store, range(4))
    reads = get(rig.store, range(4))
    assert [read.result.status for read in reads] == [BlockStatus.OK] * 4
    assert [read.sound for read in reads] == [True, False, True, True]
    data, right = reads[1].data, content(1)
    if effect is Effect.FLIP:
        differing = int.from_bytes(data) ^ int.from_bytes(right)
        assert differing.bit_count() == 1
    elif effect is Effect.SHORT:
        half = BLOCK_BYTES // 2
        assert data == right[:half] + bytes(half)
    elif effect is Effect.LIE:
        assert data == bytes(BLOCK_BYTES)
    else:
        assert data in [content(n) for n in (0, 2, 3)]
    assert rig.faults.injected_blocks() == {(method, effect): 1}


def test_foreign_bytes_where_there_is_no_other_block(rig: Rig) -> None:
    put(rig.store, [1])
    rig.faults.inject(fault(Method.READ, Effect.FOREIGN))
    assert get(rig.store, [1])[0].sound
    assert rig.faults.injected() == {}
    rig.faults.inject(fault(Method.WRITE, Effect.FOREIGN))
    put(rig.store, [2])
    assert not get(rig.inner, [2])[0].sound


def test_a_row_that_is_not_told(rig: Rig) -> None:
    put(rig.store, [1])
    rig.faults.inject(fault(Method.READ, Effect.NO_ROW))
    (result,) = rig.store.read(keys([1]), [page_aligned(BLOCK_BYTES)])
    assert (result.status, result.checksum) == (BlockStatus.OK, None)


def test_blocks_vanish_between_contains_and_read(rig: Rig) -> None:
    put(rig.store, range(3))
    rig.faults.inject(fault(Method.CONTAINS, Effect.VANISH, positions=(1,)))
    assert rig.store.contains(keys(range(3))) == [True] * 3
    missing = BlockStatus.MISSING
    assert get(rig.store, [1])[0].result.status is missing
    rig.faults.inject(fault(Method.READ, Effect.VANISH, calls=(2,)))
    assert get(rig.store, [0])[0].sound
    assert get(rig.store, [0])[0].result.status is missing
    assert list(rig.inner.scan()) == keys([2])


def test_lies(rig: Rig) -> None:
    store, inject = rig.store, rig.faults.inject
    put(store, range(3))
    cursor = store.changes(None).cursor
    inject(fault(Method.CONTAINS, Effect.LIE))
    assert store.contains(keys([0, 9])) == [True, True]
    inject(fault(Method.RESERVE, Effect.LIE, positions=(0,)))
    lied, place = store.reserve([new_block(10), new_block(11)])
    assert lied is None
    assert place is not None
    inject(fault(Method.ABANDON, Effect.LIE))
    store.abandon([place])
    assert len(rig.inner.open_tokens) == 1
    inject(fault(Method.PUBLISH, Effect.LIE, positions=(1,)))
    put(store, [20, 21, 22])
    assert rig.inner.contains(keys([20, 21, 22])) == [True, False, True]
    assert len(rig.inner.open_tokens) == 1, "what is lied about gives its room back"
    inject(fault(Method.DELETE, Effect.LIE), fault(Method.DISCARD, Effect.LIE))
    assert store.delete(keys([0, 1])) == 2
    assert store.discard([new_block(2)]) == 1
    assert rig.inner.contains(keys(range(3))) == [True] * 3
    before = list(rig.inner.shelf.blocks)
    inject(fault(Method.TOUCH, Effect.LIE))
    store.touch(keys([0]))
    assert list(rig.inner.shelf.blocks) == before
    inject(fault(Method.SCAN, Effect.LIE), fault(Method.CHANGES, Effect.LIE))
    assert list(store.scan()) == []
    assert store.changes(cursor).changes == ()
    inject()
    assert len(store.changes(cursor).changes) == 2
    assert {effect for _, effect in rig.faults.injected()} == {Effect.LIE}


@pytest.mark.parametrize("effect", [Effect.HANG, Effect.SLOW])
def test_calls_are_held(rig: Rig, effect: Effect) -> None:
    seconds = {"seconds": LATE} if effect is Effect.SLOW else {}
    rig.faults.inject(fault(Method.STAT, effect, calls=(1,), **seconds))
    begun, done = threading.Event(), threading.Event()
    faults = Faults(fault(Method.STAT, effect, calls=(1,), **seconds), told=lambda _: begun.set())
    store = FaultyStore(rig.inner, faults)

    def call() -> None:
        store.stat()
        done.set()

    thread = threading.Thread(target=call)
    thread.start()
    assert begun.wait(LATE)
    store.stat()  # the second call passes meanwhile
    assert not done.is_set()
    faults.let_go()
    thread.join(LATE)
    assert done.is_set()
    assert faults.held == 0


def test_a_slow_call_goes_on_by_itself(rig: Rig) -> None:
    rig.faults.inject(fault(Method.STAT, Effect.SLOW, seconds=0.01))
    rig.store.stat()
    assert rig.faults.injected() == {(Method.STAT, Effect.SLOW): 1}


def test_all_calls_of_a_method_wait_for_its_valve(rig: Rig) -> None:
    valve = rig.faults.at(Method.TOUCH)
    valve.shut()
    threads = [threading.Thread(target=rig.store.touch, args=([],)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert valve.wait_held(3)
    rig.store.stat()
    valve.open()
    for thread in threads:
        thread.join(LATE)
    assert rig.faults.calls() == {Method.TOUCH: 3, Method.STAT: 1}


def test_many_threads_count_every_call(rig: Rig) -> None:
    rig.faults.inject(fault(Method.TOUCH, Effect.TIER_ERROR, every=4))

    def touch() -> None:
        for _ in range(100):
            try:
                rig.store.touch(keys([1]))
            except TierError:
                continue

    threads = [threading.Thread(target=touch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LATE)
    assert rig.faults.calls() == {Method.TOUCH: 400}
    assert rig.faults.injected() == {(Method.TOUCH, Effect.TIER_ERROR): 100}


def test_a_plan_in_a_file(tmp_path: Path) -> None:
    file, new = tmp_path / "plan.json", tmp_path / "plan.new"
    told: list[Injection] = []
    faults = Faults(file=file, told=told.append)
    store = FaultyStore(HonestStore(StoreArguments(tmp_path / "tier")), faults)
    put(store, range(2))
    read = fault(Method.READ, Effect.FLIP, keys=frozenset(keys([1])), calls=(2,))
    plan = FaultPlan(faults=(read,), seed=3)
    assert FaultPlan.model_validate_json(plan.model_dump_json()) == plan
    assert keys([1])[0].hex() in plan.model_dump_json()
    new.write_text(plan.model_dump_json())
    os.replace(new, file)
    assert [read.sound for read in get(store, range(2))] == [True, True]
    assert [read.sound for read in get(store, range(2))] == [True, False]
    assert told == [Injection(Method.READ, Effect.FLIP, 2, (1,))]
    new.write_text("{}")
    os.replace(new, file)
    assert [read.sound for read in get(store, range(2))] == [True, True]


def test_a_backend_whose_stores_fail(tmp_path: Path) -> None:
    faults = Faults(fault(Method.OPEN, Effect.TIER_ERROR, calls=(1,)), tier="pins")
    backend = faulty_backend(lmdb, faults)
    assert backend.open_store is not None
    assert (backend.name, backend.register) == (lmdb.name, None)
    context = context_of(StoreArguments(tmp_path / "tier"))
    with pytest.raises(TierError, match="open of tier 'pins'"):
        backend.open_store(context)
    store = backend.open_store(context)
    put(store, range(3), length=ODD_BYTES)
    faults.inject(fault(Method.READ, Effect.FLIP))
    assert not any(read.sound for read in get(store, range(3), length=ODD_BYTES))
    store.close()
    faults.inject(fault(Method.OPEN, Effect.TIER_ERROR, done=True))
    with pytest.raises(TierError):
        backend.open_store(context)
    each: list[str] = []

    def give(context_: object) -> Faults:
        each.append(type(context_).__name__)
        return faults

    faults.inject()
    apart = faulty_backend(lmdb, give)
    assert apart.open_store is not None
    apart.open_store(context).close()
    assert each == ["StoreContext"]


def test_what_is_impossible_is_refused() -> None:
    for effect, methods in POSSIBLE.items():
        for method in set(Method) - methods:
            with pytest.raises(ValidationError, match=f"{effect} cannot be at {method}"):
                fault(method, effect, **({"seconds": 1.0} if effect is Effect.SLOW else {}))
    for fields, message in (
        ({"effect": Effect.SLOW}, "SLOW alone needs them"),
        ({"effect": Effect.HANG, "seconds": 1.0}, "SLOW alone needs them"),
        ({"effect": Effect.FLIP, "done": True}, "is for effects that raise"),
        ({"effect": Effect.EIO, "every": 0}, "greater than or equal to 1"),
        ({"effect": Effect.EIO, "chance": 1.5}, "less than or equal to 1"),
        ({"effect": Effect.EIO, "evry": 2}, "Extra inputs"),
    ):
        with pytest.raises(ValidationError, match=message):
            Fault.model_validate({"method": Method.READ, **fields})


def test_a_place_is_counted_until_it_is_given_back(rig: Rig) -> None:
    places = reserved(rig.store, [new_block(n) for n in range(3)])
    assert rig.store.open_places == 3
    rig.store.abandon(places[:1])
    rig.store.write(places[1:], [aligned_copy(content(n)) for n in (1, 2)])
    rig.store.publish(places[1:])
    assert rig.store.open_places == 0
