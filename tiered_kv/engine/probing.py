"""Background reads of stored blocks, which tell whether a tier works and how fast it is, so that no
request has to find out.

A tier is probed when its store opens, when its breaker is half-open, soon after a call that failed,
and when nothing was loaded from it for a while. The blocks go by the tier's own load hop into slots
that nobody else uses, in a thread that its loads do not need, and are verified; what is corrupt is
dropped like by a load. Where the store has no block it is asked how full it is. At most one probe
per tier runs, and while one hangs there is no further one.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tiered_kv.contracts import BlockStore
from tiered_kv.engine.health import HealthBoard, Pulse
from tiered_kv.engine.hops import LiveHop
from tiered_kv.engine.jobs import JobTable
from tiered_kv.engine.loop import LoopThread
from tiered_kv.engine.recent import RecentKeys
from tiered_kv.memory import HostBlockPool
from tiered_kv.specs import CpuSpec, HopResult, KeySpec, SlotRef, TransferSpec
from tiered_kv.stats import StatsRecorder
from tiered_kv.values import BlockKey, BlockStatus

__all__ = ["PROBE_BYTES", "Prober", "is_due"]

T = TypeVar("T")

PROBE_BYTES = 4 * 2**20
"""The most that a probe reads; at least one block."""

FIRST_BYTES = 2**20
"""What it reads first; the rest where that went quickly."""

PROBE_SECONDS = 0.2
"""About how long it may take, by what is known of the tier's speed."""

QUICK_SECONDS = 0.05

ACTIVE_SECONDS = 5.0
"""A tier is measured so often, by loads or by probes, while the engine makes steps; ..."""

IDLE_SECONDS = 120.0
"""... and so often while it has made none for `IDLE_AFTER_SECONDS`."""

IDLE_AFTER_SECONDS = 60.0

AGAIN_SECONDS = 1.0
"""After a call that failed; and while there is something to measure that is not known yet, so many
seconds more each time."""

TICK_SECONDS = 0.25

MOST_LISTED = 1024
"""Keys that are listed of a store of whose blocks nothing is known."""


@dataclass(slots=True, eq=False)
class _Probed:
    """A tier, and its probes."""

    live: LiveHop
    spec: type[KeySpec]
    recent: RecentKeys
    slots: range
    """Numbers of its slots."""
    generation: int = 0
    late: bool = False
    """Whether the probe that runs has run out of time."""
    task: asyncio.Task[None] | None = None
    unmeasured: int = 0
    """Probes one behind the other that began without the speed being known."""
    ended: float | None = None
    """When the last probe ended, or ran out of time; monotonic seconds."""


def is_due(pulse: Pulse, ended: float | None, now: float, *, idle: bool, unmeasured: int) -> bool:
    """Whether a tier is to be probed now, no load of it being on its way.

    Args:
        pulse: how it is.
        ended: when its last probe ended; None: there was none.
        now: monotonic seconds.
        idle: the engine has made no step for a while.
        unmeasured: how often blocks were read that were too few to tell the speed, and once more
            where there are blocks to read; 0: there is nothing to read.
    """
    if not pulse.closed:
        return pulse.due
    if ended is None or ended < pulse.opened:
        return True
    if pulse.suspect:
        return now - ended >= AGAIN_SECONDS
    if pulse.speed is None and unmeasured:
        return now - ended >= min(AGAIN_SECONDS * unmeasured, ACTIVE_SECONDS)
    last = max(ended, pulse.measured_at or 0.0)
    return now - last >= (IDLE_SECONDS if idle else ACTIVE_SECONDS)


