"""How fast a hop is: measured over the calls that ended lately, so that it follows a change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["STALE_SECONDS", "WINDOW_SECONDS", "Meter"]

WINDOW_SECONDS = 4.0
"""Calls that ended longer ago count only while younger ones have moved too little to tell."""

MOST_CALLS = 16
"""Of those that ended in the window, the youngest."""

TRUSTED_BYTES = 2**20
TRUSTED_SECONDS = 0.1
"""What must have moved, or how long calls must have run, before a measurement replaces the
assumption: of a slow hop a little tells enough."""

STALE_SECONDS = 300.0
"""A measurement that is older says nothing any more."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """A call that ended."""

    ended: float
    seconds: float
    """How long it ran."""
    share: float
    """Its part of that time: calls that run side by side share each second."""
    copied: int


@dataclass(slots=True)
class Meter:
    """Speed = bytes / time in which at least one call ran, of the calls that ended within
    `WINDOW_SECONDS`, at most `MOST_CALLS`; where those do not tell enough, of so many older ones
    that they do. Where calls run side by side, each has an equal share of that time. Latency =
    what the quickest of them took beside its bytes at that speed.

    So a change shows with the first call behind it, and nothing else shows after `WINDOW_SECONDS`,
    as long as there are calls. Times are monotonic seconds.
    """

    running: int = 0
    since: float = 0.0
    """When a call began or ended last."""
    total: int = 0
    """Bytes that it has seen."""
    _shared: float = 0.0
    """Seconds in which calls ran, each divided by their number."""
    _samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=MOST_CALLS))

    def begin(self, now: float) -> float:
        """A call begins; a mark, for `count`."""
        self._account(now)
        self.running += 1
        return self._shared

    def end(self, now: float) -> None:
        """A call ended, or is not waited for any more: how long it hangs says nothing of the
        speed."""
        self._account(now)
        self.running -= 1

    def count(self, now: float, mark: float, seconds: float, copied: int) -> None:
        """A call that ended just now had worked: it took so long, and moved so many bytes. `mark`
        is what `begin` gave."""
        if copied:
            self.total += copied
            self._samples.append(_Sample(now, seconds, self._shared - mark, copied))

    def _account(self, now: float) -> None:
        if self.running:
            self._shared += (now - self.since) / self.running
        self.since = now

    def is_stale(self, now: float) -> bool:
        """Whether what was measured says nothing any more."""
        return bool(self._samples) and not self.running and now - self.since >= STALE_SECONDS

    @property
    def measured_at(self) -> float | None:
        """When the last call that counts ended; None where there was none."""
        return self._samples[-1].ended if self._samples else None

    def speed(self, now: float) -> float | None:
        """Bytes per second, once enough has moved."""
        window = list(self._window(now))
        copied, share = sum(s.copied for s in window), sum(s.share for s in window)
        return copied / share if share > 0 and _tells(copied, share) else None

    def latency(self, now: float) -> float:
        """Seconds that a call takes beside its bytes; 0 while the speed is not known."""
        speed = self.speed(now)
        if speed is None:
            return 0.0
        quickest = min(self._window(now), key=lambda sample: sample.seconds)
        return max(0.0, quickest.seconds - quickest.copied / speed)

    def _window(self, now: float) -> Iterator[_Sample]:
        """Youngest first."""
        copied, share = 0, 0.0
        for sample in reversed(self._samples):
            if sample.ended <= now - WINDOW_SECONDS and _tells(copied, share):
                return
            copied += sample.copied
            share += sample.share
            yield sample


def _tells(copied: int, seconds: float) -> bool:
    return copied >= TRUSTED_BYTES or seconds >= TRUSTED_SECONDS
