"""Values that the store tests share; importable by the child processes that they start."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import BlockStore, NewBlock, ReadResult
from tiered_kv.values import (
    BlockKey,
    BlockStatus,
    CacheGeometry,
    Fingerprint,
    GroupGeometry,
    Namespace,
)

BLOCK_BYTES = 65_536
ODD_BYTES = 12_345
"""Size of the blocks of the second KV group: no multiple of anything."""
CAPACITY = 16 * 2**20

NAMESPACE = Namespace(Fingerprint.of({"model": "tests/tiny", "dtype": "bfloat16"}))
OTHER_NAMESPACE = Namespace(Fingerprint.of({"model": "tests/other", "dtype": "bfloat16"}))


@dataclass(frozen=True, slots=True)
class StoreArguments:
    """How a test opens a store; picklable."""

    path: Path
    """The one directory of the test; the store may make it."""
    capacity: int = CAPACITY
    namespace: Namespace = NAMESPACE
    rank: int = 0
    world_size: int = 1
    writable: bool = True
    durability: str = "none"
    extra: tuple[tuple[str, object], ...] = field(default=())
    """Further settings of the tier, as (field, value)."""

    @property
    def geometry(self) -> CacheGeometry:
        """Two KV groups: `BLOCK_BYTES` and `ODD_BYTES`."""
        groups = (GroupGeometry(0, BLOCK_BYTES, 1, 16), GroupGeometry(1, ODD_BYTES, 1, 16))
        return CacheGeometry(groups, self.rank, self.world_size)

    def with_(self, **changes: object) -> StoreArguments:
        """A copy with other values."""
        return replace(self, **changes)  # type: ignore[arg-type]


def key(number: int) -> BlockKey:
    """A key of 32 bytes, the same in every process."""
    return BlockKey(random.Random(number).randbytes(32))


def keys(numbers: Iterable[int]) -> list[BlockKey]:
    return [key(number) for number in numbers]


def content(number: int, rank: int = 0, length: int = BLOCK_BYTES) -> bytes:
    """What block `number` holds on `rank`, the same in every process."""
    return random.Random((number << 20) + rank).randbytes(length)


def page_aligned(length: int) -> memoryview:
    """Writable zeroed memory, page-aligned; exactly `length` bytes are handed out."""
    return memoryview(mmap.mmap(-1, max(length, 1)))[:length]


def aligned_copy(data: bytes) -> memoryview:
    memory = page_aligned(len(data))
    memory[:] = data
    return memory


def new_block(number: int, rank: int = 0, length: int = BLOCK_BYTES) -> NewBlock:
    data = memoryview(content(number, rank, length))
    return NewBlock(key(number), BlockChecksum.capture(key(number), rank, data))


def put(
    store: BlockStore, numbers: Sequence[int], rank: int = 0, length: int = BLOCK_BYTES
) -> list[int]:
    """Store these blocks in one batch; the numbers of those that were not published before."""
    answers = store.reserve([new_block(n, rank, length) for n in numbers])
    given = [(n, place) for n, place in zip(numbers, answers, strict=True) if place is not None]
    places = [place for _, place in given]
    store.write(places, [aligned_copy(content(n, rank, length)) for n, _ in given])
    store.publish(places)
    return [n for n, _ in given]


@dataclass(frozen=True, slots=True)
class Read:
    """Outcome of `get` for one block."""

    result: ReadResult
    data: bytes
    sound: bool
    """OK and the bytes verify against the row's checksum."""


def get(
    store: BlockStore, numbers: Sequence[int], rank: int = 0, length: int = BLOCK_BYTES
) -> list[Read]:
    """Read these blocks in one batch into memory of `length` bytes each."""
    memory = [page_aligned(length) for _ in numbers]
    results = store.read(keys(numbers), memory)
    reads: list[Read] = []
    for number, view, result in zip(numbers, memory, results, strict=True):
        checksum = result.checksum
        data = bytes(view[: checksum.length]) if checksum else b""
        sound = (
            result.status is BlockStatus.OK
            and checksum is not None
            and checksum.verifies(key(number), rank, memoryview(data))
        )
        reads.append(Read(result, data, sound))
    return reads


def assert_held(
    store: BlockStore, numbers: Sequence[int], rank: int = 0, length: int = BLOCK_BYTES
) -> None:
    """Each block is visible and holds exactly what was put."""
    assert store.contains(keys(numbers)) == [True] * len(numbers)
    for number, read in zip(numbers, get(store, numbers, rank, length), strict=True):
        assert read.sound, (number, read.result)
        assert read.data == content(number, rank, length), number


def disk_bytes(path: Path) -> int:
    """What `du` says: bytes really taken by the directory's files."""
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.stat().st_blocks * 512
        except FileNotFoundError:
            continue  # a temporary file that was renamed meanwhile
    return total
