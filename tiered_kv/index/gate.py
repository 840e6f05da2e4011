"""Counts what runs, so that nothing is closed or changed under it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Gate"]


class Gate:
    """Many may be inside, or one alone. Thread-safe; waits are bounded by their `timeout`, in
    seconds."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = False
        self._shut = False

    @property
    def is_shut(self) -> bool:
        """Whether `shut` was called."""
        return self._shut

    def enter(self, timeout: float) -> bool:
        """Go in, to `leave` later; False when it is shut, or somebody stayed alone in it."""
        with self._changed:
            free = self._changed.wait_for(lambda: not self._alone, timeout)
            if self._shut or not free:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        """Come out."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    @contextmanager
    def alone(self, timeout: float) -> Iterator[bool]:
        """Keep others out, and wait until all came out; whether they did."""
        with self._changed:
            self._alone = True
            try:
                yield self._changed.wait_for(lambda: self._inside == 0, timeout)
            finally:
                self._alone = False
                self._changed.notify_all()

    def shut(self, timeout: float) -> bool:
        """Let nobody in any more, and wait until all came out; whether they did."""
        with self._changed:
            self._shut = True
            return self._changed.wait_for(lambda: self._inside == 0, timeout)
