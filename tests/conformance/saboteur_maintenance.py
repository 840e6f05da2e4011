"""Maintenance that breaks one promise each; run by `test_saboteurs` in a child process."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import ClassVar

import pytest

from tests.conformance import bad_openers
from tests.conformance.honest import HonestMaintenance, HonestStore, Part, memory_case
from tests.stores.lmdb_parts import open_lmdb
from tiered_kv.contracts import Reconciliation, StoredNamespace
from tiered_kv.testing.conformance.contract import MaintenancePromise, StorePromise
from tiered_kv.testing.conformance.stores import StoreCase, StoreConformance
from tiered_kv.values import BlockKey


class Saboteur(StoreConformance):
    """An instance that fails `check`, for breaking `promise`."""

    store: ClassVar[type[HonestStore]] = HonestStore
    maintenance: ClassVar[type[HonestMaintenance]]
    check: ClassVar[str]
    promise: ClassVar[MaintenancePromise]

    @pytest.fixture
    def case(self) -> StoreCase:
        return memory_case(self.store, self.maintenance)


class TestForgetsEmptyNamespaces(Saboteur):
    check = "test_what_lies_there_is_told"
    promise = MaintenancePromise.EVER_OPENED

    class maintenance(HonestMaintenance):
        def namespaces(self) -> list[StoredNamespace]:
            return [one for one in super().namespaces() if one.blocks]


class TestTellsTheShapeOfTheLastRank(Saboteur):
    check = "test_what_lies_there_is_told"
    promise = MaintenancePromise.GEOMETRY

    class maintenance(HonestMaintenance):
        def told(self, of: bytes) -> StoredNamespace:
            one = super().told(of)
            last = one.geometry.world_size - 1
            return replace(one, geometry=replace(one.geometry, rank=last))


class TestCountsHalvesAsBlocks(Saboteur):
    check = "test_what_lies_there_is_told"
    promise = MaintenancePromise.BLOCKS

    class maintenance(HonestMaintenance):
        def told(self, of: bytes) -> StoredNamespace:
            halves = sum(mine == of for mine, _ in self.shelf.blocks)
            return replace(super().told(of), blocks=halves)


class TestWeighsWholeBlocksOnly(Saboteur):
    check = "test_bytes_of_halves_count"
    promise = MaintenancePromise.USED

    class maintenance(HonestMaintenance):
        def told(self, of: bytes) -> StoredNamespace:
            one = super().told(of)
            ranks = one.geometry.world_size
            blocks = [b for (mine, _), b in self.shelf.blocks.items() if mine == of]
            whole = [b for b in blocks if len(b) == ranks]
            used = sum(len(part.data) for parts in whole for part in parts.values())
            return replace(one, used_bytes=used)


class TestSeesTheFirstRankOnly(Saboteur):
    check = "test_a_namespace_is_in_use_while_it_is_written"
    promise = MaintenancePromise.IN_USE

    class maintenance(HonestMaintenance):
        def in_use(self, of: bytes) -> bool:
            mine = [store for store in self.shelf.writers if store.namespace == of]
            return any(store.arguments.rank == 0 for store in mine)


class TestTakesFlightsForLeftovers(Saboteur):
    check = "test_a_sound_tier_has_nothing_to_repair"
    promise = MaintenancePromise.SOUND

    class maintenance(HonestMaintenance):
        def reconcile(self, *, repair: bool) -> Reconciliation:
            flights = sum(len(store.open_tokens) for store in self.shelf.writers)
            return Reconciliation({"slots without a row": flights} if flights else {})


class TestTellsZeros(Saboteur):
    check = "test_a_sound_tier_has_nothing_to_repair"
    promise = MaintenancePromise.SOUND

    class maintenance(HonestMaintenance):
        def reconcile(self, *, repair: bool) -> Reconciliation:
            return Reconciliation({"rows without bytes": 0})


class TestRepairsWhenItOnlyLooks(Saboteur):
    check = "test_whoever_only_looks_changes_nothing"
    promise = MaintenancePromise.REPAIR_WRITABLE

    class maintenance(HonestMaintenance):
        def reconcile(self, *, repair: bool) -> Reconciliation:
            return Reconciliation()


class TestDropsWhenItOnlyLooks(Saboteur):
    check = "test_whoever_only_looks_changes_nothing"
    promise = MaintenancePromise.NOT_DROPPED

    class maintenance(HonestMaintenance):
        def drop(self, namespace_id: bytes) -> int:
            return 0


class TestDropsWhatIsInUse(Saboteur):
    check = "test_what_is_in_use_is_not_dropped"
    promise = MaintenancePromise.NOT_DROPPED

    class maintenance(HonestMaintenance):
        def in_use(self, of: bytes) -> bool:
            return False


class TestLeavesHalves(Saboteur):
    check = "test_dropping_gives_the_room_back_and_harms_nobody"
    promise = MaintenancePromise.DROP

    class maintenance(HonestMaintenance):
        def drop(self, namespace_id: bytes) -> int:
            half = {n: b for n, b in self.shelf.blocks.items() if len(b) == 1 and n[1] != b""}
            dropped = super().drop(namespace_id)
            kept = {n: b for n, b in half.items() if n[0] == namespace_id}
            self.shelf.blocks.update(kept)
            return dropped - len(kept)


class TestKeepsTheRecord(Saboteur):
    check = "test_dropping_gives_the_room_back_and_harms_nobody"
    promise = MaintenancePromise.DROP

    class maintenance(HonestMaintenance):
        def drop(self, namespace_id: bytes) -> int:
            known = self.shelf.known.get(namespace_id)
            dropped = super().drop(namespace_id)
            if known is not None:
                self.shelf.known[namespace_id] = known
            return dropped


class TestHidesWhatItDrops(Saboteur):
    check = "test_dropping_gives_the_room_back_and_harms_nobody"
    promise = MaintenancePromise.ROOM

    class maintenance(HonestMaintenance):
        def drop(self, namespace_id: bytes) -> int:
            blocks = [b for (mine, _), b in self.shelf.blocks.items() if mine == namespace_id]
            dropped = super().drop(namespace_id)
            parts = [part for parts in blocks for part in parts.values()]
            for number, part in enumerate(parts):
                name = b"hidden", BlockKey(b"%d" % number)
                self.shelf.blocks[name] = {0: Part(part.data, part.checksum)}
            return dropped


class TestCountsWhatIsNotThere(Saboteur):
    check = "test_what_is_in_use_is_not_dropped"
    promise = MaintenancePromise.NOT_THERE

    class maintenance(HonestMaintenance):
        def drop(self, namespace_id: bytes) -> int:
            return super().drop(namespace_id) + 1


class TestStumblesOverChanges(Saboteur):
    check = "test_beside_a_store_that_works"
    promise = MaintenancePromise.BESIDE

    class maintenance(HonestMaintenance):
        seen = 0

        def namespaces(self) -> list[StoredNamespace]:
            before, self.seen = self.seen, len(self.shelf.log)
            if before != self.seen > 8:
                raise RuntimeError("dictionary changed size during iteration")
            return super().namespaces()


# ---------------------------------------------------------------------------- with real files


class OnFiles(StoreConformance):
    check = "test_what_a_killed_process_left_is_removed"
    promise: ClassVar[StrEnum]
    maintenance: ClassVar[type[bad_openers.BadMaintenance]]

    @pytest.fixture
    def case(self) -> StoreCase:
        return StoreCase(open_lmdb, kills=3, open_maintenance=self.maintenance)


class TestRepairsNothing(OnFiles):
    promise = MaintenancePromise.SOUND
    maintenance = bad_openers.RepairsNothing


class TestRepairsWhatItShows(OnFiles):
    promise = MaintenancePromise.REPAIR
    maintenance = bad_openers.RepairsWhatItShows


class TestRepairsTooMuch(OnFiles):
    promise = StorePromise.CONTAINS
    maintenance = bad_openers.RepairsTooMuch
