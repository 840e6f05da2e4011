"""Blocks with contents that every process can tell, and the ways to put them into a store."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import BlockStore, NewBlock, Place, ReadResult
from tiered_kv.testing.conformance.contract import StorePromise, owe
from tiered_kv.values import (
    BlockKey,
    BlockStatus,
    CacheGeometry,
    Fingerprint,
    GroupGeometry,
    Namespace,
)

__all__ = [
    "BLOCK_BYTES",
    "CAPACITY",
    "NAMESPACE",
    "ODD_BYTES",
    "OTHER_NAMESPACE",
    "Read",
    "StoreArguments",
    "aligned_copy",
    "assert_held",
    "content",
    "disk_bytes",
    "get",
    "key",
    "keys",
    "new_block",
    "page_aligned",
    "put",
    "reserved",
]

BLOCK_BYTES = 65_536
"""Length of a block of the first KV group, where a check says nothing else."""
ODD_BYTES = 12_345
"""Length of a block of the second KV group: no multiple of anything."""
CAPACITY = 16 * 2**20
"""Bytes that a store may take, where its case says nothing else."""

NAMESPACE = Namespace(Fingerprint.of({"model": "tests/tiny", "dtype": "bfloat16"}))
OTHER_NAMESPACE = Namespace(Fingerprint.of({"model": "tests/other", "dtype": "bfloat16"}))


@dataclass(frozen=True, slots=True)
class StoreArguments:
    """How a check wants a store opened. Picklable: child processes open it too."""

    path: Path
    """A directory for this check alone. It is not there at the first opening."""
    capacity: int = CAPACITY
    """Budget in bytes."""
    namespace: Namespace = NAMESPACE
    rank: int = 0
    world_size: int = 1
    writable: bool = True
    """See `StoreContext.writable`."""
    block_bytes: tuple[int, ...] = (BLOCK_BYTES, ODD_BYTES)
    """Length in bytes of the blocks of each KV group."""
    extra: tuple[tuple[str, object], ...] = field(default=())
    """For an instance's own checks: further settings, as (name, value)."""

    @property
    def geometry(self) -> CacheGeometry:
        """One KV group per entry of `block_bytes`, blocks of one engine block of 16 tokens."""
        groups = tuple(GroupGeometry(i, size, 1, 16) for i, size in enumerate(self.block_bytes))
        return CacheGeometry(groups, self.rank, self.world_size)

    def with_(self, **changes: Any) -> Self:
        """A copy with other values."""
        return replace(self, **changes)


def key(number: int) -> BlockKey:
    """A key of 32 bytes, the same in every process."""
    return BlockKey(random.Random(number).randbytes(32))


def keys(numbers: Iterable[int]) -> list[BlockKey]:
    """See `key`."""
    return [key(number) for number in numbers]


def content(number: int, rank: int = 0, length: int = BLOCK_BYTES) -> bytes:
    """What block `number` holds on `rank`, the same in every process."""
    return random.Random((1 << 60) + (number << 20) + rank).randbytes(length)


def page_aligned(length: int) -> memoryview:
    """Writable zeroed memory, page-aligned; exactly `length` bytes are handed out."""
    return memoryview(mmap.mmap(-1, max(length, 1)))[:length]


def aligned_copy(data: bytes) -> memoryview:
    """Page-aligned memory that holds `data`."""
    memory = page_aligned(len(data))
    memory[:] = data
    return memory


def new_block(number: int, rank: int = 0, length: int = BLOCK_BYTES) -> NewBlock:
    """Block `number` as `reserve` wants it."""
    data = memoryview(content(number, rank, length))
    return NewBlock(key(number), BlockChecksum.capture(key(number), rank, data))


def reserved(store: BlockStore, blocks: Sequence[NewBlock]) -> list[Place]:
    """Places for all of these blocks, none of which is published yet."""
    answers = store.reserve(blocks)
    places = [place for place in answers if place is not None]
    owe(
        len(answers) == len(places) == len(blocks),
        StorePromise.ONE_ANSWER_EACH,
        f"{len(places)} places came in {len(answers)} answers for {len(blocks)} new blocks",
    )
    return places


def put(
    store: BlockStore, numbers: Sequence[int], rank: int = 0, length: int = BLOCK_BYTES
) -> list[int]:
    """Store these blocks in one batch; the numbers of those that were not published before."""
    answers = store.reserve([new_block(n, rank, length) for n in numbers])
    owe(
        len(answers) == len(numbers),
        StorePromise.ONE_ANSWER_EACH,
        f"{len(answers)} answers came for {len(numbers)} blocks",
    )
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
    """As many bytes as the row says; none where the status is not OK."""
    sound: bool
    """OK, and the bytes verify against the row's checksum."""


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
        owe(
            (checksum is not None) is (result.status is BlockStatus.OK),
            StorePromise.ROW_CHECKSUM,
            f"{result} is the answer for block {number}",
        )
        sound = checksum is not None and checksum.verifies(key(number), rank, memoryview(data))
        reads.append(Read(result, data, sound))
    return reads


def assert_held(
    store: BlockStore, numbers: Sequence[int], rank: int = 0, length: int = BLOCK_BYTES
) -> None:
    """Each block is visible and holds exactly what was put."""
    visible = store.contains(keys(numbers))
    unseen = [n for n, there in zip(numbers, visible, strict=True) if not there]
    owe(not unseen, StorePromise.CONTAINS, f"published blocks {unseen[:9]} are not visible")
    for number, read in zip(numbers, get(store, numbers, rank, length), strict=True):
        owe(
            read.sound,
            StorePromise.READ,
            f"block {number}, which was published, was read as {read.result} and does not verify",
        )
        owe(
            read.data == content(number, rank, length),
            StorePromise.READ,
            f"block {number} came back with other bytes than were put",
        )


def disk_bytes(path: Path) -> int:
    """What `du` says: bytes really taken by the directory's files."""
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.lstat().st_blocks * 512
        except FileNotFoundError:
            continue  # a temporary file that was renamed meanwhile
    return total
