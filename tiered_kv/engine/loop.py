"""The transfer engine's event loop, in a daemon thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
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
        """Start the thread; returns at once, calls are kept until the loop runs."""
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(_complain)
        self._tasks: set[asyncio.Task[Any]] = set()
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

    def call(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Have the loop call a function soon. False when the loop was stopped: it never will."""
        try:
            self.loop.call_soon_threadsafe(lambda: function(*args, **kwargs))
        except RuntimeError:  # "Event loop is closed": asyncio has no class of its own for it
            return False
        return True

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


async def _ended(tasks: list[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    logger.error(
        "transfer engine: %s",
        context.get("message", "an event loop callback failed"),
        exc_info=context.get("exception"),
    )
