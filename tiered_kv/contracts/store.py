"""The contract of a key-addressed store (nvme, lmdb, remote, a third party's).

A store owns its space, index, budget, eviction and integrity. Whoever implements `BlockStore`
gets the hops cpu <-> store for free.

Rules for all methods:

* They block, and are called from the tier's own bounded daemon threads, several at once: a store
  is thread-safe. Several processes may have the same directory open; `contains`, `read` and
  `publish` stay right then.
* They take batches; an empty batch is allowed and does nothing.
* One object serves one namespace and one rank (see `StoreContext`). A block is visible, to
  `contains`, `scan` and `changes`, only when the parts of all ranks are published.
* They raise `TierError` when the tier does not work, `NoSpace` when there is no room, `ValueError`
  when the caller breaks the contract. Foreign errors are translated, `raise ... from`.
* A store that was opened with `writable=False` refuses with `ValueError` whatever would change its
  blocks; a closed store raises `TierError`.
* What it takes on the disk stays within its capacity, counting what lay in its directory before.
* What was published outlives its process, however that ends, as far as the medium is durable; what
  was not published leaves nothing behind then.

`tiered_kv.testing.conformance` proves these rules of any store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from tiered_kv.checksum import BlockChecksum
from tiered_kv.errors import NoSpace, WriteBudgetSpent
from tiered_kv.values import BlockKey, BlockStatus

__all__ = [
    "BlockStore",
    "ChangeBatch",
    "KeepsBlocks",
    "NewBlock",
    "Place",
    "RanksByUse",
    "ReadResult",
    "StoreStat",
    "no_room",
]


class NewBlock(NamedTuple):
    """A block for which room is asked."""

    key: BlockKey
    checksum: BlockChecksum
    """Bound at capture; it carries the length in bytes."""


class Place(NamedTuple):
    """Room that `reserve` gave for one block. Only the store that made it reads `token`."""

    block: NewBlock
    token: object


class ReadResult(NamedTuple):
    """What `read` found for one key."""

    status: BlockStatus
    """OK, MISSING, or TIER_ERROR for this block alone."""
    checksum: BlockChecksum | None = None
    """What the row says the bytes must be; set where status is OK."""
    unproven: bool = False
    """The store does not know that these bytes were ever written whole under this key (its index
    was lost and made again): they are compared with the checksum, whatever the settings say."""


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """Changes of the visible keys since a cursor."""

    cursor: int
    """Hand this to the next call."""
    changes: tuple[tuple[BlockKey, bool], ...]
    """(key, True) added, (key, False) removed, in order."""
    restart: bool = False
    """The log no longer reaches back to the cursor: forget everything, `scan`, go on from here."""


@dataclass(frozen=True, slots=True)
class StoreStat:
    """A snapshot of a store, all namespaces together unless said otherwise."""

    blocks: int
    """Visible blocks of this namespace."""
    used_bytes: int
    """Bytes on the disk that count against the budget: data, index and files found before."""
    capacity_bytes: int
    evicted_blocks: int
    """Blocks evicted by this process."""
    modes: Mapping[str, str] = field(default_factory=dict)
    """What is in effect, for example `{"io": "direct", "durability": "none"}`."""
    written_bytes: int | None = None
    """Bytes written to the medium since the tier was made, by all processes: what blocks take, and
    what is written beside them, as far as it is known. None: the store does not count; the engine
    counts what it writes itself, then."""
    written_today: int | None = None
    """Those of the current day (UTC), also across restarts; None where `written_bytes` is."""


def no_room(error: NoSpace) -> BlockStatus:
    """What blocks are that `BlockStore.reserve` gave no room."""
    if isinstance(error, WriteBudgetSpent):
        return BlockStatus.OVER_BUDGET
    return BlockStatus.NO_SPACE


class BlockStore(Protocol):
    """See the module's docstring for the rules that hold for every method."""

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each block is visible. Never reads a value. Not called by the scheduler."""
        ...

    def reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        """Take room for this rank's parts, evicting whole blocks if needed.

        The answer has one entry per block; None where this rank's part is already published
        (nothing to do) . What does not fit raises: all or nothing.

        Raises:
            NoSpace: not enough can be evicted within the budget and the free-space floor.
            WriteBudgetSpent: it may not be written today; raised by stores that count (see
                `StoreStat.written_bytes`) where the tier's settings have a `write_budget`.
        """
        ...

    def write(self, places: Sequence[Place], memory: Sequence[memoryview]) -> None:
        """Copy the bytes to the places. `memory[i]` is contiguous, page-aligned, and its
        `nbytes` equals the block's length; it is read only while this call runs."""
        ...

    def publish(self, places: Sequence[Place]) -> None:
        """Make written places visible in one transaction (data first, then index, to the
        durability that is configured). A place that was not written is refused. Publishing a key
        that another process published meanwhile keeps one of the two and gives the other's room
        back."""
        ...

    def abandon(self, places: Sequence[Place]) -> None:
        """Give room back; nothing was or will be visible. Never raises `TierError`."""
        ...

    def read(self, keys: Sequence[BlockKey], memory: Sequence[memoryview]) -> list[ReadResult]:
        """Copy this rank's parts into memory.

        `memory[i]` is page-aligned and at least as long as the block may be. The caller, not the
        store, verifies the checksum; but a row that changed while its bytes were read is MISSING.
        A row whose length exceeds `memory[i]` is MISSING. Nothing behind the block's bytes is
        written.
        """
        ...

    def discard(self, blocks: Sequence[NewBlock]) -> int:
        """Drop blocks (all ranks' parts) whose row still carries this checksum; how many were."""
        ...

    def delete(self, keys: Sequence[BlockKey]) -> int:
        """Drop blocks (all ranks' parts) of this namespace; how many were there."""
        ...

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Mark as recently used. May be batched; losing it costs hits only."""
        ...

    def scan(self) -> Iterator[BlockKey]:
        """All visible keys of this namespace, in any order, without reading values."""
        ...

    def changes(self, cursor: int | None) -> ChangeBatch:
        """Changes since `cursor`; with None an empty batch whose cursor is now."""
        ...

    def stat(self) -> StoreStat:
        """A snapshot; cheap enough for every few seconds.

        Raises:
            TierGone: what the store was opened on is not there any more. Any method may raise it;
                this one notices, so that the tier is opened anew.
        """
        ...

    def close(self) -> None:
        """Write what is batched, set the clean-shutdown mark, let go. Idempotent."""
        ...


@runtime_checkable
class RanksByUse(Protocol):
    """What a store may bring besides: it tells which of its blocks are used most, and takes such an
    order over. Copying from it begins with them, then, and where there is not room for all, those
    are what is copied; copying into it keeps the order."""

    def hottest(self) -> Iterator[BlockKey]:
        """All visible keys of this namespace, the one that would be evicted last first."""
        ...

    def arrange(self, keys: Sequence[BlockKey]) -> None:
        """Evict these blocks in the reverse of this order, as blocks that are stored now, or later
        where one of them would stay longer. Keys that are not there are ignored.

        Raises:
            TierError: the store does not work.
            ValueError: it is not open for writing.
        """
        ...


@runtime_checkable
class KeepsBlocks(Protocol):
    """What a store may bring besides: some blocks are evicted after all others of their namespace
    for a while, also after a restart. They are evicted all the same where nothing else is left, and
    for another namespace that has no room: a tier never fills up with what cannot go."""

    def keep(self, keys: Sequence[BlockKey], seconds: float, most: int) -> int:
        """Keep blocks for so many seconds, the first ones of `keys` for as long as no more than
        `most` blocks of the tier are kept, whoever had them kept. Of a prefix the end is evicted
        first. One that is kept already is kept for the longer time. How many of `keys` are kept
        now; those that are not there are ignored.

        Raises:
            TierError: the store does not work.
            ValueError: it is not open for writing, or `seconds` is not above 0.
        """
        ...

    def kept(self) -> int:
        """How many blocks of the tier are kept now, of all namespaces. It looks at each of them.

        Raises:
            TierError: the store does not work.
        """
        ...
