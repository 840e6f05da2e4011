"""The one place that talks to CUDA: streams, events, and registration of host memory.

Handlers see `Device`, which a stand-in implements in the tests. ROCm comes through the same calls
of torch. Work that is launched here runs behind the caller's back, in this order:

* what one lane is given runs in that order; different lanes run side by side;
* `Lane.after` holds back everything that the lane is given later;
* `Mark.wait` returns when everything that was given to the lane before the mark has run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tiered_kv.errors import UnsupportedError

__all__ = ["CudaDevice", "Device", "Lane", "Mark", "default_device", "device_of"]

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of this process


class Mark(Protocol):
    """A point in a lane's work, or in the engine's. Thread-safe."""

    def wait(self) -> None:
        """Block the calling thread until the device has come to this point; the GIL is released.

        Raises:
            RuntimeError: the device failed.
        """
        ...


class Lane(Protocol):
    """Work of ours that the device does in order. Not thread-safe: one owner at a time."""

    def after(self, mark: object) -> None:
        """Hold back what is given to this lane from now on until the device has come to `mark`.

        Raises:
            TypeError: it is no mark of this kind of device.
        """
        ...

    def run(self, work: Callable[[], object]) -> None:
        """Give the lane what `work` launches. Tensors that it touches live until a later mark has
        been waited for."""
        ...

    def mark(self) -> Mark:
        """The point behind everything that the lane was given so far."""
        ...


class Device(Protocol):
    """A device that computes behind its caller's back. Thread-safe."""

    @property
    def name(self) -> str:
        """As torch spells it, for example "cuda:0"."""
        ...

    def lane(self) -> Lane:
        """A new lane."""
        ...

    def fence(self) -> Mark:
        """The point behind everything that the calling thread has given its current stream."""
        ...

    def synchronize(self) -> None:
        """Block until the device has done all that it was given, on whatever stream."""
        ...

    def host_tensor(self, count: int) -> torch.Tensor:
        """`count` int64 in host memory that the device copies without a detour."""
        ...

    def register_host(self, address: int, nbytes: int) -> None:
        """Lock a range of host memory and make it known to the device, so that copies of it run
        asynchronously and at full speed. One copy must not cross the border of a range.

        Raises:
            RuntimeError: the driver refuses.
        """
        ...

    def unregister_host(self, address: int) -> None:
        """Undo `register_host` of the range that begins here; no copy of it is running.

        Raises:
            RuntimeError: the driver refuses.
        """
        ...


@functools.cache
def device_of(device: torch.device) -> Device | None:
    """The device that computes on tensors there; None for host memory, where nothing runs behind
    the caller's back.

    Raises:
        UnsupportedError: it is neither host memory nor CUDA.
    """
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return CudaDevice(device)
    raise UnsupportedError(
        f"the engine's KV cache is on {device}; tiered-kv copies to and from CUDA devices (ROCm "
        "included) and host memory"
    )


def default_device() -> torch.device:
    """Where an engine would compute on this machine: the current CUDA device, else host memory."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class CudaDevice:
    """`Device` by way of `torch.cuda`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def name(self) -> str:
        """As torch spells it, for example "cuda:0"."""
        return str(self._device)

    def lane(self) -> Lane:
        """A new stream."""
        return _CudaLane(self._device)

    def fence(self) -> Mark:
        """An event on the calling thread's current stream."""
        return _CudaMark(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """Block until every stream of the device is idle."""
        torch.cuda.synchronize(self._device)

    def host_tensor(self, count: int) -> torch.Tensor:
        """`count` int64 in pinned host memory."""
        return torch.empty(count, dtype=torch.int64, pin_memory=True)

    def register_host(self, address: int, nbytes: int) -> None:
        """`cudaHostRegister`.

        Raises:
            RuntimeError: the driver refuses.
        """
        # The device is named, since a thread begins with device 0 and would make a context there.
        with torch.cuda.device(self._device):
            code = _runtime().cudaHostRegister(address, nbytes, _PORTABLE)
            self._check(code, f"cannot pin {nbytes:,} bytes of host memory for {self.name}")

    def unregister_host(self, address: int) -> None:
        """`cudaHostUnregister`.

        Raises:
            RuntimeError: the driver refuses.
        """
        with torch.cuda.device(self._device):
            code = _runtime().cudaHostUnregister(address)
            self._check(code, f"cannot unpin the host memory at {address:#x} for {self.name}")

    def _check(self, code: Any, what: str) -> None:
        if not code.value:
            return
        # The runtime remembers the error for this thread, and the next launch would report it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        error = torch.cuda.CudaError(code.value)
        raise RuntimeError(f"{what}: {error}") from error


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's


class _CudaMark:
    """An event. Waiting for it sleeps, instead of spinning on a processor that the engine needs."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


class _CudaLane:
    """A stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's

    def after(self, mark: object) -> None:
        if not isinstance(mark, _CudaMark):
            raise TypeError(f"{mark!r} is not what KVCaches.fence made of a CUDA device")
        self._stream.wait_event(mark.event)

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Mark:
        return _CudaMark(self._stream)
