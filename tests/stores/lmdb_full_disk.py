"""Run in a mount namespace of its own: an lmdb tier that writes into its map, on a tiny disk that
others fill up.

`python -m tests.stores.lmdb_full_disk MOUNTPOINT IMAGE`
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.stores.lmdb_parts import open_into_map
from tests.stores.nvme_full_disk import fill, mount, try_put
from tests.stores.nvme_parts import MIB
from tiered_kv.testing.conformance.blocks import BLOCK_BYTES, StoreArguments


def main(point: Path, image: str) -> None:
    mount(point, image)
    capacity = 20 * MIB
    store = open_into_map(StoreArguments(point / "tier", capacity))
    assert store.stat().modes["writemap"] == "on"
    rounds = 3 * capacity // BLOCK_BYTES // 8
    before = sum(try_put(store, range(8 * turn, 8 * turn + 8)) for turn in range(rounds))
    other = open_into_map(StoreArguments(point / "other", capacity))
    print("beside it:", other.stat().modes["writemap"])
    assert other.stat().modes["writemap"].startswith("off (")
    other.close()
    fill(point / "filler")
    # A page of the map without room behind it would end this process here.
    after = sum(try_put(store, range(8 * turn, 8 * turn + 8)) for turn in range(rounds, 2 * rounds))
    print(f"batches stored before and on the full disk: {before} and {after} of {rounds} each")
    assert before == rounds
    assert after > rounds // 2
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
