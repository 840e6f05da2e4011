"""Drives the transfer engine as a serving engine does, one batch of blocks at a time, and times it.

The engine, its handlers, groups and threads are those that serve; only its patience is longer, so
that a slow medium is measured and not given up. Several transfer engines share one pool, one cache
and one store: with and without verification, and where a tier can be reached directly, with each
way alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass

from tiered_kv.cli.benching.figures import Sample
from tiered_kv.contracts import BlockStore, VerifyMode
from tiered_kv.engine import EngineLimits, TransferEngine
from tiered_kv.errors import DeadlineExceeded, TieredKVError
from tiered_kv.memory import (
    HostBlockPool,
    default_device,
    device_of,
    random_caches,
    read_block,
    write_block,
)
from tiered_kv.registry import TransferRegistry
from tiered_kv.routing import CPU_ENDPOINT
from tiered_kv.specs import (
    CpuSpec,
    GpuBlock,
    GpuSpec,
    KeySpec,
    LoadJob,
    LoadStoreSpec,
    Part,
    Parts,
    PromoteJob,
    SlotRef,
    StoreJob,
    StoreTargets,
)
from tiered_kv.stats import StatsRecorder
from tiered_kv.values import BlockKey, BlockStatus, CacheGeometry, GroupGeometry, JobId

__all__ = ["Batch", "Rig", "Stored", "TierDrive"]

CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks of one size that are moved together."""

    block_bytes: int
    blocks: int
    layers: int
    """Tensors of the engine's cache over which a block is spread."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.block_bytes * self.blocks

    @property
    def geometry(self) -> CacheGeometry:
        """One group, one rank."""
        group = GroupGeometry(index=0, block_bytes=self.block_bytes, chunk=1, tokens=1)
        return CacheGeometry((group,), rank=0, world_size=1)


@dataclass(frozen=True, slots=True)
class Stored:
    """A store by way of host slots, and its two halves."""

    captured: Sample
    """The blocks left the engine's cache: the job was done for the engine."""
    behind: Sample
    """From then on, until the store had them all."""
    whole: Sample


