"""Settings of an lmdb tier."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tiered_kv.config import GIB, MIB, ByteSize, Directory, SizeOrPercent, StoreSettings

__all__ = ["LmdbSettings"]


class LmdbSettings(StoreSettings, frozen=True):
    """A tier of type lmdb: blocks as values of one LMDB file on a local disk."""

    type: Literal["lmdb"] = Field(default="lmdb", description="One LMDB file on a local disk.")
    path: Directory = Field(description="Directory of the tier; made when it is not there.")
    capacity: ByteSize = Field(
        default=16 * GIB,
        ge=4 * MIB,
        description="Most bytes that the directory may hold: blocks, index, and all that lies in "
        "it besides. An eighth is kept free for LMDB to work in, and a part is for the index.",
    )
    min_free: SizeOrPercent = Field(
        default=SizeOrPercent(percent=5.0),
        description="Room that is left free on the file system, whoever uses it: a size, or a "
        "share of the file system.",
    )
    durability: Literal["none", "batch", "full"] = Field(
        default="none",
        description="What survives a crash of the machine. none: nothing, the tier starts empty; "
        "batch: all but the last batch; full: everything published. A crash of the process alone "
        "loses nothing in any of them.",
    )
    writemap: Literal["off", "auto"] = Field(
        default="off",
        description="auto: blocks are copied straight into the file's map, which is faster; "
        "the capacity is then taken from the disk at once. In effect on ext4 and xfs with "
        "`durability: none` where min_free stays free, else off; `check` shows it.",
    )
    access: Literal["read_write", "read"] = Field(
        default="read_write", description="read: nothing in the directory is ever changed."
    )
    force: bool = Field(
        default=False,
        strict=True,
        description="Open it on a network or user-space file system too, where LMDB can corrupt "
        "its data.",
    )

    @property
    def writable(self) -> bool:
        """False for `access: read`."""
        return self.access == "read_write"
