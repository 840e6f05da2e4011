"""Waiting that ends: permits and staging slots are granted by priority, then first come, first
served, and whoever waits can stop at its deadline, when its job is given up, or when what it waits
for breaks.

Everything here belongs to the event loop's thread; nothing is locked.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

from tiered_kv.memory import HostBlockPool
from tiered_kv.specs import SlotRef

__all__ = ["Lease", "Patience", "Permits", "Priority", "RightOfWay", "Staging"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long something is waited for."""

    deadline: float | None = None
    """Time of the event loop's clock, in seconds; None: until it comes."""
    given_up: asyncio.Future[None] | None = None
    """Done when the job is given up."""
    broken: asyncio.Future[None] | None = None
    """Done when the hop that is waited for is not to be used any more."""

    async def wait(self, what: asyncio.Future[T]) -> bool:
        """Whether `what` is done; False when patience ran out first. Never cancels it."""
        if what.done():
            return True
        timeout = None
        if self.deadline is not None:
            timeout = max(0.0, self.deadline - asyncio.get_running_loop().time())
        waiting: set[asyncio.Future[T] | asyncio.Future[None]] = {what}
        for end in (self.given_up, self.broken):
            if end is not None:
                waiting.add(end)
        await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return what.done()


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter(Generic[T]):
    future: asyncio.Future[T]
    grant: Callable[[], T | None]
    """Gives what is waited for, or None where there is too little of it."""
    passed_over: Callable[[], bool]
    """True where somebody behind may be served first."""


class _Turns(Generic[T]):
    """A line of waiters."""

    def __init__(self) -> None:
        self._line: deque[_Waiter[T]] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def join(
        self, grant: Callable[[], T | None], passed_over: Callable[[], bool] = lambda: False
    ) -> _Waiter[T]:
        """Stand in line."""
        waiter = _Waiter(asyncio.get_running_loop().create_future(), grant, passed_over)
        self._line.append(waiter)
        return waiter

    async def wait(self, waiter: _Waiter[T], patience: Patience) -> T | None:
        """What was granted when it was the waiter's turn; None when patience ran out."""
        if await patience.wait(waiter.future):
            return waiter.future.result()
        self._line.remove(waiter)
        return None

    def serve(self) -> bool:
        """Grant in order. A waiter that cannot be served holds up those behind it, so that large
        requests do not starve; the answer is False then."""
        for waiter in tuple(self._line):
            if waiter.passed_over():
                continue
            granted = waiter.grant()
            if granted is None:
                return False
            self._line.remove(waiter)
            waiter.future.set_result(granted)
        return True


class Priority(IntEnum):
    """Who goes first."""

    LOAD = 0
    """A request waits for it."""
    PROMOTE = 1
    """A request will want it soon."""
    STORE = 2
    """Nobody waits for it."""


class RightOfWay:
    """Lets the loads of one tier, or of the host memory, go before its stores: while one waits or
    runs, no store begins, but for one in each `seconds` of loads that leave no gap."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long a store gives way at most."""
        self._seconds = seconds
        self._loads = 0
        self._since = 0.0
        """When the loads began that stores give way to, or the last store that did not."""
        self._timer: asyncio.TimerHandle | None = None
        self._resume: list[Callable[[], None]] = []

    @contextmanager
    def load(self) -> Iterator[None]:
        """A load waits or runs meanwhile; also a promotion."""
        if not self._loads:
            self._since = asyncio.get_running_loop().time()
        self._loads += 1
        try:
            yield
        finally:
            self._loads -= 1
            if not self._loads:
                self._go_on()

    def when_free(self, resume: Callable[[], None]) -> None:
        """Call `resume` whenever a store may begin that could not before."""
        self._resume.append(resume)

    def may_store(self) -> bool:
        """Whether a store may begin now. Where not, those of `when_free` are called in time."""
        if not self._loads:
            return True
        loop = asyncio.get_running_loop()
        free_at = self._since + self._seconds
        if loop.time() >= free_at:
            return True
        if self._timer is None:
            self._timer = loop.call_at(free_at, self._go_on)
        return False

    def stored(self) -> None:
        """A store begins."""
        self._since = asyncio.get_running_loop().time()

    def _go_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for resume in self._resume:
            resume()


