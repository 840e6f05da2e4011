"""Which slots of which segments are taken: records in the index's own write transactions.

Databases beside the index's own:

* `segments`: number -> record with one bit per slot
* `room`: slot class, number -> free slots and slots, for segments that have a free one
* `slots`: number, slot -> full key, for published slots
* `reserved`: owner's nonce, number -> (slot, generation) of slots that wait for publication
* `owners`: nonce -> process and namespace that has the tier open for writing
* `totals`: bytes of all segment files

A file is made inside the transaction that records it, so that two processes cannot overrun the
budget together; taking the space of 1 GiB takes ext4 and xfs milliseconds.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from tiered_kv.index import BlockIndex, Environment, FullKey, Owners, Row, Transaction
from tiered_kv_nvme.headers import SegmentHeader, SegmentLayout
from tiered_kv_nvme.records import Extent, Segment, contiguous
from tiered_kv_nvme.reservations import (
    NONCE_BYTES,
    Reservations,
    reservation_key,
    unpack_slots,
)
from tiered_kv_nvme.segments import SegmentFiles
from tiered_kv_nvme.spreading import shares
from tiered_kv_nvme.totals import Totals

__all__ = ["Change", "Space"]

_NUMBER = struct.Struct(">I")
_PAIR = struct.Struct(">II")

NOTE_SECONDS = 1.0
"""Uses of segments are written at most this often."""

INDEX_SHARE = 0.75
"""Share of the index's room from which on blocks are evicted for it."""

REFRESH_SECONDS = 60.0
"""How often a process that writes says that it is still there."""


class Space:
    """The tier's segments and who uses them, shared by all processes. Thread-safe."""

    def __init__(
        self,
        environment: Environment,
        index: BlockIndex,
        files: SegmentFiles,
        namespace_id: bytes,
        description: bytes = b"",
    ) -> None:
        """For blocks of one namespace; `description` is what the index records of it, for the
        headers of its segments. An empty `namespace_id` is for those who store nothing."""
        self._environment = environment
        self.index = index
        self.files = files
        self.identity = environment.identity
        self.namespace_id = namespace_id
        self.description = description
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        """Names this store's reservations."""
        self.segments = environment.database("segments")
        self.room = environment.database("room")
        self.slots = environment.database("slots")
        self.reserved = environment.database("reserved")
        self.owners = Owners(environment.database("owners"))
        self.totals = Totals(environment.database("totals"))
        self._lock = threading.Lock()
        self._uses: dict[int, int] = {}
        self._noted = 0.0
        self._refreshed = -REFRESH_SECONDS

    def index_is_full(self, txn: Transaction) -> bool:
        """Whether more than `INDEX_SHARE` of what the index may take holds something: deleting
        takes pages too."""
        live = self._environment.live_bytes(txn)
        return live > INDEX_SHARE * self._environment.map_bytes

    def note_use(self, numbers: Iterable[int]) -> None:
        """Blocks in these segments were read; written with some later change."""
        now = time.time_ns()
        with self._lock:
            self._uses.update(dict.fromkeys(numbers, now))

    def due_uses(self) -> dict[int, int]:
        """What `note_use` gathered, if it is time to write it."""
        with self._lock:
            if not self._uses or time.monotonic() - self._noted < NOTE_SECONDS:
                return {}
            self._noted = time.monotonic()
            uses, self._uses = self._uses, {}
            return uses

    def owner_due(self) -> bool:
        """Whether this process should say again that it is there."""
        if not self.namespace_id:
            return False
        with self._lock:
            if time.monotonic() - self._refreshed < REFRESH_SECONDS:
                return False
            self._refreshed = time.monotonic()
            return True

    def numbers(self) -> list[int]:
        """All segments that are recorded."""
        with self._environment.read() as txn:
            return self.numbers_in(txn)

    def numbers_in(self, txn: Transaction) -> list[int]:
        """The same inside of a transaction. A key that was damaged is left out."""
        keys = txn.cursor(db=self.segments).iternext(keys=True, values=False)
        return [_NUMBER.unpack(key)[0] for key in keys if len(key) == _NUMBER.size]

    def held(self, extents: Sequence[Extent]) -> dict[int, SegmentLayout]:
        """By generation, how the segments of those extents are cut that are still reserved by
        this store."""
        found: dict[int, SegmentLayout] = {}
        with self._environment.read() as txn:
            for number in {extent.number for extent in extents}:
                data = txn.get(_NUMBER.pack(number), db=self.segments)
                segment = None if data is None else Segment.unpack(number, data)
                if segment is not None:
                    slots = unpack_slots(txn.get(self.reserved_key(number), db=self.reserved))
                    found |= {
                        extent.generation: segment.layout
                        for extent in extents
                        if extent.number == number and slots.get(extent.slot) == extent.generation
                    }
        return found

    def reserved_key(self, number: int) -> bytes:
        """Key of this store's reservations in a segment."""
        return reservation_key(self.nonce, number)

    def idle(self) -> list[Segment]:
        """All segments in which nothing is reserved, outside of a transaction."""
        with self._environment.read() as txn:
            records = [
                Segment.unpack(_NUMBER.unpack(key)[0], data)
                for key, data in txn.cursor(db=self.segments).iternext()
                if len(key) == _NUMBER.size
            ]
        return [segment for segment in records if segment is not None and not segment.reserved]

    def leave(self) -> None:
        """Give back all that is reserved and is not this process's to write any more.

        Raises:
            NoSpace: the index is full.
            TierError: the index does not work.
        """
        with self.change() as change:
            change.withdraw(self.nonce)

    @contextmanager
    def change(self) -> Iterator[Change]:
        """One write transaction; nothing of it stays when the body raises.

        Raises:
            NoSpace: the index is full.
            TierError: the index does not work.
        """
        made: list[int] = []
        try:
            with self._environment.write() as txn:
                change = Change(self, txn, made)
                yield change
                change.save()
        except BaseException:
            for number in made:
                self.files.remove(number)
            raise


