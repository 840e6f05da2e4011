"""Makes room for a batch: in which order segments are made, taken and blocks evicted.

1. Free slots of the class, an empty segment of any class, a new segment within the budget.
2. What dead processes had reserved.
3. A segment of a namespace that no live process writes to, the least recently used first.
4. A segment of another class that was not used since the class's own least recently used one.
5. The class's own least recently used blocks.
6. Where it has none: the least recently used segment of any class.

Steps 3 to 5 make the classes of one tier share it as one least-recently-used order would.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tiered_kv.config import format_bytes
from tiered_kv.errors import NoSpace
from tiered_kv_nvme.budget import Budget
from tiered_kv_nvme.records import Segment
from tiered_kv_nvme.space import Change, Space

__all__ = ["RoomMaker"]

LEAST_USE = 0.75
"""Share of an old segment that a new class must be able to use, else the file is made anew."""


@dataclass(slots=True)
class RoomMaker:
    """Makes room inside one transaction."""

    space: Space
    change: Change
    budget: Budget
    tier: str
    evicted: int = 0
    """Blocks evicted so far."""

    def make(self, slot_class: int, slot_bytes: int, count: int) -> None:
        """Have `count` free slots in a class of this namespace.

        Raises:
            NoSpace: budget, free-space floor and evictable blocks do not suffice.
            TierError: the disk or the index does not work.
        """
        if self.change.index_is_full() and not (
            self._evict_own(slot_class, count)
            or self._take_segment(slot_class, slot_bytes, forced=True)
        ):
            raise NoSpace(f"tier {self.tier}: the index has no room for {count} further blocks")
        reclaimed = False
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

    def shrink(self) -> bool:
        """Drop the least useful segment if the tier is beyond its budget; whether it was.

        Raises:
            TierError: the disk or the index does not work.
        """
        if not self.budget.excess(self.change.segment_bytes()):
            return False
        candidates = [one for one in self.change.all_segments() if not one.reserved]
        if not candidates:
            return False
        live = self.change.live_namespaces()
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
        refusal = self.budget.refuses(layout.file_bytes, self.change.segment_bytes())
        if refusal is None:
            try:
                self.change.add_segment(slot_class, layout)
            except NoSpace as error:
                return str(error)
        return refusal

    def _take_segment(self, slot_class: int, slot_bytes: int, *, forced: bool) -> bool:
        """Take the least useful segment of another class; False if none may be taken."""
        classes = [one for one in self.space.index.classes(self.change.txn) if one.blocks]
        if all(one.number == slot_class for one in classes):
            return False
        segments = self.change.all_segments()
        others = [one for one in segments if one.slot_class != slot_class and not one.reserved]
        if not others:
            return False
        live = self.change.live_namespaces()
        victim = min(others, key=lambda one: (one.namespace_id in live, one.used))
        if victim.namespace_id in live and not forced:
            own = [one.used for one in segments if one.slot_class == slot_class]
            if own and victim.used >= min(own):
                return False
        self.evicted += self.change.empty(victim)
        self._hand_over(victim, slot_class, slot_bytes)
        return True

    def _evict_own(self, slot_class: int, count: int) -> bool:
        evicted = self.change.evict(self.space.index.oldest(self.change.txn, slot_class, count))
        self.evicted += evicted
        return evicted > 0

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
