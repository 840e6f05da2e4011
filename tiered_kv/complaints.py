"""Says what went wrong unexpectedly, without filling the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

__all__ = ["COMPLAIN_AGAIN_SECONDS", "Complaints"]

COMPLAIN_AGAIN_SECONDS = 60.0


class Complaints:
    """Logs each kind of trouble with its traceback once, then at most once a minute in a line.
    Thread-safe."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        """`logger` of the module that complains; `clock` in monotonic seconds."""
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def about(self, where: str, error: BaseException, so: str) -> None:
        """Log an unexpected error.

        Args:
            where: what failed; a few different values at most.
            error: with its traceback.
            so: what follows from it, for the operator.
        """
        kind = (where, type(error).__qualname__)
        now = self._clock()
        with self._lock:
            last, unsaid = self._seen.get(kind, (None, 0))
            quiet = last is not None and now - last < COMPLAIN_AGAIN_SECONDS
            self._seen[kind] = (last, unsaid + 1) if quiet and last is not None else (now, 0)
        if last is None:
            self._logger.error("%s failed unexpectedly; %s", where, so, exc_info=error)
        elif not quiet:
            self._logger.error("%s failed again (%d times since): %r", where, unsaid + 1, error)
