"""A handler while it serves a hop, and a store while it serves a tier: both can be replaced while
calls run, which then end on what they began with."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from tiered_kv.contracts import BlockStore, TransferHandler
from tiered_kv.specs import HopResult, TransferSpec

__all__ = ["Attached", "ReadsAndThen", "Tenure"]

logger = logging.getLogger(__name__)


@runtime_checkable
class ReadsAndThen(Protocol):
    """A handler between a store and host slots that lets the engine go on in the same thread: the
    bytes are in the processor's cache still, and nothing is handed over."""

    async def transfer_and_then(
        self, spec: TransferSpec[Any, Any], then: Callable[[HopResult], HopResult]
    ) -> HopResult:
        """Like `TransferHandler.transfer`; gives what `then` makes of the result."""
        ...


class Tenure:
    """The time in which a store serves a tier. Thread-safe."""

    def __init__(self, released: Callable[[], None]) -> None:
        """`released` is called once, when the tenure was ended and the last of its handlers is
        closed: nobody needs the store any more. It is called on a thread that may block."""
        self._released = released
        self._lock = threading.Lock()
        self._handlers = 1  # the tenure itself, until it is ended
        self._ended = False

    def enter(self) -> None:
        """A handler was made for the store."""
        with self._lock:
            self._handlers += 1

    def leave(self) -> None:
        """A handler of the store is closed."""
        with self._lock:
            self._handlers -= 1
            over = not self._handlers
        if over:
            self._released()

    def end(self) -> None:
        """The store was replaced, or taken away. Idempotent."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._handlers -= 1
            over = not self._handlers
        if over:
            _in_background(self._released)


class Attached:
    """A hop's handler, and what it was made for. Thread-safe; nothing blocks."""

    def __init__(
        self, label: str, handler: TransferHandler[Any, Any], store: BlockStore | None
    ) -> None:
        self.handler = handler
        self.store = store
        self.goes_on = handler if isinstance(handler, ReadsAndThen) else None
        """The handler, where it is one that lets the engine go on."""
        self.modes = dict(handler.modes())
        self._label = label
        self._tenure: Tenure | None = None
        self._lock = threading.Lock()
        self._calls = 0
        self._retired = False

    def serve(self, tenure: Tenure) -> None:
        """It was made for the store of this tenure. Call it before the first call."""
        tenure.enter()
        self._tenure = tenure

    def begin(self) -> bool:
        """A call begins. False: it was retired, another one serves the hop."""
        with self._lock:
            if self._retired:
                return False
            self._calls += 1
            return True

    def end(self) -> None:
        """A call has returned: no copy of it can touch anything any more."""
        with self._lock:
            self._calls -= 1
            over = self._retired and not self._calls
        if over:
            _in_background(self._close)

    def retire(self) -> threading.Thread | None:
        """No call begins any more; it is closed, in the background, when the last has returned.
        Idempotent.

        Returns:
            The thread that closes it now; None where calls run, or it was retired before.
        """
        with self._lock:
            if self._retired:
                return None
            self._retired = True
            if self._calls:
                return None
        return _in_background(self._close)

    def _close(self) -> None:
        try:
            self.handler.close()
        # A handler may be anybody's; what comes behind it is let go of all the same.
        except Exception:
            logger.exception("closing the handler of %s failed", self._label)
        if self._tenure is not None:
            self._tenure.leave()


def _in_background(work: Callable[[], None]) -> threading.Thread | None:
    thread = threading.Thread(target=work, name="tiered-kv-retire", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no thread to be had: it is never closed, the process goes on
        logger.warning("what was replaced stays open: %s", error)
        return None
    return thread
