"""The posix I/O engine: vectored reads and writes, several groups in flight, direct if possible.

Groups of about 4 MiB are what pays: a call per block costs several times the processor time.
Whoever asks for groups moves them itself: its thread would do nothing else meanwhile, and handing
one over and back costs as much as moving it. Where there are several, and the disk's depth is not
used by other calls, it gets helpers, which take the next group from the same iterator, in daemon
threads of the engine: a call of aiofiles' `wrap` for each helper, not for each group, on a loop in
a daemon thread.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from aiofiles.os import wrap

from tiered_kv.errors import TierError
from tiered_kv.threads import DaemonExecutor
from tiered_kv.values import PAGE_BYTES
from tiered_kv_nvme.groups import EndOfFile, Group

__all__ = ["DirectMode", "PosixIo", "open_probe", "probe_direct", "probe_direct_reading"]

SECTOR_BYTES = 512
"""Least alignment that direct I/O can have."""

PROBE_NAME = "probe.tmp"


_Call: TypeAlias = Callable[[int, Sequence[memoryview], int], int]
"""`os.preadv` or `os.pwritev`."""

_Move: TypeAlias = Callable[[Group], dict[int, OSError]]
"""Moves a group; gives an error per block that was not moved whole."""


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
    """Write to a nameless file of `directory` with O_DIRECT, aligned and not, and read it.

    A file system may refuse O_DIRECT at open or only at the first write; one that accepts an
    unaligned write is buffering behind our back.

    Raises:
        OSError: the directory cannot be written to at all.
    """
    try:
        fd = open_probe(directory, os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return DirectMode(0, "the file system refuses O_DIRECT")
    try:
        page = mmap.mmap(-1, 2 * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with memoryview(page) as view:
            mode = _judge(lambda part, offset: os.pwritev(fd, [part], offset), view)
            os.preadv(fd, [view[:PAGE_BYTES]], 0)
            return mode
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


def open_probe(directory: Path, flags: int) -> int:
    """A new file in `directory` that has no name: what is tried with it leaves nothing behind.

    Raises:
        OSError: the directory cannot be written to, or not with these flags.
    """
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


class PosixIo:
    """A `GroupIo` that runs groups on at most `threads` daemon threads of its own, and single ones
    on as many threads of its callers."""

    def __init__(self, threads: int, tier: str, *, alignment: int) -> None:
        """Start nothing yet. `alignment` as in `DirectMode`, 0 where files are buffered."""
        self._threads = threads
        self._tier = tier
        self._alignment = alignment or 1
        self._executor = DaemonExecutor(threads, f"tiered-kv-{tier}-io")
        self._help = partial(wrap(_work), executor=self._executor)
        self._callers = threading.Semaphore(threads)
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._running = 0
        """Calls, each of which moves groups by itself."""
        self._helping = 0
        self._closed = False

    def read_groups(self, groups: Sequence[Group]) -> dict[int, OSError]:
        """See `GroupIo.read_groups`."""
        return self._drive(groups, self._read_apart)

    def write_groups(self, groups: Sequence[Group]) -> dict[int, OSError]:
        """See `GroupIo.write_groups`."""
        return self._drive(groups, self._write_together)

    def flush(self, fds: Sequence[int]) -> None:
        """See `GroupIo.flush`."""
        groups = [Group(fd, 0, (), (place,)) for place, fd in enumerate(fds)]
        for error in self._drive(groups, _flush_one).values():
            raise error

    def modes(self) -> Mapping[str, str]:
        """See `GroupIo.modes`."""
        return {"engine": "posix"}

    def _read_apart(self, group: Group) -> dict[int, OSError]:
        try:
            self._whole(os.preadv, group.fd, group.views, group.offset, reading=True)
        except OSError as error:
            if len(group.views) == 1:
                return {group.positions[0]: error}
        else:
            return {}
        failed: dict[int, OSError] = {}
        offset = group.offset
        for view, position in zip(group.views, group.positions, strict=True):
            try:
                self._whole(os.preadv, group.fd, (view,), offset, reading=True)
            except OSError as error:
                failed[position] = error
            offset += view.nbytes
        return failed

    def _write_together(self, group: Group) -> dict[int, OSError]:
        try:
            self._whole(os.pwritev, group.fd, group.views, group.offset, reading=False)
        except OSError as error:
            return dict.fromkeys(group.positions, error)
        return {}

    def _whole(
        self, call: _Call, fd: int, views: Sequence[memoryview], offset: int, *, reading: bool
    ) -> None:
        """Move all of `views`, going on after short calls.

        Raises:
            EndOfFile: the file ends before what is to be read.
            OSError: the call failed.
        """
        left = views
        total = sum([view.nbytes for view in left])
        while left:
            count = call(fd, left, offset)
            if count == total:
                return
            # A direct call may go on at aligned offsets only.
            count -= count % self._alignment
            if count == 0:
                if reading:
                    raise EndOfFile(errno.ENODATA, f"end of file at byte {offset}")
                raise OSError(errno.EIO, f"nothing could be written at byte {offset}")
            offset += count
            total -= count
            left = list(_drop(left, count))

    def _drive(self, groups: Sequence[Group], move: _Move) -> dict[int, OSError]:
        if not groups:
            return {}
        count = self._enter(len(groups) - 1)
        try:
            queue = iter(groups)  # whose `next` is atomic
            helpers = None
            if count:
                loop = self._started()
                helpers = asyncio.run_coroutine_threadsafe(self._together(count, queue, move), loop)
            failed: dict[int, OSError] = {}
            try:
                for group in queue:
                    with self._callers:
                        failed |= move(group)
            finally:
                # Also after an error: the memory must be the caller's again.
                if helpers is not None:
                    failed |= helpers.result()
            return failed
        finally:
            self._leave(count)

    async def _together(
        self, count: int, queue: Iterator[Group], move: _Move
    ) -> dict[int, OSError]:
        # Not a TaskGroup: a cancelled call goes on in its thread, and the memory must be ours
        # until the last one has ended.
        ends = await asyncio.gather(
            *(self._help(queue, move) for _ in range(count)), return_exceptions=True
        )
        failed: dict[int, OSError] = {}
        for end in ends:
            if isinstance(end, BaseException):
                raise end
            failed |= end
        return failed

    def _enter(self, most: int) -> int:
        """A call begins; how many helpers it gets, at most `most`: those that are free, so that
        none comes when all is done, and as many as use what other calls leave of the threads."""
        with self._changed:
            if self._closed:
                raise TierError(f"tier {self._tier}: its I/O was closed", tier=self._tier)
            self._running += 1
            count = max(0, min(most, self._threads - self._running - self._helping))
            self._helping += count
            return count

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._changed:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=_run,
                    args=(loop,),
                    name=f"tiered-kv-{self._tier}-io-loop",
                    daemon=True,
                )
                try:
                    thread.start()
                except BaseException:  # no thread is to be had: the next call tries again
                    loop.close()
                    raise
                self._loop, self._thread = loop, thread
            return self._loop

    def _leave(self, helpers: int) -> None:
        with self._changed:
            self._running -= 1
            self._helping -= helpers
            self._stop_if_idle()
            self._changed.notify_all()

    def _stop_if_idle(self) -> None:
        if self._closed and not self._running and self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
            self._executor.shutdown(wait=False)

    def close(self, timeout: float = 5.0) -> bool:
        """See `GroupIo.close`. A call that hangs keeps its daemon threads, nothing else."""
        with self._changed:
            self._closed = True
            self._stop_if_idle()
            thread = self._thread
            if not self._changed.wait_for(lambda: not self._running, timeout):
                return False
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                return False
        return self._executor.join(timeout)


def _work(queue: Iterator[Group], move: _Move) -> dict[int, OSError]:
    """Move groups until none is left."""
    failed: dict[int, OSError] = {}
    for group in queue:
        failed |= move(group)
    return failed


def _flush_one(group: Group) -> dict[int, OSError]:
    try:
        os.fdatasync(group.fd)
    except OSError as error:
        return dict.fromkeys(group.positions, error)
    return {}


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
