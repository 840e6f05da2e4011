"""Loading: from rows to places in files, and whether the rows still say the same afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import ReadResult
from tiered_kv.errors import NoSpace, TierError
from tiered_kv.index import BlockIndex, Environment, Row
from tiered_kv.values import BlockKey, BlockStatus
from tiered_kv_nvme.faults import translate
from tiered_kv_nvme.groups import EndOfFile
from tiered_kv_nvme.records import Extent
from tiered_kv_nvme.segments import Leased, SegmentFiles
from tiered_kv_nvme.writing import Spot, Writer

__all__ = ["Found", "Reader", "Reading"]

_MISSING = ReadResult(BlockStatus.MISSING)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A block whose file is open."""

    position: int
    """Place of the block in the caller's batch."""
    spot: Spot
    checksum: BlockChecksum
    """What the row says the bytes must be."""

    @property
    def place(self) -> tuple[int, int]:
        """(segment, byte in its file): what follows on each other here lies so on the disk."""
        return self.spot.extent.number, self.spot.extent.offset


@dataclass(frozen=True, slots=True)
class _Named:
    """A block that has a row."""

    position: int
    row: Row
    extent: Extent


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
        self.found = [
            Found(one.position, Spot(leased.fds[one.extent.number], one.extent), one.row.checksum)
            for one in named
            if one.extent.number in leased.fds
        ]
        """The blocks that can be read, in the caller's order."""

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
        writer: Writer | None,
    ) -> None:
        """`writer`: None where nothing may be changed."""
        self._tier = tier
        self._files = files
        self._environment = environment
        self._index = index
        self._writer = writer

    @contextmanager
    def reading(self, keys: Sequence[BlockKey], room: Sequence[int]) -> Iterator[Reading]:
        """Open the files of these blocks. A block longer than its `room`, bytes, is not found.

        Raises:
            TierError: the index does not work.
        """
        with self._environment.read() as txn:
            state = txn.id()
            rows = self._index.rows(txn, keys)
        named = [
            _Named(position, row, Extent.of(row))
            for position, (row, most) in enumerate(zip(rows, room, strict=True))
            if row is not None and row.checksum.length <= most
        ]
        with self._files.lease(one.extent.number for one in named) as leased:
            yield Reading(self, keys, named, leased, state)

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
        for one, now in zip(named, again, strict=True):
            number = one.extent.number
            error = leased.failed.get(number) or failed.get(one.position)
            if now != one.row:
                continue
            if isinstance(error, EndOfFile) or (error is None and number not in leased.fds):
                gone.append(keys[one.position])
            elif error is not None:
                path = self._files.path(number)
                logger.warning("%s", translate(error, "read", path, self._tier))
                results[one.position] = ReadResult(BlockStatus.TIER_ERROR)
            else:
                results[one.position] = ReadResult(BlockStatus.OK, one.row.checksum)
        if self._writer is not None:
            self._writer.space.note_use(leased.fds)
        if gone:
            there = leased.fds.keys() | leased.failed.keys()
            self._drop_gone(gone, {one.extent.number for one in named} - there)
        return results

    def _drop_gone(self, keys: Sequence[BlockKey], lost: set[int]) -> None:
        logger.warning(
            "tier %s: %d blocks are not in %s any more, somebody else changed it",
            self._tier,
            len(keys),
            self._files.directory,
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
            logger.warning("tier %s: their rows could not be dropped: %s", self._tier, error)
