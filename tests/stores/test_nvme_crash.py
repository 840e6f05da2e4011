"""Crashes of a process, and what they leave on the disk."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.nvme_parts import open_nvme, segment_files
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    NAMESPACE,
    StoreArguments,
    aligned_copy,
    content,
    key,
    new_block,
    put,
    reserved,
)
from tiered_kv.values import PAGE_BYTES
from tiered_kv_nvme.headers import SegmentHeader, SlotEntry


def table(path: Path) -> Iterator[tuple[SegmentHeader, SlotEntry, bytes]]:
    """All current entries of all segments' header tables, with the bytes of their slots."""
    for file in segment_files(path):
        data = file.read_bytes()
        header = SegmentHeader.unpack(data[:PAGE_BYTES])
        assert header is not None
        assert len(data) == header.layout.file_bytes
        for slot in range(header.layout.slots):
            start = header.layout.entry_offset(slot)
            entry = SlotEntry.unpack(data[start : start + header.layout.stride])
            if entry is not None and entry.epoch == header.epoch:
                begin = header.layout.offset(slot)
                yield header, entry, data[begin : begin + entry.checksum.length]


@pytest.mark.parametrize("durability", ["none", "batch", "full"])
def test_the_header_tables_tell_all_that_was_published(tmp_path: Path, durability: str) -> None:
    """From them alone every block can be found and verified; nothing else is in them."""
    arguments = StoreArguments(tmp_path / "tier", extra=(("durability", durability),))
    store = open_nvme(arguments)
    put(store, range(30))
    put(store, range(100, 105), length=12_345)
    places = reserved(store, [new_block(n) for n in range(200, 204)])
    store.write(places, [aligned_copy(content(n)) for n in range(200, 204)])
    store.abandon(places)
    assert store.stat().modes["durability"] == durability
    store.close()
    found = {}
    for header, entry, data in table(arguments.path):
        assert header.namespace_id == NAMESPACE.id
        assert entry.checksum.verifies(entry.key, entry.rank, memoryview(data))
        found[entry.key] = len(data)
    print(f"{len(found)} blocks in the header tables")
    assert found == {
        **{key(n): BLOCK_BYTES for n in range(30)},
        **{key(n): 12_345 for n in range(100, 105)},
    }


def test_a_segment_header_is_told_from_others() -> None:
    assert SegmentHeader.unpack(bytes(PAGE_BYTES)) is None
    assert SegmentHeader.unpack(b"") is None
    assert SlotEntry.unpack(bytes(512)) is None
    noise = random.Random(2)
    for _ in range(200):
        assert SlotEntry.unpack(b"SLOT" + noise.randbytes(508)) is None
