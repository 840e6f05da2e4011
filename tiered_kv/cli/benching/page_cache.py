"""The kernel's page cache, for what lies below directories of ours: how much of it is there, and
out with it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["drop_from_cache", "flush", "read_in", "resident_bytes"]

LEAST_BYTES = 2**18
"""Files below that are left alone: lock files are among them, and a process that closes any
descriptor of a file loses its POSIX locks on it."""

_READ_BYTES = 2**22
_PAGE = mmap.PAGESIZE
_RESIDENT = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def resident_bytes(directories: Sequence[Path]) -> int:
    """Bytes of the files there that the page cache holds."""
    return sum(_resident(path, size) for path, size in _files(directories))


def flush(directories: Sequence[Path]) -> None:
    """Write what is dirty of the files there."""
    for path, _ in _files(directories):
        with _opened(path) as descriptor:
            os.fdatasync(descriptor)


def drop_from_cache(directories: Sequence[Path]) -> None:
    """Write what is dirty of the files there, and drop them from the page cache, those that this
    process has mapped as well. What somebody else has mapped stays."""
    for path, size in _files(directories):
        for start, length in _mappings(path):
            # Of a shared mapping of a file nothing is lost: only its page tables are emptied.
            _libc.madvise(start, length, mmap.MADV_DONTNEED)
        with _opened(path) as descriptor:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_DONTNEED)


def read_in(directories: Sequence[Path]) -> None:
    """Bring the files there into the page cache, as far as it takes them."""
    area = bytearray(_READ_BYTES)
    for path, size in _files(directories):
        with _opened(path) as descriptor:
            for start in range(0, size, len(area)):
                os.preadv(descriptor, [area], start)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _files(directories: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    for directory in directories:
        for folder, _, names in os.walk(directory):
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):  # gone meanwhile
                    size = path.lstat().st_size
                    if size >= LEAST_BYTES and path.is_file() and not path.is_symlink():
                        yield path, size


def _resident(path: Path, size: int) -> int:
    pages = -(-size // _PAGE)
    found = ctypes.create_string_buffer(pages)
    with _opened(path) as descriptor:
        # Written to by nobody: only a private mapping tells its address to ctypes.
        mapped = mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    with mapped:
        start = ctypes.c_char.from_buffer(mapped)
        failed = _libc.mincore(ctypes.addressof(start), size, ctypes.addressof(found))
        del start
    if failed:
        return 0
    return _PAGE * sum(byte & _RESIDENT for byte in found.raw)


def _mappings(path: Path) -> Iterator[tuple[int, int]]:
    """Address and length of every shared mapping that this process has of a file."""
    wanted = path.stat()
    device = f"{os.major(wanted.st_dev):02x}:{os.minor(wanted.st_dev):02x}"
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            addresses, permissions, _, where, inode, *_ = line.split()
            if where == device and int(inode) == wanted.st_ino and permissions.endswith("s"):
                first, _, end = addresses.partition("-")
                yield int(first, 16), int(end, 16) - int(first, 16)
