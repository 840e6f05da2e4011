"""Measures the tiers of a deployment, one after another, and leaves nothing behind."""

from __future__ import annotations

import gc
import secrets
import shutil
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as NotInTime
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass

from tiered_kv.cli.benching.figures import Move, Sample, SizeResult, TierResult, figures_of
from tiered_kv.cli.benching.limits import Memory, RawFile
from tiered_kv.cli.benching.place import Need, Workplace, workplace
from tiered_kv.cli.benching.rig import Batch, Rig
from tiered_kv.cli.benching.rounds import HostRounds, Measured, TierRounds
from tiered_kv.cli.benching.ways import HostWay, Ways
from tiered_kv.cli.progress import Progress
from tiered_kv.config import Deployment, Placement, TierSettings, readable_bytes
from tiered_kv.connector.assembly import Assembly
from tiered_kv.contracts import BlockStore
from tiered_kv.engine import GROUP_BYTES, EngineLimits
from tiered_kv.errors import DeadlineExceeded, TieredKVError, TierError, reason_in
from tiered_kv.memory import DeviceCopy, default_device, device_of
from tiered_kv.plugins import Plugins
from tiered_kv.routing import CPU_ENDPOINT
from tiered_kv.specs import GpuSpec
from tiered_kv.threads import DaemonExecutor
from tiered_kv.values import Fingerprint, Namespace

__all__ = ["Bench", "Effort"]

