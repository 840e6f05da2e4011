"""What `tests/gpu/check` runs: the tests on the device, then measurements, as a table and as JSON.

Every measurement works on any `Device`, so that it can be tried without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import HandlerContext
from tiered_kv.memory import (
    Device,
    DeviceRows,
    HostBlockPool,
    KVCaches,
    TorchStaging,
    device_of,
    layouts_of,
)
from tiered_kv.specs import CpuSpec, GpuBlock, GpuSpec, SlotRef, TransferSpec
from tiered_kv.threads import DaemonExecutor
from tiered_kv.values import (
    BlockKey,
    BlockStatus,
    CacheGeometry,
    ChecksumKind,
    GroupGeometry,
)
from tiered_kv_gpu.handlers import CpuToGpuHandler, GpuToCpuHandler

ROUNDS = 5
TESTS_SECONDS = 150.0
DIRECT_SECONDS = 60.0
GIB = 1e9


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and how much is measured."""

    device: Device
    where: torch.device
    layers: int = 32
    page: int = 64 << 10
    """Bytes per engine block and layer; a block is one engine block."""
    blocks: int = 512
    """Moved per round."""

    def caches(self, *, apart: bool = True) -> KVCaches:
        """The engine's caches; see `make_caches`."""
        return make_caches(self.where, self.blocks, self.page, self.layers, apart=apart)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    status: str
    """ok, failed or skipped."""
    values: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="tests/gpu/check")
    parser.add_argument("--json", type=Path, help="also write the JSON object to this file")
    return parser.parse_args(given)


def main() -> int:
    """Run all; the exit status."""
    options = arguments()
    if not torch.cuda.is_available():
        return publish([Row("device", "skipped", reason="torch sees no CUDA device here")], options)
    where = torch.device("cuda:0")
    device = device_of(where)
    assert device is not None
    bench = Bench(device, where)
    checks: list[Callable[[], dict[str, Any]]] = [
        machine,
        tests_on_device,
        lambda: pool_registration(bench, 4 << 30),
        lambda: bus(bench),
        lambda: rows(bench, apart=True),
        lambda: rows(bench, apart=False),
        lambda: handlers(bench, pinned=True),
        lambda: handlers(bench, pinned=False),
        lambda: weighted_sum(bench),
        direct,
    ]
    names = (
        "machine",
        "tests",
        "pool registration",
        "bus",
        "rows, a tensor per layer",
        "rows, one tensor",
        "handlers, pinned",
        "handlers, pageable",
        "wsum",
        "direct path",
    )
    return publish([run(n, check) for n, check in zip(names, checks, strict=True)], options)


class Skip(Exception):
    """A check that cannot be made here."""


