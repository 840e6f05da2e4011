"""KvikIO over device staging, in a process of its own: python -m tests.gpu.direct FOLDER DEVICE.

GDS is used where its kernel module is loaded, else KvikIO's compatibility mode. Prints one JSON
object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from tests.gpu.report import geometry_of, make_caches
from tiered_kv.memory import make_staging
from tiered_kv.specs import GpuBlock
from tiered_kv.values import BlockKey, ChecksumKind


def main(folder: Path, where: torch.device) -> None:
    """Gather, write, read elsewhere, verify, scatter."""
    import kvikio
    import kvikio.defaults

    gds = Path("/proc/driver/nvidia-fs").exists()
    mode = kvikio.CompatMode.OFF if gds else kvikio.CompatMode.ON
    kvikio.defaults.set({"compat_mode": mode, "num_threads": 8})
    caches = make_caches(where, 64, 64 << 10, 32)
    geometry = geometry_of(caches)
    staging = make_staging(caches, geometry, 20 * geometry.slot_bytes)
    half = staging.areas // 2
    nbytes = half * staging.area_bytes
    if gds:
        kvikio.memory_register(staging.buffer)
    blocks = [GpuBlock(0, (i,)) for i in range(half)]
    staging.gather(blocks, range(half), caches.fence())
    path = folder / "blocks"
    began = time.perf_counter()
    with kvikio.CuFile(path, "w") as file:
        written = file.pwrite(staging.span(0, nbytes)).get()
    between = time.perf_counter()
    with kvikio.CuFile(path, "r") as file:
        read = file.pread(staging.span(half, nbytes)).get()
    end = time.perf_counter()
    key = BlockKey(b"key")
    size = geometry.groups[0].block_bytes
    same = sum(
        staging.checksum(key, i, size, ChecksumKind.WSUM)
        == staging.checksum(key, half + i, size, ChecksumKind.WSUM)
        for i in range(half)
    )
    targets = [GpuBlock(0, (32 + i,)) for i in range(half)]
    staging.scatter(range(half, 2 * half), targets, caches.fence())
    equal = sum(
        all(torch.equal(tensor[i], tensor[32 + i]) for tensor in caches.tensors)
        for i in range(half)
    )
    print(
        json.dumps(
            {
                "gds": gds,
                "kvikio": kvikio.__version__,
                "blocks": half,
                "verified": same,
                "equal in the cache": equal,
                "write GB/s": round(nbytes / (between - began) / 1e9, 2),
                "read GB/s": round(nbytes / (end - between) / 1e9, 2),
                "failed": not (written == read == nbytes and same == equal == half),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch.device(sys.argv[2]))
