"""Settings of a sqlite tier."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tiered_kv.config import GIB, MIB, ByteSize, Directory, StoreSettings

__all__ = ["SqliteSettings"]


class SqliteSettings(StoreSettings, frozen=True):
    """A tier of type sqlite."""

    type: Literal["sqlite"] = Field(default="sqlite", description="One SQLite file.")
    path: Directory = Field(description="Directory of the tier; made when it is not there.")
    capacity: ByteSize = Field(
        default=GIB,
        ge=4 * MIB,
        description="Most bytes that the directory may hold; a quarter is kept for SQLite's log.",
    )
    direct: bool = Field(
        default=True, strict=True, description="Whether loads may go straight to the engine."
    )
