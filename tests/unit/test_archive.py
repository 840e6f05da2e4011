"""The archive format: what is written is read, and nothing else is."""

from __future__ import annotations

import io
import mmap
import os
import random
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.archives import (
    CONTENTS,
    GEOMETRY,
    PARTS,
    Part,
    archive,
    archived,
    forged_head,
    header_of,
    read_all,
    read_stream,
    with_header,
)
from tiered_kv.errors import ArchiveError, FormatError
from tiered_kv.testing.conformance.blocks import NAMESPACE, OTHER_NAMESPACE
from tiered_kv.upkeep import ArchiveContents, ArchiveReader, ArchiveWriter
from tiered_kv.upkeep.archive import MOST_BLOCK_BYTES, MOST_HEADER_BYTES
from tiered_kv.values import (
    BlockKey,
    CacheGeometry,
    ChecksumKind,
    Fingerprint,
    GroupGeometry,
    Namespace,
)

_text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
_namespaces = st.builds(
    lambda fields, epoch: Namespace(Fingerprint(tuple(sorted(fields.items()))), epoch),
    st.dictionaries(_text, _text, min_size=1, max_size=6),
    st.binary(max_size=16),
)


@st.composite
def _contents(draw: st.DrawFn) -> ArchiveContents:
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    world = draw(st.integers(1, 8))
    groups = tuple(GroupGeometry(i, size, 1, 16) for i, size in enumerate(sizes))
    ranks = draw(st.sets(st.integers(0, world - 1), min_size=1))
    geometry = CacheGeometry(groups, 0, world)
    return ArchiveContents(draw(_namespaces), geometry, tuple(sorted(ranks)))


@st.composite
def _archives(draw: st.DrawFn) -> tuple[ArchiveContents, list[Part]]:
    contents = draw(_contents())
    part = st.tuples(
        st.binary(min_size=1, max_size=256),
        st.sampled_from(contents.ranks),
        st.binary(min_size=1, max_size=contents.block_bytes),
        st.sampled_from(ChecksumKind),
    )
    return contents, draw(st.lists(part, max_size=8))


@given(_archives())
@settings(deadline=None)
def test_what_is_written_is_read(given: tuple[ArchiveContents, list[Part]]) -> None:
    contents, parts = given
    found: list[Part] = []
    reader = read_all(archive(parts, contents), found)
    assert found == parts
    assert reader.contents == contents
    assert (reader.parts, reader.bytes) == (len(parts), sum(len(part[2]) for part in parts))


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_no_bytes_of_others_are_an_archive(data: bytes) -> None:
    with pytest.raises((FormatError, ArchiveError)):
        read_all(data, [])


@given(_archives(), st.data())
@settings(deadline=None)
def test_no_change_of_a_byte_goes_unnoticed(
    given: tuple[ArchiveContents, list[Part]], data: st.DataObject
) -> None:
    contents, parts = given
    whole = bytearray(archive(parts, contents))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    found: list[Part] = []
    with pytest.raises((FormatError, ArchiveError)):
        read_all(bytes(whole), found)
    assert all(part in parts for part in found)


def test_cut_at_every_byte() -> None:
    whole = archive()
    kept = set()
    for size in range(len(whole)):
        found: list[Part] = []
        with pytest.raises(ArchiveError, match="damaged: the end of the file within"):
            read_all(whole[:size], found)
        assert tuple(found) == PARTS[: len(found)]
        kept.add(len(found))
    print(f"{len(whole)} cuts; between {min(kept)} and {max(kept)} blocks before the cut")
    assert kept == {0, 1, 2, 3, 4}
    with pytest.raises(ArchiveError, match="further bytes behind the end"):
        read_all(whole + b"\0", [])


def test_every_bit_flipped() -> None:
    whole = archive()
    refused = damaged = 0
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        found: list[Part] = []
        with pytest.raises((FormatError, ArchiveError)) as caught:
            read_all(bytes(flipped), found)
        assert all(part in PARTS for part in found)
        assert tuple(found) == tuple(part for part in PARTS if part in found)
        refused += caught.type is FormatError
        damaged += caught.type is ArchiveError
    print(f"{refused + damaged} bits: {refused} no archive of ours, {damaged} damaged")
    assert refused == 8 * 12  # the magic and the version
    assert damaged > 5000


