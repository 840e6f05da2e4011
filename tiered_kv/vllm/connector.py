"""The KV connector that vLLM loads: `kv_connector_module_path` = `tiered_kv.vllm.connector`.

The scheduler's side is vLLM's own offloading logic over our manager half; the worker's side is
our worker half, in place of vLLM's.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)

from tiered_kv.config import require_room
from tiered_kv.connector import (
    USUAL,
    Answering,
    Border,
    ConnectorMetadata,
    Manager,
    StepTimer,
    WorkerConnector,
    allowed_tiers,
    care_for,
    guarded,
)
from tiered_kv.errors import ConfigError, IdentityError
from tiered_kv.memory import CacheRef, KVCaches
from tiered_kv.values import BlockKey
from tiered_kv.vllm.compat import group_keys, keys_by_token, offer_again, to_adapter, windows_of
from tiered_kv.vllm.jobs import (
    TieredHandshake,
    TieredMetadata,
    TieredWorkerMetadata,
    to_connector_metadata,
    worker_metadata,
)
from tiered_kv.vllm.metrics import to_vllm_stats
from tiered_kv.vllm.setup import SPEC, Setup, make_setup
from tiered_kv.vllm.spec import CapturedCaches, TieredKVManager, TieredKVSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["TieredKVConnector"]

logger = logging.getLogger(__name__)


class TieredKVConnector(OffloadingConnector):
    """Keeps KV blocks in the tiers of one YAML file.

    After the start no error of ours leaves it, nor the halves (see `tiered_kv.connector.border`);
    what vLLM's own half raises does.
    """

    _worker: WorkerConnector | None = None
    """The worker half; None in the scheduler's connector."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """Build the scheduler's or the worker's half.

        Raises:
            RefuseToStart: the version, a flag, the YAML, a plug-in or a tier.
        """
        # OffloadingConnector's own constructor would build vLLM's worker and find the spec by
        # name; both are ours here.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        setup = make_setup(vllm_config, kv_cache_config)
        self._setup = setup
        self._vllm_config = vllm_config
        self._canonical_layout = setup.offloading.canonical_layout
        self._spec = TieredKVSpec(setup)
        self._groups = {group.group_id: i for i, group in enumerate(setup.offloading.groups)}
        self._chunk = setup.offloading.cache.blocks_per_chunk
        self._translated: tuple[OffloadingConnectorMetadata, ConnectorMetadata] | None = None
        self.connector_scheduler: OffloadingConnectorScheduler | None = None
        self.connector_worker: OffloadingConnectorWorker | None = None
        self._answering: Answering | None = None
        """For `tiered-kv top`."""
        self._hashes: tuple[tuple[int, int], ...] = ()
        self._steps = StepTimer()
        if role == KVConnectorRole.SCHEDULER:
            require_room(setup.assembly.deployment, setup.offloading.parallel.world_size)
            self.connector_scheduler = OffloadingConnectorScheduler(
                self._spec, vllm_config, kv_cache_config
            )
            self._hashes = tuple(
                (group.group_idx, group.hashes_per_chunk)
                for group in self.connector_scheduler.config.kv_group_configs
            )
        else:
            self._worker = _make_worker(setup)

    @property
    def border(self) -> Border:
        """Where our errors end."""
        return self.manager.border if self._worker is None else self._worker.border

    # The worker's side

    @property
    def worker(self) -> WorkerConnector:
        """The worker half.

        Raises:
            RuntimeError: this is the scheduler's connector.
        """
        if self._worker is None:
            raise RuntimeError("the scheduler's connector has no worker half")
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the engine's caches, made canonical by vLLM's own code. When the engine runs
        already, caches that cannot be used end loading and storing, not the engine."""
        if self.worker.attached:
            self._register_again(kv_caches)
        else:
            self._register(kv_caches)

    def _serve_nothing(self, *_: object) -> None:
        self.worker.serve_nothing()

    @guarded(_serve_nothing)
    def _register_again(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._register(kv_caches)

    def _register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        canonicalizer = OffloadingConnectorWorker(
            self._spec, self._vllm_config, self._kv_cache_config
        )
        canonicalizer.register_kv_caches(kv_caches)
        captured = canonicalizer.worker
        assert isinstance(captured, CapturedCaches)
        caches = captured.caches
        self.worker.attach(
            KVCaches(
                tensors=tuple(entry.tensor for entry in caches.tensors),
                groups=tuple(
                    tuple(CacheRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs)
                    for refs in caches.group_data_refs
                ),
            )
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler has to know of this rank; asked once, at start."""
        handshake = self.worker.handshake()
        if self._answering is None:
            self._answering = Answering(f"rank {handshake.geometry.rank}", self.worker.view)
        return TieredHandshake(handshake)

    def _jobs(self, metadata: KVConnectorMetadata | None) -> ConnectorMetadata:
        assert isinstance(metadata, OffloadingConnectorMetadata)
        if self._translated is None or self._translated[0] is not metadata:
            self._translated = (
                metadata,
                to_connector_metadata(metadata, self._groups, self._chunk, self.border),
            )
        return self._translated[1]

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called every step, before the forward pass."""
        self.worker.handle_preemptions(self._jobs(kv_connector_metadata))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Submit this step's loads."""
        self.worker.start_kv_transfers(self._jobs(self._connector_metadata))

    def wait_for_save(self) -> None:
        """Queue this step's stores."""
        self.worker.prepare_store_kv(self._jobs(self._connector_metadata))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose loads are done. Stores are fenced by vLLM's scheduler half, so no
        request is ever named as sent."""
        _, received = self.worker.get_finished(finished_req_ids)
        return set(), received

    @guarded(lambda *_: base.KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        """Requests whose loads are done, and those among them whose load failed."""
        _, received = self.worker.get_finished(finished_req_ids)
        failed = self.worker.failed_requests() & received
        # Found by its module: a vLLM that lacks it is to be refused with our words, not at import.
        return base.KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    @guarded(lambda *_: None)
    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Completions and our own news; on every step that has any."""
        if self._worker is None:
            return None
        sent = self._connector_metadata
        step = sent.step if isinstance(sent, TieredMetadata) else None
        return worker_metadata(self._worker.take_completed(), self._worker.take_report(), step)

    # The scheduler's side

    @property
    def manager(self) -> Manager:
        """The manager half.

        Raises:
            RuntimeError: this is a worker's connector.
        """
        return self._tiered.core

    @property
    def _tiered(self) -> TieredKVManager:
        if self._spec.manager is None:
            raise RuntimeError("a worker's connector has no manager half")
        return self._spec.manager

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Hear from all ranks, once, at start.

        Raises:
            IdentityError: the halves or two ranks disagree.
        """
        ranks = [
            entry.handshake for entry in metadata.values() if isinstance(entry, TieredHandshake)
        ]
        world = self._setup.offloading.parallel.world_size
        if len(ranks) != world:
            raise IdentityError(
                f"{len(ranks)} of {world} ranks reported their caches at start; "
                "pipeline and context parallel engines are not supported yet"
            )
        windows = () if self.connector_scheduler is None else windows_of(self.connector_scheduler)
        self.manager.attach(ranks, windows)
        self._answering = Answering("manager", self.manager.view)

    def on_new_request(self, request: Request) -> None:
        """Read the request's hint and adapter, then let vLLM's half note it."""
        self._note(request)
        super().on_new_request(request)

    def _bar(self, request: Request, *_: object) -> bool:
        self.manager.bar(request.request_id)
        return True

    @guarded(_bar)
    def _note(self, request: Request) -> None:
        params: object = request.kv_transfer_params
        if params is not None and not isinstance(params, dict):
            # A client's nonsense, which vLLM's half would stumble over.
            logger.warning(
                "request %s: kv_transfer_params is ignored, since it is no mapping but %s",
                request.request_id,
                type(params).__name__,
            )
            request.kv_transfer_params = None
        try:
            tiers = allowed_tiers(request.kv_transfer_params, self.manager.tier_names)
        except ConfigError as error:
            logger.warning("request %s: %s; all tiers may answer", request.request_id, error)
            tiers = None
        try:
            care = care_for(request.kv_transfer_params)
        except ConfigError as error:
            logger.warning("request %s: %s; its hints are ignored", request.request_id, error)
            care = USUAL
        self.manager.on_new_request(request.request_id, tiers, care)
        if request.lora_request is not None:
            self._tiered.adapt(request.request_id, to_adapter(request.lora_request))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Ask all tiers about the whole request at once; vLLM's half then reads the answers."""
        if not self._ask(request, num_computed_tokens):
            return None, False
        with self._tiered.reading(request.request_id):
            return super().get_num_new_matched_tokens(request, num_computed_tokens)

    @guarded(_bar)
    def _ask(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether there are answers."""
        naming = self._tiered.naming(request.request_id)
        if naming is None:  # its adapter's files are being looked at
            return False
        if naming.host_only:
            self.manager.keep_in_host(request.request_id)
        if naming.cached and not request.skip_reading_prefix_cache:
            name, hashes = request.request_id, request.block_hashes
            # They are only ever added to; the last one tells of all before it.
            mark = (request.num_tokens, len(hashes), *hashes[-1:])
            if not self.manager.still_holds(name, num_computed_tokens, mark):
                ours = self._tiered.keys_of(name, group_keys(request, self._hashes))
                self.manager.lookup(name, ours, num_computed_tokens, request.num_tokens, mark)
        return True

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, as the tiers keep them."""
        return self.manager.block_tokens

    def held(self, request: Request) -> Mapping[str, int]:
        """By store tier, how many tokens of a request without an adapter could be loaded from it
        alone."""
        keys = [BlockKey(key) for key in group_keys(request, self._hashes)]
        return self.manager.held(keys, request.num_tokens)

    def block_keys(self, request: Request) -> list[BlockKey]:
        """Keys of all whole blocks of a request without an adapter, as its tokens fill them."""
        return [BlockKey(key) for key in keys_by_token(request, self._hashes)]

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over; what it was answered with is noted for a trace."""
        self.manager.note_answer(request.request_id, request.num_output_tokens)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same where the engine has several KV groups."""
        self.manager.note_answer(request.request_id, request.num_output_tokens)
        return super().request_finished_all_groups(request, block_ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The step's message to the ranks: vLLM's jobs, and our orders beside them."""
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, OffloadingConnectorMetadata)
        step = None
        if not metadata.jobs_to_flush:  # such a step waits for our copies first
            step = self._steps.began(scheduler_output.num_scheduled_tokens.values())
        return TieredMetadata(
            metadata.load_jobs,
            metadata.store_jobs,
            metadata.jobs_to_flush,
            self.manager.take_orders(),
            step,
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Hear the ranks' news before vLLM's half completes the step's jobs."""
        metadata = connector_output.kv_connector_worker_meta
        ours = metadata if isinstance(metadata, TieredWorkerMetadata) else None
        number = None if ours is None else ours.step
        step = self.border.call("StepTimer.ended", lambda: self._steps.ended(number), None)
        if step is not None:
            self.manager.note_step(step.tokens, step.seconds)
        if ours is not None:
            self.manager.take_report(ours.report)
            for request in {block.request for block in ours.report.failed_loads}:
                again = partial(offer_again, self.scheduler, request)
                self.border.call("offer_again", again, None)
        super().update_connector_output(connector_output)

    # Both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What was counted since the last call, on this side."""
        if self._worker is not None:
            return to_vllm_stats(self._worker.get_kv_connector_stats())
        return super().get_kv_connector_stats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Declare the metrics in the API server's process, where no connector is made."""
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None  # vLLM asks no connector for metrics without it
        transfer.kv_connector_extra_config.update(SPEC)
        return super().build_prom_metrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    def shutdown(self) -> None:
        """Drain within the deadline and let go. Idempotent; nothing relies on its being called."""
        if self._answering is not None:
            self._answering.close()
        if self._worker is not None:
            self._worker.shutdown()
        if self.connector_scheduler is not None:
            self.connector_scheduler.shutdown()


def _make_worker(setup: Setup) -> WorkerConnector:
    offloading = setup.offloading
    return WorkerConnector(
        setup.assembly.worker_plan(
            setup.fingerprint,
            rank=offloading.parallel.rank,
            world_size=offloading.parallel.world_size,
            group_layers=tuple(group.layer_names for group in offloading.groups),
            group_tokens=tuple(group.tokens_per_block for group in offloading.groups),
            chunk=offloading.cache.blocks_per_chunk,
        )
    )
