"""Storing: places from their reservation to publication."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import NamedTuple

from tiered_kv.contracts import NewBlock, Place
from tiered_kv.errors import NoSpace, TieredKVError, TierError, WriteBudgetSpent, reason_in
from tiered_kv.index import Row, WriteAccount
from tiered_kv.values import PAGE_BYTES, BlockKey
from tiered_kv_nvme.budget import Budget
from tiered_kv_nvme.faults import translate
from tiered_kv_nvme.groups import Group, GroupIo
from tiered_kv_nvme.headers import ENTRY_BYTES, round_up
from tiered_kv_nvme.plan import Piece, flat, plan
from tiered_kv_nvme.records import Extent, pack_entries
from tiered_kv_nvme.returning import look_after
from tiered_kv_nvme.room import RoomMaker, give_back
from tiered_kv_nvme.segments import Leased, SegmentFiles
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.space import Change, Space
from tiered_kv_nvme.spreading import place_of
from tiered_kv_nvme.uses import Uses

__all__ = ["Spot", "Writer"]

MOST_KEY_BYTES = 256

logger = logging.getLogger(__name__)

_by_slot = itemgetter(0)
"""Sorts (extent, ...): by segment, which has one epoch, and slot."""


class Spot(NamedTuple):
    """Where the bytes of a block are to be written, or lie."""

    fd: int
    """Of the segment's file."""
    extent: Extent


