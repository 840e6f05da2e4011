"""Loads what packages announce under an entry-point group: descriptors, each with the name of its
entry point and the version of our API that it was made for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint
from typing import Protocol, TypeVar

from tiered_kv.contracts import API_VERSION
from tiered_kv.errors import PluginError

__all__ = [
    "NAME",
    "by_name",
    "call_problems",
    "descriptor_problems",
    "distribution_of",
    "load_descriptor",
    "said",
]

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
"""What a descriptor may be called."""


class Descriptor(Protocol):
    """What an entry point leads to."""

    @property
    def name(self) -> str:
        """That of the entry point."""
        ...

    @property
    def api_version(self) -> int:
        """`API_VERSION` that it was made for."""
        ...


D = TypeVar("D", bound=Descriptor)


def by_name(entries: Iterable[EntryPoint]) -> dict[str, list[EntryPoint]]:
    """All that claim a name."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entries:
        found.setdefault(entry.name, []).append(entry)
    return found


def distribution_of(entry: EntryPoint) -> str:
    """Name of the package that announces it."""
    return entry.dist.name if entry.dist else "unknown"


def said(error: BaseException) -> str:
    """What foreign code raised, in a line."""
    return f"{type(error).__name__}: {error}"


def load_descriptor(
    noun: str,
    name: str,
    entries: Sequence[EntryPoint],
    kind: type[D],
    problems: Callable[[str, D], Iterable[str]],
    *,
    others: Sequence[str] = (),
    remedy: str = "uninstall",
) -> D:
    """Load the one descriptor of a name.

    Args:
        noun: what it describes, for messages.
        name: that of its entry point.
        entries: all that claim the name, at least one.
        kind: its class, of `tiered_kv.contracts`.
        problems: what is wrong with it, gravest first.
        others: who claims the name as well.
        remedy: what can be done with one of two that claim a name.

    Raises:
        PluginError: it cannot be loaded, has the wrong shape, or the name is claimed twice.
    """
    claims = [f"{distribution_of(entry)} ({entry.value})" for entry in entries]
    if len(claims) + len(others) > 1:
        owners = " and ".join([*others, *claims])
        raise PluginError(f"{noun} {name!r} is claimed by {owners}; {remedy} one of them")
    origin = f"{noun} {name!r} of {claims[0]}"
    try:
        loaded: object = entries[0].load()
    except Exception as error:  # importing foreign code may raise anything
        raise PluginError(f"{origin} cannot be loaded: {said(error)}") from error
    if not isinstance(loaded, kind):
        raise PluginError(
            f"{origin} is a {type(loaded).__qualname__}; expected a "
            f"tiered_kv.contracts.{kind.__qualname__}"
        )
    for problem in problems(name, loaded):
        raise PluginError(f"{origin} {problem}")
    return loaded


def descriptor_problems(noun: str, name: str, loaded: Descriptor) -> Iterator[str]:
    """What is wrong with the version and the name of a descriptor, gravest first."""
    if type(loaded.api_version) is not int:
        yield f"has the API version {loaded.api_version!r}; expected a number, now {API_VERSION}"
    elif loaded.api_version != API_VERSION:
        older = "the package" if loaded.api_version < API_VERSION else "tiered-kv"
        yield (
            f"was made for API version {loaded.api_version}; this tiered-kv has API version "
            f"{API_VERSION}; update {older}"
        )
    if loaded.name != name:
        yield f"calls itself {loaded.name!r}; entry point and {noun} must have one name"


def call_problems(
    field: str, given: object, arguments: tuple[None, ...], expected: str
) -> Iterator[str]:
    """What is wrong with a callable of a descriptor that is called with so many arguments."""
    if not callable(given):
        yield f"has a {field} that cannot be called; expected {expected}"
        return
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):  # some built-in callables have none
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        yield f"has {field}{signature}; expected {expected}"
