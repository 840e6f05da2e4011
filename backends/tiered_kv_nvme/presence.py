"""Tells whether some process still works in the tier's directory with another index than ours.

Who deletes the index under a running engine does not stop it: the engine goes on with the file it
has open, and writes to the segments. Every store and maintenance keeps a shared lock on the
directory, so that whoever finds the index gone knows.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tiered_kv.index import try_lock, unlock

__all__ = ["Presence", "is_anyone_present"]


class Presence:
    """A shared lock on a directory."""

    def __init__(self, directory: Path) -> None:
        """Take it; while somebody asks, it is not had: then this process is overlooked.

        Raises:
            OSError: the directory cannot be opened.
        """
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try_lock(self._fd, fcntl.LOCK_SH)

    def end(self) -> None:
        """Let go. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_anyone_present(directory: Path) -> bool:
    """Whether a `Presence` of any process is there.

    Raises:
        OSError: the directory cannot be opened.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return not try_lock(fd, fcntl.LOCK_EX)
    finally:
        unlock(fd)
