"""How fast a tier takes what is written to it, and how much of it may be under way at once.

A load that comes meanwhile waits for what is under way, so that is kept to what the tier writes in
a quarter of a second.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

__all__ = ["CALL_SECONDS", "UNMEASURED_BYTES", "Pace"]

CALL_SECONDS = 0.25
"""What is being written to a tier takes about so long together, however slow it is; one block
where that takes longer."""

UNMEASURED_BYTES = 2**20
"""What may be under way while nothing is known of a tier."""

MEMORY_SECONDS = 0.5
"""Seconds of writing after which a measurement counts for 1/e: a few calls of a slow tier, so that
the call after a slow one is short."""


LEAST_SECONDS = 1e-6
"""Clocks may stand still for a while."""


class Pace:
    """The writes of one tier. Used on the event loop's thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._running = 0
        self._since = 0.0
        self._busy = 0.0
        self._moved = 0.0
        self._under_way = 0
        self._changed = asyncio.Event()

    @property
    def under_way(self) -> int:
        """Bytes that are being written."""
        return self._under_way

    @property
    def speed(self) -> float | None:
        """Bytes per second lately, over the time in which a write ran; None: not known."""
        if not self._moved:
            return None
        busy, moved = self._accounted(self._clock())
        return moved / max(busy, LEAST_SECONDS)

    def room(self) -> int:
        """Bytes that may begin to be written now; one block may always, where none is under
        way."""
        speed = self.speed
        most = UNMEASURED_BYTES if speed is None else int(speed * CALL_SECONDS)
        return max(0, most - self._under_way)

    def call_bytes(self, most: int, calls: int) -> int:
        """What one of so many calls that run side by side should write, at most `most` bytes."""
        speed = self.speed
        wanted = UNMEASURED_BYTES if speed is None else int(speed * CALL_SECONDS)
        return min(most, wanted // calls)

    async def changed(self) -> None:
        """Wait until a write ends or is given up."""
        self._changed.clear()
        await self._changed.wait()

    def began(self, size: int) -> None:
        """A write of so many bytes begins."""
        self._account()
        self._running += 1
        self._under_way += size

    def ended(self, size: int, copied: int) -> None:
        """It has ended; of its bytes, so many were new to the tier and went to the medium."""
        self._account()
        self._leave(size)
        self._moved += copied
        if self._busy > MEMORY_SECONDS:  # one slow call is not remembered for longer than others
            self._moved *= MEMORY_SECONDS / self._busy
            self._busy = MEMORY_SECONDS

    def given_up(self, size: int) -> None:
        """It hangs, and nobody waits for it any more. How fast the tier is, is not known now."""
        self._leave(size)
        self._busy = self._moved = 0.0
        self._since = self._clock()

    def _leave(self, size: int) -> None:
        self._running -= 1
        self._under_way -= size
        self._changed.set()

    def _account(self) -> None:
        now = self._clock()
        self._busy, self._moved = self._accounted(now)
        self._since = now

    def _accounted(self, now: float) -> tuple[float, float]:
        if not self._running:
            return self._busy, self._moved
        seconds = now - self._since
        kept = math.exp(-seconds / MEMORY_SECONDS)
        return self._busy * kept + seconds, self._moved * kept
