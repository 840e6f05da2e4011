"""What somebody else does to the files costs misses, never wrong bytes and never a crash."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tiered_kv.errors import TieredKVError
from tiered_kv.testing.conformance.blocks import (
    StoreArguments,
    assert_held,
    content,
    get,
    keys,
    new_block,
    put,
)
from tiered_kv.testing.conformance.contract import StorePromise, owe
from tiered_kv.testing.conformance.stores.case import OpenStore, StoreCase, StoreFixtures
from tiered_kv.values import BlockStatus

__all__ = ["DamageChecks"]

BLOCKS = 24
APART = 64
"""A store may keep so many bytes of a block's beginning elsewhere."""


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def _flip_one_bit_each(path: Path, choice: random.Random) -> set[int]:
    """Flip one bit of each block that is found in a file; which were."""
    flipped: set[int] = set()
    found_by = {number: content(number)[APART:] for number in range(BLOCKS)}
    for file in _files(path):
        data = file.read_bytes()
        with file.open("r+b") as out:
            for number, most in found_by.items():
                start = data.find(most[:32])
                if start < 0 or not data.startswith(most, start):
                    continue
                place = start + choice.randrange(len(most))
                out.seek(place)
                out.write(bytes([data[place] ^ (1 << choice.randrange(8))]))
                flipped.add(number)
    return flipped


def _damage(file: Path, how: str, choice: random.Random) -> None:
    size = file.stat().st_size
    if how == "deleted":
        file.unlink()
    elif how == "emptied":
        os.truncate(file, 0)
    elif how == "cut":
        os.truncate(file, size // 2)
    else:
        with file.open("r+b") as out:
            out.write(choice.randbytes(min(size, 50_000)))


class DamageChecks(StoreFixtures):
    """F3, F9."""

    def test_every_flipped_bit_is_found_and_the_block_stored_again(
        self, case: StoreCase, open_store: OpenStore, arguments: StoreArguments
    ) -> None:
        """One bit of each block in the files: the row still says what the bytes must be, so the
        reader finds every one; each can be discarded and stored again at once."""
        case.needs("directory", "plain_bytes", "reopens")
        store = open_store()
        put(store, range(BLOCKS))
        store.close()
        flipped = _flip_one_bit_each(arguments.path, random.Random(5))
        owe(
            flipped == set(range(BLOCKS)),
            StorePromise.WRITE,
            f"{len(flipped)} of {BLOCKS} blocks lie in the files as they are (see `plain_bytes`)",
        )
        store = open_store()
        served: list[int] = []
        for number, read in enumerate(get(store, range(BLOCKS))):
            owe(
                read.result.checksum in {None, new_block(number).checksum},
                StorePromise.ROW_CHECKSUM,
                f"the row of block {number} says {read.result.checksum}, not what was bound",
            )
            if read.sound:
                served.append(number)
        print(f"{len(flipped)} bits flipped, {BLOCKS - len(served)} blocks found bad")
        owe(not served, StorePromise.ROW_CHECKSUM, f"blocks {served} verify with a bit flipped")
        store.discard([new_block(n) for n in range(BLOCKS)])
        owe(
            put(store, range(BLOCKS)) == list(range(BLOCKS)),
            StorePromise.DISCARD,
            "a bad block could not be stored again",
        )
        assert_held(store, range(BLOCKS))

    @pytest.mark.parametrize("how", ["deleted", "emptied", "cut", "garbage"])
    def test_a_damaged_file_costs_misses_alone(
        self, case: StoreCase, open_store: OpenStore, arguments: StoreArguments, how: str
    ) -> None:
        """Each file in turn. The store opens, or says in an error of ours why not; what it then
        calls OK verifies or is found out, and everything can be stored again."""
        case.needs("directory", "reopens")
        store = open_store()
        put(store, range(BLOCKS))
        store.close()
        outcomes: Counter[str] = Counter()
        choice = random.Random(11)
        numbers = range(BLOCKS)
        for place, file in enumerate(_files(arguments.path)):
            copy = arguments.path.parent / f"copy-{place}"
            shutil.copytree(arguments.path, copy, symlinks=True)
            _damage(copy / file.relative_to(arguments.path), how, choice)
            try:
                store = open_store(path=copy)
            except TieredKVError as error:
                outcomes["refused"] += 1
                print(f"{file.name} {how}: {error}")
                continue
            for read in get(store, numbers):
                status = read.result.status
                outcomes[
                    "bad" if status is BlockStatus.OK and not read.sound else status.value
                ] += 1
            store.discard([new_block(n) for n in numbers])
            store.delete(keys(numbers))
            put(store, numbers)
            assert_held(store, numbers)
            store.close()
            shutil.rmtree(copy)
        print(f"{how}: {dict(outcomes)}")
        owe(outcomes, StorePromise.OUTLIVES, "there was no file to damage")
