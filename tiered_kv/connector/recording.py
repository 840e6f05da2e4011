"""Records which blocks requests want, for `tiered-kv plan`: no text, no token, no key of a block.

Blocks are named by a keyed hash of their keys. Its secret lies beside the trace, readable by its
owner alone, and does not go with it: whoever has a trace can tell that two blocks are equal, and
cannot tell whether they are of a text that he guesses.

The scheduler's thread hands over what it has looked up, and waits for nothing: hashing and writing
are done on a thread of the recorder's own, behind a bounded queue. What finds no room there, or
cannot be written, is dropped and counted, in the statistics and in the next line that is written.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from tiered_kv.complaints import Complaints
from tiered_kv.connector.requests import RequestState
from tiered_kv.stats import StatsRecorder
from tiered_kv.values import BlockKey, CacheGeometry, GroupGeometry

__all__ = ["ENGINE_HITS", "TRACE_FORMAT", "TRACE_VERSION", "TraceRecorder", "trace_files"]

logger = logging.getLogger(__name__)

TRACE_FORMAT = "tiered-kv trace"
"""`format` in the first line of each file."""
TRACE_VERSION = 1

ENGINE_HITS = "engine"
"""Where `hits` counts what the engine held itself."""

FILES = 8
"""A trace is cut into at least so many files, of which the oldest goes when there is no room."""

MOST_WAITING = 256
"""Requests that are over and not written yet."""

RETRY_SECONDS = 10.0
"""How long nothing is written after a failure."""

TURN_SECONDS = 5.0
"""How long another engine may take for a file of its own; locked for longer, it is stopped."""

LOCK = "lock"
SECRET = "secret"
SECRET_BYTES = 32
DIGEST_BYTES = 8


def trace_files(directory: Path) -> list[Path]:
    """The files of the traces in a directory, oldest first."""
    return sorted(directory.glob("trace-*.jsonl"))


@dataclass(slots=True)
class _Wanted:
    """What a request wanted."""

    time: float
    """Seconds since the epoch, of its first lookup."""
    tokens: int
    blocks: Sequence[BlockKey]
    computed: int
    """Tokens that the engine held itself."""
    sources: Sequence[str | None]
    """Tier of each block behind those; None: not found."""
    settled: bool
    """Whether `sources` is what it got."""
    output_tokens: int = 0

    def hits(self, block_tokens: int) -> dict[str, int]:
        """Tokens of its prefix that were found, by where."""
        found = Counter(takewhile(lambda tier: tier is not None, self.sources))
        hits = {str(tier): blocks * block_tokens for tier, blocks in found.items()}
        return {ENGINE_HITS: self.computed, **hits} if self.computed else hits


class TraceRecorder:
    """Writes a trace. `begin`, `looked_up`, `answered` and `finished` are called on the
    scheduler's thread; none of them waits or raises an `OSError`."""

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        stats: StatsRecorder,
        *,
        clock: Callable[[], float] = time.time,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """Nothing is opened before `begin`.

        Args:
            directory: of the trace; made when it is not there. Engines may share it.
            max_bytes: that all files of traces in the directory take together; the same for all
                engines that share it.
            stats: counts what is recorded and dropped.
            clock: seconds since the epoch.
            retry_seconds: how long nothing is written after a failure.
        """
        self._stats = stats
        self._clock = clock
        self._group: GroupGeometry | None = None
        """The KV group whose blocks are recorded."""
        self._before: Sequence[GroupGeometry] = ()
        """Groups whose keys come before that one's."""
        self._pending: dict[str, _Wanted] = {}
        self._queue: queue.Queue[_Wanted | None] = queue.Queue(MOST_WAITING)
        self._lost = 0
        """Dropped for want of room in the queue, ever; the scheduler's thread counts."""
        self._files = _Files(directory, max_bytes)
        self._retry_seconds = retry_seconds
        self._complaints = Complaints(logger)
        self._thread: threading.Thread | None = None

    # The scheduler's thread

    def begin(self, geometry: CacheGeometry, windows: Sequence[int | None] = ()) -> None:
        """The engine's blocks are known; records from now on. For `windows` see `Manager.attach`:
        of groups with one only the last blocks of a prefix are kept, so that another one tells what
        was found."""
        known = dict(enumerate(windows))
        whole = (i for i in range(len(geometry.groups)) if known.get(i) is None)
        place = next(whole, 0)
        self._before, self._group = geometry.groups[:place], geometry.groups[place]
        per_rank = sum(group.block_bytes / group.tokens for group in geometry.groups)
        self._files.describe(self._group.tokens, per_rank * geometry.world_size)
        thread = threading.Thread(target=self._run, name="tiered-kv-trace", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread to be had
            self._complaints.about("the recorder of traces", error, "nothing is recorded")
            self._group = None
            return
        self._thread = thread

    def looked_up(
        self,
        request: str,
        state: RequestState,
        keys: Sequence[BlockKey],
        computed: int,
        tokens: int | None,
    ) -> None:
        """A request was looked up, for which see `Manager.lookup`; what its first lookup came to
        is recorded when it is over."""
        wanted = self._pending.get(request)
        if self._group is None or tokens is None or (wanted is not None and wanted.settled):
            return
        size = self._group.tokens
        start = sum(tokens // group.tokens for group in self._before)
        blocks = keys[start : start + tokens // size]
        sources = list(map(state.sources.get, blocks[computed // size :]))
        settled = state.asked_since is None
        if wanted is None:
            began = self._clock()
            self._pending[request] = _Wanted(began, tokens, blocks, computed, sources, settled)
        else:
            wanted.computed, wanted.sources, wanted.settled = computed, sources, settled

    def answered(self, request: str, tokens: int) -> None:
        """A request was answered with so many tokens."""
        wanted = self._pending.get(request)
        if wanted is not None:
            wanted.output_tokens = tokens

    def finished(self, request: str) -> None:
        """A request is over."""
        wanted = self._pending.pop(request, None)
        if wanted is None:
            return
        try:
            self._queue.put_nowait(wanted)
        except queue.Full:
            self._lost += 1
            self._stats.traced("dropped")

    def close(self, timeout: float) -> bool:
        """Write what waits, for at most `timeout` seconds; whether that is done. Idempotent."""
        self._group = None
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        until = time.monotonic() + timeout
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return False
        thread.join(max(0.0, until - time.monotonic()))
        return not thread.is_alive()

    # The recorder's thread

    def _run(self) -> None:
        told = failed = 0
        """Lost ones that a line tells of, and those that could not be written."""
        retry_at = 0.0
        while (wanted := self._queue.get()) is not None:
            if time.monotonic() < retry_at:
                failed += 1
                self._stats.traced("dropped")
                continue
            lost = self._lost + failed
            try:
                self._files.write(wanted, lost - told)
            # Whatever it is, serving must not notice it, and the next one may be written.
            except Exception as error:  # noqa: BLE001
                self._complaints.about("recording a trace", error, "requests are left out of it")
                failed += 1
                retry_at = time.monotonic() + self._retry_seconds
                self._stats.traced("dropped")
                self._files.close()
            else:
                told = lost
                self._stats.traced("recorded")
        self._files.close()


class _Files:
    """The files of one recorder. The recorder's thread owns it."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._share = max_bytes // FILES
        self._header: dict[str, object] = {}
        self._block_tokens = 0
        self._secret = b""
        self._file: io.FileIO | None = None
        self._size = 0

    def describe(self, block_tokens: int, bytes_per_token: float) -> None:
        """What the first line of each file says."""
        self._block_tokens = block_tokens
        self._header = {
            "format": TRACE_FORMAT,
            "version": TRACE_VERSION,
            "block_tokens": block_tokens,
            "bytes_per_token": bytes_per_token,
        }

    def write(self, wanted: _Wanted, dropped: int) -> None:
        """Append a request.

        Raises:
            OSError: it could not be written; then no part of it is in the file.
        """
        if not self._secret:
            self._secret = self._read_secret()
        line = _line(
            {
                "time": round(wanted.time, 3),
                "tokens": wanted.tokens,
                "output_tokens": wanted.output_tokens,
                "hits": wanted.hits(self._block_tokens),
                "dropped": dropped,
                "blocks": [_digest(key, self._secret) for key in wanted.blocks],
            }
        )
        if self._file is not None and self._size + len(line) > self._share:
            self.close()
        if self._file is None:
            self._begin(line)
        else:
            self._append(line)

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._directory))
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += len(data)

    def _begin(self, line: bytes) -> None:
        """A new file, that begins with this line; none, where that could not be written."""
        header = _line({**self._header, "secret": _digest(b"", self._secret)})
        if len(line) + len(header) > self._share:
            raise OSError(
                errno.EFBIG, f"a request of {len(line)} bytes is more than 1/{FILES} of max_size"
            )
        with _turn(self._directory / LOCK):
            self._make_room()
            seconds, rest = divmod(time.time_ns(), 10**9)
            stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
            name = f"trace-{stamp}.{rest:09}-{os.getpid()}-{secrets.token_hex(3)}.jsonl"
            path = self._directory / name
            made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            self._file, self._size = io.FileIO(made, "w"), 0
            try:
                fcntl.flock(made, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as long as it is written to
                self._append(header + line)
            except OSError:
                self.close()
                path.unlink()
                raise

    def _make_room(self) -> None:
        """Delete the oldest files until a further one fits in, and those that are empty: of
        engines that were killed. None, where what others write to leaves no room anyhow."""
        held: list[tuple[Path, int]] = []
        needed = self._share
        for file in trace_files(self._directory):
            size, used = _size_and_use(file)
            if used:
                needed += max(size, self._share)
            elif size:
                held.append((file, size))
            else:
                file.unlink(missing_ok=True)
        if needed > self._max_bytes:
            raise OSError(
                errno.EDQUOT,
                f"{self._directory} holds as much as max_size allows, in files that other engines "
                f"write to; at most {FILES} record there at once, all with the same max_size",
            )
        total = needed + sum(size for _, size in held)
        for file, size in held:
            if total <= self._max_bytes:
                return
            file.unlink(missing_ok=True)
            total -= size

    def _read_secret(self) -> bytes:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / SECRET
        if not path.exists():
            with _turn(self._directory / LOCK):
                if not path.exists():
                    self._make_secret(path)
        secret = path.read_bytes()
        if len(secret) != SECRET_BYTES or path.stat().st_mode & 0o077:
            raise OSError(
                errno.EPERM,
                f"{path} is no secret of {SECRET_BYTES} bytes that its owner alone can read; "
                "remove it to begin a new trace",
            )
        return secret

    def _make_secret(self, path: Path) -> None:
        # Whole from the moment on at which another engine sees it.
        draft = path.with_name(f".{SECRET}")
        made = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            if os.write(made, secrets.token_bytes(SECRET_BYTES)) != SECRET_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(draft))
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(made)

    def close(self) -> None:
        """Nothing is written to the current file any more."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _line(values: dict[str, object]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def _digest(key: bytes, secret: bytes) -> str:
    return hashlib.blake2b(key, key=secret, digest_size=DIGEST_BYTES).hexdigest()


def _size_and_use(file: Path) -> tuple[int, bool]:
    """Its bytes, and whether a recorder writes to it."""
    used = False
    try:
        with file.open("rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                used = True
            return os.fstat(stream.fileno()).st_size, used
    except FileNotFoundError:  # somebody removed it
        return 0, False


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Engines that share a directory begin files one after the other: what each finds there, it
    can count on.

    Raises:
        OSError: it cannot be locked; or another process holds it for longer than `TURN_SECONDS`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        until = time.monotonic() + TURN_SECONDS
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() >= until:
                raise OSError(
                    errno.ETIMEDOUT,
                    f"another process holds {path} for longer than {TURN_SECONDS:g} s; is an "
                    "engine stopped? `fuser` tells which",
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)
