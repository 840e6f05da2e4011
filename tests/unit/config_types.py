"""Tier types for tests of the configuration, without any backend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tiered_kv.config import Directory, SizeOrPercent, TierSettings
from tiered_kv.errors import PluginError


class DiskSettings(TierSettings, frozen=True):
    type: Literal["disk"] = Field(default="disk", description="A disk.")
    path: Directory = Field(description="Directory of the tier.")
    min_free: SizeOrPercent = Field(
        default=SizeOrPercent(percent=5.0), description="What is left free."
    )
    threads: int = Field(default=4, ge=1, description="Threads.", json_schema_extra={"unit": "1"})
    access: Literal["read_write", "read"] = Field(default="read_write", description="Access.")

    @property
    def writable(self) -> bool:
        return self.access == "read_write"


class StripedSettings(TierSettings, frozen=True):
    type: Literal["striped"] = Field(default="striped", description="Several disks.")
    paths: tuple[Directory, ...] = Field(description="Directories of the tier.")


class FakeTypes:
    """Fulfils `TierTypes`; `broken` is announced, but cannot be loaded."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def names(self) -> tuple[str, ...]:
        return ("broken", "disk", "striped")

    def settings(self, name: str) -> type[TierSettings]:
        self.asked.append(name)
        if name == "broken":
            raise PluginError("backend 'broken' cannot be loaded: ImportError: no libbroken.so")
        known: dict[str, type[TierSettings]] = {"disk": DiskSettings, "striped": StripedSettings}
        return known[name]
