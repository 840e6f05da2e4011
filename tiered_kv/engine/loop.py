"""The transfer engine's event loop, in a daemon thread of its own."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ParamSpec, TypeVar

__all__ = ["LoopThread"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class LoopThread:
    """Owns one asyncio loop and the tasks on it.

    `call` and `stop` are for other threads; everything else runs on the loop.
    """

    def __init__(self, name: str) -> None:
        """Start the thread; returns at once, calls are kept until the loop runs.

        Raises:
            OSError: there is no file descriptor to be had.
        """
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(_complain)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._calls: deque[Callable[[], object]] = deque()
        self._bell = _Bell()
        self.loop.add_reader(self._bell.fd, self._answer)
        self._stopping = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()
            self._bell.close()

    def call(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Have the loop call a function soon. False when the loop was stopped: it never will.

        The caller keeps the GIL, unless it has had it for long already.
        """
        if self.loop.is_closed():
            return False
        self._calls.append(partial(function, *args, **kwargs))
        self._bell.ring()
        return True

    def _answer(self) -> None:
        self._bell.silence()  # first: who calls from now on rings again
        while self._calls:
            self.loop.call_soon(self._calls.popleft())

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine; on the loop only. The task is kept until it ends."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def stop(self, timeout: float) -> bool:
        """Cancel every task and end the thread; True if it ended within `timeout` seconds.

        Idempotent. Calls that hang in executors' threads go on there.
        """
        with self._stopping:
            if not self._stopped:
                self._stopped = True
                self.call(self._wind_down)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _wind_down(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        ending = self.loop.create_task(_ended(tasks))
        ending.add_done_callback(lambda _: self.loop.stop())


class _Bell:
    """Wakes the loop's thread without letting go of the GIL.

    `call_soon_threadsafe` sends a byte through a socket, and lets go of the GIL for that. The
    loop's thread, woken by the byte, takes it, and keeps it for up to 5 ms while it has work: for
    so long the engine's step stands still, in the middle of a call of ours.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable while it rings."""
        self._rings = False
        self._lock = threading.Lock()
        self._closed = False

    def ring(self) -> None:
        """Any thread; once, however often it is called before it is silenced."""
        if self._rings:
            return
        with self._lock:  # the number may be another file's once it was closed
            if self._closed:
                return
            try:
                self._rings = True  # first: the loop may silence it as soon as it rings
                _eventfd_write(self.fd, 1)
            except BaseException:  # a signal's: the next one rings, whether this did or not
                self._rings = False
                raise

    def silence(self) -> None:
        """Of the loop's thread."""
        os.eventfd_read(self.fd)
        self._rings = False

    def close(self) -> None:
        """Of the loop's thread, when it ends; to ring does nothing then."""
        with self._lock:
            self._closed = True
            os.close(self.fd)


_eventfd_write = ctypes.PyDLL(None).eventfd_write  # a PyDLL's functions are called with the GIL
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


async def _ended(tasks: list[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    logger.error(
        "transfer engine: %s",
        context.get("message", "an event loop callback failed"),
        exc_info=context.get("exception"),
    )
