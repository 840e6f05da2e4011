"""Maintenance of an nvme tier: what it holds, what differs, what can be dropped."""

from __future__ import annotations

import shutil
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.test_f21_leftovers import MARKER, reserve_and_die
from tests.stores.nvme_parts import open_nvme, segment_files, settings
from tiered_kv.contracts import MaintenanceContext, StoreMaintenance
from tiered_kv.errors import IdentityError, TierError
from tiered_kv.index import Environment, Row, Transaction
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    NAMESPACE,
    ODD_BYTES,
    OTHER_NAMESPACE,
    StoreArguments,
    assert_held,
    disk_bytes,
    get,
    keys,
    new_block,
    put,
    reserved,
)
from tiered_kv.testing.conformance.children import start
from tiered_kv.values import PAGE_BYTES, BlockStatus
from tiered_kv_nvme import backend
from tiered_kv_nvme.headers import SegmentHeader
from tiered_kv_nvme.reconcile import Reconciler
from tiered_kv_nvme.records import Extent, Segment
from tiered_kv_nvme.space import Change

MIB = 2**20


@pytest.fixture
def arguments(tmp_path: Path) -> StoreArguments:
    return StoreArguments(tmp_path / "tier")


@contextmanager
def maintenance(arguments: StoreArguments, *, writable: bool = True) -> Iterator[StoreMaintenance]:
    assert backend.open_maintenance is not None
    opened = backend.open_maintenance(MaintenanceContext("ssd", settings(arguments), writable))
    try:
        yield opened
    finally:
        opened.close()
        opened.close()


def fill(arguments: StoreArguments, first: int, count: int) -> None:
    store = open_nvme(arguments)
    for start_at in range(first, first + count, 8):
        put(store, range(start_at, min(start_at + 8, first + count)))
    store.close()


# ------------------------------------------------------------------------------------- namespaces


def test_namespaces_are_told_without_their_engines(arguments: StoreArguments) -> None:
    other = arguments.with_(namespace=OTHER_NAMESPACE, rank=1, world_size=2)
    fill(arguments, 0, 20)
    store = open_nvme(other)
    put(store, range(5), rank=1)
    with maintenance(arguments, writable=False) as opened:
        found = {one.namespace.id: one for one in opened.namespaces()}
        assert [one.namespace.id for one in opened.namespaces()] == sorted(found)
    store.close()
    mine, theirs = found[NAMESPACE.id], found[OTHER_NAMESPACE.id]
    assert (mine.blocks, mine.used_bytes, mine.in_use) == (20, 20 * BLOCK_BYTES, False)
    assert (theirs.blocks, theirs.used_bytes, theirs.in_use) == (0, 5 * BLOCK_BYTES, True)
    assert mine.namespace == NAMESPACE
    assert mine.geometry == arguments.geometry
    assert (theirs.geometry.rank, theirs.geometry.world_size) == (0, 2)
    # What it tells is enough to open a store.
    store = open_nvme(arguments.with_(namespace=mine.namespace))
    assert_held(store, range(20))
    store.close()


def test_where_nothing_was_stored_nothing_is_made(arguments: StoreArguments) -> None:
    for exists in (False, True):
        if exists:
            arguments.path.mkdir()
        for writable in (True, False):
            with (
                pytest.raises(TierError, match="nothing was stored"),
                maintenance(arguments, writable=writable),
            ):
                pass
    assert list(arguments.path.iterdir()) == []


def test_another_directory_is_refused(arguments: StoreArguments) -> None:
    fill(arguments, 0, 4)
    index = arguments.path / "index"
    (index / "data.mdb").rename(arguments.path / "segment-000099")
    shutil.rmtree(index)
    (arguments.path / MARKER).unlink()
    (arguments.path / "letters").mkdir()
    with pytest.raises(IdentityError, match="letters"), maintenance(arguments):
        pass


def test_a_lower_capacity_does_not_cost_the_index(arguments: StoreArguments) -> None:
    """Maintenance knows no block size, so it may not take an index for too large."""
    small = arguments.with_(block_bytes=(PAGE_BYTES,))
    store = open_nvme(small)
    for first in range(0, 1600, 100):
        put(store, range(first, first + 100), length=PAGE_BYTES)
    store.close()
    size = (arguments.path / "index" / "data.mdb").stat().st_size
    with maintenance(small.with_(capacity=size)) as opened:
        assert [one.blocks for one in opened.namespaces()] == [1600]
    store = open_nvme(small)
    assert_held(store, range(1600), length=PAGE_BYTES)
    store.close()


