"""Run in a mount namespace of its own: an nvme tier on a tiny disk that others fill up.

`python -m tests.stores.nvme_full_disk MOUNTPOINT tmpfs|IMAGE`
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.stores.nvme_parts import MIB, open_nvme, segment_files
from tiered_kv.contracts import BlockStore
from tiered_kv.errors import NoSpace
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    StoreArguments,
    assert_held,
    disk_bytes,
    get,
    keys,
    put,
)
from tiered_kv.values import BlockStatus


def mount(point: Path, what: str) -> None:
    if what == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=36M", "tmpfs", str(point)]
    else:
        command = ["mount", "-o", "loop", what, str(point)]
    subprocess.run(command, check=True)


def fill(file: Path) -> None:
    """Take all the space that is left."""
    with file.open("wb", buffering=0) as out:
        for size in (MIB, 4096):
            try:
                while out.write(bytes(size)):
                    pass
            except OSError as error:
                print(f"the disk is full: {error}")


def try_put(store: BlockStore, numbers: range) -> bool:
    """Store a batch; when there is no room, nothing of it may be visible."""
    known = store.contains(keys(numbers))
    try:
        put(store, list(numbers))
    except NoSpace as error:
        assert store.contains(keys(numbers)) == known
        print(f"refused: {error}")
        return False
    assert_held(store, numbers)
    return True


def main(point: Path, what: str) -> None:
    mount(point, what)
    arguments = StoreArguments(point / "tier", 24 * MIB)
    filler = point / "filler"

    store = open_nvme(arguments)
    print("io:", store.stat().modes["io"])
    fill(filler)
    assert not try_put(store, range(8)), "a full disk took blocks"
    assert segment_files(arguments.path) == []
    filler.unlink()
    assert try_put(store, range(8)), "it did not recover"

    stored = 8
    while disk_bytes(arguments.path) < 12 * MIB:
        assert try_put(store, range(stored, stored + 8))
        stored += 8
    fill(filler)
    before = disk_bytes(arguments.path)
    taken = refused = 0
    for _ in range(60):
        if try_put(store, range(stored, stored + 8)):
            taken += 1
        else:
            refused += 1
        stored += 8
    for read in get(store, range(stored)):
        assert read.sound or read.result.status is BlockStatus.MISSING
    grown = disk_bytes(arguments.path) - before
    print(f"disk full: {taken} batches taken, {refused} refused, grown by {grown} bytes")
    print(f"evicted: {store.stat().evicted_blocks}")
    assert taken >= 50
    assert grown <= MIB

    store.close()
    store = open_nvme(arguments)
    for read in get(store, range(stored)):
        assert read.sound or read.result.status is BlockStatus.MISSING
    filler.unlink()
    for _ in range(60):
        assert try_put(store, range(stored, stored + 8)), "it did not recover"
        stored += 8
    held = store.stat().blocks * BLOCK_BYTES
    print(f"space is back: {held} bytes held of {before} before")
    assert held > before
    store.close()
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
