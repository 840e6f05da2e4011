"""Queues whose keys are given in turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import TypeVar

__all__ = ["in_turn"]

K = TypeVar("K", bound=Hashable)


def in_turn(order: OrderedDict[K, None]) -> Iterator[K]:
    """The keys of an order, each once. Those that are still there when the next one is asked for
    move to its end: else what cannot go now would be the first again each time."""
    for _ in range(len(order)):
        key = next(iter(order))
        yield key
        if key in order:
            order.move_to_end(key)
