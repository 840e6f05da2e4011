"""F57: a lookup of the scheduler never waits for a disk, and existence is asked of the index."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from tests.stores.many_blocks import KINDS, Kind, chill, read_bytes
from tiered_kv.contracts import BlockStore, ChangeBatch
from tiered_kv.index import Mirror
from tiered_kv.testing.conformance.blocks import StoreArguments, keys, put
from tiered_kv.values import BlockKey

BLOCKS = 1_000
LENGTH = 16_384
MOST_READ = 2**20
LOOKUPS = 200
LATE_SECONDS = 30.0

Answer = TypeVar("Answer")


class Hanging:
    """A store whose index hangs on request, as one on a disk that does not answer."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._let_go = threading.Event()
        self._let_go.set()
        self.hangs = threading.Event()
        self.waiting = 0

    def hold(self) -> None:
        """Every call from now on waits for `let_go`."""
        self._let_go.clear()

    def let_go(self) -> None:
        """All calls go on."""
        self._let_go.set()

    def _answer(self, ask: Callable[[], Answer]) -> Answer:
        if not self._let_go.is_set():
            self.waiting += 1
            self.hangs.set()
            self._let_go.wait(LATE_SECONDS)
        return ask()

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._answer(lambda: self._store.contains(keys))

    def scan(self) -> Iterator[BlockKey]:
        return self._answer(self._store.scan)

    def changes(self, cursor: int | None) -> ChangeBatch:
        return self._answer(lambda: self._store.changes(cursor))

    def close(self) -> None:
        self._store.close()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_f57_lookups_are_answered_while_the_index_hangs(kind: Kind, tmp_path: Path) -> None:
    arguments = StoreArguments(tmp_path / "tier")
    writer = kind.open(arguments)
    put(writer, range(20))
    stores: list[Hanging] = []

    def open_store() -> BlockStore:
        stores.append(Hanging(kind.open(arguments.with_(writable=False))))
        return stores[0]  # type: ignore[return-value]  # has what a mirror calls, no more

    mirror = Mirror(open_store, tier="ssd", poll_seconds=0.01)
    assert mirror.wait_ready(LATE_SECONDS)
    (store,) = stores
    store.hold()
    mirror.forget(keys([3]))
    mirror.poll_now()
    assert store.hangs.wait(LATE_SECONDS)
    answered: list[list[bool | None]] = []

    def look_up() -> None:
        for _ in range(LOOKUPS):
            answered.append(mirror.lookup(keys([0, 3, 19, 20])))

    scheduler = threading.Thread(target=look_up, daemon=True)
    scheduler.start()
    scheduler.join(LATE_SECONDS / 3)
    waited, held = len(answered), store.waiting
    store.let_go()
    print(f"{kind}: {waited} of {LOOKUPS} lookups were answered while {held} call hung")
    assert waited == LOOKUPS
    assert held == 1
    assert answered == [[True, False, True, False]] * LOOKUPS
    assert mirror.close(LATE_SECONDS)
    writer.close()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_f57_existence_of_cold_blocks_reads_no_values(kind: Kind, tmp_path: Path) -> None:
    arguments = StoreArguments(tmp_path / "tier", capacity=64 * 2**20, block_bytes=(LENGTH,))
    store = kind.open(arguments)
    for first in range(0, BLOCKS, 50):
        put(store, range(first, first + 50), length=LENGTH)
    store.close()
    chilled = chill(arguments.path)
    before = read_bytes()
    store = kind.open(arguments)
    opened = read_bytes() - before
    found = sum(store.contains(keys(range(BLOCKS))))
    read = read_bytes() - before
    print(
        f"{kind}: {found} blocks found, of {BLOCKS * LENGTH} bytes in cold files of {chilled}: "
        f"{opened} bytes were read to open, {read - opened} to look up"
    )
    assert found == BLOCKS
    assert read - opened < MOST_READ
    assert 0 < read < BLOCKS * LENGTH / 8
    store.close()