def test_a_damaged_block_hides_only_itself() -> None:
    whole = bytearray(archive())
    whole[whole.index(b"b" * 100) + 50] ^= 4
    found: list[Part] = []
    with pytest.raises(ArchiveError, match="another digest"):
        read_all(bytes(whole), found)
    assert tuple(found) == (PARTS[0], *PARTS[2:])


def test_an_archive_of_another_version_is_refused() -> None:
    whole = bytearray(archive())
    whole[11] = 2
    with pytest.raises(FormatError, match="archive of version 2, and this tiered-kv reads ver"):
        ArchiveReader(io.BytesIO(bytes(whole)))


def _set(header: dict[str, Any], path: str, value: object) -> None:
    *folders, name = path.split(".")
    where: Any = header
    for folder in folders:
        where = where[int(folder) if folder.isdigit() else folder]
    where[name] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("world_size", 0),
        ("world_size", 2**40),
        ("world_size", "2"),
        ("world_size", 1),
        ("ranks", []),
        ("ranks", [0, 2]),
        ("ranks", [1, 0]),
        ("ranks", [0, 0]),
        ("ranks", [-1]),
        ("ranks", [0.5]),
        ("groups", []),
        ("groups.0.block_bytes", 0),
        ("groups.0.block_bytes", -1),
        ("groups.0.block_bytes", MOST_BLOCK_BYTES + 1),
        ("groups.0.block_bytes", 1e300),
        ("groups.0.chunk", 0),
        ("groups.0.tokens", 2**64),
        ("groups.0.more", 1),
        ("fields", {}),
        ("fields", {"model": "another"}),
        ("fields", {"model": 3}),
        ("epoch", "0"),
        ("epoch", "zz"),
        ("epoch", "00"),
        ("namespace", OTHER_NAMESPACE.id.hex()),
        ("namespace", "../../etc/passwd"),
        ("checksums", {"1": "wsum", "2": "xxh3"}),
        ("checksums", {"3": "crc"}),
        ("further", True),
    ],
)
def test_a_header_that_says_nothing_sensible_is_refused(path: str, value: object) -> None:
    hostile = with_header(lambda header: _set(header, path, value))
    with pytest.raises(ArchiveError, match="header that says nothing sensible"):
        ArchiveReader(io.BytesIO(hostile))


def test_the_header_as_it_is_passes() -> None:
    assert ArchiveReader(io.BytesIO(with_header(lambda header: None))).contents == CONTENTS
    header = header_of(archive())
    assert header["namespace"] == NAMESPACE.id.hex()
    assert header["fields"] == dict(NAMESPACE.fingerprint.fields)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (forged_head(b"key", 0, 1, 101), "a block of 101 bytes, where the header allows 100"),
        (forged_head(b"key", 0, 1, 2**63), "where the header allows 100"),
        (forged_head(b"key", 0, 1, 0), "a block of 0 bytes"),
        (forged_head(b"key", 2, 1, 10), "of rank 2, which the header does not name"),
        (forged_head(b"key", 2**32 - 1, 1, 10), "which the header does not name"),
        (forged_head(b"key", 0, 3, 10), "unknown kind 3"),
        (forged_head(b"", 0, 1, 10), "a key of 0 bytes; 1 to 256 are"),
        (forged_head(b"k" * 257, 0, 1, 10), "a key of 257 bytes"),
        (forged_head(b"key", 0, 1, 10, key_length=65535), "a key of 65535 bytes"),
        (forged_head(b"key", 0, 1, 10, key_length=2), "head that is not what was written"),
        (b"P" + bytes(64), "neither a block nor the end"),
    ],
)
def test_heads_that_the_format_rules_out(head: bytes, said: str) -> None:
    reader = ArchiveReader(io.BytesIO(with_header(lambda header: None, parts=head + bytes(200))))
    with pytest.raises(ArchiveError, match=said):
        reader.next()


