"""What the tests of the nvme store share; importable by the child processes that they start."""

from __future__ import annotations

import mmap
import os
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from tiered_kv.checksum import BlockChecksum
from tiered_kv.config import SizeOrPercent
from tiered_kv.contracts import (
    BlockStore,
    MaintenanceContext,
    NewBlock,
    StoreContext,
    StoreMaintenance,
)
from tiered_kv.testing.conformance.blocks import StoreArguments
from tiered_kv.values import BlockKey
from tiered_kv_nvme import backend
from tiered_kv_nvme.settings import NvmeSettings

SEGMENT = re.compile(r"segment-\d+")
MIB = 2**20


def settings(arguments: StoreArguments) -> NvmeSettings:
    extra = dict(arguments.extra)
    values: dict[str, Any] = {
        "name": "ssd",
        "capacity": arguments.capacity,
        "min_free": SizeOrPercent(size=0),
    }
    if "paths" not in extra:
        values["path"] = arguments.path
    return NvmeSettings.model_validate(values | extra)


def stripes_of(path: Path) -> tuple[Path, ...]:
    """The directories of a tier that is spread over three of them."""
    return tuple(path / name for name in ("first", "second", "third"))


def open_striped(arguments: StoreArguments) -> BlockStore:
    """A tier in three directories below `arguments.path`."""
    paths = ("paths", stripes_of(arguments.path))
    return open_nvme(arguments.with_(extra=(paths, *arguments.extra)))


def open_nvme(arguments: StoreArguments) -> BlockStore:
    assert backend.open_store is not None
    return backend.open_store(
        StoreContext(
            "ssd",
            settings(arguments),
            arguments.namespace,
            arguments.geometry,
            arguments.writable,
        )
    )


def look_after_nvme(arguments: StoreArguments) -> StoreMaintenance:
    assert backend.open_maintenance is not None
    context = MaintenanceContext("ssd", settings(arguments), arguments.writable)
    return backend.open_maintenance(context)


def look_after_striped(arguments: StoreArguments) -> StoreMaintenance:
    paths = ("paths", stripes_of(arguments.path))
    return look_after_nvme(arguments.with_(extra=(paths, *arguments.extra)))


def segment_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("segment-*") if SEGMENT.fullmatch(file.name))


def open_below(path: Path, name: str = "") -> list[str]:
    """The files below a directory that this process has open, of those whose names begin so."""
    found: list[str] = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(link))
    return [file for file in found if file.startswith(f"{path}/{name}")]


def slot(length: int, fill: int = 0) -> memoryview:
    """A whole page-aligned slot for `length` bytes, all bytes `fill`."""
    size = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    view = memoryview(mmap.mmap(-1, size))
    view[:] = bytes([fill]) * size
    return view


def random_block(number: int, length: int) -> tuple[NewBlock, memoryview]:
    """A block under a key of its own, and its page-aligned bytes."""
    view = slot(max(length, 1))[:length]
    view[:] = random.Random(number).randbytes(length)
    key = BlockKey(b"random" + number.to_bytes(8, "big"))
    return NewBlock(key, BlockChecksum.capture(key, 0, view)), view
