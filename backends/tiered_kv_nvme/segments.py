"""Segment files: making, giving to a slot class, and which of them are open."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.errors import FormatError, TierError
from tiered_kv.values import PAGE_BYTES
from tiered_kv_nvme.directory import SEGMENT_NAME
from tiered_kv_nvme.faults import translated
from tiered_kv_nvme.headers import MAGIC, SegmentHeader
from tiered_kv_nvme.posix import SECTOR_BYTES
from tiered_kv_nvme.spreading import place_of
from tiered_kv_nvme.stripes import Stripes

__all__ = ["Leased", "SegmentFiles"]

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
    """By segment. One that is in none of the three is not there: no file of ours has its name."""
    failed: dict[int, OSError]
    """Why a file that is there could not be opened."""
    away: frozenset[int]
    """Segments whose directory is out of use."""


class SegmentFiles:
    """The segment files of a tier's directories. Thread-safe.

    Foreign errors come out as `NoSpace` and `TierError`.
    """

    def __init__(
        self,
        stripes: Stripes,
        tier: str,
        *,
        writable: bool,
        sync: bool,
        closing: Callable[[int], None] = lambda fd: None,
    ) -> None:
        """`sync`: flush the directory when a file is made (durability other than none).
        `closing` is called with each descriptor that was leased, right before it is closed."""
        self.stripes = stripes
        """Where they lie."""
        self._tier = tier
        self._writable = writable
        self._sync = sync
        self._closing = closing
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _OpenFile] = OrderedDict()
        self._forgotten = 0
        self.identity: bytes | None = None
        """Of the index whose rows are followed: files that belong to another one count as absent.
        None while the index is made."""
        self.sparse = False
        """Whether a file had to be made without taking its space from the file system."""

    @property
    def stride(self) -> int:
        """Bytes between header table entries of new files."""
        return max(SECTOR_BYTES, self.stripes.alignment)

    @property
    def directory(self) -> Path:
        """The one beside whose segments the index lies, or that holds nothing else."""
        return self.stripes.index_path.parent

    def path(self, number: int) -> Path:
        """Where the segment lies."""
        return self.stripes.path(number)

    def numbers(self) -> dict[int, int]:
        """Size in bytes of each file that is named like a segment of ours, in the directories that
        are in use.

        Raises:
            TierError: a directory cannot be read, and is in use all the same.
        """
        by_place = self.in_directories(self.stripes.here)
        return {number: size for found in by_place.values() for number, size in found.items()}

    def in_directories(self, places: Iterable[int]) -> dict[int, dict[int, int]]:
        """The same by directory, for these; without one that turns out to be out of use.

        Raises:
            TierError: one cannot be read, and is in use all the same.
        """
        found: dict[int, dict[int, int]] = {}
        for place in places:
            try:
                found[place] = self._in_directory(place)
            except TierError:
                if not self.stripes.failed(place):
                    raise
        return found

    def _in_directory(self, place: int) -> dict[int, int]:
        found: dict[int, int] = {}
        directory = self.stripes.paths[place]
        with translated("list", directory, self._tier), os.scandir(directory) as entries:
            for entry in entries:
                match = SEGMENT_NAME.fullmatch(entry.name)
                if (
                    match
                    and place_of(int(match[1])) == place
                    and entry.is_file(follow_symlinks=False)
                ):
                    with suppress(FileNotFoundError):
                        found[int(match[1])] = entry.stat(follow_symlinks=False).st_size
        return found

    def is_there(self, number: int) -> bool:
        """Whether a file has the segment's name. True also where that cannot be found out."""
        try:
            return stat.S_ISREG(self.path(number).lstat().st_mode)
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def changed_at(self, number: int) -> int:
        """When the file was changed last, nanoseconds since the epoch.

        Raises:
            TierError: that cannot be found out.
        """
        with translated("look at", self.path(number), self._tier):
            return self.path(number).stat().st_mtime_ns

    def is_ours(self, number: int) -> bool:
        """Whether the file begins with our magic, or is empty (made, then the process died).

        Raises:
            FormatError: it is ours, and of another format version.
            TierError: it cannot be read.
        """
        page = self._first_page(number)
        if page is None or (page and page[: len(MAGIC)] != MAGIC):
            return False
        self._unpack(number, page)
        return True

    def header(self, number: int) -> SegmentHeader | None:
        """The file's header; None where there is no sound one of ours.

        Raises:
            FormatError: it is ours, and of another format version.
            TierError: it cannot be read.
        """
        page = self._first_page(number)
        return None if page is None else self._unpack(number, page)

    def _first_page(self, number: int) -> bytes | None:
        path = self.path(number)
        with translated("read", path, self._tier):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return None
            try:
                return os.pread(fd, PAGE_BYTES, 0)
            finally:
                os.close(fd)

    def _unpack(self, number: int, page: bytes) -> SegmentHeader | None:
        try:
            return SegmentHeader.unpack(page)
        except FormatError as error:
            raise FormatError(
                f"tier {self._tier}: {self.path(number)} was written in {error}; use the version "
                "of tiered-kv that wrote it, or give the tier another directory"
            ) from error

    def flush_all(self) -> None:
        """Bring what was written to any of them to the disk.

        Raises:
            TierError: one cannot be opened or flushed.
        """
        for number in self.numbers():
            with translated("flush", self.path(number), self._tier), suppress(FileNotFoundError):
                fd = os.open(self.path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    os.fdatasync(fd)
                finally:
                    os.close(fd)

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
                    self._sync_directory(path.parent)
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

    def _sync_directory(self, directory: Path) -> None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
        """Delete the file if it is there. A directory of that name is somebody else's; in a
        directory that the tier has no more, nothing is deleted.

        Raises:
            TierError: it cannot be deleted.
        """
        self.forget(number)
        if not self.stripes.knows(number):
            return
        with (
            translated("delete", self.path(number), self._tier),
            suppress(FileNotFoundError, IsADirectoryError),
        ):
            self.path(number).unlink()
        self.stripes.emptier(place_of(number))

    def forget(self, number: int) -> None:
        """Let go of the descriptor; leases that use it keep it until they end."""
        with self._lock:
            self._forgotten += 1
            file = self._open.pop(number, None)
            if file is not None:
                file.kept = False
                self._close_unused(file)

    def forget_in(self, places: Collection[int]) -> None:
        """The same for all segments of these directories: other files may lie there by now."""
        with self._lock:
            self._forgotten += 1
            numbers = [number for number in self._open if place_of(number) in places]
        for number in numbers:
            self.forget(number)

    def vanished(self, fds: Mapping[int, int]) -> set[int]:
        """The segments that are not under their names any more, though `fds` of them are open."""
        return {number for number, fd in fds.items() if not self._is_current(number, fd)}

    def _is_current(self, number: int, fd: int) -> bool:
        try:
            named = self.path(number).lstat()
        except OSError:
            return False
        held = os.fstat(fd)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def away(self, numbers: Iterable[int]) -> set[int]:
        """Those whose directory is out of use, of segments whose files were not found or not
        right."""
        by_place: dict[int, set[int]] = {}
        for number in numbers:
            by_place.setdefault(place_of(number), set()).add(number)
        return {
            number
            for place, some in by_place.items()
            if self.stripes.failed(place)
            for number in some
        }

    @contextmanager
    def lease(self, numbers: Iterable[int]) -> Iterator[Leased]:
        """Descriptors of these segments, valid inside the block."""
        opened: dict[int, _OpenFile] = {}
        failed: dict[int, OSError] = {}
        absent: list[int] = []
        try:
            wanted = list(dict.fromkeys(numbers))
            away = {number for number in wanted if not self.stripes.has(number)}
            for number in (number for number in wanted if number not in away):
                try:
                    opened[number] = self._lease_one(number)
                except (FileNotFoundError, IsADirectoryError):
                    absent.append(number)
                except OSError as error:
                    if error.errno == errno.ELOOP:
                        absent.append(number)
                    else:
                        failed[number] = error
            away |= self.away([*absent, *failed])
            fds = {number: file.fd for number, file in opened.items()}
            for number in away:
                failed.pop(number, None)
            yield Leased(fds, failed, frozenset(away))
        finally:
            with self._lock:
                for file in opened.values():
                    file.users -= 1
                    self._close_unused(file)
                self._trim()

    def _lease_one(self, number: int) -> _OpenFile:
        with self._lock:
            file = self._open.get(number)
            forgotten = self._forgotten
            if file is not None:
                self._use(number, file)
                return file
        # Without the lock: a directory that hangs keeps nobody from the others.
        file = _OpenFile(self._open_own(number))
        with self._lock:
            known = self._open.get(number)
            if known is not None:
                os.close(file.fd)
                file = known
            elif forgotten == self._forgotten:
                self._open[number] = file
            else:  # it may be this one that was let go of meanwhile
                file.kept = False
            self._use(number, file)
            return file

    def _use(self, number: int, file: _OpenFile) -> None:
        file.users += 1
        if file.kept:
            self._open.move_to_end(number)

    def _open_own(self, number: int) -> int:
        """Open a file, unless another index of the tier made it under the same name: then its
        directory was replaced. A header that cannot be read proves nothing.

        Raises:
            FileNotFoundError: it is not there, or is that other one.
            OSError: it cannot be opened.
        """
        fd = self._open_file(number, 0)
        if self.identity is not None and self._identity_in(fd) not in (None, self.identity):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "made by an earlier index", self.path(number))
        return fd

    def _identity_in(self, fd: int) -> bytes | None:
        with suppress(OSError, FormatError), mmap.mmap(-1, PAGE_BYTES) as page:
            if os.preadv(fd, [page], 0) == PAGE_BYTES:
                header = SegmentHeader.unpack(page[:])
                return None if header is None else header.identity
        return None

    def _open_file(self, number: int, flags: int) -> int:
        writable = self._writable and self.stripes.takes(number)
        flags |= os.O_RDWR if writable else os.O_RDONLY
        if self.stripes.mode(number).direct:
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
        with self._lock:
            self._forgotten += 1
            numbers = list(self._open)
        for number in numbers:
            self.forget(number)


def _write_page(fd: int, page: bytes) -> None:
    with mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as aligned:
        aligned[:] = page
        if os.pwrite(fd, aligned, 0) != PAGE_BYTES:
            raise OSError(errno.EIO, "short write of a segment's header page")
