"""The posix I/O engine: vectored reads and writes, several groups in flight, direct if possible.

Groups of about 4 MiB are what pays: a call per block costs several times the processor time. The
calls are aiofiles' wrapped `preadv` and `pwritev` on the engine's own daemon threads; a loop in a
daemon thread hands the next group to whichever thread is free. Twice as many groups as threads
are in flight, so that no thread waits for the loop: the seam then costs less than 5 % of a group.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiofiles.os import wrap

from tiered_kv.errors import TierError
from tiered_kv.threads import DaemonExecutor
from tiered_kv.values import PAGE_BYTES

__all__ = ["DirectMode", "EndOfFile", "Group", "PosixIo", "probe_direct", "probe_direct_reading"]

SECTOR_BYTES = 512
"""Least alignment that direct I/O can have."""

PROBE_NAME = "probe.tmp"

_preadv: Callable[..., Awaitable[int]] = wrap(os.preadv)
_pwritev: Callable[..., Awaitable[int]] = wrap(os.pwritev)
_fdatasync: Callable[..., Awaitable[None]] = wrap(os.fdatasync)


class EndOfFile(OSError):
    """The file ends before the bytes that were asked for."""


@dataclass(frozen=True, slots=True)
class DirectMode:
    """Whether files of a directory can be opened with O_DIRECT, found out by doing it."""

    alignment: int
    """Bytes that offsets and lengths must be a multiple of; 0 where I/O is buffered."""
    reason: str
    """Why it is buffered; empty where it is direct."""

    @property
    def direct(self) -> bool:
        """Whether O_DIRECT is to be used."""
        return self.alignment > 0

    def __str__(self) -> str:
        return "direct" if self.direct else f"buffered ({self.reason})"


def probe_direct(directory: Path) -> DirectMode:
    """Write to a nameless file of `directory` with O_DIRECT, aligned and not.

    A file system may refuse O_DIRECT at open or only at the first write; one that accepts an
    unaligned write is buffering behind our back.

    Raises:
        OSError: the directory cannot be written to at all.
    """
    try:
        fd = _open_probe(directory, os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return DirectMode(0, "the file system refuses O_DIRECT")
    try:
        page = mmap.mmap(-1, 2 * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with memoryview(page) as view:
            return _judge(lambda part, offset: os.pwritev(fd, [part], offset), view)
    finally:
        os.close(fd)


def probe_direct_reading(file: Path | None) -> DirectMode:
    """Like `probe_direct` where nothing may be written: reads `file`, at least two pages long.

    Raises:
        OSError: the file cannot be read at all.
    """
    if file is None:
        return DirectMode(0, "read only, and there is no file to try it with")
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return DirectMode(0, "the file system refuses O_DIRECT")
    try:
        page = mmap.mmap(-1, 2 * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with memoryview(page) as view:
            return _judge(lambda part, offset: os.preadv(fd, [part], offset), view)
    finally:
        os.close(fd)


def _judge(call: Callable[[memoryview, int], int], view: memoryview) -> DirectMode:
    if _accepts(call, view[1:SECTOR_BYTES], 1):
        return DirectMode(0, "the file system takes O_DIRECT but buffers silently")
    for alignment in (SECTOR_BYTES, PAGE_BYTES):
        if _accepts(call, view[:alignment], alignment):
            return DirectMode(alignment, "")
    return DirectMode(0, "the file system refuses aligned O_DIRECT")


def _open_probe(directory: Path, flags: int) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    # No nameless files here, or no O_DIRECT: the named way tells them apart.
    name = directory / f"{os.getpid()}-{threading.get_native_id()}-{PROBE_NAME}"
    try:
        return os.open(name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    finally:
        name.unlink(missing_ok=True)


def _accepts(call: Callable[[memoryview, int], int], view: memoryview, offset: int) -> bool:
    try:
        return call(view, offset) == view.nbytes
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False


@dataclass(frozen=True, slots=True)
class Group:
    """One vectored call: contiguous in the file, scattered in memory."""

    fd: int
    offset: int
    views: tuple[memoryview, ...]
    """At most 1,024, aligned for the file's mode."""
    positions: tuple[int, ...]
    """For each view, which block of the caller's batch it belongs to."""


