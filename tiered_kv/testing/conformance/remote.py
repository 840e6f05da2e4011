"""Stores in processes of their own, driven over a pipe; each can be made to die in mid-call.

Imports neither pytest nor torch: the processes import it too, and are to start quickly.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from types import FrameType
from typing import Any, Self

from tiered_kv.contracts import BlockStore, ChangeBatch, NewBlock, Place, ReadResult, StoreStat
from tiered_kv.errors import NoSpace, TierError
from tiered_kv.testing.conformance.blocks import StoreArguments, aligned_copy, page_aligned
from tiered_kv.testing.conformance.children import Opener
from tiered_kv.values import BlockKey

__all__ = ["ProcessDied", "RemoteStore", "StoreProcess", "StoreProcesses"]

_ANSWER_SECONDS = 120.0
_USUAL_LENGTH = 200
"""How many steps a call is taken to have, of which none has ended yet."""

_ERRORS: dict[str, Callable[[str], Exception]] = {
    "NoSpace": NoSpace,
    "ValueError": ValueError,
    "TierError": lambda text: TierError(text, tier="remote"),
}


def _context(opener: Opener) -> ForkServerContext:
    """Where processes are forked from one that has imported what opens the store, and never opened
    one: a process that is started from nothing takes a second, most of it for imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, getattr(opener, "func", opener).__module__])
    return context


class ProcessDied(Exception):
    """The process of a store was killed in a call, as it was told, or right after it."""


class StoreProcess:
    """A child process that opens one store at a time."""

    def __init__(self, opener: Opener) -> None:
        context = _context(opener)
        self._connection, theirs = context.Pipe()
        self._child = context.Process(target=_serve, args=(opener, theirs), daemon=True)
        self._child.start()
        theirs.close()

    def call(self, method: str, *arguments: Any, dies_at: int | None = None) -> tuple[Any, int]:
        """Have a method of the open store called: its answer, and how many steps (function calls
        and lines of Python, in the calling thread) it took.

        Args:
            method: one of `BlockStore`, or `open`.
            arguments: as `_Served` takes them.
            dies_at: the step at which the process kills itself with SIGKILL. A call that ends
                earlier is followed by the kill.

        Raises:
            ProcessDied: with `dies_at`, always.
            NoSpace, TierError, ValueError: the store raised it.
            RuntimeError: the store raised something else, or the process is gone or stuck.
        """
        try:
            self._connection.send((method, arguments, dies_at))
            if not self._connection.poll(_ANSWER_SECONDS):
                raise RuntimeError(f"{method} did not end within {_ANSWER_SECONDS:g} s")
            error, value, steps = self._connection.recv()
        except (EOFError, ConnectionError) as gone:
            self.end()
            if dies_at is None:
                raise RuntimeError(f"the process of a store died in {method}") from gone
            raise ProcessDied(f"in step {dies_at} of {method}") from None
        if dies_at is not None:
            self.end()
            raise ProcessDied(f"after the {steps} steps of {method}")
        if error is not None:
            raise _ERRORS.get(error, RuntimeError)(value)
        return value, steps

    def end(self) -> None:
        """Kill the process, if it is alive, and let go of it."""
        self._connection.close()
        self._child.kill()
        self._child.join(_ANSWER_SECONDS)