class Prober:
    """Probes the tiers of one engine. On the event loop's thread, where not said otherwise."""

    def __init__(
        self,
        hops: Mapping[str, tuple[LiveHop, type[KeySpec], RecentKeys]],
        *,
        loop: LoopThread,
        board: HealthBoard,
        memory: HostBlockPool,
        jobs: JobTable,
        stats: StatsRecorder,
        limit: float,
        ticked: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            hops: by tier, the hop by which it is read into host slots, its spec, and the blocks
                that are known to lie in it.
            loop: whose thread does it.
            board: is told, and says what is due.
            memory: its spare slots are used, each tier an equal share.
            jobs: waits for probes before the engine ends.
            stats: counts them.
            limit: seconds after which a probe counts as hanging.
            ticked: called a few times a second.
            clock: monotonic seconds, the board's.
        """
        self._loop = loop
        self._board = board
        self._memory = memory
        self._jobs = jobs
        self._stats = stats
        self._limit = limit
        self._ticked = ticked
        self._clock = clock
        self._active = clock()
        self._stopped = False
        self._first = threading.Condition()
        share = memory.spare_slots // max(1, len(hops))
        begin = memory.slots - memory.spare_slots
        self._tiers: dict[str, _Probed] = {}
        for place, (tier, (live, spec, recent)) in enumerate(hops.items() if share else ()):
            start = begin + place * share
            self._tiers[tier] = _Probed(live, spec, recent, range(start, start + share))
            board.probed(live.hop)

    def start(self) -> None:
        """Begin. Any thread."""
        if self._tiers:
            self._loop.call(self._tick)

    def stop(self) -> None:
        """Begin no further probe. Any thread."""
        self._stopped = True

    def active(self) -> None:
        """The engine makes a step. Any thread."""
        self._active = self._clock()

    def wait_first(self, timeout: float) -> bool:
        """Block until each tier that is open was probed, at most `timeout` seconds; whether that
        is so. Any thread but the loop's."""
        tiers = self._tiers.values()
        with self._first:
            return self._first.wait_for(lambda: all(map(self._was_probed, tiers)), timeout)

    def _was_probed(self, one: _Probed) -> bool:
        pulse = self._board.pulse(one.live.hop)
        return pulse is None or (one.ended is not None and one.ended >= pulse.opened)

    def _tick(self) -> None:
        if self._stopped:
            return
        self._loop.loop.call_later(TICK_SECONDS, self._tick)
        self._ticked()
        now = self._clock()
        idle = now - self._active >= IDLE_AFTER_SECONDS
        for tier, one in self._tiers.items():
            if one.task is not None and not one.task.done():
                continue
            pulse = self._board.pulse(one.live.hop)
            if pulse is None or one.live.running > self._board.hanging(one.live.hop):
                continue
            unmeasured = one.unmeasured + 1 if one.recent else 0
            if is_due(pulse, one.ended, now, idle=idle, unmeasured=unmeasured):
                one.task = self._loop.spawn(self._probe(tier, one, pulse))

    async def _probe(self, tier: str, one: _Probed, pulse: Pulse) -> None:
        one.late = False
        one.unmeasured = one.unmeasured + 1 if pulse.speed is None else 0
        self._jobs.behind(1)
        try:
            outcome, copied = await self._run(one, pulse)
            self._stats.probe(tier, "late" if one.late else outcome, copied_bytes=copied)
        finally:
            self._jobs.behind(-1)
            self._ended(one)

    def _ended(self, one: _Probed) -> None:
        with self._first:
            one.ended = self._clock()
            self._first.notify_all()

    async def _run(self, one: _Probed, pulse: Pulse) -> tuple[str, int]:
        """(outcome, bytes that were read)."""
        size = self._memory.slot_bytes
        most = max(1, min(len(one.slots), PROBE_BYTES // size))
        first = FIRST_BYTES
        if pulse.speed is not None:
            first = min(first, int(pulse.speed * PROBE_SECONDS))
        first = max(1, min(most, first // size))
        keys = await self._keys(one, most)
        if keys is None:
            return "failed", 0
        if not keys:
            task = one.live.ask(_asked_how_full, self._limit, decides=True)
            answered = await self._patiently(one, task)
            return ("answered" if answered else "failed"), 0
        began = self._clock()
        result = await self._read(one, keys[:first])
        copied = result.copied_bytes
        if keys[first:] and copied and self._clock() - began < QUICK_SECONDS:
            result = await self._read(one, keys[first:])
            copied += result.copied_bytes
        if BlockStatus.OK in result.statuses:
            return "read", copied
        told = {BlockStatus.MISSING, BlockStatus.CORRUPT} & set(result.statuses)
        return ("answered" if told else "failed"), copied

    async def _keys(self, one: _Probed, most: int) -> list[BlockKey] | None:
        """Blocks to read; none where the store holds none, None where it could not say."""
        if not one.recent:
            task = one.live.ask(_some_keys, self._limit, decides=False)
            found = await self._patiently(one, task)
            if found is None:
                return None
            one.recent.add(found)
        return one.recent.some(most)

    async def _read(self, one: _Probed, keys: list[BlockKey]) -> HopResult:
        one.generation += 1
        slots = CpuSpec(tuple(SlotRef(n, one.generation) for n in one.slots[: len(keys)]))
        spec = TransferSpec(one.spec(one.live.hop.tier, tuple(keys)), slots, tuple(keys))
        return await self._patiently(one, one.live.begin(spec, self._limit, probe=True))

    async def _patiently(self, one: _Probed, task: asyncio.Task[T]) -> T:
        """Await what may hang; nobody else waits for it for longer than the limit."""
        await asyncio.wait({task}, timeout=self._limit)
        if not task.done():
            one.late = True
            self._ended(one)
        return await task


def _asked_how_full(store: BlockStore) -> bool:
    store.stat()
    return True


def _some_keys(store: BlockStore) -> list[BlockKey]:
    listed = store.scan()
    found = list(itertools.islice(listed, MOST_LISTED))
    close = getattr(listed, "close", None)
    if close is not None:  # a generator may hold something until it is closed
        close()
    return found
