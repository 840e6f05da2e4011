"""The lmdb store in steady state: many times its capacity goes through it, with hot and cold keys
and blocks of several sizes.

Every batch stores new blocks; a tenth of the keys are hot: they are read again and again, and
stored again where they were evicted. Each tenth of the run prints the file's size, what is live,
how long a batch took to store (median, 99th percentile), and how much was evicted. File size and
times should stay flat from the second tenth on.

    python -m tests.benchmarks.lmdb_churn --path /mnt/nvme0 --capacity 256MiB --writemap auto
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.benchmarks.harness import KIB, MIB, workspace
from tiered_kv.checksum import BlockChecksum
from tiered_kv.config import SizeOrPercent
from tiered_kv.config.units import parse_bytes
from tiered_kv.contracts import NewBlock, StoreContext
from tiered_kv.index import data_bytes
from tiered_kv.memory import HostBlockPool
from tiered_kv.specs import SlotRef
from tiered_kv.values import (
    BlockKey,
    BlockStatus,
    CacheGeometry,
    Fingerprint,
    GroupGeometry,
    Namespace,
)
from tiered_kv_lmdb.settings import LmdbSettings
from tiered_kv_lmdb.store import LmdbStore

__all__ = ["Churn", "Tenth"]

SIZES = (16 * KIB, 64 * KIB, 256 * KIB + 4 * KIB, MIB)
"""Lengths of the blocks."""
TENTHS = 10
BATCH_BYTES = 4 * MIB
HOT_SHARE = 0.1
"""Share of the capacity that the hot keys would fill."""


@dataclass(frozen=True, slots=True)
class Tenth:
    """What a tenth of the run looked like."""

    stored_bytes: int
    file_bytes: int
    """Of both files, on the disk, at its end."""
    live_bytes: int
    """Of pages that hold something, in the file of the values."""
    blocks: int
    """Visible at its end."""
    evicted: int
    hot_reads: int
    hot_hits: int
    put_ms: tuple[float, float, float]
    """Median, 99th percentile and most of what a batch took to store, from room to visibility."""


class Churn:
    """A store, and what goes through it."""

    def __init__(self, path: Path, capacity: int, writemap: str, *, seed: int = 1) -> None:
        """Open the store in an empty directory."""
        settings = LmdbSettings.model_validate(
            {
                "name": "churn",
                "path": path,
                "capacity": capacity,
                "min_free": SizeOrPercent(size=0),
                "writemap": writemap,
            }
        )
        geometry = CacheGeometry((GroupGeometry(0, MIB, 1, 16),), 0, 1)
        namespace = Namespace(Fingerprint.of({"model": "churn"}))
        self.store = LmdbStore(StoreContext("churn", settings, namespace, geometry))
        self.capacity = capacity
        self._path = path
        self._choice = random.Random(seed)
        self._pool = HostBlockPool(2, 0, max(SIZES))
        self._fill()
        self._cold = 0
        hot = int(HOT_SHARE * capacity) // (sum(SIZES) // len(SIZES))
        self._hot = [self._block(b"hot%d" % number, number) for number in range(max(hot, 4))]

    def _fill(self) -> None:
        self._source = self._pool.begin(SlotRef(0, 1))
        self._target = self._pool.begin(SlotRef(1, 1))
        assert self._source is not None
        self._source[:] = random.Random(7).randbytes(max(SIZES))

    def _block(self, name: bytes, number: int) -> NewBlock:
        assert self._source is not None
        length = SIZES[number % len(SIZES)]
        key = BlockKey(name.rjust(36, b"."))
        return NewBlock(key, BlockChecksum.capture(key, 0, self._source[:length]))

    def _batch(self) -> list[NewBlock]:
        """New blocks, and the hot ones that are not there."""
        some = self._choice.sample(self._hot, len(self._hot) // 2)
        there = self.store.contains([block.key for block in some])
        batch = [block for block, is_there in zip(some, there, strict=True) if not is_there]
        while sum(block.checksum.length for block in batch) < BATCH_BYTES:
            self._cold += 1
            batch.append(self._block(b"cold%d" % self._cold, self._choice.randrange(4)))
        return batch

    def _put(self, batch: Sequence[NewBlock]) -> None:
        assert self._source is not None
        places = [place for place in self.store.reserve(batch) if place is not None]
        memory = [self._source[: place.block.checksum.length] for place in places]
        self.store.write(places, memory)
        self.store.publish(places)

    def _read_hot(self) -> tuple[int, int]:
        """How many hot blocks were asked for, and were there, whole."""
        assert self._target is not None
        blocks = self._choice.sample(self._hot, min(4, len(self._hot)))
        hits = 0
        for block in blocks:
            view = self._target[: block.checksum.length]
            [found] = self.store.read([block.key], [view])
            if found.status is BlockStatus.OK:
                assert found.checksum == block.checksum
                assert block.checksum.verifies(block.key, 0, view)
                hits += 1
                self.store.touch([block.key])
        return len(blocks), hits

    def tenths(self, times: float) -> Iterator[Tenth]:
        """Store `times` the capacity, in ten parts."""
        evicted_before = 0
        for _ in range(TENTHS):
            stored, reads, hits, seconds = 0, 0, 0, list[float]()
            while stored < times * self.capacity / TENTHS:
                batch = self._batch()
                began = time.perf_counter()
                self._put(batch)
                seconds.append(time.perf_counter() - began)
                stored += sum(block.checksum.length for block in batch)
                asked, found = self._read_hot()
                reads, hits = reads + asked, hits + found
            stat = self.store.stat()
            evicted, evicted_before = stat.evicted_blocks - evicted_before, stat.evicted_blocks
            yield Tenth(
                stored,
                data_bytes(self._path) + data_bytes(self._path / "values"),
                self.store.live_bytes(),
                stat.blocks,
                evicted,
                reads,
                hits,
                _spread(seconds),
            )

    def close(self) -> None:
        """Close the store."""
        self.store.close()
        self._source = self._target = None
        self._pool.close()


def _spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds
    return statistics.median(seconds) * 1e3, cuts[-1] * 1e3, max(seconds) * 1e3


def main() -> int:
    """Run it and print a line per tenth."""
    parser = argparse.ArgumentParser(description="lmdb store in steady state")
    parser.add_argument("--path", type=Path, help="directory on the disk (default: temporary)")
    parser.add_argument("--capacity", type=parse_bytes, default=256 * MIB, help="(256MiB)")
    parser.add_argument("--times", type=float, default=20.0, help="the capacity, stored (20)")
    parser.add_argument("--writemap", default="auto", help="auto or off (auto)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    tenths: list[Tenth] = []
    with workspace(options.path) as directory:
        churn = Churn(directory / "tier", options.capacity, options.writemap)
        print(f"{options.times:g} x {options.capacity // MIB} MiB, {churn.store.stat().modes}")
        print(
            f"{'tenth':>5}{'stored':>10}{'file':>10}{'live':>10}{'blocks':>8}{'evicted':>9}"
            f"{'hot hits':>10}{'p50 ms':>9}{'p99 ms':>9}{'most ms':>9}"
        )
        for number, tenth in enumerate(churn.tenths(options.times), 1):
            tenths.append(tenth)
            stored, file, live = (
                f"{value / MIB:.1f}M"
                for value in (tenth.stored_bytes, tenth.file_bytes, tenth.live_bytes)
            )
            hits = f"{tenth.hot_hits}/{tenth.hot_reads}"
            p50, p99, most = tenth.put_ms
            print(
                f"{number:5}{stored:>10}{file:>10}{live:>10}{tenth.blocks:8}{tenth.evicted:9}"
                f"{hits:>10}{p50:9.2f}{p99:9.2f}{most:9.2f}",
                flush=True,
            )
        churn.close()
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in tenths], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