class Change:
    """What one write transaction does to the space. Used by one thread."""

    def __init__(self, space: Space, txn: Transaction, made: list[int]) -> None:
        self._space = space
        self.txn = txn
        self._made = made
        self._loaded: dict[int, Segment | None] = {}
        self._dirty: set[int] = set()
        self._reserved = Reservations(txn, space.reserved)
        if space.owner_due():
            space.owners.register(txn, space.nonce, space.namespace_id)
        for number, used in space.due_uses().items():
            segment = self.segment(number)
            if segment is not None and segment.used < used:
                segment.used = used
                self._dirty.add(number)

    def save(self) -> None:
        """Write the changed records."""
        for number in self._dirty:
            segment = self._loaded[number]
            if segment is None:
                continue
            self.txn.put(_NUMBER.pack(number), segment.pack(), db=self._space.segments)
            pair = _PAIR.pack(segment.slot_class, number)
            free = segment.free
            if free:
                value = _PAIR.pack(free, segment.layout.slots)
                self.txn.put(pair, value, db=self._space.room)
            else:
                self.txn.delete(pair, db=self._space.room)
        self._dirty.clear()
        self._reserved.save()

    # ------------------------------------------------------------------------------ segments

    def segment(self, number: int) -> Segment | None:
        """The record of a segment; None when there is none, or it was damaged: then the blocks in
        it go by and by, and its file when the tier is opened next."""
        if number not in self._loaded:
            data = self.txn.get(_NUMBER.pack(number), db=self._space.segments)
            self._loaded[number] = None if data is None else Segment.unpack(number, data)
        return self._loaded[number]

    def all_segments(self) -> list[Segment]:
        """Every segment of the tier. Costs about 2 us each."""
        found = [self.segment(number) for number in self._space.numbers_in(self.txn)]
        return [segment for segment in found if segment is not None]

    def segment_bytes(self) -> int:
        """Bytes of all segment files, as they were counted."""
        return self._space.totals.segment_bytes(self.txn)

    def recount(self) -> None:
        """Forget damaged records, and count the bytes of all segment files anew."""
        cursor = self.txn.cursor(db=self._space.segments)
        for key in list(cursor.iternext(keys=True, values=False)):
            if len(key) != _NUMBER.size or self.segment(_NUMBER.unpack(key)[0]) is None:
                self.txn.delete(key, db=self._space.segments)
        total = sum(segment.file_bytes for segment in self.all_segments())
        self._space.totals.count(self.txn, total)

    def add_segment(self, slot_class: int, layout: SegmentLayout, place: int) -> None:
        """Make a file in the directory at `place` for a slot class of this namespace.

        Raises:
            NoSpace: the disk or the quota is full.
            TierError: the file cannot be made.
        """
        files = self._space.files
        while True:
            number = self._space.totals.next_number(self.txn, place)
            header = self._header(number, slot_class, layout)
            if self.segment(header.number) is not None:
                continue  # the counter was damaged
            try:
                files.create(header)
                break
            except FileExistsError:
                # Left by a process that died before it was recorded, or somebody else's.
                if files.is_ours(header.number):
                    files.remove(header.number)
        self._made.append(header.number)
        self.record(header, layout.file_bytes, time.time_ns())

    def record(self, header: SegmentHeader, file_bytes: int, used: int) -> Segment:
        """Note a file that is there; all its slots are free. `used` as in `Segment`."""
        layout = header.layout
        segment = self._loaded[header.number] = Segment(
            header.number,
            header.slot_class,
            header.namespace_id,
            header.epoch,
            layout,
            file_bytes,
            reserved=0,
            used=used,
            taken=np.zeros(layout.slots, np.uint8),
        )
        self._dirty.add(header.number)
        self._space.totals.add(self.txn, file_bytes)
        return segment

    def changed(self, segment: Segment) -> None:
        """A field of this record was changed: write it."""
        self._dirty.add(segment.number)

    def reassign(self, segment: Segment, slot_class: int, layout: SegmentLayout) -> None:
        """Give an empty segment to another slot class, of this namespace.

        Raises:
            NoSpace: the disk or the quota is full.
            TierError: its header cannot be written.
        """
        header = self._header(segment.number, slot_class, layout)
        self._space.files.write_header(header)
        pair = _PAIR.pack(segment.slot_class, segment.number)
        self.txn.delete(pair, db=self._space.room)
        segment.slot_class, segment.namespace_id = slot_class, header.namespace_id
        segment.epoch, segment.layout = header.epoch, layout
        segment.used = time.time_ns()
        segment.taken = np.zeros(layout.slots, np.uint8)
        self._dirty.add(segment.number)

    def drop(self, segment: Segment) -> None:
        """Delete an empty segment and its file. Not undone when the transaction aborts: what it
        held is missing then.

        Raises:
            TierError: the file cannot be deleted.
        """
        self._space.files.remove(segment.number)
        self.save()
        pair = _PAIR.pack(segment.slot_class, segment.number)
        self.txn.delete(pair, db=self._space.room)
        self.txn.delete(_NUMBER.pack(segment.number), db=self._space.segments)
        self._loaded[segment.number] = None
        self._space.totals.add(self.txn, -segment.file_bytes)

    def _header(self, number: int, slot_class: int, layout: SegmentLayout) -> SegmentHeader:
        space = self._space
        epoch = space.index.next_generation(self.txn, 1)
        return SegmentHeader(
            *(space.identity, number, epoch, slot_class, space.namespace_id, layout),
            description=space.description,
        )

    # --------------------------------------------------------------------------------- slots

    def rooms(self, slot_class: int | None = None) -> list[tuple[int, int, int, int]]:
        """(slot class, number, free slots, slots) of segments with a free slot that can be used."""
        self.save()
        found: list[tuple[int, int, int, int]] = []
        cursor = self.txn.cursor(db=self._space.room)
        prefix = b"" if slot_class is None else _NUMBER.pack(slot_class)
        if cursor.set_range(prefix) if prefix else cursor.first():
            for key, value in cursor.iternext():
                if not key.startswith(prefix):
                    break
                if len(key) == len(value) == _PAIR.size:
                    found.append((*_PAIR.unpack(key), *_PAIR.unpack(value)))
        takes = self._space.files.stripes.takes
        return [room for room in found if takes(room[1]) and self.segment(room[1]) is not None]

    def free_slots(self, slot_class: int) -> int:
        """Slots of a class that can be given out at once."""
        return sum(free for _, _, free, _ in self.rooms(slot_class))

    def reserve(self, slot_class: int, count: int) -> list[Extent]:
        """Give out slots of a class that has enough of them, neighbours where there are some, over
        several directories where the batch is large enough to gain by it."""
        first = self._space.index.next_generation(self.txn, count)
        extents: list[Extent] = []
        rooms = {number: free for _, number, free, _ in self.rooms(slot_class)}
        known = {number: self.segment(number) for number in rooms}
        slot_bytes = next((one.layout.slot_bytes for one in known.values() if one), 1)
        for number, share in shares(rooms, count, slot_bytes).items():
            segment = known[number]
            if segment is None:
                continue
            slots = contiguous(segment.taken, share)
            segment.taken[slots] = 1
            segment.reserved += len(slots)
            given = first + len(extents)
            pairs = list(zip(slots, range(given, given + len(slots)), strict=True))
            self._reserved.slots(self._space.reserved_key(number)).update(pairs)
            start, size, epoch = segment.layout.offset(0), segment.layout.slot_bytes, segment.epoch
            extents += [
                Extent(number, epoch, slot, start + slot * size, slot_class, generation)
                for slot, generation in pairs
            ]
            self._dirty.add(number)
        return extents

    def holds(self, extents: Sequence[Extent]) -> list[bool]:
        """Which of the slots are still reserved by this store."""
        reserved = self._reserved.in_segments(self._space.nonce, {one.number for one in extents})
        return [reserved[one.number].get(one.slot) == one.generation for one in extents]

    def publish(self, blocks: Sequence[tuple[Extent, FullKey]]) -> None:
        """Reserved slots now hold published blocks."""
        now = time.time_ns()
        counts = Counter([extent.number for extent, _ in blocks])
        reserved = self._reserved.in_segments(self._space.nonce, counts)
        for extent, _ in blocks:
            del reserved[extent.number][extent.slot]
        for number, count in counts.items():
            segment = self.segment(number)
            if segment is not None:
                segment.reserved -= count
                segment.used = now
                self._dirty.add(number)
        with self.txn.cursor(self._space.slots) as cursor:
            cursor.putmulti(
                sorted([(_PAIR.pack(extent.number, extent.slot), key) for extent, key in blocks])
            )

    def release(self, extents: Iterable[Extent]) -> None:
        """Give reserved slots back; those that are not reserved any more are ignored."""
        given = list(extents)
        for extent, held in zip(given, self.holds(given), strict=True):
            if held:
                self._release(self._space.reserved_key(extent.number), extent.number, [extent.slot])

    def _release(self, key: bytes, number: int, slots: Sequence[int]) -> None:
        """Free slots that are reserved in the record under `key`."""
        reserved = self._reserved.slots(key)
        for slot in slots:
            del reserved[slot]
        segment = self.segment(number)
        if segment is not None:
            segment.reserved -= len(slots)
            segment.taken[slots] = 0
            self._dirty.add(number)

    # ------------------------------------------------------------------------------ eviction

    def evict(self, blocks: Iterable[FullKey]) -> int:
        """Remove whole blocks and free their slots; how many blocks there were."""
        unique = list(dict.fromkeys(blocks))
        present = self._space.index.present(self.txn, unique)
        self.free(self._space.index.remove(self.txn, unique))
        return len(present)

    def free(self, rows: Iterable[Row]) -> None:
        """Free the slots of rows that the index does not have any more."""
        for row in rows:
            extent = Extent.of(row)
            segment = self.segment(extent.number)
            if segment is not None and segment.epoch == extent.epoch:
                pair = _PAIR.pack(extent.number, extent.slot)
                self.txn.delete(pair, db=self._space.slots)
                segment.taken[extent.slot] = 0
                self._dirty.add(extent.number)

    def contents(self, number: int) -> list[FullKey]:
        """The published blocks that have a part in a segment."""
        prefix = _NUMBER.pack(number)
        found: list[FullKey] = []
        cursor = self.txn.cursor(db=self._space.slots)
        if cursor.set_range(prefix):
            for key, value in cursor.iternext():
                if not key.startswith(prefix):
                    break
                found.append(FullKey(value))
        return found

    def empty(self, segment: Segment) -> int:
        """Evict all blocks that have a part in the segment; how many. Nothing in it may be
        reserved."""
        evicted = self.evict(self.contents(segment.number))
        # What no row names any more (a row that was damaged) goes too.
        for slot in np.flatnonzero(segment.taken):
            self.txn.delete(_PAIR.pack(segment.number, int(slot)), db=self._space.slots)
        segment.taken[:] = 0
        self._dirty.add(segment.number)
        return evicted

    def lose(self, number: int) -> int:
        """The segment's file is not there any more: forget all that it held or was to hold; how
        many blocks.

        Raises:
            TierError: what is there under its name cannot be deleted.
        """
        segment = self.segment(number)
        if segment is None:
            return 0
        for key, _ in self._reserved.records(number=number):
            self._release(key, number, list(self._reserved.slots(key)))
        lost = self.empty(segment)
        self.drop(segment)
        return lost

    # -------------------------------------------------------------------------------- owners

    def reclaim(self) -> int:
        """Free what dead processes had reserved; how many slots."""
        return sum(self.withdraw(nonce) for nonce in self._space.owners.dead(self.txn))

    def withdraw(self, nonce: bytes) -> int:
        """Forget an owner and free what it had reserved; how many slots."""
        self._space.owners.forget(self.txn, nonce)
        freed = 0
        for key, number in self._reserved.records(nonce=nonce):
            slots = list(self._reserved.slots(key))
            self._release(key, number, slots)
            freed += len(slots)
        return freed
