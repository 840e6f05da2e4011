"""Opens the tiers' stores behind the start of the engine, and anew where they are replaced."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from tiered_kv.contracts import BlockStore
from tiered_kv.errors import RefuseToStart, reason_in

__all__ = ["StoreOpener"]

logger = logging.getLogger(__name__)

LONGEST_RETRY = 6.0
"""Times the first wait: how rarely what cannot be opened is tried at the least."""


class StoreOpener:
    """Opens each tier's store on a daemon thread of its own, one at a time per tier, and closes
    what was opened. What cannot be opened now is tried again, each time after a longer wait; what
    the start refuses is not, but where it served before, its disk may come back. Thread-safe.

    `opened` and `failed` are called on those threads.
    """

    def __init__(
        self,
        open_store: Callable[[str, bytes], BlockStore],
        *,
        opened: Callable[[str, BlockStore, bytes], None],
        failed: Callable[[str, str], None],
        retry_after: float,
    ) -> None:
        """
        Args:
            open_store: opens the store of a tier in an epoch (`Namespace.epoch`).
            opened: takes a tier, its store and the epoch that this was opened in.
            failed: takes a tier and the reason.
            retry_after: seconds until what could not be opened is tried again; twice as long each
                time, at most `LONGEST_RETRY` times as long.
        """
        self._retry_after = retry_after
        self._open_store = open_store
        self._opened = opened
        self._failed = failed
        self._lock = threading.Condition()
        self._epoch = b""
        self._stores: list[BlockStore] = []
        """Open ones."""
        self._threads: dict[str, threading.Thread] = {}
        self._again: dict[str, float] = {}
        """Tiers that are to be opened anew when their thread has done what it does, and not before
        this time; monotonic seconds."""
        self._tried: set[str] = set()
        """Tiers that were tried to be opened."""
        self._served: set[str] = set()
        """Tiers that have been open."""
        self._said: dict[str, str] = {}
        """By tier, the problem that the log was told of last."""
        self._refusals: list[RefuseToStart] = []
        self._closed = False

    @property
    def epoch(self) -> bytes:
        """The epoch that stores are wanted in."""
        return self._epoch

    def start(self, tiers: Sequence[str], *, wait_seconds: float) -> None:
        """Begin to open; wait at most `wait_seconds` so that an operator's mistake shows at once.

        Raises:
            RefuseToStart: a tier turned out within that time to be unusable as configured.
        """
        for tier in tiers:
            self.reopen(tier)
        with self._lock:
            self._lock.wait_for(lambda: self._tried.issuperset(tiers), wait_seconds)
            if self._refusals:
                raise self._refusals[0]

    def begin_epoch(self, epoch: bytes) -> None:
        """Stores are wanted in this epoch from now on; `reopen` opens them. Never blocks."""
        with self._lock:
            self._epoch = epoch

    def reopen(self, tier: str, *, after: float = 0.0) -> None:
        """Open the tier's store, not before `after` seconds, and give it to `opened`. Never
        blocks; where the tier is being opened already, it is opened once more after that."""
        with self._lock:
            if self._closed:
                return
            self._again[tier] = time.monotonic() + after
            self._lock.notify_all()
            if tier in self._threads:
                return
            thread = threading.Thread(
                target=self._run, args=(tier,), name=f"tiered-kv-open-{tier}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # no thread to be had
                problem = error
                self._tried.add(tier)
            else:
                self._threads[tier] = thread
                return
        self._report(tier, problem)

    def _run(self, tier: str) -> None:
        wait = self._retry_after
        while (epoch := self._turn(tier)) is not None:
            settled = self._open(tier, epoch)
            with self._lock:
                self._tried.add(tier)
                self._lock.notify_all()
                if settled:
                    wait = self._retry_after
                elif tier not in self._again:
                    self._again[tier] = time.monotonic() + wait
                    wait = min(2 * wait, LONGEST_RETRY * self._retry_after)

    def _turn(self, tier: str) -> bytes | None:
        """Wait until the tier is to be opened; the epoch in which. None: it is not any more."""
        with self._lock:
            while not self._closed and tier in self._again:
                left = self._again[tier] - time.monotonic()
                if left <= 0:
                    del self._again[tier]
                    return self._epoch
                self._lock.wait(left)
            del self._threads[tier]
            return None

    def _open(self, tier: str, epoch: bytes) -> bool:
        """Whether the tier is open, or trying again is of no use."""
        try:
            store = self._open_store(tier, epoch)
        except RefuseToStart as error:
            with self._lock:
                self._refusals.append(error)
            self._report(tier, error)
            return tier not in self._served
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; its tier is out
            self._report(tier, error)
            return False
        with self._lock:
            late = self._closed
            if not late:
                self._stores.append(store)
        if late:
            _close(store)
            return True
        self._served.add(tier)
        self._said.pop(tier, None)
        try:
            self._opened(tier, store, epoch)
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; its tier is out
            self._report(tier, error)
        return True

    def _report(self, tier: str, error: Exception) -> None:
        if self._said.get(tier) != str(error):
            self._said[tier] = str(error)
            logger.error(
                "tier %s cannot be opened and stays out of use: %s", tier, reason_in(tier, error)
            )
        self._failed(tier, str(error))

    def release(self, store: BlockStore) -> None:
        """A store that was opened is needed no more: close it. Blocks as long as that takes."""
        with self._lock:
            ours = any(one is store for one in self._stores)
            self._stores = [one for one in self._stores if one is not store]
        if ours:
            _close(store)

    def close(self, timeout: float) -> bool:
        """Close every opened store, each on a thread of its own, and wait at most `timeout`
        seconds for all of them; True if all are closed. A store that is still opening is closed
        when it is open."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            stores, self._stores = self._stores, []
        until = time.monotonic() + timeout
        threads = [
            threading.Thread(target=_close, args=(store,), name="tiered-kv-close", daemon=True)
            for store in stores
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


def _close(store: BlockStore) -> None:
    try:
        store.close()
    except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; the end goes on
        logger.warning("closing a store failed: %r", error)
