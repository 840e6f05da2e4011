"""Loading: from rows to places in files, and whether the rows still say the same afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import ReadResult
from tiered_kv.errors import NoSpace, TierError, reason_in
from tiered_kv.index import BlockIndex, Environment, Row, Trust
from tiered_kv.values import BlockKey, BlockStatus
from tiered_kv_nvme.faults import translate
from tiered_kv_nvme.groups import EndOfFile
from tiered_kv_nvme.plan import Piece, flat
from tiered_kv_nvme.records import Extent
from tiered_kv_nvme.segments import Leased, SegmentFiles
from tiered_kv_nvme.spreading import place_of
from tiered_kv_nvme.writing import Spot, Writer

__all__ = ["Found", "Reader", "Reading"]

_MISSING = ReadResult(BlockStatus.MISSING)

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """A block whose file is open."""

    position: int
    """Place of the block in the caller's batch."""
    spot: Spot
    checksum: BlockChecksum
    """What the row says the bytes must be."""
    unproven: bool
    """See `ReadResult.unproven`."""

    @property
    def place(self) -> tuple[int, int]:
        """(segment, byte in its file): what follows on each other here lies so on the disk."""
        return self.spot.extent.number, self.spot.extent.offset


class _Named(NamedTuple):
    """A block that has a row."""

    position: int
    row: Row
    extent: Extent
    unproven: bool


class Reading:
    """A batch of blocks that is being read; valid inside `Reader.reading`."""

    def __init__(
        self,
        reader: Reader,
        keys: Sequence[BlockKey],
        named: Sequence[_Named],
        leased: Leased,
        state: int,
    ) -> None:
        """`state`: which state of the index `named` was found in."""
        self._reader = reader
        self._keys = keys
        self._named = named
        self._leased = leased
        self._state = state
        self.fds = leased.fds
        """By segment, of the files that are open."""

    @property
    def found(self) -> list[Found]:
        """The blocks that can be read, in the caller's order."""
        fds = self.fds
        return [
            Found(position, Spot(fds[extent.number], extent), row.checksum, unproven)
            for position, row, extent, unproven in self._named
            if extent.number in fds
        ]

    def pieces(self, memory: Sequence[memoryview]) -> list[Piece]:
        """The same as pieces of the caller's memory."""
        fds = self.fds
        return [
            Piece(
                position,
                extent.number,
                extent.offset,
                flat(memory[position])[: row.checksum.length],
            )
            for position, row, extent, _ in self._named
            if extent.number in fds
        ]

    def results(self, failed: Mapping[int, OSError]) -> list[ReadResult]:
        """What became of each block of the batch, after reading. `failed`: by position, why a
        block was not read whole.

        Raises:
            TierError: the index does not work.
        """
        return self._reader.judge(self._keys, self._named, self._leased, self._state, failed)


class Reader:
    """The loading half of a store. Thread-safe."""

    def __init__(
        self,
        tier: str,
        files: SegmentFiles,
        environment: Environment,
        index: BlockIndex,
        trust: Trust,
        writer: Writer | None,
    ) -> None:
        """`writer`: None where nothing may be changed."""
        self._tier = tier
        self._files = files
        self._environment = environment
        self._index = index
        self._writer = writer
        self._trust = trust

    @contextmanager
    def reading(self, keys: Sequence[BlockKey], room: Sequence[int]) -> Iterator[Reading]:
        """Open the files of these blocks. A block longer than its `room`, bytes, is not found.

        Raises:
            TierError: the index does not work, or no directory is in use.
        """
        self._look_after_directories()
        with self._environment.read() as txn:
            state = txn.id()
            rows = self._index.rows(txn, keys)
            unproven = self._trust.unproven(txn)
        named = [
            _Named(position, row, Extent.of(row), row.generation <= unproven)
            for position, (row, most) in enumerate(zip(rows, room, strict=True))
            if row is not None and row.checksum.length <= most
        ]
        with self._files.lease(one.extent.number for one in named) as leased:
            yield Reading(self, keys, named, leased, state)

    def _look_after_directories(self) -> None:
        stripes = self._files.stripes
        if stripes.whole:
            return
        if self._writer is None:
            stripes.try_again()
            with stripes.returned() as places:
                self._files.forget_in(places)
            if not stripes.here:
                raise stripes.nothing_left()
            return
        try:
            self._writer.look_after_directories()
        except NoSpace as error:  # the index is full: it can be read all the same
            logger.warning("tier %s: %s", self._tier, reason_in(self._tier, error))

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `BlockStore.contains`. What lies in a directory that is out of use is not there."""
        self._look_after_directories()
        there = self._index.contains(keys)
        if self._files.stripes.whole:
            return there
        with self._environment.read() as txn:
            rows = self._index.rows(txn, keys)
        return [
            is_there and (row is None or self._files.stripes.has(Extent.of(row).number))
            for is_there, row in zip(there, rows, strict=True)
        ]

    def judge(
        self,
        keys: Sequence[BlockKey],
        named: Sequence[_Named],
        leased: Leased,
        state: int,
        failed: Mapping[int, OSError],
    ) -> list[ReadResult]:
        """See `Reading.results`."""
        results = [_MISSING] * len(keys)
        if not named:
            return results
        again: list[Row | None] = [one.row for one in named]
        with self._environment.read() as txn:
            if txn.id() != state:  # something was written meanwhile
                again = self._index.rows(txn, [keys[one.position] for one in named])
        gone: list[BlockKey] = []
        broken: set[int] = set()
        fds, unopened, away = leased.fds, leased.failed, leased.away
        for (position, row, extent, unproven), now in zip(named, again, strict=True):
            number = extent.number
            error = unopened.get(number) or failed.get(position)
            if now != row or number in away:
                continue
            if isinstance(error, EndOfFile) or (error is None and number not in fds):
                gone.append(keys[position])
            elif error is not None:
                path = self._files.path(number)
                logger.warning("%s", translate(error, "read", path, self._tier))
                results[position] = ReadResult(BlockStatus.TIER_ERROR)
                broken.add(place_of(number))
            else:
                results[position] = ReadResult(BlockStatus.OK, row.checksum, unproven)
        for place in broken:
            self._files.stripes.failed(place)
        if self._writer is not None:
            self._writer.space.note_use(leased.fds)
        if gone:
            there = leased.fds.keys() | leased.failed.keys() | leased.away
            self._drop_gone(gone, {one.extent.number for one in named} - there)
        return results

    def _drop_gone(self, keys: Sequence[BlockKey], lost: set[int]) -> None:
        logger.warning(
            "tier %s: %d blocks are not in %s any more, somebody else changed it",
            self._tier,
            len(keys),
            ", ".join(str(path) for path in self._files.stripes.paths),
        )
        if self._writer is None:
            self._index.distrust(keys)
            return
        try:
            if lost:
                self._writer.lose(lost)
            self._writer.drop(keys)
        except (NoSpace, TierError) as error:
            # The answer stays right without it: the next read finds the same.
            logger.warning(
                "tier %s: their rows could not be dropped: %s",
                self._tier,
                reason_in(self._tier, error),
            )
