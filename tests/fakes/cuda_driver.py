"""A CUDA driver without a GPU: a `libcuda.so.1` that KvikIO loads, and whose functions are Python.

The library is an ELF file of a few kilobytes, written here byte by byte. Each function in it is one
jump through a table that Python fills with ctypes callbacks, so real KvikIO runs its device path
(bounce buffers, worker threads, streams, copies) in a process that has no GPU.

"Device memory" is every range that `add_device_memory` names, and every mapping of the process
whose name holds `STAGING_NAME`: the host memory that stands for the engine's device in tests.

Load it before KvikIO is first used, once per process, in a child process of its own: a library that
was loaded stays loaded. x86-64 only.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import platform
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["STAGING_NAME", "DeviceMemory", "FakeCudaDriver", "Held"]

STAGING_NAME = "tiered-kv-staging"

DRIVER_VERSION = 13_000
CONTEXT = 0x1000
STREAM = 0x2000

SUCCESS = 0
INVALID_VALUE = 1
DEINITIALIZED = 4

DEVICE_MEMORY = 2
"""CU_MEMORYTYPE_DEVICE; 0 is what the driver says about host memory that it does not know."""

ATTRIBUTE_CONTEXT = 1
ATTRIBUTE_MEMORY_TYPE = 2
ATTRIBUTE_DEVICE_POINTER = 3
ATTRIBUTE_DEVICE_ORDINAL = 9

SYMBOLS = (
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuCtxCreate_v2",
    "cuCtxCreate_v4",
    "cuCtxDestroy_v2",
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuPointerGetAttribute",
    "cuPointerGetAttributes",
    "cuMemGetAddressRange_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyAsync",
    "cuMemcpyBatchAsync",
    "cuMemcpyBatchAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuLaunchHostFunc",
)
COPIES = tuple(symbol for symbol in SYMBOLS if symbol.startswith("cuMemcpy"))

SONAME = "libcuda.so.1"
_TABLE = "fake_table"
_GONE = "fake_gone"

_JUMP_BYTES = 8
_GONE_CODE = b"\xb8" + struct.pack("<i", DEINITIALIZED) + b"\xc3"
"""`mov eax, 4; ret`: what every function becomes when Python ends before KvikIO does."""

_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_PHDR = struct.Struct("<IIQQQQQQ")
_SYM = struct.Struct("<IBBHQQ")
_DYN = struct.Struct("<QQ")
_PAGE = 4096


def _up(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit


def _elf() -> bytes:
    """The library: headers, symbols, their hash table and code in one read-only segment; the
    dynamic section and the table in a writable one. Addresses are offsets in the file."""
    exported = (*SYMBOLS, _GONE, _TABLE)
    strings = b"\0"
    name_of: dict[str, int] = {}
    for name in (SONAME, *exported):
        name_of[name] = len(strings)
        strings += name.encode("ascii") + b"\0"
    count = len(exported) + 1  # the first symbol is the empty one

    symbols_at = _up(_EHDR.size + 4 * _PHDR.size, 8)
    strings_at = symbols_at + count * _SYM.size
    hash_at = _up(strings_at + len(strings), 8)
    code_at = _up(hash_at + 4 * (3 + count), 16)
    code_end = code_at + len(SYMBOLS) * _JUMP_BYTES + len(_GONE_CODE)
    dynamic_at = _up(code_end, _PAGE)
    table_at = dynamic_at + 0x100
    end = table_at + 8 * len(SYMBOLS)

    code = b""
    symbols = bytes(_SYM.size)
    for number, name in enumerate(SYMBOLS):
        here = code_at + number * _JUMP_BYTES
        # jmp [rip + distance], counted from the end of the 6 bytes of the instruction
        code += b"\xff\x25" + struct.pack("<i", table_at + 8 * number - here - 6) + b"\x90\x90"
        symbols += _SYM.pack(name_of[name], 0x12, 0, 1, here, _JUMP_BYTES)
    symbols += _SYM.pack(name_of[_GONE], 0x12, 0, 1, code_at + len(code), len(_GONE_CODE))
    symbols += _SYM.pack(name_of[_TABLE], 0x11, 0, 1, table_at, 8 * len(SYMBOLS))
    code += _GONE_CODE

    # One bucket that chains all symbols: the loader compares the names one after the other.
    chain = [0, *range(2, count), 0]
    hashes = struct.pack(f"<{3 + count}I", 1, count, 1, *chain)
    dynamic = b"".join(
        _DYN.pack(tag, value)
        for tag, value in (
            (14, name_of[SONAME]),  # DT_SONAME
            (4, hash_at),  # DT_HASH
            (5, strings_at),  # DT_STRTAB
            (6, symbols_at),  # DT_SYMTAB
            (10, len(strings)),  # DT_STRSZ
            (11, _SYM.size),  # DT_SYMENT
            (0, 0),
        )
    )
    header = _EHDR.pack(
        b"\x7fELF\2\1\1", 3, 62, 1, 0, _EHDR.size, 0, 0, _EHDR.size, _PHDR.size, 4, 0, 0, 0
    )
    rest = end - dynamic_at
    segments = b"".join(
        _PHDR.pack(kind, flags, at, at, at, size, size, align)
        for kind, flags, at, size, align in (
            (1, 5, 0, code_end, _PAGE),  # PT_LOAD, read and execute
            (1, 6, dynamic_at, rest, _PAGE),  # PT_LOAD, read and write
            (2, 6, dynamic_at, len(dynamic), 8),  # PT_DYNAMIC
            (0x6474E551, 6, 0, 0, 16),  # PT_GNU_STACK: not executable
        )
    )
    image = bytearray(end)
    for at, part in (
        (0, header),
        (_EHDR.size, segments),
        (symbols_at, symbols),
        (strings_at, strings),
        (hash_at, hashes),
        (code_at, code),
        (dynamic_at, dynamic),
    ):
        image[at : at + len(part)] = part
    return bytes(image)


def _put64(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


def _get64(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _put32(address: int, value: int) -> None:
    ctypes.c_uint32.from_address(address).value = value


class Held:
    """Calls of one function that wait."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        """Set as soon as a call waits."""
        self._open = threading.Event()

    def release(self) -> None:
        """Let the calls go on, those to come as well."""
        self._open.set()

    def wait(self) -> None:
        self.entered.set()
        self._open.wait()


class FakeCudaDriver:
    """The loaded driver. Its functions may be called by any thread."""

    def __init__(self, folder: Path) -> None:
        """Write the library into `folder` and load it, so that whoever asks the loader for
        `libcuda.so.1` from now on gets it."""
        if platform.machine() != "x86_64":
            raise OSError(f"the fake CUDA driver is x86-64 code; this is {platform.machine()}")
        file = folder / SONAME
        file.write_bytes(_elf())
        library = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._ranges: list[tuple[int, int]] = []
        self._host: dict[int, mmap.mmap] = {}
        self._held: dict[str, Held] = {}
        self._answers: dict[str, int] = {}
        self._error_text = ctypes.create_string_buffer(b"the fake driver was told to fail")
        made_by_hand: dict[str, Callable[..., int]] = {
            "cuDriverGetVersion": self._driver_get_version,
            "cuDeviceGetCount": self._device_get_count,
            "cuGetErrorName": self._get_error_text,
            "cuGetErrorString": self._get_error_text,
            "cuDevicePrimaryCtxRetain": self._give_context,
            "cuCtxGetCurrent": self._give_context,
            "cuCtxPopCurrent_v2": self._give_context,
            "cuCtxGetDevice": self._give_device,
            "cuDeviceGet": self._give_device,
            "cuPointerGetAttribute": self._pointer_get_attribute,
            "cuPointerGetAttributes": self._pointer_get_attributes,
            "cuMemGetAddressRange_v2": self._mem_get_address_range,
            "cuMemHostAlloc": self._mem_host_alloc,
            "cuMemFreeHost": self._mem_free_host,
            "cuMemcpyAsync": self._copy,
            "cuMemcpyDtoHAsync_v2": self._copy,
            "cuMemcpyHtoDAsync_v2": self._copy,
            "cuMemcpyBatchAsync": self._copy_batch,
            "cuMemcpyBatchAsync_v2": self._copy_batch,
            "cuStreamCreate": self._give_stream,
        }
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 6)
        self._callbacks = [
            prototype(self._counted(name, made_by_hand.get(name, _succeed))) for name in SYMBOLS
        ]
        self._table = (ctypes.c_void_p * len(SYMBOLS)).in_dll(library, _TABLE)
        for number, callback in enumerate(self._callbacks):
            self._table[number] = ctypes.cast(callback, ctypes.c_void_p).value
        gone = ctypes.cast(getattr(library, _GONE), ctypes.c_void_p).value
        # KvikIO's threads and destructors outlive Python.
        atexit.register(self._leave, gone)

    def _leave(self, gone: int | None) -> None:
        for number in range(len(SYMBOLS)):
            self._table[number] = gone

    # --------------------------------------------------------------------------- what tests ask

    def calls(self) -> dict[str, int]:
        """How often each function was called."""
        with self._lock:
            return dict(self._calls)

    def copies(self) -> int:
        """Calls that copied to or from device memory."""
        calls = self.calls()
        return sum(calls.get(name, 0) for name in COPIES)

    def add_device_memory(self, address: int, nbytes: int) -> None:
        """This host memory is on the device from now on."""
        with self._lock:
            self._ranges.append((address, nbytes))

    @contextmanager
    def hold(self, *symbols: str) -> Iterator[Held]:
        """Let calls of these functions wait, until the block ends at the latest."""
        held = Held()
        with self._lock:
            self._held.update(dict.fromkeys(symbols, held))
        try:
            yield held
        finally:
            with self._lock:
                for symbol in symbols:
                    self._held.pop(symbol, None)
            held.release()

    @contextmanager
    def fail(self, *symbols: str, result: int = INVALID_VALUE) -> Iterator[None]:
        """Let calls of these functions do nothing and answer `result`."""
        with self._lock:
            self._answers.update(dict.fromkeys(symbols, result))
        try:
            yield
        finally:
            with self._lock:
                for symbol in symbols:
                    self._answers.pop(symbol, None)

    # ------------------------------------------------------------------------------- functions

    def _counted(self, name: str, function: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: int) -> int:
            with self._lock:
                self._calls[name] += 1
                held, answer = self._held.get(name), self._answers.get(name)
            if held is not None:
                held.wait()
            return function(*arguments) if answer is None else answer

        return call

    def _range_of(self, pointer: int) -> tuple[int, int] | None:
        """(address, bytes) of the device memory that holds the pointer."""
        with self._lock:
            ranges = list(self._ranges)
        for address, nbytes in (*ranges, *_staging_mappings()):
            if address <= pointer < address + nbytes:
                return address, nbytes
        return None

    @staticmethod
    def _driver_get_version(version: int, *_: int) -> int:
        _put32(version, DRIVER_VERSION)
        return SUCCESS

    def _get_error_text(self, _: int, text: int, *__: int) -> int:
        _put64(text, ctypes.addressof(self._error_text))
        return SUCCESS

    @staticmethod
    def _device_get_count(count: int, *_: int) -> int:
        _put32(count, 1)
        return SUCCESS

    @staticmethod
    def _give_context(context: int, *_: int) -> int:
        if context:
            _put64(context, CONTEXT)
        return SUCCESS

    @staticmethod
    def _give_device(device: int, *_: int) -> int:
        _put32(device, 0)
        return SUCCESS

    @staticmethod
    def _give_stream(stream: int, *_: int) -> int:
        _put64(stream, STREAM)
        return SUCCESS

    def _pointer_get_attribute(self, data: int, attribute: int, pointer: int, *_: int) -> int:
        if self._range_of(pointer) is None:
            return INVALID_VALUE
        attribute &= 0xFFFF_FFFF
        if attribute == ATTRIBUTE_CONTEXT:
            _put64(data, CONTEXT)
        elif attribute == ATTRIBUTE_MEMORY_TYPE:
            _put32(data, DEVICE_MEMORY)
        elif attribute == ATTRIBUTE_DEVICE_POINTER:
            _put64(data, pointer)
        elif attribute == ATTRIBUTE_DEVICE_ORDINAL:
            _put32(data, 0)
        else:
            return INVALID_VALUE
        return SUCCESS

    def _pointer_get_attributes(
        self, count: int, attributes: int, data: int, pointer: int, *_: int
    ) -> int:
        known = self._range_of(pointer) is not None
        for number in range(count & 0xFFFF_FFFF):
            attribute = ctypes.c_int32.from_address(attributes + 4 * number).value
            if attribute != ATTRIBUTE_MEMORY_TYPE:
                return INVALID_VALUE
            _put32(_get64(data + 8 * number), DEVICE_MEMORY if known else 0)
        return SUCCESS

    def _mem_get_address_range(self, base: int, size: int, pointer: int, *_: int) -> int:
        found = self._range_of(pointer)
        if found is None:
            return INVALID_VALUE
        if base:
            _put64(base, found[0])
        if size:
            _put64(size, found[1])
        return SUCCESS

    def _mem_host_alloc(self, pointer: int, nbytes: int, *_: int) -> int:
        memory = mmap.mmap(-1, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with self._lock:
            self._host[address] = memory
        _put64(pointer, address)
        return SUCCESS

    def _mem_free_host(self, pointer: int, *_: int) -> int:
        with self._lock:
            return SUCCESS if self._host.pop(pointer, None) is not None else INVALID_VALUE

    @staticmethod
    def _copy(destination: int, source: int, nbytes: int, *_: int) -> int:
        ctypes.memmove(destination, source, nbytes)
        return SUCCESS

    @staticmethod
    def _copy_batch(destinations: int, sources: int, sizes: int, count: int, *_: int) -> int:
        for number in range(count):
            at = 8 * number
            ctypes.memmove(_get64(destinations + at), _get64(sources + at), _get64(sizes + at))
        return SUCCESS


def _succeed(*_: int) -> int:
    return SUCCESS


def _staging_mappings() -> Iterator[tuple[int, int]]:
    """(address, bytes) of the process's mappings that stand for device memory."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if STAGING_NAME in line:
                start, _, end = line.split(" ", 1)[0].partition("-")
                yield int(start, 16), int(end, 16) - int(start, 16)


class DeviceMemory:
    """Bytes that the fake driver takes for device memory, page-aligned, all 0."""

    def __init__(self, nbytes: int) -> None:
        fd = os.memfd_create(STAGING_NAME)
        try:
            os.ftruncate(fd, nbytes)
            self._map = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self.view = memoryview(self._map)
        """The same bytes, as the host sees them."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }
