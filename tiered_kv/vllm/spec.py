"""vLLM's `OffloadingSpec` and `OffloadingManager`, backed by the manager half."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
)

from tiered_kv.connector import Answer, Manager
from tiered_kv.specs import Parts, StoreTargets
from tiered_kv.values import BlockKey
from tiered_kv.vllm.metrics import metric_definitions, to_vllm_stats

if TYPE_CHECKING:
    from tiered_kv.vllm.setup import Setup

__all__ = ["CapturedCaches", "LoadSource", "StoreDestination", "TieredKVManager", "TieredKVSpec"]

ANSWERS = {
    Answer.HIT: LookupResult.HIT,
    Answer.PENDING: LookupResult.HIT_PENDING,
    Answer.RETRY: LookupResult.RETRY,
    Answer.MISS: LookupResult.MISS,
}


@dataclass(frozen=True, slots=True)
class LoadSource(LoadStoreSpec):
    """What the manager sends for a load."""

    keys: tuple[BlockKey, ...]
    parts: Parts


@dataclass(frozen=True, slots=True)
class StoreDestination(LoadStoreSpec):
    """What the manager sends for a store."""

    keys: tuple[BlockKey, ...]
    targets: StoreTargets


class TieredKVManager(OffloadingManager):
    """Answers vLLM's scheduler from the engine-neutral manager. Scheduler thread only."""

    def __init__(self, manager: Manager) -> None:
        self.core = manager

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Read the answer that the connector asked for when it was given the request."""
        return ANSWERS[self.core.answer(req_context.req_id, BlockKey(key))]

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Say where the blocks lie, and pin them."""
        wanted = tuple(BlockKey(key) for key in keys)
        return LoadSource(wanted, self.core.prepare_load(req_context.req_id, wanted))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """A load ended on all ranks."""
        self.core.complete_load(req_context.req_id, [BlockKey(key) for key in keys])

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        """Choose what is stored; a subset where there is no room, never None."""
        plan = self.core.prepare_store(req_context.req_id, [BlockKey(key) for key in keys])
        return PrepareStoreOutput(
            keys_to_store=[OffloadKey(key) for key in plan.keys],
            store_spec=StoreDestination(plan.keys, plan.targets),
            evicted_keys=[OffloadKey(key) for key in plan.evicted],
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """A store's first hop ended on all ranks."""
        self.core.complete_store([BlockKey(key) for key in keys])

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """The connector has told the core already; blocks are stored one by one."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """The request is over."""
        self.core.on_request_finished(req_context.req_id)

    def has_pending_work(self) -> bool:
        """Never: write-behind needs no engine step."""
        return False

    def reset_cache(self) -> None:
        """Serve no block that was stored before this call."""
        self.core.reset()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        return to_vllm_stats(self.core.take_stats())

    def shutdown(self) -> None:
        """Let go of the mirrors."""
        self.core.close()


class CapturedCaches(OffloadingWorker):
    """Holds the caches that vLLM made canonical. The connector's worker half does the work, so
    nothing is ever submitted here."""

    def __init__(self, caches: CanonicalKVCaches) -> None:
        self.caches = caches

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Refuse: not the way a job is submitted."""
        return False

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **_: Any
    ) -> bool:
        """Refuse: not the way a job is submitted."""
        return False

    def get_finished(self) -> list[TransferResult]:
        """Nothing is submitted, nothing finishes."""
        return []

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is submitted."""


class TieredKVSpec(OffloadingSpec):
    """Binds vLLM's scheduler-side logic to a deployment."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Every metric that any tier or plug-in can emit."""
        return metric_definitions()

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.offloading)
        self._setup = setup
        self.manager: TieredKVManager | None = None

    def get_manager(self) -> OffloadingManager:
        """The manager, which finds nothing until the ranks have reported at start."""
        setup = self._setup
        self.manager = TieredKVManager(
            setup.assembly.manager(setup.fingerprint, setup.offloading.parallel.world_size)
        )
        return self.manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Keep the caches for the connector's worker half."""
        return CapturedCaches(kv_caches)
