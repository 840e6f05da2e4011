"""What is happening to the places that a store gave out."""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from typing import NoReturn

from tiered_kv.contracts import Place
from tiered_kv_nvme.records import Extent

__all__ = ["Uses"]


class _Use(enum.Enum):
    RESERVED = enum.auto()
    WRITING = enum.auto()
    WRITTEN = enum.auto()
    GIVEN_UP = enum.auto()
    """Abandoned while it was being written: given back when the write has ended."""


class Uses:
    """Each place from its reservation until it is published or given back. Thread-safe."""

    def __init__(self) -> None:
        """No place has been given out."""
        self._lock = threading.Lock()
        self._by_generation: dict[int, _Use] = {}

    @property
    def writing(self) -> bool:
        """Whether a write is under way: its places cannot be given back yet."""
        with self._lock:
            uses = self._by_generation.values()
            return _Use.WRITING in uses or _Use.GIVEN_UP in uses

    def reserve(self, extents: Sequence[Extent]) -> None:
        """They were reserved."""
        with self._lock:
            self._set(extents, _Use.RESERVED)

    def begin(self, places: Sequence[Place]) -> list[Extent]:
        """They are written from now on, for the first time or again; where they lie.

        Raises:
            ValueError: one is not this store's, or is being written, or was given up.
        """
        return self._move(places, (_Use.RESERVED, _Use.WRITTEN), _Use.WRITING)

    def end(self, extents: Sequence[Extent], *, whole: bool) -> list[Extent]:
        """A write has ended; those that were given up meanwhile, which are forgotten."""
        with self._lock:
            uses = self._by_generation
            given_up = [one for one in extents if uses.get(one.generation) is _Use.GIVEN_UP]
            self._drop(given_up)
            left = [one for one in extents if one.generation in uses] if given_up else extents
            self._set(left, _Use.WRITTEN if whole else _Use.RESERVED)
        return given_up

    def written(self, places: Sequence[Place]) -> list[Extent]:
        """Where they lie.

        Raises:
            ValueError: one is not this store's, or was not written.
        """
        return self._move(places, (_Use.WRITTEN,), _Use.WRITTEN)

    def forget(self, extents: Sequence[Extent]) -> None:
        """They are published."""
        with self._lock:
            self._drop(extents)

    def abandon(self, places: Sequence[Place]) -> list[Extent]:
        """Nobody wants them any more; those that can be given back at once, which are forgotten."""
        with self._lock:
            uses = self._by_generation
            extents = [place.token for place in places if isinstance(place.token, Extent)]
            free = [
                one for one in extents if uses.get(one.generation) in (_Use.RESERVED, _Use.WRITTEN)
            ]
            busy = [one for one in extents if uses.get(one.generation) is _Use.WRITING]
            self._set(busy, _Use.GIVEN_UP)
            self._drop(free)
        return free

    def _move(self, places: Sequence[Place], allowed: tuple[_Use, ...], to: _Use) -> list[Extent]:
        tokens = [place.token for place in places]
        extents = [token for token in tokens if isinstance(token, Extent)]
        with self._lock:
            use_of = self._by_generation.get
            astray = [one for one in extents if use_of(one.generation) not in allowed]
            if astray or len(extents) < len(tokens):
                self._refuse(places, allowed)
            self._set(extents, to)
        return extents

    def _refuse(self, places: Sequence[Place], allowed: tuple[_Use, ...]) -> NoReturn:
        for place in places:
            token = place.token
            use = self._by_generation.get(token.generation) if isinstance(token, Extent) else None
            if use not in allowed:
                state = "not reserved" if use is None else use.name.lower()
                raise ValueError(f"place of key {place.block.key.hex()} is {state}")
        raise AssertionError("each of the places may be used so")

    def _set(self, extents: Sequence[Extent], use: _Use) -> None:
        self._by_generation.update([(extent.generation, use) for extent in extents])

    def _drop(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self._by_generation.pop(extent.generation, None)
