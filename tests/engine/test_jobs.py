"""How vLLM's step metadata becomes jobs. Runs vLLM's own classes, no engine."""

from __future__ import annotations

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec, make_offload_key

from tiered_kv.connector import Border, FailedBlock, LoadPlan, Orders, WorkerReport
from tiered_kv.specs import (
    CpuSpec,
    GpuBlock,
    JobResult,
    LoadJob,
    Part,
    Parts,
    SlotRef,
    StoreJob,
    StoreTargets,
)
from tiered_kv.stats import StatsRecorder
from tiered_kv.values import BlockKey, BlockStatus, JobId, JobKind
from tiered_kv.vllm.jobs import (
    TieredMetadata,
    TieredWorkerMetadata,
    gpu_spec,
    to_connector_metadata,
    worker_metadata,
)
from tiered_kv.vllm.spec import LoadSource, StoreDestination

BORDER = Border(StatsRecorder("test"))


def key(number: int, group: int = 0) -> BlockKey:
    return BlockKey(make_offload_key(bytes([number] * 4), group))


def test_an_unaligned_first_and_a_short_last_block() -> None:
    # Blocks of 4 engine blocks; the engine holds 1 of the first block itself, wants 2 of the last.
    spec = GPULoadStoreSpec([11, 12, 13, 20, 21, 22, 23, 30, 31], [9], [5])
    cut = gpu_spec(spec, [key(1), key(2), key(3)], {0: 0}, chunk=4)
    assert cut.blocks == (
        GpuBlock(0, (11, 12, 13), first=1),
        GpuBlock(0, (20, 21, 22, 23)),
        GpuBlock(0, (30, 31)),
    )


def test_groups_follow_each_other_under_their_own_numbers() -> None:
    spec = GPULoadStoreSpec([1, 2, 7, 8], [2, 2], [0, 3])
    keys = [key(1, 2), key(1, 5), key(2, 5)]
    cut = gpu_spec(spec, keys, {2: 0, 5: 1}, chunk=2)
    assert cut.blocks == (GpuBlock(0, (1, 2)), GpuBlock(1, (7,), first=1), GpuBlock(1, (8,)))


def test_ids_that_do_not_come_out_even_are_never_guessed() -> None:
    spec = GPULoadStoreSpec([1, 2, 3, 9], [3, 1], [0, 0])
    cut = gpu_spec(spec, [key(1), key(1, 1)], {0: 0, 1: 1}, chunk=2)
    assert cut.blocks == (GpuBlock(0, ()), GpuBlock(1, (9,)))


def test_a_step_is_translated() -> None:
    parts = Parts((Part(CpuSpec((SlotRef(3, 1),)), (0,)),))
    targets = StoreTargets(CpuSpec((SlotRef(4, 1),)))
    gpu = GPULoadStoreSpec([7], [1], [0])
    orders = Orders(epoch=b"new")
    metadata = TieredMetadata(
        load_jobs={1: TransferJob("r", LoadSource((key(1),), LoadPlan(parts, 0.5)), gpu)},
        store_jobs={2: TransferJob("s", gpu, StoreDestination((key(2),), targets))},
        jobs_to_flush={2},
        orders=orders,
    )
    jobs = to_connector_metadata(metadata, {0: 0}, chunk=1, border=BORDER)
    block = gpu_spec(gpu, [key(1)], {0: 0}, chunk=1)
    assert jobs.loads == (LoadJob(JobId(1), "r", (key(1),), parts, block, 0.5),)
    assert jobs.stores == (StoreJob(JobId(2), "s", (key(2),), block, targets),)
    assert jobs.flush == {2}
    assert jobs.orders == orders


def test_an_empty_step_is_translated() -> None:
    jobs = to_connector_metadata(
        OffloadingConnectorMetadata({}, {}), {0: 0}, chunk=1, border=BORDER
    )
    assert (jobs.loads, jobs.stores, jobs.flush) == ((), (), frozenset())


@pytest.mark.parametrize("first", [0, 1])
def test_the_news_of_all_ranks_is_kept_whoever_comes_first(first: int) -> None:
    def news(rank: int) -> TieredWorkerMetadata:
        result = JobResult(JobId(4), JobKind.LOAD, "r", (key(1),), (BlockStatus.OK,), 10, 0.5)
        failed = FailedBlock(key(rank), BlockStatus.CORRUPT, "r")
        metadata = worker_metadata(
            [result], WorkerReport(failed_loads=(failed,), released=((rank, SlotRef(1, 1)),))
        )
        assert metadata is not None
        return metadata

    both = news(first).aggregate(news(1 - first))
    assert isinstance(both, TieredWorkerMetadata)
    assert both.completed_jobs == {4: 2}
    assert both.transfer_stats.load.bytes == 20
    assert {block.key for block in both.report.failed_loads} == {key(0), key(1)}
    assert {rank for rank, _ in both.report.released} == {0, 1}


def test_no_news_is_no_metadata() -> None:
    assert worker_metadata([], None) is None


@pytest.mark.parametrize("first", [0, 1])
def test_a_timed_step_comes_back_also_without_news(first: int) -> None:
    sent = TieredMetadata({}, {}, step=7)
    told = [worker_metadata([], None, sent.step) for _ in range(2)]
    one, other = told[first], told[1 - first]
    assert one is not None
    assert other is not None
    both = one.aggregate(other)
    assert isinstance(both, TieredWorkerMetadata)
    assert both.step == 7
    assert not both.report
