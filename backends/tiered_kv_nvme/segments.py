"""Segment files: what they look like on disk, and which of them are open.

A segment file is `header page | header table | data`, all big endian:

* The header page (4,096 bytes) says whose file it is and how it is cut: magic, format version, the
  index's identity, number, epoch, slot class, namespace, slots; closed by its own XXH3-64.
* The header table has one entry per slot, each in sectors of its own, so that processes which
  write neighbouring slots never share a sector: key, rank, length, checksum, generation and the
  segment's epoch, closed by its own XXH3-64. Entries of another epoch are leftovers.
* The data area holds the slots, page-aligned.

Files are written to only through reservations of the index, so two processes never write to the
same bytes.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import xxhash

from tiered_kv.checksum import BlockChecksum
from tiered_kv.errors import FormatError
from tiered_kv.values import FORMAT_VERSION, PAGE_BYTES, BlockKey, ChecksumKind
from tiered_kv_nvme.faults import translated
from tiered_kv_nvme.posix import SECTOR_BYTES, DirectMode

__all__ = [
    "Leased",
    "SegmentFiles",
    "SegmentHeader",
    "SegmentLayout",
    "SlotEntry",
    "pack_entry",
    "round_up",
]

SEGMENT_NAME = re.compile(r"segment-(\d{6,10})", re.ASCII)
MAGIC = b"TKVSEG\r\n"
OPEN_FILES = 256
"""Segment files kept open without being in use."""

_KEY_BYTES = 256
_HEADER = struct.Struct(">8sI16sQQI8sQII")
_ENTRY = struct.Struct(">4sQQIQQ8sH256s")
_CHECK = struct.Struct(">Q")
_ENTRY_MAGIC = b"SLOT"
_KIND_NAMES = {kind: kind.value.encode("ascii") for kind in ChecksumKind}


def round_up(size: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `size`."""
    return -(-size // unit) * unit


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """How a segment file is cut into slots."""

    slot_bytes: int
    """Bytes of a slot, whole pages."""
    slots: int
    stride: int
    """Bytes between entries of the header table."""

    @property
    def data_offset(self) -> int:
        """Where the first slot begins."""
        return PAGE_BYTES + round_up(self.slots * self.stride, PAGE_BYTES)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_offset + self.slots * self.slot_bytes

    def offset(self, slot: int) -> int:
        """Where a slot begins."""
        return self.data_offset + slot * self.slot_bytes

    def entry_offset(self, slot: int) -> int:
        """Where a slot's entry in the header table begins."""
        return PAGE_BYTES + slot * self.stride

    @classmethod
    def fitting(cls, file_bytes: int, slot_bytes: int, stride: int) -> SegmentLayout:
        """As many slots as fit into `file_bytes`; none where not even one does."""
        slots = max(0, (file_bytes - PAGE_BYTES) // (slot_bytes + stride))
        while slots and cls(slot_bytes, slots, stride).file_bytes > file_bytes:
            slots -= 1
        return cls(slot_bytes, slots, stride)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """First page of a segment file."""

    identity: bytes
    """16 bytes: the index that the file belongs to."""
    number: int
    epoch: int
    """Changes whenever the file is given to a slot class."""
    slot_class: int
    namespace_id: bytes
    layout: SegmentLayout

    def pack(self) -> bytes:
        """One page."""
        body = _HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            self.identity,
            self.number,
            self.epoch,
            self.slot_class,
            self.namespace_id,
            self.layout.slot_bytes,
            self.layout.slots,
            self.layout.stride,
        )
        return (body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))).ljust(PAGE_BYTES, b"\0")

    @classmethod
    def unpack(cls, page: bytes) -> SegmentHeader | None:
        """The inverse of `pack`; None when the page is no sound header of ours.

        Raises:
            FormatError: the header is of another format version.
        """
        if len(page) < _HEADER.size + _CHECK.size or page[: len(MAGIC)] != MAGIC:
            return None
        (version,) = struct.unpack_from(">I", page, len(MAGIC))
        if version != FORMAT_VERSION:
            raise FormatError(f"format {version}; this version reads format {FORMAT_VERSION}")
        body = page[: _HEADER.size]
        if _CHECK.unpack_from(page, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(body):
            return None
        _, _, identity, number, epoch, slot_class, namespace_id, slot_bytes, slots, stride = (
            _HEADER.unpack(body)
        )
        layout = SegmentLayout(slot_bytes, slots, stride)
        return cls(identity, number, epoch, slot_class, namespace_id, layout)


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """One slot's entry in the header table: enough to make its row again."""

    PACKED_BYTES: ClassVar[int] = _ENTRY.size + _CHECK.size

    key: BlockKey
    rank: int
    checksum: BlockChecksum
    epoch: int
    generation: int

    def pack(self) -> bytes:
        """`PACKED_BYTES` bytes, to be padded to the table's stride."""
        packed = bytearray(self.PACKED_BYTES)
        pack_entry(
            memoryview(packed), 0, self.key, self.rank, self.checksum, self.epoch, self.generation
        )
        return bytes(packed)

    @classmethod
    def unpack(cls, data: bytes) -> SlotEntry | None:
        """The inverse of `pack`; None where no sound entry was written."""
        body = data[: _ENTRY.size]
        if len(data) < cls.PACKED_BYTES or body[:4] != _ENTRY_MAGIC:
            return None
        if _CHECK.unpack_from(data, _ENTRY.size)[0] != xxhash.xxh3_64_intdigest(body):
            return None
        _, epoch, generation, rank, length, value, kind, key_bytes, key = _ENTRY.unpack(body)
        name = kind.rstrip(b"\0").decode("ascii", "replace")
        if name not in {known.value for known in ChecksumKind} or key_bytes > _KEY_BYTES:
            return None
        checksum = BlockChecksum(length, value, ChecksumKind(name))
        return cls(BlockKey(key[:key_bytes]), rank, checksum, epoch, generation)


def pack_entry(
    table: memoryview,
    offset: int,
    key: BlockKey,
    rank: int,
    checksum: BlockChecksum,
    epoch: int,
    generation: int,
) -> None:
    """Write what `SlotEntry.pack` gives to byte `offset` of `table`."""
    _ENTRY.pack_into(
        table,
        offset,
        _ENTRY_MAGIC,
        epoch,
        generation,
        rank,
        checksum.length,
        checksum.value,
        _KIND_NAMES[checksum.kind],
        len(key),
        key,
    )
    end = offset + _ENTRY.size
    _CHECK.pack_into(table, end, xxhash.xxh3_64_intdigest(table[offset:end]))


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
