"""What an engine leaves in its process when it has ended: threads, open files, mappings."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["Leftovers"]

PATIENCE = 20.0
"""Seconds after which a thread that ends, or a file that is closed, counts as left behind."""
_TICK = 0.01


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What there is at a time."""

    threads: frozenset[threading.Thread]
    files: tuple[str, ...]
    """What this process has open, by name."""

    @classmethod
    def now(cls) -> Self:
        """Look."""
        return cls(frozenset(threading.enumerate()), tuple(sorted(_open_files())))

    def since(self, folder: Path) -> list[str]:
        """What there is now and was not then, once everything has had time to end; empty where
        nothing stays behind. Nothing below `folder` may be open or mapped at all."""
        until = time.monotonic() + PATIENCE
        while found := self._more(folder):
            if time.monotonic() >= until:
                return found
            threading.Event().wait(_TICK)
        return []

    def _more(self, folder: Path) -> list[str]:
        now = Leftovers.now()
        found = [f"thread {thread.name}" for thread in now.threads - self.threads]
        below = f"{folder}/"
        found += [f"open file {name}" for name in now.files if name.startswith(below)]
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        found += [f"mapping {line}" for line in maps if below in line]
        if not found and len(now.files) > len(self.files):
            found.append(f"{len(now.files)} open files, {len(self.files)} before: {now.files}")
        return found


def _open_files() -> list[str]:
    names: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return names
