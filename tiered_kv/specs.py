"""Where blocks are and where they shall go: frozen, picklable specs, jobs and results.

A spec names places in one medium, one place per block, in the order of the job's keys. A job's
source may be composite (`Parts`), a store's destination may fan out (`StoreTargets`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Self, TypeVar

from tiered_kv.values import CPU, GPU, BlockKey, BlockStatus, JobId, JobKind, Medium

__all__ = [
    "CpuSpec",
    "GpuBlock",
    "GpuSpec",
    "HopResult",
    "JobResult",
    "KeySpec",
    "LoadJob",
    "LoadStoreSpec",
    "Part",
    "Parts",
    "PromoteJob",
    "SlotRef",
    "StoreJob",
    "StoreTargets",
    "TransferSpec",
]


@dataclass(frozen=True, slots=True)
class LoadStoreSpec:
    """Base of all specs. Subclasses set `medium` and are what the registry is keyed by."""

    medium: ClassVar[Medium]

    @property
    def tier(self) -> str:
        """Name of the tier; the medium's name where the medium has one instance only."""
        return str(self.medium)

    def __len__(self) -> int:
        """Number of blocks."""
        raise NotImplementedError

    def take(self, positions: Sequence[int]) -> Self:
        """The spec of the blocks at these positions, in this order."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class GpuBlock:
    """One block in the engine's own KV cache."""

    group: int
    """KV group number."""
    block_ids: tuple[int, ...]
    """Engine block ids, in token order. Fewer than the group's chunk where only a part of the
    block is wanted."""
    first: int = 0
    """Index, inside the block, of the engine block that `block_ids[0]` holds."""


@dataclass(frozen=True, slots=True)
class GpuSpec(LoadStoreSpec):
    """Blocks in the engine's KV cache, whatever device that is on."""

    medium: ClassVar[Medium] = GPU
    blocks: tuple[GpuBlock, ...]

    def __len__(self) -> int:
        return len(self.blocks)

    def take(self, positions: Sequence[int]) -> Self:
        """The spec of the blocks at these positions, in this order."""
        return type(self)(tuple(self.blocks[i] for i in positions))


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A host slot as it was given out once: `generation` grows each time the slot is given out."""

    number: int
    generation: int


@dataclass(frozen=True, slots=True)
class CpuSpec(LoadStoreSpec):
    """Blocks in slots of the rank's host block pool."""

    medium: ClassVar[Medium] = CPU
    slots: tuple[SlotRef, ...]

    def __len__(self) -> int:
        return len(self.slots)

    def take(self, positions: Sequence[int]) -> Self:
        """The spec of the blocks at these positions, in this order."""
        return type(self)(tuple(self.slots[i] for i in positions))


@dataclass(frozen=True, slots=True)
class KeySpec(LoadStoreSpec):
    """Blocks in a key-addressed store. Each such medium has a subclass of its own."""

    name: str
    """Name of the tier."""
    keys: tuple[BlockKey, ...]

    @property
    def tier(self) -> str:
        """Name of the tier."""
        return self.name

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, positions: Sequence[int]) -> Self:
        """The spec of the blocks at these positions, in this order."""
        return type(self)(self.name, tuple(self.keys[i] for i in positions))


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks of a job that lie in one medium; `positions` are their places in the job."""

    spec: LoadStoreSpec
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """A composite source: every position of the job occurs in exactly one part."""

    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return sum(len(part.positions) for part in self.parts)


@dataclass(frozen=True, slots=True)
class StoreTargets:
    """Where a store goes: `first` frees the engine's blocks, `behind` is written from there.

    Each entry of `behind` names its blocks by position in the job.
    """

    first: CpuSpec | None
    """Host slots of the manager; None where no cpu tier is configured (the rank then leases
    staging slots)."""
    behind: tuple[Part, ...] = ()


def _yes() -> bool:
    return True


Src = TypeVar("Src", bound=LoadStoreSpec, covariant=True)
Dst = TypeVar("Dst", bound=LoadStoreSpec, covariant=True)


@dataclass(frozen=True, slots=True)
class TransferSpec(Generic[Src, Dst]):
    """One hop for a handler: move the blocks named `keys` from `src` to `dst`, in order."""

    src: Src
    dst: Dst
    keys: tuple[BlockKey, ...]
    commit: Callable[[], bool] = field(default=_yes, compare=False, repr=False)
    """Asked once per call, right before the step that cannot be taken back, by handlers that
    publish and by handlers that move between a store and the engine's cache (before a load's last
    copy, after a store's gathering copy). False: the call was given up; nothing may be published
    or written to the engine any more, and the answer is CANCELLED. Thread-safe."""
    after: object | None = field(default=None, compare=False, repr=False)
    """What the engine's device had been given to do when the job was submitted, as
    `tiered_kv.memory.KVCaches.fence` made it. Copies that read or write the engine's cache are
    ordered after it on the device. None: nothing to wait for."""
    compared: bool = field(default=False, compare=False, repr=False)
    """The blocks came from a tier that is not to be verified at every load, and were compared with
    their checksums as far as it is: a handler that writes to the engine's cache then compares their
    lengths alone."""

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Bring blocks into the engine's KV cache."""

    kind: ClassVar[JobKind] = JobKind.LOAD
    id: JobId
    request: str
    keys: tuple[BlockKey, ...]
    src: Parts
    dst: GpuSpec
    deadline: float | None = None
    """Seconds from its submission after which computing the blocks anew is better than waiting for
    them; None: the transfer engine's own deadline alone holds."""


@dataclass(frozen=True, slots=True)
class PromoteJob:
    """Bring blocks from stores into host slots of the manager, ahead of the load that needs them.

    The engine knows nothing of it: its blocks are not touched."""

    kind: ClassVar[JobKind] = JobKind.PROMOTE
    id: JobId
    """Counted by the manager, apart from the engine's jobs."""
    keys: tuple[BlockKey, ...]
    src: Parts
    dst: CpuSpec
    deadline: float
    """Seconds from its submission within which it must have begun to read a block."""


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Take blocks out of the engine's KV cache."""

    kind: ClassVar[JobKind] = JobKind.STORE
    id: JobId
    request: str
    keys: tuple[BlockKey, ...]
    src: GpuSpec
    dst: StoreTargets


@dataclass(frozen=True, slots=True)
class HopResult:
    """What one handler call did."""

    statuses: tuple[BlockStatus, ...]
    """One per block, in the order of the spec."""
    copied_bytes: int
    """Bytes that were really copied, counted where they are copied."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """The end of a job: no copy of it can write into, or read from, engine memory any more."""

    id: JobId
    kind: JobKind
    request: str
    keys: tuple[BlockKey, ...]
    statuses: tuple[BlockStatus, ...]
    """One per block, in job order."""
    copied_bytes: int
    """Bytes that entered (load) or left (store) the engine's KV cache."""
    seconds: float
    """From submission to the end."""

    @property
    def ok(self) -> bool:
        """Whether every block is in place."""
        return all(status is BlockStatus.OK for status in self.statuses)
