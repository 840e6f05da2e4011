"""Which hops work, and how fast they are: what routing asks.

Each hop has a breaker and a meter. A tier's breaker is that of the hop by which it is read into
host memory, where it has one: background reads are its trials, so that no request's load is, and
the tier's other hops wait for it before a call of theirs is tried. What says that the medium is
gone opens all of them. A hop all of whose threads hang stays out until one returns.

What was measured is forgotten when a hop has moved nothing for `STALE_SECONDS`: routing then
assumes the best of it again, so that a chain that lost once is tried again, and can win.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from tiered_kv.engine.breaker import Attempt, Breaker, BreakerRules, BreakerState
from tiered_kv.engine.meter import Meter
from tiered_kv.routing import Hop, HopCost, assumed_cost
from tiered_kv.stats import LoadRate

__all__ = ["NOT_IN_USE", "OPENING", "HealthBoard", "Pulse", "Verdict", "Watched"]

OPENING = "opening"
"""Why a hop cannot be used until its tier's store is open."""

NOT_IN_USE = "not in use here"
"""Beginning of the reason of a hop that this machine or this set-up does not support: no fault."""

NEWS = 0.2
"""Relative change of a speed that makes routing choose anew."""


REFRESH_SECONDS = 0.05
"""What time alone changes is looked for at most this often: an engine asks at each of its steps."""


class Verdict(Enum):
    """What a call that ended says of its hop."""

    WORKED = "worked"
    FAILED = "failed"
    NOTHING = "nothing"


@dataclass(slots=True, eq=False)
class Watched:
    """A call that runs. Made and read by the board."""

    hop: Hop
    probe: bool
    began: float
    mark: float
    breaker: Breaker
    attempt: Attempt
    meter: Meter
    late: bool = False


@dataclass(frozen=True, slots=True)
class Pulse:
    """What decides whether a hop is to be probed."""

    opened: float
    """When it got its handler; monotonic seconds."""
    due: bool
    """Its breaker is half-open, and no trial runs."""
    closed: bool
    suspect: bool
    """Its breaker is closed, but the last call failed or ran out of time."""
    measured_at: float | None
    """When a call last moved something; monotonic seconds."""
    speed: float | None
    """Bytes per second; None: not known."""


@dataclass(slots=True)
class _HopState:
    breaker: Breaker
    unusable: str | None = OPENING
    """Why the hop cannot be used until that changes: "opening", "could not be opened: ..."."""
    probed: bool = False
    hanging: int = 0
    """Calls, but for probes, that ran out of time and have not returned."""
    meter: Meter = field(default_factory=Meter)
    opened: float = 0.0
    published: float = 0.0
    """The speed that routing knows of."""
    told: tuple[str | None, BreakerState] = (OPENING, BreakerState.CLOSED)
    """What `changed` was last called with."""


