"""A load never takes unproven bytes for what their row says, whatever the engine compares later."""

from __future__ import annotations

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.stores.nvme_parts import open_nvme
from tiered_kv.contracts import BlockStore, HandlerContext
from tiered_kv.engine import StoreToCpuHandler
from tiered_kv.memory import HostBlockPool
from tiered_kv.specs import CpuSpec, HopResult, SlotRef, TransferSpec
from tiered_kv.testing.conformance.blocks import (
    StoreArguments,
    aligned_copy,
    assert_held,
    content,
    get,
    keys,
    new_block,
    put,
    reserved,
)
from tiered_kv.testing.faults import Effect, Fault, Faults, FaultyStore, Method
from tiered_kv.values import BlockStatus
from tiered_kv_nvme import NvmeSpec

BLOCKS = 12
REWRITTEN = (0, 1, 2)


def rebuilt_beside_a_write(path: Path) -> StoreArguments:
    """A tier whose index is lost while three slots hold new bytes under the old blocks' entries."""
    arguments = StoreArguments(path / "tier")
    store = open_nvme(arguments)
    put(store, range(BLOCKS))
    store.delete(keys(REWRITTEN))
    places = reserved(store, [new_block(100 + n) for n in REWRITTEN])
    store.write(places, [aligned_copy(content(100 + n)) for n in REWRITTEN])
    lost = arguments.with_(path=path / "lost")
    shutil.copytree(arguments.path, lost.path)
    store.abandon(places)
    store.close()
    shutil.rmtree(lost.path / "index")
    return lost


def hop(store: BlockStore, arguments: StoreArguments, pool: HostBlockPool, job: int) -> HopResult:
    """What the handler alone answers; no engine verifies behind it."""
    with ThreadPoolExecutor(1) as executor:
        context = HandlerContext(arguments.geometry, pool, executor, "ssd", store)
        handler = StoreToCpuHandler(context)
        slots = CpuSpec(tuple(SlotRef(n, job) for n in range(BLOCKS)))
        wanted = tuple(keys(range(BLOCKS)))
        return asyncio.run(handler.transfer(TransferSpec(NvmeSpec("ssd", wanted), slots, wanted)))


def test_old_entries_over_new_bytes_are_told_at_the_first_hop(tmp_path: Path) -> None:
    arguments = rebuilt_beside_a_write(tmp_path)
    store = open_nvme(arguments)
    pool = HostBlockPool(BLOCKS, 1, arguments.geometry.slot_bytes)
    try:
        assert all(store.contains(keys(range(BLOCKS))))
        assert all(read.result.unproven for read in get(store, range(BLOCKS)))
        result = hop(store, arguments, pool, 1)
        corrupt = [n for n, s in enumerate(result.statuses) if s is BlockStatus.CORRUPT]
        print(f"{len(corrupt)} of {BLOCKS} unproven blocks were other blocks' bytes")
        assert tuple(corrupt) == REWRITTEN
        assert set(result.statuses) == {BlockStatus.OK, BlockStatus.CORRUPT}
        # They are dropped, and nothing in the slots claims to be them.
        assert store.contains(keys(REWRITTEN)) == [False] * len(REWRITTEN)
        assert [pool.checksum(SlotRef(n, 1)) for n in REWRITTEN] == [None] * len(REWRITTEN)
        assert put(store, range(BLOCKS)) == list(REWRITTEN)
        again = hop(store, arguments, pool, 2)
        assert set(again.statuses) == {BlockStatus.OK}
        assert_held(store, range(BLOCKS))
    finally:
        store.close()
        pool.close()


def test_a_store_that_cannot_drop_them_brings_the_others(tmp_path: Path) -> None:
    arguments = rebuilt_beside_a_write(tmp_path)
    store = open_nvme(arguments)
    faults = Faults(Fault(method=Method.DISCARD, effect=Effect.BUG), tier="ssd")
    pool = HostBlockPool(BLOCKS, 1, arguments.geometry.slot_bytes)
    try:
        statuses = hop(FaultyStore(store, faults), arguments, pool, 1).statuses
        assert [n for n, s in enumerate(statuses) if s is BlockStatus.CORRUPT] == [*REWRITTEN]
        assert set(statuses) == {BlockStatus.OK, BlockStatus.CORRUPT}
    finally:
        store.close()
        pool.close()


def test_a_tier_for_reading_only_answers_corrupt_each_time(tmp_path: Path) -> None:
    arguments = rebuilt_beside_a_write(tmp_path)
    open_nvme(arguments).close()  # makes the index again
    reader = arguments.with_(extra=(("access", "read"),))
    store = open_nvme(reader)
    pool = HostBlockPool(BLOCKS, 1, arguments.geometry.slot_bytes)
    try:
        for job in (1, 2):
            statuses = hop(store, reader, pool, job).statuses
            assert [n for n, s in enumerate(statuses) if s is BlockStatus.CORRUPT] == [*REWRITTEN]
    finally:
        store.close()
        pool.close()
