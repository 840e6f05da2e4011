"""The lmdb store beside copying the same bytes in memory.

In steady state: the map was filled once, and what is stored takes the pages of what was deleted
before. Put and get go through the hops between host slots and the store. The get is measured as
the handler does it, and verified as the engine does it (copying verifies nothing either).

Blocks come from, and go to, a host pool that is larger than the processor's cache, as a real one
is. So does what is copied for comparison, and it goes to as much memory as the store's file has.

glibc copies with `rep movsb` up to the size of the processor's second-level cache. LMDB keeps a
value at 16 bytes from the start of its page, and to such an address some processors copy that way
at less than half their speed. `GLIBC_TUNABLES` tells glibc better:

    export GLIBC_TUNABLES=glibc.cpu.x86_rep_movsb_threshold=0x40000000

    python -m tests.benchmarks.lmdb_store --path /mnt/nvme0 --json lmdb_store.json
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.benchmarks.harness import (
    KIB,
    MIB,
    Batch,
    Result,
    Variant,
    arguments,
    main,
    measure,
    ratio,
)
from tests.benchmarks.hops import Hops, store_context
from tiered_kv.config import SizeOrPercent
from tiered_kv.memory import HostBlockPool
from tiered_kv_lmdb import LmdbSpec
from tiered_kv_lmdb.settings import LmdbSettings
from tiered_kv_lmdb.store import LmdbStore

BATCHES = (
    Batch(64 * KIB, 512),
    Batch(256 * KIB, 256),
    Batch(MIB, 96),
    Batch(4 * MIB, 32),
)
FLOOR = 0.5
COPIES = 4
"""Times that the pool holds the batch."""

FILLINGS = 4
"""Times the map's pages are gone through before the first round."""


def run(options: argparse.Namespace, batch: Batch, directory: Path) -> Result:
    """All variants of one batch."""
    settings = LmdbSettings(
        name="bench",
        path=directory / "tier",
        capacity=3 * batch.total_bytes + 64 * MIB,
        min_free=SizeOrPercent(size=0),
        writemap=options.writemap,
    )
    with ExitStack() as stack:
        store = LmdbStore(store_context(batch, settings))
        stack.callback(store.close)
        hops = stack.enter_context(
            Hops(
                batch,
                store,
                LmdbSpec,
                group_bytes=options.group,
                threads=options.calls,
                copies=COPIES,
            )
        )
        turns = settings.capacity // batch.total_bytes
        target = HostBlockPool(turns * batch.blocks, 0, hops.pool.slot_bytes)
        stack.callback(target.close)
        sources, targets = _turns(hops.pool, batch), _turns(target, batch)

        def copy() -> None:
            for here, there in zip(next(sources), next(targets), strict=True):
                np.copyto(there, here)

        for _ in range(FILLINGS):
            hops.save()
            hops.forget()
            copy()
        timings = measure(
            [
                Variant("memcpy (np.copyto)", copy),
                Variant("put", hops.save, hops.forget),
                Variant("get", hops.load_unverified, hops.wipe),
                Variant("verified get", hops.load, hops.wipe),
            ],
            batch,
            options.rounds,
            settle=False,
        )
        modes = store.stat().modes
    notes = {
        "tier": ", ".join(f"{name} {value}" for name, value in modes.items()),
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "not set"),
        "threads": f"{hops.threads} calls at once, groups of "
        f"{hops.store_bytes // KIB} KiB stored, {hops.load_bytes // KIB} KiB loaded",
    }
    floor = FLOOR if modes["writemap"] == "on" else None
    memcpy = "memcpy (np.copyto)"
    ratios = (
        ratio(timings, "put", memcpy, floor=floor),
        ratio(timings, "get", memcpy, floor=floor),
        ratio(timings, "verified get", memcpy),
    )
    return Result(batch, options.rounds, timings, ratios, notes)


def _turns(pool: HostBlockPool, batch: Batch) -> Iterator[list[npt.NDArray[np.uint8]]]:
    """The blocks of a batch, in one part of the pool after the other, for ever."""
    arrays = [pool.as_array(number) for number in range(pool.slots)]
    starts = range(0, len(arrays), batch.blocks)
    return cycle([arrays[start : start + batch.blocks] for start in starts])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = arguments("lmdb store against copying in memory", BATCHES)
    parser.add_argument("--writemap", default="auto", help="of the lmdb tier: auto or off (auto)")
    parser.add_argument("--calls", type=int, help="hop calls at once (as the engine has it)")
    parser.add_argument("--group", type=int, help="bytes per hop call (as the engine has it)")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    sys.exit(main("lmdb_store", options, BATCHES, lambda *where: run(options, *where)))
