"""A rank's stores: opened again where that failed, watched, and opened anew where they are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.unit.doubles import Journal, MemoryStore, key
from tests.unit.test_probing import until
from tests.unit.test_worker import PATIENCE, Rig, load_job, store_job
from tiered_kv.connector import ConnectorMetadata, Manager
from tiered_kv.connector.books import ManagerLimits
from tiered_kv.connector.conditions import Conditions
from tiered_kv.connector.occupancy import StoreWatch
from tiered_kv.connector.opening import StoreOpener
from tiered_kv.contracts import BlockStore, StoreStat
from tiered_kv.errors import IdentityError, TierError, TierGone
from tiered_kv.stats import LoadRate, StatsRecorder, TierCondition, TierState
from tiered_kv.values import BlockStatus


class GoingStore(MemoryStore):
    """A store whose directory can be deleted, and whose end can hang."""

    def __init__(self, journal: Journal) -> None:
        super().__init__("fast", journal)
        self.gone = False
        self.asked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.may_close = threading.Event()
        self.may_close.set()
        self.closed = threading.Event()

    def stat(self) -> StoreStat:
        self.asked.set()
        assert self.may_answer.wait(PATIENCE)
        if self.gone:
            raise TierGone("/mnt/kv was deleted", tier="fast")
        return super().stat()

    def close(self) -> None:
        assert self.may_close.wait(PATIENCE)
        self.closed.set()


class GoingRig(Rig):
    """A worker whose tier opens a new store each time."""

    def __post_init__(self) -> None:
        self.stores: list[GoingStore] = []
        self.opened = threading.Condition()
        super().__post_init__()

    def _open(self, tier: str, geometry: object, epoch: bytes) -> MemoryStore:
        store = GoingStore(self.journal)
        with self.opened:
            self.stores.append(store)
            self.opened.notify_all()
        return store

    def wait_opened(self, count: int) -> GoingStore:
        with self.opened:
            assert self.opened.wait_for(lambda: len(self.stores) >= count, PATIENCE)
            return self.stores[count - 1]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores are watched many times a second."""
    monkeypatch.setattr("tiered_kv.connector.occupancy.PERIOD_SECONDS", 0.02)


@pytest.mark.usefixtures("quick")
def test_a_store_that_is_gone_is_replaced_though_its_end_hangs() -> None:
    with GoingRig(retry_after=0.05) as rig:
        old = rig.wait_opened(1)
        rig.worker.prepare_store_kv(ConnectorMetadata(stores=(store_job(1, 0, 1),)))
        rig.worker.start_kv_transfers(ConnectorMetadata())
        rig.results(1)
        assert rig.worker.drain(PATIENCE)
        assert set(old.rows) == {key(0), key(1)}
        old.may_close.clear()
        old.gone = True
        new = rig.wait_opened(2)
        until(lambda: rig.worker.engine.health()["fast"][0])
        assert not old.closed.is_set()
        rig.worker.start_kv_transfers(ConnectorMetadata(loads=(load_job(2, (0,), (9,)),)))
        [lost] = rig.results(1)
        assert lost.statuses == (BlockStatus.MISSING,)
        rig.worker.prepare_store_kv(ConnectorMetadata(stores=(store_job(3, 2),)))
        rig.worker.start_kv_transfers(ConnectorMetadata())
        rig.results(1)
        assert rig.worker.drain(PATIENCE)
        assert set(new.rows) == {key(2)}
        old.may_close.set()
        assert old.closed.wait(PATIENCE)
        assert len(rig.stores) == 2


@pytest.mark.usefixtures("quick")
def test_a_tier_is_down_with_the_reason_until_it_is_made_anew() -> None:
    with GoingRig(retry_after=PATIENCE) as rig:
        rig.wait_opened(1).gone = True
        until(lambda: not rig.worker.engine.health()["fast"][0])
        report = rig.worker.take_report()
        assert report is not None
        [condition] = [c for _, c in report.conditions if c.tier == "fast"]
        assert condition == TierCondition("fast", TierState.DOWN, "gone: /mnt/kv was deleted", None)
        assert rig.worker.take_report() is None
        assert len(rig.stores) == 1