def test_a_long_header_is_not_read() -> None:
    whole = bytearray(archive())
    whole[12:16] = (MOST_HEADER_BYTES + 1).to_bytes(4, "big")
    stream = io.BytesIO(bytes(whole) + bytes(2 * MOST_HEADER_BYTES))
    with pytest.raises(ArchiveError, match="a header of 1048577 bytes; at most 1048576 are"):
        ArchiveReader(stream)
    assert stream.tell() == 16
    fields = tuple((f"field{i}", "x" * 100_000) for i in range(11))
    large = replace(CONTENTS, namespace=Namespace(Fingerprint(fields)))
    with pytest.raises(ValueError, match="at most 1048576"):
        ArchiveWriter(io.BytesIO(), large)


def test_deeply_nested_json_is_refused() -> None:
    hostile = with_header(lambda header: header.update(fields=_nested(400)))
    with pytest.raises(ArchiveError, match="says nothing sensible"):
        ArchiveReader(io.BytesIO(hostile))


def _nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def test_it_passes_through_a_pipe_that_gives_little_at_a_time() -> None:
    incoming, outgoing = os.pipe()
    whole = archive()

    def trickle() -> None:
        rng = random.Random(5)
        with os.fdopen(outgoing, "wb", buffering=0) as pipe:
            rest = whole
            while rest:
                size = rng.randint(1, 9)
                pipe.write(rest[:size])
                rest = rest[size:]

    thread = threading.Thread(target=trickle)
    thread.start()
    found: list[Part] = []
    with os.fdopen(incoming, "rb", buffering=0) as stream:
        reader = ArchiveReader(stream)
        while (block := reader.next()) is not None:
            view = memoryview(mmap.mmap(-1, 4096))[: block.checksum.length]
            reader.read_into(view)
            found.append((bytes(block.key), block.rank, bytes(view), block.checksum.kind))
    thread.join()
    assert tuple(found) == PARTS


class Broken(io.BytesIO):
    """A stream that fails after so many bytes."""

    def __init__(self, data: bytes, good: int) -> None:
        super().__init__(data)
        self._good = good

    def _fail(self) -> None:
        if self.tell() >= self._good:
            raise OSError(5, "Input/output error")

    def read(self, size: int | None = -1, /) -> bytes:
        self._fail()
        return super().read(size)

    def readinto(self, buffer: Any, /) -> int:
        self._fail()
        return super().readinto(buffer)

    def write(self, data: Any, /) -> int:
        self._fail()
        return super().write(data)


def test_what_the_stream_raises_is_translated() -> None:
    whole = archive()
    failed = 0
    for good in range(len(whole)):
        with pytest.raises(ArchiveError, match=r"cannot read the archive: .*Input/output error"):
            read_stream(Broken(whole, good), [])
        failed += 1
    assert failed == len(whole)
    with pytest.raises(ArchiveError, match="cannot write the archive"):
        ArchiveWriter(Broken(b"", 0), CONTENTS)


def test_what_callers_must_not_do() -> None:
    writer = ArchiveWriter(io.BytesIO(), CONTENTS)
    block, data = archived(PARTS[0])
    with pytest.raises(ValueError, match="99 bytes for a block of 100"):
        writer.add(block, data[:99])
    with pytest.raises(ValueError, match="of rank 5"):
        writer.add(replace(block, rank=5), data)
    with pytest.raises(ValueError, match="key of 0 bytes"):
        writer.add(replace(block, key=BlockKey(b"")), data)
    reader = ArchiveReader(io.BytesIO(archive()))
    assert reader.next() is not None
    with pytest.raises(ValueError, match="were not read"):
        reader.next()
    with pytest.raises(ValueError, match="room for 3 bytes; the block has 100"):
        reader.read_into(memoryview(bytearray(3)))
    assert GEOMETRY.world_size == 2
