"""The archive: blocks of one namespace in one file, told from the file alone.

`docs/archive-format.md` describes every byte. It is written and read front to back, so that a pipe
will do. Nothing in it is believed before it was checked: sizes against the format's limits and the
header's geometry before memory is taken for them, the header and each block's head against check
values of their own, bytes against the block's checksum, and the whole against the trailer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import xxhash
from pydantic import BaseModel, Field, ValidationError

from tiered_kv.checksum import BlockChecksum
from tiered_kv.errors import ArchiveError, FormatError
from tiered_kv.values import (
    BlockKey,
    CacheGeometry,
    ChecksumKind,
    Fingerprint,
    GroupGeometry,
    Namespace,
)

__all__ = [
    "ARCHIVE_VERSION",
    "MOST_BLOCK_BYTES",
    "ArchiveContents",
    "ArchiveReader",
    "ArchiveWriter",
    "ArchivedBlock",
    "ReadableStream",
    "WritableStream",
]

ARCHIVE_VERSION = 1
"""Version of the format that is written, and the only one that is read."""

MAGIC = b"\x89TKVA\r\n\x1a"
"""Tells the file, and a transfer that took it for text."""

MOST_HEADER_BYTES = 2**20
MOST_BLOCK_BYTES = 2**32
"""Longest part of a block that the format allows, in bytes."""
MOST_KEY_BYTES = 256
MOST_RANKS = 2**10

_START = struct.Struct(">8sII")
_HEADER_CHECK = struct.Struct(">Q")
_MARK = struct.Struct(">c")
_HEAD = struct.Struct(">HIBQQ")
_HEAD_CHECK = struct.Struct(">I")
_TRAILER = struct.Struct(">QQ")
_DIGEST_BYTES = 16
_BLOCK, _END = b"B", b"E"
_KINDS = {1: ChecksumKind.XXH3, 2: ChecksumKind.WSUM}
_CODES = {kind: code for code, kind in _KINDS.items()}


class _Group(BaseModel, frozen=True, extra="forbid", strict=True):
    """`GroupGeometry` as the header has it."""

    index: Annotated[int, Field(ge=0, lt=2**16)]
    block_bytes: Annotated[int, Field(ge=1, le=MOST_BLOCK_BYTES)]
    chunk: Annotated[int, Field(ge=1, lt=2**32)]
    tokens: Annotated[int, Field(ge=1, lt=2**32)]


class _Header(BaseModel, frozen=True, extra="forbid", strict=True):
    """The JSON object at the beginning of an archive."""

    namespace: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    fields: Annotated[dict[str, str], Field(min_length=1)]
    epoch: Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$")]
    world_size: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    groups: Annotated[list[_Group], Field(min_length=1)]
    ranks: Annotated[list[int], Field(min_length=1)]
    checksums: dict[Literal["1", "2"], Literal["xxh3", "wsum"]]


@dataclass(frozen=True, slots=True)
class ArchiveContents:
    """What an archive is about."""

    namespace: Namespace
    geometry: CacheGeometry
    """What its blocks are, as of rank 0."""
    ranks: tuple[int, ...]
    """Whose parts of the blocks it may hold, in order."""

    @property
    def block_bytes(self) -> int:
        """Length of the longest part of a block that it may hold, in bytes."""
        return max(group.block_bytes for group in self.geometry.groups)


@dataclass(frozen=True, slots=True)
class ArchivedBlock:
    """One rank's part of a block, without its bytes."""

    key: BlockKey
    rank: int
    checksum: BlockChecksum
    """As it was bound when the block was captured from the engine."""


class ReadableStream(Protocol):
    """What an archive is read from: a file, a pipe."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""
        ...

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill `buffer` from its beginning; how far, 0 at the end."""
        ...


class WritableStream(Protocol):
    """What an archive is written to: a buffered file, a pipe."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Write everything."""
        ...

    def flush(self) -> None:
        """Hand on what is buffered."""
        ...


