"""Run in a mount namespace of its own: tiers on file systems that lack what ours like.

`python -m tests.faults.plain_file_systems ramfs|journal STORE FOLDER`
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.faults.full_disk import OPENERS, image, mount
from tests.stores.nvme_parts import MIB
from tiered_kv.testing.conformance.blocks import StoreArguments, assert_held, put


def main(what: str, kind: str, folder: Path) -> None:
    point = folder / "disk"
    if what == "ramfs":
        point.mkdir()
        subprocess.run(["mount", "-t", "ramfs", "ramfs", str(point)], check=True)
    else:
        file = image(folder, 64)
        subprocess.run(["tune2fs", "-o", "journal_data", file], check=True, capture_output=True)
        mount(point, file)
    arguments = StoreArguments(point / "tier", 24 * MIB)
    store = OPENERS[kind](arguments)
    put(store, range(16))
    assert_held(store, range(16))
    store.close()
    store = OPENERS[kind](arguments)
    assert_held(store, range(16))
    for first in range(100, 700, 20):
        put(store, range(first, first + 20))
    assert_held(store, range(680, 700))
    print("in effect:", dict(store.stat().modes))
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
