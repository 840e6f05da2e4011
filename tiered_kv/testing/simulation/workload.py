"""Requests at random: what a simulated engine is given to do."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Workload"]


@dataclass(frozen=True, slots=True)
class Workload:
    """How likely things are in each step, and how long what is asked is. Lengths are drawn
    evenly from (least, most); a prompt is cut to what the model's pool holds."""

    arrivals: float = 0.5
    """Chance of a new request."""
    most_alive: int = 8
    """No request is added while so many are not over."""
    prefixes: int = 6
    """Different beginnings that prompts share."""
    prefix_tokens: tuple[int, int] = (8, 64)
    prompt_tokens: tuple[int, int] = (0, 24)
    """Of its own, behind the shared beginning."""
    answer_tokens: tuple[int, int] = (1, 12)
    priorities: int = 1
    """How many different ones requests have."""
    abort: float = 0.05
    """Chance that one of the requests that are not over is aborted."""
    preempt: float = 0.03
    """Chance that a running request is preempted, beside those that are for want of room."""
    reset: float = 0.0
    """Chance that the cache is reset."""
    new_weights: bool = False
    """Whether a reset changes the weights."""
