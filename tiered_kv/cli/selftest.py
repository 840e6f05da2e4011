"""Stores, reads back, compares and deletes one block per tier, the way the engine does it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import TimeoutError as NotInTime
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace

from tiered_kv.config import format_bytes, readable_bytes
from tiered_kv.connector.assembly import Assembly
from tiered_kv.connector.care import TierCare, care_of
from tiered_kv.contracts import BlockStore
from tiered_kv.engine import TransferEngine
from tiered_kv.errors import DeadlineExceeded, TieredKVError, TierError
from tiered_kv.memory import HostBlockPool, KVCaches
from tiered_kv.routing import GPU_ENDPOINT
from tiered_kv.specs import (
    CpuSpec,
    GpuBlock,
    GpuSpec,
    JobResult,
    KeySpec,
    LoadJob,
    LoadStoreSpec,
    Part,
    Parts,
    SlotRef,
    StoreJob,
    StoreTargets,
)
from tiered_kv.stats import DropReason, StatsRecorder
from tiered_kv.threads import DaemonExecutor
from tiered_kv.values import (
    BlockKey,
    BlockStatus,
    CacheGeometry,
    Fingerprint,
    GroupGeometry,
    JobId,
    Namespace,
)

__all__ = ["SelfTest", "Verdict"]

_FINGERPRINT = Fingerprint.of({"purpose": "tiered-kv check"})
"""A namespace of its own: no engine finds the block, and none of its blocks is touched."""

_HOST_SLOTS = 4
_STORE, _LOAD = JobId(1), JobId(2)
_SLOT = SlotRef(0, 1)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the block in one tier."""

    ok: bool
    detail: str
    modes: Mapping[str, str]
    """What is in effect, as pool, store and handlers say: `{"io": "direct"}`."""


