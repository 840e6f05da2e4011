"""The pure parts: layouts, runs of slots, groups, settings; and threads that race."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.stores.nvme_parts import MIB, open_nvme, slot
from tiered_kv.config import GIB, SizeOrPercent
from tiered_kv.index import Environment
from tiered_kv.testing.conformance.blocks import StoreArguments, assert_held, disk_bytes, get, put
from tiered_kv.values import PAGE_BYTES, BlockStatus
from tiered_kv_nvme import NvmeSpec, backend
from tiered_kv_nvme.headers import SegmentLayout, round_up
from tiered_kv_nvme.plan import GROUP_BYTES, IOV_MAX, Piece, plan
from tiered_kv_nvme.records import Segment, contiguous
from tiered_kv_nvme.settings import NvmeSettings


@given(
    st.integers(0, 2**31),
    st.integers(1, 4096).map(lambda n: n * 4096),
    st.sampled_from([512, 4096]),
)
def test_a_layout_fits_and_wastes_less_than_a_slot(size: int, slot_bytes: int, stride: int) -> None:
    layout = SegmentLayout.fitting(size, slot_bytes, stride)
    if layout.slots:
        assert layout.file_bytes <= size
        assert layout.data_offset % PAGE_BYTES == 0
        assert layout.entry_offset(layout.slots) <= layout.data_offset
        assert layout.offset(layout.slots) == layout.file_bytes
    assert SegmentLayout(slot_bytes, layout.slots + 1, stride).file_bytes > size


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 70))
def test_runs_are_preferred_and_slots_given_once(taken: list[bool], count: int) -> None:
    bits = np.array(taken, np.uint8)
    slots = contiguous(bits, count)
    assert len(slots) == min(count, taken.count(False))
    assert slots == sorted(set(slots))
    assert not any(taken[place] for place in slots)
    text = "".join("x" if t else "." for t in taken)
    if "." * count in text:
        assert slots == list(range(slots[0], slots[0] + count))


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(1, 3 * PAGE_BYTES)),
        max_size=30,
        unique_by=lambda item: item[:2],
    )
)
def test_groups_cover_each_block_once(items: list[tuple[int, int, int]]) -> None:
    pieces = [
        Piece(position, number, place * 3 * PAGE_BYTES, slot(length)[:length])
        for position, (number, place, length) in enumerate(items)
    ]
    made = plan(pieces, {0: 10, 1: 11}, writing=True)
    covered: dict[int, int] = {}
    for group in made.groups:
        assert len(group.views) == len(group.positions) <= IOV_MAX
        assert sum(view.nbytes for view in group.views) <= GROUP_BYTES + PAGE_BYTES
        offset = group.offset
        for view, position in zip(group.views, group.positions, strict=True):
            piece = pieces[position]
            assert group.fd == 10 + piece.number
            assert view.nbytes % PAGE_BYTES == 0
            assert offset == piece.offset + covered.get(position, 0)
            covered[position] = covered.get(position, 0) + view.nbytes
            offset += view.nbytes
    assert covered == {
        position: round_up(piece.view.nbytes, PAGE_BYTES) for position, piece in enumerate(pieces)
    }


def test_a_damaged_segment_record_is_told() -> None:
    layout = SegmentLayout(8192, 50, 512)
    taken = np.zeros(50, np.uint8)
    taken[3:9] = 1
    segment = Segment(7, 2, bytes(8), 11, layout, layout.file_bytes, 2, 12345, taken)
    packed = segment.pack()
    again = Segment.unpack(7, packed)
    assert again is not None
    assert again.pack() == packed
    assert again.free == 44
    assert Segment.unpack(8, packed) is None
    assert Segment.unpack(7, packed[:20]) is None
    for bit in range(8 * len(packed)):
        flipped = bytearray(packed)
        flipped[bit // 8] ^= 1 << bit % 8
        assert Segment.unpack(7, bytes(flipped)) is None


def test_a_store_goes_on_beside_damaged_segment_records(tmp_path: Path) -> None:
    """Half of the records are overwritten: what they held is missing or right, budgets hold."""
    arguments = StoreArguments(tmp_path / "tier")
    store = open_nvme(arguments)
    for first in range(0, 160, 8):
        put(store, range(first, first + 8))
    environment = Environment.open(
        arguments.path / "index", kind="nvme", tier="ssd", max_bytes=4 * MIB, writable=True
    )
    segments = environment.database("segments")
    with environment.write() as txn:
        names = list(txn.cursor(db=segments).iternext(keys=True, values=False))
        for name in names[::2]:
            data = txn.get(name, b"", db=segments)
            txn.put(name, data[:30] + bytes([data[30] ^ 4]) + data[31:], db=segments)
    environment.close()
    print(f"{len(names[::2])} of {len(names)} records damaged")
    for number in range(2):
        for first in range(1000 * number + 200, 1000 * number + 500, 8):
            put(store, range(first, first + 8))
        assert all(
            read.sound or read.result.status is BlockStatus.MISSING
            for read in get(store, range(160))
        )
        assert_held(store, range(1000 * number + 480, 1000 * number + 504))
        store.close()
        store = open_nvme(arguments)
    assert disk_bytes(arguments.path) <= arguments.capacity
    store.close()


def test_neighbours_make_groups_of_4_mib() -> None:
    """64 blocks of 256 KiB in a row are 4 calls; a block of 9 MiB is 3."""
    pool = slot(16 * MIB)
    size = MIB // 4
    row = [Piece(n, 0, n * size, pool[n * size : (n + 1) * size]) for n in range(64)]
    random.Random(1).shuffle(row)
    assert len(plan(row, {0: 3}, writing=True).groups) == 4
    assert len(plan([Piece(0, 0, 0, pool[: 9 * MIB])], {0: 3}, writing=False).groups) == 3


def test_settings_have_safe_defaults_and_refuse_nonsense(tmp_path: Path) -> None:
    assert backend.settings is not None
    assert backend.settings() is NvmeSettings
    plain = NvmeSettings(name="ssd", path=tmp_path)
    assert plain.capacity == 64 * GIB
    assert plain.min_free == SizeOrPercent(percent=5.0)
    assert plain.writable
    assert not NvmeSettings(name="ssd", path=tmp_path, access="read").writable
    read = NvmeSettings.model_validate(
        {"name": "ssd", "path": str(tmp_path), "capacity": "1TiB", "min_free": "10%"},
        context={"text": True},
    )
    assert read.capacity == 2**40
    words = (("on", "on"), (True, "on"), ("off", "off"), (False, "off"), ("auto", "auto"))
    for written, meant in words:  # YAML reads a bare `on` as true
        values = {"name": "ssd", "path": tmp_path, "gpu_direct": written}
        assert NvmeSettings.model_validate(values).gpu_direct == meant
    assert plain.gpu_direct == plain.io == "auto"
    for wrong in (
        {"gpu_direct": 1},
        {"gpu_direct": "yes"},
        {"capacity": 0},
        {"io": "uring"},
        {"io_threads": 0},
        {"durabilty": "full"},
    ):
        with pytest.raises(ValidationError):
            NvmeSettings.model_validate({"name": "ssd", "path": tmp_path} | wrong)


def test_the_spec_belongs_to_the_medium() -> None:
    assert backend.spec is NvmeSpec
    assert NvmeSpec.medium == backend.medium == "nvme"
    assert backend.name == "nvme"


def test_the_descriptor_imports_no_driver() -> None:
    drivers = ("lmdb", "aiofiles", "kvikio")
    script = f"import sys, tiered_kv_nvme; print([m for m in {drivers} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {script}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[]"
