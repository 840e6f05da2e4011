"""The pages behind a host block pool: private, huge where the kernel gives them, made resident and
registered with the device's driver chunk by chunk.

The whole range is mapped at once, so every byte of it can be used from the beginning: a page that
growth has not reached yet comes when it is first touched. Growth only decides when pages become
resident and registered.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import resource
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiered_kv.config import MIB, readable_bytes
from tiered_kv.errors import ConfigError

__all__ = ["Chunk", "HostPages", "PageState", "advise", "huge_bytes"]

logger = logging.getLogger(__name__)

MADV_POPULATE_WRITE = 23
"""Makes pages resident without changing what is in them; Linux 5.14."""

STEP_BYTES = 8 * MIB
"""Made resident per call: short, since whoever maps memory meanwhile waits for the call's end."""

CLOSE_SECONDS = 1.0
"""Longest wait of `close` for the thread that grows."""

_NOT_KNOWN = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""How a kernel says that it does not know an advice."""

_HUGE_PAGES_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_SMAPS = Path("/proc/self/smaps")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(address: int, nbytes: int, advice: int) -> None:
    """`madvise` without the interpreter's lock, which `mmap.madvise` keeps while pages come.

    Raises:
        OSError: as the kernel says; EINVAL where it does not know the advice.
    """
    if _libc.madvise(address, nbytes, advice):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def huge_bytes(address: int, nbytes: int) -> int:
    """How much of this process's memory range lies in huge pages now, by `/proc/self/smaps`; 0
    where that can't be read. Walks the page tables of the process: not for every step."""
    found = overlap = 0
    try:
        with _SMAPS.open(encoding="ascii", errors="replace") as lines:
            for line in lines:
                name, *rest = line.split(maxsplit=2)
                if not name.endswith(":"):
                    start, end = (int(part, 16) for part in name.split("-"))
                    overlap = max(0, min(end, address + nbytes) - max(start, address))
                elif overlap and name == "AnonHugePages:":
                    found += min(overlap, int(rest[0]) * 1024)
    except OSError:
        return 0
    return found


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of the pages that becomes resident, and is registered, as one."""

    start: int
    """Bytes from the beginning of the pages."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class PageState:
    """What is in effect, in bytes and in words."""

    mapped_bytes: int
    prefaulted_bytes: int
    """Made resident by growth; further pages are where they were touched."""
    huge_bytes: int
    """In huge pages when it was last measured: after the start, and when growth was over."""
    pinned_bytes: int
    """Registered with the device's driver."""
    memory: str
    """"pinned", or "pageable" with the reason."""
    pages: str
    """"huge" with the amount, or "base" with the reason."""
    prefault: str
    """How much is prefaulted, and why not more."""

    def modes(self) -> dict[str, str]:
        """The words, for logs and `check`."""
        return {"memory": self.memory, "pages": self.pages, "prefault": self.prefault}


