"""A breaker: takes out of use what keeps failing, and finds out when it works again.

A state machine without locks, threads or I/O, over a clock that is given to it. Closed, calls
begin as they like. Open, none does. After a while it is half-open: one call, the trial, decides
whether it is closed, or open for twice as long as before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Attempt", "Breaker", "BreakerRules", "BreakerState"]

MOST_REMEMBERED = 64
"""Calls that the error rate is taken over, at most."""


class BreakerState(StrEnum):
    """Whether calls may begin."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    """One may, and decides."""
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """When a breaker opens, and for how long."""

    retry_after: float
    """Seconds until the first trial."""
    longest_retry: float
    """Seconds; what a wait grows to, twice as long after each trial that failed."""
    window_seconds: float = 10.0
    """The error rate is that of the calls which ended so lately."""
    least_faults: int = 3
    """So many of them must have failed, ..."""
    fault_share: float = 0.5
    """... and they must be this share of all."""
    timeouts_in_a_row: int = 2
    """So many calls one behind the other that ran out of time open it too."""

    def __post_init__(self) -> None:
        if not 0 < self.retry_after <= self.longest_retry:
            raise ValueError("retry_after must be above 0 seconds and at most longest_retry")
        if self.least_faults < 1 or self.timeouts_in_a_row < 1 or not 0 < self.fault_share <= 1:
            raise ValueError("a breaker opens after at least one fault, at a share in 0..1")


@dataclass(frozen=True, slots=True)
class Attempt:
    """A call, as the breaker knows it."""

    era: int
    """What it says counts until the state changes."""
    trial: bool


class Breaker:
    """See the module's docstring. Its user calls it under a lock of its own."""

    def __init__(self, rules: BreakerRules, clock: Callable[[], float]) -> None:
        """Closed. `clock` gives monotonic seconds."""
        self._rules = rules
        self._clock = clock
        self._is_open = False
        self._reason = ""
        self._era = 0
        self._calls: deque[tuple[float, bool]] = deque(maxlen=MOST_REMEMBERED)
        """(when it ended, whether it failed), oldest first."""
        self._timeouts = 0
        self._trial = False
        self._wait = 0.0
        self._retry_at = 0.0
        self._closed_at = clock()

    @property
    def state(self) -> BreakerState:
        """What it is now."""
        if not self._is_open:
            return BreakerState.CLOSED
        due = self._trial or self._clock() >= self._retry_at
        return BreakerState.HALF_OPEN if due else BreakerState.OPEN

    @property
    def reason(self) -> str:
        """Why it opened last; empty while it is closed."""
        return self._reason if self._is_open else ""

    @property
    def admits(self) -> bool:
        """Whether a call may begin now."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._trial)

    @property
    def suspects(self) -> bool:
        """Whether it is closed, but the call that ended last had failed."""
        return not self._is_open and bool(self._calls) and self._calls[-1][1]

    def begin(self) -> Attempt:
        """A call begins. It is the trial if it is time for one and none runs; what another one
        that begins while it is not closed says of itself is ignored."""
        trial = self.state is BreakerState.HALF_OPEN and not self._trial
        self._trial = self._trial or trial
        return Attempt(self._era, trial)

    def worked(self, attempt: Attempt) -> None:
        """The call did what it should."""
        if not self._counts(attempt):
            return
        if attempt.trial:
            self._is_open = False
            self._closed_at = self._clock()
            self._next_era()
            return
        self._timeouts = 0
        self._calls.append((self._clock(), False))

    def failed(self, attempt: Attempt, reason: str) -> None:
        """The call failed, and that is the tier's fault."""
        if self._counts(attempt):
            self._timeouts = 0
            self._fault(attempt, reason)

    def timed_out(self, attempt: Attempt, reason: str) -> None:
        """The call runs for too long. What becomes of it is not to be told any more."""
        if self._counts(attempt):
            self._timeouts += 1
            self._fault(attempt, reason)

    def said_nothing(self, attempt: Attempt) -> None:
        """The call ended without showing whether the tier works: another one is the trial."""
        if self._counts(attempt) and attempt.trial:
            self._trial = False

    def trip(self, reason: str) -> None:
        """Open at once, whatever the other calls say; a trial that runs is over."""
        self._open(reason)

    def hurry(self) -> None:
        """There is a sign that it works again: the trial need not wait."""
        if self._is_open and not self._trial:
            self._retry_at = min(self._retry_at, self._clock())

    def _counts(self, attempt: Attempt) -> bool:
        return attempt.era == self._era and (attempt.trial or not self._is_open)

    def _fault(self, attempt: Attempt, reason: str) -> None:
        now = self._clock()
        self._calls.append((now, True))
        while self._calls[0][0] <= now - self._rules.window_seconds:
            self._calls.popleft()
        faults = sum(failed for _, failed in self._calls)
        rules = self._rules
        if (
            attempt.trial
            or self._timeouts >= rules.timeouts_in_a_row
            or (faults >= rules.least_faults and faults >= rules.fault_share * len(self._calls))
        ):
            self._open(reason)

    def _open(self, reason: str) -> None:
        now, rules = self._clock(), self._rules
        # What opens again soon after it was closed had not become well: it waits for longer too.
        again = self._is_open or (self._wait > 0 and now - self._closed_at < self._wait)
        self._wait = min(2 * self._wait, rules.longest_retry) if again else rules.retry_after
        self._retry_at = now + self._wait
        self._is_open = True
        self._reason = reason
        self._next_era()

    def _next_era(self) -> None:
        self._era += 1
        self._trial = False
        self._timeouts = 0
        self._calls.clear()