class StoreProcesses:
    """Processes for stores: one is always being started ahead of need. Used as a context."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._idle = [StoreProcess(opener)]
        self.started = 1
        """How many processes were started so far."""

    def take(self) -> StoreProcess:
        """A process without an open store."""
        taken = self._idle.pop(0)
        if not self._idle:
            self.started += 1
            self._idle.append(StoreProcess(self._opener))
        return taken

    def give_back(self, process: StoreProcess) -> None:
        """It has closed its store."""
        self._idle.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().end()


class RemoteStore:
    """A `BlockStore` in another process. For one thread."""

    def __init__(self, processes: StoreProcesses, arguments: StoreArguments) -> None:
        self._processes = processes
        self._process: StoreProcess | None = processes.take()
        self._steps: dict[str, int] = {}
        self._share: float | None = None
        self._call("open", arguments)

    def die_in_next_call(self, share: float) -> None:
        """Have the process killed in the next call, after this share (0 to 1) of the steps that
        the last call of the same method took."""
        self._share = share

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._process is None:
            raise TierError("this store is closed", tier="remote")
        if self._share is not None:
            dies_at = 1 + int(self._share * self._steps.get(method, _USUAL_LENGTH))
            process, self._process = self._process, None
            return process.call(method, *arguments, dies_at=dies_at)
        value, self._steps[method] = self._process.call(method, *arguments)
        return value

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `BlockStore`."""
        seen: list[bool] = self._call("contains", list(keys))
        return seen

    def reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        """See `BlockStore`."""
        numbers: list[int | None] = self._call("reserve", list(blocks))
        given = zip(blocks, numbers, strict=True)
        return [None if number is None else Place(block, number) for block, number in given]

    def write(self, places: Sequence[Place], memory: Sequence[memoryview]) -> None:
        """See `BlockStore`."""
        self._call("write", [place.token for place in places], [bytes(view) for view in memory])

    def publish(self, places: Sequence[Place]) -> None:
        """See `BlockStore`."""
        self._call("publish", [place.token for place in places])

    def abandon(self, places: Sequence[Place]) -> None:
        """See `BlockStore`."""
        self._call("abandon", [place.token for place in places])

    def read(self, keys: Sequence[BlockKey], memory: Sequence[memoryview]) -> list[ReadResult]:
        """See `BlockStore`."""
        found = self._call("read", list(keys), [view.nbytes for view in memory])
        for view, (_, data) in zip(memory, found, strict=True):
            view[: len(data)] = data
        return [result for result, _ in found]

    def discard(self, blocks: Sequence[NewBlock]) -> int:
        """See `BlockStore`."""
        count: int = self._call("discard", list(blocks))
        return count

    def delete(self, keys: Sequence[BlockKey]) -> int:
        """See `BlockStore`."""
        count: int = self._call("delete", list(keys))
        return count

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See `BlockStore`."""
        self._call("touch", list(keys))

    def scan(self) -> Iterator[BlockKey]:
        """See `BlockStore`."""
        keys: list[BlockKey] = self._call("scan")
        return iter(keys)

    def changes(self, cursor: int | None) -> ChangeBatch:
        """See `BlockStore`."""
        batch: ChangeBatch = self._call("changes", cursor)
        return batch

    def stat(self) -> StoreStat:
        """See `BlockStore`."""
        stat: StoreStat = self._call("stat")
        return stat

    def close(self) -> None:
        """See `BlockStore`. The process is free for another store then."""
        if self._process is not None:
            self._call("close")
            self._processes.give_back(self._process)
            self._process = None

    def kill(self) -> None:
        """End the process, wherever it is. Idempotent."""
        if self._process is not None:
            self._process.end()
            self._process = None


# ------------------------------------------------------------------------------- in the process


class _Served:
    """The store of this process; places are numbered, memory is handed on as bytes."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._store: BlockStore | None = None
        self._places: dict[int, Place] = {}
        self._number = 0

    def open(self, arguments: StoreArguments) -> None:
        self._places.clear()
        self._store = self._opener(arguments)

    def reserve(self, blocks: list[NewBlock]) -> list[int | None]:
        return [self._keep(place) for place in self._open().reserve(blocks)]

    def _open(self) -> BlockStore:
        if self._store is None:
            raise TierError("no store is open in this process", tier="remote")
        return self._store

    def _keep(self, place: Place | None) -> int | None:
        if place is None:
            return None
        self._number += 1
        self._places[self._number] = place
        return self._number

    def write(self, numbers: list[int], data: list[bytes]) -> None:
        places = [self._places[number] for number in numbers]
        self._open().write(places, [aligned_copy(one) for one in data])

    def publish(self, numbers: list[int]) -> None:
        self._open().publish([self._places.pop(number) for number in numbers])

    def abandon(self, numbers: list[int]) -> None:
        self._open().abandon([self._places.pop(number) for number in numbers])

    def read(self, keys: list[BlockKey], sizes: list[int]) -> list[tuple[ReadResult, bytes]]:
        memory = [page_aligned(size) for size in sizes]
        results = self._open().read(keys, memory)
        return [(r, bytes(view)) for r, view in zip(results, memory, strict=True)]

    def scan(self) -> list[BlockKey]:
        return list(self._open().scan())

    def stat(self) -> StoreStat:
        stat = self._open().stat()
        modes = dict(stat.modes)
        counts = stat.blocks, stat.used_bytes, stat.capacity_bytes, stat.evicted_blocks
        return StoreStat(*counts, modes)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        target = self if method in vars(_Served) else self._open()
        return getattr(target, method)(*arguments)


class _Steps:
    """A trace function that counts what it is called for, and ends the process at one of them."""

    def __init__(self, last: int | None) -> None:
        self.count = 0
        self._last = last

    def __call__(self, frame: FrameType, event: str, argument: object) -> Self:
        self.count += 1
        if self.count == self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        return self


def _serve(opener: Opener, commands: Connection) -> None:
    """Child process: calls methods of a store until nobody asks any more."""
    served = _Served(opener)
    while True:
        try:
            method, arguments, dies_at = commands.recv()
        except EOFError:
            return
        steps = _Steps(dies_at)
        error: str | None = None
        before = sys.gettrace()
        sys.settrace(steps)
        try:
            value = served.call(method, arguments)
        except Exception as raised:  # noqa: BLE001 - told to whoever asked, and judged there
            error, value = type(raised).__name__, f"{type(raised).__name__}: {raised}"
        finally:
            sys.settrace(before)
        commands.send((error, value, steps.count))
