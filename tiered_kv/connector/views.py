"""A store tier as the manager sees it: a name, a spec, and a mirror of the keys it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tiered_kv.specs import KeySpec
from tiered_kv.values import BlockKey, CacheGeometry

__all__ = ["KeyMirror", "TierView"]


class KeyMirror(Protocol):
    """Which keys a store holds, answered from memory; see `tiered_kv.index.Mirror`."""

    @property
    def state(self) -> str:
        """For people: opening, filling, ready or failed, with the reason."""
        ...

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool | None]:
        """Whether each block is stored; None where that is not known yet. Never waits."""
        ...

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """These blocks turned out not to be there."""
        ...

    def close(self, timeout: float) -> bool:
        """Let go within `timeout` seconds."""
        ...


@dataclass(frozen=True, slots=True)
class TierView:
    """A store tier as the manager sees it."""

    name: str
    spec: type[KeySpec]
    write: bool
    """Whether stores go to it."""
    mirror: Callable[[CacheGeometry], KeyMirror]
    """Makes the mirror once the geometry is known."""
