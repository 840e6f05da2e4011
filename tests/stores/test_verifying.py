"""Damaged bytes of real stores are found and dropped without a load."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.stores.conformance_cases import LMDB, LMDB_MAP, NVME
from tiered_kv.contracts import BlockStore
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    StoreArguments,
    assert_held,
    content,
    key,
    keys,
    put,
)
from tiered_kv.testing.conformance.stores import StoreCase
from tiered_kv.upkeep import Verified, verify

BLOCKS = 24
SPOILT = (0, 7, 23)
IN_ROW = 16
"""Bytes that an lmdb tier keeps elsewhere."""


def spoil(path: Path, number: int) -> None:
    """Flip one bit of a block where it lies on the disk."""
    for file in sorted(path.rglob("*")):
        data = file.read_bytes() if file.is_file() else b""
        start = data.find(content(number)[IN_ROW:])
        if start >= 0:
            place = start + random.Random(number).randrange(BLOCK_BYTES - IN_ROW)
            with file.open("r+b") as out:
                out.seek(place)
                out.write(bytes([data[place] ^ 4]))
            return
    raise AssertionError(f"block {number} is in no file of {path}")


def whole(store: BlockStore, *, drop: bool) -> list[Verified]:
    return list(
        verify(
            store,
            store.scan(),
            rank=0,
            block_bytes=BLOCK_BYTES,
            drop=drop,
            batch_bytes=5 * BLOCK_BYTES,
        )
    )


@pytest.mark.parametrize("case", [NVME, LMDB, LMDB_MAP], ids=["nvme", "lmdb", "lmdb-map"])
def test_damaged_blocks_are_found_dropped_and_stored_again(case: StoreCase, tmp_path: Path) -> None:
    arguments = StoreArguments(tmp_path / "tier")
    store = case.open(arguments)
    put(store, range(BLOCKS))
    store.close()
    for number in SPOILT:
        spoil(arguments.path, number)
    store = case.open(arguments)
    try:
        looked = whole(store, drop=False)
        assert sum(batch.blocks for batch in looked) == BLOCKS
        assert sum(batch.bytes for batch in looked) == BLOCKS * BLOCK_BYTES
        assert {k for batch in looked for k in batch.corrupt} == set(keys(SPOILT))
        assert all(store.contains(keys(range(BLOCKS))))

        dropped = whole(store, drop=True)
        assert {k for batch in dropped for k in batch.corrupt} == set(keys(SPOILT))
        assert [n for n in range(BLOCKS) if not store.contains([key(n)])[0]] == list(SPOILT)

        assert put(store, range(BLOCKS)) == list(SPOILT)
        assert_held(store, range(BLOCKS))
        again = whole(store, drop=True)
        assert sum(batch.blocks for batch in again) == BLOCKS
        assert not [k for batch in again for k in batch.corrupt]
    finally:
        store.close()


@pytest.mark.parametrize("case", [NVME, LMDB], ids=["nvme", "lmdb"])
def test_a_store_open_for_reading_only_is_looked_at_but_nothing_is_dropped(
    case: StoreCase, tmp_path: Path
) -> None:
    arguments = StoreArguments(tmp_path / "tier")
    store = case.open(arguments)
    put(store, range(4))
    store.close()
    spoil(arguments.path, 2)
    store = case.open(arguments.with_(writable=False))
    try:
        (found,) = whole(store, drop=False)
        assert found.corrupt == (key(2),)
        with pytest.raises(ValueError, match="reading only"):
            whole(store, drop=True)
    finally:
        store.close()
