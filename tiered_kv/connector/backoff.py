"""Keys that are not asked for a while, because loading them failed or took too long."""

from __future__ import annotations

from collections.abc import Callable

from tiered_kv.values import BlockKey

__all__ = ["Backoff"]

MAX_KEYS = 65_536


class Backoff:
    """Keys with the time until which they answer MISS to all requests. Not thread-safe.

    Bounded: where more keys fail than it can hold, the oldest news is dropped, and such a key may
    be tried once more.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[BlockKey, float] = {}

    def add(self, key: BlockKey, until: float) -> None:
        """Hold a key off until this time (seconds of the clock)."""
        if len(self._until) >= MAX_KEYS:
            now = self._clock()
            self._until = {k: t for k, t in self._until.items() if t > now}
            if len(self._until) >= MAX_KEYS:
                del self._until[next(iter(self._until))]
        self._until[key] = until

    def holds(self, key: BlockKey, now: float) -> bool:
        """Whether the key is to be held off at `now`."""
        until = self._until.get(key)
        if until is None:
            return False
        if until > now:
            return True
        del self._until[key]
        return False
