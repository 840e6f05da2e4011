"""What happens in the stores of a tier, seen from inside: calls that run, errors, places."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tiered_kv.contracts import (
    Backend,
    BlockStore,
    ChangeBatch,
    NewBlock,
    Place,
    ReadResult,
    StoreContext,
    StoreStat,
)
from tiered_kv.errors import NoSpace
from tiered_kv.testing.faults import Method
from tiered_kv.values import BlockKey, BlockStatus

__all__ = ["OPERATIONS", "Watch", "watched"]

OPERATIONS = (Method.RESERVE, Method.WRITE, Method.PUBLISH, Method.READ)
"""Calls that move blocks."""


class Watch:
    """Of all stores of one tier. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[Method] = Counter()
        self._refused = 0
        self._read = 0
        self._places = 0
        self._act: Callable[[], object] | None = None
        self._acted = 0

    @property
    def open_places(self) -> int:
        """Places that were given out, and neither published nor abandoned."""
        return self._places

    @property
    def refused(self) -> int:
        """Calls for which the store itself had no space."""
        return self._refused

    @property
    def read_blocks(self) -> int:
        """Blocks that were read well."""
        return self._read

    @property
    def acted(self) -> int:
        """How often what was ordered `in_a_call` was done."""
        return self._acted

    def in_a_call(self, act: Callable[[], object]) -> None:
        """Do this in the midst of the next call that moves blocks, in its thread."""
        with self._lock:
            self._act = act

    def forget(self) -> None:
        """Do nothing in the next call."""
        with self._lock:
            self._act = None

    @contextmanager
    def call(self, method: Method) -> Iterator[None]:
        """A call runs."""
        act = None
        with self._lock:
            self._calls[method] += 1
            if method in OPERATIONS:
                act, self._act = self._act, None
        if act is not None:
            act()
            with self._lock:
                self._acted += 1
        try:
            yield
        except NoSpace:
            with self._lock:
                self._refused += 1
            raise

    def count_places(self, change: int) -> None:
        """Places were given out, or ended."""
        with self._lock:
            self._places += change

    def count_read(self, results: Sequence[ReadResult]) -> None:
        """Blocks were read."""
        with self._lock:
            self._read += sum(result.status is BlockStatus.OK for result in results)


class _WatchedStore:
    """A `BlockStore` around another one."""

    def __init__(self, inner: BlockStore, watch: Watch) -> None:
        self._inner = inner
        self._watch = watch

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._watch.call(Method.CONTAINS):
            return list(self._inner.contains(keys))

    def reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        with self._watch.call(Method.RESERVE):
            places = list(self._inner.reserve(blocks))
            self._watch.count_places(sum(place is not None for place in places))
            return places

    def write(self, places: Sequence[Place], memory: Sequence[memoryview]) -> None:
        with self._watch.call(Method.WRITE):
            self._inner.write(places, memory)

    def publish(self, places: Sequence[Place]) -> None:
        with self._watch.call(Method.PUBLISH):
            self._inner.publish(places)
            self._watch.count_places(-len(places))

    def abandon(self, places: Sequence[Place]) -> None:
        with self._watch.call(Method.ABANDON):
            self._watch.count_places(-len(places))
            self._inner.abandon(places)

    def read(self, keys: Sequence[BlockKey], memory: Sequence[memoryview]) -> list[ReadResult]:
        with self._watch.call(Method.READ):
            results = list(self._inner.read(keys, memory))
            self._watch.count_read(results)
            return results

    def discard(self, blocks: Sequence[NewBlock]) -> int:
        with self._watch.call(Method.DISCARD):
            return self._inner.discard(blocks)

    def delete(self, keys: Sequence[BlockKey]) -> int:
        with self._watch.call(Method.DELETE):
            return self._inner.delete(keys)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        with self._watch.call(Method.TOUCH):
            self._inner.touch(keys)

    def scan(self) -> Iterator[BlockKey]:
        with self._watch.call(Method.SCAN):
            return self._inner.scan()

    def changes(self, cursor: int | None) -> ChangeBatch:
        with self._watch.call(Method.CHANGES):
            return self._inner.changes(cursor)

    def stat(self) -> StoreStat:
        with self._watch.call(Method.STAT):
            return self._inner.stat()

    def close(self) -> None:
        with self._watch.call(Method.CLOSE):
            self._inner.close()


def watched(backend: Backend, watch_of: Callable[[StoreContext], Watch]) -> Backend:
    """The same backend, whose stores are watched. What it registers itself is left out: blocks go
    through host memory.

    Raises:
        ValueError: it brings no store.
    """
    open_store = backend.open_store
    if open_store is None:
        raise ValueError(f"backend {backend.name!r} brings no store")

    def open_watched(context: StoreContext) -> BlockStore:
        return _WatchedStore(open_store(context), watch_of(context))

    return replace(backend, open_store=open_watched, register=None)