HEADROOM_BYTES = 64 * 2**20
"""Of the store that is measured, beside twice the batch: index, and what its medium needs."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    batches: tuple[Batch, ...]
    rounds: int
    """Rounds that count; one more is run before them."""
    threads: int
    """Of plain copies of memory."""
    timeout: float
    """Seconds, for each run."""

    @property
    def most_bytes(self) -> int:
        """Of the largest batch."""
        return max(batch.nbytes for batch in self.batches)

    def host_bytes(self, staging_bytes: int) -> int:
        """Memory that is taken at once: cache, pool, and two areas for the limits."""
        return 4 * self.most_bytes + staging_bytes


@dataclass(slots=True)
class Bench:
    """Measures tiers of a deployment. Main thread only."""

    deployment: Deployment
    plugins: Plugins
    effort: Effort
    progress: Progress

    def need(self, tier: TierSettings) -> Need:
        """What measuring a store tier takes."""
        effort = self.effort
        assembly = self._assembly(tier)
        direct = (GpuSpec, assembly.specs()[tier.name]) in assembly.registry()
        on_disk = (1 + (shutil.which("fio") is not None)) * bool(tier.directories)
        runs = 1 + (self.deployment.cpu is None) + direct + on_disk
        total = sum(batch.nbytes for batch in effort.batches) * (effort.rounds + 1)
        return Need(
            store_bytes=2 * effort.most_bytes + HEADROOM_BYTES,
            file_bytes=effort.most_bytes if tier.directories else 0,
            written_bytes=runs * total,
        )

    # ------------------------------------------------------------------------------------ tiers

    def host(self) -> TierResult:
        """Between the engine's cache and host slots."""
        host = self.deployment.cpu
        name = CPU_ENDPOINT.tier if host is None else host.name
        result = TierResult(name, CPU_ENDPOINT.tier, place="host memory")
        return self._guarded(result, self._host_sizes)

    def store(self, tier: TierSettings) -> TierResult:
        """To and from a store tier."""
        place = ", ".join(str(directory) for directory in tier.directories.values())
        written = self.need(tier).written_bytes
        result = TierResult(tier.name, tier.type, place=place, written_bytes=written)
        return self._guarded(result, lambda into: self._store_sizes(tier, into))

    def _guarded(self, result: TierResult, measure: Callable[[TierResult], None]) -> TierResult:
        """Never raises what a tier may do wrong: it is told in the result, and hides no other."""
        try:
            measure(result)
        except TieredKVError as error:
            result.problem, result.failed = reason_in(result.tier, error), True
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            breach = "breaks the contract of a backend by raising"
            result.problem = f"tier {result.tier!r} {breach} {type(error).__name__}: {error}"
            result.failed = True
        return result

    def _host_sizes(self, result: TierResult) -> None:
        assembly = Assembly(self._alone(None), self.plugins.deployed([]))
        for batch in self.effort.batches:
            self._stage(result.tier, batch)
            with _held() as hold, ExitStack() as stack:
                rig = self._rig(stack, batch)
                memory = self._memory(stack, batch)
                device = default_device()
                known = device_of(device)
                copies = None if known is None else DeviceCopy(batch.nbytes, device)
                way = stack.enter_context(HostWay(rig, assembly))
                stack.callback(hold)
                rounds = HostRounds(way, memory, copies, self.effort.timeout)
                samples = self._rounds(rounds.run, result.tier, batch)
                figures = figures_of(samples, batch.nbytes)
                result.sizes.append(
                    SizeResult(batch.block_bytes, batch.blocks, figures, way.ways())
                )
                result.modes |= {"pool": dict(rig.pool.modes()), **way.modes()}
                result.limits["memcpy"] = f"{memory.threads} threads"
                if known is not None:
                    result.limits["copy to host"] = f"one copy of pinned memory, {known.name}"
                    result.limits["copy to device"] = result.limits["copy to host"]

    def _store_sizes(self, tier: TierSettings, result: TierResult) -> None:
        need = self.need(tier)
        for batch in self.effort.batches:
            self._stage(tier.name, batch)
            with _held() as hold, ExitStack() as stack:
                work = stack.enter_context(workplace(tier, need))
                rig = self._rig(stack, batch)
                memory = self._memory(stack, batch)
                assembly = self._assembly(work.settings)
                store = stack.enter_context(self._opened(assembly, work, batch))
                raw = self._raw(stack, work, memory, batch)
                ways = stack.enter_context(Ways(rig, assembly, tier.name, store))
                stack.callback(hold)
                rounds = TierRounds(
                    ways,
                    tier.name,
                    memory,
                    raw,
                    tuple(work.settings.directories.values()) if work.own else (),
                    batch.nbytes,
                    host_tier=self.deployment.cpu is not None,
                    flushes=getattr(tier, "durability", "none") != "none",
                    timeout=self.effort.timeout,
                )
                samples = self._rounds(rounds.run, tier.name, batch)
                figures = figures_of(samples, batch.nbytes)
                result.sizes.append(
                    SizeResult(batch.block_bytes, batch.blocks, figures, ways.ways())
                )
                result.modes |= {"store": dict(store.stat().modes), **ways.modes()}
                result.limits["memcpy"] = f"{memory.threads} threads"
                if raw is not None:
                    for limit in ("disk write", "disk read"):
                        result.limits[limit] = f"vectored calls of our own, {raw.how}"
                    for limit in ("fio write", "fio read") if raw.has_fio else ():
                        result.limits[limit] = f"psync, {raw.how}; memory in small pages"
                if not work.own:
                    result.place = "in a namespace of its own in the tier itself"

    # ------------------------------------------------------------------------------------ parts

    def _rounds(
        self, run: Callable[[], Iterator[Measured]], tier: str, batch: Batch
    ) -> dict[Move, list[Sample]]:
        """What came of the rounds that count."""
        samples: dict[Move, list[Sample]] = defaultdict(list)
        gc.collect()
        for number in range(self.effort.rounds + 1):
            for move, sample in run():
                if number:
                    samples[move].append(sample)
            self.progress.step(
                f"{tier}, {readable_bytes(batch.block_bytes)}: "
                + (f"round {number} of {self.effort.rounds}" if number else "warmed up")
            )
        return samples

    def _stage(self, tier: str, batch: Batch) -> None:
        blocks = f"{batch.blocks} blocks of {readable_bytes(batch.block_bytes)}"
        self.progress.stage(f"tier {tier}: {blocks}")

    def _rig(self, stack: ExitStack, batch: Batch) -> Rig:
        staging = int(self.deployment.limits.staging)
        return stack.enter_context(closing(Rig(batch, staging, self.effort.timeout)))

    def _memory(self, stack: ExitStack, batch: Batch) -> Memory:
        return stack.enter_context(closing(Memory(batch.nbytes, self.effort.threads)))

    def _raw(
        self, stack: ExitStack, work: Workplace, memory: Memory, batch: Batch
    ) -> RawFile | None:
        if work.file is None:
            return None
        calls = EngineLimits(load_deadline=1, store_deadline=1, store_queue_bytes=0)
        raw = RawFile(
            work.file,
            memory,
            batch.nbytes,
            batch.block_bytes,
            call=GROUP_BYTES,
            depth=calls.threads_per_tier,
        )
        return stack.enter_context(closing(raw))

    def _alone(self, tier: TierSettings | None) -> Deployment:
        """The deployment with this tier and the host's alone."""
        tiers = tuple(one for one in (self.deployment.cpu, tier) if one is not None)
        return self.deployment.model_copy(update={"tiers": tiers, "placement": Placement()})

    def _assembly(self, tier: TierSettings) -> Assembly:
        return Assembly(self._alone(tier), self.plugins.deployed([tier.type]))

    @contextmanager
    def _opened(self, assembly: Assembly, work: Workplace, batch: Batch) -> Iterator[BlockStore]:
        """The store that is measured, opened and closed on a thread that may hang."""
        tier, timeout = work.settings.name, self.effort.timeout
        fingerprint = Fingerprint.of({"purpose": "tiered-kv bench", "run": secrets.token_hex(8)})
        threads = DaemonExecutor(1, f"tiered-kv-bench-{tier}")
        opening = threads.submit(
            assembly.open_store, tier, batch.geometry, fingerprint, writable=True
        )
        try:
            store = opening.result(timeout)
        except NotInTime as error:
            message = f"tier {tier!r} did not open within {timeout:g} s"
            raise DeadlineExceeded(message) from error
        try:
            if not work.own:
                _check_room(store, tier, batch)
            yield store
        finally:
            leaving = threads.submit(_leave, assembly, work, store, Namespace(fingerprint).id)
            try:
                leaving.result(timeout)
            except NotInTime as error:
                message = f"tier {tier!r} did not close within {timeout:g} s"
                raise DeadlineExceeded(message) from error
            finally:
                threads.shutdown(wait=False)


