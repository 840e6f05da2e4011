"""How fast the engine computes prompts, measured from its steps.

Engine-neutral: whoever drives the manager half says how many tokens a step computed, and how long
it took. What is loaded is not computed, and counts nowhere here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["PrefillRate", "StepTimer", "TimedStep"]

LEAST_TOKENS = 32
"""A smaller step says more about what a step costs by itself than about its tokens."""

REMEMBERED_STEPS = 64
"""So many steps back count."""

DECODE_TOKENS = 16
"""A request of which a step computes no more tokens than this is answering: one token, or some
that were guessed."""

PREFILL_SHARE = 0.75
"""What share of a step's tokens must be of prompts; the others cost differently."""

STEPS_IN_FLIGHT = 256
"""More steps are never in flight: older ones have been lost."""


class PrefillRate:
    """Tokens per second. Not thread-safe: the scheduler's thread owns it.

    The median over the latest steps, each weighted by its tokens: half of the tokens lately were
    computed at least as fast. A step that was held up by something else, or that the engine ran for
    the first time, does not move it; long prompts count for more than short ones, as they should
    where long prefixes are decided about.
    """

    def __init__(self, fixed: float | None = None) -> None:
        """`fixed` tokens per second are what the operator says, and measured no more."""
        self._fixed = fixed
        self._steps: deque[tuple[float, int]] = deque(maxlen=REMEMBERED_STEPS)
        self._median: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """None while no step of use was seen."""
        return self._median if self._fixed is None else self._fixed

    def note(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts in so many seconds, waiting for nothing else.

        Steps of less than `LEAST_TOKENS` are ignored.
        """
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        self._steps.append((tokens / seconds, tokens))
        half = sum(weight for _, weight in self._steps) / 2
        for rate, weight in sorted(self._steps):
            self._median = rate
            half -= weight
            if half <= 0:
                return

    def seconds(self, tokens: int) -> float | None:
        """Predicted seconds for computing so many tokens; None while the rate is not known."""
        rate = self.tokens_per_second
        return None if rate is None else tokens / rate


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step that computed prompts."""

    tokens: int
    seconds: float


class StepTimer:
    """Times the steps of an engine that has several in flight. The scheduler's thread owns it.

    The device runs them one after another, so a step has it from the end of the one before, or from
    its own beginning where that was later.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds."""
        self._clock = clock
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=STEPS_IN_FLIGHT)
        """Number, tokens and beginning."""
        self._number = 0
        self._free_since = 0.0

    def began(self, scheduled: Iterable[int]) -> int | None:
        """A step goes to the device that computes so many tokens of each request; its number for
        `ended`. None where it tells nothing about prompts: it computes few, or mostly answers."""
        counts = list(scheduled)
        tokens = sum(count for count in counts if count > DECODE_TOKENS)
        if tokens < LEAST_TOKENS or tokens < PREFILL_SHARE * sum(counts):
            return None
        self._number += 1
        self._steps.append((self._number, tokens, self._clock()))
        return self._number

    def ended(self, number: int | None) -> TimedStep | None:
        """The output of a step has come, of whatever step, in the order in which they began; what
        it tells. None: one without a number."""
        now = self._clock()
        free, self._free_since = self._free_since, now
        while number is not None and self._steps and self._steps[0][0] <= number:
            known, tokens, began = self._steps.popleft()
            if known == number:
                return TimedStep(tokens, now - max(began, free))
        return None