class Writer:
    """The storing half of a store. Thread-safe; methods as in `BlockStore`."""

    def __init__(
        self,
        settings: NvmeSettings,
        space: Space,
        files: SegmentFiles,
        io: GroupIo,
        budget: Budget,
        account: WriteAccount,
        rank: int,
    ) -> None:
        self._settings = settings
        self._tier = settings.name
        self.space = space
        self._files = files
        self._io = io
        self._budget = budget
        self._account = account
        self._rank = rank
        self._lock = threading.Lock()
        self._uses = Uses()
        self._unreleased: list[Extent] = []
        self._evicted = 0
        self._stripes = files.stripes

    @property
    def evicted(self) -> int:
        """Blocks evicted so far."""
        with self._lock:
            return self._evicted

    @property
    def is_writing(self) -> bool:
        """Whether a write is under way: its places cannot be given back yet."""
        return self._uses.writing

    def count_evicted(self, count: int) -> None:
        """Add to `evicted`."""
        with self._lock:
            self._evicted += count

    def reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        """See `BlockStore.reserve`."""
        key_lengths = {len(key) for key, _ in blocks}
        least = min([checksum.length for _, checksum in blocks])
        if least < 1 or not 1 <= min(key_lengths) <= max(key_lengths) <= MOST_KEY_BYTES:
            raise ValueError(
                f"blocks of {least} bytes or more under keys of {min(key_lengths)} to "
                f"{max(key_lengths)} bytes; expected at least 1 byte, and keys of 1 to "
                f"{MOST_KEY_BYTES}"
            )
        self._refuse_hopeless(blocks)
        self._budget.measure(self.space.numbers)
        self.look_after_directories()
        self._release_late()
        try:
            places = self._reserve(blocks)
        except NoSpace as error:
            if isinstance(error, WriteBudgetSpent) or not self._give_way():
                raise
            places = self._reserve(blocks)
        given = [place.token for place in places if place is not None]
        self._uses.reserve([one for one in given if isinstance(one, Extent)])
        return places

    def look_after_directories(self, *, opening: bool = False) -> None:
        """Try directories again that failed, and compare those that came back to the index.
        `opening`: nobody has missed them yet.

        Raises:
            NoSpace: the index is full.
            TierError: no directory is in use, or the index does not work.
        """
        look_after(self.space, self._tier, opening=opening)

    def _reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        places: list[Place | None] = [None] * len(blocks)
        with self.space.change() as change:
            there = self._there(change, [block.key for block in blocks])
            sizes = _slot_sizes(blocks)
            wanted: dict[int, list[int]] = {size: [] for size in sizes.values()}
            for position, (key, checksum) in enumerate(blocks):
                if key not in there:
                    wanted[sizes[checksum.length]].append(position)
            maker = RoomMaker(self.space, change, self._budget, self._tier)
            while maker.shrink():  # others put something into the directories
                pass
            written = sum((size + ENTRY_BYTES) * len(wanted[size]) for size in wanted)
            spent = self._account.spent(change.txn, written)
            for size, positions in wanted.items() if spent is None else ():
                slot_class = self.space.index.slot_class(change.txn, 0, size)
                maker.make(slot_class, size, len(positions))
                extents = change.reserve(slot_class, len(positions))
                for position, extent in zip(positions, extents, strict=True):
                    places[position] = Place(blocks[position], extent)
        self.count_evicted(maker.evicted)
        if spent is not None:
            raise spent
        return places

    def _there(self, change: Change, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Which of the blocks have a row. Those that lie in a directory that is out of use are
        dropped: they are stored anew."""
        if self._stripes.whole:
            return self.space.index.with_row(change.txn, keys)
        rows = self.space.index.rows(change.txn, keys)
        there = {
            key: self._stripes.has(Extent.of(row).number)
            for key, row in zip(keys, rows, strict=True)
            if row is not None
        }
        away = [key for key, is_here in there.items() if not is_here]
        change.evict(self.space.index.full_keys(away))
        return there.keys() - set(away)

    def _give_way(self) -> bool:
        """On a disk that others have filled up, give a segment back; whether that was it."""
        if not self._budget.disk_is_full():
            return False
        lost = give_back(self.space)
        if lost is None:
            return False
        logger.warning(
            "tier %s: the disk of %s is full; %d blocks were given up for room",
            self._tier,
            self._stripes.index_path,
            lost,
        )
        self.count_evicted(lost)
        return True

    def _refuse_hopeless(self, blocks: Sequence[NewBlock]) -> None:
        sizes = _slot_sizes(blocks)
        total = sum([sizes[checksum.length] for _, checksum in blocks])
        if total > self._settings.capacity:
            raise NoSpace(
                f"tier {self._tier}: {len(blocks)} blocks of {total} bytes in one batch, more "
                f"than its capacity of {self._settings.capacity} bytes"
            )

    def write(self, places: Sequence[Place], memory: Sequence[memoryview]) -> None:
        """See `BlockStore.write`.

        Raises:
            NoSpace: the disk is full after all (only where space could not be taken before).
            TierError: the disk failed, or a segment's file has vanished.
        """
        if len(places) != len(memory):
            raise ValueError(f"{len(places)} places, but {len(memory)} pieces of memory")
        for place, view in zip(places, memory, strict=True):
            if view.nbytes != place.block.checksum.length:
                raise ValueError(
                    f"a block of {place.block.checksum.length} bytes cannot be written from "
                    f"{view.nbytes} bytes of memory"
                )
        with self._opened(places) as (extents, fds):
            pieces = [
                Piece(position, extent.number, extent.offset, flat(view))
                for position, (extent, view) in enumerate(zip(extents, memory, strict=True))
            ]
            moves = plan(pieces, fds, writing=True)
            failed = self._io.write_groups(moves.groups)
            moves.refuse_unaligned(failed)
            self.raise_first(failed, extents)

    @contextmanager
    def writing(self, places: Sequence[Place]) -> Iterator[list[Spot]]:
        """Where to write the places' bytes, valid inside the block. They count as written when the
        block is left without an error.

        Raises:
            TierError: a segment's file has vanished, or cannot be opened.
        """
        with self._opened(places) as (extents, fds):
            yield [Spot(fds[extent.number], extent) for extent in extents]

    @contextmanager
    def _opened(self, places: Sequence[Place]) -> Iterator[tuple[list[Extent], dict[int, int]]]:
        """The same: where the places lie, and by segment, the open files."""
        extents = self._uses.begin(places)
        whole = False
        try:
            with self._files.lease(extent.number for extent in extents) as leased:
                if leased.away:
                    raise self._with_directory(min(leased.away))
                lost = self._absent(extents, leased)
                if lost:
                    self.lose(lost)
                    raise TierError(
                        f"tier {self._tier}: {self._files.path(min(lost))} was deleted by somebody "
                        "else; what it held is forgotten",
                        tier=self._tier,
                    )
                yield extents, leased.fds
            whole = True
        finally:
            self._release(self._uses.end(extents, whole=whole))

    def _absent(self, extents: Iterable[Extent], leased: Leased) -> set[int]:
        """The segments whose file is not there, though their directory is.

        Raises:
            TierError: one is there and could not be opened.
        """
        for number, error in leased.failed.items():
            raise translate(error, "open", self._files.path(number), self._tier) from error
        return {extent.number for extent in extents} - leased.fds.keys() - leased.away

    def raise_first(
        self, failed: Mapping[int, OSError], extents: Sequence[Extent], doing: str = "write"
    ) -> None:
        """Raise what `doing` something to the extent at a position in `failed` came to.

        Raises:
            NoSpace: a disk is full; or a directory failed, and there are others.
            TierError: the disk failed.
        """
        for position, error in failed.items():
            number = extents[position].number
            reason = translate(error, doing, self._files.path(number), self._tier)
            if isinstance(reason, TierError):
                self._stripes.failed(place_of(number))
                if not self._stripes.takes(number):
                    raise self._with_directory(number) from error
            raise reason from error

    def _with_directory(self, number: int) -> NoSpace | TierError:
        """The error to raise where a segment's directory went out of use."""
        if not self._stripes.storing:
            return self._stripes.nothing_left()
        return NoSpace(
            f"tier {self._tier}: {self._files.path(number).parent} went out of use with the room "
            "that was reserved in it; ask for other room"
        )

    def publish(self, places: Sequence[Place]) -> None:
        """See `BlockStore.publish`. Places in a file that has vanished are given up.

        Raises:
            NoSpace: the index or the disk is full after all.
            TierError: the disk or the index failed.
        """
        extents = self._uses.written(places)
        with self._files.lease(extent.number for extent in extents) as leased:
            fds = leased.fds
            lost = self._absent(extents, leased)
            vanished = self._files.vanished(fds)
            away = leased.away | self._files.away(vanished)
            lost |= vanished - away
            kept = [
                (place, extent)
                for place, extent in zip(places, extents, strict=True)
                if extent.number not in lost and extent.number not in away
            ]
            self._write_entries(kept, fds)
            if self._settings.durability != "none":
                flushed = {extent.number: extent for _, extent in kept}
                try:
                    self._io.flush([fds[number] for number in flushed])
                except OSError as error:
                    number = min(self._files.away(flushed) or flushed)
                    self.raise_first({0: error}, [flushed[number]], "flush")
        try:
            self._publish(kept)
        except NoSpace:
            if not self._give_way():
                self._thin_out(extents)
            self._publish(kept)
        self._uses.forget(extents)
        if lost:
            self.lose(lost)
        self._release([extent for extent in extents if extent.number in away])

    def _thin_out(self, extents: Sequence[Extent]) -> None:
        """Evict as many blocks as are to be published: the index has reached its share."""
        with self.space.change() as change:
            maker = RoomMaker(self.space, change, self._budget, self._tier)
            maker.thin_out({extent.slot_class for extent in extents}, len(extents))
        self.count_evicted(maker.evicted)

    def _write_entries(self, kept: Sequence[tuple[Place, Extent]], fds: Mapping[int, int]) -> None:
        """Write the header table's entries, neighbours in one call."""
        layouts = self.space.held([extent for _, extent in kept])
        ordered = sorted(
            [(extent, place.block) for place, extent in kept if extent.generation in layouts],
            key=_by_slot,
        )
        groups: list[Group] = []
        start = 0
        for end, (extent, _) in enumerate(ordered, 1):
            if end < len(ordered):
                after = ordered[end][0]
                if after.slot == extent.slot + 1 and after.number == extent.number:
                    continue
            first = ordered[start][0]
            layout = layouts[first.generation]
            view = pack_entries(ordered[start:end], self._rank, layout)
            groups.append(
                Group(fds[first.number], layout.entry_offset(first.slot), (view,), (start,))
            )
            start = end
        self.raise_first(self._io.write_groups(groups), [extent for extent, _ in ordered])

    def _publish(self, kept: Sequence[tuple[Place, Extent]]) -> None:
        with self.space.change() as change:
            holds = change.holds([extent for _, extent in kept])
            held = [
                (place.block, extent)
                for (place, extent), is_held in zip(kept, holds, strict=True)
                if is_held
            ]
            rows = [
                (
                    block.key,
                    Row(block.checksum, extent.slot_class, extent.location(), extent.generation),
                )
                for block, extent in held
            ]
            given = {extent.generation for _, extent in held}
            freed = self.space.index.publish(change.txn, rows)
            change.free([row for row in freed if row.generation not in given])
            lost = {row.generation for row in freed}
            names = self.space.index.full_keys(block.key for block, _ in held)
            if lost:
                change.release(extent for _, extent in held if extent.generation in lost)
            change.publish(
                [
                    (extent, name)
                    for name, (_, extent) in zip(names, held, strict=True)
                    if extent.generation not in lost
                ]
            )
        if len(held) < len(kept):
            logger.warning(
                "tier %s: %d blocks were not published, their room had been taken back",
                self._tier,
                len(kept) - len(held),
            )

    def abandon(self, places: Sequence[Place]) -> None:
        """See `BlockStore.abandon`. A place that is being written is given back afterwards."""
        self._release(self._uses.abandon(places))

    def _release(self, extents: Sequence[Extent]) -> None:
        if not extents:
            return
        try:
            with self.space.change() as change:
                change.release(extents)
        except TieredKVError as error:
            logger.warning(
                "tier %s: room is given back later: %s", self._tier, reason_in(self._tier, error)
            )
            with self._lock:
                self._unreleased.extend(extents)

    def _release_late(self) -> None:
        with self._lock:
            extents, self._unreleased = self._unreleased, []
        self._release(extents)

    def lose(self, numbers: Iterable[int]) -> None:
        """These segments' files have vanished: forget what they held.

        Raises:
            NoSpace: the index is full.
            TierError: the index does not work.
        """
        with self.space.change() as change:
            for number in numbers:
                self._files.forget(number)
                change.lose(number)

    def discard(self, blocks: Sequence[NewBlock]) -> int:
        """See `BlockStore.discard`."""
        with self.space.change() as change:
            rows = self.space.index.rows(change.txn, [block.key for block in blocks])
            keys = [
                block.key
                for block, row in zip(blocks, rows, strict=True)
                if row is not None and row.checksum == block.checksum
            ]
            return change.evict(self.space.index.full_keys(keys))

    def drop(self, keys: Sequence[BlockKey]) -> int:
        """See `BlockStore.delete`."""
        with self.space.change() as change:
            return change.evict(self.space.index.full_keys(keys))


def _slot_sizes(blocks: Sequence[NewBlock]) -> dict[int, int]:
    """By length, the bytes of the slot that a block of it lies in."""
    lengths = {checksum.length for _, checksum in blocks}
    return {length: round_up(length, PAGE_BYTES) for length in lengths}
