"""Reading stored blocks and comparing them with their checksums."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from tiered_kv.contracts import BlockStore, NewBlock
from tiered_kv.values import PAGE_BYTES, BlockKey, BlockStatus

__all__ = ["VERIFY_BATCH_BYTES", "Verified", "verify"]

VERIFY_BATCH_BYTES = 4 * 2**20
"""About how much is read at once."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What one batch of blocks turned out to be. `blocks`, `missing` and `unreadable` together are
    the keys of the batch."""

    blocks: int
    """Blocks that were read and compared, the corrupt ones included."""
    bytes: int
    """Bytes of these."""
    corrupt: tuple[BlockKey, ...]
    """Blocks whose bytes are not what their rows say."""
    missing: int
    """Blocks that were not there (any more)."""
    unreadable: int
    """Blocks that the store could not read."""


def verify(
    store: BlockStore,
    keys: Iterable[BlockKey],
    *,
    rank: int,
    block_bytes: int,
    drop: bool,
    batch_bytes: int = VERIFY_BATCH_BYTES,
    pace: Callable[[int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Verified]:
    """Compare blocks with the checksums that their rows name: key, length, rank and bytes, whatever
    the kind of checksum. One answer per batch; nothing is read before the first is asked for.

    Blocks, and takes one area of memory of `batch_bytes`, at least one block, until it is exhausted
    or closed. Safe beside whoever else uses the store: a block that is replaced while it is read
    counts as missing.

    Args:
        store: opened for the rank whose parts are read.
        keys: which blocks; taken batch by batch, so that `store.scan()` will do.
        rank: the rank that `store` was opened for.
        block_bytes: length of the longest block; a longer one counts as missing.
        drop: discard corrupt blocks, all ranks' parts, unless they were replaced meanwhile.
        batch_bytes: about how much is read at once.
        pace: called after each batch with the bytes that the store read, or tried to read; it may
            sleep.
        stop: asked before each batch; True ends it.

    Raises:
        TierError: the store does not work.
        ValueError: a number is below 1; or `drop` where the store is open for reading only, as soon
            as there is something to drop.
    """
    if min(block_bytes, batch_bytes) < 1:
        raise ValueError(
            f"block_bytes {block_bytes} and batch_bytes {batch_bytes} must be at least 1"
        )
    return _batches(store, iter(keys), rank, block_bytes, drop, batch_bytes, pace, stop)


def _batches(
    store: BlockStore,
    keys: Iterator[BlockKey],
    rank: int,
    block_bytes: int,
    drop: bool,
    batch_bytes: int,
    pace: Callable[[int], None] | None,
    stop: Callable[[], bool],
) -> Iterator[Verified]:
    area = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
    count = max(1, batch_bytes // area)
    # Private, so that it is not counted as shared memory; an anonymous mapping is page-aligned.
    memory = memoryview(mmap.mmap(-1, count * area, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    areas = [memory[i * area : (i + 1) * area] for i in range(count)]
    while not stop() and (batch := list(islice(keys, count))):
        verified, corrupt = _compare(store, batch, areas[: len(batch)], rank)
        if drop and corrupt:
            store.discard(corrupt)
        if pace is not None:
            # Reads that fail load the medium too, and a broken one is not to be hurried.
            pace(verified.bytes + verified.unreadable * block_bytes)
        yield verified


def _compare(
    store: BlockStore, keys: list[BlockKey], areas: list[memoryview], rank: int
) -> tuple[Verified, list[NewBlock]]:
    blocks = nbytes = missing = unreadable = 0
    corrupt: list[NewBlock] = []
    for key, area, result in zip(keys, areas, store.read(keys, areas), strict=True):
        checksum = result.checksum
        if result.status is BlockStatus.MISSING:
            missing += 1
        elif result.status is not BlockStatus.OK or checksum is None:
            unreadable += 1
        else:
            blocks += 1
            nbytes += checksum.length
            if not checksum.verifies(key, rank, area[: checksum.length]):
                corrupt.append(NewBlock(key, checksum))
    found = tuple(block.key for block in corrupt)
    return Verified(blocks, nbytes, found, missing, unreadable), corrupt
