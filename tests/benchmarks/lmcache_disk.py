"""The nvme store beside LMCache's local disk backend, both with O_DIRECT, with the same blocks.

LMCache runs in an environment of its own; `tests/benchmarks/peer_lmcache.py` says how it is made.

    python -m tests.benchmarks.lmcache_disk --path /mnt/nvme0 --json lmcache_disk.json
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks.harness import Batch, Result, Variant, arguments, main, measure, ratio
from tests.benchmarks.hops import Hops, store_context
from tests.benchmarks.nvme_store import BATCHES, settings_in
from tests.benchmarks.peer_lmcache import PYTHON, LmcacheDisk, missing_lmcache
from tiered_kv_nvme import NvmeSpec
from tiered_kv_nvme.store import NvmeStore


def run(options: argparse.Namespace, batch: Batch, directory: Path) -> Result:
    """All variants of one batch."""
    missing = missing_lmcache(options.lmcache)
    with ExitStack() as stack:
        store = NvmeStore(store_context(batch, settings_in(directory, batch, options)))
        stack.callback(store.close)
        hops = stack.enter_context(Hops(batch, store, NvmeSpec))
        if store.stat().modes["io"] != "direct":
            missing = missing or "our store cannot use O_DIRECT here"
        stores = [Variant("store", hops.capture_and_save, hops.forget)]
        loads = [Variant("load", hops.load, hops.wipe)]
        peer = None
        if not missing:
            peer = stack.enter_context(LmcacheDisk(options.lmcache, directory / "lmcache", batch))
            stores.append(Variant("LMCache store", peer.save, peer.renew))
            loads.append(Variant("LMCache load", peer.load, peer.wipe))
        timings = measure([*stores, *loads], batch, options.rounds, settle=True)
        if peer is not None:
            peer.check()
    ratios = (
        ratio(
            timings, "store", "LMCache store", missing=missing, row="lmcache.store", at=batch.size
        ),
        ratio(timings, "load", "LMCache load", missing=missing, row="lmcache.load", at=batch.size),
    )
    notes = {"LMCache": missing or "0.5.6, LocalDiskBackend, O_DIRECT, its default threads"}
    return Result(batch, options.rounds, timings, ratios, notes)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = arguments("nvme store against LMCache's local disk backend", BATCHES)
    parser.add_argument(
        "--lmcache", type=Path, default=PYTHON, help=f"Python of LMCache's environment ({PYTHON})"
    )
    parser.add_argument("--threads", type=int, default=4, help="I/O threads of ours (4)")
    parser.add_argument("--durability", default="none", help="of the nvme tier (none)")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    sys.exit(main("lmcache_disk", options, BATCHES, lambda *where: run(options, *where)))
