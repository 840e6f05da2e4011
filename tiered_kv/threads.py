"""Daemon threads: a small executor for blocking storage calls, and an alarm.

`concurrent.futures.ThreadPoolExecutor` joins its threads when the interpreter exits, so one call
that hangs in a dead disk would keep the process alive for ever. These threads are daemons.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

__all__ = ["Alarm", "DaemonExecutor"]

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
            RuntimeError: the executor was shut down, or no thread could be started; then the next
                call tries again.
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
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._limit:
                thread = threading.Thread(
                    target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
            self._queue.put((future, run))
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


class Alarm:
    """Calls something a while after it was set, on a daemon thread of its own. Thread-safe.

    To set it costs next to nothing, however often that is done: the thread is started once, and
    sleeps on where an alarm is stopped and set again. (A `threading.Timer` is a thread each time,
    and its caller waits until that runs: milliseconds beside threads that are busy.)
    """

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        """Start no thread yet; `name` shows in stack dumps. `call` must raise nothing."""
        self._name = name
        self._call = call
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._due: float | None = None
        self._sleeps = False
        """Until it is woken."""
        self._closed = False

    def set(self, seconds: float) -> None:
        """Call in so many seconds. Nothing where it is set already, or was closed.

        Raises:
            RuntimeError: no thread is to be had.
        """
        with self._changed:
            if self._closed or self._due is not None:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._due = time.monotonic() + seconds
            if self._sleeps:
                self._changed.notify()

    def stop(self) -> None:
        """Do not call, unless that has begun."""
        with self._changed:
            self._due = None

    def close(self) -> None:
        """Do not call any more; the thread ends. Idempotent."""
        with self._changed:
            self._closed = True
            self._due = None
            self._changed.notify()

    def _run(self) -> None:
        while self._wait():
            self._call()

    def _wait(self) -> bool:
        """Until it is time; False when it is closed."""
        with self._changed:
            while not self._closed:
                if self._due is None:
                    self._sleeps = True
                    self._changed.wait()
                    self._sleeps = False
                elif (left := self._due - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    self._due = None
                    return True
        return False
