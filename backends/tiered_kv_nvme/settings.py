"""Settings of an nvme tier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from tiered_kv.config import GIB, ByteSize, Directory, SizeOrPercent, StoreSettings
from tiered_kv.values import PAGE_BYTES

__all__ = ["NvmeSettings"]

MOST_DIRECTORIES = 64


def _word(value: object) -> object:
    """YAML reads a bare `on` as true, and a bare `off` as false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class NvmeSettings(StoreSettings, frozen=True):
    """A tier of type nvme: blocks in segment files on local disks."""

    type: Literal["nvme"] = Field(default="nvme", description="Segment files on a local disk.")
    path: Directory | None = Field(
        default=None,
        description="Directory of the tier; made when it is not there. Either this or `paths`.",
        json_schema_extra={"unit": "path"},
    )
    paths: tuple[Directory, ...] = Field(
        default=(),
        max_length=MOST_DIRECTORIES,
        description="Directories of the tier, best each on a disk of its own: blocks are spread "
        "over them. Their order is kept; further ones may be added at the end.",
    )
    index: Directory | None = Field(
        default=None,
        description="Directory of the index, which names the blocks; by default the first one of "
        "the tier. Where it fails, the whole tier does.",
        json_schema_extra={"unit": "path"},
    )
    capacity: ByteSize = Field(
        default=64 * GIB,
        gt=0,
        description="Most bytes that the tier's directories may hold together: segments, index, "
        "and all that lies in them besides.",
    )
    min_free: SizeOrPercent = Field(
        default=SizeOrPercent(percent=5.0),
        description="Room that is left free on each file system, whoever uses it: a size, or a "
        "share of the file system.",
    )
    segment: ByteSize = Field(
        default=GIB,
        ge=PAGE_BYTES,
        le=64 * GIB,
        description="Size of a segment file; made smaller where fewer than 8, or 4 for each "
        "directory, would fit.",
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

    @model_validator(mode="after")
    def _one_of_both(self) -> NvmeSettings:
        if (self.path is None) == (not self.paths):
            given = "both are given" if self.paths else "neither is given"
            raise ValueError(
                f"takes either `path` (one directory) or `paths` (several), but {given}"
            )
        return self

    @property
    def folders(self) -> tuple[Path, ...]:
        """The directories that hold blocks, in their order."""
        return self.paths if self.path is None else (self.path,)

    @property
    def index_home(self) -> Path:
        """The directory in which the index lies."""
        return self.folders[0] if self.index is None else self.index

    @property
    def data_directories(self) -> tuple[Path, ...]:
        """See `TierSettings.data_directories`."""
        return self.folders

    @property
    def writable(self) -> bool:
        """False for `access: read`."""
        return self.access == "read_write"
