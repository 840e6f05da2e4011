"""F23: a start takes as long with a hundred thousand blocks as with none, also after SIGKILL."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.stores.many_blocks import KINDS, Kind, fill_index, index_data, many_keys, resident_bytes
from tiered_kv.contracts import BlockStore, ChangeBatch
from tiered_kv.index import Mirror, checking
from tiered_kv.index.records import BlockRecord, Row
from tiered_kv.testing.conformance.blocks import StoreArguments, key
from tiered_kv.values import BlockKey

BLOCKS = 30_000
SOON = 200
"""Keys that a mirror may have been given before it gives a hit."""
LATE_SECONDS = 60.0


def arguments_in(path: Path) -> StoreArguments:
    """A tier large enough for the index of so many blocks."""
    return StoreArguments(path / "tier", capacity=2**30, block_bytes=(4096,))


def fill_and_close(kind: Kind, arguments: StoreArguments) -> None:
    """Child process: leaves a full index."""
    fill_index(kind, arguments, BLOCKS)


def fill_and_die(kind: Kind, arguments: StoreArguments) -> None:
    """Child process: leaves a full index that is not marked clean."""
    fill_index(kind, arguments, BLOCKS)
    store = kind.open(arguments)
    store.touch([key(0)])
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Keys of all records of the index that are looked at."""
    seen: list[bytes] = []
    for record in (Row, BlockRecord):
        real = record.unpack

        def unpack(key: bytes, data: bytes, real: object = real) -> object:
            seen.append(key)
            assert callable(real)
            return real(key, data)

        monkeypatch.setattr(record, "unpack", unpack)
    return seen


@pytest.mark.parametrize("ended", ["closed", "killed"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_f23_a_start_looks_at_few_records(
    kind: Kind,
    ended: str,
    tmp_path: Path,
    touched: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = arguments_in(tmp_path)
    target = fill_and_close if ended == "closed" else fill_and_die
    child = multiprocessing.get_context("spawn").Process(target=target, args=(kind, arguments))
    child.start()
    child.join(LATE_SECONDS)
    assert child.exitcode == (0 if ended == "closed" else -signal.SIGKILL)
    checked: list[Path] = []

    def find_damage(data: Path) -> str | None:
        checked.append(data)
        return checking.check(data)

    monkeypatch.setattr(checking, "find_damage", find_damage)
    data = index_data(kind, arguments.path)
    size = data.stat().st_size
    store = kind.open(arguments)
    assert store.contains([*many_keys(0, 1), key(0)]) == [True, False]
    assert store.stat().blocks == BLOCKS
    resident = resident_bytes(data)
    print(
        f"{kind}, {ended}: {BLOCKS} blocks, index of {size} bytes: {len(checked)} files checked, "
        f"{len(touched)} records looked at, {resident} bytes touched until the first hit"
    )
    assert checked == []
    assert 0 < len(touched) < 100
    assert 0 < resident < size // 5
    store.close()


class HeldScan:
    """A store whose scan gives its keys slowly, as one of a huge index does, until it is let go."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self.go_on = threading.Event()
        self.given = 0

    def scan(self) -> Iterator[BlockKey]:
        for one in self._store.scan():
            self.given += 1
            yield one
            self.go_on.wait(0.01)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._store.contains(keys)

    def changes(self, cursor: int | None) -> ChangeBatch:
        return self._store.changes(cursor)

    def close(self) -> None:
        self._store.close()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_f23_a_mirror_that_is_being_filled_gives_hits(kind: Kind, tmp_path: Path) -> None:
    arguments = arguments_in(tmp_path)
    stored = fill_index(kind, arguments, 5_000)
    held: list[HeldScan] = []

    def open_store() -> BlockStore:
        held.append(HeldScan(kind.open(arguments.with_(writable=False))))
        return held[0]  # type: ignore[return-value]  # has what a mirror calls, no more

    mirror = Mirror(open_store, tier="many", poll_seconds=0.01)
    wanted = [stored[-1], key(0)]
    deadline = time.monotonic() + LATE_SECONDS
    asked = 0
    while mirror.lookup(wanted) != [True, False] and (not held or held[0].given < SOON):
        asked += 1
        assert time.monotonic() < deadline
        time.sleep(0.001)
    given = held[0].given
    print(f"{kind}: first hit after {given} of {len(stored)} keys, asked {asked} times")
    assert given < SOON
    assert mirror.state == "filling"
    held[0].go_on.set()
    assert mirror.wait_ready(LATE_SECONDS)
    assert mirror.lookup(wanted) == [True, False]
    assert len(mirror) == len(stored)
    assert mirror.close()
