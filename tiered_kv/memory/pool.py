"""The host block pool: private memory of one rank, cut into page-aligned slots.

Slots `0 .. tier_slots - 1` are the host tier: the manager numbers them and hands them out, the
pool only checks generations. The slots behind them are staging: they are leased and given back
inside this process, and a slot that is not given back (its I/O hangs) simply stays out of use.
"""

from __future__ import annotations

import heapq
import mmap
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiered_kv.checksum import BlockChecksum
from tiered_kv.errors import ConfigError
from tiered_kv.specs import SlotRef
from tiered_kv.values import PAGE_BYTES

__all__ = ["HostBlockPool"]

_THP_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class HostBlockPool:
    """One private anonymous mapping with a generation and a checksum per slot.

    Implements `tiered_kv.contracts.HostMemory`. Nothing is visible outside the process and nothing
    is left behind when it is killed. Pages are touched, and so become resident, when a slot is
    first written.

    Each generation of a slot is bound at most once: rewriting a slot needs a younger generation,
    so that a reader who finds the same generation bound before and after has read one content.

    Thread-safe; the lock is held for table look-ups only, never while bytes move.
    """

    def __init__(self, tier_slots: int, staging_slots: int, slot_bytes: int) -> None:
        """Map `(tier_slots + staging_slots) * slot_bytes` bytes; `slot_bytes` is a multiple of
        4,096.

        Raises:
            ValueError: a number is negative, there is no slot, or `slot_bytes` is not a multiple
                of the page size.
            ConfigError: the kernel refuses to map that much.
        """
        if tier_slots < 0 or staging_slots < 0 or tier_slots + staging_slots == 0:
            raise ValueError(
                f"a pool needs at least one slot, not {tier_slots} for the host tier and "
                f"{staging_slots} for staging"
            )
        if slot_bytes <= 0 or slot_bytes % PAGE_BYTES:
            raise ValueError(f"slot_bytes is {slot_bytes}; expected a multiple of {PAGE_BYTES}")
        self.tier_slots = tier_slots
        self.staging_slots = staging_slots
        self._slot_bytes = slot_bytes
        slots = tier_slots + staging_slots
        self._map = _map_private(slots * slot_bytes)
        self._huge_pages = _ask_for_huge_pages(self._map)
        self._whole = memoryview(self._map)
        self._views: list[memoryview | None] = [None] * slots
        self._arrays: list[npt.NDArray[np.uint8] | None] = [None] * slots
        self._lock = threading.Lock()
        self._closed = False
        self._generations = [0] * slots
        self._checksums: list[BlockChecksum | None] = [None] * slots
        self._used_up = [False] * slots
        self._free = list(range(tier_slots, slots))
        self._leased: set[int] = set()
        self._stray_returns = 0

    # ------------------------------------------------------------------------------ HostMemory

    @property
    def slot_bytes(self) -> int:
        """Bytes of each slot; a multiple of the page size, page-aligned."""
        return self._slot_bytes

    def begin(self, slot: SlotRef) -> memoryview | None:
        """The whole slot, writable, its old content forgotten.

        None when the caller's use of the slot is over: a younger generation was begun, this one
        was bound already (it is written once) or given back, or the pool is closed.

        Raises:
            ValueError: the pool has no slot of that number.
        """
        number = self._check(slot)
        with self._lock:
            known = self._generations[number]
            if self._closed or slot.generation < known:
                return None
            if slot.generation == known and self._used_up[number]:
                return None
            self._generations[number] = slot.generation
            self._checksums[number] = None
            self._used_up[number] = False
            return self._view(number)

    def bind(self, slot: SlotRef, checksum: BlockChecksum) -> bool:
        """Declare the first `checksum.length` bytes whole.

        False when the bytes are not to be used: a younger generation was begun meanwhile, or this
        one is bound already.

        Raises:
            ValueError: the pool has no slot of that number, or the length exceeds a slot.
        """
        number = self._check(slot)
        if not 0 <= checksum.length <= self._slot_bytes:
            raise ValueError(
                f"a block of {checksum.length} bytes cannot lie in a slot of {self._slot_bytes}"
            )
        with self._lock:
            stale = slot.generation != self._generations[number]
            if self._closed or stale or self._used_up[number]:
                return False
            self._checksums[number] = checksum
            self._used_up[number] = True
            return True

    def checksum(self, slot: SlotRef) -> BlockChecksum | None:
        """What was bound under this generation, else None.

        Raises:
            ValueError: the pool has no slot of that number.
        """
        number = self._check(slot)
        with self._lock:
            if self._closed or slot.generation != self._generations[number]:
                return None
            return self._checksums[number]

    def view(self, slot: SlotRef) -> memoryview | None:
        """The bound bytes (their exact length), read-only, else None. After reading them ask
        `checksum` again: None means that they may have changed meanwhile.

        Raises:
            ValueError: the pool has no slot of that number.
        """
        number = self._check(slot)
        with self._lock:
            checksum = self._checksums[number]
            if self._closed or checksum is None or slot.generation != self._generations[number]:
                return None
            return self._view(number)[: checksum.length].toreadonly()

    # --------------------------------------------------------------------------------- staging

    def lease(self, count: int, *, leave: int = 0) -> tuple[SlotRef, ...] | None:
        """Lease staging slots, lowest numbers first; None when fewer than `count + leave` are
        free (`leave` keeps headroom for others). Never waits: the caller works in smaller groups
        or comes back when slots were given back.

        Raises:
            ValueError: `count` or `leave` is negative.
        """
        if count < 0 or leave < 0:
            raise ValueError(f"cannot lease {count} slots and leave {leave}")
        with self._lock:
            if count and (self._closed or len(self._free) < count + leave):
                return None
            numbers = [heapq.heappop(self._free) for _ in range(count)]
            self._leased.update(numbers)
            for number in numbers:
                self._generations[number] += 1
                self._checksums[number] = None
                self._used_up[number] = False
            return tuple(SlotRef(number, self._generations[number]) for number in numbers)

    def give_back(self, slots: Iterable[SlotRef]) -> None:
        """End the lease of staging slots that no I/O touches any more; their bytes are forgotten.

        A slot that is not on lease under this generation is counted in `stray_returns` and
        otherwise ignored.
        """
        with self._lock:
            for slot in slots:
                number = slot.number
                if number not in self._leased or self._generations[number] != slot.generation:
                    self._stray_returns += 1
                    continue
                self._leased.remove(number)
                self._checksums[number] = None
                self._used_up[number] = True
                heapq.heappush(self._free, number)

    @property
    def leased(self) -> int:
        """Staging slots on lease (in use, or quarantined until their I/O returns)."""
        return len(self._leased)

    @property
    def free_staging(self) -> int:
        """Staging slots that can be leased now."""
        return len(self._free)

    @property
    def stray_returns(self) -> int:
        """How often a slot was given back that was not on lease: 0 in a sound program."""
        return self._stray_returns

    # ------------------------------------------------------------------------------- the bytes

    @property
    def slots(self) -> int:
        """Number of slots, host tier and staging together."""
        return self.tier_slots + self.staging_slots

    def as_array(self, number: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot, whatever its generation, as a writable array of `slot_bytes`.

        Raises:
            ValueError: the pool has no slot of that number, or is closed.
        """
        self._check(SlotRef(number, 0))
        with self._lock:
            if self._closed:
                raise ValueError("the host block pool is closed")
            array = self._arrays[number]
            if array is None:
                array = np.frombuffer(self._view(number), np.uint8)
                self._arrays[number] = array
            return array

    def modes(self) -> Mapping[str, str]:
        """What is in effect: `{"memory": "pageable", "pages": "huge" | "base"}`."""
        return {"memory": "pageable", "pages": "huge" if self._huge_pages else "base"}

    def close(self) -> bool:
        """Forget all slots; unmap unless somebody still holds a view. Idempotent, never raises.

        Returns:
            True when the memory is unmapped. False when a view is exported (an I/O may still
            run): the memory then goes with its last view.
        """
        with self._lock:
            self._closed = True
            self._views = []
            self._arrays = []
            self._free = []
            self._whole = memoryview(b"")
            try:
                self._map.close()
            except BufferError:
                return False
            return True

    def _check(self, slot: SlotRef) -> int:
        if not 0 <= slot.number < len(self._generations):
            raise ValueError(
                f"slot {slot.number} is outside the pool of {len(self._generations)} slots; "
                "the manager and this rank disagree on the capacity of the host tier"
            )
        return slot.number

    def _view(self, number: int) -> memoryview:
        view = self._views[number]
        if view is None:
            start = number * self._slot_bytes
            view = self._whole[start : start + self._slot_bytes]
            self._views[number] = view
        return view


def _map_private(length: int) -> mmap.mmap:
    # MAP_PRIVATE, since a shared anonymous mapping is shmem, where huge pages are not given.
    try:
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"cannot map {length:,} bytes of host memory for the block pool ({error}); lower the "
            "capacity of the cpu tier, or raise the memory limit of this process"
        ) from error


def _ask_for_huge_pages(mapping: mmap.mmap) -> bool:
    """Whether huge pages are in effect: asked for, accepted, and not switched off."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return False
    try:
        mapping.madvise(advice)
        return "[never]" not in _THP_SWITCH.read_text(encoding="ascii")
    except OSError:
        return False