class PosixIo:
    """Runs groups on at most `threads` daemon threads of its own. Thread-safe.

    The calls block until no thread touches the memory any more, also when some groups failed.
    """

    def __init__(self, threads: int, tier: str, *, alignment: int) -> None:
        """Start nothing yet. `alignment` as in `DirectMode`, 0 where files are buffered."""
        self._threads = threads
        self._tier = tier
        self._alignment = alignment or 1
        self._executor = DaemonExecutor(threads, f"tiered-kv-{tier}-io")
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._running = 0
        self._closed = False

    def read_groups(self, groups: Sequence[Group]) -> dict[int, OSError]:
        """Fill the groups' memory; gives an error per block that could not be read whole. What
        lies beside a place that cannot be read is read all the same.

        Raises:
            TierError: the engine was closed.
        """
        return self._drive(groups, self._read_apart)

    def write_groups(self, groups: Sequence[Group]) -> dict[int, OSError]:
        """Write the groups' memory; gives an error per block that may not be written whole.

        Raises:
            TierError: the engine was closed.
        """
        return self._drive(groups, self._write_together)

    def flush(self, fds: Sequence[int]) -> None:
        """`fdatasync` each file.

        Raises:
            OSError: the first flush that failed, after all have ended.
            TierError: the engine was closed.
        """
        groups = [Group(fd, 0, (), (place,)) for place, fd in enumerate(fds)]
        for error in self._drive(groups, self._flush_one).values():
            raise error

    async def readv(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        """Fill `views` from `offset` on, going on after short reads.

        Raises:
            EndOfFile: the file ends before.
            OSError: the read failed.
        """
        await self._whole(_preadv, fd, views, offset)

    async def writev(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        """Write `views` from `offset` on, going on after short writes.

        Raises:
            OSError: the write failed.
        """
        await self._whole(_pwritev, fd, views, offset)

    async def _read_apart(self, group: Group) -> dict[int, OSError]:
        try:
            await self.readv(group.fd, group.views, group.offset)
        except OSError as error:
            if len(group.views) == 1:
                return {group.positions[0]: error}
        else:
            return {}
        failed: dict[int, OSError] = {}
        offset = group.offset
        for view, position in zip(group.views, group.positions, strict=True):
            try:
                await self.readv(group.fd, (view,), offset)
            except OSError as error:
                failed[position] = error
            offset += view.nbytes
        return failed

    async def _write_together(self, group: Group) -> dict[int, OSError]:
        try:
            await self.writev(group.fd, group.views, group.offset)
        except OSError as error:
            return dict.fromkeys(group.positions, error)
        return {}

    async def _flush_one(self, group: Group) -> dict[int, OSError]:
        try:
            await _fdatasync(group.fd, executor=self._executor)
        except OSError as error:
            return dict.fromkeys(group.positions, error)
        return {}

    async def _whole(
        self,
        call: Callable[..., Awaitable[int]],
        fd: int,
        views: Sequence[memoryview],
        offset: int,
    ) -> None:
        left = list(views)
        total = sum(view.nbytes for view in left)
        while left:
            count = await call(fd, left, offset, executor=self._executor)
            if count == total:
                return
            # A direct call may go on at aligned offsets only.
            count -= count % self._alignment
            if count == 0:
                if call is _pwritev:
                    raise OSError(errno.EIO, f"nothing could be written at byte {offset}")
                raise EndOfFile(errno.ENODATA, f"end of file at byte {offset}")
            offset += count
            total -= count
            left = list(_drop(left, count))

    def _drive(
        self,
        groups: Sequence[Group],
        move: Callable[[Group], Awaitable[dict[int, OSError]]],
    ) -> dict[int, OSError]:
        if not groups:
            return {}
        loop = self._enter()
        try:
            return asyncio.run_coroutine_threadsafe(self._all(groups, move), loop).result()
        finally:
            self._leave()

    async def _all(
        self,
        groups: Sequence[Group],
        move: Callable[[Group], Awaitable[dict[int, OSError]]],
    ) -> dict[int, OSError]:
        failed: dict[int, OSError] = {}
        queue = iter(groups)

        async def work() -> None:
            for group in queue:
                failed.update(await move(group))

        width = min(len(groups), 2 * self._threads)
        # Not a TaskGroup: a cancelled call goes on in its thread, and the memory must be ours
        # until the last one has ended.
        ends = await asyncio.gather(*(work() for _ in range(width)), return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end
        return failed

    def _enter(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise TierError(f"tier {self._tier}: its I/O was closed", tier=self._tier)
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run,
                    args=(self._loop,),
                    name=f"tiered-kv-{self._tier}-io-loop",
                    daemon=True,
                )
                self._thread.start()
            self._running += 1
            return self._loop

    def _leave(self) -> None:
        with self._lock:
            self._running -= 1
            self._stop_if_idle()

    def _stop_if_idle(self) -> None:
        if self._closed and not self._running and self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
            self._executor.shutdown(wait=False)

    def close(self, timeout: float = 5.0) -> bool:
        """Take no more calls; wait at most `timeout` seconds for those that run.

        True when all ended. One that hangs keeps its daemon threads, nothing else. Idempotent.
        """
        with self._lock:
            self._closed = True
            self._stop_if_idle()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                return False
        return self._executor.join(timeout)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _drop(views: Sequence[memoryview], count: int) -> Iterator[memoryview]:
    """What is left of `views` after their first `count` bytes."""
    for view in views:
        if count >= view.nbytes:
            count -= view.nbytes
        else:
            yield view[count:]
            count = 0
