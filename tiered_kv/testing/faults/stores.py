"""A store in which things go wrong."""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

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
from tiered_kv.testing.faults.injecting import Call, Faults
from tiered_kv.testing.faults.plan import Effect, Method
from tiered_kv.values import BlockKey, BlockStatus

__all__ = ["FaultyStore", "faulty_backend"]

T = TypeVar("T")

_ANSWERS = {
    Effect.BLOCK_ERROR: ReadResult(BlockStatus.TIER_ERROR),
    Effect.NO_ROW: ReadResult(BlockStatus.OK),
    Effect.NOT_FOUND: ReadResult(BlockStatus.MISSING),
}
"""What `read` answers of a block, whatever was found."""


class FaultyStore:
    """A `BlockStore` around another one, in which `Faults` go wrong. As thread-safe as the other.

    What goes wrong here goes wrong between the store and whoever calls it, or on the medium below
    it: the store itself does nothing that its contract forbids.
    """

    def __init__(self, inner: BlockStore, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._lock = threading.Lock()
        self._open_places = 0

    @property
    def open_places(self) -> int:
        """Places that were given out, and neither published nor abandoned so far."""
        return self._open_places

    def _count(self, places: int) -> None:
        with self._lock:
            self._open_places += places

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `BlockStore`; VANISH, LIE."""
        call = self._faults.begin(Method.CONTAINS, keys)
        seen = list(self._inner.contains(keys))
        gone = {i for i in call.at(Effect.VANISH) if seen[i]}
        if gone:
            self._inner.delete([keys[i] for i in gone])
            call.injected(Effect.VANISH, gone)
        lies = {i for i in call.at(Effect.LIE) if not seen[i]}
        for i in lies:
            seen[i] = True
        if lies:
            call.injected(Effect.LIE, lies)
        call.raise_due(done=True)
        return seen

    def reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        """See `BlockStore`; LIE."""
        call = self._faults.begin(Method.RESERVE, [block.key for block in blocks])
        honest, lies = _apart(blocks, call)
        given = iter(self._inner.reserve(honest))
        places = [None if i in lies else next(given) for i in range(len(blocks))]
        self._count(sum(place is not None for place in places))
        call.raise_due(done=True)
        return places

    def write(self, places: Sequence[Place], memory: Sequence[memoryview]) -> None:
        """See `BlockStore`; SHORT, FLIP, FOREIGN, LIE."""
        call = self._faults.begin(Method.WRITE, [place.block.key for place in places])
        views = list(memory)
        for effect in (Effect.SHORT, Effect.FLIP, Effect.FOREIGN, Effect.LIE):
            spoilt = {i for i in call.at(effect) if views[i].nbytes}
            for i in spoilt:
                views[i] = self._spoilt(call, effect, i, memory)
            if spoilt:
                call.injected(effect, spoilt)
        self._inner.write(places, views)
        call.raise_due(done=True)

    def _spoilt(
        self, call: Call, effect: Effect, i: int, memory: Sequence[memoryview]
    ) -> memoryview:
        """What reaches the medium in place of block `i`."""
        view = _memory(memory[i].nbytes)
        match effect:
            case Effect.SHORT:
                half = view.nbytes // 2
                view[:half] = memory[i][:half]
            case Effect.FLIP:
                view[:] = memory[i]
                call.flip(view)
            case Effect.FOREIGN:
                others = (m for m in itertools.chain(memory[i + 1 :], memory[:i]) if m.nbytes)
                other = next(others, memory[i])
                size = min(view.nbytes, other.nbytes)
                view[:size] = other[:size]
                if view == memory[i]:
                    call.flip(view)  # no other block is at hand
        return view

    def publish(self, places: Sequence[Place]) -> None:
        """See `BlockStore`; LIE."""
        call = self._faults.begin(Method.PUBLISH, [place.block.key for place in places])
        honest, lies = _apart(places, call)
        self._inner.publish(honest)
        if lies:
            self._inner.abandon([places[i] for i in lies])
        self._count(-len(places))
        call.raise_due(done=True)

    def abandon(self, places: Sequence[Place]) -> None:
        """See `BlockStore`; LIE."""
        call = self._faults.begin(Method.ABANDON, [place.block.key for place in places])
        honest, _ = _apart(places, call)
        self._inner.abandon(honest)
        self._count(-len(places))
        call.raise_due(done=True)

    def read(self, keys: Sequence[BlockKey], memory: Sequence[memoryview]) -> list[ReadResult]:
        """See `BlockStore`; BLOCK_ERROR, NOT_FOUND, NO_ROW, VANISH, SHORT, FLIP, FOREIGN, LIE."""
        call = self._faults.begin(Method.READ, keys)
        gone = call.at(Effect.VANISH)
        if gone and self._inner.delete([keys[i] for i in gone]):
            call.injected(Effect.VANISH, gone)
        aside = call.at(Effect.SHORT, Effect.FOREIGN, Effect.LIE)
        views = [_memory(view.nbytes) if i in aside else view for i, view in enumerate(memory)]
        results = list(self._inner.read(keys, views))
        there = {i for i, result in enumerate(results) if result.checksum is not None}
        for effect in (Effect.FLIP, Effect.SHORT, Effect.LIE, Effect.FOREIGN):
            met = {
                i
                for i in call.at(effect) & there
                if self._tampered(call, effect, keys[i], results, i, (views[i], memory[i]))
            }
            if met:
                call.injected(effect, met)
        for effect, answer in _ANSWERS.items():
            met = call.at(effect)
            for i in met:
                results[i] = answer
            if met:
                call.injected(effect, met)
        call.raise_due(done=True)
        return results

    def _tampered(
        self,
        call: Call,
        effect: Effect,
        key: BlockKey,
        results: list[ReadResult],
        i: int,
        views: tuple[memoryview, memoryview],
    ) -> bool:
        """Tamper with what was read of block `i`, if that can be done; `views` are where it was
        read to, and where the caller looks."""
        found, given = views
        checksum = results[i].checksum
        if checksum is None or not checksum.length:
            return False
        match effect:
            case Effect.FLIP:
                call.flip(found[: checksum.length])
            case Effect.SHORT:
                half = checksum.length // 2
                given[:half] = found[:half]
            case Effect.FOREIGN:
                other = self._another(key, given)
                if other is None:
                    given[: checksum.length] = found[: checksum.length]
                    return False
                results[i] = other
        return True

    def _another(self, key: BlockKey, memory: memoryview) -> ReadResult | None:
        """Read another block than `key` into memory."""
        for other in self._inner.scan():
            if other != key:
                (result,) = self._inner.read([other], [memory])
                if result.checksum is not None:
                    return result
        return None

    def discard(self, blocks: Sequence[NewBlock]) -> int:
        """See `BlockStore`; LIE."""
        call = self._faults.begin(Method.DISCARD, [block.key for block in blocks])
        honest, lies = _apart(blocks, call)
        count = self._inner.discard(honest) + len(lies)
        call.raise_due(done=True)
        return count

    def delete(self, keys: Sequence[BlockKey]) -> int:
        """See `BlockStore`; LIE."""
        call = self._faults.begin(Method.DELETE, keys)
        honest, lies = _apart(keys, call)
        count = self._inner.delete(honest) + len(lies)
        call.raise_due(done=True)
        return count

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See `BlockStore`; LIE."""
        call = self._faults.begin(Method.TOUCH, keys)
        self._inner.touch(_apart(keys, call)[0])
        call.raise_due(done=True)

    def scan(self) -> Iterator[BlockKey]:
        """See `BlockStore`; LIE."""
        call = self._faults.begin(Method.SCAN)
        if call.has(Effect.LIE):
            call.injected(Effect.LIE)
            return iter(())
        found = self._inner.scan()
        call.raise_due(done=True)
        return found

    def changes(self, cursor: int | None) -> ChangeBatch:
        """See `BlockStore`; LIE."""
        call = self._faults.begin(Method.CHANGES)
        if cursor is not None and call.has(Effect.LIE):
            call.injected(Effect.LIE)
            return ChangeBatch(cursor, ())
        batch = self._inner.changes(cursor)
        call.raise_due(done=True)
        return batch

    def stat(self) -> StoreStat:
        """See `BlockStore`."""
        call = self._faults.begin(Method.STAT)
        stat = self._inner.stat()
        call.raise_due(done=True)
        return stat

    def close(self) -> None:
        """See `BlockStore`."""
        call = self._faults.begin(Method.CLOSE)
        self._inner.close()
        call.raise_due(done=True)


def faulty_backend(backend: Backend, faults: Faults | Callable[[StoreContext], Faults]) -> Backend:
    """The same backend, whose stores have these faults; for the backends of a test's `Assembly`.

    What a backend registers itself goes around the contract of its store, so it is left out: bytes
    go through host memory.

    Args:
        backend: one that brings a store.
        faults: of all its stores together, or what gives those of each one.

    Raises:
        ValueError: it brings no store.
    """
    open_store = backend.open_store
    if open_store is None:
        raise ValueError(f"backend {backend.name!r} brings no store in which anything could fail")

    def open_faulty(context: StoreContext) -> BlockStore:
        mine = faults if isinstance(faults, Faults) else faults(context)
        call = mine.begin(Method.OPEN)
        store = FaultyStore(open_store(context), mine)
        try:
            call.raise_due(done=True)
        except BaseException:
            store.close()
            raise
        return store

    return replace(backend, open_store=open_faulty, register=None)


def _apart(items: Sequence[T], call: Call) -> tuple[list[T], set[int]]:
    """The items that the call is really made for, and the positions of those it lies about."""
    lies = call.at(Effect.LIE)
    if lies:
        call.injected(Effect.LIE, lies)
    return [item for i, item in enumerate(items) if i not in lies], lies


def _memory(nbytes: int) -> memoryview:
    """Page-aligned, as stores ask for."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
