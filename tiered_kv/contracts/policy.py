"""The contract of an eviction policy: pure bookkeeping, no I/O, no clock of its own."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Protocol, TypeVar

__all__ = ["EvictionPolicy"]

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """Orders the keys of one tier. Not thread-safe: its owner holds a lock."""

    def add(self, key: K) -> None:
        """A key was stored; adding a key again counts as a use."""
        ...

    def use(self, key: K) -> None:
        """A key was hit; unknown keys are ignored."""
        ...

    def remove(self, key: K) -> None:
        """A key is gone; unknown keys are ignored."""
        ...

    def victims(self) -> Iterator[K]:
        """Keys in the order in which they should go; the caller stops early and removes them
        afterwards."""
        ...

    def __len__(self) -> int:
        """Number of keys."""
        ...
