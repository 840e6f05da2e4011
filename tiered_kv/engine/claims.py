"""Which slots write-behind keeps, for which tiers: a slot that several tiers still need counts
once, and can be taken back from tiers that hold more than their share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from tiered_kv.specs import SlotRef

__all__ = ["Claims"]


class Claims:
    """A bounded set of slots. Every call takes constant time, for a fixed number of tiers."""

    def __init__(self, limit: int) -> None:
        """`limit`: slots that may be kept; what is beyond it is for the caller to refuse."""
        self.limit = limit
        self._needs: dict[SlotRef, frozenset[str]] = {}
        self._writing: Counter[SlotRef] = Counter()
        self._by_tier: Counter[str] = Counter()
        self._idle: dict[frozenset[str], dict[SlotRef, None]] = {}
        """Slots that nothing is being written from, by the tiers that need them, oldest first."""

    def __len__(self) -> int:
        return len(self._needs)

    def __contains__(self, slot: SlotRef) -> bool:
        return slot in self._needs

    @property
    def full(self) -> bool:
        """Whether no further slot may be kept."""
        return len(self._needs) >= self.limit

    def of(self, tier: str) -> int:
        """Slots that a tier needs, others' or not."""
        return self._by_tier[tier]

    def share(self, tier: str) -> float:
        """Slots that are a tier's due, as many tiers need some now."""
        return self.limit / len({tier, *(t for t, n in self._by_tier.items() if n)})

    def keep(self, slot: SlotRef, tier: str) -> None:
        """A slot is kept for a tier, too."""
        self._by_tier[tier] += 1
        self._set(slot, self._needs.get(slot, frozenset()) | {tier})

    def begin(self, slots: Collection[SlotRef]) -> None:
        """These slots are being written from: they cannot be taken back."""
        for slot in slots:
            self._drop_idle(slot)
            self._writing[slot] += 1

    def end(self, slots: Collection[SlotRef]) -> None:
        """A write from these slots has ended; `give_up` follows, or they wait again."""
        for slot in slots:
            self._writing[slot] -= 1
            if not self._writing[slot]:
                del self._writing[slot]
            self._set(slot, self._needs[slot])

    def give_up(self, slot: SlotRef, tier: str) -> bool:
        """A tier needs a slot no more; whether none does."""
        self._by_tier[tier] -= 1
        self._set(slot, self._needs[slot] - {tier})
        return slot not in self._needs

    def to_take_back(self, tier: str) -> tuple[SlotRef, frozenset[str]] | None:
        """The newest slot that only tiers with more than their share need, and these; None where
        there is none, or `tier`, for which it is asked, has its own share already."""
        due = self.share(tier)
        if self._by_tier[tier] + 1 > due:
            return None
        over = {other for other, held in self._by_tier.items() if held > due}
        found = [needs for needs, slots in self._idle.items() if slots and needs <= over]
        if not found:
            return None
        needs = max(found, key=lambda needs: max(self._by_tier[other] for other in needs))
        return next(reversed(self._idle[needs])), needs

    def _set(self, slot: SlotRef, needs: frozenset[str]) -> None:
        self._drop_idle(slot)
        if not needs:
            del self._needs[slot]
            return
        self._needs[slot] = needs
        if slot not in self._writing:
            self._idle.setdefault(needs, {})[slot] = None

    def _drop_idle(self, slot: SlotRef) -> None:
        needs = self._needs.get(slot)
        if needs is not None and needs in self._idle:
            self._idle[needs].pop(slot, None)
