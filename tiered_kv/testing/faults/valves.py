"""Points at which a test holds up what passes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any, TypeVar

from tiered_kv.contracts import HandlerContext, TransferHandler
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import HopResult, LoadStoreSpec, TransferSpec

__all__ = ["PATIENCE", "Valve", "hold_hop"]

PATIENCE = 30.0
"""Seconds after which what is held, or waited for, counts as forgotten."""

S = TypeVar("S", bound=LoadStoreSpec)
D = TypeVar("D", bound=LoadStoreSpec)


class Valve:
    """A point that calls pass; shut, it holds them until it is opened. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = True
        self._held = 0
        self._passed = 0

    @property
    def held(self) -> int:
        """Calls that are being held."""
        return self._held

    @property
    def passed(self) -> int:
        """Calls that have passed so far."""
        return self._passed

    def shut(self) -> None:
        """Hold every call from now on."""
        with self._changed:
            self._open = False

    def open(self) -> None:
        """Let go what is held, and hold no more."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def pass_through(self, patience: float = PATIENCE) -> None:
        """Pass, or be held for at most `patience` seconds.

        Raises:
            TimeoutError: the valve was not opened within that time.
        """
        with self._changed:
            if not self._open:
                self._held += 1
                self._changed.notify_all()
                try:
                    if not self._changed.wait_for(lambda: self._open, patience):
                        raise TimeoutError(f"held for {patience:g} s; nobody opened the valve")
                finally:
                    self._held -= 1
            self._passed += 1
            self._changed.notify_all()

    def wait_held(self, count: int = 1, timeout: float = PATIENCE) -> bool:
        """Wait at most `timeout` seconds until so many calls are held; whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._held >= count, timeout)

    def wait_passed(self, count: int = 1, timeout: float = PATIENCE) -> bool:
        """Wait at most `timeout` seconds until so many calls have passed; whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self._passed >= count, timeout)


class _HeldHandler:
    """A handler whose calls pass a valve before they begin."""

    def __init__(
        self, handler: TransferHandler[Any, Any], context: HandlerContext, valve: Valve
    ) -> None:
        self._handler = handler
        self._executor = context.executor
        self._valve = valve

    async def transfer(self, spec: TransferSpec[Any, Any]) -> HopResult:
        # In the tier's own threads, so that a call that is held takes one of them, as a hang does.
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._valve.pass_through)
        return await self._handler.transfer(spec)

    def modes(self) -> Mapping[str, str]:
        return self._handler.modes()

    def close(self) -> None:
        self._handler.close()


def hold_hop(registry: TransferRegistry, src: type[S], dst: type[D], valve: Valve) -> None:
    """From now on, the handlers that `registry` makes for a pair pass `valve` before they begin.

    For use in the `register` of a backend that a test adds behind the one that brought the pair.

    Raises:
        KeyError: nothing is registered for the pair.
    """
    held = registry.pair(src, dst)

    def factory(context: HandlerContext) -> TransferHandler[S, D]:
        return _HeldHandler(held.factory(context), context, valve)

    registry.register(src, dst, factory, provider="hold_hop", override=True)
