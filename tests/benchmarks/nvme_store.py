"""The nvme store beside vLLM's own fs tier and beside fio.

Both tiers keep the same bytes in the same directory, and store blocks that they do not have. Ours
stores and loads through its hops (`tests/benchmarks/hops.py`), every
load verified; vLLM's runs one job per batch (`tests/benchmarks/peer_vllm.py`).

    python -m tests.benchmarks.nvme_store --path /mnt/nvme0 --json nvme_store.json
"""

from __future__ import annotations

import argparse
import sys
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
from tests.benchmarks.peer_fio import missing_fio, run_fio
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
STORE_FLOORS = {64 * KIB: 2.0, 256 * KIB: 1.5, MIB: 1.2, 4 * MIB: 1.0}
LOAD_FLOORS = {64 * KIB: 1.5, 256 * KIB: 1.2, MIB: 1.0, 4 * MIB: 0.9}


def run(options: argparse.Namespace, batch: Batch, directory: Path) -> Result:
    """All variants of one batch."""
    settings = NvmeSettings(
        name="bench",
        path=directory / "tier",
        capacity=2 * batch.total_bytes + 256 * MIB,
        min_free=SizeOrPercent(size=0),
        io_threads=options.threads,
        durability=options.durability,
    )
    no_vllm, no_fio = missing_extension(), missing_fio()
    with ExitStack() as stack:
        store = NvmeStore(store_context(batch, settings))
        stack.callback(store.close)
        hops = stack.enter_context(
            Hops(batch, store, NvmeSpec, group_bytes=options.group, threads=options.calls)
        )
        stores = [Variant("store", hops.save, hops.forget)]
        loads = [Variant("verified load", hops.load, hops.wipe)]
        modes = store.stat().modes
        direct = modes["io"] == "direct"
        peer = None
        if not no_vllm:
            peer = FileSystemTier(directory / "vllm", batch, options.threads)
            stack.callback(peer.close)
            stores.append(Variant("vLLM fs store", peer.save, peer.renew))
            loads.append(Variant("vLLM fs load", peer.load, peer.wipe))
        if not no_fio:
            file = directory / "fio"
            for name, write, there in (("write", True, stores), ("read", False, loads)):

                def fio(*, write: bool = write) -> float:
                    return run_fio(file, batch, options.threads, write=write, direct=direct)

                there.append(Variant(f"fio {name}", fio))
        timings = measure([*stores, *loads], batch, options.rounds, settle=True)
        if peer is not None:
            peer.check()
        notes = {
            "tier": ", ".join(f"{name} {value}" for name, value in modes.items()),
            "threads": f"{options.threads}, groups of "
            f"{hops.store_bytes // KIB} KiB stored, {hops.load_bytes // KIB} KiB loaded",
        }
        if peer is not None:
            notes["vLLM's tier"] = (
                f"fs_io_C loaded, one job, {'direct' if peer.direct else 'buffered'}"
            )

    def to(theirs: str, ours: str, missing: str, floor: float | None = None) -> Ratio:
        return ratio(timings, ours, theirs, floor=floor, missing=missing)

    size = batch.block_bytes
    ratios = (
        to("vLLM fs store", "store", no_vllm, STORE_FLOORS[size]),
        to("vLLM fs load", "verified load", no_vllm, LOAD_FLOORS[size]),
        to("fio write", "store", no_fio),
        to("fio read", "verified load", no_fio),
    )
    return Result(batch, options.rounds, timings, ratios, notes)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = arguments("nvme store against vLLM's fs tier and fio", BATCHES)
    parser.add_argument("--threads", type=int, default=4, help="I/O threads of each (4)")
    parser.add_argument("--calls", type=int, help="hop calls at once (as the engine has it)")
    parser.add_argument("--group", type=int, help="bytes per hop call (as the engine has it)")
    parser.add_argument("--durability", default="none", help="of the nvme tier (none)")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    sys.exit(main("nvme_store", options, BATCHES, lambda *where: run(options, *where)))
