"""Compares the index with itself and with the segment files, and puts right what differs.

Suspects are looked for in read transactions. Each is looked at again, where it is to be repaired in
a write transaction of few of them: what an engine was just doing is settled by then, and stays as
it is meanwhile. No block is read.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tiered_kv.contracts import Reconciliation
from tiered_kv.index import Environment, FullKey, IndexAudit, Row
from tiered_kv.values import BlockKey
from tiered_kv_nvme.faults import translate
from tiered_kv_nvme.headers import SegmentHeader, SlotEntry
from tiered_kv_nvme.records import Extent, Segment
from tiered_kv_nvme.reservations import NONCE_BYTES, unpack_slots
from tiered_kv_nvme.space import Change, Space
from tiered_kv_nvme.tables import read_entries, read_entry, write_entry

__all__ = ["Reconciler"]

T = TypeVar("T")

_FEW = 64
"""Suspects in one transaction."""
_NAMESPACE_BYTES = 8
_NUMBER = struct.Struct(">I")
_PAIR = struct.Struct(">II")


@dataclass(frozen=True, slots=True)
class _Slots:
    """What the index says of a segment's slots."""

    blocks: dict[int, tuple[FullKey, int, Row]]
    """By slot, the row that names it: (block, rank, row)."""
    reserved: set[int]
    listed: dict[int, bytes]
    """By slot, the block that was published there."""