def run(name: str, check: Callable[[], dict[str, Any]]) -> Row:
    """One check; whatever it raises is its result."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        values = check()
    except Skip as reason:
        return Row(name, "skipped", reason=str(reason))
    except Exception as error:  # noqa: BLE001 - a check that breaks must not hide the others
        return Row(name, "failed", reason=f"{type(error).__name__}: {error}")
    return Row(name, "failed" if values.pop("failed", False) else "ok", values)


def publish(table: Sequence[Row], options: argparse.Namespace) -> int:
    """Print the table and the JSON object."""
    width = max(len(row.name) for row in table)
    for row in table:
        values = ", ".join(f"{key} {value}" for key, value in row.values.items())
        print(f"{row.name:{width}}  {row.status:7}  {row.reason or values}")
    document = {
        row.name: {"status": row.status, **({"reason": row.reason} if row.reason else {})}
        | row.values
        for row in table
    }
    text = json.dumps(document)
    print(text)
    path: Path | None = options.json
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")
    return 1 if any(row.status == "failed" for row in table) else 0


# ---------------------------------------------------------------------------------------- checks


def machine() -> dict[str, Any]:
    """What this was measured on."""
    return {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def tests_on_device() -> dict[str, Any]:
    """The tests of this folder, in a process of their own."""
    folder = Path(__file__).parent
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.xml"
        # The project's own pytest settings may ask for a newer pytest than this machine has.
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-c", "/dev/null"]
        command += ["-p", "no:cacheprovider", f"--rootdir={folder.parents[1]}"]
        command += [f"--junitxml={results}", f"--basetemp={scratch}/tmp", str(folder)]
        done = subprocess.run(
            command, timeout=TESTS_SECONDS, check=False, capture_output=True, text=True
        )
        print(done.stdout, file=sys.stderr)
        if not results.exists():
            raise RuntimeError(f"pytest wrote no report: {done.stdout[-500:]}{done.stderr[-500:]}")
        totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
        for suite in ElementTree.parse(results).getroot().iter("testsuite"):
            for key in totals:
                totals[key] += int(suite.get(key, 0))
    return totals | {"failed": done.returncode != 0}


def pool_registration(bench: Bench, nbytes: int) -> dict[str, Any]:
    """How long it takes to pin the host pool, and whether copies end at its chunks for a reason."""
    slot = 1 << 20
    began = time.perf_counter()
    pool = HostBlockPool(
        nbytes // slot,
        2,
        slot,
        register=bench.device.register_host,
        unregister=bench.device.unregister_host,
    )
    first = time.perf_counter() - began
    pool.grow()
    if not pool.wait_grown(120):
        raise RuntimeError("the pool did not grow within 120 s")
    whole = time.perf_counter() - began
    values = {
        "GiB": round(nbytes / 2**30, 2),
        "seconds until usable": round(first, 2),
        "seconds in all": round(whole, 2),
        "memory": pool.modes()["memory"],
        "chunks": len({pool.chunk_of(number) for number in range(pool.slots)}),
        "failed": not pool.pinned,
    }
    pool.close()
    return values


def bus(bench: Bench) -> dict[str, Any]:
    """Plain copies of pinned memory: what everything else is to be compared with."""
    nbytes = bench.blocks * bench.layers * bench.page // 8
    host = bench.device.host_tensor(nbytes // 8)
    there = torch.zeros(nbytes // 8, dtype=torch.int64, device=bench.where)
    out = rate(bench, nbytes, lambda: host.copy_(there, non_blocking=True))
    into = rate(bench, nbytes, lambda: there.copy_(host, non_blocking=True))
    return {"device to host GB/s": out, "host to device GB/s": into}


def rows(bench: Bench, *, apart: bool) -> dict[str, Any]:
    """Gathering and scattering on the device alone, counted once per byte that is moved."""
    caches = bench.caches(apart=apart)
    geometry = geometry_of(caches)
    layout = layouts_of(caches, geometry)[0]
    moves = DeviceRows(caches, {0: layout})
    count = min(bench.blocks, max(1, (16 << 20) // layout.block_bytes))
    ids = torch.randperm(caches.num_blocks)[:count].view(count, 1).to(bench.where)
    staged = torch.zeros((count, 1, layout.block_bytes), dtype=torch.int8, device=bench.where)
    nbytes = count * layout.block_bytes
    gather = rate(bench, nbytes, lambda: moves.gather(layout, ids, staged), times=20)
    scatter = rate(bench, nbytes, lambda: moves.scatter(layout, ids, staged), times=20)
    return {
        "launches": moves.launches(layout),
        "gather GB/s": gather,
        "scatter GB/s": scatter,
        "group MiB": round(nbytes / 2**20, 1),
    }


def handlers(bench: Bench, *, pinned: bool) -> dict[str, Any]:
    """Stores and loads from end to end: copies, checksums, verification."""
    caches = bench.caches()
    geometry = geometry_of(caches)
    size = geometry.groups[0].block_bytes
    device = bench.device
    pool = HostBlockPool(
        bench.blocks,
        1,
        geometry.slot_bytes,
        register=device.register_host if pinned else None,
        unregister=device.unregister_host if pinned else None,
    )
    pool.grow()
    pool.wait_grown(120)
    executor = DaemonExecutor(1, "check-gpu")
    kind = ChecksumKind.XXH3
    context = HandlerContext(geometry, pool, executor, "cpu", caches=caches, capture=lambda: kind)
    store, load = GpuToCpuHandler(context), CpuToGpuHandler(context)
    keys = tuple(BlockKey(b"%d" % i) for i in range(bench.blocks))
    blocks = GpuSpec(tuple(GpuBlock(0, (i,)) for i in range(bench.blocks)))
    values: dict[str, Any] = {"mode": store.modes()["copy"]}
    wrong = 0
    generation = 0
    for kind in ChecksumKind:
        stored, loaded = [], []
        for _ in range(ROUNDS):
            generation += 1
            slots = CpuSpec(tuple(SlotRef(i, generation) for i in range(bench.blocks)))
            began = time.perf_counter()
            result = asyncio.run(
                store.transfer(TransferSpec(blocks, slots, keys, after=device.fence()))
            )
            between = time.perf_counter()
            again = asyncio.run(
                load.transfer(TransferSpec(slots, blocks, keys, after=device.fence()))
            )
            stored.append(between - began)
            loaded.append(time.perf_counter() - between)
            statuses = (*result.statuses, *again.statuses)
            wrong += sum(status is not BlockStatus.OK for status in statuses)
        moved = bench.blocks * size
        values[f"store GB/s, {kind}"] = round(moved / statistics.median(stored) / GIB, 2)
        values[f"load GB/s, {kind}"] = round(moved / statistics.median(loaded) / GIB, 2)
    store.close()
    load.close()
    executor.shutdown()
    pool.close()
    return values | {"not OK": wrong, "failed": wrong > 0}


def weighted_sum(bench: Bench) -> dict[str, Any]:
    """The checksum that the device computes: equal to the host's, and how fast."""
    caches = bench.caches()
    geometry = geometry_of(caches)
    staging = TorchStaging(caches, geometry, 8 * geometry.slot_bytes, bench.device)
    staging.gather([GpuBlock(0, (3,))], [0], None)
    length = geometry.groups[0].block_bytes
    data = b"".join(tensor[3].cpu().numpy().tobytes() for tensor in caches.tensors)
    key = BlockKey(b"key")
    wrong = 0
    tried = [*range(min(200, length)), length - 1, length]
    for part in tried:
        expected = BlockChecksum.capture(key, 0, memoryview(data)[:part], ChecksumKind.WSUM)
        wrong += staging.checksum(key, 0, part, ChecksumKind.WSUM) != expected
    times = 50
    began = time.perf_counter()
    for _ in range(times):
        staging.checksum(key, 0, length, ChecksumKind.WSUM)
    speed = times * length / (time.perf_counter() - began) / GIB
    return {
        "lengths": len(tried),
        "wrong": wrong,
        "block KiB": length >> 10,
        "GB/s": round(speed, 2),
        "failed": wrong > 0,
    }


