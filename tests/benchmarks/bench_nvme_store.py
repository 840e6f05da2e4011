"""Store and load rates of the nvme store beside one raw vectored loop in the same directory.

Variants alternate round by round, so that a change of the machine's load meets all of them. The
raw loop writes and reads one preallocated file in calls of 4 MiB, in as many threads.

    python tests/benchmarks/bench_nvme_store.py --path /mnt/nvme0/bench --block 1MiB --blocks 256
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tiered_kv.checksum import BlockChecksum
from tiered_kv.config import MIB, SizeOrPercent
from tiered_kv.config.units import parse_bytes
from tiered_kv.contracts import NewBlock, StoreContext
from tiered_kv.values import (
    BlockKey,
    BlockStatus,
    CacheGeometry,
    Fingerprint,
    GroupGeometry,
    Namespace,
)
from tiered_kv_nvme.posix import probe_direct
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.store import NvmeStore

GROUP = 4 * MIB


def pool(size: int) -> memoryview:
    """Private memory in huge pages where there are some, every page touched."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    piece = os.urandom(MIB)
    for start in range(0, size, MIB):
        end = min(start + MIB, size)
        view[start:end] = piece[: end - start]
    return view


class Raw:
    """One file, one vectored call per 4 MiB."""

    def __init__(self, directory: Path, views: list[memoryview], threads: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if probe_direct(directory).direct else 0)
        self._fd = os.open(directory / "raw", flags, 0o600)
        self._threads = threads
        block = views[0].nbytes
        os.posix_fallocate(self._fd, 0, block * len(views))
        per = max(1, GROUP // block)
        self._groups = [
            (start * block, views[start : start + per]) for start in range(0, len(views), per)
        ]

    def run(self, call: Callable[[int, list[memoryview], int], int]) -> None:
        """Move all groups with `os.preadv` or `os.pwritev`."""
        queue = iter(self._groups)
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    group = next(queue, None)
                if group is None:
                    return
                offset, views = group
                count = call(self._fd, views, offset)
                assert count == sum(view.nbytes for view in views), "short I/O"

        threads = [threading.Thread(target=work) for _ in range(self._threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


@contextmanager
def timed(seconds: list[float], processor: list[float]) -> Iterator[None]:
    """Add wall and processor seconds of the body."""
    wall, used = time.perf_counter(), _processor()
    yield
    seconds.append(time.perf_counter() - wall)
    processor.append(_processor() - used)


def _processor() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run(arguments: argparse.Namespace, directory: Path) -> dict[str, object]:
    """All rounds; rates in GiB/s and processor microseconds per block, medians."""
    block, count, batch = arguments.block, arguments.blocks, arguments.batch
    memory = pool(block * count)
    views = [memory[n * block : (n + 1) * block] for n in range(count)]
    target = pool(block * count)
    targets = [target[n * block : (n + 1) * block] for n in range(count)]
    keys = [BlockKey(b"bench" + n.to_bytes(8, "big")) for n in range(count)]
    blocks = [
        NewBlock(key, BlockChecksum.capture(key, 0, view))
        for key, view in zip(keys, views, strict=True)
    ]
    settings = NvmeSettings(
        name="bench",
        path=directory / "tier",
        capacity=2 * block * count + 256 * MIB,
        min_free=SizeOrPercent(size=0),
        io_threads=arguments.threads,
    )
    geometry = CacheGeometry((GroupGeometry(0, block, 1, 16),), 0, 1)
    namespace = Namespace(Fingerprint.of({"model": "bench"}))
    raw = Raw(directory, views, arguments.threads)
    raw_targets = Raw(directory, targets, arguments.threads)
    store = NvmeStore(StoreContext("bench", settings, namespace, geometry))
    names = ("raw write", "store", "raw read", "load", "load + verify")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}

    batches = [range(start, min(start + batch, count)) for start in range(0, count, batch)]
    try:
        for number in range(arguments.rounds + 1):
            with timed(seconds["raw write"], processor["raw write"]):
                raw.run(os.pwritev)
            with timed(seconds["store"], processor["store"]):
                for part in batches:
                    places = [p for p in store.reserve([blocks[n] for n in part]) if p]
                    store.write(places, [views[n] for n in part])
                    store.publish(places)
            with timed(seconds["raw read"], processor["raw read"]):
                raw_targets.run(os.preadv)
            target[:] = bytes(len(target))
            for name, verify in (("load", False), ("load + verify", True)):
                with timed(seconds[name], processor[name]):
                    for part in batches:
                        results = store.read([keys[n] for n in part], [targets[n] for n in part])
                        for n, result in zip(part, results, strict=True):
                            assert result.status is BlockStatus.OK
                            assert result.checksum is not None
                            if verify:
                                assert result.checksum.verifies(keys[n], 0, targets[n])
            store.delete(keys)
            if number == 0:  # the first pass writes to space that was never written
                for name in names:
                    seconds[name].clear()
                    processor[name].clear()
        modes = dict(store.stat().modes)
    finally:
        store.close()
        raw.close()
        raw_targets.close()
    total = block * count
    rows = {
        name: {
            "gib_per_second": total / 2**30 / statistics.median(seconds[name]),
            "processor_us_per_block": statistics.median(processor[name]) / count * 1e6,
        }
        for name in names
    }
    return {
        "block_bytes": block,
        "blocks": count,
        "batch": batch,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "modes": modes,
        "rates": rows,
        "store_to_raw": statistics.median(seconds["raw write"])
        / statistics.median(seconds["store"]),
        "load_to_raw": statistics.median(seconds["raw read"]) / statistics.median(seconds["load"]),
    }


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", type=Path, help="directory on the disk (default: temporary)")
    parser.add_argument("--block", type=parse_bytes, default=MIB, help="block size (1MiB)")
    parser.add_argument("--blocks", type=int, default=128, help="blocks per round (128)")
    parser.add_argument("--batch", type=int, default=64, help="blocks per call (64)")
    parser.add_argument("--threads", type=int, default=4, help="I/O threads (4)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (7)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="tiered-kv-bench-", dir=arguments.path))
    try:
        result = run(arguments, directory)
    finally:
        shutil.rmtree(directory)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    print(
        f"{result['blocks']} blocks of {result['block_bytes']} bytes, batches of "
        f"{result['batch']}, {result['threads']} threads, medians of {result['rounds']} rounds, "
        f"{result['modes']}"
    )
    rates = result["rates"]
    assert isinstance(rates, dict)
    for name, row in rates.items():
        print(
            f"{name:>14}: {row['gib_per_second']:6.2f} GiB/s, "
            f"{row['processor_us_per_block']:8.1f} us of processor per block"
        )
    print(f"store / raw write {result['store_to_raw']:.2f}, load / raw read ", end="")
    print(f"{result['load_to_raw']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
