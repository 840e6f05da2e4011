"""The engine's side of the connector: asks the manager, makes jobs, fences engine blocks.

It follows the order of calls, and the rules for jobs and fences, of vLLM's offloading scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tiered_kv.connector import Answer, ConnectorMetadata, Manager, WorkerReport
from tiered_kv.specs import GpuBlock, GpuSpec, LoadJob, StoreJob
from tiered_kv.testing.simulation.blocks import NULL_BLOCK
from tiered_kv.testing.simulation.counts import Counts
from tiered_kv.testing.simulation.model import SimulatedModel
from tiered_kv.testing.simulation.requests import Phase, Request
from tiered_kv.values import BlockKey, JobId

__all__ = ["EngineBroken", "Offloading"]


class EngineBroken(AssertionError):
    """The connector did what an inference engine does not survive."""


@dataclass(slots=True)
class _Job:
    request: str
    keys: tuple[BlockKey, ...]
    is_store: bool
    ranks: set[int]
    """That have not reported it."""
    fenced: tuple[int, ...] = ()
    """Engine blocks that may be freed while the request runs."""
    held: tuple[int, ...] = ()
    """Engine blocks that may be freed when the request is over."""


@dataclass(slots=True)
class _Tracked:
    request: Request
    jobs: set[JobId] = field(default_factory=set)
    offered: list[int] = field(default_factory=list)
    """Per group, whole blocks that were offered for storing, or loaded."""
    told_finished: bool = False


class Offloading:
    """Scheduler's thread only."""

    def __init__(
        self, manager: Manager, model: SimulatedModel, counts: Counts, *, fence_finished: bool
    ) -> None:
        self._manager = manager
        self._model = model
        self._counts = counts
        self._fence_finished = fence_finished
        self._tracked: dict[str, _Tracked] = {}
        self._jobs: dict[JobId, _Job] = {}
        self._next_job = 0
        self._stale_below = 0
        self._loads: list[LoadJob] = []
        self._flush: set[JobId] = set()
        self._fences: dict[int, set[JobId]] = {}
        self._loading: set[BlockKey] = set()
        self._unstored: set[BlockKey] = set()
        """Blocks of running stores that a rank could not store."""
        self.allocated: set[int] = set()
        """Engine blocks that were given out in this step."""

    @property
    def jobs(self) -> frozenset[JobId]:
        """Jobs that not all ranks have reported."""
        return frozenset(self._jobs)

    @property
    def loading(self) -> bool:
        """Whether blocks are being loaded."""
        return bool(self._loading)

    @property
    def tracked(self) -> int:
        """Requests that are remembered."""
        return len(self._tracked)

    # Requests

    def on_new_request(self, request: Request) -> None:
        """A request was added."""
        self._tracked[request.name] = _Tracked(request, offered=[0] * len(self._model.groups))
        self._manager.on_new_request(request.name, request.tiers)

    def on_finished(self, request: Request) -> None:
        """A request is over, and its blocks are about to be freed."""
        self._manager.note_answer(request.name, len(request.output))
        if self._fence_finished:
            for job in self._tracked[request.name].jobs:
                self._fence(job, self._jobs[job].held)

    def _fence(self, job: JobId, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._fences.setdefault(block, set()).add(job)

    # Lookup and loads

    def matched(self, request: Request, computed: int) -> int | None:
        """How many tokens beyond `computed` can be loaded; None: ask again in a later step."""
        tracked = self._tracked[request.name]
        if tracked.jobs:
            return None
        keys = [request.keys(group) for group in range(len(self._model.groups))]
        every = [key for row in keys for key in row]
        self._manager.lookup(request.name, every, computed, request.length)
        align = self._model.tier_alignment
        most = request.length - any(group.window for group in self._model.groups)
        for end in range(most // align * align, computed, -align):
            needed = self._needed(keys, computed, end)
            answers = {self._manager.answer(request.name, key) for key in needed}
            if not needed or Answer.MISS in answers:
                continue
            if answers != {Answer.HIT} or not self._loading.isdisjoint(needed):
                return None
            return end - computed
        return 0

    def _needed(
        self, keys: Sequence[Sequence[BlockKey]], computed: int, end: int
    ) -> list[BlockKey]:
        needed: list[BlockKey] = []
        for number, group in enumerate(self._model.groups):
            tokens = self._model.chunk_tokens(number)
            start = max(computed, group.first_needed(end) * group.tokens)
            needed.extend(keys[number][start // tokens : -(-end // tokens)])
        return needed

    def after_allocation(self, request: Request, computed: int, end: int) -> None:
        """The tables have blocks for the tokens from `computed` to `end`, which are to be
        loaded."""
        tracked = self._tracked[request.name]
        if tracked.jobs:
            raise EngineBroken(f"request {request.name} has jobs, and shall load")
        keys: list[BlockKey] = []
        blocks: list[GpuBlock] = []
        for number, group in enumerate(self._model.groups):
            table = request.tables[number]
            chunk = self._model.chunk
            fresh = range(computed // group.tokens, end // group.tokens)
            wanted = [index for index in fresh if table[index] != NULL_BLOCK]
            for place in dict.fromkeys(index // chunk for index in wanted):
                inside = [index for index in wanted if index // chunk == place]
                keys.append(request.key(number, place))
                ids = tuple(table[index] for index in inside)
                blocks.append(GpuBlock(number, ids, inside[0] % chunk))
            tracked.offered[number] = end // self._model.chunk_tokens(number)
        sources = {key: self._manager.source(request.name, key) or "?" for key in keys}
        plan = self._manager.prepare_load(request.name, keys)
        job = self._new_job(_Job(request.name, tuple(keys), False, self._ranks()), tracked)
        destination = GpuSpec(tuple(blocks))
        self._loads.append(
            LoadJob(job, request.name, tuple(keys), plan.parts, destination, plan.deadline)
        )
        self._loading.update(keys)
        request.loaded_tokens = end - computed
        request.load_sources = sources
        self._counts.loads += 1

    def _ranks(self) -> set[int]:
        return set(range(self._model.ranks))

    def _new_job(self, job: _Job, tracked: _Tracked) -> JobId:
        number = JobId(self._next_job)
        self._next_job += 1
        self._jobs[number] = job
        tracked.jobs.add(number)
        return number

    # The step's message

    def build(
        self, scheduled: Iterable[Request], finished: Sequence[str], preempted: Iterable[str]
    ) -> ConnectorMetadata:
        """The jobs of this step. The requests' `computed` is what the step leads to."""
        for name in preempted:
            self._flush.update(self._tracked[name].jobs)
        for block in self.allocated & self._fences.keys():
            self._flush.update(self._fences[block])
        over = [self._tracked[name] for name in finished if name in self._tracked]
        stores = [
            job
            for tracked in (*(self._tracked[request.name] for request in scheduled), *over)
            if (job := self._store(tracked)) is not None
        ]
        message = ConnectorMetadata(
            tuple(self._loads),
            tuple(stores),
            frozenset(self._flush),
            self._manager.take_orders(),
        )
        for tracked in over:
            tracked.told_finished = True
            self._manager.on_request_finished(tracked.request.name)
            self._drop_if_over(tracked)
        self._counts.flushes += bool(message.flush)
        self._counts.flushed_jobs += len(message.flush)
        self._loads = []
        self._flush = set()
        self.allocated = set()
        return message

    def _store(self, tracked: _Tracked) -> StoreJob | None:
        request = tracked.request
        if any(not self._jobs[job].is_store for job in tracked.jobs):
            return None  # aborted while it was loaded
        upto = request.computed
        if request.phase is Phase.FINISHED:  # the last token's KV is not final
            upto = min(upto, request.length - 1)
        found: dict[BlockKey, GpuBlock] = {}
        for number, group in enumerate(self._model.groups):
            table, chunk = request.tables[number], self._model.chunk
            whole = min(upto // group.tokens, len(table)) // chunk
            for place in range(tracked.offered[number], whole):
                ids = tuple(table[place * chunk : (place + 1) * chunk])
                if NULL_BLOCK not in ids:
                    found[request.key(number, place)] = GpuBlock(number, ids)
            tracked.offered[number] = max(tracked.offered[number], whole)
        if not found:
            return None
        plan = self._manager.prepare_store(request.name, list(found))
        if not plan.keys:
            return None
        blocks = tuple(found[key] for key in plan.keys)
        windowed: list[int] = []
        others: list[int] = []
        for block in blocks:
            kept = self._model.groups[block.group].window is None
            (others if kept else windowed).extend(block.block_ids)
        job = _Job(request.name, plan.keys, True, self._ranks(), tuple(windowed), tuple(others))
        job_id = self._new_job(job, tracked)
        self._fence(job_id, windowed)
        if request.phase.over and self._fence_finished:
            self._fence(job_id, others)
        if not self.allocated.isdisjoint((*windowed, *others)) and request.phase.over:
            self._flush.add(job_id)
        self._counts.stores += 1
        self._counts.stored_blocks += len(plan.keys)
        return StoreJob(job_id, request.name, plan.keys, GpuSpec(blocks), plan.targets)

    # News

    def take_report(self, report: WorkerReport) -> None:
        """Hear the ranks' news before the completions that came with them."""
        self._manager.take_report(report)
        for failed in report.failed_loads:
            self._counts.failed_blocks[failed.status.value] += 1
            tracked = self._tracked.get(failed.request)
            if tracked is not None:  # it may offer all its blocks again
                tracked.offered = [0] * len(self._model.groups)
        for failed in report.failed_stores:
            self._counts.unstored_blocks[failed.status.value] += 1
            self._unstored.add(failed.key)

    def completed(self, rank: int, number: JobId) -> None:
        """A rank reported a job.

        Raises:
            EngineBroken: nobody gave it this job, or it reported the job before.
        """
        if number < self._stale_below:
            return
        job = self._jobs.get(number)
        if job is None or rank not in job.ranks:
            raise EngineBroken(f"rank {rank} reports job {number}, which is unknown or reported")
        job.ranks.remove(rank)
        if job.ranks:
            return
        tracked = self._tracked[job.request]
        if job.is_store:
            self._manager.complete_store(frozenset(job.keys))
            self._counts.completed_stores += self._unstored.isdisjoint(job.keys)
            self._unstored.difference_update(job.keys)
        else:
            self._manager.complete_load(job.request, frozenset(job.keys))
            self._loading.difference_update(job.keys)
        del self._jobs[number]
        tracked.jobs.remove(number)
        for block in (*job.fenced, *job.held):
            fence = self._fences.get(block, set())
            fence.discard(number)
            if not fence:
                self._fences.pop(block, None)
        self._drop_if_over(tracked)

    def _drop_if_over(self, tracked: _Tracked) -> None:
        if tracked.told_finished and not tracked.jobs:
            self._tracked.pop(tracked.request.name, None)

    def count_load(self, request: Request) -> None:
        """A load went well on all ranks."""
        self._counts.completed_loads += 1
        self._counts.loaded_blocks.update(Counter(request.load_sources.values()))
        self._counts.loaded_tokens += request.loaded_tokens

    def reset(self) -> None:
        """Serve nothing that was stored before; jobs in flight end unheard."""
        self._flush.update(self._jobs)
        for name, tracked in list(self._tracked.items()):
            if tracked.request.phase.over:
                if not tracked.told_finished:
                    self._manager.on_request_finished(name)
                del self._tracked[name]
        self._manager.reset()
        for tracked in self._tracked.values():
            tracked.offered = [0] * len(self._model.groups)
            tracked.jobs.clear()
        self._stale_below = self._next_job
        self._jobs.clear()
        self._fences.clear()
        self._loading.clear()
        self._unstored.clear()
