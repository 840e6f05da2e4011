"""The border between the simulated processes: only values cross it, as copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, cast

__all__ = ["crossed"]

T = TypeVar("T")

_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})

_shapes: dict[type, tuple[str, ...] | None] = {}
"""By class that was met, the fields that a copy is made from; None: its objects do not cross."""


def crossed(message: T) -> T:
    """A copy of a message as another process would get it.

    Raises:
        TypeError: something in it is no frozen value (a list, a lock, an object with a life of its
            own), which a real border would refuse or silently copy.
    """
    try:
        return cast(T, _copied(message))
    except _RefusedError:
        raise TypeError(_complaint(message, type(message).__name__)) from None


class _RefusedError(Exception):
    """Something cannot cross."""


def _copied(value: object) -> object:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return tuple([_copied(item) for item in cast(tuple[object, ...], value)])
    if kind is frozenset:
        return frozenset([_copied(item) for item in cast(frozenset[object], value)])
    if isinstance(value, Enum):
        return value
    shape = _shape(kind)
    if shape is None:
        raise _RefusedError
    make = cast(Callable[..., object], kind)
    return make(**{name: _copied(getattr(value, name)) for name in shape})


def _shape(kind: type) -> tuple[str, ...] | None:
    if kind not in _shapes:
        frozen = is_dataclass(kind) and _parameters(kind).frozen
        _shapes[kind] = tuple(f.name for f in fields(kind) if f.init) if frozen else None
        if issubclass(kind, tuple):  # a NamedTuple
            _shapes[kind] = getattr(kind, "_fields", None)
    return _shapes[kind]


def _parameters(kind: type) -> Any:
    return kind.__dict__.get("__dataclass_params__")


def _complaint(value: object, where: str) -> str:
    """What of a message does not cross, and where in it that lies; empty where all of it does."""
    kind = type(value)
    items: list[tuple[object, str]] = []
    if kind in _PLAIN or isinstance(value, Enum):
        return ""
    if kind is tuple:
        inside = enumerate(cast(tuple[object, ...], value))
        items = [(item, f"{where}[{i}]") for i, item in inside]
    elif kind is frozenset:
        items = [(item, f"an item of {where}") for item in cast(frozenset[object], value)]
    elif (shape := _shape(kind)) is not None:
        items = [(getattr(value, name), f"{where}.{name}") for name in shape]
    elif is_dataclass(kind):
        return f"{where} is a {kind.__name__}, which is not frozen"
    else:
        return f"{where} is a {kind.__name__}, which cannot cross a process's border"
    return next(filter(None, (_complaint(item, place) for item, place in items)), "")