def test_a_lost_index_is_made_again(arguments: StoreArguments) -> None:
    fill(arguments, 0, 20)
    fill(arguments.with_(namespace=OTHER_NAMESPACE), 0, 10)
    shutil.rmtree(arguments.path / "index")
    with (
        pytest.raises(TierError, match="verify --repair"),
        maintenance(arguments, writable=False),
    ):
        pass
    with maintenance(arguments) as opened:
        held = {one.namespace: one.blocks for one in opened.namespaces()}
        assert held == {NAMESPACE: 20, OTHER_NAMESPACE: 10}
        assert opened.reconcile(repair=False).found == {}
    store = open_nvme(arguments)
    assert_held(store, range(20))
    assert all(read.result.unproven for read in get(store, range(20)))
    store.close()


# -------------------------------------------------------------------------------------------- drop


def test_a_dropped_namespace_gives_its_bytes_back(arguments: StoreArguments) -> None:
    """Its halves of blocks too; the other namespace does not notice."""
    pair = arguments.with_(world_size=2)
    fill(arguments.with_(namespace=OTHER_NAMESPACE), 0, 40)
    before = disk_bytes(arguments.path)
    store = open_nvme(pair)
    put(store, range(60))
    put(store, range(100, 110), length=ODD_BYTES)
    with maintenance(arguments) as opened, pytest.raises(ValueError, match="in use"):
        opened.drop(NAMESPACE.id)
    store.close()
    full = disk_bytes(arguments.path)
    with maintenance(arguments, writable=False) as opened:
        with pytest.raises(ValueError, match="reading only"):
            opened.drop(NAMESPACE.id)
        with pytest.raises(ValueError, match="reading only"):
            opened.reconcile(repair=True)
    with maintenance(arguments) as opened:
        with pytest.raises(ValueError, match="8 bytes"):
            opened.drop(b"short")
        assert opened.drop(bytes(8)) == 0
        assert opened.drop(NAMESPACE.id) == 70
        assert opened.drop(NAMESPACE.id) == 0
        assert [one.namespace for one in opened.namespaces()] == [OTHER_NAMESPACE]
        assert opened.reconcile(repair=False).found == {}
    after = disk_bytes(arguments.path)
    print(f"{before} bytes, {full} with the namespace, {after} without it")
    assert full > before + 60 * BLOCK_BYTES
    assert after <= before + MIB // 2
    store = open_nvme(arguments.with_(namespace=OTHER_NAMESPACE))
    assert_held(store, range(40))
    store.close()
    store = open_nvme(pair)
    assert store.stat().blocks == 0
    assert put(store, range(8)) == list(range(8))
    store.close()


# --------------------------------------------------------------------------------------- reconcile

Spoil = Callable[["Spoiler"], None]


class Spoiler:
    """Spoils an index, and the files, of a closed tier."""

    def __init__(self, path: Path, environment: Environment, txn: Transaction) -> None:
        self.path = path
        self.txn = txn
        self.databases = {
            name: environment.database(name)
            for name in ("rows", "blocks", "segments", "slots", "room", "totals", "meta")
        }

    def items(self, name: str) -> list[tuple[bytes, bytes]]:
        return list(self.txn.cursor(db=self.databases[name]).iternext())

    def put(self, name: str, key: bytes, value: bytes) -> None:
        self.txn.put(key, value, db=self.databases[name])

    def pop(self, name: str, key: bytes) -> None:
        assert self.txn.delete(key, db=self.databases[name])

    def flip(self, name: str, number: int) -> None:
        key, value = self.items(name)[number]
        self.put(name, key, value[:-3] + bytes([value[-3] ^ 16]) + value[-2:])

    def move_row(self, which: int, **fields: int) -> None:
        """Let a row name another place."""
        key, value = self.items("rows")[which]
        row = Row.unpack(key, value)
        assert row is not None
        location = Extent.of(row)._replace(**fields).location()
        row = Row(row.checksum, row.slot_class, location, row.generation)
        self.put("rows", key, row.pack(key))

    def slot_of_another(self) -> int:
        """A slot of segment 0 that another row than the third names."""
        ours = Row.unpack(*self.items("rows")[2])
        assert ours is not None
        return 1 if Extent.of(ours).slot == 0 else 0

    def change_segment(self, number: int, change: Callable[[Segment], None]) -> None:
        name, data = self.items("segments")[number]
        segment = Segment.unpack(struct.unpack(">I", name)[0], data)
        assert segment is not None
        change(segment)
        self.put("segments", name, segment.pack())

    def file(self, number: int) -> Path:
        return segment_files(self.path)[number]


