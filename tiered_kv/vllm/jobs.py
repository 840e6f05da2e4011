"""Translates vLLM's step metadata into the jobs of the worker half, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, get_offload_group_idx

from tiered_kv.connector import ConnectorMetadata, Handshake, WorkerReport
from tiered_kv.specs import GpuBlock, GpuSpec, JobResult, LoadJob, StoreJob
from tiered_kv.values import BlockKey, JobId, JobKind
from tiered_kv.vllm.spec import LoadSource, StoreDestination

__all__ = [
    "TieredHandshake",
    "TieredWorkerMetadata",
    "gpu_spec",
    "to_connector_metadata",
    "worker_metadata",
]


@dataclass
class TieredHandshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler once, at start."""

    handshake: Handshake


@dataclass
class TieredWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's completions, with our own news beside them."""

    report: WorkerReport = field(default_factory=WorkerReport)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The news of two ranks as one. The base class would drop the report."""
        assert isinstance(other, OffloadingWorkerMetadata)
        both = super().aggregate(other)
        assert isinstance(both, OffloadingWorkerMetadata)
        report = self.report
        if isinstance(other, TieredWorkerMetadata):
            report = report.merged(other.report)
        return TieredWorkerMetadata(both.completed_jobs, both.transfer_stats, report)


def to_connector_metadata(
    metadata: OffloadingConnectorMetadata, groups: Mapping[int, int], chunk: int
) -> ConnectorMetadata:
    """Translate one step's jobs.

    Args:
        metadata: as vLLM's scheduler half made it.
        groups: vLLM's group id -> our group number.
        chunk: engine blocks per block.
    """
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
                source.parts,
                gpu_spec(destination, source.keys, groups, chunk),
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
                gpu_spec(origin, target.keys, groups, chunk, whole=True),
                target.targets,
            )
        )
    flush = frozenset(JobId(job_id) for job_id in metadata.jobs_to_flush or ())
    return ConnectorMetadata(tuple(loads), tuple(stores), flush)


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
    completed: Sequence[JobResult], report: WorkerReport | None
) -> TieredWorkerMetadata | None:
    """vLLM's worker metadata of a step; None where there is no news."""
    if not completed and report is None:
        return None
    metadata = TieredWorkerMetadata(report=report or WorkerReport())
    for result in completed:
        metadata.mark_completed(result.id)
        direction = (
            metadata.transfer_stats.load
            if result.kind is JobKind.LOAD
            else metadata.transfer_stats.store
        )
        direction.record(result.copied_bytes, result.seconds)
    return metadata
