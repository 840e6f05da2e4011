"""One rank of the simulated engine: its caches, its forward pass, and a real worker half."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from tiered_kv.connector import ConnectorMetadata, Handshake, WorkerConnector, WorkerReport
from tiered_kv.connector.assembly import Assembly
from tiered_kv.stats import StatsDelta, StatsSnapshot
from tiered_kv.testing.faults import PATIENCE
from tiered_kv.testing.simulation.border import crossed
from tiered_kv.testing.simulation.model import SimulatedModel
from tiered_kv.testing.simulation.oracle import Oracle, RankCaches
from tiered_kv.testing.simulation.requests import Share
from tiered_kv.values import JobId

__all__ = ["Rank", "RankOutput"]

_AUDIT_SECONDS = 5.0
_TICK_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class RankOutput:
    """What a rank says at the end of a step."""

    rank: int
    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    completed: tuple[JobId, ...] = ()
    report: WorkerReport = field(default_factory=WorkerReport)

    def and_then(self, later: RankOutput) -> RankOutput:
        """Both as one."""
        return RankOutput(
            self.rank,
            self.sent | later.sent,
            self.received | later.received,
            self.failed | later.failed,
            self.completed + later.completed,
            self.report.merged(later.report),
        )


class Rank:
    """Owns what lives in a worker's process."""

    def __init__(
        self, assembly: Assembly, model: SimulatedModel, rank: int, oracle: Oracle
    ) -> None:
        """Register the caches.

        Raises:
            RefuseToStart: as `WorkerConnector.register_kv_caches`.
        """
        self.rank = rank
        self.caches = RankCaches(model)
        self.stats = StatsSnapshot(0.0)
        """All that the worker half handed out so far."""
        self._oracle = oracle
        self._given: set[JobId] = set()
        groups = range(len(model.groups))
        self.worker = WorkerConnector(
            assembly.worker_plan(
                model.fingerprint,
                rank=rank,
                world_size=model.ranks,
                group_layers=tuple(model.layer_names(group) for group in groups),
                group_tokens=tuple(group.tokens for group in model.groups),
                chunk=model.chunk,
            )
        )
        if model.cross_layers:
            self.worker.register_cross_layers_kv_cache(self.caches.tensors[0])
        else:
            self.worker.register_kv_caches(self.caches.named)

    def handshake(self) -> Handshake:
        """What the scheduler's process hears once."""
        return crossed(self.worker.handshake())

    def step(
        self,
        message: ConnectorMetadata,
        shares: Sequence[Share],
        fresh: Collection[int],
        finished: Iterable[str],
        *,
        repeated: bool,
        wait: bool,
    ) -> RankOutput:
        """One step, in the order of vLLM's model runner; a repeated message is gone through twice.
        With `wait`, the jobs that run end before the rank says what has ended.

        Raises:
            ContentMismatch: the forward pass would have read wrong bytes.
        """
        worker = self.worker
        received = [crossed(message) for _ in range(2 if repeated else 1)]
        for copy in received:
            worker.handle_preemptions(copy)
        if fresh:
            self.caches.poison(fresh)
        for copy in received:
            worker.start_kv_transfers(copy)
        if shares:
            self._oracle.check(shares, self.caches, self.rank)
            self._oracle.compute(shares, self.caches, self.rank)
        for copy in received:
            worker.prepare_store_kv(copy)
        if wait:
            self._given.update(job.id for job in message.loads)
            self._given.update(job.id for job in message.stores)
            worker.engine.wait(self._given, PATIENCE)
        sent, loaded = worker.get_finished(set(finished))
        failed = worker.failed_requests() & loaded
        completed = tuple(result.id for result in worker.take_completed())
        self._given.difference_update(completed)
        self.take_stats()
        return crossed(
            RankOutput(
                self.rank,
                frozenset(sent),
                frozenset(loaded),
                frozenset(failed),
                completed,
                worker.take_report() or WorkerReport(),
            )
        )

    def take_stats(self) -> None:
        """Fetch what was counted since the last time, as plain values."""
        delta = self.worker.get_kv_connector_stats()
        if delta is not None:
            self.stats = self.stats.merge(StatsDelta.from_dict(delta.as_dict()))

    def audit(self) -> tuple[str, ...]:
        """What is still in use once everything has ended; empty in a sound program."""
        pool = self.worker.memory
        until = time.monotonic() + _AUDIT_SECONDS
        while wrong := list(self.worker.engine.audit()):
            if time.monotonic() >= until:
                break
            threading.Event().wait(_TICK_SECONDS)  # it tells of an end before all is put back
        if pool.leased or pool.stray_returns:
            wrong.append(
                f"{pool.leased} staging slots are leased, {pool.stray_returns} were given back "
                "that were not"
            )
        return tuple(wrong)
