"""Run in a mount namespace of its own, whose /dev/shm is small and private: processes with all the
memory that a rank has are killed one after another. Prints what each had, and what was left, as
JSON.

`python -m tests.faults.killed_hosts DIRECTORY KILLS`
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from tests.stores.lmdb_parts import open_into_map
from tests.stores.nvme_parts import open_nvme
from tiered_kv.memory import HostBlockPool, HostStaging, KVCaches
from tiered_kv.testing.conformance.blocks import BLOCK_BYTES, StoreArguments, put
from tiered_kv.values import CacheGeometry, GroupGeometry

MIB = 2**20
SHM = Path("/dev/shm")
SHM_BYTES = 64 * MIB
POOL_BYTES = 24 * MIB
STAGING_BYTES = 8 * MIB

_libc = ctypes.CDLL(None, use_errno=True)


def lock(address: int, nbytes: int) -> None:
    """Pin, as a device's driver does."""
    if _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)):
        raise OSError(ctypes.get_errno(), "mlock")


def field(file: str, name: str) -> int:
    """A field of a /proc file, in bytes."""
    return int(Path(file).read_text().split(f"{name}:")[1].split()[0]) * 1024


def shm_bytes() -> int:
    disk = os.statvfs(SHM)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize


def be_killed(path: Path, out: Connection) -> None:
    """Child process: has a pool, staging and two stores, all of them used, and waits."""
    pool = HostBlockPool(
        POOL_BYTES // BLOCK_BYTES, 0, BLOCK_BYTES, register=lock, unregister=lambda address: None
    )
    geometry = CacheGeometry((GroupGeometry(0, BLOCK_BYTES, 1, 16),), 0, 1)
    staging = HostStaging(KVCaches.on_host(4, BLOCK_BYTES), geometry, STAGING_BYTES)
    stores = [
        opener(StoreArguments(path / name))
        for name, opener in (("nvme", open_nvme), ("lmdb", open_into_map))
    ]
    for store in stores:
        put(store, range(16))
    had = {
        "locked": field("/proc/self/status", "VmLck"),
        "staging": staging.areas * staging.area_bytes,
        "blocks": sum(store.stat().blocks for store in stores),
        "pool": pool.slots * pool.slot_bytes,
    }
    out.send(had)
    signal.pause()


def main(directory: Path, kills: int) -> None:
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={SHM_BYTES}", "tmpfs", str(SHM)]
    subprocess.run(mounting, check=True)
    found: list[dict[str, object]] = []
    # Forked, so that what takes seconds to import is imported once; nothing is open here.
    context = multiprocessing.get_context("fork")
    for _ in range(kills):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=be_killed, args=(directory, theirs))
        child.start()
        theirs.close()
        try:
            had = ours.recv()
        except EOFError:
            had = None
        if child.pid is not None:
            os.kill(child.pid, signal.SIGKILL)
        child.join(60)
        found.append(
            {
                "had": had,
                "status": child.exitcode,
                "shm": shm_bytes(),
                "names": sorted(os.listdir(SHM)),
                "locked": field("/proc/meminfo", "Mlocked"),
            }
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
