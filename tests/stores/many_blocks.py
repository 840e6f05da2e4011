"""An index of many blocks, written without their bytes, and the page cache it is read through."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.stores.lmdb_parts import look_after_lmdb, open_lmdb
from tests.stores.nvme_parts import look_after_nvme, open_nvme
from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import BlockStore, StoreMaintenance
from tiered_kv.index import BlockIndex, Environment, Row
from tiered_kv.testing.conformance.blocks import StoreArguments
from tiered_kv.values import BlockKey, ChecksumKind

__all__ = [
    "KINDS",
    "Kind",
    "chill",
    "fill_index",
    "index_data",
    "many_keys",
    "read_bytes",
    "resident_bytes",
]

_BLOCK_BYTES = 4096
_BATCH = 16_384
_MOST_INDEX_BYTES = 8 * 2**30


@dataclass(frozen=True, slots=True)
class Kind:
    """A store whose index is in LMDB."""

    name: str
    open: Callable[[StoreArguments], BlockStore]
    look_after: Callable[[StoreArguments], StoreMaintenance]
    folder: str
    """Where its index lies in the tier's directory."""

    def __str__(self) -> str:
        return self.name


KINDS = (
    Kind("nvme", open_nvme, look_after_nvme, "index"),
    Kind("lmdb", open_lmdb, look_after_lmdb, ""),
)


def index_data(kind: Kind, path: Path) -> Path:
    """LMDB's file of the index of the tier in `path`."""
    return path / kind.folder / "data.mdb"


def many_keys(first: int, count: int) -> list[BlockKey]:
    """Keys of 32 bytes that look random, the same in every process."""
    return [
        BlockKey(hashlib.blake2b(number.to_bytes(8, "big"), digest_size=32).digest())
        for number in range(first, first + count)
    ]


def fill_index(
    kind: Kind,
    arguments: StoreArguments,
    count: int,
    make: Callable[[int, int], list[BlockKey]] = many_keys,
) -> list[BlockKey]:
    """Make a tier whose index says that it holds `count` blocks of 4 KiB; their keys, sorted."""
    kind.open(arguments).close()
    environment = Environment.open(
        arguments.path / kind.folder,
        kind=kind.name,
        tier="many",
        max_bytes=_MOST_INDEX_BYTES,
        writable=True,
    )
    index = BlockIndex(environment, arguments.namespace, arguments.geometry)
    checksum = BlockChecksum(_BLOCK_BYTES, 0, ChecksumKind.XXH3)
    keys = sorted(make(0, count))
    for first in range(0, count, _BATCH):
        batch = keys[first : first + _BATCH]
        with environment.write() as txn:
            generation = index.next_generation(txn, len(batch))
            index.publish(
                txn,
                [
                    (key, Row(checksum, 1, (generation + n).to_bytes(8, "big"), generation + n))
                    for n, key in enumerate(batch)
                ],
            )
    environment.close()
    return keys


def chill(path: Path) -> int:
    """Write all files below to the disk and drop them from the page cache; how many bytes. Nobody
    may have them mapped."""
    total = 0
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDWR)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                total += os.fstat(fd).st_size
            finally:
                os.close(fd)
    return total


def resident_bytes(data: Path) -> int:
    """Bytes of a mapped file that this process has touched, in pages and what the kernel maps
    around each (16 pages)."""
    total = 0
    ours = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            ours = rest.endswith(f" {data}")
        elif ours and head == "Rss:":
            total += int(rest.split()[0]) * 1024
    return total


def read_bytes() -> int:
    """Bytes that this process has had read from a disk, page faults included."""
    lines: Sequence[str] = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
