"""Storing: places from their reservation to publication."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tiered_kv.contracts import NewBlock, Place
from tiered_kv.errors import NoSpace, TieredKVError, TierError, WriteBudgetSpent, reason_in
from tiered_kv.index import Row, WriteAccount
from tiered_kv.values import PAGE_BYTES, BlockKey
from tiered_kv_nvme.budget import Budget
from tiered_kv_nvme.faults import translate
from tiered_kv_nvme.groups import Group, GroupIo
from tiered_kv_nvme.headers import ENTRY_BYTES, round_up
from tiered_kv_nvme.plan import Piece, anonymous, flat, plan
from tiered_kv_nvme.records import Extent, pack_entries
from tiered_kv_nvme.returning import look_after
from tiered_kv_nvme.room import RoomMaker, give_back
from tiered_kv_nvme.segments import Leased, SegmentFiles
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.space import Change, Space
from tiered_kv_nvme.spreading import place_of

__all__ = ["Spot", "Writer"]

MOST_KEY_BYTES = 256

logger = logging.getLogger(__name__)


class _Use(enum.Enum):
    """What is happening to a place."""

    RESERVED = enum.auto()
    WRITING = enum.auto()
    WRITTEN = enum.auto()
    GIVEN_UP = enum.auto()
    """Abandoned while it was being written: given back when the write has ended."""


@dataclass(frozen=True, slots=True)
class Spot:
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
        self._uses: dict[int, _Use] = {}
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
        with self._lock:
            return any(use in (_Use.WRITING, _Use.GIVEN_UP) for use in self._uses.values())

    def count_evicted(self, count: int) -> None:
        """Add to `evicted`."""
        with self._lock:
            self._evicted += count

    def reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        """See `BlockStore.reserve`."""
        for block in blocks:
            if block.checksum.length < 1 or not 1 <= len(block.key) <= MOST_KEY_BYTES:
                raise ValueError(
                    f"a block of {block.checksum.length} bytes under a key of {len(block.key)} "
                    f"bytes; expected at least 1 byte, and a key of 1 to {MOST_KEY_BYTES}"
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
        with self._lock:
            for place in places:
                if place is not None and isinstance(place.token, Extent):
                    self._uses[place.token.generation] = _Use.RESERVED
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
            rows = self.space.index.rows(change.txn, [block.key for block in blocks])
            if not self._stripes.whole:
                rows = self._without_what_is_away(change, blocks, rows)
            wanted: dict[int, list[int]] = {}
            for position, (block, row) in enumerate(zip(blocks, rows, strict=True)):
                if row is None:
                    size = round_up(block.checksum.length, PAGE_BYTES)
                    wanted.setdefault(size, []).append(position)
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

    def _without_what_is_away(
        self, change: Change, blocks: Sequence[NewBlock], rows: Sequence[Row | None]
    ) -> list[Row | None]:
        """Drop the blocks that lie in a directory that is out of use: they are stored anew."""
        away = {
            block.key
            for block, row in zip(blocks, rows, strict=True)
            if row is not None and not self._stripes.has(Extent.of(row).number)
        }
        change.evict(self.space.index.full_keys(away))
        return [None if block.key in away else row for block, row in zip(blocks, rows, strict=True)]

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
        total = sum(round_up(block.checksum.length, PAGE_BYTES) for block in blocks)
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
        with self.writing(places) as spots:
            pieces = [
                Piece(position, spot.extent.number, spot.extent.offset, flat(view))
                for position, (spot, view) in enumerate(zip(spots, memory, strict=True))
            ]
            fds = {spot.extent.number: spot.fd for spot in spots}
            moves = plan(pieces, fds, writing=True)
            failed = self._io.write_groups(moves.groups)
            moves.refuse_unaligned(failed)
            self.raise_first(failed, [spot.extent for spot in spots])

    @contextmanager
    def writing(self, places: Sequence[Place]) -> Iterator[list[Spot]]:
        """Where to write the places' bytes, valid inside the block. They count as written when the
        block is left without an error.

        Raises:
            TierError: a segment's file has vanished, or cannot be opened.
        """
        extents = self._move(places, (_Use.RESERVED, _Use.WRITTEN), _Use.WRITING)
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
                yield [Spot(leased.fds[extent.number], extent) for extent in extents]
            whole = True
        finally:
            self._end_write(extents, whole=whole)

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

    def _end_write(self, extents: Sequence[Extent], *, whole: bool) -> None:
        given_up: list[Extent] = []
        with self._lock:
            for extent in extents:
                if self._uses.get(extent.generation) is _Use.GIVEN_UP:
                    del self._uses[extent.generation]
                    given_up.append(extent)
                elif extent.generation in self._uses:
                    self._uses[extent.generation] = _Use.WRITTEN if whole else _Use.RESERVED
        self._release(given_up)

    def publish(self, places: Sequence[Place]) -> None:
        """See `BlockStore.publish`. Places in a file that has vanished are given up.

        Raises:
            NoSpace: the index or the disk is full after all.
            TierError: the disk or the index failed.
        """
        extents = self._move(places, (_Use.WRITTEN,), _Use.WRITTEN)
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
        with self._lock:
            for extent in extents:
                self._uses.pop(extent.generation, None)
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
            (pair for pair in kept if pair[1].generation in layouts),
            key=lambda pair: (pair[1].number, pair[1].slot),
        )
        groups: list[Group] = []
        start = 0
        for end in range(1, len(ordered) + 1):
            before = ordered[end - 1][1]
            if end < len(ordered):
                after = ordered[end][1]
                if (after.number, after.slot) == (before.number, before.slot + 1):
                    continue
            first = ordered[start][1]
            layout = layouts[first.generation]
            view = anonymous((end - start) * layout.stride)
            pack_entries(view, ordered[start:end], self._rank, layout)
            groups.append(
                Group(fds[first.number], layout.entry_offset(first.slot), (view,), (start,))
            )
            start = end
        self.raise_first(self._io.write_groups(groups), [extent for _, extent in ordered])

    def _publish(self, kept: Sequence[tuple[Place, Extent]]) -> None:
        with self.space.change() as change:
            held = [(place.block, extent) for place, extent in kept if change.holds(extent)]
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
        released: list[Extent] = []
        with self._lock:
            for place in places:
                extent = place.token
                if not isinstance(extent, Extent):
                    continue
                use = self._uses.get(extent.generation)
                if use is _Use.WRITING:
                    self._uses[extent.generation] = _Use.GIVEN_UP
                elif use in (_Use.RESERVED, _Use.WRITTEN):
                    del self._uses[extent.generation]
                    released.append(extent)
        self._release(released)

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

    def _move(self, places: Iterable[Place], allowed: tuple[_Use, ...], to: _Use) -> list[Extent]:
        """The places' extents, all of them now in use `to`.

        Raises:
            ValueError: one is not this store's, or not in one of the allowed uses.
        """
        extents: list[Extent] = []
        with self._lock:
            for place in places:
                extent = place.token
                use = self._uses.get(extent.generation) if isinstance(extent, Extent) else None
                if not isinstance(extent, Extent) or use not in allowed:
                    state = "not reserved" if use is None else use.name.lower()
                    raise ValueError(f"place of key {place.block.key.hex()} is {state}")
                extents.append(extent)
            self._uses.update((extent.generation, to) for extent in extents)
        return extents

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
