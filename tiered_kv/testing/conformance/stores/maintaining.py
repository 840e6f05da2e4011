"""Looking after a tier as a whole, beside engines and after them."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

import pytest

from tiered_kv.contracts import BlockStore, StoredNamespace, StoreMaintenance
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    NAMESPACE,
    ODD_BYTES,
    OTHER_NAMESPACE,
    StoreArguments,
    assert_held,
    disk_bytes,
    get,
    key,
    keys,
    new_block,
    put,
    reserved,
)
from tiered_kv.testing.conformance.children import BATCH, run_until_stage
from tiered_kv.testing.conformance.contract import MaintenancePromise, owe, refused
from tiered_kv.testing.conformance.stores.case import OpenStore, StoreCase, StoreFixtures
from tiered_kv.values import BlockStatus, Namespace

__all__ = ["MaintenanceChecks"]

RANKS = 2
LATE_SECONDS = 60.0


class OpenMaintenance(Protocol):
    """Opens the check's maintenance; it is closed afterwards."""

    def __call__(self, *, writable: bool = True) -> StoreMaintenance:
        """See `MaintenanceContext.writable`."""
        ...


class MaintenanceChecks(StoreFixtures):
    """`StoreMaintenance`, where the case says how it is opened."""

    @pytest.fixture
    def look_after(self, case: StoreCase, arguments: StoreArguments) -> Iterator[OpenMaintenance]:
        """Opens it, also several times."""
        case.needs("open_maintenance")
        opened: list[StoreMaintenance] = []

        def open_it(*, writable: bool = True) -> StoreMaintenance:
            if case.open_maintenance is None:
                raise TypeError("the case has no maintenance")
            opened.append(case.open_maintenance(arguments.with_(writable=writable)))
            return opened[-1]

        yield open_it
        for one in opened:
            one.close()

    @pytest.fixture
    def two_ranks(self, open_store: OpenStore) -> list[BlockStore]:
        """Two ranks of one namespace with five whole blocks, 0 to 4, of one length, three more,
        20 to 22, of another, and half a block, 9, of rank 0."""
        ranks = [open_store(rank=rank, world_size=RANKS) for rank in range(RANKS)]
        for rank, store in enumerate(ranks):
            put(store, range(5), rank)
            put(store, range(20, 23), rank, ODD_BYTES)
        put(ranks[0], [9])
        return ranks

    def test_what_lies_there_is_told(
        self,
        look_after: OpenMaintenance,
        open_store: OpenStore,
        arguments: StoreArguments,
        two_ranks: list[BlockStore],
    ) -> None:
        """Two namespaces, two ranks, half a block, and a namespace in which nothing was stored."""
        empty = Namespace(NAMESPACE.fingerprint, b"\x07" * 8)
        put(open_store(namespace=OTHER_NAMESPACE), [1, 2])
        open_store(namespace=empty)
        told = look_after(writable=False).namespaces()
        ids = [one.namespace.id for one in told]
        owe(
            ids == sorted(n.id for n in (NAMESPACE, OTHER_NAMESPACE, empty)),
            MaintenancePromise.EVER_OPENED,
            f"{len(ids)} namespaces are told of 3, in the order {[i.hex()[:6] for i in ids]}",
        )
        by_id = {one.namespace.id: one for one in told}
        mine, other, none = (by_id[n.id] for n in (NAMESPACE, OTHER_NAMESPACE, empty))
        owe(
            (mine.namespace, other.namespace) == (NAMESPACE, OTHER_NAMESPACE),
            MaintenancePromise.EVER_OPENED,
            f"the fields of a fingerprint came back as {mine.namespace} and {other.namespace}",
        )
        geometries = [one.geometry for one in (mine, other)]
        wanted = [arguments.with_(world_size=count).geometry for count in (RANKS, 1)]
        owe(
            geometries == wanted,
            MaintenancePromise.GEOMETRY,
            f"the geometries are told as {geometries}",
        )
        counts = [one.blocks for one in (mine, other, none)]
        owe(counts == [8, 2, 0], MaintenancePromise.BLOCKS, f"{counts} blocks are told")
        owe(
            mine.in_use and other.in_use and none.in_use,
            MaintenancePromise.IN_USE,
            "a namespace that is open for writing is not in use",
        )

    def test_bytes_of_halves_count(
        self, look_after: OpenMaintenance, two_ranks: list[BlockStore]
    ) -> None:
        """Eight whole blocks and a half take their bytes; a part more, and a part less."""
        looking = look_after(writable=False)
        sizes = [the_one(looking).used_bytes]
        put(two_ranks[1], [30], 1)
        sizes.append(the_one(looking).used_bytes)
        two_ranks[0].delete(keys([0, 30]))
        sizes.append(the_one(looking).used_bytes)
        parts = [RANKS * (5 * BLOCK_BYTES + 3 * ODD_BYTES) + BLOCK_BYTES]
        parts += [parts[0] + BLOCK_BYTES, parts[0] - RANKS * BLOCK_BYTES]
        print(f"parts of {parts} bytes are told as {sizes}")
        for told, right in zip(sizes, parts, strict=True):
            owe(
                right <= told <= right + 20 * 2**16,
                MaintenancePromise.USED,
                f"{told} bytes are told of parts of {right} bytes",
            )
        owe(
            sizes[2] < sizes[0] < sizes[1],
            MaintenancePromise.USED,
            f"the bytes changed from {sizes[0]} to {sizes[1]} with a part more, and to {sizes[2]}",
        )

    def test_a_namespace_is_in_use_while_it_is_written(
        self, look_after: OpenMaintenance, open_store: OpenStore, two_ranks: list[BlockStore]
    ) -> None:
        """Not by whoever follows; by one rank as by all."""
        looking = look_after(writable=False)
        two_ranks[0].close()
        owe(the_one(looking).in_use, MaintenancePromise.IN_USE, "one of two ranks is left, unseen")
        two_ranks[1].close()
        owe(not the_one(looking).in_use, MaintenancePromise.IN_USE, "nobody is left, but in use")
        follower = open_store(world_size=RANKS, writable=False)
        owe(not the_one(looking).in_use, MaintenancePromise.IN_USE, "a follower counts as a writer")
        follower.close()
        owe(the_one(looking).blocks == 8, MaintenancePromise.BLOCKS, "blocks went with the stores")

    def test_a_sound_tier_has_nothing_to_repair(
        self, look_after: OpenMaintenance, two_ranks: list[BlockStore]
    ) -> None:
        """Neither beside stores with places in flight, nor after they were closed; looking and
        repairing change nothing that can be seen."""
        places = reserved(two_ranks[0], [new_block(n) for n in range(100, 104)])
        owner = look_after()
        for repair in (False, True, False):
            judge_sound(owner, repair, "beside two stores")
        two_ranks[0].abandon(places)
        for rank, store in enumerate(two_ranks):
            assert_held(store, range(5), rank)
            assert_held(store, range(20, 23), rank, ODD_BYTES)
            store.close()
        for repair in (False, True):
            judge_sound(owner, repair, "after the stores were closed")
        owe(the_one(owner).blocks == 8, MaintenancePromise.SOUND, "blocks were dropped")

    def test_what_a_killed_process_left_is_removed(
        self,
        case: StoreCase,
        look_after: OpenMaintenance,
        open_store: OpenStore,
        arguments: StoreArguments,
    ) -> None:
        """SIGKILL at a random step of storing, `kills` times: looking changes nothing, repair
        leaves a sound tier, and all that was published is there."""
        case.needs("survives_kill")
        choice = random.Random(5)
        stages: list[str] = []
        found: Counter[str] = Counter()
        published: list[int] = []
        first = 0
        for _ in range(case.kills):
            last, numbers = run_until_stage(case.open, arguments, first, choice.randrange(2, 30))
            stages.append(last)
            published += numbers
            first += len(numbers) + 2 * BATCH
            owner = look_after()
            seen = owner.reconcile(repair=False)
            again = owner.reconcile(repair=False)
            owe(
                (seen.found, seen.repaired) == (again.found, {}),
                MaintenancePromise.REPAIR,
                f"looking at {seen.found} changed it to {again.found}, repaired {seen.repaired}",
            )
            done = owner.reconcile(repair=True)
            found.update(done.found)
            judge_sound(owner, False, f"after the repair of {done.found}")
            owner.close()
            store = open_store()
            assert_held(store, published)
            visible = set(store.scan())
            torn = [
                number
                for number in range(first)
                if key(number) in visible and not get(store, [number])[0].sound
            ]
            owe(not torn, MaintenancePromise.REPAIR, f"blocks {torn} are visible and torn")
            store.close()
        print(f"killed after {stages}: found {dict(found)}, {len(published)} blocks published")
        owe(published, MaintenancePromise.REPAIR, "no block was published before a kill")

    def test_dropping_gives_the_room_back_and_harms_nobody(
        self,
        case: StoreCase,
        look_after: OpenMaintenance,
        open_store: OpenStore,
        arguments: StoreArguments,
    ) -> None:
        """A namespace that fills half of the capacity goes, with its halves and its record; then
        another one takes that room without evicting anything of a third."""
        half = range(100, 100 + arguments.capacity // (2 * BLOCK_BYTES))
        other = open_store(namespace=OTHER_NAMESPACE)
        put(other, range(8))
        ranks = [open_store(rank=rank, world_size=RANKS) for rank in range(RANKS)]
        for first in range(half.start, half.stop, 16):
            for rank, store in enumerate(ranks):
                put(store, range(first, min(first + 8, half.stop)), rank)
        put(ranks[0], [9])
        held = ranks[0].stat().blocks
        for store in ranks:
            store.close()
        owner = look_after()
        before = disk_bytes(arguments.path)
        dropped = owner.drop(NAMESPACE.id)
        owe(
            dropped == held + 1,
            MaintenancePromise.DROP,
            f"{dropped} blocks count as dropped, {held} whole ones and half a one were there",
        )
        print(
            f"{dropped} blocks dropped; {before} bytes on the disk before, then "
            f"{disk_bytes(arguments.path)}"
        )
        ids = [one.namespace.id for one in owner.namespaces()]
        owe(
            ids == [OTHER_NAMESPACE.id],
            MaintenancePromise.DROP,
            f"{len(ids)} namespaces are told after one of two was dropped",
        )
        again = owner.drop(NAMESPACE.id)
        owe(again == 0, MaintenancePromise.NOT_THERE, f"{again} blocks were dropped again")
        assert_held(other, range(8))
        third = open_store(namespace=Namespace(NAMESPACE.fingerprint, b"\x01" * 8))
        for first in range(half.start, half.stop, 8):
            put(third, range(first, min(first + 8, half.stop)))
        if case.bounded:
            evicted = third.stat().evicted_blocks
            owe(
                evicted == 0,
                MaintenancePromise.ROOM,
                f"{evicted} blocks were evicted to fill the room that was given back",
            )
        assert_held(third, half)
        assert_held(other, range(8))
        ranks = [open_store(rank=rank, world_size=RANKS) for rank in range(RANKS)]
        left = list(ranks[0].scan())
        owe(not left, MaintenancePromise.DROP, f"{len(left)} dropped blocks are visible")
        for rank, store in enumerate(ranks):
            statuses = {read.result.status for read in get(store, half[:4], rank)}
            owe(
                statuses == {BlockStatus.MISSING},
                MaintenancePromise.DROP,
                f"rank {rank} reads dropped blocks as {statuses}",
            )
            put(store, range(3), rank)
        for rank, store in enumerate(ranks):
            assert_held(store, range(3), rank)

    def test_what_is_in_use_is_not_dropped(
        self, look_after: OpenMaintenance, two_ranks: list[BlockStore]
    ) -> None:
        """Not even where one of two ranks is left. Nothing is missing then."""
        owner = look_after()
        two_ranks[1].close()
        refused(lambda: owner.drop(NAMESPACE.id), ValueError, MaintenancePromise.NOT_DROPPED)
        unknown = owner.drop(OTHER_NAMESPACE.id)
        owe(unknown == 0, MaintenancePromise.NOT_THERE, f"{unknown} blocks of an unknown namespace")
        assert_held(two_ranks[0], range(5))
        owe(the_one(owner).blocks == 8, MaintenancePromise.NOT_DROPPED, "blocks are missing")

    def test_whoever_only_looks_changes_nothing(
        self, look_after: OpenMaintenance, two_ranks: list[BlockStore]
    ) -> None:
        """Repair and drop are refused."""
        for store in two_ranks:
            store.close()
        looking = look_after(writable=False)
        refused(
            lambda: looking.reconcile(repair=True), ValueError, MaintenancePromise.REPAIR_WRITABLE
        )
        refused(lambda: looking.drop(NAMESPACE.id), ValueError, MaintenancePromise.NOT_DROPPED)
        owe(
            looking.reconcile(repair=False).found == {} and the_one(looking).blocks == 8,
            MaintenancePromise.REPAIR_WRITABLE,
            "something is missing after a refusal",
        )
        looking.close()
        looking.close()

    def test_beside_a_store_that_works(
        self, look_after: OpenMaintenance, open_store: OpenStore
    ) -> None:
        """One thread stores and deletes while another looks and repairs without end: nothing that
        was published is lost, and nothing that is being stored counts as a leftover."""
        store, owner = open_store(), look_after()
        put(store, range(4))
        done = threading.Event()
        counts: Counter[str] = Counter()
        troubles: list[str] = []

        def tend() -> None:
            try:
                while not done.is_set():
                    found = owner.reconcile(repair=counts["looks"] % 2 == 0).found
                    if found:
                        troubles.append(f"found {found} in a sound tier")
                    one = the_one(owner)
                    if not one.in_use or one.blocks < 4:
                        troubles.append(f"{one} beside a store with four blocks at least")
                    counts["looks"] += 1
            except Exception as error:  # noqa: BLE001 - a thread tells of every failure
                troubles.append(f"looking after it failed: {error!r}")

        thread = threading.Thread(target=tend)
        thread.start()
        choice = random.Random(11)
        held: set[int] = set(range(4))
        while (counts["rounds"] < 40 or counts["looks"] < 4) and thread.is_alive():
            numbers = [choice.randrange(4, 60) for _ in range(4)]
            held.update(put(store, list(dict.fromkeys(numbers))))
            gone = choice.sample(sorted(held - set(range(4))), 2)
            store.delete(keys(gone))
            held.difference_update(gone)
            counts["rounds"] += 1
        done.set()
        thread.join(LATE_SECONDS)
        print(f"{counts['rounds']} rounds of storing, {counts['looks']} of looking and repairing")
        owe(not troubles, MaintenancePromise.BESIDE, f"{len(troubles)} troubles: {troubles[:3]}")
        assert_held(store, sorted(held))
        owe(
            set(store.scan()) == set(keys(held)),
            MaintenancePromise.BESIDE,
            f"{store.stat().blocks} blocks are there of {len(held)}",
        )


def the_one(maintenance: StoreMaintenance) -> StoredNamespace:
    """The only namespace that there is."""
    told: Sequence[StoredNamespace] = maintenance.namespaces()
    owe(
        len(told) == 1,
        MaintenancePromise.EVER_OPENED,
        f"{len(told)} namespaces are told where one was opened",
    )
    return told[0]


def judge_sound(maintenance: StoreMaintenance, repair: bool, when: str) -> None:
    """Nothing is found, and nothing repaired."""
    seen = maintenance.reconcile(repair=repair)
    owe(
        seen.found == {} and seen.repaired == {},
        MaintenancePromise.SOUND,
        f"{seen.found} was found and {seen.repaired} repaired {when}",
    )
