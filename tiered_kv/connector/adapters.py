"""What the blocks of requests with a LoRA adapter are named by: the contents of the adapter.

The engine's block hashes know an adapter by its name and path alone. So their keys are salted with
a digest of its files, which is looked up for every request, on a thread of our own: the files may
have been replaced and loaded anew.

An adapter whose files are not what they were when this process first used them is not cached any
more. What the engine computes with may be the old or the new weights: it does not tell when it
reloads them, and its own prefix cache, whose blocks it offers for storing, keeps those of the old
ones.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from tiered_kv.errors import IdentityError
from tiered_kv.threads import DaemonExecutor

__all__ = ["UNNAMED", "Adapter", "Adapters", "Inquiry", "Naming"]

logger = logging.getLogger(__name__)

MOST_ADAPTERS = 10_000
"""So many are told apart; requests with further ones are not cached."""
MOST_QUEUED = 64
COMPLAIN_AGAIN_SECONDS = 60.0
SALT_BYTES = 32


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as the engine knows it."""

    name: str
    path: str
    number: int
    """The engine's id of it: another one after it was unloaded and loaded again."""
    variant: str = ""
    """How the engine reads its files, where there are several ways."""


@dataclass(frozen=True, slots=True)
class Naming:
    """How the blocks of a request are named."""

    salt: bytes = b""
    """Goes into every key; empty for the engine's own."""
    cached: bool = True
    """False: none of its blocks is looked up or stored."""
    host_only: bool = False
    """They mean nothing to other processes, and stay in the host tier."""


UNNAMED = Naming()
"""Of a request without an adapter."""

_UNCACHED = Naming(cached=False)


@dataclass(slots=True)
class Inquiry:
    """Asks for the naming of one request. One thread uses it."""

    adapter: Adapter
    until: float
    """Until when the request waits for it."""
    found: Future[str] | None
    """The identity of the adapter's files; None where nobody looks for it."""
    settled: Naming | None = None


@dataclass(slots=True)
class _Known:
    """What an adapter was when it was first used."""

    mark: str
    changed: bool = False


@dataclass(slots=True)
class _Check:
    """Finds out what an adapter's files are; those that ask before it begins share it."""

    answer: Future[str] = field(default_factory=Future)


class Adapters:
    """Knows the adapters that were used in this process. One thread uses it; it waits for nothing,
    and reads no file on that thread."""

    def __init__(
        self,
        identify: Callable[[str], str],
        *,
        wait: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            identify: names the contents of the adapter at a path; raises `IdentityError` where they
                can't be told. Called on a thread of our own.
            wait: seconds that a request waits for that; then it is not cached.
            clock: monotonic seconds.
        """
        self._identify = identify
        self._wait = wait
        self._clock = clock
        self._executor = DaemonExecutor(1, "tiered-kv-adapters")
        self._lock = threading.Lock()
        self._queued: dict[str, _Check] = {}
        self._known: dict[tuple[str, str, str], _Known] = {}
        self._here = secrets.token_hex(16)
        """Names what is known to this process alone."""
        self._quiet_until: float | None = None

    def ask(self, adapter: Adapter) -> Inquiry:
        """A request with this adapter has come: begin to find out what its blocks are named by."""
        return Inquiry(adapter, self._clock() + self._wait, self._look(adapter.path))

    def _look(self, path: str) -> Future[str] | None:
        with self._lock:
            check = self._queued.get(path)
            if check is not None:
                return check.answer
            if len(self._queued) >= MOST_QUEUED:
                return None
            check = self._queued[path] = _Check()
        try:
            self._executor.submit(self._run, path, check)
        except RuntimeError as error:  # closed, or no thread to be had
            with self._lock:
                self._queued.pop(path, None)
            logger.debug("adapter %s is not looked at: %s", path, error)
            return None
        return check.answer

    def _run(self, path: str, check: _Check) -> None:
        with self._lock:  # who asks from now on has to have the files looked at again
            self._queued.pop(path, None)
        try:
            found = self._identify(path)
        # Whatever goes wrong with its files is the adapter's trouble, not the thread's.
        except Exception as error:  # noqa: BLE001
            check.answer.set_exception(error)
        else:
            check.answer.set_result(found)

    def naming(self, inquiry: Inquiry) -> Naming | None:
        """How the request's blocks are named; None while that is not known, for a while. It does
        not change any more then."""
        if inquiry.settled is None:
            if inquiry.found is None:
                inquiry.settled = _UNCACHED
            elif inquiry.found.done():
                inquiry.settled = self._name(inquiry.adapter, inquiry.found)
            elif self._clock() >= inquiry.until:
                self._say_late(inquiry.adapter)
                inquiry.settled = _UNCACHED
        return inquiry.settled

    def _say_late(self, adapter: Adapter) -> None:
        now = self._clock()
        if self._quiet_until is not None and now < self._quiet_until:
            return
        self._quiet_until = now + COMPLAIN_AGAIN_SECONDS
        logger.warning(
            "adapter %s: its files at %s were not read within %g s; requests with it are not "
            "cached meanwhile, nor are those with others that wait behind it",
            adapter.name,
            adapter.path,
            self._wait,
        )

    def _name(self, adapter: Adapter, found: Future[str]) -> Naming:
        error = found.exception()
        if error is None:
            mark, host_only = found.result(), False
        else:
            mark, host_only = f"only here: {self._here} {adapter.number}", True
        place = (adapter.name, adapter.path, adapter.variant)
        known = self._known.get(place)
        if known is None:
            if len(self._known) >= MOST_ADAPTERS:
                return _UNCACHED
            known = self._known[place] = _Known(mark)
            if error is not None:
                self._say_unknown(adapter, error)
        if known.mark != mark and not known.changed:
            known.changed = True
            logger.warning(
                "adapter %s: its files at %s are not what they were when it was first used. Its "
                "blocks are not cached any more in this process, since the engine may go on with "
                "either weights; load changed weights from a new path, or reset the cache",
                adapter.name,
                adapter.path,
            )
        if known.changed:
            return _UNCACHED
        text = "\0".join((mark, adapter.variant, *((*place,) if host_only else ())))
        salt = hashlib.blake2b(text.encode(), digest_size=SALT_BYTES).digest()
        return Naming(salt, host_only=host_only)

    def _say_unknown(self, adapter: Adapter, error: BaseException) -> None:
        if not isinstance(error, IdentityError):
            logger.warning("adapter %s: its files cannot be read: %r", adapter.name, error)
        logger.warning(
            "adapter %s: what lies at %s has no identity (%s), so blocks of requests with it stay "
            "in the host tier",
            adapter.name,
            adapter.path,
            error,
        )

    def forget(self) -> None:
        """The engine has dropped all blocks: every adapter is used for the first time again."""
        self._known.clear()

    def close(self) -> None:
        """Look at no more files. Idempotent; waits for nothing."""
        self._executor.shutdown(wait=False, cancel_futures=True)
