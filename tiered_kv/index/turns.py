"""Turns to write to one environment, among threads and processes, which nobody waits for long.

LMDB lets writers wait inside of it, where no timeout reaches: a process that is stopped (SIGSTOP, a
frozen container) in a write transaction would hold up every thread that wants to write, for ever.
So whoever begins a write transaction takes a turn before, and finds LMDB's own lock free: an
exclusive lock on the file `turn.lock`, which the kernel takes back from a process that dies.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiered_kv.errors import TierError
from tiered_kv.index.directory import TURN, try_lock

__all__ = ["Turn"]

_POLL_FIRST_SECONDS, _POLL_SECONDS = 0.0001, 0.002
_CLOSE_SECONDS = 1.0


class Turn:
    """One process's door to the turn. Thread-safe; each `take` is followed by a `give`."""

    def __init__(self, path: Path, tier: str) -> None:
        """`path`: the environment's directory. Nothing is opened before the first `take`."""
        self._path = path
        self._tier = tier
        self._pid = os.getpid()
        self._thread = threading.Lock()
        self._taker = 0
        self._fd = -1
        self._closed = threading.Event()

    def take(self, seconds: float) -> None:
        """Wait at most so long for the turn.

        Raises:
            ValueError: this thread has it already.
            TierError: it was not had.
            OSError: the file cannot be opened, made or locked.
        """
        me = threading.get_ident()
        if self._taker == me:
            raise ValueError(f"this thread is in a write transaction of {self._path} already")
        deadline = time.monotonic() + seconds
        had = False
        if self._thread.acquire(timeout=seconds):
            try:
                had = self._lock_file(deadline)
            finally:
                if not had:
                    self._thread.release()
        if not had:
            raise TierError(
                f"tier {self._tier}: a write of {self._holder()} to {self._path} has not ended in "
                f"{seconds:g} s; the process may be stopped, or the disk may hang",
                tier=self._tier,
            )
        self._taker = me

    def _lock_file(self, deadline: float) -> bool:
        if self._closed.is_set():
            raise TierError(
                f"tier {self._tier}: {self._path} cannot be used: it was closed", tier=self._tier
            )
        if self._fd < 0:
            self._fd = os.open(self._path / TURN, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        pause = _POLL_FIRST_SECONDS
        while not try_lock(self._fd, fcntl.LOCK_EX):
            if self._closed.wait(pause) or time.monotonic() > deadline:
                return False
            pause = min(2 * pause, _POLL_SECONDS)
        return True

    def give(self) -> None:
        """The turn is over."""
        self._taker = 0
        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._thread.release()

    @contextmanager
    def taken(self, seconds: float) -> Iterator[None]:
        """`take`, and `give` at the end."""
        self.take(seconds)
        try:
            yield
        finally:
            self.give()

    def _holder(self) -> str:
        """Who has it, for people."""
        try:
            status = (self._path / TURN).stat()
            locks = Path("/proc/locks").read_text(encoding="ascii")
        except OSError:
            return "another process"
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in locks.splitlines():
            fields = line.split()
            if fields[1:2] == ["FLOCK"] and fields[5:6] == [device]:
                return f"process {fields[4]}"
        return "another process"

    def close(self) -> None:
        """Let go of the file; where another thread does not end its turn, the process's end does.
        Idempotent. In a forked child no other thread can have it."""
        forked = os.getpid() != self._pid
        if forked:  # a thread that waited for its turn may have had the lock of the old one
            self._closed = threading.Event()
        self._closed.set()
        if forked or self._thread.acquire(timeout=_CLOSE_SECONDS):
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            if not forked:
                self._thread.release()
