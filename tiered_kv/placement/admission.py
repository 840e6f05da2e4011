"""Which blocks are worth storing: those that were computed often enough."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tiered_kv.values import BlockKey

__all__ = ["Admission"]


class Admission:
    """Admits a block when it is offered for the `min_uses`-th time. Not thread-safe.

    Remembers the most recently offered `memory` keys that were not admitted yet.
    """

    def __init__(self, min_uses: int, memory: int = 262_144) -> None:
        if min_uses < 1:
            raise ValueError(f"min_uses must be at least 1, not {min_uses}")
        self._min_uses = min_uses
        self._memory = memory
        self._offered: OrderedDict[BlockKey, int] = OrderedDict()

    def admitted(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Count one offer of each key; return those that may be stored, in order."""
        if self._min_uses == 1:
            return list(keys)
        admitted = []
        for key in keys:
            offers = self._offered.pop(key, 0) + 1
            if offers >= self._min_uses:
                admitted.append(key)
            else:
                self._offered[key] = offers
        while len(self._offered) > self._memory:
            self._offered.popitem(last=False)
        return admitted