def direct() -> dict[str, Any]:
    """KvikIO writes and reads device staging; in a process of its own, since it may hang."""
    try:
        importlib.import_module("kvikio")
    except (ImportError, OSError, RuntimeError) as error:
        raise Skip(f"KvikIO cannot be loaded: {error}") from error
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "tests.gpu.direct", scratch, "cuda:0"],
                timeout=DIRECT_SECONDS,
                check=False,
                capture_output=True,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return {"failed": True, "error": f"KvikIO did not end within {DIRECT_SECONDS:g} s"}
    if done.returncode:
        return {"failed": True, "error": done.stderr.strip().splitlines()[-1:]}
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


# ----------------------------------------------------------------------------------------- parts


def make_caches(
    where: torch.device, blocks: int, page: int, layers: int, *, apart: bool = True
) -> KVCaches:
    """Random bytes, in a tensor per layer or in one for all layers."""
    generator = torch.Generator().manual_seed(1)
    named = {
        str(i): torch.randint(0, 256, (blocks, page), dtype=torch.uint8, generator=generator).to(
            where
        )
        for i in range(layers)
    }
    if not apart:
        named = {"all": torch.stack(list(named.values()), 1)}
    return KVCaches.from_named(named, [list(named)])


def geometry_of(caches: KVCaches) -> CacheGeometry:
    """One engine block per block."""
    return CacheGeometry((GroupGeometry(0, caches.block_bytes(0, 1), 1, 16),), 0, 1)


def rate(bench: Bench, nbytes: int, launch: Callable[[], object], times: int = 8) -> float:
    """Gigabytes per second: median of some rounds after one that is not counted."""
    lane = bench.device.lane()
    seconds: list[float] = []
    for _ in range(ROUNDS + 1):
        with timed(seconds):
            for _ in range(times):
                lane.run(launch)
            lane.mark().wait()
    return round(times * nbytes / statistics.median(seconds[1:]) / GIB, 2)


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Add how long the block took."""
    began = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - began)


if __name__ == "__main__":
    raise SystemExit(main())
