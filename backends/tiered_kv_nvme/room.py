"""Makes room for a batch: in which order segments are made, taken and blocks evicted.

1. Free slots of the class, an empty segment of any class, a new segment within the budget: in the
   directory that holds fewest of the class's, of those that have room.
2. What dead processes had reserved.
3. A segment of a namespace that no live process writes to, the least recently used first.
4. A segment of another class that was not used since the class's own least recently used one.
5. The class's own least recently used blocks.
6. Where it has none: the least recently used segment of any class.

Steps 3 to 5 make the classes of one tier share it as one least-recently-used order would. Nothing
is taken or evicted in directories that are out of use: it would bring no room.

A class gets a segment in each directory as long as that costs nobody anything, so that its batches
are spread over all disks from the first on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tiered_kv.config import format_bytes
from tiered_kv.errors import NoSpace, TierError
from tiered_kv.index import FullKey
from tiered_kv.values import BlockKey
from tiered_kv_nvme.budget import Budget
from tiered_kv_nvme.headers import SegmentLayout
from tiered_kv_nvme.records import Extent, Segment
from tiered_kv_nvme.space import Change, Space
from tiered_kv_nvme.spreading import place_of
from tiered_kv_nvme.stripes import Stripes

__all__ = ["RoomMaker", "give_back"]

LEAST_USE = 0.75
"""Share of an old segment that a new class must be able to use, else the file is made anew."""

LOOKED_AT = 1024
"""How many of the least recently used blocks are looked at for some that bring room, where a
directory is out of use."""


@dataclass(slots=True)
class RoomMaker:
    """Makes room inside one transaction."""

    space: Space
    change: Change
    budget: Budget
    tier: str
    evicted: int = 0
    """Blocks evicted so far."""

    @property
    def _stripes(self) -> Stripes:
        return self.space.files.stripes

    @property
    def _all_store(self) -> bool:
        return len(self._stripes.storing) == len(self._stripes.paths)

    def make(self, slot_class: int, slot_bytes: int, count: int) -> None:
        """Have `count` free slots in a class of this namespace.

        Raises:
            NoSpace: budget, free-space floor and evictable blocks do not suffice.
            TierError: the disk or the index does not work.
        """
        if self.space.index_is_full(self.change.txn) and not (
            self._evict_own(slot_class, count)
            or self._take_segment(slot_class, slot_bytes, forced=True)
        ):
            raise NoSpace(f"tier {self.tier}: the index has no room for {count} further blocks")
        reclaimed = False
        self._spread(slot_class, slot_bytes)
        while (short := count - self.change.free_slots(slot_class)) > 0:
            refusal = self._grow(slot_class, slot_bytes)
            if refusal is None:
                continue
            if not reclaimed:
                reclaimed = True
                if self.change.reclaim():
                    continue
            if (
                self._take_segment(slot_class, slot_bytes, forced=False)
                or self._evict_own(slot_class, short)
                or self._take_segment(slot_class, slot_bytes, forced=True)
            ):
                continue
            raise NoSpace(
                f"tier {self.tier}: no room for {count} blocks of {format_bytes(slot_bytes)}: "
                f"{refusal}, and nothing more can be evicted"
            )

    def _spread(self, slot_class: int, slot_bytes: int) -> None:
        """Get the class a segment in each directory that has none with room and not more of its
        segments than others have, as long as there is room that nobody uses."""
        storing = self._stripes.storing
        if len(storing) < 2:
            return
        having = {place_of(number) for _, number, _, _ in self.change.rooms(slot_class)}
        layout = self.budget.layout(slot_bytes, self.space.files.stride)
        lacking = [place for place in storing if place not in having]
        if not lacking or self.budget.refuses(layout.file_bytes, self.change.segment_bytes()):
            return
        count = self._segments_in(slot_class)
        least = min(count[place] for place in storing)
        for place in lacking:
            if count[place] == least:
                self._add(slot_class, layout, [place])

    def _segments_in(self, slot_class: int) -> Counter[int]:
        """How many segments of the class lie in each directory."""
        return Counter(
            place_of(one.number)
            for one in self.change.all_segments()
            if one.slot_class == slot_class
        )

    def shrink(self) -> bool:
        """Drop the least useful segment if the tier is beyond its budget; whether it was.

        Raises:
            TierError: the disk or the index does not work.
        """
        if not self.budget.excess(self.change.segment_bytes()):
            return False
        candidates = self._idle(self.change.all_segments())
        if not candidates:
            return False
        live = self.space.owners.live_namespaces(self.change.txn)
        victim = min(candidates, key=lambda one: (one.namespace_id in live, one.used))
        self.evicted += self.change.empty(victim)
        self.change.drop(victim)
        return True

    def thin_out(self, slot_classes: Iterable[int], count: int) -> None:
        """Evict `count` blocks of each class: the index is full.

        Raises:
            NoSpace: not even that fits into the index.
            TierError: the index does not work.
        """
        for slot_class in slot_classes:
            self._evict_own(slot_class, count)

    def _grow(self, slot_class: int, slot_bytes: int) -> str | None:
        """Get a further segment without evicting; else the reason why not."""
        for owner_class, number, free, slots in self.change.rooms():
            segment = self.change.segment(number)
            if owner_class != slot_class and free == slots and segment is not None:
                self._hand_over(segment, slot_class, slot_bytes)
                return None
        layout = self.budget.layout(slot_bytes, self.space.files.stride)
        return self._add(slot_class, layout, self._stripes.storing)

    def _add(self, slot_class: int, layout: SegmentLayout, places: list[int]) -> str | None:
        """Make a segment in one of the directories; else the reason why not."""
        refusal = self.budget.refuses(layout.file_bytes, self.change.segment_bytes())
        if refusal is not None:
            return refusal
        refusals: list[str] = []
        for place in self._by_need(slot_class, places):
            refusal = self._add_in(slot_class, layout, place)
            if refusal is None:
                return None
            refusals.append(refusal)
        if not self._stripes.storing:
            raise self._stripes.nothing_left()
        return "; ".join(refusals)

    def _add_in(self, slot_class: int, layout: SegmentLayout, place: int) -> str | None:
        """Make a segment in a directory; else the reason why not.

        Raises:
            TierError: it could not be made, though the directory works.
        """
        try:
            refusal = self.budget.refuses_in(place, layout.file_bytes)
            if refusal is None:
                self.change.add_segment(slot_class, layout, place)
        except NoSpace as error:
            self._stripes.full(place)
            return str(error)
        except TierError as error:
            if not self._stripes.failed(place) and self._stripes.stores_in(place):
                raise
            return str(error)
        return refusal

    def _by_need(self, slot_class: int, places: list[int]) -> list[int]:
        """The directories with fewest segments of the class first; of those the emptiest disk."""
        if len(places) < 2:
            return places
        count = self._segments_in(slot_class)
        return sorted(places, key=lambda place: (count[place], -self._free(place)))

    def _free(self, place: int) -> int:
        try:
            return self.budget.free_bytes(place)
        except TierError:  # making a segment there will say so
            return 0

    def _idle(self, segments: Iterable[Segment]) -> list[Segment]:
        """Those that can be taken, with what they hold."""
        takes = self._stripes.takes
        return [one for one in segments if not one.reserved and takes(one.number)]

    def _take_segment(self, slot_class: int, slot_bytes: int, *, forced: bool) -> bool:
        """Take the least useful segment of another class; False if none may be taken."""
        classes = [one for one in self.space.index.classes(self.change.txn) if one.blocks]
        if all(one.number == slot_class for one in classes):
            return False
        segments = self.change.all_segments()
        others = [one for one in self._idle(segments) if one.slot_class != slot_class]
        if not others:
            return False
        live = self.space.owners.live_namespaces(self.change.txn)
        victim = min(others, key=lambda one: (one.namespace_id in live, one.used))
        if victim.namespace_id in live and not forced:
            own = [one.used for one in segments if one.slot_class == slot_class]
            if own and victim.used >= min(own):
                return False
        self.evicted += self.change.empty(victim)
        self._hand_over(victim, slot_class, slot_bytes)
        return True

    def _evict_own(self, slot_class: int, count: int) -> bool:
        evicted = self.change.evict(self._oldest(slot_class, count))
        if not evicted and not self._all_store:
            evicted = self._empty_own(slot_class)
        self.evicted += evicted
        return evicted > 0

    def _oldest(self, slot_class: int, count: int) -> list[FullKey]:
        """At most `count` blocks, those whose room can be used again."""
        index, txn = self.space.index, self.change.txn
        if self._all_store:
            return index.oldest(txn, slot_class, count)
        found = index.oldest(txn, slot_class, count + LOOKED_AT)
        prefix = len(self.space.namespace_id)
        rows = index.rows(txn, [BlockKey(key[prefix:]) for key in found])
        return [
            key
            for key, row in zip(found, rows, strict=True)
            if row is not None and self._stripes.takes(Extent.of(row).number)
        ][:count]

    def _empty_own(self, slot_class: int) -> int:
        """Evict what the class's least recently used segment holds that may be written to; how many
        blocks."""
        own = [one for one in self.change.all_segments() if one.slot_class == slot_class]
        idle = [one for one in self._idle(own) if one.free < one.layout.slots]
        return self.change.empty(min(idle, key=lambda one: one.used)) if idle else 0

    def _hand_over(self, segment: Segment, slot_class: int, slot_bytes: int) -> None:
        """Give an empty segment to the class, or its bytes back to the budget if it fits badly."""
        stride = self.space.files.stride
        layout = self.budget.layout(slot_bytes, stride)
        if layout.file_bytes != segment.file_bytes:
            layout = type(layout).fitting(segment.file_bytes, slot_bytes, stride)
        if layout.slots and layout.file_bytes >= LEAST_USE * segment.file_bytes:
            self.change.reassign(segment, slot_class, layout)
        else:
            self.change.drop(segment)


def give_back(space: Space) -> int | None:
    """Delete the least recently used segment on the index's file system, file first: on a full disk
    the index cannot write before there is room. How many blocks it held; None when there is none to
    delete. Not inside a transaction.

    Raises:
        NoSpace: the disk is full again.
        TierError: the disk or the index does not work.
    """
    stripes = space.files.stripes
    idle = [one for one in space.idle() if stripes.is_beside_index(one.number)]
    if not idle:
        return None
    victim = min(idle, key=lambda segment: segment.used).number
    space.files.remove(victim)
    with space.change() as change:
        return change.lose(victim)
