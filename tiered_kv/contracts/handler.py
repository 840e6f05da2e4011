"""The contract of a handler: moves the bytes of one hop between two media."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts.device import DeviceStaging
from tiered_kv.contracts.store import BlockStore
from tiered_kv.contracts.verification import Verification, VerifyAlways
from tiered_kv.errors import UnsupportedError
from tiered_kv.specs import HopResult, LoadStoreSpec, SlotRef, TransferSpec
from tiered_kv.values import CacheGeometry, ChecksumKind

__all__ = ["HandlerContext", "HandlerFactory", "HostMemory", "TransferHandler"]

S_contra = TypeVar("S_contra", bound=LoadStoreSpec, contravariant=True)
D_contra = TypeVar("D_contra", bound=LoadStoreSpec, contravariant=True)
S = TypeVar("S", bound=LoadStoreSpec)
D = TypeVar("D", bound=LoadStoreSpec)


class HostMemory(Protocol):
    """The rank's host block pool, as handlers see it.

    A slot's bytes are written between `begin` and `bind`, and read only under the generation that
    it was given out with. Each generation is bound at most once: rewriting needs a younger one.
    Thread-safe; none of these blocks.
    """

    @property
    def slot_bytes(self) -> int:
        """Bytes of each slot; a multiple of the page size, page-aligned."""
        ...

    @property
    def pinned(self) -> bool:
        """Whether all slots are registered with the engine's device now, so that copies to and
        from it need no detour. Copies are right without it."""
        ...

    def chunk_of(self, number: int) -> int:
        """Which piece of memory, as far as the device's driver is concerned, this slot lies in:
        one copy must not cross from one into another."""
        ...

    def begin(self, slot: SlotRef) -> memoryview | None:
        """The whole slot, writable, its old content forgotten. None when a younger generation of
        the slot was begun already: the caller's use of it is over (status CANCELLED)."""
        ...

    def begin_all(self, slots: Sequence[SlotRef]) -> list[memoryview | None]:
        """`begin` of each slot; for many slots it takes a third of the time, and so do the other
        methods that take several."""
        ...

    def bind(self, slot: SlotRef, checksum: BlockChecksum) -> bool:
        """Declare the first `checksum.length` bytes whole. False when a younger generation was
        begun meanwhile: the bytes are not to be used."""
        ...

    def bind_all(self, slots: Sequence[SlotRef], checksums: Sequence[BlockChecksum]) -> list[bool]:
        """`bind` of each slot."""
        ...

    def checksum(self, slot: SlotRef) -> BlockChecksum | None:
        """What was bound under this generation, else None."""
        ...

    def checksums(self, slots: Sequence[SlotRef]) -> list[BlockChecksum | None]:
        """`checksum` of each slot."""
        ...

    def view(self, slot: SlotRef) -> memoryview | None:
        """The bound bytes (their exact length), else None. After reading them the caller asks
        `checksum` again: None means that they may have changed meanwhile."""
        ...

    def views(self, slots: Sequence[SlotRef]) -> list[memoryview | None]:
        """`view` of each slot."""
        ...


class TransferHandler(Protocol[S_contra, D_contra]):
    """Moves blocks for one (source, destination) pair of one tier.

    `tiered_kv.testing.conformance` proves these rules of any handler. Runs inside the transfer
    engine's event loop. Blocking calls go to the context's executor, once per call, never once per
    block. Cancellation, deadlines and health are the engine's work.
    """

    async def transfer(self, spec: TransferSpec[S_contra, D_contra]) -> HopResult:
        """Move the blocks; answer per block.

        Guaranteed by the caller: `src`, `dst` and `keys` are equally long; destination slots are
        leased to this call. Owed: OK only where every byte is in place (and, for a hop that writes
        to the engine's cache, was verified against its checksum before the first byte is
        written, unless `HandlerContext.verification` says that this is not due). The call returns
        only when no copy of it can read or write the memory any more; if the awaiting task is
        cancelled it goes on in its threads and the caller keeps the slots. A handler that moves
        blocks between a store and the engine's cache directly asks `spec.commit()` before a load's
        last copy and after a store's gather: False means that the job was given up, and the blocks
        are CANCELLED and leave no trace.

        `copied_bytes` counts what was copied, whatever became of it afterwards.

        Raises:
            TierError: the whole tier does not work, or the handler was closed; counts as
                TIER_ERROR for every block.
            ValueError: `src`, `dst` and `keys` are not equally long.
        """
        ...

    def modes(self) -> Mapping[str, str]:
        """What is in effect, for logs, `check` and stats: `{"io": "direct"}`."""
        ...

    def close(self) -> None:
        """Let go of resources; no call is running. Idempotent."""
        ...


def _no_staging() -> DeviceStaging:
    raise UnsupportedError("the engine's KV caches are not registered: nothing to stage for")


def _xxh3() -> ChecksumKind:
    return ChecksumKind.XXH3


@dataclass(frozen=True, slots=True)
class HandlerContext:
    """What a handler may use; made once per pair and tier."""

    geometry: CacheGeometry
    memory: HostMemory
    executor: Executor
    """Bounded daemon threads of this tier alone."""
    tier: str
    """Name of the tier that the pair touches; "cpu" for gpu <-> cpu."""
    store: BlockStore | None = None
    """The tier's store, where the tier is a key-addressed store."""
    caches: Any = None
    """The engine's KV caches as they were registered; only gpu handlers read them."""
    staging: Callable[[], DeviceStaging] = field(default=_no_staging)
    """Makes this handler's own staging on the engine's device, which is bounded and taken once.
    Raises `UnsupportedError` where the engine's caches are not registered."""
    capture: Callable[[], ChecksumKind] = field(default=_xxh3)
    """Which checksum to take of blocks captured from now on: `wsum` as soon as a direct way
    between device and disk is in use, since both ends of it can compute that."""
    verification: Verification = field(default=VerifyAlways())
    """Which blocks a handler that loads from a store into the engine's cache compares with their
    checksums. A hop between host memory and a store needs it not: the engine verifies there."""


HandlerFactory = Callable[[HandlerContext], TransferHandler[S, D]]
