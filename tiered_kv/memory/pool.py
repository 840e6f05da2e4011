"""The host block pool: private memory of one rank, cut into page-aligned slots.

Slots `0 .. tier_slots - 1` are the host tier: the manager numbers them and hands them out, the
pool only checks generations. The slots behind them are staging: they are leased and given back
inside this process, and a slot that is not given back (its I/O hangs) simply stays out of use.

All slots can be used from the beginning, also those whose pages growth has not reached: a page then
comes when it is first touched, and a copy to or from the device is pageable. So the manager needs
not know how far growth is, and hands out the lowest numbers first, which growth reaches first.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tiered_kv.checksum import BlockChecksum
from tiered_kv.config import MIB, host_memory, readable_bytes
from tiered_kv.errors import ConfigError
from tiered_kv.memory.pages import Chunk, HostPages, PageState
from tiered_kv.specs import SlotRef
from tiered_kv.values import PAGE_BYTES

__all__ = ["HostBlockPool"]

START_BYTES = 256 * MIB
"""Ready when the pool is made: all of staging, if it is not more, and the first host slots."""

CHUNK_BYTES = 256 * MIB
"""Registered with the device's driver as one; in whole slots."""


class HostBlockPool:
    """One private anonymous mapping with a generation and a checksum per slot.

    Implements `tiered_kv.contracts.HostMemory`. Nothing is visible outside the process and nothing
    is left behind when it is killed. The first 256 MiB are resident, and registered with the
    device's driver where there is one, when the pool is made; `grow` takes the rest, in the
    background and in chunks of whole slots, so that no slot lies in two.

    Each generation of a slot is bound at most once: rewriting a slot needs a younger generation,
    so that a reader who finds the same generation bound before and after has read one content.

    Thread-safe; the lock is held for table look-ups only, never while bytes move.
    """

    def __init__(
        self,
        tier_slots: int,
        staging_slots: int,
        slot_bytes: int,
        *,
        spare_slots: int = 0,
        register: Callable[[int, int], None] | None = None,
        unregister: Callable[[int], None] | None = None,
    ) -> None:
        """Map `(tier_slots + staging_slots + spare_slots) * slot_bytes` bytes; `slot_bytes` is a
        multiple of 4,096. Takes as long as 256 MiB need to become resident (tenths of a second).

        Args:
            tier_slots: slots of the host tier.
            staging_slots: slots that are leased.
            slot_bytes: bytes of each.
            spare_slots: slots beside those, the last ones, whose user counts their generations.
            register: pins memory (address, bytes) for the device, and raises where that is refused:
                the pool is pageable then. Called once per chunk. None without such a device.
            unregister: undoes it, given the address; called by `close`.

        Raises:
            ValueError: a number is negative, there is no slot, or `slot_bytes` is not a multiple
                of the page size.
            ConfigError: the machine or a control group has less memory left, or the kernel refuses
                to map that much.
        """
        if min(tier_slots, staging_slots, spare_slots) < 0 or tier_slots + staging_slots == 0:
            raise ValueError(
                f"a pool needs at least one slot, not {tier_slots} for the host tier and "
                f"{staging_slots} for staging"
            )
        if slot_bytes <= 0 or slot_bytes % PAGE_BYTES:
            raise ValueError(f"slot_bytes is {slot_bytes}; expected a multiple of {PAGE_BYTES}")
        self.tier_slots = tier_slots
        self.staging_slots = staging_slots
        self.spare_slots = spare_slots
        self._slot_bytes = slot_bytes
        slots = tier_slots + staging_slots + spare_slots
        _require_memory(tier_slots, staging_slots + spare_slots, slot_bytes)
        chunks = tuple(_chunks(tier_slots, staging_slots + spare_slots, slot_bytes))
        at_once = 0
        ready = 0
        while at_once < len(chunks) and ready + chunks[at_once].nbytes <= START_BYTES:
            ready += chunks[at_once].nbytes
            at_once += 1
        self._pages = HostPages(
            slots * slot_bytes, chunks, at_once, register=register, unregister=unregister
        )
        self._whole = self._pages.view
        self._views: list[memoryview | None] = [None] * slots
        self._arrays: list[npt.NDArray[np.uint8] | None] = [None] * slots
        self._lock = threading.Lock()
        self._closed = False
        self._generations = [0] * slots
        self._checksums: list[BlockChecksum | None] = [None] * slots
        self._used_up = [False] * slots
        self._free = list(range(tier_slots, tier_slots + staging_slots))
        self._leased: set[int] = set()
        self._stray_returns = 0

    # ------------------------------------------------------------------------------ HostMemory

    @property
    def slot_bytes(self) -> int:
        """Bytes of each slot; a multiple of the page size, page-aligned."""
        return self._slot_bytes

    def begin(self, slot: SlotRef) -> memoryview | None:
        """See `begin_all`, of one slot."""
        return self.begin_all((slot,))[0]

    def begin_all(self, slots: Sequence[SlotRef]) -> list[memoryview | None]:
        """Each whole slot, writable, its old content forgotten.

        None when the caller's use of the slot is over: a younger generation was begun, this one
        was bound already (it is written once) or given back, or the pool is closed.

        Raises:
            ValueError: the pool has no slot of that number; none was begun then.
        """
        numbers = self._check_all(slots)
        begun: list[memoryview | None] = []
        with self._lock:
            if self._closed:
                return [None] * len(numbers)
            generations, checksums, used_up = self._generations, self._checksums, self._used_up
            for number, slot in zip(numbers, slots, strict=True):
                generation, known = slot.generation, generations[number]
                if generation < known or (generation == known and used_up[number]):
                    begun.append(None)
                    continue
                generations[number] = generation
                checksums[number] = None
                used_up[number] = False
                begun.append(self._views[number] or self._view(number))
        return begun

    def bind(self, slot: SlotRef, checksum: BlockChecksum) -> bool:
        """See `bind_all`, of one slot."""
        return self.bind_all((slot,), (checksum,))[0]

    def bind_all(self, slots: Sequence[SlotRef], checksums: Sequence[BlockChecksum]) -> list[bool]:
        """Declare the first `checksum.length` bytes of each slot whole.

        False when the bytes are not to be used: a younger generation was begun meanwhile, or this
        one is bound already.

        Raises:
            ValueError: the pool has no slot of that number, the length exceeds a slot, or there
                are not as many checksums as slots; none was bound then.
        """
        numbers = self._check_all(slots)
        for length in {checksum.length for checksum in checksums}:
            if not 0 <= length <= self._slot_bytes:
                raise ValueError(
                    f"a block of {length} bytes cannot lie in a slot of {self._slot_bytes}"
                )
        bound: list[bool] = []
        with self._lock:
            closed, generations, used_up = self._closed, self._generations, self._used_up
            for number, slot, checksum in zip(numbers, slots, checksums, strict=True):
                usable = not (closed or slot.generation != generations[number] or used_up[number])
                if usable:
                    self._checksums[number] = checksum
                    used_up[number] = True
                bound.append(usable)
        return bound

    def checksum(self, slot: SlotRef) -> BlockChecksum | None:
        """See `checksums`, of one slot."""
        return self.checksums((slot,))[0]

    def checksums(self, slots: Sequence[SlotRef]) -> list[BlockChecksum | None]:
        """What was bound under the generation of each slot, else None.

        Raises:
            ValueError: the pool has no slot of that number.
        """
        numbers = self._check_all(slots)
        with self._lock:
            if self._closed:
                return [None] * len(numbers)
            bound, generations = self._checksums, self._generations
            return [
                bound[number] if slot.generation == generations[number] else None
                for number, slot in zip(numbers, slots, strict=True)
            ]

    def view(self, slot: SlotRef) -> memoryview | None:
        """See `views`, of one slot."""
        return self.views((slot,))[0]

    def views(self, slots: Sequence[SlotRef]) -> list[memoryview | None]:
        """The bound bytes of each slot (their exact length), read-only, else None. After reading
        them ask `checksums` again: None means that they may have changed meanwhile.

        Raises:
            ValueError: the pool has no slot of that number.
        """
        numbers = self._check_all(slots)
        views: list[memoryview | None] = []
        with self._lock:
            if self._closed:
                return [None] * len(numbers)
            bound, generations = self._checksums, self._generations
            for number, slot in zip(numbers, slots, strict=True):
                checksum = bound[number]
                if checksum is None or slot.generation != generations[number]:
                    views.append(None)
                else:
                    whole = self._views[number] or self._view(number)
                    views.append(whole.toreadonly()[: checksum.length])
        return views

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
        """Number of slots, all kinds together."""
        return self.tier_slots + self.staging_slots + self.spare_slots

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

    # ------------------------------------------------------------------------------- the pages

    def grow(self, done: Callable[[PageState], None] | None = None) -> None:
        """Make the rest resident and registered on a daemon thread, and tell `done` there what
        came of it. `done` is not called where `close` comes first. A second call does nothing."""
        self._pages.grow(done)

    def wait_grown(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until growth is over; whether it is."""
        return self._pages.wait_grown(timeout)

    @property
    def pinned(self) -> bool:
        """Whether all of the pool is registered with the device's driver, now."""
        return self._pages.pinned

    def pinned_slot(self, number: int) -> bool:
        """Whether copies between the device and this slot need no detour through the driver's own
        buffers.

        Raises:
            ValueError: the pool has no slot of that number.
        """
        return self._pages.pinned_at(self._check(SlotRef(number, 0)) * self._slot_bytes)

    def chunk_of(self, number: int) -> int:
        """Which chunk a slot lies in. A driver refuses one copy over memory that it was told of in
        two parts, so a copy of neighbouring slots ends where their chunk does.

        Raises:
            ValueError: the pool has no slot of that number.
        """
        return self._pages.chunk_at(self._check(SlotRef(number, 0)) * self._slot_bytes)

    def state(self) -> PageState:
        """How much of the pool is resident, in huge pages, and pinned, and why not more."""
        return self._pages.state()

    def modes(self) -> Mapping[str, str]:
        """What is in effect, in words: keys "memory" (pinned or pageable), "pages" (huge or base)
        and "prefault", with amounts and reasons."""
        return self._pages.state().modes()

    def close(self) -> bool:
        """Forget all slots, end growth, unregister, and unmap unless somebody still holds a view.
        No device copies to or from the pool any more. Waits at most a second for growth.
        Idempotent, never raises.

        Returns:
            True when the memory is unmapped. False when a view is exported (an I/O may still run:
            the memory then goes with its last view), or growth hangs in the kernel or the driver.
        """
        with self._lock:
            self._closed = True
            self._views = []
            self._arrays = []
            self._free = []
            self._whole = memoryview(b"")
        return self._pages.close()

    def _check(self, slot: SlotRef) -> int:
        if not 0 <= slot.number < len(self._generations):
            raise ValueError(
                f"slot {slot.number} is outside the pool of {len(self._generations)} slots; "
                "the manager and this rank disagree on the capacity of the host tier"
            )
        return slot.number

    def _check_all(self, slots: Sequence[SlotRef]) -> list[int]:
        numbers = [slot.number for slot in slots]
        if numbers and not 0 <= min(numbers) <= max(numbers) < len(self._generations):
            for slot in slots:
                self._check(slot)
        return numbers

    def _view(self, number: int) -> memoryview:
        view = self._views[number]
        if view is None:
            start = number * self._slot_bytes
            view = self._whole[start : start + self._slot_bytes]
            self._views[number] = view
        return view


def _chunks(tier_slots: int, staging_slots: int, slot_bytes: int) -> Iterator[Chunk]:
    """In the order of growth: staging, which is in use all the time, then the host slots, whose
    first chunk is what remains of `START_BYTES`."""
    per_chunk = max(1, CHUNK_BYTES // slot_bytes)
    at_start = max(0, START_BYTES // slot_bytes - staging_slots) or per_chunk
    yield from _split(tier_slots, tier_slots + staging_slots, per_chunk, per_chunk, slot_bytes)
    yield from _split(0, tier_slots, at_start, per_chunk, slot_bytes)


def _split(first: int, end: int, size: int, later: int, slot_bytes: int) -> Iterator[Chunk]:
    while first < end:
        count = min(size, end - first)
        yield Chunk(first * slot_bytes, count * slot_bytes)
        first += count
        size = later


def _require_memory(tier_slots: int, staging_slots: int, slot_bytes: int) -> None:
    wanted = (tier_slots + staging_slots) * slot_bytes
    room = host_memory()
    if wanted > room.free_bytes:
        raise ConfigError(
            f"the host block pool of this rank needs {wanted:,} bytes ({readable_bytes(wanted)}): "
            f"{tier_slots:,} host slots + {staging_slots:,} staging slots, of {slot_bytes:,} bytes "
            f"each; but {room.place} has {room.free_bytes:,} bytes "
            f"({readable_bytes(room.free_bytes)}) left: {room.terms}. Lower the capacity of the "
            "cpu tier (and limits.staging), or make room"
        )