class Permits:
    """A number of calls that may run at once."""

    def __init__(self, count: int, way: RightOfWay | None = None) -> None:
        """`way`: what the calls give way to; None: nothing."""
        self._free = count
        self._lines: dict[Priority, _Turns[bool]] = {priority: _Turns() for priority in Priority}
        self._way = way
        if way is not None:
            way.when_free(self._serve)

    async def take(self, patience: Patience, priority: Priority = Priority.LOAD) -> bool:
        """Wait for a permit, behind those of the same priority or a higher one; False when
        patience ran out."""
        waiter = self._lines[priority].join(self._grant)
        self._serve()
        return await self._lines[priority].wait(waiter, patience) is not None

    @property
    def free(self) -> int:
        """Calls that may still begin."""
        return self._free

    def give(self) -> None:
        """Give a permit back."""
        self._free += 1
        self._serve()

    def _serve(self) -> None:
        for line in self._lines.values():
            if not line.serve():
                break

    def _grant(self) -> bool | None:
        if not self._free or not (self._way is None or self._way.may_store()):
            return None
        self._free -= 1
        if self._way is not None:
            self._way.stored()
        return True


class Lease:
    """Staging slots that one group of blocks holds."""

    def __init__(self, staging: Staging, tenant: str, slots: tuple[SlotRef, ...]) -> None:
        self.slots = slots
        self._staging = staging
        self._tenant = tenant
        self._held = frozenset(slots)

    def give_back(self, slots: Iterable[SlotRef] | None = None) -> None:
        """End the lease, or a part of it. Giving a slot back again does nothing."""
        ending = self._held if slots is None else self._held.intersection(slots)
        self._held -= ending
        if ending:
            self._staging.take_back(self._tenant, tuple(ending))


class Staging:
    """The pool's staging slots: loads before stores, in order of asking, a quota per tenant.

    A tenant is a tier that is read from, or all stores together. A tenant whose I/O hangs loses
    its quota only, and those that wait for it hold up nobody else: each tier has a reserve, enough
    for one group of its loads, that neither stores nor loads from other tiers take. (Where there
    are no more slots than tiers, only stores leave something.)
    """

    STORES = ""
    """The tenant of all stores; no tier has an empty name."""

    def __init__(self, memory: HostBlockPool, tiers: int) -> None:
        """`tiers` is how many tiers are read from."""
        self._memory = memory
        self._tiers = tiers
        self._total = total = memory.staging_slots
        self._load_quota = max(1, total // max(1, tiers)) if total else 0
        self._reserve = _group_of(self._load_quota)
        unreserved = total - tiers * self._reserve
        self._store_quota = max(1, min(total // 2, unreserved)) if total else 0
        self._used: Counter[str] = Counter()
        self._loads: dict[str, _Turns[Lease]] = {}
        """By tier; the one that was served last comes last."""
        self._stores: _Turns[Lease] = _Turns()

    def group(self, tenant: str, blocks: int) -> int:
        """How many blocks a group of at most `blocks` may have, so that two groups fit into the
        tenant's quota and can overlap. 0 where there is no staging at all."""
        return min(blocks, _group_of(self._quota(tenant)))

    @property
    def store_quota(self) -> int:
        """Slots that stores may hold together."""
        return self._store_quota

    async def lease(self, tenant: str, count: int, patience: Patience) -> Lease | None:
        """Wait for `count` slots; None when patience ran out.

        Raises:
            ValueError: the tenant's quota can never hold that many.
        """
        quota = self._quota(tenant)
        if count > quota:
            raise ValueError(f"{count} staging slots are beyond the quota of {quota}")

        def grant() -> Lease | None:
            slots = self._memory.lease(count, leave=min(self._owed(tenant), self._total - count))
            if slots is None:
                return None
            self._used[tenant] += count
            if tenant in self._loads:
                self._loads[tenant] = self._loads.pop(tenant)
            return Lease(self, tenant, slots)

        if tenant == self.STORES:
            turns = self._stores
        else:
            turns = self._loads.setdefault(tenant, _Turns())
        waiter = turns.join(grant, lambda: self._used[tenant] + count > quota)
        self._serve()
        lease = await turns.wait(waiter, patience)
        if lease is None:  # it may have held up others
            self._serve()
        return lease

    def take_back(self, tenant: str, slots: tuple[SlotRef, ...]) -> None:
        """Called by a lease."""
        self._used[tenant] -= len(slots)
        self._memory.give_back(slots)
        self._serve()

    def _owed(self, tenant: str) -> int:
        """Slots that must stay free for others: what is left of the other tiers' reserves."""
        is_load = tenant != self.STORES
        if is_load and self._total <= self._tiers:
            return 0
        held = sum(
            min(used, self._reserve)
            for other, used in self._used.items()
            if other not in (tenant, self.STORES)
        )
        return max(0, (self._tiers - is_load) * self._reserve - held)

    def _quota(self, tenant: str) -> int:
        return self._store_quota if tenant == self.STORES else self._load_quota

    def _serve(self) -> None:
        served = [self._loads[tier].serve() for tier in tuple(self._loads)]
        if all(served):
            self._stores.serve()


def _group_of(quota: int) -> int:
    """Slots of a group, so that two of them can overlap."""
    return max(1, quota // 2) if quota else 0
