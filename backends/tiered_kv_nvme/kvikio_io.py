"""Everything that is asked of KvikIO: whether it works here, and its reads and writes.

KvikIO has one configuration per process, and it is decided here, once, before it opens a file.
GDS (its compatibility mode switched OFF) is used only where the CUDA driver, the nvidia-fs kernel
module and libcufile are there and cuFile came up in a process of its own; everywhere else the mode
is ON, never AUTO: without a driver both OFF and an AUTO that picks it never return.

A KvikIO future holds no reference to its memory. Ours does, and nothing here returns before every
future of the call has ended, also when one of them failed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tiered_kv.contracts import DeviceBuffer
from tiered_kv.errors import TierError, UnsupportedError
from tiered_kv.values import PAGE_BYTES
from tiered_kv_nvme.faults import of_kvikio
from tiered_kv_nvme.groups import Group
from tiered_kv_nvme.plan import address_of
from tiered_kv_nvme.posix import PosixIo, open_probe

__all__ = [
    "Kvikio",
    "KvikioFiles",
    "KvikioIo",
    "Move",
    "Span",
    "gds_missing",
    "probe",
    "run",
    "start",
]

THREADS = 8
"""KvikIO's own threads, for each disk."""

TASK_BYTES = 4 * 2**20
"""KvikIO cuts a call into tasks of this size for its threads."""

IN_FLIGHT = 64
"""Most futures of one call that wait at once."""

CUDA = "libcuda.so.1"
CUFILE = "libcufile.so.0"
NVIDIA_FS = Path("/proc/driver/nvidia-fs")

TRIAL_SECONDS = 20.0
TRIAL = """\
import kvikio, kvikio.cufile_driver as driver
driver.driver_open()
raise SystemExit(0 if driver.get("is_gds_available") else "cuFile says that GDS is not available")
"""

INSTALL = (
    "install KvikIO for the driver's CUDA version (kvikio-cu12 or kvikio-cu13, 25.12 or newer)"
)


@dataclass(frozen=True, slots=True)
class Kvikio:
    """What is in effect in this process."""

    module: ModuleType
    compat: str
    """Why KvikIO is in its compatibility mode; empty where GDS is in effect."""

    @property
    def gds(self) -> bool:
        """Whether data goes between disk and device without passing host memory."""
        return not self.compat

    def __str__(self) -> str:
        return "on" if self.gds else f"compat ({self.compat})"

    def register(self, buffer: DeviceBuffer) -> None:
        """Pin device memory for GDS; nothing happens in the compatibility mode.

        Raises:
            OSError: it cannot be registered.
        """
        if self.gds:
            try:
                self.module.memory_register(buffer)
            except RuntimeError as error:
                raise of_kvikio(error) from error

    def deregister(self, buffer: DeviceBuffer) -> None:
        """The reverse of `register`.

        Raises:
            OSError: it was not registered.
        """
        if self.gds:
            try:
                self.module.memory_deregister(buffer)
            except RuntimeError as error:
                raise of_kvikio(error) from error


_lock = threading.Lock()
_started: list[Kvikio] = []


def start() -> Kvikio:
    """Load KvikIO and decide its mode, the first time; what was decided, ever after.

    Raises:
        UnsupportedError: KvikIO cannot work here; the text says why and what to install.
    """
    with _lock:
        if not _started:
            _started.append(_start())
        return _started[0]


def gds_missing() -> str | None:
    """Why GDS cannot be in effect on this machine, as far as can be said without loading KvikIO;
    None where nothing is known to be missing."""
    if not _loads(CUDA):
        return f"no CUDA driver: {CUDA} cannot be loaded"
    if not NVIDIA_FS.exists():
        return f"the nvidia-fs kernel module is not loaded: {NVIDIA_FS} is not there"
    return None


def _start() -> Kvikio:
    # KvikIO asks the driver about every pointer, host memory included.
    if not _loads(CUDA):
        raise UnsupportedError(
            f"KvikIO needs a CUDA driver, for host memory too, and {CUDA} cannot be loaded; "
            "install the NVIDIA driver"
        )
    # One pool of threads for each disk: one that hangs shall not take the others' threads.
    os.environ.setdefault("KVIKIO_THREAD_POOL_PER_BLOCK_DEVICE", "ON")
    try:
        import kvikio  # noqa: PLC0415 - optional, and loads CUDA libraries
        import kvikio.defaults  # noqa: PLC0415
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: libcufile is not found
        raise UnsupportedError(f"KvikIO cannot be loaded: {_line(error)}; {INSTALL}") from error
    compat = _no_gds()
    mode = kvikio.CompatMode.ON if compat else kvikio.CompatMode.OFF
    try:
        kvikio.defaults.set(
            {
                "compat_mode": mode,
                "num_threads": THREADS,
                "task_size": TASK_BYTES,
                "auto_direct_io_read": True,
                "auto_direct_io_write": True,
            }
        )
    except (KeyError, RuntimeError, ValueError) as error:
        raise UnsupportedError(
            f"KvikIO {kvikio.__version__} does not take our settings: {error!r}; {INSTALL}"
        ) from error
    return Kvikio(kvikio, compat)