class SelfTest:
    """Runs with a small pool and a cache of two blocks, in the place of an engine's."""

    def __init__(self, assembly: Assembly, block_bytes: int, timeout: float) -> None:
        """`timeout` is in seconds, for each step of each tier."""
        self._assembly = assembly
        self._timeout = timeout
        group = GroupGeometry(index=0, block_bytes=block_bytes, chunk=1, tokens=1)
        self._geometry = CacheGeometry((group,), rank=0, world_size=1)

    def run(self, tier: str) -> Verdict:
        """Test one tier. Never raises what a tier may do wrong; it is the verdict."""
        modes: dict[str, str] = {}
        try:
            detail = self._run(tier, modes)
        except TieredKVError as error:
            return Verdict(False, f"{type(error).__name__}: {error}", modes)
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            breach = "breaks the contract of a backend by raising"
            return Verdict(False, f"tier {tier!r} {breach} {type(error).__name__}: {error}", modes)
        return Verdict(True, detail, modes)

    def _run(self, tier: str, modes: dict[str, str]) -> str:
        host = self._assembly.deployment.cpu
        if host is not None and host.name == tier:
            return self._round_trip(tier, None, modes)
        with self._opened(tier) as store:
            stat = store.stat()
            modes.update(stat.modes)
            budget = care_of(self._assembly.deployment).get(tier, TierCare()).write_budget
            if budget:
                modes["write_budget"] = f"{format_bytes(budget)} a day" + (
                    f", {readable_bytes(stat.written_today)} used today"
                    if stat.written_today is not None
                    else ", counted by each rank"
                )
            if not self._assembly.deployment.tier(tier).writable:
                return f"opened; read only, so nothing was stored; {stat.used_bytes} bytes used"
            return self._round_trip(tier, store, modes)

    @contextmanager
    def _opened(self, tier: str) -> Iterator[BlockStore]:
        threads = DaemonExecutor(1, f"tiered-kv-check-{tier}")
        opening = threads.submit(
            self._assembly.open_store, tier, self._geometry, _FINGERPRINT, writable=True
        )
        try:
            store = opening.result(self._timeout)
        except NotInTime as error:
            message = f"tier {tier!r} did not open within {self._timeout:g} s"
            raise DeadlineExceeded(message) from error
        try:
            yield store
        finally:
            left = threads.submit(self._leave, tier, store)
            try:
                left.result(self._timeout)
            except NotInTime as error:
                message = f"tier {tier!r} did not close within {self._timeout:g} s"
                raise DeadlineExceeded(message) from error

    def _leave(self, tier: str, store: BlockStore) -> None:
        """Close the store, and drop the namespace that it was opened for."""
        store.close()
        settings = self._assembly.deployment.tier(tier)
        if settings.writable and self._assembly.backends[settings.type].open_maintenance:
            maintenance = self._assembly.open_maintenance(tier, writable=True)
            with closing(maintenance), suppress(ValueError):  # another check has it open
                maintenance.drop(Namespace(_FINGERPRINT).id)

    def _round_trip(self, tier: str, store: BlockStore | None, modes: dict[str, str]) -> str:
        specs = {} if store is None else {tier: self._assembly.specs()[tier]}
        caches = KVCaches.on_host(2, self._geometry.groups[0].block_bytes)
        stats = StatsRecorder("check")
        pool = HostBlockPool(_HOST_SLOTS, _HOST_SLOTS, self._geometry.slot_bytes)
        engine = TransferEngine(
            registry=self._assembly.registry(),
            geometry=self._geometry,
            memory=pool,
            tiers=specs,
            limits=replace(self._assembly.limits(), write_behind_share=1.0),
            stats=stats,
            caches=caches,
            verify={name: care.verify for name, care in care_of(self._assembly.deployment).items()},
        )
        key = BlockKey(os.urandom(32))
        try:
            if store is not None:
                engine.attach(tier, store)
            rows = caches.tensors[0].numpy()
            rows[0] = memoryview(os.urandom(rows.shape[1])).cast("b")
            stored = self._store(engine, key, specs.get(tier), tier)
            if store is not None and not store.contains([key])[0]:
                reasons = stats.snapshot().tier(tier).dropped
                if set(reasons) == {DropReason.WEAR}:
                    return "opened; its write budget of this day is spent, so nothing was stored"
                dropped = ", ".join(reasons)
                why = f"{dropped or 'unknown'}; {engine.health()[tier][1]}"
                raise TierError(f"the block was not stored (reason: {why})", tier=tier)
            loaded = self._load(engine, key, specs.get(tier), tier)
            if (rows[0] != rows[1]).any():
                raise TierError("the block came back with other bytes", tier=tier)
            modes.update(pool.modes() if store is None else {})
            for hop, said in engine.modes().items():
                if store is None or GPU_ENDPOINT.tier not in hop.split("->"):
                    modes.update(said)
            if store is not None and store.delete([key]) != 1:
                raise TierError("the block could not be deleted", tier=tier)
        finally:
            engine.close(self._timeout)
            pool.close()
        return f"{stored.copied_bytes} bytes stored, {loaded.copied_bytes} loaded, compared" + (
            "" if store is None else " and deleted"
        )

    def _store(
        self, engine: TransferEngine, key: BlockKey, spec: type[KeySpec] | None, tier: str
    ) -> JobResult:
        behind = () if spec is None else (Part(spec(tier, (key,)), (0,)),)
        host = self._assembly.deployment.cpu
        first = CpuSpec((_SLOT,)) if host is not None else None
        source = GpuSpec((GpuBlock(0, (0,)),))
        engine.submit(StoreJob(_STORE, "check", (key,), source, StoreTargets(first, behind)))
        result = self._ended(engine, _STORE, "store", tier)
        if not engine.drain(self._timeout):
            message = f"tier {tier!r} did not write the block within {self._timeout:g} s"
            raise DeadlineExceeded(message)
        return result

    def _load(
        self, engine: TransferEngine, key: BlockKey, spec: type[KeySpec] | None, tier: str
    ) -> JobResult:
        source: LoadStoreSpec = CpuSpec((_SLOT,)) if spec is None else spec(tier, (key,))
        target = GpuSpec((GpuBlock(0, (1,)),))
        engine.submit(LoadJob(_LOAD, "check", (key,), Parts((Part(source, (0,)),)), target))
        return self._ended(engine, _LOAD, "load", tier)

    def _ended(self, engine: TransferEngine, job: JobId, what: str, tier: str) -> JobResult:
        if engine.wait([job], self._timeout):
            raise DeadlineExceeded(f"the {what} did not end within {self._timeout:g} s")
        (result,) = engine.finished()
        (status,) = result.statuses
        if status is not BlockStatus.OK:
            why = "; ".join(reason for _, reason in engine.health().values())
            raise TierError(f"the {what} failed with {status.value} ({why})", tier=tier)
        return result