class HealthBoard:
    """State of every hop. Thread-safe, nothing blocks."""

    def __init__(
        self,
        hops: Iterable[Hop],
        *,
        limit: int,
        rules: BreakerRules,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """All hops are opening. `limit` calls may run at once per hop, besides probes; `changed`
        is called, outside the lock, when an answer has changed."""
        self._limit = limit
        self._rules = rules
        self._changed = changed
        self._clock = clock
        self._lock = threading.Lock()
        self._states = {hop: _HopState(Breaker(rules, clock)) for hop in hops}
        self._refreshed = clock()

    # -------------------------------------------------------------------------------- the hops

    @property
    def hops(self) -> tuple[Hop, ...]:
        """All of them."""
        return tuple(self._states)

    def probed(self, hop: Hop) -> None:
        """Background reads are the hop's trials from now on, and decide for its tier."""
        with self._lock:
            self._states[hop].probed = True

    def open(self, hop: Hop) -> None:
        """The hop has got a handler and can be used; nothing is known of it."""
        with self._lock:
            state = self._states[hop]
            state.unusable = None
            state.breaker = Breaker(self._rules, self._clock)
            state.meter = Meter()
            state.published = 0.0
            state.opened = self._clock()
        self._changed()

    def unusable(self, hop: Hop, reason: str) -> None:
        """The hop cannot be used, and trying again does not help."""
        with self._lock:
            self._states[hop].unusable = reason
        self._changed()

    def tier_unusable(self, tier: str, reason: str) -> None:
        """The same for all hops of a tier, at once."""
        with self._lock:
            for hop, state in self._states.items():
                if hop.tier == tier:
                    state.unusable = reason
        self._changed()

    def gone(self, tier: str, reason: str) -> None:
        """The medium of a tier is gone: none of its hops is to be used."""
        with self._lock:
            for hop, state in self._states.items():
                if hop.tier == tier:
                    state.breaker.trip(reason)
        self._tell()

    # -------------------------------------------------------------------------------- the calls

    def began(self, hop: Hop, *, probe: bool = False) -> Watched:
        """A call begins."""
        now = self._clock()
        with self._lock:
            state = self._states[hop]
            breaker, meter = state.breaker, state.meter
            call = Watched(hop, probe, now, meter.begin(now), breaker, breaker.begin(), meter)
        if call.attempt.trial:
            self._tell()
        return call

    def late(self, call: Watched, limit: float) -> None:
        """A call has run for more than `limit` seconds and goes on."""
        reason = f"a call ran for more than {limit:g} s"
        with self._lock:
            call.late = True
            call.meter.end(self._clock())
            if call.probe:  # nobody else may have to find out
                call.breaker.trip(reason)
            else:
                self._states[call.hop].hanging += 1
                call.breaker.timed_out(call.attempt, reason)
        self._tell()

    def ended(
        self, call: Watched, verdict: Verdict, copied_bytes: int = 0, reason: str = ""
    ) -> float:
        """A call ended; its seconds. `reason` says why it FAILED."""
        now = self._clock()
        seconds = now - call.began
        with self._lock:
            state = self._states[call.hop]
            breaker, meter = call.breaker, call.meter
            if call.late:
                state.hanging -= not call.probe
                if verdict is Verdict.WORKED:
                    breaker.hurry()
            else:
                meter.end(now)
                if verdict is Verdict.WORKED:
                    meter.count(now, call.mark, seconds, copied_bytes)
                    breaker.worked(call.attempt)
                elif verdict is Verdict.FAILED:
                    breaker.failed(call.attempt, reason)
                else:
                    breaker.said_nothing(call.attempt)
            speed = state.meter.speed(now) or 0.0
            news = abs(speed - state.published) > NEWS * state.published
            if news:
                state.published = speed
        if not self._tell() and news:
            self._changed()
        return seconds

    def refresh(self) -> None:
        """Notice what changed by time alone: hops that are to be tried again, measurements that
        say nothing any more. Does nothing within `REFRESH_SECONDS` of the last time."""
        now = self._clock()
        if now - self._refreshed < REFRESH_SECONDS:
            return
        self._refreshed = now
        news = False
        with self._lock:
            for state in self._states.values():
                if state.meter.is_stale(now):
                    state.meter = Meter()
                    state.published = 0.0
                    news = True
        if not self._tell() and news:
            self._changed()

    # ------------------------------------------------------------------------------ the answers

    def trouble(self, hop: Hop) -> str | None:
        """Why the hop is not to be used now; None where it may be."""
        with self._lock:
            return self._trouble(hop)

    def breaker_state(self, hop: Hop) -> BreakerState:
        """Of its breaker."""
        with self._lock:
            return self._states[hop].breaker.state

    def pulse(self, hop: Hop) -> Pulse | None:
        """For probing; None while the hop cannot be used."""
        now = self._clock()
        with self._lock:
            state = self._states[hop]
            if state.unusable is not None:
                return None
            breaker, meter = state.breaker, state.meter
            closed = breaker.state is BreakerState.CLOSED
            return Pulse(
                state.opened,
                breaker.admits and not closed,
                closed,
                breaker.suspects,
                meter.measured_at,
                meter.speed(now),
            )

    def hanging(self, hop: Hop) -> int:
        """Calls, but for probes, that ran out of time and have not returned."""
        with self._lock:
            return self._states[hop].hanging

    def rate(self, hop: Hop) -> LoadRate | None:
        """As measured; None where nothing is known."""
        now = self._clock()
        with self._lock:
            meter = self._states[hop].meter
            speed = meter.speed(now)
            return None if speed is None else LoadRate(speed, meter.latency(now))

    def cost(self, hop: Hop) -> HopCost:
        """What routing needs to know."""
        assumed = assumed_cost(hop)
        now = self._clock()
        with self._lock:
            meter = self._states[hop].meter
            speed = meter.speed(now)
            reason = "assumed"
            latency = assumed.latency_seconds
            if speed is not None:
                latency = meter.latency(now)
                reason = f"measured over {meter.total / 2**20:.0f} MiB"
            trouble = self._trouble(hop)
        return HopCost(
            speed or assumed.bytes_per_second, latency, trouble is None, trouble or reason
        )

    # --------------------------------------------------------------------------------- private

    def _trouble(self, hop: Hop) -> str | None:
        state = self._states[hop]
        if state.unusable is not None:
            return state.unusable
        if state.hanging >= self._limit:
            return f"unhealthy: all {state.hanging} calls hang"
        breaker = state.breaker
        if breaker.state is BreakerState.CLOSED:
            return None
        if breaker.admits and not state.probed and not self._waits(hop):
            return None
        return f"unhealthy: {breaker.reason}"

    def _waits(self, hop: Hop) -> bool:
        """Whether the tier has a hop that is probed, and that does not work."""
        return any(
            state.probed
            and state.unusable is None
            and other.tier == hop.tier
            and state.breaker.state is not BreakerState.CLOSED
            for other, state in self._states.items()
        )

    def _tell(self) -> bool:
        """Call `changed` if a hop came into use or out of it; whether that was so."""
        news = False
        with self._lock:
            for hop, state in self._states.items():
                now = self._trouble(hop), state.breaker.state
                if now != state.told:
                    state.told = now
                    news = True
        if news:
            self._changed()
        return news
