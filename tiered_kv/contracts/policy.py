"""The contracts of eviction: pure bookkeeping, no I/O, no clock of its own.

A *policy* orders the blocks of the host tier, and may remember what it likes of blocks that are not
there. A *scoring* orders the blocks of a store, whose index keeps one number per block. That
prefixes go from their ends is the work of whoever asks a policy: it passes over blocks that others
need.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from tiered_kv.values import BlockKey

__all__ = ["EvictionPolicy", "Policy", "PolicyContext", "Recency", "Scoring", "WatchesNeed"]

K = TypeVar("K", bound=Hashable)
K_contra = TypeVar("K_contra", bound=Hashable, contravariant=True)


class EvictionPolicy(Protocol[K]):
    """Orders the keys of one tier. Not thread-safe: its owner calls it from one thread."""

    def wanted(self, keys: Sequence[K], now: float) -> None:
        """A request wants these blocks, whether they are here or not: this is a use of each.

        Args:
            keys: a prefix in order, or what a prefix grew by.
            now: seconds; never less than in an earlier call.
        """
        ...

    def add(self, keys: Sequence[K]) -> None:
        """Blocks are here now, those of a prefix in order. A key that was not wanted counts as
        wanted when it was last."""
        ...

    def remove(self, key: K) -> None:
        """A block is here no more; unknown keys are ignored."""
        ...

    def victims(self) -> Iterator[K]:
        """The keys that are here, in the order in which they should go; needed ones may be missing.

        The caller may stop early, and may `remove` the key that was given last before it asks for
        the next one; it changes nothing else meanwhile, but that the block before it may be
        `needed` no more (see `WatchesNeed`). A key may be missing that was given before, and one
        that came to be needed no more meanwhile.
        """
        ...

    def admits(self, key: K, victim: K) -> bool:
        """Whether storing a block is worth the eviction of another one."""
        ...

    def __len__(self) -> int:
        """Number of keys that are here."""
        ...


@runtime_checkable
class WatchesNeed(Protocol[K_contra]):
    """What an `EvictionPolicy` may have besides: it is told which blocks cannot go, so that it need
    not give them as victims, which are passed over one by one."""

    def needed(self, key: K_contra, is_needed: bool) -> None:
        """Whether a block is needed by one behind it, from now on; also of blocks that are on their
        way here. At first none is."""
        ...


class Scoring(Protocol):
    """Orders the blocks of a store by one number each, which its index keeps: the least goes
    first. Stateless, so that processes which share a store agree, also after a restart; any thread.

    A score is a time, so that it ages by itself: `score(None, now)` is `now`, a use never lowers a
    score, and it keeps the order of two blocks that are used at once. A block is used whenever one
    behind it in a prefix is, so that its score never falls below that one's, and prefixes go from
    their ends.
    """

    def score(self, before: int | None, now: int) -> int:
        """Score of a block that is used.

        Args:
            before: its score so far; None where it is new.
            now: nanoseconds since the epoch.
        """
        ...


class Recency:
    """Least recently used goes first. A `Scoring`."""

    def score(self, before: int | None, now: int) -> int:
        """The time of the last use."""
        return now if before is None else max(before, now)


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy is made with."""

    capacity: int
    """Blocks that the tier holds."""
    half_life: float | None = None
    """Seconds after which a use counts half, where the policy counts uses; None: its own choice."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a plug-in package announces under the entry-point group `tiered_kv.policies`."""

    name: str
    """Value of `eviction.policy` in a tier's YAML."""
    api_version: int
    description: str
    """One line for people."""
    make: Callable[[PolicyContext], EvictionPolicy[BlockKey]]
    """Makes an empty policy for the host tier."""
    scoring: Callable[[float | None], Scoring] | None = None
    """Gives the scoring of a store, for a half-life in seconds; None where the policy cannot be
    written as one, and so is for the host tier alone."""
