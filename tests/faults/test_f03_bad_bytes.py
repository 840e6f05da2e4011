"""A block whose bytes on the disk are not what was stored is found, never served, dropped, and
stored again at once."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.kvikio_process import run_scenario
from tests.faults.loading import KINDS, LENGTH, Bench, Kind, found_in_files
from tiered_kv.contracts import VerifyMode
from tiered_kv.errors import TieredKVError
from tiered_kv.testing.conformance.blocks import content, keys
from tiered_kv.upkeep import verify
from tiered_kv.values import BlockStatus

OK, MISSING, CORRUPT = BlockStatus.OK, BlockStatus.MISSING, BlockStatus.CORRUPT

FLIPPED = range(1_000)
SOUND = range(1_000, 1_050)
EVERY = [*FLIPPED, *SOUND]

by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def flip_one_bit_each(path: Path) -> None:
    """In every block of `FLIPPED`, anywhere."""
    choice = random.Random(3)
    places = found_in_files(path, EVERY, LENGTH)
    assert len(places) == len(EVERY)
    for number in FLIPPED:
        place = places[number]
        byte = choice.randrange(place.first, LENGTH)
        old = content(number, length=LENGTH)[byte]
        with place.file.open("r+b") as out:
            out.seek(place.start + byte)
            out.write(bytes([old ^ (1 << choice.randrange(8))]))


@by_kind
def test_f03_every_flipped_bit_is_found_and_none_is_served(kind: Kind, tmp_path: Path) -> None:
    with Bench(kind, tmp_path / "tier") as bench:
        assert bench.put(EVERY) == EVERY
    flip_one_bit_each(tmp_path / "tier")
    with Bench(kind, tmp_path / "tier") as bench:
        found = bench.load(EVERY)
        counts = Counter(status.value for status in found.values())
        print(f"{kind.name}: {len(FLIPPED)} bits flipped, {len(SOUND)} blocks left alone: {counts}")
        assert found == dict.fromkeys(FLIPPED, CORRUPT) | dict.fromkeys(SOUND, OK)
        assert bench.stats.snapshot().tier("tier").corrupt == {"load": len(FLIPPED)}
        # Dropped, and stored again at once.
        assert bench.there(EVERY) == list(SOUND)
        assert set(bench.load(FLIPPED).values()) == {MISSING}
        assert bench.put(EVERY) == list(FLIPPED)
        assert set(bench.load(EVERY).values()) == {OK}


@by_kind
def test_f03_every_flipped_bit_is_found_without_a_load(kind: Kind, tmp_path: Path) -> None:
    with Bench(kind, tmp_path / "tier") as bench:
        bench.put(EVERY)
    flip_one_bit_each(tmp_path / "tier")
    with Bench(kind, tmp_path / "tier") as bench:
        batches = list(
            verify(bench.store, bench.store.scan(), rank=0, block_bytes=LENGTH, drop=True)
        )
        corrupt = {key for batch in batches for key in batch.corrupt}
        compared = sum(batch.blocks for batch in batches)
        print(f"{kind.name}: {len(corrupt)} of {compared} blocks found bad, {len(batches)} batches")
        assert corrupt == set(keys(FLIPPED))
        assert compared == len(EVERY)
        assert bench.there(EVERY) == list(SOUND)


@by_kind
def test_f03_what_was_verified_once_and_is_to_be_verified_first_is_found_anew(
    kind: Kind, tmp_path: Path
) -> None:
    """`verify: first`: by every process, once."""
    with Bench(kind, tmp_path / "tier", verify={"tier": VerifyMode.FIRST}) as bench:
        bench.put(EVERY)
        assert set(bench.load(EVERY).values()) == {OK}
        assert set(bench.load(EVERY).values()) == {OK}
        assert bench.stats.snapshot().tier("tier").unverified == len(EVERY)
    flip_one_bit_each(tmp_path / "tier")
    with Bench(kind, tmp_path / "tier", verify={"tier": VerifyMode.FIRST}) as bench:
        found = bench.load(EVERY)
        assert found == dict.fromkeys(FLIPPED, CORRUPT) | dict.fromkeys(SOUND, OK)


def zeroed(data: bytes, other: bytes) -> bytes:
    return bytes(len(data))


def torn(data: bytes, other: bytes) -> bytes:
    return data[: len(data) // 2] + other[len(data) // 2 :]


def replaced(data: bytes, other: bytes) -> bytes:
    return other


def garbage_tail(data: bytes, other: bytes) -> bytes:
    return data[:-100] + other[-100:]


@by_kind
@pytest.mark.parametrize("damage", [zeroed, torn, replaced, garbage_tail])
def test_f03_a_damaged_block_is_a_miss(
    kind: Kind, damage: Callable[[bytes, bytes], bytes], tmp_path: Path
) -> None:
    """`other` is a whole right block, under another key."""
    numbers, bad = range(60), range(0, 60, 3)
    with Bench(kind, tmp_path / "tier") as bench:
        bench.put(numbers)
    places = found_in_files(tmp_path / "tier", numbers, LENGTH)
    for number in bad:
        place = places[number]
        block, other = (content(n, length=LENGTH) for n in (number, number + 1))
        with place.file.open("r+b") as out:
            out.seek(place.start + place.first)
            out.write(damage(block, other)[place.first :])
    with Bench(kind, tmp_path / "tier") as bench:
        found = bench.load(numbers)
        print(f"{kind.name}, {damage.__name__}: {Counter(s.value for s in found.values())}")
        assert [n for n, status in found.items() if status is CORRUPT] == list(bad)
        assert set(found.values()) == {OK, CORRUPT}
        assert bench.put(numbers) == list(bad)
        assert set(bench.load(numbers).values()) == {OK}


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2 + 100)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def garbage_behind(file: Path) -> None:
    with file.open("ab") as out:
        out.write(random.Random(9).randbytes(50_000))


def garbage_at_the_end(file: Path) -> None:
    size = file.stat().st_size
    with file.open("r+b") as out:
        out.seek(size // 2)
        out.write(random.Random(9).randbytes(size - size // 2))


@by_kind
@pytest.mark.parametrize("damage", [truncated, emptied, garbage_behind, garbage_at_the_end])
def test_f03_a_damaged_file_costs_misses_alone(
    kind: Kind, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    """The file, or one of the files, that hold the blocks."""
    numbers = range(200)
    with Bench(kind, tmp_path / "tier", capacity=16 * 2**20) as bench:
        bench.put(numbers)
    places = found_in_files(tmp_path / "tier", numbers, LENGTH)
    damage(places[0].file)
    try:
        bench = Bench(kind, tmp_path / "tier", capacity=16 * 2**20)
    except TieredKVError as error:
        pytest.fail(f"{kind.name} does not open any more: {error}")
    with bench:
        found = bench.load(numbers)
        print(f"{kind.name}, {damage.__name__}: {Counter(s.value for s in found.values())}")
        assert set(found.values()) <= {OK, MISSING, CORRUPT}
        bench.put(numbers)
        assert set(bench.load(numbers).values()) == {OK}


def test_f03_what_goes_to_the_device_directly_is_verified_there(tmp_path: Path) -> None:
    """With real KvikIO under a CUDA driver that the tests bring."""
    result = run_scenario("tests.faults.direct_damage", "every_damage", tmp_path)
    assert result["found"] == {"flipped": 64, "damaged": 4, "verified first": 1}
    assert result["device copies"]