class ArchiveWriter:
    """Writes an archive to a stream. Not thread-safe."""

    def __init__(self, stream: WritableStream, contents: ArchiveContents) -> None:
        """Write the header.

        Raises:
            ArchiveError: the stream does not take it.
            ValueError: the header would be larger than the format allows.
        """
        self._stream = stream
        self._contents = contents
        self._seen = xxhash.xxh3_128()
        self.parts = 0
        """Blocks' parts that were written so far."""
        self.bytes = 0
        """Bytes of them."""
        header = _packed(contents)
        if len(header) > MOST_HEADER_BYTES:
            raise ValueError(f"a header of {len(header)} bytes; at most {MOST_HEADER_BYTES}")
        start = _START.pack(MAGIC, ARCHIVE_VERSION, len(header)) + header
        self._write(start + _HEADER_CHECK.pack(xxhash.xxh3_64_intdigest(start)))

    def add(self, block: ArchivedBlock, data: memoryview) -> None:
        """Write one rank's part of a block, whose bytes the caller has verified.

        Raises:
            ArchiveError: the stream does not take it.
            ValueError: `data` is not as long as its checksum says, or the block is none of those
                that the header announces.
        """
        checksum = block.checksum
        if data.nbytes != checksum.length:
            raise ValueError(f"{data.nbytes} bytes for a block of {checksum.length}")
        problem = _problem(block, self._contents)
        if problem is not None:
            raise ValueError(f"a block {problem}")
        head = _BLOCK + _HEAD.pack(
            len(block.key), block.rank, _CODES[checksum.kind], checksum.length, checksum.value
        )
        head += block.key
        self._write(head + _HEAD_CHECK.pack(xxhash.xxh32_intdigest(head)))
        self._write(data)
        self.parts += 1
        self.bytes += data.nbytes

    def finish(self) -> None:
        """Write the trailer, without which the archive counts as cut off, and flush.

        Raises:
            ArchiveError: the stream does not take it.
        """
        self._write(_END + _TRAILER.pack(self.parts, self.bytes))
        self._write(self._seen.digest())
        with _translated("write"):
            self._stream.flush()

    def _write(self, data: bytes | memoryview) -> None:
        self._seen.update(data)
        with _translated("write"):
            self._stream.write(data)


class ArchiveReader:
    """Reads an archive from a stream: `next`, then `read_into` for its bytes, and so on until
    `next` gives None. Not thread-safe.

    After an `ArchiveError` nothing more can be read; whether what was read before is right is told
    by each block's checksum.
    """

    def __init__(self, stream: ReadableStream) -> None:
        """Read the header.

        Raises:
            FormatError: this is no archive, or one of another version.
            ArchiveError: it is cut off or damaged, or the stream cannot be read.
        """
        self._stream = stream
        self._seen = xxhash.xxh3_128()
        self._offset = 0
        self._pending = 0
        self.parts = 0
        """Blocks' parts that were read so far."""
        self.bytes = 0
        """Bytes of them."""
        self.contents = self._read_header()

    def _read_header(self) -> ArchiveContents:
        start = self._take(_START.size, "the beginning")
        magic, version, length = _START.unpack(start)
        if magic != MAGIC:
            raise FormatError("this is no tiered-kv archive; it does not begin as one")
        if version != ARCHIVE_VERSION:
            raise FormatError(
                f"this is an archive of version {version}, and this tiered-kv reads version "
                f"{ARCHIVE_VERSION}; import it with the version that wrote it, or export it anew"
            )
        if length > MOST_HEADER_BYTES:
            raise self._damage(f"a header of {length} bytes; at most {MOST_HEADER_BYTES} are")
        header = self._take(length, "the header")
        (check,) = _HEADER_CHECK.unpack(self._take(_HEADER_CHECK.size, "the header's check value"))
        if check != xxhash.xxh3_64_intdigest(start + header):
            raise self._damage("a header that is not what was written")
        try:
            return _unpacked(header)
        except ValueError as error:
            raise self._damage(f"a header that says nothing sensible ({error})") from error

    def next(self) -> ArchivedBlock | None:
        """The next block's head; None behind the last one, when the trailer was right.

        Raises:
            ArchiveError: the archive is cut off or damaged, or the stream cannot be read.
            ValueError: the bytes of the block before were not read.
        """
        if self._pending:
            raise ValueError("the bytes of the block before were not read")
        mark = self._take(_MARK.size, "a block or the end")
        if mark == _END:
            self._check_end()
            return None
        if mark != _BLOCK:
            raise self._damage(f"neither a block nor the end, but {mark!r}")
        head = self._take(_HEAD.size, "a block's head")
        length_of_key, rank, code, length, value = _HEAD.unpack(head)
        if not 0 < length_of_key <= MOST_KEY_BYTES:
            raise self._damage(f"a key of {length_of_key} bytes; 1 to {MOST_KEY_BYTES} are")
        key = self._take(length_of_key, "a block's key")
        check = self._take(_HEAD_CHECK.size, "a block's check value")
        if check != _HEAD_CHECK.pack(xxhash.xxh32_intdigest(mark + head + key)):
            raise self._damage("a block's head that is not what was written")
        if code not in _KINDS:
            raise self._damage(f"a checksum of unknown kind {code}")
        block = ArchivedBlock(BlockKey(key), rank, BlockChecksum(length, value, _KINDS[code]))
        problem = _problem(block, self.contents)
        if problem is not None:
            raise self._damage(f"a block {problem}")
        self._pending = length
        return block

    def read_into(self, view: memoryview) -> None:
        """Read the bytes of the block that `next` gave, as many as its checksum says. They are to
        be verified by the caller.

        Raises:
            ArchiveError: the archive is cut off, or the stream cannot be read.
            ValueError: `view` has another length.
        """
        if view.nbytes != self._pending:
            raise ValueError(f"room for {view.nbytes} bytes; the block has {self._pending}")
        done = 0
        while done < view.nbytes:
            with _translated("read"):
                got = self._stream.readinto(view[done:])
            if not got:
                self._offset += done
                raise self._damage("the end of the file within a block's bytes")
            done += got
        self._seen.update(view)
        self._offset += done
        self._pending = 0
        self.parts += 1
        self.bytes += done

    def _check_end(self) -> None:
        parts, size = _TRAILER.unpack(self._take(_TRAILER.size, "the trailer"))
        digest = self._seen.digest()
        if (parts, size) != (self.parts, self.bytes):
            raise self._damage(
                f"a trailer of {parts} parts of blocks and {size} bytes, behind {self.parts} parts "
                f"and {self.bytes} bytes"
            )
        if self._take(_DIGEST_BYTES, "the digest") != digest:
            raise self._damage("another digest than that of what came before")
        with _translated("read"):
            more = self._stream.read(1)
        if more:
            raise self._damage("further bytes behind the end")

    def _take(self, size: int, what: str) -> bytes:
        """Exactly so many bytes; `size` is bounded by the format."""
        taken = b""
        while len(taken) < size:
            with _translated("read"):
                got = self._stream.read(size - len(taken))
            if not got:
                self._offset += len(taken)
                raise self._damage(f"the end of the file within {what}")
            taken += got
        self._offset += size
        self._seen.update(taken)
        return taken

    def _damage(self, what: str) -> ArchiveError:
        return ArchiveError(
            f"the archive is damaged: {what}, found before byte {self._offset}; "
            "get it anew from where it was exported"
        )


