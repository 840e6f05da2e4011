"""Reading blocks with the parts of all ranks, verified, in bounded memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import BlockStore, ReadResult
from tiered_kv.errors import ArchiveError
from tiered_kv.values import PAGE_BYTES, BlockKey, BlockStatus

__all__ = ["Areas", "Flaw", "Part", "WholeBlock", "areas_per_block", "read_whole"]


class Flaw(Enum):
    """Why a block cannot be had."""

    CORRUPT = "corrupt"
    """Its bytes are not what was stored."""
    MISSING = "missing"
    """It was evicted meanwhile."""
    UNREADABLE = "unreadable"
    """The store could not read it."""


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a block."""

    rank: int
    checksum: BlockChecksum
    data: memoryview
    """Its bytes, until the next batch is read."""


@dataclass(frozen=True, slots=True)
class WholeBlock:
    """A block with all parts, or none."""

    key: BlockKey
    parts: tuple[Part, ...]
    flaw: Flaw | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.data.nbytes for part in self.parts)


class Areas:
    """Page-aligned memory, given out from its beginning and taken back as a whole."""

    def __init__(self, nbytes: int) -> None:
        """Raises ArchiveError where there is no such memory."""
        try:
            # Private, so that it is not counted as shared memory.
            mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ArchiveError(f"there is no memory for blocks of {nbytes} bytes") from error
        self._all = memoryview(mapped)
        self._used = 0

    @property
    def left(self) -> int:
        """Bytes that are not given out."""
        return self._all.nbytes - self._used

    def take(self, nbytes: int) -> memoryview:
        """The next bytes, at a page's boundary."""
        taken = self._all[self._used : self._used + nbytes]
        self._used += round_up(nbytes)
        return taken

    def clear(self) -> None:
        """Take everything back."""
        self._used = 0


def round_up(nbytes: int) -> int:
    """To whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def areas_per_block(block_bytes: int, ranks: int) -> int:
    """Bytes of memory that a block takes while it is read, with the parts of all ranks."""
    return round_up(block_bytes) * ranks


def read_whole(
    stores: Mapping[int, BlockStore],
    keys: Iterable[BlockKey],
    *,
    block_bytes: int,
    batch_bytes: int,
) -> Iterator[list[WholeBlock]]:
    """Blocks with the parts of all `stores`, each compared with its checksum, batch by batch; the
    bytes of a batch are gone when the next is asked for.

    Blocks; takes memory of `batch_bytes`, at least one block of every rank.

    Args:
        stores: by rank, the stores of one namespace.
        keys: which blocks; taken batch by batch.
        block_bytes: length of the longest part; a longer one counts as missing.
        batch_bytes: about how much is read at once.

    Raises:
        TierError: a store does not work.
        ArchiveError: there is no memory for a block.
    """
    each = areas_per_block(block_bytes, len(stores))
    count = max(1, batch_bytes // each)
    memory = Areas(count * each)
    waiting = iter(keys)
    while batch := list(islice(waiting, count)):
        memory.clear()
        areas = {rank: [memory.take(round_up(block_bytes)) for _ in batch] for rank in stores}
        found = {rank: store.read(batch, areas[rank]) for rank, store in stores.items()}
        yield [
            _whole(key, {rank: (found[rank][place], areas[rank][place]) for rank in stores})
            for place, key in enumerate(batch)
        ]


def _whole(key: BlockKey, read: Mapping[int, tuple[ReadResult, memoryview]]) -> WholeBlock:
    parts: list[Part] = []
    flaws: set[Flaw] = set()
    for rank, (result, area) in read.items():
        checksum = result.checksum
        if result.status is BlockStatus.MISSING:
            flaws.add(Flaw.MISSING)
        elif result.status is not BlockStatus.OK or checksum is None:
            flaws.add(Flaw.UNREADABLE)
        else:
            data = area[: checksum.length]
            if checksum.verifies(key, rank, data):
                parts.append(Part(rank, checksum, data))
            else:
                flaws.add(Flaw.CORRUPT)
    for flaw in (Flaw.CORRUPT, Flaw.UNREADABLE, Flaw.MISSING):
        if flaw in flaws:
            return WholeBlock(key, (), flaw)
    return WholeBlock(key, tuple(parts))
