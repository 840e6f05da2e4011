"""The border between the simulated processes: only values cross it, as copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, cast

__all__ = ["crossed"]

T = TypeVar("T")

_PLAIN = (bool, int, float, str, bytes, type(None))


def crossed(message: T) -> T:
    """A copy of a message as another process would get it.

    Raises:
        TypeError: something in it is no frozen value (a list, a lock, an object with a life of its
            own), which a real border would refuse or silently copy.
    """
    return cast(T, _copied(message, type(message).__name__))


def _copied(value: object, where: str) -> object:
    if isinstance(value, Enum) or type(value) in _PLAIN:
        return value
    if type(value) is tuple:
        return tuple(_copied(item, f"{where}[{i}]") for i, item in enumerate(value))
    if type(value) is frozenset:
        return frozenset(_copied(item, f"an item of {where}") for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        parameters: Any = type(value).__dict__.get("__dataclass_params__")
        if not parameters.frozen:
            raise TypeError(f"{where} is a {type(value).__name__}, which is not frozen")
        make = cast(Callable[..., object], type(value))
        return make(
            **{
                field.name: _copied(getattr(value, field.name), f"{where}.{field.name}")
                for field in fields(value)
                if field.init
            }
        )
    raise TypeError(f"{where} is a {type(value).__name__}, which cannot cross a process's border")
