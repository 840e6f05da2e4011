"""The keys of one store in memory, for the scheduler: looked up without I/O or waiting."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from tiered_kv.contracts import BlockStore
from tiered_kv.errors import RefuseToStart, TieredKVError
from tiered_kv.index.keyset import KeySet
from tiered_kv.values import BlockKey

__all__ = ["Mirror"]

_CHUNK_KEYS = 2_048
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
        self._told: dict[BlockKey, bool] = {}
        self._thread = threading.Thread(target=self._run, name=f"mirror-{tier}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """ "opening", "filling", "ready" or "failed: reason"."""
        return self._state

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool | None]:
        """Whether each block is stored. None (only while "filling"): not known yet; the thread
        was asked, ask again. False for all while the store is not open or does not work."""
        state = self._state
        if not keys or state not in ("filling", "ready"):
            return [False] * len(keys)
        answers: list[bool | None] = list(self._keys.contains(keys))
        if state == "filling":
            unknown: list[BlockKey] = []
            for place, key in enumerate(keys):
                if not answers[place] and key not in self._absent:
                    answers[place] = None
                    unknown.append(key)
            self._ask(unknown)
        if self._told:
            for place, key in enumerate(keys):
                answers[place] = self._told.get(key, answers[place])
        return answers

    def _ask(self, keys: list[BlockKey]) -> None:
        with self._lock:
            room = _MOST_ASKED - len(self._asked)
            self._asked.update(dict.fromkeys(keys[:room]))
        self._wake.set()

    def add(self, keys: Iterable[BlockKey]) -> None:
        """These were just stored, as far as the caller knows."""
        self._tell(keys, True)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """These turned out to be missing or corrupt: not stored, until the thread has asked the
        store, which may hold them again by then."""
        self._tell(keys, False)

    def _tell(self, keys: Iterable[BlockKey], stored: bool) -> None:
        with self._lock:
            self._told.update(dict.fromkeys(keys, stored))
            while len(self._told) > _MOST_ASKED:  # the thread hangs in the store
                del self._told[next(iter(self._told))]
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
        reason = f"{type(error).__name__}: {error}"
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
            self._told.clear()
            self._asked.clear()

    def _close_store(self, store: BlockStore) -> None:
        try:
            store.close()
        except Exception as error:  # noqa: BLE001 - a third party's store may raise anything
            logger.warning("tier %s: the store did not close: %s", self._tier, error)

    def _follow(self, store: BlockStore) -> None:
        cursor = self._fill(store)
        while not self._stop.is_set():
            self._wake.wait(self._poll_seconds)
            self._wake.clear()
            self._take_what_was_told(store)
            batch = store.changes(cursor)
            cursor = self._fill(store) if batch.restart else batch.cursor
            if batch.changes:
                last = dict(batch.changes)
                self._keys.discard([key for key, added in last.items() if not added])
                self._keys.add([key for key, added in last.items() if added])

    def _fill(self, store: BlockStore) -> int:
        """Scan the store into an empty set; gives the cursor from which changes are to follow."""
        cursor = store.changes(None).cursor
        self._ready.clear()
        self._keys = KeySet()
        self._absent = set()
        self._state = "filling"
        chunk: list[BlockKey] = []
        for key in store.scan():
            chunk.append(key)
            if len(chunk) >= _CHUNK_KEYS or self._asked:
                self._keys.add(chunk)
                chunk.clear()
                self._answer(store)
            if self._stop.is_set():
                return cursor
        self._keys.add(chunk)
        self._state = "ready"
        self._absent = set()
        with self._lock:
            self._asked.clear()
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

    def _take_what_was_told(self, store: BlockStore) -> None:
        with self._lock:
            told = dict(self._told)
        # They may have been stored anew before this was told, and the change log tells it once.
        forgotten = [key for key, stored in told.items() if not stored]
        there = store.contains(forgotten) if forgotten else []
        gone = [key for key, held in zip(forgotten, there, strict=True) if not held]
        self._keys.discard(gone)
        self._keys.add([key for key, stored in told.items() if stored])
        with self._lock:
            for key, stored in told.items():
                if self._told.get(key) is stored:
                    del self._told[key]