def take_free_slots(spoiler: Spoiler) -> None:
    def change(segment: Segment) -> None:
        free = [slot for slot in range(segment.layout.slots) if not segment.taken[slot]]
        assert len(free) > 3
        segment.taken[free[:3]] = 1

    spoiler.change_segment(-1, change)


def raise_reserved(spoiler: Spoiler) -> None:
    def change(segment: Segment) -> None:
        segment.reserved += 2

    spoiler.change_segment(0, change)


def delete_row(spoiler: Spoiler) -> None:
    spoiler.pop("rows", spoiler.items("rows")[3][0])


def delete_record(spoiler: Spoiler) -> None:
    spoiler.pop("blocks", spoiler.items("blocks")[5][0])


def delete_slot(spoiler: Spoiler) -> None:
    spoiler.pop("slots", spoiler.items("slots")[7][0])


def cut_file(spoiler: Spoiler) -> None:
    file = spoiler.file(0)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - PAGE_BYTES)


def copy_file(spoiler: Spoiler) -> None:
    shutil.copy(spoiler.file(0), spoiler.path / "segment-000777")


def spoil_entries(spoiler: Spoiler) -> None:
    with spoiler.file(0).open("r+b") as opened:
        header = SegmentHeader.unpack(opened.read(PAGE_BYTES))
        assert header is not None
        for slot in (0, 2):
            opened.seek(header.layout.entry_offset(slot) + 20)
            opened.write(b"\xff\xee")


def spoil_header(spoiler: Spoiler) -> None:
    with spoiler.file(1).open("r+b") as opened:
        opened.seek(30)
        opened.write(b"\xff\xee")


def miscount_bytes(spoiler: Spoiler) -> None:
    spoiler.put("totals", b"bytes", struct.pack(">Q", 5))


def miscount_room(spoiler: Spoiler) -> None:
    key, _ = spoiler.items("room")[0]
    spoiler.pop("room", key)
    spoiler.put("room", struct.pack(">II", 1, 4000), struct.pack(">II", 5, 9))


SPOILS: list[tuple[str, Spoil, dict[str, int], int]] = [
    # what is done, how, what is found, how many blocks that costs
    (
        "damaged row",
        lambda s: s.flip("rows", 0),
        {"blocks whose rows are damaged or missing": 1, "slots without a row": 1},
        1,
    ),
    (
        "missing row",
        delete_row,
        {"blocks whose rows are damaged or missing": 1, "slots without a row": 1},
        1,
    ),
    (
        "damaged block record",
        lambda s: s.flip("blocks", 1),
        {"blocks whose rows are damaged or missing": 1},
        1,
    ),
    ("missing block record", delete_record, {"blocks whose rows are damaged or missing": 1}, 1),
    (
        "row of another epoch",
        lambda s: s.move_row(2, epoch=9999),
        {"rows that name no slot": 1, "slots without a row": 1},
        1,
    ),
    (
        "row of another's slot",
        lambda s: s.move_row(2, number=0, slot=s.slot_of_another()),
        {"rows that name no slot": 1, "slots without a row": 1},
        1,
    ),
    (
        "row of no segment",
        lambda s: s.move_row(2, number=500),
        {"rows that name no slot": 1, "slots without a row": 1},
        1,
    ),
    ("missing slot", delete_slot, {"rows that name no slot": 1, "slots without a row": 1}, 1),
    (
        "slots taken for nothing",
        take_free_slots,
        {"slots without a row": 3, "wrong counts of free slots": 2},
        0,
    ),
    ("miscounted reservations", raise_reserved, {"wrong counts of reserved slots": 1}, 0),
    ("missing file", lambda s: s.file(0).unlink(), {"segments without their file": 1}, -1),
    ("short file", cut_file, {"segments whose file was cut short": 1}, -1),
    ("file of nobody", copy_file, {"files that are no segment's": 1}, 0),
    ("damaged entries", spoil_entries, {"entries that differ from their rows": 2}, 0),
    ("damaged header", spoil_header, {"headers that differ from their records": 1}, 0),
    ("miscounted bytes", miscount_bytes, {"wrong sums of bytes": 1}, 0),
    ("miscounted room", miscount_room, {"wrong counts of free slots": 2}, 0),
]


