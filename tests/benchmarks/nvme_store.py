"""The nvme store beside vLLM's own fs tier, a file per block, and fio.

All keep the same bytes in the same directory, and store blocks that they do not have. Ours stores
and loads through its hops (`tests/benchmarks/hops.py`). "store" takes each block's checksum on the
way, as one that comes from the engine has it taken; "load" verifies it. Without checksums, blocks
are written from host slots that are known to be whole, and nothing looks at what was read.

vLLM's tier moves a batch in one job, and in 16 at once (`tests/benchmarks/peer_vllm.py`); fio has
the same block size, depth and memory (`tests/benchmarks/peer_fio.py`).

    python -m tests.benchmarks.nvme_store --path /mnt/nvme0 --json nvme_store.json

Loads are cold: all but the LMDB tier read past the page cache. `--durability batch` and `full` cost
what the disk takes to flush; no peer flushes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks.harness import (
    KIB,
    MIB,
    Batch,
    Ratio,
    Result,
    Variant,
    arguments,
    main,
    measure,
    ratio,
)
from tests.benchmarks.hops import Hops, store_context
from tests.benchmarks.peer_files import FilePerBlock
from tests.benchmarks.peer_fio import io_engine, missing_fio, run_fio
from tests.benchmarks.peer_vllm import FileSystemTier, missing_extension
from tiered_kv.config import SizeOrPercent
from tiered_kv_nvme import NvmeSpec
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.store import NvmeStore

BATCHES = (
    Batch(64 * KIB, 512),
    Batch(256 * KIB, 256),
    Batch(MIB, 96),
    Batch(4 * MIB, 32),
)
MANY_JOBS = 16


def settings_in(directory: Path, batch: Batch, options: argparse.Namespace) -> NvmeSettings:
    """Of a tier that holds the batch twice."""
    return NvmeSettings(
        name="bench",
        path=directory / "tier",
        capacity=2 * batch.total_bytes + 256 * MIB,
        min_free=SizeOrPercent(size=0),
        io_threads=options.threads,
        durability=options.durability,
    )


def run(options: argparse.Namespace, batch: Batch, directory: Path) -> Result:
    """All variants of one batch."""
    no_vllm, no_fio = missing_extension(), missing_fio()
    with ExitStack() as stack:
        store = NvmeStore(store_context(batch, settings_in(directory, batch, options)))
        stack.callback(store.close)
        hops = stack.enter_context(
            Hops(batch, store, NvmeSpec, group_bytes=options.group, threads=options.calls)
        )
        stores = [
            Variant("store", hops.capture_and_save, hops.forget),
            Variant("store, no checksum", hops.save, hops.forget),
        ]
        loads = [
            Variant("load", hops.load, hops.wipe),
            Variant("load, no checksum", hops.load_unverified, hops.wipe),
        ]
        modes = store.stat().modes
        direct = modes["io"] == "direct"
        checks: list[Callable[[], None]] = []
        peers: list[FileSystemTier] = []
        for jobs, name in ((1, "vLLM fs"), (MANY_JOBS, f"vLLM fs, {MANY_JOBS} jobs")):
            if no_vllm:
                break
            peer = FileSystemTier(directory / f"vllm-{jobs}", batch, jobs=jobs)
            peers.append(peer)
            stack.callback(peer.close)
            stores.append(Variant(f"{name}, store", peer.save, peer.renew))
            loads.append(Variant(f"{name}, load", peer.load, peer.wipe))
            checks.append(peer.check)
        files = FilePerBlock(directory / "files", batch, options.threads, direct=direct)
        stack.callback(files.close)
        stores.append(Variant("file per block, store", files.save, files.renew))
        loads.append(Variant("file per block, load", files.load, files.wipe))
        checks.append(files.check)
        if not no_fio:
            file = directory / "fio"
            stores.append(
                Variant(
                    "fio write",
                    lambda: run_fio(file, batch, options.threads, write=True, direct=direct),
                )
            )
            loads.append(
                Variant(
                    "fio read",
                    lambda: run_fio(file, batch, options.threads, write=False, direct=direct),
                )
            )
        timings = measure([*stores, *loads], batch, options.rounds, settle=True)
        for check in checks:
            check()
        notes = {
            "tier": ", ".join(f"{name} {value}" for name, value in modes.items()),
            "threads": f"{options.threads}, groups of "
            f"{hops.store_bytes // KIB} KiB stored, {hops.load_bytes // KIB} KiB loaded",
            "fio": f"{io_engine()}, {options.threads} jobs, {batch.blocks // options.threads} "
            "blocks in flight in each",
        }
        for peer in peers[:1]:
            how = "direct" if peer.direct else "buffered"
            notes["vLLM's tier"] = f"fs_io_C loaded, {how}"

    at = batch.size
    many = f"vLLM fs, {MANY_JOBS} jobs"

    def to(theirs: str, ours: str, missing: str, row: str = "", *, cpu: bool = False) -> Ratio:
        return ratio(timings, ours, theirs, missing=missing, row=row, at=at, processor=cpu)

    ratios = (
        to("vLLM fs, store", "store", no_vllm, "nvme.store"),
        to("vLLM fs, store", "store, no checksum", no_vllm, "nvme.store.off"),
        to("vLLM fs, load", "load", no_vllm, "nvme.load"),
        to("vLLM fs, load", "load, no checksum", no_vllm),
        to(f"{many}, store", "store", no_vllm, "nvme.store.16"),
        to(f"{many}, store", "store, no checksum", no_vllm, "nvme.store.16.off"),
        to(f"{many}, load", "load", no_vllm),
        to("vLLM fs, store", "store, no checksum", no_vllm, "nvme.processor", cpu=True),
        to("vLLM fs, load", "load, no checksum", no_vllm, cpu=True),
        to("file per block, store", "store", ""),
        to("file per block, load", "load", ""),
        to("fio write", "store, no checksum", no_fio, "nvme.fio.write"),
        to("fio read", "load, no checksum", no_fio, "nvme.fio.read"),
        to("fio write", "store", no_fio),
        to("fio read", "load", no_fio),
    )
    return Result(batch, options.rounds, timings, ratios, notes)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = arguments("nvme store against vLLM's fs tier, a file per block and fio", BATCHES)
    parser.add_argument(
        "--threads", type=int, default=4, help="I/O threads of ours, of the files' and fio's (4)"
    )
    parser.add_argument("--calls", type=int, help="hop calls at once (as the engine has it)")
    parser.add_argument("--group", type=int, help="bytes per hop call (as the engine has it)")
    parser.add_argument("--durability", default="none", help="of the nvme tier (none)")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    sys.exit(main("nvme_store", options, BATCHES, lambda *where: run(options, *where)))
