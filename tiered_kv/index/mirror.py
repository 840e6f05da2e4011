"""The keys of one store in memory, for the scheduler: looked up without I/O or waiting.

Why it is exact once the writers rest. A fill notes the log's cursor before it scans, follows the
log while it scans, and takes out at its end once more what the log removed last. So a key with a
change after the cursor ends as its last change says, however long ago the scan had seen it; a key
without one has not changed, and the scan saw it as it is. Afterwards only the log changes the set,
with one exception: a key that was forgotten is taken out when the store, asked afterwards, does
not have it; if it comes back after that answer, the log tells so after the answer. A log that was
cut, or belongs to an index that was emptied, says so, and the mirror fills anew; a store whose
files were replaced raises, and is opened anew.

Until then it may be wrong for some time, in both directions: a stale hit becomes a miss when the
block is loaded, and is forgotten then; a block it does not know yet is computed again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from tiered_kv.contracts import BlockStore, ChangeBatch
from tiered_kv.errors import RefuseToStart, TieredKVError, reason_in
from tiered_kv.index.keyset import KeySet
from tiered_kv.values import BlockKey

__all__ = ["Mirror"]

_CHUNK_KEYS = 32_768
"""Keys that a fill adds at once: each time costs some hundred hand-overs of the GIL."""
_MOST_ASKED = 65_536
_RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)

logger = logging.getLogger(__name__)


class Mirror:
    """Follows a store from a daemon thread of its own; works with any `BlockStore`.

    The thread opens the store, takes `changes(None)`, fills from `scan`, then polls `changes`.
    When the store fails it is closed and opened again after 1 s, later up to 30 s.
    All methods may be called from any thread; none but `close` and `wait_ready` blocks.
    """

    def __init__(
        self, open_store: Callable[[], BlockStore], *, tier: str, poll_seconds: float = 0.05
    ) -> None:
        """Start the thread; `open_store` is called in it."""
        self._open_store = open_store
        self._tier = tier
        self._poll_seconds = poll_seconds
        self._keys = KeySet()
        self._state = "opening"
        self._ready = threading.Event()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._asked: dict[BlockKey, None] = {}
        self._absent: set[BlockKey] = set()
        self._forgotten: dict[BlockKey, None] = {}
        self._version = object()
        self._thread = threading.Thread(target=self._run, name=f"mirror-{tier}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """ "opening", "filling", "ready" or "failed: reason"."""
        return self._state

    @property
    def version(self) -> object:
        """Another object whenever answers may have changed; ask for it before `lookup`."""
        return self._version

    def _changed(self) -> None:
        self._version = object()

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool | None]:
        """Whether each block is stored. None (only while "filling"): not known yet; the thread
        was asked, ask again. False for all while the store is not open or does not work."""
        known = self._keys  # before the state: an empty set is not "ready"
        state = self._state
        if not keys or state not in ("filling", "ready"):
            return [False] * len(keys)
        answers: list[bool | None] = list(known.contains(keys))
        if state == "filling":
            unknown: list[BlockKey] = []
            for place, key in enumerate(keys):
                if not answers[place] and key not in self._absent:
                    answers[place] = None
                    unknown.append(key)
            self._ask(unknown)
        if self._forgotten:
            for place, key in enumerate(keys):
                if key in self._forgotten:
                    answers[place] = False
        return answers

    def _ask(self, keys: list[BlockKey]) -> None:
        with self._lock:
            room = _MOST_ASKED - len(self._asked)
            self._asked.update(dict.fromkeys(keys[:room]))
        self._wake.set()

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """These turned out to be missing or corrupt: not stored, until the thread has asked the
        store, which may hold them again by then."""
        with self._lock:
            self._forgotten.update(dict.fromkeys(keys))
            while len(self._forgotten) > _MOST_ASKED:  # the thread hangs in the store
                del self._forgotten[next(iter(self._forgotten))]
        self._changed()
        self._wake.set()

    def poll_now(self) -> None:
        """Have the thread poll without waiting for the next tick."""
        self._wake.set()

    def wait_ready(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until the state is "ready"; whether it is."""
        return self._ready.wait(timeout)

    def __len__(self) -> int:
        """Number of keys known to be stored."""
        return len(self._keys)

    def close(self, timeout: float = 5.0) -> bool:
        """Stop the thread, which closes the store; False when it did not end in `timeout`
        seconds. Idempotent."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # ------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            store: BlockStore | None = None
            try:
                store = self._open_store()
                self._follow(store)
            except Exception as error:  # noqa: BLE001 - a third party's store may raise anything
                failures = 0 if self._ready.is_set() else failures
                self._fail(error)
                self._stop.wait(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)])
                failures += 1
            finally:
                if store is not None:
                    self._close_store(store)

    def _fail(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {reason_in(self._tier, error)}"
        if self._state != f"failed: {reason}":
            expected = isinstance(error, TieredKVError)
            level = logging.ERROR if isinstance(error, RefuseToStart) else logging.WARNING
            logger.log(
                level,
                "tier %s answers no lookups until it works: %s",
                self._tier,
                reason,
                exc_info=None if expected else error,
            )
        self._state = f"failed: {reason}"
        self._ready.clear()
        self._keys = KeySet()
        with self._lock:
            self._forgotten.clear()
            self._asked.clear()
        self._changed()

    def _close_store(self, store: BlockStore) -> None:
        try:
            store.close()
        except Exception as error:  # noqa: BLE001 - a third party's store may raise anything
            logger.warning(
                "tier %s: the store did not close: %s", self._tier, reason_in(self._tier, error)
            )

    def _follow(self, store: BlockStore) -> None:
        cursor = self._fill(store)
        while not self._stop.is_set():
            self._wake.wait(self._poll_seconds)
            self._wake.clear()
            self._ask_for_the_forgotten(store)
            batch = store.changes(cursor)
            if batch.restart:
                cursor = self._fill(store)
            else:
                cursor = batch.cursor
                if batch.changes:
                    _follow_into(batch, self._keys, None)
                    self._changed()

    def _fill(self, store: BlockStore) -> int:
        """Scan the store into an empty set; gives the cursor from which changes are to follow."""
        cursor = store.changes(None).cursor
        self._ready.clear()
        self._absent = set()
        self._state = "filling"
        self._keys = keys = KeySet()
        self._changed()
        gone = KeySet(keys.seed)
        chunk: list[BlockKey] = []
        due = time.monotonic() + self._poll_seconds
        cut = False
        for key in store.scan():
            chunk.append(key)
            if len(chunk) >= _CHUNK_KEYS or self._asked:
                keys.add(chunk)
                chunk.clear()
                self._answer(store)
                if not cut and time.monotonic() >= due:
                    batch = store.changes(cursor)
                    # Scan to the end all the same: the next poll will be told so again, and a
                    # store that is written to all the time, with a short log, would never be full.
                    cut = batch.restart
                    if not cut:
                        cursor = batch.cursor
                        _follow_into(batch, keys, gone)
                        self._absent.difference_update(key for key, _ in batch.changes)
                    due = time.monotonic() + self._poll_seconds
            if self._stop.is_set():
                return cursor
        keys.add(chunk)
        keys.difference_update(gone)
        self._state = "ready"
        self._absent = set()
        with self._lock:
            self._asked.clear()
        self._changed()
        self._ready.set()
        return cursor

    def _answer(self, store: BlockStore) -> None:
        with self._lock:
            asked, self._asked = list(self._asked), {}
        if asked:
            there = store.contains(asked)
            stored = [key for key, held in zip(asked, there, strict=True) if held]
            self._keys.add(stored)
            if len(self._absent) < _MOST_ASKED:
                self._absent.update(set(asked) - set(stored))

    def _ask_for_the_forgotten(self, store: BlockStore) -> None:
        with self._lock:
            forgotten = list(self._forgotten)
        if not forgotten:
            return
        # They may have been stored anew before they were forgotten: the log tells that once only.
        there = store.contains(forgotten)
        self._keys.discard([key for key, held in zip(forgotten, there, strict=True) if not held])
        with self._lock:
            for key in forgotten:
                self._forgotten.pop(key, None)
        self._changed()


def _follow_into(batch: ChangeBatch, keys: KeySet, gone: KeySet | None) -> None:
    """Change `keys` as the log tells, and remember in `gone` what it removed."""
    last = dict(batch.changes)
    added = [key for key, there in last.items() if there]
    removed = [key for key, there in last.items() if not there]
    keys.discard(removed)
    keys.add(added)
    if gone is not None:
        gone.discard(added)
        gone.add(removed)