def _problem(block: ArchivedBlock, contents: ArchiveContents) -> str | None:
    """What a block has that the header rules out."""
    if not 0 < len(block.key) <= MOST_KEY_BYTES:
        return f"with a key of {len(block.key)} bytes"
    if block.rank not in contents.ranks:
        return f"of rank {block.rank}, which the header does not name"
    if not 0 < block.checksum.length <= contents.block_bytes:
        return f"of {block.checksum.length} bytes, where the header allows {contents.block_bytes}"
    return None


def _packed(contents: ArchiveContents) -> bytes:
    namespace, geometry = contents.namespace, contents.geometry
    header = _Header(
        namespace=namespace.id.hex(),
        fields=dict(namespace.fingerprint.fields),
        epoch=namespace.epoch.hex(),
        world_size=geometry.world_size,
        groups=[
            _Group(
                index=group.index,
                block_bytes=group.block_bytes,
                chunk=group.chunk,
                tokens=group.tokens,
            )
            for group in geometry.groups
        ],
        ranks=list(contents.ranks),
        checksums={"1": "xxh3", "2": "wsum"},
    )
    return header.model_dump_json().encode()


def _unpacked(data: bytes) -> ArchiveContents:
    """The inverse of `_packed`.

    Raises:
        ValueError: it is something else.
    """
    try:
        header = _Header.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    namespace = Namespace(
        Fingerprint(tuple(sorted(header.fields.items()))), bytes.fromhex(header.epoch)
    )
    if namespace.id.hex() != header.namespace:
        raise ValueError("its fields are those of another namespace")
    ranks = tuple(header.ranks)
    if list(ranks) != sorted(set(ranks)) or not 0 <= ranks[0] <= ranks[-1] < header.world_size:
        raise ValueError(f"ranks {list(ranks)} of {header.world_size}")
    if header.checksums != {"1": "xxh3", "2": "wsum"}:
        raise ValueError("other kinds of checksums")
    groups = tuple(
        GroupGeometry(group.index, group.block_bytes, group.chunk, group.tokens)
        for group in header.groups
    )
    return ArchiveContents(namespace, CacheGeometry(groups, 0, header.world_size), ranks)


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    """The one place that translates what the stream raises."""
    try:
        yield
    except OSError as error:
        raise ArchiveError(f"cannot {doing} the archive: {error}") from error
