"""The time that a simulated engine lives in: that of the machine, or one that its steps make."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Pace", "RealTime", "StepCost", "VirtualTime"]


@dataclass(frozen=True, slots=True)
class StepCost:
    """How long the forward pass of a step takes."""

    prefill_token: float = 0.0
    """Seconds for each token of a prompt, or of what is computed anew."""
    decode_step: float = 0.0
    """Seconds for a step in which any request gets its next token from the one before it."""

    def seconds(self, prefilled: int, *, decodes: bool) -> float:
        """Of a step that computes so many tokens of prompts."""
        return prefilled * self.prefill_token + (self.decode_step if decodes else 0.0)


class Pace(Protocol):
    """What tells the time in a simulation. Seconds; monotonic. Used by the engine's thread."""

    @property
    def cost(self) -> StepCost:
        """Of a step."""
        ...

    def __call__(self) -> float:
        """The time now; a clock for the manager half."""
        ...

    def spend(self, began: float, seconds: float) -> None:
        """A step that began at `began`, by this clock, takes so many seconds in all."""
        ...

    def waited(self, seconds: float) -> None:
        """The engine's thread did nothing for so many seconds of the machine's time."""
        ...


class RealTime:
    """The machine's time: a step with a cost is slept through."""

    def __init__(self, cost: StepCost = StepCost()) -> None:
        """By default steps cost what the simulation itself takes."""
        self.cost = cost

    def __call__(self) -> float:
        """The time now."""
        return time.monotonic()

    def spend(self, began: float, seconds: float) -> None:
        """Sleep until the step is over."""
        left = began + seconds - self()
        if left > 0:
            threading.Event().wait(left)

    def waited(self, seconds: float) -> None:
        """Nothing: this clock runs by itself."""


class VirtualTime:
    """A time that passes by what steps cost, and by what the engine waits for transfers, which
    are real. What the calls of the connector take is not in it.

    Hours of computing pass in minutes; every tier seems that much slower.
    """

    def __init__(self, cost: StepCost) -> None:
        """Begins at 0 s."""
        self.cost = cost
        self._now = 0.0

    def __call__(self) -> float:
        """The time now."""
        return self._now

    def spend(self, began: float, seconds: float) -> None:
        """The step is over."""
        self._now = max(self._now, began + seconds)

    def waited(self, seconds: float) -> None:
        """So much time passes."""
        self._now += seconds