class HostPages:
    """One private anonymous mapping. Nothing of it is visible outside the process, and nothing is
    left behind when the process is killed. Forked children do not get it: a page that is copied on
    write would part from the one that the device was told of.

    Where the driver refuses a chunk, nothing further is registered, and the pool counts as
    pageable. Chunks that are registered stay so until the end: the device may be copying to them.

    Thread-safe.
    """

    def __init__(
        self,
        nbytes: int,
        chunks: Sequence[Chunk],
        at_once: int,
        *,
        register: Callable[[int, int], None] | None = None,
        unregister: Callable[[int], None] | None = None,
    ) -> None:
        """Map `nbytes`, and make the first `at_once` of the `chunks` resident and registered.

        Args:
            nbytes: a multiple of the page size.
            chunks: they cover the range, each byte once, in the order of growth.
            at_once: how many of them are ready when this returns.
            register: pins memory (address, bytes) for the device; raises whatever it likes where
                that is refused. Called once per chunk, on the constructing thread and on the one
                that grows. None: the memory stays pageable.
            unregister: undoes `register`, given the address. Called by `close`.

        Raises:
            ConfigError: the kernel refuses to map that much.
        """
        self._nbytes = nbytes
        self._chunks = tuple(chunks)
        self._starts = sorted((chunk.start, index) for index, chunk in enumerate(self._chunks))
        self._register = register
        self._unregister = unregister
        self._map = _map_private(nbytes)
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data
        with suppress(OSError):  # a kernel without it: children then share pages as ever
            advise(self._address, nbytes, mmap.MADV_DONTFORK)
        self._no_huge_pages = self._ask_for_huge_pages()
        self._no_prefault = ""
        self._refusal = "" if register is not None else "no device asks for pinned memory"
        self._registered = [False] * len(self._chunks)
        self._prefaulted = 0
        self._huge = 0
        self._next = 0
        self._stop = threading.Event()
        self._grown = threading.Event()
        self._closing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._take(at_once)
        self._huge = huge_bytes(self._address, nbytes)

    # ---------------------------------------------------------------------------------- growth

    def grow(self, done: Callable[[PageState], None] | None = None) -> None:
        """Take the remaining chunks on a daemon thread, and tell `done` there what came of it (at
        once, where nothing remains). `done` is not called where `close` comes first. A second call
        does nothing."""
        with self._closing:
            if self._thread is not None or self._stop.is_set():
                return
            thread = threading.Thread(
                target=self._run, args=(done,), name="tiered-kv-pool", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # no thread to be had
                self._no_prefault = self._no_prefault or str(error)
                logger.warning("the host block pool grows by use alone: %s", error)
                return
            self._thread = thread

    def wait_grown(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until growth is over; whether it is."""
        return self._grown.wait(timeout)

    def _run(self, done: Callable[[PageState], None] | None) -> None:
        self._take(len(self._chunks))
        if self._stop.is_set():
            return
        # Measuring means walking the page tables, which is slow for small pages.
        if self._huge:
            self._huge = huge_bytes(self._address, self._nbytes)
        if done is not None:
            done(self.state())
        self._grown.set()

    def _take(self, until: int) -> None:
        while self._next < until and not self._stop.is_set():
            index = self._next
            if not self._no_prefault:
                self._prefault(self._chunks[index])
            if self._register is not None and not self._refusal and not self._stop.is_set():
                self._pin(index, self._register)
            self._next += 1

    def _prefault(self, chunk: Chunk) -> None:
        for start in range(chunk.start, chunk.start + chunk.nbytes, STEP_BYTES):
            if self._stop.is_set():
                return
            nbytes = min(STEP_BYTES, chunk.start + chunk.nbytes - start)
            try:
                advise(self._address + start, nbytes, MADV_POPULATE_WRITE)
            except OSError as error:
                # Touching the pages instead is no way out: a write of ours could undo one of a
                # store that uses its slot already.
                if error.errno in _NOT_KNOWN:
                    self._no_prefault = f"this kernel can't prefault: {error.strerror}"
                else:
                    self._no_prefault = f"stopped: {error.strerror}"
                    self._refusal = self._refusal or "its pages did not all become resident"
                    logger.warning(
                        "the host block pool has %s of %s resident, and the kernel gives no more "
                        "now (%s): lower the capacity of the cpu tier, or make room in host memory",
                        readable_bytes(self._prefaulted),
                        readable_bytes(self._nbytes),
                        error.strerror,
                    )
                return
            self._prefaulted += nbytes

    def _pin(self, index: int, register: Callable[[int, int], None]) -> None:
        chunk = self._chunks[index]
        try:
            register(self._address + chunk.start, chunk.nbytes)
        except Exception as error:  # noqa: BLE001 - drivers raise anything; the pool works without
            self._refusal = f"registering it was refused: {error}"
            logger.warning(
                "the host block pool is pageable, so copies to and from the device are slower: "
                "registering %s after %s was refused (%s). %s",
                readable_bytes(chunk.nbytes),
                readable_bytes(self._pinned_bytes()),
                error,
                _locked_memory(),
            )
        else:
            self._registered[index] = True

    def _ask_for_huge_pages(self) -> str:
        """Why there will be none; empty where there may be."""
        try:
            advise(self._address, self._nbytes, mmap.MADV_HUGEPAGE)
            if "[never]" in _HUGE_PAGES_SWITCH.read_text(encoding="ascii"):
                return "transparent huge pages are switched off"
            if self._nbytes < int(_HUGE_PAGE_SIZE.read_text(encoding="ascii")):
                return "the pool is smaller than a huge page"
        except OSError as error:
            return f"this kernel has no huge pages: {error.strerror}"
        return ""

    # ------------------------------------------------------------------------------- questions

    @property
    def view(self) -> memoryview:
        """All bytes, writable. Whoever holds it, or a part of it, keeps the memory mapped."""
        return memoryview(self._map)

    @property
    def pinned(self) -> bool:
        """Whether all of it is registered with the device's driver."""
        return all(self._registered)

    def chunk_at(self, offset: int) -> int:
        """Index of the chunk that holds this byte."""
        place = bisect_right(self._starts, (offset, len(self._chunks))) - 1
        return self._starts[place][1]

    def pinned_at(self, offset: int) -> bool:
        """Whether the chunk that holds this byte is registered."""
        return self._registered[self.chunk_at(offset)]

    def _pinned_bytes(self) -> int:
        pairs = zip(self._chunks, self._registered, strict=True)
        return sum(chunk.nbytes for chunk, registered in pairs if registered)

    def state(self) -> PageState:
        """What is in effect now."""
        whole = readable_bytes(self._nbytes)
        pinned = self._pinned_bytes()
        if self.pinned:
            memory = "pinned"
        elif self._refusal:
            memory = f"pageable ({self._refusal})"
        else:
            memory = f"pageable, being pinned ({readable_bytes(pinned)} of {whole})"
        if self._huge:
            pages = f"huge ({readable_bytes(self._huge)} of {whole})"
        else:
            none = "the kernel gave none" if self._prefaulted else "none is touched yet"
            pages = f"base ({self._no_huge_pages or none})"
        prefault = f"{readable_bytes(self._prefaulted)} of {whole}"
        if self._no_prefault:
            prefault += f" ({self._no_prefault}; the rest comes at first use)"
        return PageState(
            self._nbytes, self._prefaulted, self._huge, pinned, memory, pages, prefault
        )

    # ------------------------------------------------------------------------------------- end

    def close(self) -> bool:
        """End growth, unregister, and unmap unless somebody still holds a view. No device copies
        to or from the memory any more. Waits at most `CLOSE_SECONDS`. Idempotent, never raises.

        Returns:
            True when the memory is unmapped. False when a view is exported (an I/O may still run:
            the memory then goes with its last view) or when growth hangs in the kernel or the
            driver (the memory then stays; call again).
        """
        with self._closing:
            self._stop.set()
            if self._thread is not None:
                self._thread.join(CLOSE_SECONDS)
                if self._thread.is_alive():
                    return False
            for index, chunk in enumerate(self._chunks):
                if self._registered[index] and self._unregister is not None:
                    try:
                        self._unregister(self._address + chunk.start)
                    except Exception as error:  # noqa: BLE001 - drivers raise anything; the end goes on
                        logger.warning("unregistering host memory failed: %r", error)
                self._registered[index] = False
            try:
                self._map.close()
            except BufferError:
                return False
            return True


def _map_private(nbytes: int) -> mmap.mmap:
    # MAP_PRIVATE, since a shared anonymous mapping is shmem, where huge pages are not given.
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"cannot map {nbytes:,} bytes ({readable_bytes(nbytes)}) of host memory for the block "
            f"pool ({error}): {_address_space()}. Lower the capacity of the cpu tier, or raise the "
            "limit"
        ) from error


def _address_space() -> str:
    """The limits that mapping meets."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    size, data = (int(pages[field]) * mmap.PAGESIZE for field in (0, 5))
    terms = [
        f"{name} is limited to {readable_bytes(limit)} (ulimit {flag}), {readable_bytes(used)} used"
        for name, flag, used, limit in (
            ("address space", "-v", size, resource.getrlimit(resource.RLIMIT_AS)[0]),
            ("data", "-d", data, resource.getrlimit(resource.RLIMIT_DATA)[0]),
        )
        if limit != resource.RLIM_INFINITY
    ]
    return "; ".join(terms) or (
        "neither ulimit -v nor ulimit -d is set, so the kernel itself has no room "
        "(see vm.overcommit_memory)"
    )


def _locked_memory() -> str:
    """The limit of locked memory, and what to do about it."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return (
            "Locked memory is unlimited here (ulimit -l), so the driver or the machine sets the "
            "bound: lower the capacity of the cpu tier to have all of it pinned"
        )
    return (
        f"Locked memory is limited to {limit} bytes ({readable_bytes(limit)}; ulimit -l): raise it "
        "with `ulimit -l unlimited`, LimitMEMLOCK=infinity (systemd) or --ulimit memlock=-1 "
        "(containers)"
    )
