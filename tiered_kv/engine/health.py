"""Which hops work, and how fast they are: what routing asks.

A hop is taken out of use by an error or a call that runs too long, and tried again after a while;
where all its threads hang it stays out until one returns.

What was measured is forgotten when a hop has moved nothing for `STALE_SECONDS`: routing then
assumes the best of it again, so that a chain that lost once is tried again, and can win.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tiered_kv.routing import Hop, HopCost, assumed_cost

__all__ = ["NOT_IN_USE", "OPENING", "HealthBoard"]

logger = logging.getLogger(__name__)

OPENING = "opening"
"""Why a hop cannot be used until its tier's store is open."""

NOT_IN_USE = "not in use here"
"""Beginning of the reason of a hop that this machine or this set-up does not support: no fault."""

REMEMBERED_BYTES = 256 * 2**20
"""A meter halves what it knows when it has seen so much, so that a change shows."""

TRUSTED_BYTES = 2**20
"""What must have moved before a measurement replaces the assumption."""

STALE_SECONDS = 300.0
"""A measurement that is older says nothing any more."""

NEWS = 0.2
"""Relative change of a speed that makes routing choose anew."""


@dataclass(slots=True)
class _Meter:
    """Speed of a hop: bytes over the time in which at least one call ran."""

    running: int = 0
    since: float = 0.0
    busy: float = 0.0
    moved: float = 0.0
    total: int = 0
    quickest: tuple[float, int] | None = None
    """(seconds, bytes) of the shortest call lately."""
    published: float = 0.0

    def begin(self, now: float) -> None:
        self._account(now)
        self.running += 1

    def end(self, now: float) -> None:
        self._account(now)
        self.running -= 1

    def count(self, seconds: float, copied: int) -> None:
        self.moved += copied
        self.total += copied
        if copied and (self.quickest is None or seconds < self.quickest[0]):
            self.quickest = (seconds, copied)
        if self.moved > REMEMBERED_BYTES:
            self.moved /= 2
            self.busy /= 2
            self.quickest = None

    def _account(self, now: float) -> None:
        if self.running:
            self.busy += now - self.since
        self.since = now

    def is_stale(self, now: float) -> bool:
        return bool(self.total) and not self.running and now - self.since >= STALE_SECONDS

    @property
    def speed(self) -> float | None:
        """Bytes per second, once enough has moved."""
        if self.total < TRUSTED_BYTES or self.busy <= 0:
            return None
        return self.moved / self.busy

    def latency(self, speed: float) -> float:
        if self.quickest is None:
            return 0.0
        return max(0.0, self.quickest[0] - self.quickest[1] / speed)


@dataclass(slots=True)
class _HopState:
    limit: int
    """Calls that may run at once."""
    unusable: str | None
    """Why the hop cannot be used until that changes: "opening", "could not be opened: ..."."""
    failing: str | None = None
    failed_at: float = 0.0
    retry_at: float = 0.0
    retrying: bool = False
    hanging: int = 0
    """Calls that ran out of time and have not returned."""
    meter: _Meter = field(default_factory=_Meter)

    @property
    def trouble(self) -> str | None:
        if self.unusable is not None:
            return self.unusable
        if self.hanging >= self.limit:
            return f"unhealthy: all {self.hanging} calls hang"
        if self.failing is not None and not self.retrying:
            return f"unhealthy: {self.failing}"
        return None


class HealthBoard:
    """State of every hop. Thread-safe, nothing blocks."""

    def __init__(
        self,
        hops: Iterable[Hop],
        *,
        limit: int,
        retry_after: float,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """All hops are opening. `limit` calls may run at once per hop; a failed hop is tried
        again after `retry_after` seconds; `changed` is called, outside the lock, when an answer
        of `cost` has changed."""
        self._states = {hop: _HopState(limit, OPENING) for hop in hops}
        self._retry_after = retry_after
        self._changed = changed
        self._clock = clock
        self._lock = threading.Lock()

    def open(self, hop: Hop) -> None:
        """The hop has a handler and can be used."""
        with self._lock:
            self._states[hop].unusable = None
        self._changed()

    def unusable(self, hop: Hop, reason: str) -> None:
        """The hop cannot be used, and trying again does not help."""
        with self._lock:
            self._states[hop].unusable = reason
        self._changed()

    def failed(self, hop: Hop, reason: str) -> None:
        """An error that makes the hop unhealthy for a while."""
        with self._lock:
            state = self._states[hop]
            news = state.failing is None or state.retrying
            self._fail(state, reason)
        if news:
            logger.warning("%s is out of use for %g s: %s", hop.label, self._retry_after, reason)
        self._changed()

    def late(self, hop: Hop, limit: float) -> None:
        """A call has run for more than `limit` seconds and goes on."""
        with self._lock:
            state = self._states[hop]
            state.hanging += 1
            state.meter.end(self._clock())  # how long it hangs says nothing about its speed
        self.failed(hop, f"a call ran for more than {limit:g} s")

    def returned(self, hop: Hop, began: float) -> float:
        """A call that was late has returned; its seconds. `ended` is not called for it."""
        with self._lock:
            self._states[hop].hanging -= 1
        self._changed()
        return self._clock() - began

    def began(self, hop: Hop) -> float:
        """A call begins; its time, for `ended`."""
        now = self._clock()
        with self._lock:
            self._states[hop].meter.begin(now)
        return now

    def ended(self, hop: Hop, began: float, copied_bytes: int, *, worked: bool) -> float:
        """A call ended; its seconds. Where it `worked`, and began after the last failure, the hop
        is healthy again."""
        now = self._clock()
        with self._lock:
            state = self._states[hop]
            meter = state.meter
            meter.end(now)
            news = False
            if worked:
                meter.count(now - began, copied_bytes)
                speed = meter.speed or 0.0
                if abs(speed - meter.published) > NEWS * meter.published:
                    meter.published = speed
                    news = True
            recovered = worked and state.failing is not None and began >= state.failed_at
            if recovered:
                state.failing = None
                state.retrying = False
        if recovered:
            logger.warning("%s works again", hop.label)
        if news or recovered:
            self._changed()
        return now - began

    def refresh(self) -> None:
        """Let hops be tried again whose time has come, and forget what has not been measured for
        long."""
        now = self._clock()
        news = False
        with self._lock:
            for state in self._states.values():
                if state.meter.is_stale(now):
                    state.meter = _Meter()
                    news = True
                if state.failing is not None and not state.retrying and now >= state.retry_at:
                    state.retrying = True
                    news = True
        if news:
            self._changed()

    def trouble(self, hop: Hop) -> str | None:
        """Why the hop is not to be used now; None where it may be."""
        with self._lock:
            return self._states[hop].trouble

    def cost(self, hop: Hop) -> HopCost:
        """What routing needs to know."""
        assumed = assumed_cost(hop)
        with self._lock:
            state = self._states[hop]
            speed = state.meter.speed
            reason = "assumed"
            latency = assumed.latency_seconds
            if speed is not None:
                latency = state.meter.latency(speed)
                reason = f"measured over {state.meter.total / 2**20:.0f} MiB"
            trouble = state.trouble
        return HopCost(
            speed or assumed.bytes_per_second, latency, trouble is None, trouble or reason
        )

    def _fail(self, state: _HopState, reason: str) -> None:
        now = self._clock()
        state.failing = reason
        state.failed_at = now
        state.retry_at = now + self._retry_after
        state.retrying = False
