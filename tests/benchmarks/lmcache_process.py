"""LMCache's `LocalDiskBackend` in a process of its own environment; `peer_lmcache` starts it.

Takes a word a line on stdin (`renew`, `wipe`, `save`, `load`, `check`), and answers each with a
line of JSON. Nothing of tiered-kv is imported: its environment has none of it.

Its settings are its defaults, but for O_DIRECT, page-aligned memory (which that needs), and room
for all blocks.
"""

# pyright: reportMissingImports=false
# (LMCache is not there where the types are checked.)

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

GIB = 2**30
HEAD = 64
PAGE = 4096
ROOM = 64
"""Times that the disk's limit holds the batch: nothing is evicted."""
WAIT_SECONDS = 120.0


class Disk:
    """The backend and a batch of blocks."""

    def __init__(self, folder: Path, block_bytes: int, blocks: int) -> None:
        tokens = block_bytes // 2 // HEAD // 2  # bf16, keys and values
        self._blocks = blocks
        self._shape = torch.Size([2, 1, tokens, HEAD])
        batch_gib = block_bytes * blocks / GIB
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False,
            max_local_cpu_size=3 * batch_gib,
            local_disk=str(folder),
            max_local_disk_size=ROOM * batch_gib,
            extra_config={"use_odirect": True, "local_cpu.pinned_align_bytes": PAGE},
        )
        metadata = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(1, 2, tokens, 1, HEAD),
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._disk = LocalDiskBackend(config, self._loop, self._memory, dst_device="cpu")
        self._numbers = itertools.count(1)
        self._keys = self._new_keys()
        self._stored = [self._allocate() for _ in range(blocks)]
        self._loaded: list[Any] = []
        generator = torch.Generator().manual_seed(0)
        for block in self._stored:
            octets = block.tensor.view(torch.uint8)
            octets.copy_(torch.randint(0, 256, octets.shape, generator=generator))
        addresses = {block.data_ptr % PAGE for block in self._stored}
        if addresses != {0} or not self._disk.use_odirect or block_bytes % self._disk.os_disk_bs:
            raise RuntimeError("LMCache would not use O_DIRECT for these blocks")

    def _allocate(self) -> Any:
        block = self._memory.allocate(self._shape, torch.bfloat16)
        if block is None:
            raise RuntimeError("LMCache has no memory for the blocks")
        return block

    def _new_keys(self) -> list[Any]:
        return [
            CacheEngineKey("bench", 1, 0, next(self._numbers), torch.bfloat16)
            for _ in range(self._blocks)
        ]

    def renew(self) -> None:
        """Have the next store write blocks that are not there."""
        self._keys = self._new_keys()

    def wipe(self) -> None:
        """Overwrite the memory that the next load gets."""
        self._give_back()
        blank = [self._allocate() for _ in range(self._blocks)]
        for block in blank:
            block.tensor.zero_()
            block.ref_count_down()

    def save(self) -> None:
        """Store all blocks, and wait until they are on the disk."""
        left, done = iter(range(self._blocks - 1)), threading.Event()

        def stored(_: Any) -> None:
            if next(left, None) is None:
                done.set()

        self._disk.batched_submit_put_task(self._keys, self._stored, on_complete_callback=stored)
        if not done.wait(WAIT_SECONDS):
            raise RuntimeError("LMCache did not store all blocks")

    def load(self) -> None:
        """Load all blocks."""
        self._loaded = self._disk.batched_get_blocking(self._keys)

    def check(self) -> None:
        """See that the last load brought what was stored."""
        if len(self._loaded) != self._blocks or not all(
            there is not None
            and torch.equal(there.tensor.view(torch.uint8), here.tensor.view(torch.uint8))
            for there, here in zip(self._loaded, self._stored, strict=True)
        ):
            raise RuntimeError("LMCache did not bring back what was stored")

    def _give_back(self) -> None:
        for block in self._loaded:
            block.ref_count_down()
        self._loaded = []


def _processor() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("block_bytes", type=int)
    parser.add_argument("blocks", type=int)
    asked = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to stderr
    logging.disable(logging.WARNING)
    disk = Disk(asked.folder, asked.block_bytes, asked.blocks)
    words = {
        "renew": disk.renew,
        "wipe": disk.wipe,
        "save": disk.save,
        "load": disk.load,
        "check": disk.check,
    }
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        processor, wall = _processor(), time.perf_counter()
        words[line.strip()]()
        seconds = time.perf_counter() - wall
        took = {"seconds": seconds, "processor_seconds": _processor() - processor}
        print(json.dumps(took), file=answers, flush=True)
    os._exit(0)  # LMCache's own threads would keep it alive


if __name__ == "__main__":
    main()