def _no_gds() -> str:
    """Why GDS is not in effect; empty where it is."""
    missing = gds_missing()
    if missing is None and not _loads(CUFILE):
        missing = f"{CUFILE} cannot be loaded"
    return missing if missing is not None else _try_gds()


def _try_gds() -> str:
    """Let a process of its own open cuFile's driver: where something is wrong with it, that may
    never return."""
    try:
        with tempfile.TemporaryDirectory() as folder:  # cuFile leaves a log where it runs
            trial = subprocess.run(
                [sys.executable, "-P", "-c", TRIAL],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TRIAL_SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return f"cuFile's driver did not open within {TRIAL_SECONDS:g} s"
    except OSError as error:
        return f"cuFile could not be tried: {error}"
    if trial.returncode == 0:
        return ""
    said = trial.stderr.strip().rpartition("\n")[2]
    return said or f"cuFile's driver ended its process with status {trial.returncode}"


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


@dataclass(frozen=True, slots=True)
class Span:
    """`nbytes` bytes from `address` on, in host or device memory, that `owner` keeps alive."""

    address: int
    nbytes: int
    owner: object

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # KvikIO takes addresses by this protocol alone; which memory it is it asks the driver.
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


class KvikioFiles:
    """KvikIO's handles of files that are open here. Thread-safe.

    A handle belongs to a descriptor, and is forgotten before that is closed.
    """

    def __init__(self, *, writable: bool) -> None:
        self._flags = "r+" if writable else "r"
        self._lock = threading.Lock()
        self._handles: dict[int, Any] = {}

    def of(self, fd: int) -> Any:
        """The handle of an open file.

        Raises:
            OSError: KvikIO cannot open it.
            UnsupportedError: see `start`.
        """
        with self._lock:
            handle = self._handles.get(fd)
            if handle is None:
                try:
                    # By descriptor: the name may be another file's by now.
                    handle = start().module.CuFile(f"/proc/self/fd/{fd}", self._flags)
                except RuntimeError as error:
                    raise of_kvikio(error) from error
                self._handles[fd] = handle
            return handle

    def forget(self, fd: int) -> None:
        """Let go of a file that no call uses any more; its descriptor is about to be closed."""
        with self._lock:
            handle = self._handles.pop(fd, None)
        if handle is not None:
            handle.close()

    def __len__(self) -> int:
        return len(self._handles)


@dataclass(frozen=True, slots=True)
class Move:
    """One call: contiguous in the file and in memory."""

    fd: int
    offset: int
    buffer: DeviceBuffer


class _Flight:
    """A call in flight. Holds its file and its memory until it has ended."""

    __slots__ = ("_future", "_held", "_size")

    def __init__(self, handle: Any, move: Move, *, writing: bool) -> None:
        self._held: tuple[Any, DeviceBuffer] | None = (handle, move.buffer)
        self._size = move.buffer.nbytes
        call = handle.pwrite if writing else handle.pread
        self._future = call(move.buffer, self._size, move.offset)

    def land(self) -> OSError | None:
        """Wait for the end; what went wrong, or None."""
        try:
            count = self._future.get()
        except Exception as error:  # noqa: BLE001 - C++ raises anything; the calls beside go on
            return of_kvikio(error)
        finally:
            self._held = None
        if count != self._size:
            return OSError(errno.EIO, f"KvikIO moved {count} of {self._size} bytes")
        return None


def run(files: KvikioFiles, moves: Sequence[Move], *, writing: bool) -> dict[int, OSError]:
    """Make the calls, several at once; gives an error for each that failed, by its place.

    Returns when nothing touches the memory any more.
    """
    failed: dict[int, OSError] = {}
    flying: deque[tuple[int, _Flight]] = deque()

    def land() -> None:
        place, flight = flying.popleft()
        error = flight.land()
        if error is not None:
            failed[place] = error

    try:
        for place, move in enumerate(moves):
            if len(flying) == IN_FLIGHT:
                land()
            try:
                flying.append((place, _Flight(files.of(move.fd), move, writing=writing)))
            except OSError as error:
                failed[place] = error
            except Exception as error:  # noqa: BLE001 - C++ raises anything; others fly
                failed[place] = of_kvikio(error)
    finally:
        while flying:
            land()
    return failed


def probe(directory: Path, buffer: DeviceBuffer) -> None:
    """Write `buffer`, whole pages, to a nameless file of `directory`, and read it back.

    Raises:
        OSError: KvikIO cannot do that here.
        UnsupportedError: see `start`.
    """
    fd = open_probe(directory, 0)
    files = KvikioFiles(writable=True)
    try:
        for writing in (True, False):
            for error in run(files, [Move(fd, 0, buffer)], writing=writing).values():
                raise error
    finally:
        files.forget(fd)
        os.close(fd)


@dataclass(frozen=True, slots=True)
class _Run:
    """Views of a group that follow on each other in memory as well."""

    move: Move
    parts: tuple[tuple[memoryview, int], ...]
    """(view, block of the caller's batch)."""

    def apart(self) -> list[_Run]:
        """The same, a call for each view."""
        runs: list[_Run] = []
        offset = self.move.offset
        for part in self.parts:
            runs.append(_run(self.move.fd, offset, [part]))
            offset += part[0].nbytes
        return runs


def _run(fd: int, offset: int, parts: Sequence[tuple[memoryview, int]]) -> _Run:
    views = tuple(view for view, _ in parts)
    span = Span(address_of(views[0]), sum(view.nbytes for view in views), views)
    return _Run(Move(fd, offset, span), tuple(parts))


def _runs(group: Group) -> list[_Run]:
    """The group's calls: neighbours in the file are joined where they are neighbours in memory."""
    runs: list[_Run] = []
    parts: list[tuple[memoryview, int]] = []
    begin = offset = group.offset
    end = -1
    for view, position in zip(group.views, group.positions, strict=True):
        address = address_of(view)
        if parts and address != end:
            runs.append(_run(group.fd, begin, parts))
            parts, begin = [], offset
        parts.append((view, position))
        end = address + view.nbytes
        offset += view.nbytes
    runs.append(_run(group.fd, begin, parts))
    return runs


class KvikioIo:
    """A `GroupIo` for host memory by way of KvikIO.

    What is not whole pages (entries of a segment's header table) goes by the posix engine: KvikIO
    would write the rest of the page through the page cache, beside others' direct writes.
    """

    def __init__(self, files: KvikioFiles, posix: PosixIo, tier: str) -> None:
        """Start KvikIO if need be.

        Raises:
            UnsupportedError: see `start`.
        """
        self._kvikio = start()
        self._files = files
        self._posix = posix
        self._tier = tier
        self._idle = threading.Condition()
        self._running = 0
        self._closed = False

    def read_groups(self, groups: Sequence[Group]) -> dict[int, OSError]:
        """See `GroupIo.read_groups`."""
        return self._drive(groups, writing=False)

    def write_groups(self, groups: Sequence[Group]) -> dict[int, OSError]:
        """See `GroupIo.write_groups`."""
        return self._drive(groups, writing=True)

    def flush(self, fds: Sequence[int]) -> None:
        """See `GroupIo.flush`."""
        self._posix.flush(fds)

    def modes(self) -> Mapping[str, str]:
        """See `GroupIo.modes`."""
        return {"engine": "kvikio", "gds": str(self._kvikio)}

    def _drive(self, groups: Sequence[Group], *, writing: bool) -> dict[int, OSError]:
        ragged = [group for group in groups if not _is_whole(group)]
        runs = [run for group in groups if _is_whole(group) for run in _runs(group)]
        failed: dict[int, OSError] = {}
        with self._idle:
            if self._closed:
                raise TierError(f"tier {self._tier}: its I/O was closed", tier=self._tier)
            self._running += 1
        try:
            if ragged:
                move = self._posix.write_groups if writing else self._posix.read_groups
                failed.update(move(ragged))
            failed.update(self._move(runs, writing=writing))
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()
        return failed

    def _move(self, runs: Sequence[_Run], *, writing: bool) -> dict[int, OSError]:
        failed: dict[int, OSError] = {}
        again: list[_Run] = []
        for place, error in run(self._files, [run.move for run in runs], writing=writing).items():
            if writing or len(runs[place].parts) == 1:
                failed.update(dict.fromkeys((block for _, block in runs[place].parts), error))
            else:
                again += runs[place].apart()
        if again:
            failed.update(self._move(again, writing=False))
        return failed

    def close(self, timeout: float = 5.0) -> bool:
        """See `GroupIo.close`."""
        with self._idle:
            self._closed = True
            ended = self._idle.wait_for(lambda: not self._running, timeout)
        return self._posix.close(timeout) and ended


def _is_whole(group: Group) -> bool:
    return not group.offset % PAGE_BYTES and not any(v.nbytes % PAGE_BYTES for v in group.views)
