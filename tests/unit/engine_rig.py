"""A transfer engine over stand-ins, for its tests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, cast

from tests.unit.doubles import (
    BLOCK_BYTES,
    PATIENCE,
    SLOT_BYTES,
    DirectLoad,
    DirectStore,
    EngineCache,
    FastSpec,
    Gather,
    Journal,
    MemoryStore,
    Scatter,
    SlowSpec,
    content,
    gpu,
    key,
)
from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import VerifyMode
from tiered_kv.engine import (
    DeviceStagingFactory,
    EngineLimits,
    TransferEngine,
    register_store_handlers,
)
from tiered_kv.memory import HostBlockPool, KVCaches, make_staging
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import (
    CpuSpec,
    GpuSpec,
    JobResult,
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
from tiered_kv.stats import StatsRecorder, StatsSnapshot
from tiered_kv.values import (
    BlockStatus,
    CacheGeometry,
    GroupGeometry,
    JobId,
)


class WatchedPool(HostBlockPool):
    """A pool that tells when leases change."""

    def __init__(self, tier_slots: int, staging_slots: int, spare_slots: int = 0) -> None:
        super().__init__(tier_slots, staging_slots, SLOT_BYTES, spare_slots=spare_slots)
        self.changed = threading.Condition()
        self.most_leased = 0
        self.asked = 0

    def lease(self, count: int, *, leave: int = 0) -> tuple[SlotRef, ...] | None:
        self.asked += 1
        slots = super().lease(count, leave=leave)
        self.most_leased = max(self.most_leased, self.leased)
        return slots

    def give_back(self, slots: Iterable[SlotRef]) -> None:
        super().give_back(slots)
        with self.changed:
            self.changed.notify_all()

    def wait_for_leased(self, count: int) -> None:
        with self.changed:
            reached = self.changed.wait_for(lambda: self.leased == count, timeout=PATIENCE)
        assert reached, f"{self.leased} slots are leased, not {count}"


@dataclass
class Rig:
    """A transfer engine over doubles, with tiers "fast" and "slow"."""

    tier_slots: int = 64
    staging_slots: int = 8
    group_blocks: int = 1
    load_deadline: float = PATIENCE
    store_deadline: float = PATIENCE
    store_queue_blocks: int = 1_000
    store_queue_seconds: float = PATIENCE
    share: float = 1.0
    threads: int = 2
    retry_after: float = PATIENCE
    faults: int = 1
    """After so many faults, be they few among many calls, a hop's breaker opens."""
    spare_slots: int = 0
    """For background reads; without them there are none."""
    direct: bool = False
    """Whether there are handlers between "fast" and the engine's cache."""
    through_host: bool = True
    """Whether there are handlers between "fast" and host slots."""
    attach: bool = True
    device_staging: DeviceStagingFactory = make_staging
    verify: Mapping[str, VerifyMode] = field(default_factory=dict)
    write_budgets: Mapping[str, int] = field(default_factory=dict)
    journal: Journal = field(default_factory=Journal)

    def __post_init__(self) -> None:
        self.registry = TransferRegistry()
        self.registry.register(GpuSpec, CpuSpec, Gather, provider="doubles")
        self.registry.register(CpuSpec, GpuSpec, Scatter, provider="doubles")
        if self.through_host:
            register_store_handlers(self.registry, FastSpec, "doubles")
        register_store_handlers(self.registry, SlowSpec, "doubles")
        if self.direct:
            self.registry.register(FastSpec, GpuSpec, DirectLoad, provider="direct")
            self.registry.register(GpuSpec, FastSpec, DirectStore, provider="direct")
        self.cache = EngineCache(self.journal)
        self.pool = WatchedPool(self.tier_slots, self.staging_slots, self.spare_slots)
        self.fast = MemoryStore("fast", self.journal)
        self.slow = MemoryStore("slow", self.journal)
        self.stats = StatsRecorder("rank 0")
        self.engine = TransferEngine(
            registry=self.registry,
            geometry=CacheGeometry((GroupGeometry(0, BLOCK_BYTES, 1, 16),), 0, 1),
            memory=self.pool,
            tiers={"fast": FastSpec, "slow": SlowSpec},
            limits=EngineLimits(
                load_deadline=self.load_deadline,
                store_deadline=self.store_deadline,
                store_queue_bytes=self.store_queue_blocks * BLOCK_BYTES,
                store_queue_seconds=self.store_queue_seconds,
                write_behind_share=self.share,
                group_bytes=self.group_blocks * SLOT_BYTES,
                behind_bytes=self.group_blocks * SLOT_BYTES,
                threads_per_tier=self.threads,
                retry_after=self.retry_after,
                least_faults=self.faults,
                fault_share=0.001,
                timeouts_in_a_row=self.faults,
            ),
            stats=self.stats,
            caches=cast(KVCaches, self.cache),
            verify=self.verify,
            write_budgets=self.write_budgets,
            device_staging=self.device_staging,
        )
        if self.attach:
            self.engine.attach("fast", self.fast)
            self.engine.attach("slow", self.slow)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for valve in (
            self.fast.reading,
            self.fast.writing,
            self.fast.publishing,
            self.slow.reading,
            self.slow.writing,
            self.slow.publishing,
            *self.cache.valves,
        ):
            valve.open()
        clean = self.engine.close(PATIENCE)
        if kind is None:
            assert clean
            assert self.pool.leased == 0
            assert self.pool.stray_returns == 0
            assert self.fast.reserved == self.slow.reserved == 0
        self.pool.close()

    # ------------------------------------------------------------------------------------ jobs

    def load(
        self,
        job: int,
        parts: Mapping[LoadStoreSpec, Sequence[int]],
        deadline: float | None = None,
    ) -> LoadJob:
        """Block i of the job is number i; it goes to engine block i."""
        count = sum(len(positions) for positions in parts.values())
        return LoadJob(
            JobId(job),
            f"request {job}",
            tuple(key(i) for i in range(count)),
            Parts(tuple(Part(spec, tuple(places)) for spec, places in parts.items())),
            gpu(range(count)),
            deadline,
        )

    def load_from(self, job: int, numbers: Sequence[int], spec: type[KeySpec]) -> LoadJob:
        """All blocks from one tier."""
        keys = tuple(key(i) for i in numbers)
        source = spec(str(spec.medium), keys)
        part = Part(source, tuple(range(len(keys))))
        return LoadJob(JobId(job), f"request {job}", keys, Parts((part,)), gpu(numbers))

    def store(
        self,
        job: int,
        numbers: Sequence[int],
        *behind: type[KeySpec],
        slots: bool = True,
        generation: int = 1,
    ) -> StoreJob:
        """Block number i lies in engine block i and goes to slot i."""
        for number in numbers:
            self.cache.blocks[number] = content(number)
        keys = tuple(key(i) for i in numbers)
        places = tuple(range(len(keys)))
        first = CpuSpec(tuple(SlotRef(i, generation) for i in numbers)) if slots else None
        parts = tuple(Part(spec(str(spec.medium), keys), places) for spec in behind)
        return StoreJob(
            JobId(job), f"request {job}", keys, gpu(numbers), StoreTargets(first, parts)
        )

    def promotion(
        self,
        job: int,
        numbers: Sequence[int],
        spec: type[KeySpec] = FastSpec,
        *,
        generation: int = 1,
        deadline: float = PATIENCE,
    ) -> PromoteJob:
        """Block number i goes from one tier to slot i."""
        keys = tuple(key(i) for i in numbers)
        part = Part(spec(str(spec.medium), keys), tuple(range(len(keys))))
        slots = CpuSpec(tuple(SlotRef(i, generation) for i in numbers))
        return PromoteJob(JobId(job), keys, Parts((part,)), slots, deadline)

    def promoted(self, count: int) -> dict[int, tuple[BlockStatus, ...]]:
        """Pop promotions until there are so many that have ended; their statuses."""
        found: dict[int, tuple[BlockStatus, ...]] = {}
        pause = threading.Event()
        for _ in range(3000):
            found.update(self.engine.promoted())
            if len(found) >= count:
                break
            pause.wait(PATIENCE / 3000)  # the engine tells nobody when a promotion has ended
        assert len(found) == count
        return found

    def fill_slots(self, numbers: Iterable[int], generation: int = 1) -> CpuSpec:
        """Put blocks into host slots of the manager."""
        slots = []
        for number in numbers:
            slot = SlotRef(number, generation)
            view = self.pool.begin(slot)
            assert view is not None
            data = content(number)
            view[: len(data)] = data
            assert self.pool.bind(slot, BlockChecksum.capture(key(number), 0, memoryview(data)))
            slots.append(slot)
        return CpuSpec(tuple(slots))

    def run(self, *jobs: LoadJob | StoreJob) -> list[JobResult]:
        """Submit, wait, and pop the results, in the order of the jobs."""
        for job in jobs:
            self.engine.submit(job)
        return self.results(*(job.id for job in jobs))

    def results(self, *ids: JobId) -> list[JobResult]:
        """Wait for jobs and pop their results; there must be no others."""
        late = self.engine.wait(ids, PATIENCE)
        assert not late, f"jobs {sorted(late)} did not end: {self.journal.entries()}"
        found = {result.id: result for result in self.engine.finished()}
        assert found.keys() == set(ids)
        return [found[job] for job in ids]

    def wait_for_released(self, count: int) -> list[int]:
        """Pop released slots until there are so many; their numbers."""
        found: list[int] = []
        pause = threading.Event()
        for _ in range(3000):
            found.extend(slot.number for slot in self.engine.released())
            if len(found) >= count:
                break
            pause.wait(PATIENCE / 3000)  # the engine tells nobody when it releases a slot
        assert len(found) == count
        return sorted(found)

    def snapshot(self) -> StatsSnapshot:
        return self.stats.snapshot()
