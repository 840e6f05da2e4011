"""A clock that only a test moves."""

from __future__ import annotations


class Clock:
    """Gives `now`, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
