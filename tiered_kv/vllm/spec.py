"""vLLM's `OffloadingSpec` and `OffloadingManager`, backed by the manager half."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

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
    get_offload_group_idx,
    make_offload_key,
)

from tiered_kv.connector import (
    NOTHING_FOUND,
    UNNAMED,
    Adapter,
    Adapters,
    Answer,
    Border,
    Inquiry,
    LoadPlan,
    Manager,
    Naming,
    failing_plan,
    guarded,
)
from tiered_kv.specs import StoreTargets
from tiered_kv.values import BlockKey
from tiered_kv.vllm.identity import adapter_identity
from tiered_kv.vllm.metrics import metric_definitions, to_vllm_stats

if TYPE_CHECKING:
    from tiered_kv.vllm.setup import Setup

__all__ = [
    "CapturedCaches",
    "LoadSource",
    "StoreDestination",
    "TieredKVManager",
    "TieredKVSpec",
    "salted",
]

ANSWERS = {
    Answer.HIT: LookupResult.HIT,
    Answer.PENDING: LookupResult.HIT_PENDING,
    Answer.RETRY: LookupResult.RETRY,
    Answer.MISS: LookupResult.MISS,
}


_HIT, _FOUND = Answer.HIT, LookupResult.HIT  # an enumeration takes long to give them


@dataclass(frozen=True, slots=True)
class LoadSource(LoadStoreSpec):
    """What the manager sends for a load."""

    keys: tuple[BlockKey, ...]
    plan: LoadPlan


@dataclass(frozen=True, slots=True)
class StoreDestination(LoadStoreSpec):
    """What the manager sends for a store."""

    keys: tuple[BlockKey, ...]
    targets: StoreTargets


class TieredKVManager(OffloadingManager):
    """Answers vLLM's scheduler from the engine-neutral manager. Scheduler thread only. No method
    raises.

    vLLM names blocks by its own keys; ours are the same but for requests with an adapter.
    """

    def __init__(self, manager: Manager, adapters: Adapters) -> None:
        self.core = manager
        self._adapters = adapters
        self._adapted: dict[str, _Adapted] = {}
        self._answers: Mapping[BlockKey, Answer] = NOTHING_FOUND
        """Of the request that is being asked for, where its keys are ours."""

    @property
    def border(self) -> Border:
        """Where errors end."""
        return self.core.border

    def _bar(self, request: str, *_: object) -> None:
        self.core.bar(request)

    @guarded(_bar)
    def adapt(self, request: str, adapter: Adapter) -> None:
        """A request with an adapter was added."""
        jobs = self._adapted[request].jobs if request in self._adapted else 0
        self._adapted[request] = _Adapted(self._adapters.ask(adapter), jobs)

    def _unknown(self, request: str) -> Naming:
        self.core.bar(request)
        return _UNCACHED

    @guarded(_unknown)
    def naming(self, request: str) -> Naming | None:
        """How the request's blocks are named; None while that is not known yet."""
        return self._naming(request)

    def _naming(self, request: str) -> Naming | None:
        adapted = self._adapted.get(request)
        return UNNAMED if adapted is None else self._adapters.naming(adapted.inquiry)

    def keys_of(self, request: str, keys: Iterable[OffloadKey]) -> list[BlockKey]:
        """Our keys of a request's blocks; of one that is not cached those that no block has."""
        naming = self._naming(request)
        if naming is UNNAMED:
            return cast("list[BlockKey]", list(keys))
        salt = naming.salt if naming is not None and naming.cached else _NOBODYS
        return [salted(key, salt) for key in keys]

    @contextmanager
    def reading(self, request: str) -> Iterator[None]:
        """Meanwhile only this request's keys are looked up: where they are named as ours are, it
        goes without a detour, a thousand times for a long prompt."""
        if self._adapted.get(request) is None:
            self._answers = self.core.answers(request)
        try:
            yield
        finally:
            self._answers = NOTHING_FOUND

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Read the answer that the connector asked for when it was given the request."""
        # vLLM's keys are bytes as ours are, of another NewType; to convert costs a call per key.
        if self._answers.get(key) is _HIT:  # type: ignore[call-overload]
            return _FOUND
        return self._lookup(key, req_context)

    @guarded(lambda *_: LookupResult.MISS)
    def _lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        (ours,) = self.keys_of(req_context.req_id, [key])
        return ANSWERS[self.core.answer(req_context.req_id, ours)]

    def _fail_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self.core.bar(req_context.req_id)
        wanted = tuple(BlockKey(key) for key in keys)
        return LoadSource(wanted, failing_plan(wanted))

    @guarded(_fail_load)
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Say where the blocks lie, and pin them."""
        request = req_context.req_id
        wanted = tuple(self.keys_of(request, keys))
        self._count(request, 1)
        return LoadSource(wanted, self.core.prepare_load(request, wanted))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """A load ended on all ranks."""
        request = req_context.req_id

        def complete() -> None:
            self.core.complete_load(request, self.keys_of(request, keys))
            self._count(request, -1)

        self.border.insist("TieredKVManager.complete_load", complete)

    @guarded(lambda *_: PrepareStoreOutput([], StoreDestination((), StoreTargets(None)), []))
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        """Choose what is stored; a subset where there is no room, never None."""
        request = req_context.req_id
        naming = self._naming(request)
        asked: Sequence[OffloadKey] = list(keys) if naming is not None and naming.cached else []
        theirs = dict(zip(self.keys_of(request, asked), asked, strict=True))
        plan = self.core.prepare_store(request, list(theirs))
        if plan.keys:
            self._count(request, 1)
        return PrepareStoreOutput(
            keys_to_store=[theirs[key] for key in plan.keys],
            store_spec=StoreDestination(plan.keys, plan.targets),
            evicted_keys=[OffloadKey(key) for key in plan.evicted],
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """A store's first hop ended on all ranks."""
        request = req_context.req_id

        def complete() -> None:
            self.core.complete_store(self.keys_of(request, keys))
            self._count(request, -1)

        self.border.insist("TieredKVManager.complete_store", complete)

    def _count(self, request: str, jobs: int) -> None:
        """Remember how a request's blocks are named until its last job has ended."""
        adapted = self._adapted.get(request)
        if adapted is not None:
            adapted.jobs = max(0, adapted.jobs + jobs)
            if adapted.finished and not adapted.jobs:
                del self._adapted[request]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """The connector has told the core already; blocks are stored one by one."""
        return RequestOffloadingContext()

    @guarded(lambda *_: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """The request is over."""
        self.core.on_request_finished(req_context.req_id)
        adapted = self._adapted.get(req_context.req_id)
        if adapted is not None:
            adapted.finished = True
            self._count(req_context.req_id, 0)

    def has_pending_work(self) -> bool:
        """Never: write-behind needs no engine step."""
        return False

    def reset_cache(self) -> None:
        """Serve no block that was stored before this call."""
        self.core.reset()
        self.border.insist("Adapters.forget", self._adapters.forget)
        # The jobs of before are not heard of again.
        for request, adapted in list(self._adapted.items()):
            self._count(request, -adapted.jobs)

    @guarded(lambda *_: None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        return to_vllm_stats(self.core.take_stats())

    def shutdown(self) -> None:
        """Let go of the mirrors."""
        self.border.call("Adapters.close", self._adapters.close, None)
        self.core.close()


@dataclass(slots=True)
class _Adapted:
    """A request with an adapter."""

    inquiry: Inquiry
    jobs: int = 0
    """Its loads and stores that have not ended."""
    finished: bool = False


_UNCACHED = Naming(cached=False)

_NOBODYS = b"not cached"
"""Salt under which nothing is ever stored."""


def salted(key: OffloadKey, salt: bytes) -> BlockKey:
    """The key of a block of a request with an adapter. It names the same KV group."""
    digest = hashlib.blake2b(key, key=salt, digest_size=32).digest()
    return BlockKey(make_offload_key(digest, get_offload_group_idx(key)))


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
            setup.assembly.manager(setup.fingerprint, setup.offloading.parallel.world_size),
            Adapters(adapter_identity, wait=setup.assembly.deployment.limits.lookup_wait),
        )
        return self.manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Keep the caches for the connector's worker half."""
        return CapturedCaches(kv_caches)
