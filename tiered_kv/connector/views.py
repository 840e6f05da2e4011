"""A store tier as the manager sees it: a name, a spec, and a mirror of the keys it holds."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tiered_kv.specs import KeySpec
from tiered_kv.values import BlockKey, CacheGeometry

__all__ = ["KeyMirror", "Mirrors", "TierView"]

logger = logging.getLogger(__name__)


class KeyMirror(Protocol):
    """Which keys a store holds, answered from memory; see `tiered_kv.index.Mirror`."""

    @property
    def state(self) -> str:
        """For people: opening, filling, ready or failed, with the reason."""
        ...

    @property
    def version(self) -> object:
        """Another object whenever answers may have changed."""
        ...

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool | None]:
        """Whether each block is stored; None where that is not known yet. Never waits."""
        ...

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """These blocks turned out not to be there."""
        ...

    def close(self, timeout: float) -> bool:
        """Begin to let go of the store, and wait at most `timeout` seconds (0: not at all) until
        that is done; whether it is. May be called again."""
        ...


@dataclass(frozen=True, slots=True)
class TierView:
    """A store tier as the manager sees it."""

    name: str
    spec: type[KeySpec]
    write: bool
    """Whether stores go to it."""
    mirror: Callable[[CacheGeometry, bytes], KeyMirror]
    """Makes the mirror of an epoch (`Namespace.epoch`) once the geometry is known."""


MOST_LEFT = 4
"""While so many mirrors of a tier have been left, and hang in its store, no further one is made."""


class Mirrors(dict[str, KeyMirror]):
    """The mirrors in use, by tier. One thread uses them."""

    def __init__(self) -> None:
        super().__init__()
        self._left: list[tuple[str, KeyMirror]] = []

    def open(self, tiers: Iterable[TierView], geometry: CacheGeometry, epoch: bytes) -> None:
        """Make the mirrors of an epoch. A tier whose stores hang gets none, and its lookups miss,
        until the next time."""
        self._left = [left for left in self._left if not left[1].close(timeout=0.0)]
        hanging = Counter(tier for tier, _ in self._left)
        for tier in tiers:
            if hanging[tier.name] >= MOST_LEFT:
                logger.warning(
                    "tier %s is not looked up until the next reset: its store hangs", tier.name
                )
            else:
                self[tier.name] = tier.mirror(geometry, epoch)

    def leave(self) -> None:
        """Use none of them any more; each closes its store on its own thread."""
        for tier, mirror in self.items():
            mirror.close(timeout=0.0)
            self._left.append((tier, mirror))
        self.clear()

    def close(self, seconds: float) -> None:
        """Leave them, and wait at most `seconds` for all of them together. Idempotent."""
        self.leave()
        until = time.monotonic() + seconds
        for _, mirror in self._left:
            mirror.close(timeout=max(0.0, until - time.monotonic()))
        self._left = []
