"""Comparing all blocks of a store with their checksums in the background, round after round."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from tiered_kv.contracts import BlockStore
from tiered_kv.errors import reason_in
from tiered_kv.upkeep.verifying import VERIFY_BATCH_BYTES, Verified, verify

__all__ = ["Pace", "Scrubber"]

logger = logging.getLogger(__name__)

LEAST_ROUND_SECONDS = 60.0
"""A round begins no earlier after the one before, however little there is to read."""

YIELD_SECONDS = 0.05
"""How long it steps aside for loads before it looks again ..."""
LONGEST_YIELD_SECONDS = 2.0
"""... and the longest it does so before one batch: a tier that always loads is scrubbed, too."""

NICENESS = 19


class Pace:
    """When the next batch may be read: over any time, no more than `rate` bytes per second and two
    batches. Longer pauses are not made up for.

    Used by one thread.
    """

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`rate` is in bytes per second, above 0; `clock` gives seconds."""
        if rate < 1:
            raise ValueError(f"a rate of {rate} bytes per second is below 1")
        self._rate = rate
        self._clock = clock
        self._next = clock()

    def took(self, nbytes: int) -> float:
        """So many bytes were read; seconds to wait before the next batch."""
        now = self._clock()
        self._next = max(now, self._next + nbytes / self._rate)
        return self._next - now


class Scrubber:
    """Scrubs one store on a daemon thread of its own, at the lowest priority, until it is closed.

    It drops what is bad, so that the next store of such a block finds room, and tells what it
    found. Trouble of the store ends the round; the next one begins a minute after its start.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        tier: str,
        rank: int,
        block_bytes: int,
        rate: int,
        drop: bool,
        checked: Callable[[Verified], object],
        ended: Callable[[bool], object],
        busy: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        """Begin.

        Args:
            store: opened for `rank`; closed by its owner, after `close`.
            tier: its name, for the log.
            rank: whose parts are read.
            block_bytes: length of the longest block.
            rate: bytes per second, above 0.
            drop: whether bad blocks are dropped; False where the tier is read only.
            checked: called with every batch.
            ended: called at each round's end; whether it got through.
            busy: asked before each batch; while it says True the batch waits, for a while.
            clock: monotonic seconds.
            wait: waits so many seconds, less where `close` was called; whether it was. By default
                that of the thread's own event.
        """
        self._store = store
        self._tier = tier
        self._rank = rank
        self._block_bytes = block_bytes
        self._drop = drop
        self._checked = checked
        self._ended = ended
        self._busy = busy
        self._clock = clock
        self._rate = rate
        self._pace = Pace(rate, clock)
        self._closed = threading.Event()
        self._wait = wait or self._closed.wait
        self._thread = threading.Thread(
            target=self._run, name=f"tiered-kv-scrub-{tier}", daemon=True
        )
        self._thread.start()

    def close(self, timeout: float) -> bool:
        """End, waiting at most `timeout` seconds for a batch that is being read; True if ended.
        Idempotent."""
        self._closed.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        _step_back()
        while not self._closed.is_set():
            began = self._clock()
            whole = self._round()
            if not self._closed.is_set():
                self._ended(whole)
                self._wait(max(0.0, began + LEAST_ROUND_SECONDS - self._clock()))

    def _round(self) -> bool:
        """Whether it got through."""
        try:
            batches = verify(
                self._store,
                self._store.scan(),
                rank=self._rank,
                block_bytes=self._block_bytes,
                drop=self._drop,
                # Several batches a second, so that none delays a load for long.
                batch_bytes=max(1, min(VERIFY_BATCH_BYTES, self._rate // 4)),
                pace=self._slow_down,
                stop=self._told_to_end,
            )
            for batch in batches:
                self._tell(batch)
        # A store may be anybody's, and so may its errors; the next round tries again.
        except Exception as error:  # noqa: BLE001
            if not self._closed.is_set():
                logger.warning(
                    "tier %s: scrubbing it failed: %s", self._tier, reason_in(self._tier, error)
                )
            return False
        return True

    def _tell(self, batch: Verified) -> None:
        if batch.corrupt:
            logger.warning(
                "tier %s: scrubbing found %d blocks that do not match their checksums%s: %s",
                self._tier,
                len(batch.corrupt),
                "; they are dropped" if self._drop else "",
                ", ".join(key.hex() for key in batch.corrupt[:3]),
            )
        self._checked(batch)

    def _slow_down(self, nbytes: int) -> None:
        self._wait(self._pace.took(nbytes))

    def _told_to_end(self) -> bool:
        """Asked before each batch: step aside for loads first."""
        stepped_aside = 0.0
        while not self._closed.is_set() and stepped_aside < LONGEST_YIELD_SECONDS and self._busy():
            self._wait(YIELD_SECONDS)
            stepped_aside += YIELD_SECONDS
        return self._closed.is_set()


def _step_back() -> None:
    """Give this thread the lowest priority; on Linux a thread has one of its own."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    except OSError as error:  # it reads at its rate all the same
        logger.debug("no lower priority for scrubbing: %s", error)
