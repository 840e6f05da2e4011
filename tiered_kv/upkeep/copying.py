"""Copying blocks from store to store: verified, in bounded memory, the most used first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from tiered_kv.contracts import BlockStore, NewBlock, Place
from tiered_kv.errors import NoSpace
from tiered_kv.upkeep.moving import MOVE_BATCH_BYTES, Progress
from tiered_kv.upkeep.reading import Flaw, WholeBlock, read_whole
from tiered_kv.upkeep.recency import OrderOfUse
from tiered_kv.values import BlockKey

__all__ = ["Copied", "copy_blocks"]

_ASKED_TOGETHER = 1024


@dataclass(slots=True)
class Copied:
    """What became of the blocks that were to be copied."""

    blocks: int = 0
    """Blocks that were stored, with the parts of all ranks."""
    bytes: int = 0
    """Bytes of these, all ranks together."""
    present: int = 0
    """Blocks that were there already; they were not read."""
    corrupt: int = 0
    """Blocks left out since their bytes are not what was stored."""
    missing: int = 0
    """Blocks left out since they were evicted meanwhile."""
    unreadable: int = 0
    """Blocks left out since the source could not read them."""
    limited: bool = False
    """Whether more would have been copied but for `most_bytes`."""
    full: str = ""
    """Why storing ended before the end: no room; empty where it did not."""


def copy_blocks(
    sources: Mapping[int, BlockStore],
    targets: Mapping[int, BlockStore],
    keys: Iterable[BlockKey],
    *,
    block_bytes: int,
    most_bytes: int | None = None,
    batch_bytes: int = MOVE_BATCH_BYTES,
    pace: Callable[[int], object] = lambda nbytes: None,
    progress: Progress = lambda blocks: None,
) -> Copied:
    """Store blocks of one store in another, each after its bytes were verified, with the parts of
    all ranks; those that are there are skipped. In the end they are marked as used in the order of
    `keys`, the first as the most recently used, so that the target evicts as the source would.

    Ends when the target has no room, or evicts for it: what it holds is used, too. Where copied
    blocks were evicted, they are copied once more, for those used least. Can be interrupted at any
    moment and begun again.

    Blocks; takes memory of `batch_bytes`, at least one block of every rank.

    Args:
        sources: by rank, the stores of one namespace.
        targets: by the same ranks, stores of that namespace that are open for writing.
        keys: which blocks, in the order in which they are copied; taken batch by batch.
        block_bytes: length of the longest part.
        most_bytes: end before more bytes than that are copied.
        batch_bytes: about how much is read at once.
        pace: called after each batch with the bytes that were read; it may sleep.
        progress: called with blocks that are done since the last call.

    Raises:
        TierError: a store does not work.
        ArchiveError: there is no memory for a block.
        ValueError: sources and targets are not of the same ranks.
    """
    if sources.keys() != targets.keys() or not sources:
        raise ValueError(
            f"ranks {sorted(sources)} of the sources, {sorted(targets)} of the targets"
        )
    return _Copy(targets, most_bytes, pace, progress).run(sources, keys, block_bytes, batch_bytes)


class _Copy:
    def __init__(
        self,
        targets: Mapping[int, BlockStore],
        most_bytes: int | None,
        pace: Callable[[int], object],
        progress: Progress,
    ) -> None:
        self._targets = targets
        self._most_bytes = most_bytes
        self._pace = pace
        self._progress = progress
        self._order = OrderOfUse()
        self._done = Copied()

    def run(
        self,
        sources: Mapping[int, BlockStore],
        keys: Iterable[BlockKey],
        block_bytes: int,
        batch_bytes: int,
    ) -> Copied:
        done = self._done
        first = next(iter(self._targets.values()))
        evicted = self._evicted()

        def read(keys: Iterable[BlockKey]) -> Iterator[list[WholeBlock]]:
            return read_whole(sources, keys, block_bytes=block_bytes, batch_bytes=batch_bytes)

        for batch in read(self._absent(keys, block_bytes * len(sources))):
            wanted = self._wanted(batch)
            self._order.mark_when_grown(first)
            try:
                self._store(wanted)
            except NoSpace as error:
                done.full = str(error)
            self._progress(len(batch))
            if self._evicted() > evicted and not done.full:
                done.full = f"it evicted {self._evicted() - evicted} blocks for the last ones"
            if done.full or done.limited:
                break
            self._pace(sum(block.nbytes for block in batch))
        self._order.mark(first)
        if done.full:
            with suppress(NoSpace):
                for batch in read(self._order.lost(first)):
                    self._write([block for block in batch if block.flaw is None])
            self._order.mark(first)
        return done

    def _absent(self, keys: Iterable[BlockKey], nbytes: int) -> Iterator[BlockKey]:
        """Those that the target lacks; the others are taken for blocks of `nbytes`."""
        waiting = iter(keys)
        first = next(iter(self._targets.values()))
        while some := list(islice(waiting, _ASKED_TOGETHER)):
            for key, there in zip(some, first.contains(some), strict=True):
                if there:
                    self._done.present += 1
                    self._order.note(key, nbytes, fresh=False)
                    self._progress(1)
                else:
                    yield key

    def _wanted(self, batch: list[WholeBlock]) -> list[WholeBlock]:
        """Those that may be stored; counts the others."""
        done, wanted = self._done, list[WholeBlock]()
        size = done.bytes
        for block in batch:
            if block.flaw is Flaw.CORRUPT:
                done.corrupt += 1
            elif block.flaw is Flaw.MISSING:
                done.missing += 1
            elif block.flaw is not None:
                done.unreadable += 1
            elif self._most_bytes is not None and size + block.nbytes > self._most_bytes:
                done.limited = True
                break
            else:
                size += block.nbytes
                wanted.append(block)
        return wanted

    def _store(self, blocks: list[WholeBlock]) -> None:
        self._write(blocks)
        for block in blocks:
            self._order.note(block.key, block.nbytes, fresh=True)
        self._done.blocks += len(blocks)
        self._done.bytes += sum(block.nbytes for block in blocks)

    def _write(self, blocks: list[WholeBlock]) -> None:
        for rank, store in self._targets.items():
            parts = [part for block in blocks for part in block.parts if part.rank == rank]
            new = [
                NewBlock(block.key, part.checksum)
                for block, part in zip(blocks, parts, strict=True)
            ]
            places = store.reserve(new)
            taken: list[tuple[Place, memoryview]] = [
                (place, part.data)
                for place, part in zip(places, parts, strict=True)
                if place is not None
            ]
            mine = [place for place, _ in taken]
            try:
                store.write(mine, [data for _, data in taken])
                store.publish(mine)
            except BaseException:
                store.abandon(mine)
                raise

    def _evicted(self) -> int:
        return sum(store.stat().evicted_blocks for store in self._targets.values())