@pytest.mark.parametrize(
    ("spoil", "found", "cost"), [one[1:] for one in SPOILS], ids=[one[0] for one in SPOILS]
)
def test_what_differs_is_found_and_put_right(
    arguments: StoreArguments, spoil: Spoil, found: dict[str, int], cost: int
) -> None:
    blocks = 60
    fill(arguments, 0, blocks)
    with maintenance(arguments) as opened:
        assert opened.reconcile(repair=True).found == {}
    environment = Environment.open(
        arguments.path / "index", kind="nvme", tier="ssd", max_bytes=8 * MIB, writable=True
    )
    spoiler_databases = Spoiler(arguments.path, environment, None)  # type: ignore[arg-type]
    with environment.write() as txn:
        spoiler_databases.txn = txn
        spoil(spoiler_databases)
    environment.close()

    with maintenance(arguments, writable=False) as opened:
        looked = opened.reconcile(repair=False)
        again = opened.reconcile(repair=False)
    print(f"found {looked.found}")
    # The first is what was spoilt; the others follow from it, if it is repaired or if it is not.
    assert next(iter(found)) in looked.found
    assert looked.found.items() <= found.items()
    assert again == looked
    assert looked.repaired == {}
    with maintenance(arguments) as opened:
        mended = opened.reconcile(repair=True)
        assert next(iter(found)) in mended.found
        assert mended.found.items() <= found.items()
        assert mended.repaired == mended.found
        settled = opened.reconcile(repair=True)
        assert settled.found == {}, settled

    store = open_nvme(arguments)
    there = [n for n, yes in enumerate(store.contains(keys(range(blocks)))) if yes]
    assert_held(store, there)
    assert blocks - len(there) == cost if cost >= 0 else 0 < len(there) < blocks
    put(store, range(blocks))
    put(store, range(100, 140))
    assert_held(store, range(100, 140))
    assert disk_bytes(arguments.path) <= arguments.capacity
    store.close()
    with maintenance(arguments) as opened:
        assert opened.reconcile(repair=False).found == {}


def test_what_a_dead_process_had_reserved_is_told(arguments: StoreArguments) -> None:
    fill(arguments, 1000, 8)
    child = start(reserve_and_die, "nvme", arguments, 20)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    with maintenance(arguments) as opened:
        looked = opened.reconcile(repair=False)
        assert looked.found == {"slots that dead processes reserved": 20}
        assert opened.reconcile(repair=True).repaired == looked.found
        assert opened.reconcile(repair=False).found == {}


def test_beside_a_running_store_nothing_of_its_own_is_taken(arguments: StoreArguments) -> None:
    """Reservations that wait, evictions, deletions, segments that change hands: no false alarm,
    and all that the store published stays whole."""
    stop = threading.Event()
    store = open_nvme(arguments)
    waiting = reserved(store, [new_block(n) for n in range(9000, 9008)])
    published: list[int] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            first = 0
            while not stop.is_set():
                put(store, range(first, first + 8))
                published.extend(range(first, first + 8))
                store.delete(keys(range(first, first + 2)))
                first += 8
        except Exception as error:  # noqa: BLE001 - told below, whatever it is
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    found: list[dict[str, int]] = []
    try:
        with maintenance(arguments) as opened:
            while len(published) < 600 and not errors:
                found.append(opened.reconcile(repair=True).found)
    finally:
        stop.set()
        thread.join(60)
    evicted = store.stat().evicted_blocks
    print(f"{len(found)} reconciliations beside {len(published)} blocks, {evicted} evicted")
    assert errors == []
    assert len(found) > 1
    assert evicted
    assert all(one == {} for one in found)
    store.abandon(waiting)
    recent = [n for n in published[-40:] if n % 8 >= 2]
    assert_held(store, recent)
    assert {r.result.status for r in get(store, published[:8])} == {BlockStatus.MISSING}
    store.close()


def test_no_transaction_lasts_while_all_segments_are_looked_at(
    arguments: StoreArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it does, no page that engines free is used again."""
    fill(arguments, 0, 100)
    looks: list[tuple[Change, int]] = []
    real = Reconciler._wrong_slots

    def wrong_slots(self: Reconciler, change: Change, number: int) -> dict[str, int]:
        looks.append((change, number))
        return real(self, change, number)

    monkeypatch.setattr(Reconciler, "_wrong_slots", wrong_slots)
    with maintenance(arguments) as opened:
        assert opened.reconcile(repair=True).found == {}
    segments = {number for _, number in looks}
    print(f"{len(segments)} segments were looked at")
    assert len(segments) > 1
    assert len({id(change) for change, _ in looks}) == len(segments)


def test_what_is_closed_is_refused(arguments: StoreArguments) -> None:
    fill(arguments, 0, 4)
    with maintenance(arguments) as opened:
        pass
    with pytest.raises(TierError):
        opened.namespaces()
