"""One of the directories that a tier is spread over: what the index knows of it, and how it is."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from tiered_kv_nvme.directory import Marker, Seen
from tiered_kv_nvme.posix import DirectMode

__all__ = ["Directory", "Known"]

_DEVICE = struct.Struct(">Q")
_BUFFERED = DirectMode(0, "not in use")


@dataclass(frozen=True, slots=True)
class Known:
    """What the index says of a directory."""

    device: int
    """Of its file system, when it was used last."""
    path: str

    def pack(self) -> bytes:
        """The record."""
        return _DEVICE.pack(self.device) + os.fsencode(self.path)

    @classmethod
    def unpack(cls, data: bytes) -> Known:
        """The inverse of `pack`."""
        (device,) = _DEVICE.unpack_from(data)
        return cls(device, os.fsdecode(data[_DEVICE.size :]))


@dataclass(slots=True)
class Directory:
    """One directory and how it is."""

    place: int
    path: Path
    holds_index: bool
    seen: Seen | None = None
    """What lay there at the first look; None where it could not be looked at."""
    marker: Marker | None = None
    """What it must carry."""
    mode: DirectMode = _BUFFERED
    trouble: str | None = "not yet opened"
    """Why it is not in use; None where it is."""
    read_only: str | None = None
    """Why nothing is stored there; None where something may be."""
    retry_at: float = 0.0
    full_until: float = 0.0
    examined: bool = False
    """Whether a thread is just looking at it."""
