"""The lmdb store beside copying the same bytes in memory.

In steady state: the map was filled once, and what is stored takes the pages of what was deleted
before. Put and get go through the hops between host slots and the store. The get is measured as
the handler does it, and verified as the engine does it (copying verifies nothing either).

Blocks come from, and go to, a host pool that is larger than the processor's cache, as a real one
is. So does what is copied for comparison, and it goes to as much memory as the store's file has.

    python -m tests.benchmarks.lmdb_store --path /mnt/nvme0 --json lmdb_store.json
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.benchmarks.harness import (
    KIB,
    MIB,
    Batch,
    Ratio,
    Result,
    Timing,
    Variant,
    arguments,
    main,
    measure,
    ratio,
)
from tests.benchmarks.hops import Hops, store_context
from tiered_kv.config import SizeOrPercent
from tiered_kv.contracts import Place, StoreContext
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

MEMCPY = "memcpy (np.copyto)"

FILLINGS = 4
"""Times the map's pages are gone through before the first round."""


class _ClockedStore(LmdbStore):
    """Tells how much processor time of a put is the index's: making blocks visible."""

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        self._clock = threading.Lock()
        self._published, self._seconds = 0, 0.0

    def publish(self, places: Sequence[Place]) -> None:
        began = time.thread_time()
        super().publish(places)
        with self._clock:
            self._published += len(places)
            self._seconds += time.thread_time() - began

    def us_per_block(self) -> float:
        """Microseconds of processor time, as a mean of all blocks so far."""
        return self._seconds / self._published * 1e6


def _processor_notes(timings: Mapping[str, Timing], publishing_us: float) -> dict[str, str]:
    """Ratios of processor time, which other programs on the machine change little."""
    copying = timings[MEMCPY].processor_us_per_block
    put, get = (timings[name].processor_us_per_block for name in ("put", "get"))
    return {
        "processor time": f"put {copying / put:.2f} of memcpy's rate, get {copying / get:.2f}",
        "publication": f"{publishing_us:.1f} us of a put's processor time per block; the put "
        f"without it: {copying / (put - publishing_us):.2f}",
    }


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
        store = _ClockedStore(store_context(batch, settings))
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
                Variant(MEMCPY, copy),
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
        "threads": f"{hops.threads} calls at once, groups of "
        f"{hops.store_bytes // KIB} KiB stored, {hops.load_bytes // KIB} KiB loaded",
        **_processor_notes(timings, store.us_per_block()),
    }
    mapped = modes["writemap"] == "on"

    def to_memcpy(what: str) -> Ratio:
        floor, row = (FLOOR, f"lmdb.{what}") if mapped else (None, "")
        return ratio(timings, what, MEMCPY, floor=floor, row=row, at=batch.size)

    ratios = (
        to_memcpy("put"),
        to_memcpy("get"),
        ratio(timings, "verified get", MEMCPY),
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
