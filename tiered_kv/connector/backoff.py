"""Keys that are not asked for a while, because loading them failed or took too long."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tiered_kv.values import BlockKey

__all__ = ["Backoff"]

MAX_KEYS = 65_536


class Backoff:
    """Keys with the time until which a tier is not asked for them, whoever the request is. Not
    thread-safe.

    Bounded: where more keys fail than it can hold, the oldest news is dropped, and such a key may
    be tried once more.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[tuple[str, BlockKey], float] = {}

    def add(self, tier: str, key: BlockKey, until: float) -> None:
        """Do not ask this tier for this key until this time (seconds of the clock)."""
        if len(self._until) >= MAX_KEYS:
            now = self._clock()
            self._until = {entry: t for entry, t in self._until.items() if t > now}
            if len(self._until) >= MAX_KEYS:
                del self._until[next(iter(self._until))]
        self._until[tier, key] = until

    def drop(self, tier: str, keys: Iterable[BlockKey]) -> None:
        """Ask the tier for these keys again: they are being stored there anew."""
        if self._until:
            for key in keys:
                self._until.pop((tier, key), None)

    def clear(self) -> None:
        """Ask for every key again."""
        self._until.clear()

    def held(self, tier: str, keys: Iterable[BlockKey], now: float) -> set[BlockKey]:
        """Those of the keys that the tier is not to be asked for at `now`."""
        return {key for key in keys if self.holds(tier, key, now)} if self._until else set()

    def holds(self, tier: str, key: BlockKey, now: float) -> bool:
        """Whether the tier is not to be asked for the key at `now`."""
        until = self._until.get((tier, key))
        if until is None:
            return False
        if until > now:
            return True
        del self._until[tier, key]
        return False
