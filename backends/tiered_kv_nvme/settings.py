"""Settings of an nvme tier."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tiered_kv.config import GIB, ByteSize, Directory, SizeOrPercent, TierSettings
from tiered_kv.values import PAGE_BYTES

__all__ = ["NvmeSettings"]


def _word(value: object) -> object:
    """YAML reads a bare `on` as true, and a bare `off` as false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class NvmeSettings(TierSettings, frozen=True):
    """A tier of type nvme: blocks in segment files of one directory on a local disk."""

    type: Literal["nvme"] = Field(default="nvme", description="Segment files on a local disk.")
    path: Directory = Field(description="Directory of the tier; made when it is not there.")
    capacity: ByteSize = Field(
        default=64 * GIB,
        gt=0,
        description="Most bytes that the directory may hold: segments, index, and all that lies "
        "in it besides.",
    )
    min_free: SizeOrPercent = Field(
        default=SizeOrPercent(percent=5.0),
        description="Room that is left free on the file system, whoever uses it: a size, or a "
        "share of the file system.",
    )
    segment: ByteSize = Field(
        default=GIB,
        ge=PAGE_BYTES,
        le=64 * GIB,
        description="Size of a segment file; made smaller where fewer than 8 would fit.",
    )
    io: Literal["auto", "posix", "kvikio"] = Field(
        default="auto",
        description="I/O engine between the disk and host memory. posix: vectored reads and "
        "writes, direct where the directory allows it, else buffered; kvikio: KvikIO, which needs "
        "a CUDA driver and a directory that allows direct I/O, and is refused elsewhere; auto: "
        "posix, which is at least as fast for host memory.",
    )
    gpu_direct: Annotated[Literal["auto", "on", "off"], BeforeValidator(_word)] = Field(
        default="auto",
        description="Move blocks between the GPU and the disk with KvikIO, not by way of the host "
        "pool. auto: where the engine's cache is on a CUDA device and GPUDirect Storage is in "
        "effect; on: also through KvikIO's bounce buffers, and refused where KvikIO cannot work; "
        "off: never.",
    )
    io_threads: int = Field(
        default=4,
        ge=1,
        le=64,
        strict=True,
        description="Reads and writes that the posix engine runs at once in each process.",
        json_schema_extra={"unit": "threads"},
    )
    durability: Literal["none", "batch", "full"] = Field(
        default="none",
        description="What survives a crash of the machine. none: nothing, the tier starts empty; "
        "batch: what was flushed with its batch; full: everything published. A crash of the "
        "process alone loses nothing in any of them.",
    )
    access: Literal["read_write", "read"] = Field(
        default="read_write", description="read: nothing in the directory is ever changed."
    )

    @property
    def writable(self) -> bool:
        """False for `access: read`."""
        return self.access == "read_write"
