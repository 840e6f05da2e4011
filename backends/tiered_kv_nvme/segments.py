"""Segment files: making, giving to a slot class, and which of them are open."""

from __future__ import annotations

import errno
import mmap
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.errors import FormatError
from tiered_kv.values import PAGE_BYTES
from tiered_kv_nvme.faults import translated
from tiered_kv_nvme.headers import MAGIC, SegmentHeader
from tiered_kv_nvme.posix import SECTOR_BYTES, DirectMode

__all__ = ["SEGMENT_NAME", "Leased", "SegmentFiles"]

SEGMENT_NAME = re.compile(r"segment-(\d{6,10})", re.ASCII)
OPEN_FILES = 256
"""Segment files kept open without being in use."""


class _OpenFile:
    """A descriptor and how many leases use it."""

    __slots__ = ("fd", "kept", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.kept = True


@dataclass(frozen=True, slots=True)
class Leased:
    """Segment files that are open for the time of a `with` block."""

    fds: dict[int, int]
    """By segment. One that is in neither of the two is not there: no file of ours has its name."""
    failed: dict[int, OSError]
    """Why a file that is there could not be opened."""


class SegmentFiles:
    """The segment files of one directory. Thread-safe.

    Foreign errors come out as `NoSpace` and `TierError`.
    """

    def __init__(
        self,
        directory: Path,
        tier: str,
        mode: DirectMode,
        *,
        writable: bool,
        sync: bool,
        closing: Callable[[int], None] = lambda fd: None,
    ) -> None:
        """`sync`: flush the directory when a file is made (durability other than none).
        `closing` is called with each descriptor that was leased, right before it is closed."""
        self._directory = directory
        self._tier = tier
        self._mode = mode
        self._writable = writable
        self._sync = sync
        self._closing = closing
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _OpenFile] = OrderedDict()
        self.sparse = False
        """Whether a file had to be made without taking its space from the file system."""

    @property
    def stride(self) -> int:
        """Bytes between header table entries of new files."""
        return max(SECTOR_BYTES, self._mode.alignment)

    @property
    def directory(self) -> Path:
        """Where they all lie."""
        return self._directory

    def path(self, number: int) -> Path:
        """Where the segment lies."""
        return self._directory / f"segment-{number:06d}"

    def numbers(self) -> dict[int, int]:
        """Size in bytes of each file that is named like a segment of ours."""
        found: dict[int, int] = {}
        with (
            translated("list", self._directory, self._tier),
            os.scandir(self._directory) as entries,
        ):
            for entry in entries:
                match = SEGMENT_NAME.fullmatch(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        found[int(match[1])] = entry.stat(follow_symlinks=False).st_size
        return found

    def is_ours(self, number: int) -> bool:
        """Whether the file begins with our magic, or is empty (made, then the process died).

        Raises:
            FormatError: it is ours, and of another format version.
        """
        path = self.path(number)
        with translated("read", path, self._tier):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return False
            try:
                page = os.pread(fd, PAGE_BYTES, 0)
            finally:
                os.close(fd)
        if page and page[: len(MAGIC)] != MAGIC:
            return False
        try:
            SegmentHeader.unpack(page)
        except FormatError as error:
            raise FormatError(
                f"tier {self._tier}: {path} was written in {error}; use the version of "
                "tiered-kv that wrote it, or give the tier another directory"
            ) from error
        return True

    def create(self, header: SegmentHeader) -> None:
        """Make a file of the header's layout with its space taken; nothing stays on failure.

        Raises:
            FileExistsError: there is something of that name.
            NoSpace: the disk or the quota is full.
            TierError: the file cannot be made.
        """
        path = self.path(header.number)
        with translated("make", path, self._tier):
            try:
                fd = self._open_file(header.number, os.O_CREAT | os.O_EXCL)
            except OSError as error:
                if error.errno == errno.EEXIST:
                    raise FileExistsError(f"{path} is there already") from error
                raise
            try:
                # The header first: a file without magic would not be swept after a crash.
                _write_page(fd, header.pack())
                self._take_space(fd, header.layout.file_bytes)
                if self._sync:
                    os.fsync(fd)
                    self._sync_directory()
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)

    def _take_space(self, fd: int, size: int) -> None:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(fd, size)
            self.sparse = True

    def _sync_directory(self) -> None:
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def write_header(self, header: SegmentHeader) -> None:
        """Give an existing file a new header page.

        Raises:
            NoSpace: the disk or the quota is full.
            TierError: it cannot be written, or is not there.
        """
        with translated("write", self.path(header.number), self._tier):
            fd = self._open_file(header.number, 0)
            try:
                _write_page(fd, header.pack())
            finally:
                os.close(fd)

    def remove(self, number: int) -> None:
        """Delete the file if it is there. A directory of that name is somebody else's.

        Raises:
            TierError: it cannot be deleted.
        """
        self.forget(number)
        with (
            translated("delete", self.path(number), self._tier),
            suppress(FileNotFoundError, IsADirectoryError),
        ):
            self.path(number).unlink()

    def forget(self, number: int) -> None:
        """Let go of the descriptor; leases that use it keep it until they end."""
        with self._lock:
            file = self._open.pop(number, None)
            if file is not None:
                file.kept = False
                self._close_unused(file)

    def is_current(self, number: int, fd: int) -> bool:
        """Whether `fd` still is what lies under the segment's name."""
        try:
            named = self.path(number).lstat()
        except OSError:
            return False
        held = os.fstat(fd)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    @contextmanager
    def lease(self, numbers: Iterable[int]) -> Iterator[Leased]:
        """Descriptors of these segments, valid inside the block."""
        opened: dict[int, _OpenFile] = {}
        failed: dict[int, OSError] = {}
        try:
            for number in dict.fromkeys(numbers):
                try:
                    opened[number] = self._lease_one(number)
                except (FileNotFoundError, IsADirectoryError):
                    continue
                except OSError as error:
                    if error.errno != errno.ELOOP:
                        failed[number] = error
            yield Leased({number: file.fd for number, file in opened.items()}, failed)
        finally:
            with self._lock:
                for file in opened.values():
                    file.users -= 1
                    self._close_unused(file)
                self._trim()

    def _lease_one(self, number: int) -> _OpenFile:
        with self._lock:
            file = self._open.get(number)
            if file is None:
                file = self._open[number] = _OpenFile(self._open_file(number, 0))
            self._open.move_to_end(number)
            file.users += 1
            return file

    def _open_file(self, number: int, flags: int) -> int:
        flags |= os.O_RDWR if self._writable else os.O_RDONLY
        if self._mode.direct:
            flags |= os.O_DIRECT
        return os.open(self.path(number), flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def _close_unused(self, file: _OpenFile) -> None:
        if not file.kept and not file.users:
            self._closing(file.fd)
            os.close(file.fd)
            file.users = -1  # closed: never a second time, the number may be another file's by then

    def _trim(self) -> None:
        for number in [number for number, file in self._open.items() if not file.users]:
            if len(self._open) <= OPEN_FILES:
                return
            file = self._open.pop(number)
            file.kept = False
            self._close_unused(file)

    def close(self) -> None:
        """Let go of all descriptors; those in use are closed when their leases end. Idempotent."""
        for number in list(self._open):
            self.forget(number)


def _write_page(fd: int, page: bytes) -> None:
    with mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as aligned:
        aligned[:] = page
        if os.pwrite(fd, aligned, 0) != PAGE_BYTES:
            raise OSError(errno.EIO, "short write of a segment's header page")
