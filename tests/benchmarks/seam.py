"""The transfer engine's hops with their async seam, beside the bare I/O engine.

Bare: threads that each take the next group of blocks and move it with one vectored call, in a file
that is there already. Nothing else is done: no index, no budget, no event loop, no answers. Groups,
threads, memory and file system are those of the hops, which are measured without checksums.

Between the two stands the store called directly, in as many threads: what it costs beside the hops
is the engine's and the seam's, the rest is the store's index.

    python -m tests.benchmarks.seam --path /mnt/nvme0 --json seam.json
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

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
from tests.benchmarks.nvme_store import settings_in
from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import NewBlock, Place
from tiered_kv.engine.outcome import groups_of
from tiered_kv_nvme import NvmeSpec
from tiered_kv_nvme.store import NvmeStore

BATCHES = (Batch(64 * KIB, 256), Batch(256 * KIB, 256), Batch(MIB, 256))


class Threads:
    """Long-lived threads that each take the next piece of work."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._executor = ThreadPoolExecutor(count)

    def each(self, work: Callable[[Sequence[int]], None], groups: Iterable[Sequence[int]]) -> None:
        """Do all groups."""
        left = iter(list(groups))

        def take(_: int) -> None:
            for group in left:
                work(group)

        list(self._executor.map(take, range(self._count)))

    def close(self) -> None:
        """End them."""
        self._executor.shutdown()


class Bare:
    """A file, the pool's memory, and threads."""

    def __init__(self, file: Path, hops: Hops, threads: Threads, *, direct: bool) -> None:
        self._batch, self._threads = hops.batch, threads
        self._stored, self._loaded = hops.store_bytes, hops.load_bytes
        self._views = [hops.pool.as_array(n).data[: hops.batch.block_bytes] for n in _all(hops)]
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._fd = os.open(file, flags, 0o600)
        os.posix_fallocate(self._fd, 0, hops.batch.total_bytes)

    def write(self) -> None:
        """All blocks."""
        self._move(os.pwritev, self._stored)

    def read(self) -> None:
        """All blocks."""
        self._move(os.preadv, self._loaded)

    def _move(self, call: Callable[[int, list[memoryview], int], int], group_bytes: int) -> None:
        size = self._batch.block_bytes

        def move(group: Sequence[int]) -> None:
            views = [self._views[i] for i in group]
            if call(self._fd, views, group[0] * size) != len(group) * size:
                raise RuntimeError("a group was moved in part only")

        self._threads.each(move, groups_of(self._batch.blocks, max(1, group_bytes // size)))

    def close(self) -> None:
        """Close the file."""
        self._views.clear()
        os.close(self._fd)


class Direct:
    """The store, called by threads."""

    def __init__(self, store: NvmeStore, hops: Hops, threads: Threads) -> None:
        self._store, self._hops, self._threads = store, hops, threads
        self._views = [hops.pool.as_array(n).data[: hops.batch.block_bytes] for n in _all(hops)]
        self._blocks = [
            NewBlock(key, BlockChecksum.capture(key, 0, view))
            for key, view in zip(hops.keys, self._views, strict=True)
        ]

    def put(self) -> None:
        """Reserve, write and publish all blocks."""
        self._threads.each(self._put, self._groups(self._hops.store_bytes))

    def get(self) -> None:
        """Read all blocks."""
        self._threads.each(self._get, self._groups(self._hops.load_bytes))

    def _groups(self, group_bytes: int) -> Iterable[Sequence[int]]:
        batch = self._hops.batch
        return groups_of(batch.blocks, max(1, group_bytes // batch.block_bytes))

    def _put(self, group: Sequence[int]) -> None:
        places: list[Place] = []
        for place in self._store.reserve([self._blocks[i] for i in group]):
            assert place is not None  # the store was emptied before
            places.append(place)
        self._store.write(places, [self._views[i] for i in group])
        self._store.publish(places)

    def _get(self, group: Sequence[int]) -> None:
        keys = [self._hops.keys[i] for i in group]
        self._store.read(keys, [self._views[i] for i in group])

    def close(self) -> None:
        """Let go of the memory."""
        self._views.clear()


def _all(hops: Hops) -> range:
    return range(hops.batch.blocks)


def run(options: argparse.Namespace, batch: Batch, directory: Path) -> Result:
    """All variants of one batch."""
    with ExitStack() as stack:
        store = NvmeStore(store_context(batch, settings_in(directory, batch, options)))
        stack.callback(store.close)
        hops = stack.enter_context(Hops(batch, store, NvmeSpec))
        threads = Threads(hops.threads)
        stack.callback(threads.close)
        direct = store.stat().modes["io"] == "direct"
        bare = Bare(directory / "bare", hops, threads, direct=direct)
        stack.callback(bare.close)
        called = Direct(store, hops, threads)
        stack.callback(called.close)
        timings = measure(
            [
                Variant("bare write", bare.write),
                Variant("store called directly", called.put, hops.forget),
                Variant("hop to the store", hops.save, hops.forget),
                Variant("bare read", bare.read),
                Variant("store read directly", called.get),
                Variant("hop from the store", hops.load_unverified),
            ],
            batch,
            options.rounds,
            settle=True,
        )
    ratios = (
        ratio(timings, "hop to the store", "bare write", row="seam.store", at=batch.size),
        ratio(timings, "hop from the store", "bare read", row="seam.load", at=batch.size),
        ratio(timings, "hop to the store", "store called directly"),
        ratio(timings, "hop from the store", "store read directly"),
        ratio(timings, "hop to the store", "store called directly", processor=True),
        ratio(timings, "hop from the store", "store read directly", processor=True),
    )
    notes = {"threads": f"{hops.threads} calls at once, io {'direct' if direct else 'buffered'}"}
    return Result(batch, options.rounds, timings, ratios, notes)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = arguments("the engine's hops against the bare I/O engine", BATCHES)
    parser.add_argument("--threads", type=int, default=4, help="I/O threads of the store (4)")
    parser.add_argument("--durability", default="none", help="of the nvme tier (none)")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    sys.exit(main("seam", options, BATCHES, lambda *where: run(options, *where)))