def test_a_store_that_hangs_keeps_no_other_from_being_watched(quick: None) -> None:
    told: list[str] = []
    watch = StoreWatch(StatsRecorder("rank 0"), gone=lambda tier, store, why: told.append(tier))
    hangs, goes = GoingStore(Journal()), GoingStore(Journal())
    watch.add("hangs", hangs)
    hangs.may_answer.clear()
    hangs.asked.clear()
    assert hangs.asked.wait(PATIENCE)
    watch.add("goes", goes)
    goes.gone = True
    until(lambda: told == ["goes"])
    assert not watch.close(0.0)
    hangs.may_answer.set()
    assert watch.close(PATIENCE)
    assert told == ["goes"]


def opener(
    answers: list[BlockStore | Exception],
    opened: Callable[[str], None],
    failed: Callable[[str], None],
) -> StoreOpener:
    def open_store(tier: str, epoch: bytes) -> BlockStore:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return StoreOpener(
        open_store,
        opened=lambda tier, store, epoch: opened(tier),
        failed=lambda tier, why: failed(why),
        retry_after=0.01,
    )


def test_what_cannot_be_opened_now_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    failures: list[str] = []
    store = GoingStore(Journal())
    missing = TierError("no such device", tier="fast")
    one = opener(
        [missing, missing, TierError("EIO", tier="fast"), store],
        lambda tier: done.set(),
        failures.append,
    )
    one.start(["fast"], wait_seconds=PATIENCE)
    assert done.wait(PATIENCE)
    assert failures == ["no such device", "no such device", "EIO"]
    said = [r.getMessage() for r in caplog.records if "cannot be opened" in r.getMessage()]
    assert len(said) == 2, "the same reason is said once"
    assert one.close(PATIENCE)
    assert store.closed.is_set()


def test_what_the_start_refuses_is_not_tried_again_but_a_tier_that_served_is() -> None:
    failures: list[str] = []
    refused = opener([IdentityError("not ours")], lambda tier: None, failures.append)
    with pytest.raises(IdentityError):
        refused.start(["fast"], wait_seconds=PATIENCE)
    until(lambda: not refused._threads)
    assert failures == ["not ours"]
    times: list[str] = []
    store = GoingStore(Journal())
    served = opener(
        [store, IdentityError("an empty mount point"), store], times.append, failures.append
    )
    served.start(["fast"], wait_seconds=PATIENCE)
    served.reopen("fast", after=0.01)
    until(lambda: len(times) == 2)
    assert failures[1:] == ["an empty mount point"]
    assert served.close(PATIENCE)


def test_the_end_does_not_wait_for_a_tier_that_is_to_be_opened_again() -> None:
    failed = threading.Event()
    one = opener(
        [TierError("no such device", tier="fast")], lambda tier: None, lambda why: failed.set()
    )
    one._retry_after = PATIENCE
    one.start(["fast"], wait_seconds=PATIENCE)
    assert failed.wait(PATIENCE)
    assert one.close(0.0)
    until(lambda: not one._threads)
    one.reopen("fast")
    assert not one._threads


def test_ranks_tell_how_they_find_the_tiers() -> None:
    with Rig(host_name="host") as rig:
        shake = rig.worker.handshake()
        by_tier = {condition.tier: condition for condition in shake.conditions}
        assert by_tier.keys() == {"host", "fast"}
        assert {c.state for c in by_tier.values()} == {TierState.HEALTHY}
        books = Manager(
            fingerprint=shake.fingerprint,
            host_tier="host",
            host_write=True,
            tiers=(),
            limits=ManagerLimits(lookup_wait=0.0, retry_backoff=1.0),
            world_size=1,
        )
        books.attach([shake])
        assert books._books.conditions.state("fast") is TierState.HEALTHY
        report = rig.worker.take_report()
        assert report is None, "nothing has changed"


def test_the_worst_rank_counts() -> None:
    conditions = Conditions()
    conditions.note(0, TierCondition("ssd", TierState.HEALTHY, "", LoadRate(1e9, 0.1)))
    conditions.note(1, TierCondition("ssd", TierState.DEGRADED, "slow", LoadRate(2e9, 0.2)))
    assert conditions.state("ssd") is TierState.DEGRADED
    assert conditions.load_rate("ssd") == LoadRate(1e9, 0.2)
    conditions.note(1, TierCondition("ssd", TierState.DOWN, "gone", None))
    assert conditions.state("ssd") is TierState.DOWN
