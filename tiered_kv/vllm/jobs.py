"""Translates vLLM's step metadata into the jobs of the worker half, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, get_offload_group_idx

from tiered_kv.connector import Border, ConnectorMetadata, Handshake, Orders, WorkerReport
from tiered_kv.specs import GpuBlock, GpuSpec, JobResult, LoadJob, StoreJob
from tiered_kv.values import BlockKey, JobId, JobKind
from tiered_kv.vllm.spec import LoadSource, StoreDestination

__all__ = [
    "TieredHandshake",
    "TieredMetadata",
    "TieredWorkerMetadata",
    "gpu_spec",
    "to_connector_metadata",
    "worker_metadata",
]


@dataclass
class TieredMetadata(OffloadingConnectorMetadata):
    """vLLM's message of a step, with our own orders beside its jobs."""

    orders: Orders = field(default_factory=Orders)
    step: int | None = None
    """Number of a step that is timed."""


@dataclass
class TieredHandshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler once, at start."""

    handshake: Handshake


@dataclass
class TieredWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's completions, with our own news beside them."""

    report: WorkerReport = field(default_factory=WorkerReport)
    step: int | None = None
    """Number of the timed step that this came with."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The news of two ranks as one. The base class would drop the report."""
        assert isinstance(other, OffloadingWorkerMetadata)
        both = super().aggregate(other)
        assert isinstance(both, OffloadingWorkerMetadata)
        report = self.report
        if isinstance(other, TieredWorkerMetadata):
            report = report.merged(other.report)
        return TieredWorkerMetadata(both.completed_jobs, both.transfer_stats, report, self.step)


def to_connector_metadata(
    metadata: OffloadingConnectorMetadata, groups: Mapping[int, int], chunk: int, border: Border
) -> ConnectorMetadata:
    """Translate one step's jobs; one that cannot be translated fails when it is begun.

    Args:
        metadata: as vLLM's scheduler half made it.
        groups: vLLM's group id -> our group number.
        chunk: engine blocks per block.
        border: hears of errors.
    """

    def blocks(spec: GPULoadStoreSpec, keys: Sequence[BlockKey], *, whole: bool = False) -> GpuSpec:
        nowhere = GpuSpec(tuple(GpuBlock(0, ()) for _ in keys))
        translate = partial(gpu_spec, spec, keys, groups, chunk, whole=whole)
        return border.call("gpu_spec", translate, nowhere)

    loads: list[LoadJob] = []
    for job_id, job in metadata.load_jobs.items():
        source, destination = job.src_spec, job.dst_spec
        assert isinstance(source, LoadSource)
        assert isinstance(destination, GPULoadStoreSpec)
        loads.append(
            LoadJob(
                JobId(job_id),
                job.req_id,
                source.keys,
                source.plan.parts,
                blocks(destination, source.keys),
                source.plan.deadline,
            )
        )
    stores: list[StoreJob] = []
    for job_id, job in metadata.store_jobs.items():
        origin, target = job.src_spec, job.dst_spec
        assert isinstance(origin, GPULoadStoreSpec)
        assert isinstance(target, StoreDestination)
        stores.append(
            StoreJob(
                JobId(job_id),
                job.req_id,
                target.keys,
                blocks(origin, target.keys, whole=True),
                target.targets,
            )
        )
    flush = frozenset(JobId(job_id) for job_id in metadata.jobs_to_flush or ())
    orders = metadata.orders if isinstance(metadata, TieredMetadata) else Orders()
    return ConnectorMetadata(tuple(loads), tuple(stores), flush, orders)


def gpu_spec(
    spec: GPULoadStoreSpec,
    keys: Sequence[BlockKey],
    groups: Mapping[int, int],
    chunk: int,
    *,
    whole: bool = False,
) -> GpuSpec:
    """Cut vLLM's flat list of engine block ids into one `GpuBlock` per key.

    vLLM lists the ids group by group; `block_indices[g]` is the logical index of the group's
    first id, so the first block of a group may lack its head, and the last its tail. A group
    whose ids don't come out even with its keys gets empty blocks, which the handler refuses.

    Args:
        spec: vLLM's list.
        keys: what the ids hold.
        groups: vLLM's group id -> our group number.
        chunk: engine blocks per block.
        whole: no block may lack its tail. So it is for a store: vLLM leaves out the ids of a
            sliding window that were given to others meanwhile, wherever they are, and all ids
            behind such a gap would be taken for their neighbours'.
    """
    numbers = list(groups.values())
    per_group: dict[int, list[int]] = {number: [] for number in numbers}
    for position, key in enumerate(keys):
        per_group[groups[get_offload_group_idx(OffloadKey(key))]].append(position)
    blocks: list[GpuBlock] = [GpuBlock(numbers[0], ())] * len(keys)
    ids = [int(block_id) for block_id in spec.block_ids]
    start = 0
    for number, size, index in zip(numbers, spec.group_sizes, spec.block_indices, strict=True):
        positions = per_group[number]
        skip = int(index) % chunk
        even = -(-(skip + size) // chunk) == len(positions) if size else not positions
        even = even and not (whole and (skip + size) % chunk)
        cursor, end = start, start + size
        for position in positions:
            if not even:
                blocks[position] = GpuBlock(number, ())
                continue
            taken = ids[cursor : min(end, cursor + chunk - skip)]
            blocks[position] = GpuBlock(number, tuple(taken), skip)
            cursor += len(taken)
            skip = 0
        start = end
    return GpuSpec(tuple(blocks))


def worker_metadata(
    completed: Sequence[JobResult], report: WorkerReport | None, step: int | None = None
) -> TieredWorkerMetadata | None:
    """vLLM's worker metadata of a step; None where there is no news, and the step is not timed."""
    if not completed and report is None and step is None:
        return None
    metadata = TieredWorkerMetadata(report=report or WorkerReport(), step=step)
    for result in completed:
        metadata.mark_completed(result.id)
        direction = (
            metadata.transfer_stats.load
            if result.kind is JobKind.LOAD
            else metadata.transfer_stats.store
        )
        direction.record(result.copied_bytes, result.seconds)
    return metadata
