"""What lies in the slots of the host tier, and what is told of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from tiered_kv.specs import SlotRef
from tiered_kv.values import BlockKey, JobId

__all__ = ["Allocation", "CatalogCounts", "Leaseholder", "SlotState", "Use"]

Leaseholder: TypeAlias = str | JobId
"""On whose behalf a block is protected: a request, or the promotion that brought it."""


class SlotState(Enum):
    """What a look-up finds."""

    READY = "ready"
    """Whole on all ranks; loadable."""
    STORING = "storing"
    """On its way into the slot."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What `HostCatalog.allocate` did."""

    slots: Mapping[BlockKey, SlotRef]
    """The keys that got a slot, in the order in which they were given."""
    evicted: tuple[BlockKey, ...]
    """Keys that had to go."""
    refused: int = 0
    """How many keys got none since the policy does not find them worth it; of others, there was
    none to be had."""


@dataclass(frozen=True, slots=True)
class CatalogCounts:
    """A snapshot of the slots; `free`, `storing`, `resident` and `orphaned` add up to all."""

    slots: int
    free: int
    storing: int
    resident: int
    """Ready blocks."""
    orphaned: int
    """Slots whose block is forgotten and that somebody still needs."""
    pinned: int
    """Slots that loads pin."""
    held: int
    """Slots, other than storing ones, that a rank has not released (write-behind)."""
    leased: int
    """Keys that a look-up protects."""
    strays: int
    """Reports that fitted no slot and were ignored: stale or repeated ones."""


class Use:
    """A slot that is not free."""

    __slots__ = (
        *("before", "behind", "forgotten", "holders", "key", "leases"),
        *("pins", "priority", "promotion", "ready", "ref"),
    )

    def __init__(
        self, ref: SlotRef, key: BlockKey, holders: int, before: Use | None, *, promotion: bool
    ) -> None:
        self.ref = ref
        self.key = key
        self.holders = holders
        """Ranks that have not released it, a bit each."""
        self.promotion = promotion
        self.ready = False
        self.forgotten = False
        self.pins = 0
        self.leases: dict[Leaseholder, float] | None = None
        """Until when, by holder."""
        self.before = before
        """The block that this one needs, where that is here."""
        self.behind: set[Use] | None = None
        """Blocks here that need this one."""
        self.priority = 0

    @property
    def idle(self) -> bool:
        """Whether nobody needs its block to stay."""
        return not (self.behind or self.pins or self.holders or self.leases)

    def audit(
        self, ref: SlotRef, known: Use | None, leases: Mapping[Leaseholder, Collection[BlockKey]]
    ) -> Iterator[str]:
        """What is wrong with it, in words; it lies in `ref`, `known` is what its key names, and
        `leases` are all keys by holder."""
        number = ref.number
        if self.ref != ref:
            yield f"slot {number} is used under {self.ref}"
        if self.pins < 0:
            yield f"slot {number} has {self.pins} pins"
        if self.forgotten and not self.holders and not self.pins:
            yield f"slot {number} is orphaned, and nobody needs it"
        if self.forgotten == (known is self):
            yield f"slot {number}: its key {self.key!r} is known, and forgotten, or neither"
        if self.before is not None and self not in (self.before.behind or ()):
            yield f"slot {number} needs a block that does not know of it"
        for one in self.behind or ():
            if one.before is not self or one.forgotten:
                yield f"slot {number} is needed by {one.key!r}, which does not know of it"
        for holder in self.leases or ():
            if self.key not in leases.get(holder, ()):
                yield f"slot {number} is leased by {holder}, who does not know of it"
