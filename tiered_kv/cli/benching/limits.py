"""What the machine does at most: plain copies of memory, and plain reads and writes of a file."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path

from tiered_kv.cli.benching.figures import Sample
from tiered_kv.cli.benching.page_cache import drop_from_cache
from tiered_kv.errors import DeadlineExceeded, TieredKVError
from tiered_kv.threads import DaemonExecutor
from tiered_kv.values import PAGE_BYTES

__all__ = ["Memory", "RawFile", "timed"]

_MOST_IOVECS = 1024  # IOV_MAX of Linux
_TOO_SHORT = 0.02
"""Seconds. fio tells how long it ran in whole milliseconds, but how long each call took in
nanoseconds: of a shorter run, the calls say more."""


def timed(work: Callable[[], object]) -> Sample:
    """Time a call, and the processor time of all threads of this process meanwhile."""
    processor, wall = time.process_time(), time.perf_counter()
    work()
    return Sample(time.perf_counter() - wall, time.process_time() - processor)


class _Crew:
    """Threads that do one thing together."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._executor = DaemonExecutor(threads, "tiered-kv-bench-limit")

    def each(self, work: Callable[[int], None], over: Sequence[int], timeout: float) -> None:
        """Call `work` for each of the numbers, and wait.

        Raises:
            DeadlineExceeded: not within `timeout` seconds.
        """
        calls = [self._executor.submit(work, number) for number in over]
        _, late = wait(calls, timeout)
        if late:
            raise DeadlineExceeded(f"plain copies did not end within {timeout:g} s")
        for call in calls:
            call.result()

    def close(self) -> None:
        """End the threads, some of which may hang."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class Memory:
    """Two areas of host memory of `nbytes` bytes each, in huge pages where the kernel gives them,
    and the threads that copy the one into the other."""

    def __init__(self, nbytes: int, threads: int) -> None:
        self._nbytes = nbytes
        self._maps = [mmap.mmap(-1, nbytes) for _ in range(2)]
        for one in self._maps:
            with suppress(OSError):  # a kernel without huge pages
                one.madvise(mmap.MADV_HUGEPAGE)
            for start in range(0, nbytes, PAGE_BYTES):
                one[start] = 1
        self.areas = [memoryview(one) for one in self._maps]
        self._addresses = [
            ctypes.addressof((ctypes.c_char * nbytes).from_buffer(one)) for one in self._maps
        ]
        self._crew = _Crew(threads)

    @property
    def threads(self) -> int:
        """How many copy at once."""
        return self._crew.threads

    def copy(self, timeout: float) -> None:
        """Copy all bytes, each thread its share.

        Raises:
            DeadlineExceeded: not within `timeout` seconds.
        """
        source, target = self._addresses
        share = -(-self._nbytes // self._crew.threads)

        def piece(start: int) -> None:
            # Without the interpreter's lock, as every call by way of ctypes.
            ctypes.memmove(target + start, source + start, min(share, self._nbytes - start))

        self._crew.each(piece, range(0, self._nbytes, share), timeout)

    def close(self) -> None:
        """End the threads. The memory goes with the last view of it."""
        self._crew.close()


class RawFile:
    """A file beside the tier's, read and written with nothing around it: by vectored calls of our
    own, from huge pages, and by fio where it is installed. Direct where the directory allows it."""

    def __init__(
        self,
        path: Path,
        memory: Memory,
        nbytes: int,
        block_bytes: int,
        *,
        call: int,
        depth: int,
    ) -> None:
        """Make the file, all its room taken.

        Args:
            path: of the file; it is made.
            memory: what is written, and read into.
            nbytes: of the file; at most an area of the memory.
            block_bytes: of each piece of memory in a vectored call.
            call: about how many bytes one call moves; at least one block.
            depth: calls that run at once.

        Raises:
            TieredKVError: it cannot be made.
        """
        self._path = path
        self._areas = memory.areas
        self._nbytes = nbytes
        self._crew = _Crew(depth)
        blocks = max(1, min(call // block_bytes, _MOST_IOVECS))
        # Each thread gets something to do, as far as there are blocks for that.
        self._call = block_bytes * max(1, min(blocks, nbytes // block_bytes // depth))
        self._block_bytes = block_bytes
        self._fio = shutil.which("fio")
        try:
            self._descriptor, self.direct = _made(path, nbytes)
        except OSError as error:
            raise TieredKVError(f"cannot make {path} to measure the disk with: {error}") from error

    @property
    def has_fio(self) -> bool:
        """Whether fio is installed."""
        return self._fio is not None

    @property
    def how(self) -> str:
        """How it is read and written, in words."""
        mode = "direct" if self.direct else "buffered, since this file system has no direct I/O"
        return f"{self._crew.threads} calls at once of {self._call // 1024} KiB, {mode}"

    def run(self, timeout: float, *, write: bool, by_fio: bool = False) -> Sample:
        """Write or read all of it; it must be written before it is read. What is buffered is
        dropped from the page cache before a read, and flushed after a write. `by_fio` only where
        there is one.

        Raises:
            TieredKVError: it failed.
            DeadlineExceeded: not within `timeout` seconds.
        """
        if not write and not self.direct:
            drop_from_cache([self._path.parent])
        try:
            if by_fio and self._fio:
                return self._by_fio(self._fio, timeout, write=write)
            return timed(lambda: self._by_ourselves(timeout, write=write))
        except OSError as error:
            raise TieredKVError(f"cannot use {self._path}: {error}") from error

    def _by_ourselves(self, timeout: float, *, write: bool) -> None:
        area = self._areas[0 if write else 1]
        move = os.pwritev if write else os.preadv

        def call(start: int) -> None:
            end = min(start + self._call, self._nbytes)
            pieces = [
                area[at : min(at + self._block_bytes, end)]
                for at in range(start, end, self._block_bytes)
            ]
            if move(self._descriptor, pieces, start) != end - start:
                raise OSError(errno.EIO, f"a call on {self._path} moved less than it was given")

        self._crew.each(call, range(0, self._nbytes, self._call), timeout)
        if write and not self.direct:
            os.fdatasync(self._descriptor)

    def _by_fio(self, fio: str, timeout: float, *, write: bool) -> Sample:
        threads = self._crew.threads
        # fio moves whole calls only: as many as each thread has.
        call = self._call
        share = max(call, self._nbytes // threads // call * call)
        jobs = max(1, min(threads, self._nbytes // share))
        command = [
            fio,
            "--name=limit",
            f"--filename={self._path}",
            f"--rw={'write' if write else 'read'}",
            f"--bs={call}",
            f"--numjobs={jobs}",
            f"--size={share}",
            f"--offset_increment={share}",
            f"--direct={int(self.direct)}",
            f"--end_fsync={int(write and not self.direct)}",
            *("--ioengine=psync", "--thread", "--group_reporting", "--overwrite=1"),
            *("--allow_file_create=0", "--output-format=json"),
        ]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout,
                cwd=self._path.parent,
            )
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded(f"fio did not end within {timeout:g} s") from error
        if done.returncode:
            raise TieredKVError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
        job = json.loads(done.stdout)["jobs"][0]
        told = job["write" if write else "read"]
        seconds = float(told["runtime"]) / 1e3
        if seconds < _TOO_SHORT:
            seconds = told["lat_ns"]["mean"] * told["total_ios"] / jobs / 1e9
        seconds *= self._nbytes / int(told["io_bytes"])
        processor = (job["usr_cpu"] + job["sys_cpu"]) / 100 * float(told["runtime"]) / 1e3 * jobs
        return Sample(seconds, processor if seconds >= _TOO_SHORT else None)

    def close(self) -> None:
        """Let go of the file, which stays."""
        self._crew.close()
        os.close(self._descriptor)


def _made(path: Path, nbytes: int) -> tuple[int, bool]:
    """A new file, all its room taken, and whether it is direct."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        descriptor, direct = os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor, direct = os.open(path, flags, 0o600), False
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, direct
