"""One round over one block size: every way and every limit has its turn, so that a change of the
machine's load meets all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tiered_kv.cli.benching.figures import Move, Sample
from tiered_kv.cli.benching.limits import Memory, RawFile, timed
from tiered_kv.cli.benching.page_cache import drop_from_cache, flush, read_in, resident_bytes
from tiered_kv.cli.benching.rig import Stored, TierDrive
from tiered_kv.cli.benching.ways import HostWay, Ways
from tiered_kv.contracts import VerifyMode
from tiered_kv.memory import DeviceCopy
from tiered_kv.routing import CPU_ENDPOINT, GPU_ENDPOINT

__all__ = ["HostRounds", "Measured", "TierRounds"]

Measured = tuple[Move, Sample]

_MEMCPY = Move("limit", "memcpy")
_TO_HOST = Move("limit", "copy to host")
_TO_DEVICE = Move("limit", "copy to device")
_DISK_WRITE = Move("limit", "disk write")
_DISK_READ = Move("limit", "disk read")
_FIO_WRITE = Move("limit", "fio write")
_FIO_READ = Move("limit", "fio read")


def _label(*ends: str) -> str:
    return "->".join(ends)


@dataclass(frozen=True, slots=True)
class HostRounds:
    """Between the engine's cache and host slots."""

    way: HostWay
    memory: Memory
    device: DeviceCopy | None
    timeout: float

    def run(self) -> Iterator[Measured]:
        """One round."""
        timeout, device = self.timeout, self.device
        gpu, cpu = GPU_ENDPOINT.tier, CPU_ENDPOINT.tier
        yield _MEMCPY, timed(lambda: self.memory.copy(timeout))
        if device is not None:
            yield _TO_HOST, timed(device.to_host)
            yield _TO_DEVICE, timed(device.to_device)
        out, back = ("memcpy",) * 2 if device is None else (_TO_HOST.name, _TO_DEVICE.name)
        stored = self.way.drive.store()
        yield Move("hop", _label(gpu, cpu), "store", limit=out), stored.whole
        loaded = self.way.drive.load(host=True)
        yield Move("hop", _label(cpu, gpu), "load", "always", limit=back), loaded


class TierRounds:
    """Between the engine's cache, host slots and a store."""

    def __init__(
        self,
        ways: Ways,
        tier: str,
        memory: Memory,
        raw: RawFile | None,
        folders: Sequence[Path],
        nbytes: int,
        *,
        host_tier: bool,
        flushes: bool,
        timeout: float,
    ) -> None:
        """
        Args:
            ways: to the tier.
            tier: its name.
            memory: for plain copies.
            raw: the file that the disk itself is measured with; None where there is no disk.
            folders: the directories of the store that is measured.
            nbytes: of the batch.
            host_tier: whether a cpu tier is configured; else stores pass through staging.
            flushes: whether the store promises that what it stored survives a crash of the machine.
            timeout: seconds, for each run.
        """
        self._ways = ways
        self._tier = tier
        self._memory = memory
        self._raw = raw
        self._folders = folders
        self._nbytes = nbytes
        self._host_tier = host_tier
        self._flushes = flushes
        self._timeout = timeout
        self.kept_stored = False
        """Whether the page cache held the blocks after a store, and after a load, as far as was
        seen."""
        self.kept_loaded = False

    def run(self) -> Iterator[Measured]:
        """One round."""
        yield _MEMCPY, timed(lambda: self._memory.copy(self._timeout))
        yield from self._stores()
        if self._raw is not None:
            flush(self._folders)
            yield from self._disk(self._raw, write=True)
        yield from self._loads()
        if self._raw is not None:
            yield from self._disk(self._raw, write=False)

    def _disk(self, raw: RawFile, *, write: bool) -> Iterator[Measured]:
        yield _DISK_WRITE if write else _DISK_READ, raw.run(self._timeout, write=write)
        if raw.has_fio:
            sample = raw.run(self._timeout, write=write, by_fio=True)
            yield _FIO_WRITE if write else _FIO_READ, sample

    # ----------------------------------------------------------------------------------- stores

    def _stores(self) -> Iterator[Measured]:
        gpu, cpu, tier = GPU_ENDPOINT.tier, CPU_ENDPOINT.tier, self._tier
        drive = self._ways.by_host[VerifyMode.ALWAYS]
        stored = self._stored(drive, slots=True)
        self.kept_stored = self._kept()
        whole = stored.whole
        if not self._host_tier:
            whole = self._stored(drive, slots=False).whole
        limit = self._store_limit
        yield Move("hop", _label(cpu, tier), "store", limit=limit), stored.behind
        yield Move("chain", _label(gpu, cpu, tier), "store", limit=limit), whole
        if self._ways.stores_directly:
            direct = self._stored(self._ways.direct[VerifyMode.ALWAYS], slots=False)
            yield Move("chain", _label(gpu, tier), "store", limit=limit), direct.whole

    def _stored(self, drive: TierDrive, *, slots: bool) -> Stored:
        drive.empty()
        flush(self._folders)  # nobody pays for what another one left
        if self.kept_stored:
            read_in(self._folders)  # as where it has been in use for a while
        return drive.store(slots=slots)

    @property
    def _store_limit(self) -> str:
        cached = self.kept_stored and not self._flushes
        return _MEMCPY.name if self._raw is None or cached else _DISK_WRITE.name

    # ------------------------------------------------------------------------------------ loads

    def _loads(self) -> Iterator[Measured]:
        gpu, cpu, tier = GPU_ENDPOINT.tier, CPU_ENDPOINT.tier, self._tier
        for verify, drive in self._ways.by_host.items():
            yield from self._both(Move("hop", _label(tier, cpu), "load", verify.value), drive.bring)
            chain = Move("chain", _label(tier, cpu, gpu), "load", verify.value)
            yield from self._both(chain, drive.load)
        for verify, drive in self._ways.direct.items() if self._ways.loads_directly else ():
            yield from self._both(
                Move("chain", _label(tier, gpu), "load", verify.value), drive.load
            )

    def _both(self, move: Move, load: Callable[[], Sample]) -> Iterator[Measured]:
        """Cold, then warm where the page cache holds what was read."""
        if self._raw is None:
            yield replace(move, limit=_MEMCPY.name), load()
            return
        drop_from_cache(self._folders)
        yield replace(move, cache="cold", limit=_DISK_READ.name), load()
        self.kept_loaded = self._kept()
        if self.kept_loaded:
            yield replace(move, cache="warm", limit=_MEMCPY.name), load()

    def _kept(self) -> bool:
        return resident_bytes(self._folders) >= self._nbytes / 2