class Rig:
    """A cache, a pool and a batch in them, without any tier yet. Main thread only."""

    def __init__(self, batch: Batch, staging_bytes: int, timeout: float) -> None:
        """Take their memory: the batch twice, and the staging. `timeout` is in seconds, for each
        run.

        Raises:
            ConfigError: there is not that much memory left.
        """
        device = default_device()
        self.batch = batch
        self.timeout = timeout
        self.caches = random_caches(batch.blocks, batch.block_bytes, batch.layers, device)
        known = device_of(device)
        slot_bytes = batch.geometry.slot_bytes
        self.pool = HostBlockPool(
            batch.blocks,
            max(2, staging_bytes // slot_bytes),
            slot_bytes,
            register=None if known is None else known.register_host,
            unregister=None if known is None else known.unregister_host,
        )
        self.pool.grow()
        if not self.pool.wait_grown(timeout):
            self.pool.close()
            raise DeadlineExceeded(f"the pool did not grow within {timeout:g} s")
        self.keys = tuple(BlockKey(os.urandom(32)) for _ in range(batch.blocks))
        # The first and the last: enough to see that bytes come back, and quick.
        self._samples = {i: read_block(self.caches, 0, (i,)) for i in {0, batch.blocks - 1}}
        self._generation = 0
        self._jobs = 0

    def slots(self, *, anew: bool = False) -> CpuSpec:
        """The slots of the batch; `anew`: to be written."""
        self._generation += anew
        return CpuSpec(tuple(SlotRef(i, self._generation) for i in range(self.batch.blocks)))

    def cache(self) -> GpuSpec:
        """The batch's places in the cache."""
        return GpuSpec(tuple(GpuBlock(0, (i,)) for i in range(self.batch.blocks)))

    def next_job(self) -> JobId:
        """A new number."""
        self._jobs += 1
        return JobId(self._jobs)

    def whole(self, spec: LoadStoreSpec) -> Parts:
        """All blocks, from one place."""
        return Parts((Part(spec, tuple(range(self.batch.blocks))),))

    def spoil_cache(self) -> None:
        """Overwrite what `check_cache` looks at."""
        for i in self._samples:
            write_block(self.caches, 0, (i,), bytes(self.batch.block_bytes))

    def check_cache(self, what: str) -> None:
        """Raises TieredKVError where the cache does not hold what it held in the beginning."""
        for i, data in self._samples.items():
            if read_block(self.caches, 0, (i,)) != data:
                raise TieredKVError(f"{what}: a block came back with other bytes")

    def check_slots(self, what: str) -> None:
        """The same of the slots."""
        for i, data in self._samples.items():
            view = self.pool.view(SlotRef(i, self._generation))
            if view is None or view.tobytes() != data:
                raise TieredKVError(f"{what}: a block came back with other bytes")

    def close(self) -> None:
        """Let go of the pool."""
        self.pool.close()


class TierDrive:
    """Moves a rig's batch to and from one tier, by one way. Main thread only."""

    def __init__(
        self,
        rig: Rig,
        registry: TransferRegistry,
        tier: str | None,
        spec: type[KeySpec] | None,
        store: BlockStore | None,
        verify: VerifyMode,
    ) -> None:
        """Without a tier only host slots are used.

        Raises:
            RefuseToStart: the caches cannot be copied safely.
        """
        self._rig = rig
        self._tier = tier
        self._spec = spec
        self._store = store
        self._stats = StatsRecorder("bench")
        self._promotions = 0
        tiers = {tier: spec} if tier is not None and spec is not None else {}
        self.engine = TransferEngine(
            registry=registry,
            geometry=rig.batch.geometry,
            memory=rig.pool,
            tiers=tiers,
            limits=_patient(rig),
            stats=self._stats,
            caches=rig.caches,
            verify=dict.fromkeys(tiers, verify),
        )
        if tier is not None and store is not None:
            self.engine.attach(tier, store)

    # ----------------------------------------------------------------------------------- moving

    def empty(self) -> None:
        """Delete the batch from the store."""
        if self._store is not None:
            self._store.delete(self._rig.keys)

    def store(self, *, slots: bool = True) -> Stored:
        """Out of the cache, into slots, and from there into the tier, where there is one. Without
        `slots` as where no cpu tier is configured: through staging, or directly.

        Raises:
            TieredKVError: a block did not come through.
            DeadlineExceeded: not within the rig's time.
        """
        rig, engine = self._rig, self.engine
        behind = () if self._tier is None else rig.whole(self._source()).parts
        first = rig.slots(anew=True) if slots else None
        job = StoreJob(rig.next_job(), "bench", rig.keys, rig.cache(), StoreTargets(first, behind))
        fence = rig.caches.fence()
        clock = _Clock()
        engine.submit(job, fence)
        late = engine.wait([job.id], rig.timeout)
        captured = clock.sample()
        self._drained(late, "store")
        whole = clock.sample()
        self._check_job("store")
        if self._store is not None:
            self._check_stored(self._store)
        return Stored(captured, _difference(whole, captured), whole)

    def load(self, *, host: bool = False) -> Sample:
        """From the tier into the cache, or from the slots (`host`).

        Raises:
            TieredKVError: a block did not come through.
            DeadlineExceeded: not within the rig's time.
        """
        rig, engine = self._rig, self.engine
        source = rig.whole(rig.slots() if host else self._source())
        rig.spoil_cache()
        job = LoadJob(rig.next_job(), "bench", rig.keys, source, rig.cache())
        fence = rig.caches.fence()
        clock = _Clock()
        engine.submit(job, fence)
        late = engine.wait([job.id], rig.timeout)
        sample = clock.sample()
        self._drained(late, "load")
        self._check_job("load")
        rig.check_cache("load")
        return sample

    def bring(self) -> Sample:
        """From the tier into slots, as blocks of a slow tier are brought before their load.

        Raises:
            TieredKVError: a block did not come through.
            DeadlineExceeded: not within the rig's time.
        """
        rig, engine = self._rig, self.engine
        self._promotions += 1
        source, slots = rig.whole(self._source()), rig.slots(anew=True)
        number = JobId(self._promotions)
        job = PromoteJob(number, rig.keys, source, slots, deadline=rig.timeout)
        clock = _Clock()
        engine.promote(job)
        self._drained((), "load into host slots")
        sample = clock.sample()
        ((_, statuses),) = engine.promoted()
        engine.released()
        self._check(statuses, "load into host slots")
        rig.check_slots("load into host slots")
        return sample

    def _source(self) -> KeySpec:
        assert self._tier is not None
        assert self._spec is not None
        return self._spec(self._tier, self._rig.keys)

    def _drained(self, late: Collection[JobId], what: str) -> None:
        if late or not self.engine.drain(self._rig.timeout):
            raise DeadlineExceeded(f"a {what} did not end within {self._rig.timeout:g} s")

    def _check_job(self, what: str) -> None:
        (result,) = self.engine.finished()
        self.engine.released()
        self._check(result.statuses, what)

    def _check(self, statuses: Collection[BlockStatus], what: str) -> None:
        failed = {status.value for status in statuses if status is not BlockStatus.OK}
        if failed:
            raise TieredKVError(f"a {what} failed: {', '.join(sorted(failed))} ({self._why()})")

    def _check_stored(self, store: BlockStore) -> None:
        missing = store.contains(self._rig.keys).count(False)
        if missing:
            dropped = ", ".join(self._stats.snapshot().tier(self._tier or "").dropped)
            why = f"dropped: {dropped}" if dropped else self._why()
            raise TieredKVError(
                f"{missing} of {len(self._rig.keys)} blocks were not stored ({why})"
            )

    def _why(self) -> str:
        return "; ".join(
            reason if tier == CPU_ENDPOINT.tier else f"{tier}: {reason}"
            for tier, (_, reason) in self.engine.health().items()
        )

    # ----------------------------------------------------------------------------------- ending

    def close(self) -> None:
        """End the engine; its threads may be left in calls that hang."""
        self.engine.close(CLOSE_SECONDS)


class _Clock:
    """Time and processor time since it was made."""

    def __init__(self) -> None:
        self._processor = time.process_time()
        self._wall = time.perf_counter()

    def sample(self) -> Sample:
        seconds = time.perf_counter() - self._wall
        return Sample(seconds, time.process_time() - self._processor)


def _difference(whole: Sample, first: Sample) -> Sample:
    assert whole.processor_seconds is not None
    assert first.processor_seconds is not None
    return Sample(whole.seconds - first.seconds, whole.processor_seconds - first.processor_seconds)


def _patient(rig: Rig) -> EngineLimits:
    """As where it serves, but for how long it waits, and for how much."""
    return EngineLimits(
        load_deadline=rig.timeout,
        store_deadline=rig.timeout,
        store_queue_bytes=2 * rig.batch.nbytes,
        store_queue_seconds=rig.timeout,
        write_behind_share=1.0,
    )