class Reconciler:
    """One reconciliation of a tier. Used by one thread."""

    def __init__(
        self,
        environment: Environment,
        space: Space,
        descriptions: Mapping[bytes, bytes],
        tier: str,
        *,
        repair: bool,
    ) -> None:
        """`descriptions`: by namespace id, what the headers of its segments say of it."""
        self._environment = environment
        self._space = space
        self._descriptions = descriptions
        self._tier = tier
        self._repair = repair
        self._audit = IndexAudit(environment, space.index)
        self._found: Counter[str] = Counter()
        self._repaired: Counter[str] = Counter()
        self._unseen: set[int] = set()
        """Segments whose files cannot be looked into."""

    def run(self) -> Reconciliation:
        """Look at everything, once.

        Raises:
            FormatError: a segment was written by another format version.
            NoSpace: the index has no room for the repair.
            TierError: the disk or the index does not work.
        """
        self._look([None], self._dead_reservations, lambda change, _: change.reclaim())
        self._look(self._space.numbers(), self._lost_segment, self._forget_segment)
        for keys in self._audit.batches():
            self._look(keys, self._flawed_block, self._erase_block)
        self._look(self._space.numbers(), self._wrong_slots, self._correct_slots, few=1)
        self._look(self._space.files.numbers(), self._unknown_file, self._remove_file)
        for number in set(self._space.numbers()) - self._unseen:
            self._look([number], self._wrong_header, self._write_header)
            self._look(self._entries_to_see(number), self._wrong_entry, self._write_entry)
        self._look([None], self._wrong_counts, self._correct_counts)
        return Reconciliation(dict(self._found), dict(self._repaired))

    def _look(
        self,
        suspects: Iterable[T],
        flaws: Callable[[Change, T], dict[str, int]],
        mend: Callable[[Change, T], object],
        few: int = _FEW,
    ) -> None:
        """Find the suspects that have flaws, and mend them if that is asked for."""
        asked = list(suspects)
        bad: list[T] = []
        for start in range(0, len(asked), few):  # a long transaction keeps pages from the engines
            with self._reading() as change:
                bad += [one for one in asked[start : start + few] if flaws(change, one)]
        for start in range(0, len(bad), few):
            found: Counter[str] = Counter()
            with self._space.change() if self._repair else self._alone() as change:
                for one in bad[start : start + few]:
                    flawed = flaws(change, one)
                    if flawed:
                        found.update(flawed)
                        if self._repair:
                            mend(change, one)
            self._found.update(found)
            if self._repair:
                self._repaired.update(found)

    @contextmanager
    def _alone(self) -> Iterator[Change]:
        """While nobody else writes: a file is made before the transaction that records it ends."""
        if not self._environment.writable:
            with self._reading() as change:
                yield change
            return
        with self._environment.write() as txn:
            yield Change(self._space, txn, [])

    @contextmanager
    def _reading(self) -> Iterator[Change]:
        with self._environment.read() as txn:
            yield Change(self._space, txn, [])

    # ----------------------------------------------------------------------------- whole segments

    def _dead_reservations(self, change: Change, _: None) -> dict[str, int]:
        dead = set(self._space.owners.dead(change.txn))
        with change.txn.cursor(self._space.reserved) as cursor:
            count = sum(
                len(unpack_slots(data))
                for name, data in cursor.iternext()
                if name[:NONCE_BYTES] in dead
            )
        return {"slots that dead processes reserved": count} if count else {}

    def _lost_segment(self, change: Change, number: int) -> dict[str, int]:
        segment = change.segment(number)
        if segment is None:
            there = change.txn.get(_NUMBER.pack(number), db=self._space.segments) is not None
            return {"damaged records of segments": 1} if there else {}
        stripes = self._space.files.stripes
        if stripes.knows(number) and not stripes.has(number):
            self._unseen.add(number)  # its directory is out of use and may come back
            return {}
        try:
            if not stripes.knows(number):
                raise FileNotFoundError
            size = self._space.files.path(number).lstat().st_size
        except FileNotFoundError:
            self._unseen.add(number)
            if stripes.knows(number) and self._space.files.away([number]):
                return {}
            return {"segments without their file": 1}
        except OSError as error:
            raise self._failed("look at", number, error) from error
        if size < segment.layout.file_bytes:
            self._unseen.add(number)
            return {"segments whose file was cut short": 1}
        header = self._space.files.header(number)
        if header is not None and header.identity != self._space.identity:
            self._unseen.add(number)
            return {"segments whose file is an earlier index's": 1}
        return {}

    def _forget_segment(self, change: Change, number: int) -> None:
        if change.segment(number) is None:
            change.txn.delete(_NUMBER.pack(number), db=self._space.segments)
        else:
            change.lose(number)

    def _unknown_file(self, change: Change, number: int) -> dict[str, int]:
        known = change.txn.get(_NUMBER.pack(number), db=self._space.segments) is not None
        ours = not known and self._space.files.is_ours(number)
        return {"files that are no segment's": 1} if ours else {}

    def _remove_file(self, _: Change, number: int) -> None:
        self._space.files.remove(number)

    # ------------------------------------------------------------------------------ rows and slots

    def _flawed_block(self, change: Change, key: FullKey) -> dict[str, int]:
        parts = self._audit.parts(change.txn, key)
        if parts.is_nothing:
            return {}
        if not parts.agree:
            return {"blocks whose rows are damaged or missing": 1}
        astray = sum(
            row is None or self._slot_of(change, key, row) is None for row in parts.rows.values()
        )
        return {"rows that name no slot": astray} if astray else {}

    def _slot_of(self, change: Change, key: FullKey, row: Row) -> Extent | None:
        """The slot that a row names, if it is the row's."""
        try:
            extent = Extent.of(row)
        except struct.error:
            return None
        segment = change.segment(extent.number)
        if (
            segment is None
            or segment.epoch != extent.epoch
            or segment.slot_class != extent.slot_class
            or not 0 <= extent.slot < segment.layout.slots
            or segment.layout.offset(extent.slot) != extent.offset
            or row.checksum.length > segment.layout.slot_bytes
            or not segment.taken[extent.slot]
        ):
            return None
        listed = change.txn.get(_PAIR.pack(extent.number, extent.slot), db=self._space.slots)
        return extent if listed == key else None

    def _erase_block(self, change: Change, key: FullKey) -> None:
        rows = self._audit.erase(change.txn, key)
        change.free([row for row in rows if self._slot_of(change, key, row) is not None])

    def _slots(self, change: Change, number: int) -> _Slots:
        space, prefix = self._space, _NUMBER.pack(number)
        listed: dict[int, bytes] = {}
        with change.txn.cursor(space.slots) as cursor:
            more = cursor.set_range(prefix)
            while more and cursor.key().startswith(prefix):
                listed[_PAIR.unpack(cursor.key())[1]] = cursor.value()
                more = cursor.next()
        blocks: dict[int, tuple[FullKey, int, Row]] = {}
        for key in {FullKey(value) for value in listed.values()}:
            for rank, row in self._audit.parts(change.txn, key).rows.items():
                extent = None if row is None else self._slot_of(change, key, row)
                if row is not None and extent is not None and extent.number == number:
                    blocks[extent.slot] = key, rank, row
        reserved: set[int] = set()
        with change.txn.cursor(space.reserved) as cursor:
            for name, data in cursor.iternext():
                if name[NONCE_BYTES:] == prefix:
                    reserved.update(unpack_slots(data))
        return _Slots(blocks, reserved, listed)

    def _wrong_slots(self, change: Change, number: int) -> dict[str, int]:
        segment = change.segment(number)
        if segment is None:
            return {}
        slots = self._slots(change, number)
        taken = {int(slot) for slot in np.flatnonzero(segment.taken)}
        used = slots.blocks.keys() | slots.reserved
        flaws = {
            "slots without a row": len((taken | slots.listed.keys()) - used),
            "reserved slots that are not taken": len(slots.reserved - taken),
            "wrong counts of reserved slots": int(segment.reserved != len(slots.reserved)),
        }
        return {name: count for name, count in flaws.items() if count}

    def _correct_slots(self, change: Change, number: int) -> None:
        segment = change.segment(number)
        if segment is not None:
            slots = self._slots(change, number)
            for slot in slots.listed.keys() - slots.blocks.keys():
                change.txn.delete(_PAIR.pack(number, slot), db=self._space.slots)
            segment.taken[:] = 0
            segment.taken[[*slots.blocks, *slots.reserved]] = 1
            segment.reserved = len(slots.reserved)
            change.changed(segment)

    # --------------------------------------------------------------------- what the files repeat

    def _expected(self, segment: Segment, header: SegmentHeader | None) -> SegmentHeader:
        said = b"" if header is None else header.description
        return SegmentHeader(
            self._space.identity,
            segment.number,
            segment.epoch,
            segment.slot_class,
            segment.namespace_id,
            segment.layout,
            self._descriptions.get(segment.namespace_id, said),
        )

    def _wrong_header(self, change: Change, number: int) -> dict[str, int]:
        segment = change.segment(number)
        if segment is None:
            return {}
        header = self._space.files.header(number)
        expected = self._expected(segment, header)
        right = header == SegmentHeader.unpack(expected.pack())
        return {} if right else {"headers that differ from their records": 1}

    def _write_header(self, change: Change, number: int) -> None:
        segment = change.segment(number)
        if segment is not None:
            header = self._space.files.header(number)
            self._space.files.write_header(self._expected(segment, header))

    def _entries_to_see(self, number: int) -> list[tuple[int, int, FullKey]]:
        """(segment, slot, block) of the entries that seem to differ from their rows."""
        with self._reading() as change:
            segment = change.segment(number)
            if segment is None:
                return []
            blocks = self._slots(change, number).blocks
        with self._opened(number) as fd:
            entries = dict(read_entries(fd, segment.layout)) if blocks else {}
        return [
            (number, slot, key)
            for slot, (key, rank, row) in blocks.items()
            if entries.get(slot) != _entry(key, rank, row, segment.epoch)
        ]

    def _row_at(self, change: Change, place: tuple[int, int, FullKey]) -> SlotEntry | None:
        """The entry that a slot's row asks for; None where it has no row any more."""
        number, slot, key = place
        segment = change.segment(number)
        for rank, row in self._audit.parts(change.txn, key).rows.items():
            extent = None if row is None else self._slot_of(change, key, row)
            named = None if extent is None else (extent.number, extent.slot)
            if row is not None and segment is not None and named == (number, slot):
                return _entry(key, rank, row, segment.epoch)
        return None

    def _wrong_entry(self, change: Change, place: tuple[int, int, FullKey]) -> dict[str, int]:
        number, slot, _ = place
        segment, wanted = change.segment(number), self._row_at(change, place)
        if segment is None or wanted is None:
            return {}
        with self._opened(number) as fd:
            right = read_entry(fd, segment.layout, slot) == wanted
        return {} if right else {"entries that differ from their rows": 1}

    def _write_entry(self, change: Change, place: tuple[int, int, FullKey]) -> None:
        number, slot, _ = place
        segment, wanted = change.segment(number), self._row_at(change, place)
        if segment is not None and wanted is not None:
            with self._opened(number) as fd:
                write_entry(fd, segment.layout, slot, wanted)

    @contextmanager
    def _opened(self, number: int) -> Iterator[int]:
        with self._space.files.lease([number]) as leased:
            try:
                if number in leased.failed:
                    raise leased.failed[number]
                yield leased.fds[number]
            except (OSError, KeyError) as error:
                cause = error if isinstance(error, OSError) else FileNotFoundError(2, "it is gone")
                raise self._failed("use", number, cause) from error

    def _failed(self, doing: str, number: int, error: OSError) -> Exception:
        return translate(error, doing, self._space.files.path(number), self._tier)

    # -------------------------------------------------------------------------------------- counts

    def _wrong_counts(self, change: Change, _: None) -> dict[str, int]:
        segments = change.all_segments()
        total = sum(segment.file_bytes for segment in segments)
        flaws = {
            "wrong sums of bytes": int(change.segment_bytes() != total),
            "wrong counts of free slots": len(self._rooms(change).items() ^ _free(segments)),
        }
        return {name: count for name, count in flaws.items() if count}

    def _rooms(self, change: Change) -> dict[bytes, bytes]:
        with change.txn.cursor(self._space.room) as cursor:
            return dict(cursor.iternext())

    def _correct_counts(self, change: Change, _: None) -> None:
        change.recount()
        right = dict(_free(change.all_segments()))
        for name in self._rooms(change).keys() - right.keys():
            change.txn.delete(name, db=self._space.room)
        for name, value in right.items():
            change.txn.put(name, value, db=self._space.room)


def _entry(key: FullKey, rank: int, row: Row, epoch: int) -> SlotEntry:
    return SlotEntry(BlockKey(key[_NAMESPACE_BYTES:]), rank, row.checksum, epoch, row.generation)


def _free(segments: Sequence[Segment]) -> set[tuple[bytes, bytes]]:
    """What the index must say of free slots."""
    return {
        (_PAIR.pack(one.slot_class, one.number), _PAIR.pack(one.free, one.layout.slots))
        for one in segments
        if one.free
    }
