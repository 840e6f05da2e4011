"""A small executor of daemon threads for blocking storage calls.

`concurrent.futures.ThreadPoolExecutor` joins its threads when the interpreter exits, so one call
that hangs in a dead disk would keep the process alive for ever. These threads are daemons.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

__all__ = ["DaemonExecutor"]

P = ParamSpec("P")
T = TypeVar("T")


class DaemonExecutor(Executor):
    """Runs calls on a fixed number of daemon threads, first in, first out.

    Thread-safe. Usable with `loop.run_in_executor` and `aiofiles.os.wrap`'s `executor`.
    """

    def __init__(self, threads: int, name: str) -> None:
        """Start no thread yet; `threads` is the most that will run, `name` shows in stack dumps."""
        self._limit = threads
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], None]] | None]
        self._queue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call.

        Raises:
            RuntimeError: the executor was shut down.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - the future carries it, as Executor promises
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._closed:
                raise RuntimeError(f"executor {self._name} was shut down")
            self._queue.put((future, run))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._limit:
                thread = threading.Thread(
                    target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        return future

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            item[1]()
            del item
            self._idle.release()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let queued calls end and refuse new ones; `wait` joins the threads.

        With `cancel_futures` calls that have not begun are dropped. A call that hangs makes
        `wait=True` hang: use `join` with a timeout where that matters.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                if cancel_futures:
                    self._drop_queued()
                for _ in self._threads:
                    self._queue.put(None)
        if wait:
            self.join(None)

    def _drop_queued(self) -> None:
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[0].cancel()

    def join(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds per thread; True when every thread has ended."""
        for thread in self._threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in self._threads)
