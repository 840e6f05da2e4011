"""Moving blocks between stores and archives: verified, in bounded memory, beside engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tiered_kv.contracts import BlockStore, NewBlock, Place
from tiered_kv.errors import ArchiveError, NoSpace
from tiered_kv.upkeep.archive import ArchivedBlock, ArchiveReader, ArchiveWriter
from tiered_kv.upkeep.reading import Areas, Flaw, read_whole, round_up
from tiered_kv.upkeep.recency import OrderOfUse
from tiered_kv.values import PAGE_BYTES, BlockKey

__all__ = [
    "MOVE_BATCH_BYTES",
    "Exported",
    "Imported",
    "Progress",
    "batch_into",
    "export_blocks",
    "import_blocks",
]

MOVE_BATCH_BYTES = 8 * 2**20
"""About how much is moved at once, all ranks together."""

_BATCHES = 64


def batch_into(capacity: int) -> int:
    """How many bytes are to be moved at once into a tier of so many bytes: what it evicts for a
    batch is noticed afterwards."""
    return max(1, min(MOVE_BATCH_BYTES, capacity // _BATCHES))


Progress = Callable[[int], None]
"""Called with the number of parts (a block of one rank each) that are done since the last call."""


@dataclass(slots=True)
class Exported:
    """What became of the blocks that were to be exported."""

    blocks: int = 0
    """Blocks in the archive, with the parts of all its ranks."""
    bytes: int = 0
    """Bytes of these, all ranks together."""
    corrupt: int = 0
    """Blocks left out since their bytes are not what was stored."""
    missing: int = 0
    """Blocks left out since they were evicted meanwhile."""
    unreadable: int = 0
    """Blocks left out since the store could not read them."""


@dataclass(slots=True)
class Imported:
    """What became of the parts of blocks in an archive."""

    parts: int = 0
    """Parts that were stored; a block has one per rank."""
    bytes: int = 0
    """Bytes of these."""
    present: int = 0
    """Parts that were there already."""
    refused: int = 0
    """Parts whose bytes are not what was exported."""
    damage: str = ""
    """Why reading ended before the end; empty where it did not."""
    full: str = ""
    """Why storing ended before the end: no room, or only that of the archive's blocks; empty where
    it did not."""


def export_blocks(
    stores: Mapping[int, BlockStore],
    keys: Iterable[BlockKey],
    writer: ArchiveWriter,
    *,
    block_bytes: int,
    most_bytes: int | None = None,
    batch_bytes: int = MOVE_BATCH_BYTES,
    progress: Progress = lambda parts: None,
    pace: Callable[[int], object] = lambda nbytes: None,
) -> Exported:
    """Write blocks to an archive, each after its bytes were verified, and finish it. A block is
    written with the parts of all `stores`, or not at all.

    Blocks; takes memory of `batch_bytes`, at least one block of every rank.

    Args:
        stores: by rank, the stores of one namespace.
        keys: which blocks; taken batch by batch.
        writer: fresh.
        block_bytes: length of the longest part; a longer one counts as missing.
        most_bytes: end before the archive holds more bytes of blocks than that.
        batch_bytes: about how much is read at once.
        progress: see `Progress`.
        pace: called after each batch with the bytes that were read; it may sleep.

    Raises:
        TierError: a store does not work.
        ArchiveError: the archive cannot be written, or there is no memory for a block.
    """
    done = Exported()
    batches = read_whole(stores, keys, block_bytes=block_bytes, batch_bytes=batch_bytes)
    for batch in batches:
        for block in batch:
            if block.flaw is Flaw.CORRUPT:
                done.corrupt += 1
            elif block.flaw is Flaw.UNREADABLE:
                done.unreadable += 1
            elif block.flaw is not None:
                done.missing += 1
            elif most_bytes is not None and done.bytes + block.nbytes > most_bytes:
                writer.finish()
                return done
            else:
                for part in block.parts:
                    writer.add(ArchivedBlock(block.key, part.rank, part.checksum), part.data)
                done.blocks += 1
                done.bytes += block.nbytes
        progress(len(batch) * len(stores))
        pace(sum(block.nbytes for block in batch))
    writer.finish()
    return done


def import_blocks(
    reader: ArchiveReader,
    store_of: Callable[[int], BlockStore],
    *,
    batch_bytes: int = MOVE_BATCH_BYTES,
    progress: Progress = lambda parts: None,
    pace: Callable[[int], object] = lambda nbytes: None,
) -> Imported:
    """Store the blocks of an archive, each after its bytes were verified; those that are there are
    skipped. They are marked as used in the order of the archive, the first as the most recently
    used. Room is made by evicting what the tier held before. Stops at damage that hides where the
    next block begins, where there is no room, and where the archive's own blocks are evicted for
    its next ones; what was stored before stays.

    Blocks; takes memory of `batch_bytes`, at least one block.

    Args:
        reader: fresh.
        store_of: gives the store of a rank, open for writing in the archive's namespace; asked for
            the archive's ranks alone, and again for each batch.
        batch_bytes: about how much is stored at once; a small part of what the tier holds, since
            ranks' parts of a block come one after the other, and the first must not be gone then.
        progress: see `Progress`.
        pace: called with the bytes of parts that were read; it may sleep.

    Raises:
        TierError: a store does not work.
        ArchiveError: there is no memory for a block of the length that the archive allows.
    """
    return _Importing(reader, store_of, max(batch_bytes, PAGE_BYTES), progress, pace).run()


class _Importing:
    """One import: blocks are gathered until the memory is full, then stored rank by rank."""

    def __init__(
        self,
        reader: ArchiveReader,
        store_of: Callable[[int], BlockStore],
        batch_bytes: int,
        progress: Progress,
        pace: Callable[[int], object],
    ) -> None:
        self._pace = pace
        self._reader = reader
        self._store_of = store_of
        self._progress = progress
        self._memory = Areas(max(batch_bytes, round_up(reader.contents.block_bytes)))
        self._batch: dict[tuple[int, BlockKey], tuple[NewBlock, memoryview]] = {}
        self._done = Imported()
        self._order: dict[int, OrderOfUse] = {}

    def run(self) -> Imported:
        done = self._done
        try:
            while not done.full and (block := self._reader.next()) is not None:
                self._take(block)
        except ArchiveError as error:
            done.damage = str(error)
        if not done.full:
            self._store()
        for rank, order in [*self._order.items()][:1]:  # a use counts for all ranks' parts
            order.mark(self._store_of(rank))
        return done

    def _take(self, block: ArchivedBlock) -> None:
        length = block.checksum.length
        name = (block.rank, block.key)
        if name in self._batch or self._memory.left < length:
            self._store()
            if self._done.full:
                return
        data = self._memory.take(length)
        self._reader.read_into(data)
        self._pace(length)
        if block.checksum.verifies(block.key, block.rank, data):
            self._batch[name] = (NewBlock(block.key, block.checksum), data)
        else:
            self._done.refused += 1
            self._progress(1)

    def _store(self) -> None:
        """Store what was gathered, as far as there is room, and notice if earlier blocks of the
        archive went for it."""
        ranks = dict.fromkeys(rank for rank, _ in self._batch)
        stores = {rank: self._store_of(rank) for rank in ranks}
        for rank, store in stores.items():
            self._order.setdefault(rank, OrderOfUse()).mark_when_grown(store)
        leaving = self._goes_first()
        before = self._evicted(stores)
        for rank, store in stores.items():
            mine = [entry for (of, _), entry in self._batch.items() if of == rank]
            try:
                self._put_all(store, rank, mine)
            except NoSpace as error:
                self._done.full = str(error)
                break
        self._batch.clear()
        self._memory.clear()
        evicted = self._evicted(stores) - before
        if evicted and leaving and not self._done.full and not self._is_there(*leaving):
            self._done.full = f"it evicted {evicted} blocks, of the same file, for the last ones"

    def _goes_first(self) -> tuple[int, BlockKey] | None:
        """Which of the stored blocks is evicted first, and a rank; None where it cannot be told,
        since a block is there with the parts of all ranks only."""
        contents = self._reader.contents
        rank = next(iter(self._order), 0)
        key = self._order[rank].goes_first() if self._order else None
        if key is None or len(contents.ranks) < contents.geometry.world_size:
            return None
        return rank, key

    def _is_there(self, rank: int, key: BlockKey) -> bool:
        return all(self._store_of(rank).contains([key]))

    @staticmethod
    def _evicted(stores: Mapping[int, BlockStore]) -> int:
        return sum(store.stat().evicted_blocks for store in stores.values())

    def _put_all(
        self, store: BlockStore, rank: int, entries: list[tuple[NewBlock, memoryview]]
    ) -> None:
        try:
            self._put(store, rank, entries)
        except NoSpace:
            # The batch as a whole; part of it may fit.
            for entry in entries:
                self._put(store, rank, [entry])

    def _put(
        self, store: BlockStore, rank: int, entries: list[tuple[NewBlock, memoryview]]
    ) -> None:
        places = store.reserve([block for block, _ in entries])
        new: list[tuple[Place, memoryview]] = [
            (place, data)
            for place, (_, data) in zip(places, entries, strict=True)
            if place is not None
        ]
        mine = [place for place, _ in new]
        try:
            store.write(mine, [data for _, data in new])
            store.publish(mine)
        except BaseException:
            store.abandon(mine)
            raise
        ranks = len(self._reader.contents.ranks)
        for (block, _), place in zip(entries, places, strict=True):
            nbytes = block.checksum.length * ranks
            self._order[rank].note(block.key, nbytes, fresh=place is not None)
        self._done.parts += len(new)
        self._done.bytes += sum(data.nbytes for _, data in new)
        self._done.present += len(entries) - len(new)
        self._progress(len(entries))
