"""Small archives for the tests, and hostile ones."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from tiered_kv.checksum import BlockChecksum
from tiered_kv.testing.conformance.blocks import NAMESPACE
from tiered_kv.upkeep import (
    ArchiveContents,
    ArchivedBlock,
    ArchiveReader,
    ArchiveWriter,
    ReadableStream,
)
from tiered_kv.values import BlockKey, CacheGeometry, ChecksumKind, GroupGeometry

GEOMETRY = CacheGeometry((GroupGeometry(0, 100, 1, 16), GroupGeometry(1, 37, 2, 32)), 0, 2)
CONTENTS = ArchiveContents(NAMESPACE, GEOMETRY, (0, 1))

Part = tuple[bytes, int, bytes, ChecksumKind]
"""Key, rank, bytes, kind of checksum."""

PARTS: tuple[Part, ...] = (
    (b"first", 0, b"a" * 100, ChecksumKind.XXH3),
    (b"first", 1, b"b" * 100, ChecksumKind.XXH3),
    (b"\x00../second", 0, b"c" * 37, ChecksumKind.WSUM),
    (b"\x00../second", 1, b"d" * 36, ChecksumKind.WSUM),
)


def archived(part: Part) -> tuple[ArchivedBlock, memoryview]:
    """A part as the writer takes it."""
    key, rank, data, kind = part
    view = memoryview(bytearray(data))
    checksum = BlockChecksum.capture(BlockKey(key), rank, view, kind)
    return ArchivedBlock(BlockKey(key), rank, checksum), view


def archive(parts: Sequence[Part] = PARTS, contents: ArchiveContents = CONTENTS) -> bytes:
    """An archive of these parts."""
    stream = io.BytesIO()
    writer = ArchiveWriter(stream, contents)
    for part in parts:
        writer.add(*archived(part))
    writer.finish()
    return stream.getvalue()


def read_all(data: bytes, found: list[Part]) -> ArchiveReader:
    """Append every part that verifies to `found`; raises what the reader raises."""
    return read_stream(io.BytesIO(data), found)


def read_stream(stream: ReadableStream, found: list[Part]) -> ArchiveReader:
    """See `read_all`."""
    reader = ArchiveReader(stream)
    while (block := reader.next()) is not None:
        view = memoryview(bytearray(block.checksum.length))
        reader.read_into(view)
        if block.checksum.verifies(block.key, block.rank, view):
            found.append((bytes(block.key), block.rank, bytes(view), block.checksum.kind))
    return reader


def header_of(data: bytes) -> dict[str, Any]:
    """The JSON object at the beginning of an archive."""
    (length,) = struct.unpack_from(">I", data, 12)
    header: dict[str, Any] = json.loads(data[16 : 16 + length])
    return header


def with_header(change: Callable[[dict[str, Any]], object], *, parts: bytes = b"") -> bytes:
    """The beginning of an archive whose header was changed by somebody who knows the format."""
    header = header_of(archive())
    change(header)
    text = json.dumps(header).encode()
    start = struct.pack(">8sII", b"\x89TKVA\r\n\x1a", 1, len(text)) + text
    return start + struct.pack(">Q", xxhash.xxh3_64_intdigest(start)) + parts


def forged_head(
    key: bytes, rank: int, kind: int, length: int, *, key_length: int | None = None
) -> bytes:
    """A block's head with a right check value, whatever it says."""
    told = len(key) if key_length is None else key_length
    head = b"B" + struct.pack(">HIBQQ", told, rank, kind, length, 1) + key
    return head + struct.pack(">I", xxhash.xxh32_intdigest(head))
