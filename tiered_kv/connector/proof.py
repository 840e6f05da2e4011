"""The start-up self-test: one block of every KV group goes through both halves.

Each half makes a test block by itself, from the fingerprint and the geometry that it has. A rank
puts its own into the engine's cache, stores it by the real copies, overwrites it, loads it back,
and says what it then finds in the cache; the manager compares that to its own. So halves that
disagree on what a block is are found before the first request.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

from tiered_kv.checksum import BlockChecksum
from tiered_kv.engine import TransferEngine
from tiered_kv.errors import RefuseToStart, TieredKVError
from tiered_kv.memory import HostBlockPool, KVCaches, read_block, write_block
from tiered_kv.specs import (
    CpuSpec,
    GpuBlock,
    GpuSpec,
    JobResult,
    LoadJob,
    Part,
    Parts,
    SlotRef,
    StoreJob,
    StoreTargets,
)
from tiered_kv.values import BlockKey, BlockStatus, CacheGeometry, Fingerprint, JobId

__all__ = ["Proof", "ProofRun", "expected_proof", "of_self_test"]

PROOF_SECONDS = 2.0
"""Longest that the whole self-test of a rank waits for its copies."""

HANG_SECONDS = 30.0
"""How much longer it waits for a copy that may still write to the engine's cache: nothing can be
served before that has ended."""

REQUEST = "self-test"


@dataclass(frozen=True, slots=True)
class Proof:
    """What a rank's self-test found."""

    blocks: tuple[BlockChecksum, ...]
    """Per KV group, length and checksum of the block that came back."""
    seconds: float
    problem: str | None = None
    """Why it was not completed; its blocks say nothing then."""


def expected_proof(
    fingerprint: Fingerprint, geometry: CacheGeometry, rank: int
) -> tuple[BlockChecksum, ...]:
    """What a rank must find, as far as whoever asks knows the blocks' shape."""
    return tuple(
        BlockChecksum.capture(
            _key(group.index),
            rank,
            memoryview(_pattern(fingerprint, rank, group.index, group.block_bytes)),
        )
        for group in geometry.groups
    )


def _key(group: int) -> BlockKey:
    return BlockKey(b"tiered-kv self-test %d" % group)


def _pattern(fingerprint: Fingerprint, rank: int, group: int, size: int) -> bytes:
    seed = fingerprint.digest + rank.to_bytes(4, "big") + group.to_bytes(4, "big")
    return hashlib.shake_128(seed).digest(size)


def of_self_test(result: JobResult) -> bool:
    """Whether a job was the self-test's: its ids are negative, the engine's are not. One that the
    self-test did not wait for ends later, and nobody else must hear of it."""
    return result.id < 0


class _StillRuns(RuntimeError):
    """A copy may still be reading the engine's blocks."""


class _StillWrites(RefuseToStart):
    """A copy may still be writing to them."""


class ProofRun:
    """Runs the self-test of one rank. The engine must be idle: nothing else may read or write the
    first engine blocks meanwhile. Their content is put back."""

    def __init__(
        self,
        engine: TransferEngine,
        pool: HostBlockPool,
        caches: KVCaches,
        geometry: CacheGeometry,
        fingerprint: Fingerprint,
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._caches = caches
        self._geometry = geometry
        self._fingerprint = fingerprint
        self._until = 0.0

    def run(self) -> Proof:
        """Test every group, within `PROOF_SECONDS`. Raises nothing that a copy may do wrong.

        Raises:
            RefuseToStart: a copy into the engine's cache did not end within `HANG_SECONDS` more.
        """
        began = time.monotonic()
        self._until = began + PROOF_SECONDS
        found: list[BlockChecksum] = []
        problem: str | None = None
        try:
            for index in range(len(self._geometry.groups)):
                found.append(self._group(index))
        except _StillWrites:
            raise
        except (TieredKVError, ValueError, RuntimeError) as error:
            problem = str(error)
        self._engine.drain(max(0.0, self._until - time.monotonic()))
        self._engine.finished()
        self._engine.released()
        return Proof(tuple(found), time.monotonic() - began, problem)

    def _group(self, index: int) -> BlockChecksum:
        group = self._geometry.groups[index]
        ids = tuple(range(group.chunk))
        if group.chunk > self._caches.num_blocks:
            raise ValueError(
                f"the engine's cache has {self._caches.num_blocks} blocks, fewer than the "
                f"{group.chunk} that one block of KV group {index} takes"
            )
        before = read_block(self._caches, index, ids)
        rank = self._geometry.rank
        pattern = _pattern(self._fingerprint, rank, group.index, len(before))
        slots = self._pool.lease(1)
        if slots is None:
            raise ValueError("no staging slot is free")
        try:
            write_block(self._caches, index, ids, pattern)
            self._store(index, ids, slots[0])
            write_block(self._caches, index, ids, bytes(len(before)))
            self._load(index, ids, slots[0])
            after = read_block(self._caches, index, ids)
        except _StillWrites:
            raise
        except _StillRuns:
            # The copy reads the blocks, and nobody what it makes of them; its slot stays on lease.
            write_block(self._caches, index, ids, before)
            raise
        except BaseException:
            self._put_back(index, ids, slots, before)
            raise
        self._put_back(index, ids, slots, before)
        return BlockChecksum.capture(_key(group.index), rank, memoryview(after))

    def _put_back(
        self, index: int, ids: tuple[int, ...], slots: tuple[SlotRef, ...], before: bytes
    ) -> None:
        write_block(self._caches, index, ids, before)
        self._pool.give_back(slots)

    def _store(self, index: int, ids: tuple[int, ...], slot: SlotRef) -> None:
        group = self._geometry.groups[index].index
        source = GpuSpec((GpuBlock(group, ids),))
        job = StoreJob(
            JobId(-1 - 2 * index), REQUEST, (_key(group),), source, StoreTargets(CpuSpec((slot,)))
        )
        self._end(job)

    def _load(self, index: int, ids: tuple[int, ...], slot: SlotRef) -> None:
        group = self._geometry.groups[index].index
        source = Parts((Part(CpuSpec((slot,)), (0,)),))
        target = GpuSpec((GpuBlock(group, ids),))
        self._end(LoadJob(JobId(-2 - 2 * index), REQUEST, (_key(group),), source, target))

    def _end(self, job: StoreJob | LoadJob) -> None:
        self._engine.submit(job)
        late = self._engine.wait([job.id], self._until - time.monotonic())
        if late:
            self._engine.poison(late)
            text = f"the {job.kind} did not end within {PROOF_SECONDS:g} s"
            if isinstance(job, StoreJob):
                raise _StillRuns(text)
            if self._engine.wait(late, HANG_SECONDS):
                ids = job.dst.blocks[0].block_ids
                raise _StillWrites(
                    f"rank {self._geometry.rank}: the start-up self-test's copy from host memory "
                    f"to the engine's blocks {ids[0]} to {ids[-1]} has not ended for "
                    f"{PROOF_SECONDS + HANG_SECONDS:g} s, and may still write to them: the device "
                    "or its driver hangs. Make sure that the device works, then start again"
                )
            raise ValueError(text)
        [result] = self._engine.finished()
        if result.statuses != (BlockStatus.OK,):
            why = "; ".join(reason for _, reason in self._engine.health().values())
            raise ValueError(f"the {job.kind} failed with {result.statuses[0].value} ({why})")
