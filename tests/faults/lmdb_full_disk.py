"""Run in a mount namespace of its own: tiers on a tiny disk that others fill up.

`python -m tests.faults.lmdb_full_disk MOUNTPOINT MEGABYTES WRITEMAP`: an lmdb tier on a disk that
becomes full. `... MOUNTPOINT MEGABYTES new`: tiers that are made on one that is.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from pathlib import Path

from tests.disks import fill
from tests.faults.full_disk import image, mount, try_put
from tests.stores.lmdb_parts import open_into_map, open_lmdb
from tests.stores.nvme_parts import MIB, open_nvme
from tiered_kv.errors import NoSpace
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    StoreArguments,
    assert_held,
    put,
)
from tiered_kv.values import PAGE_BYTES

CAPACITY = 20 * MIB
BATCH = 8


def main(point: Path, megabytes: str, writemap: str) -> None:
    mount(point, image(point.parent, int(megabytes)))
    if writemap == "new":
        make_tiers(point)
        return
    arguments = StoreArguments(point / "tier", CAPACITY, extra=(("writemap", writemap),))
    store = open_lmdb(arguments)
    in_effect = store.stat().modes["writemap"]
    assert in_effect == {"auto": "on", "off": "off"}[writemap]
    rounds = 3 * CAPACITY // BLOCK_BYTES // BATCH
    first = rounds // 6
    before = sum(try_put(store, range(BATCH * turn, BATCH * (turn + 1))) for turn in range(first))
    if writemap == "auto":
        other = open_lmdb(StoreArguments(point / "other", CAPACITY, extra=arguments.extra))
        print("beside it:", other.stat().modes["writemap"])
        assert other.stat().modes["writemap"].startswith("off (")
        other.close()
    filler = point / "filler"
    fill(filler)
    if writemap == "auto":  # the index, which is not written through its map, may grow a little
        os.truncate(filler, filler.stat().st_size - MIB)
    # A page of the map without room behind it would end this process here.
    after = sum(
        try_put(store, range(BATCH * turn, BATCH * (turn + 1)))
        for turn in range(first, first + rounds)
    )
    print(
        f"writemap {in_effect}: batches stored before {before} of {first} and on the full disk "
        f"{after} of {rounds}, {store.stat().evicted_blocks} blocks evicted"
    )
    assert before == first
    if writemap == "auto":
        assert after > rounds // 2
    else:  # the file is far from its budget, so that it wants to grow
        assert after < rounds
    filler.unlink()
    again = range(10_000, 10_000 + BATCH)
    assert put(store, again) == list(again)
    assert_held(store, again)
    store.close()


def make_tiers(point: Path) -> None:
    """Open new tiers while fewer and fewer pages are left, and when there are many again."""
    outcomes: Counter[str] = Counter()
    filler = point / "filler"
    for pages in range(0, 120, 3):
        fill(filler)
        os.sync()
        os.truncate(filler, filler.stat().st_size - pages * PAGE_BYTES)
        os.sync()
        for opener in (open_lmdb, open_into_map, open_nvme):
            arguments = StoreArguments(point / f"tier-{pages}-{opener.__name__}", CAPACITY)
            try:
                store = opener(arguments)
            except NoSpace:
                outcomes["refused"] += 1
            else:
                outcomes["opened"] += 1
                try_put(store, range(BATCH))
                store.close()
        filler.unlink()
        for opener in (open_lmdb, open_into_map, open_nvme):
            arguments = StoreArguments(point / f"tier-{pages}-{opener.__name__}", CAPACITY)
            store = opener(arguments)
            assert put(store, range(BATCH)) == list(range(BATCH))
            assert_held(store, range(BATCH))
            store.close()
            shutil.rmtree(arguments.path)
    print(f"tiers made on a full disk: {dict(outcomes)}")
    assert outcomes["refused"] >= 20
    assert outcomes["opened"] >= 5


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
