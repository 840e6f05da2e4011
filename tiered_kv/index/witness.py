"""Tells whether `data.mdb` is as our last transaction left it, however that process ended.

LMDB keeps its file whole at every moment, as long as the machine runs: a page that a transaction
changes is written to a new place, and the page that names the root comes last. What a killed
process leaves can be opened at once, then, unless somebody else has written to the file since. So
every writer notes in `users.lock` when its transaction began, and afterwards the size and the time
of the last change of `data.mdb`. The note is worth something under the same boot only.
"""

from __future__ import annotations

import os
import struct
import time
from contextlib import suppress
from pathlib import Path

from tiered_kv.index.directory import DATA

__all__ = ["Witness", "is_as_left"]

_NOTE = struct.Struct("<8sqqq")
_MAGIC = b"tkv-seen"
_LONGEST_TRANSACTION_NS = 1_000_000_000
"""Of a transaction that was cut off, what was changed later than this after it began was changed
by somebody else, or by a slow disk: then the file is checked, which takes longer but is safe."""


class Witness:
    """Takes the notes of one process. Call it inside write transactions of LMDB, whose lock keeps
    other processes' notes out."""

    def __init__(self, path: Path, users_fd: int) -> None:
        """`users_fd` stays the caller's."""
        self._data = path / DATA
        self._fd = users_fd

    def begins(self) -> None:
        """A transaction may write from now on."""
        self._note(time.time_ns(), 0, 0)

    def ended(self) -> None:
        """It was committed or given up. Another process may have begun the next one by now: the
        note does not fit the file then, which is checked if that process is killed as well."""
        with suppress(OSError):  # no note, then: the file is checked when it is opened
            status = self._data.stat()
            self._note(0, status.st_size, status.st_mtime_ns)

    def _note(self, began: int, size: int, mtime_ns: int) -> None:
        with suppress(OSError):  # the note before does not fit the file any more
            os.pwrite(self._fd, _NOTE.pack(_MAGIC, began, size, mtime_ns), 0)


def is_as_left(users_fd: int, data: os.stat_result) -> bool:
    """Whether nobody but our transactions has changed the file, under this boot.

    Raises:
        OSError: the note cannot be read.
    """
    note = os.pread(users_fd, _NOTE.size, 0)
    if len(note) != _NOTE.size:
        return False
    magic, began, size, mtime_ns = _NOTE.unpack(note)
    if magic != _MAGIC:
        return False
    if began:
        return bool(data.st_mtime_ns <= began + _LONGEST_TRANSACTION_NS)
    return (size, mtime_ns) == (data.st_size, data.st_mtime_ns)