def _check_room(store: BlockStore, tier: str, batch: Batch) -> None:
    """Refuse to measure in the deployment's own store what would make it evict.

    Raises:
        TierError: it has not the room.
    """
    stat = store.stat()
    wanted = 2 * batch.nbytes
    room = max(0, stat.capacity_bytes - stat.used_bytes)
    if wanted > room:
        raise TierError(
            f"measuring it takes up to {readable_bytes(wanted)} for a while, but it has "
            f"{readable_bytes(room)} left; lower --size",
            tier=tier,
        )


def _leave(assembly: Assembly, work: Workplace, store: BlockStore, namespace: bytes) -> None:
    """Close the store; what is ours in a tier that is not goes first."""
    tier = work.settings.name
    try:
        if not work.own:
            store.delete(list(store.scan()))
    finally:
        store.close()
    if not work.own and assembly.backends[work.settings.type].open_maintenance:
        maintenance = assembly.open_maintenance(tier, writable=True)
        with closing(maintenance), suppress(ValueError):  # somebody has it open
            maintenance.drop(namespace)


@contextmanager
def _held() -> Iterator[Callable[[], None]]:
    """What is given ignores Ctrl-C and SIGTERM from when it is called until the end of the block:
    cleaning up, which ends by itself, is not interrupted. Main thread only."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def hold() -> None:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)

    try:
        yield hold
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
