"""Blocks that are evicted while a load reads them: the right bytes arrive, or the load misses."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.evicting import evict_all, evict_from_another_process
from tests.faults.loading import KINDS, PATIENCE, Bench, Kind
from tiered_kv.index import Environment
from tiered_kv.values import BlockStatus
from tiered_kv_lmdb.store import LmdbStore

LENGTH = 65_536
CAPACITY = 8 * 2**20
NUMBERS = range(32)


class Gate:
    """Holds the first call that passes it while it is shut; so that the store's own threads, which
    its writes need too, are not all held."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        self._open.set()
        self._turn = threading.Lock()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        with self._turn:
            first = not self._open.is_set() and not self.reached.is_set()
            if first:
                self.reached.set()
        if first:
            assert self._open.wait(PATIENCE)


def hold_the_disk(gate: Gate, patch: pytest.MonkeyPatch) -> None:
    """nvme: the rows were looked up, not a byte was read."""
    read = os.preadv

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        gate.pass_through()
        return read(fd, views, offset)

    patch.setattr(os, "preadv", preadv)


def hold_before_the_values(gate: Gate, patch: pytest.MonkeyPatch) -> None:
    """lmdb: the rows were looked up, the values are not held yet."""
    begin = Environment.read_buffers

    @contextmanager
    def read_buffers(self: Environment) -> Iterator[Any]:
        gate.pass_through()
        with begin(self) as values:
            yield values

    patch.setattr(Environment, "read_buffers", read_buffers)


def hold_between_the_values(gate: Gate, patch: pytest.MonkeyPatch) -> None:
    """lmdb: inside the transaction that reads them."""
    copy = LmdbStore._copy

    def held(self: LmdbStore, *arguments: Any) -> Any:
        gate.pass_through()
        return copy(self, *arguments)

    patch.setattr(LmdbStore, "_copy", held)


CASES = [
    (KINDS[0], hold_the_disk),
    (KINDS[1], hold_before_the_values),
    (KINDS[1], hold_between_the_values),
    (KINDS[2], hold_before_the_values),
    (KINDS[2], hold_between_the_values),
]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same-process", "another-process"])
@pytest.mark.parametrize(
    ("kind", "hold"), CASES, ids=[f"{kind.name}-{hold.__name__}" for kind, hold in CASES]
)
def test_f08_what_is_evicted_while_it_is_read_is_right_or_a_miss(
    kind: Kind,
    hold: Callable[[Gate, pytest.MonkeyPatch], None],
    elsewhere: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()
    hold(gate, monkeypatch)
    with Bench(kind, tmp_path / "tier", LENGTH, CAPACITY) as bench:
        bench.put(NUMBERS)
        assert set(bench.load(NUMBERS).values()) == {BlockStatus.OK}
        found: dict[int, BlockStatus] = {}
        troubles: list[BaseException] = []

        def load() -> None:
            try:
                found.update(bench.load(NUMBERS))
            except BaseException as error:  # noqa: BLE001 - a thread tells of every failure
                troubles.append(error)

        gate.shut()
        loading = threading.Thread(target=load)
        loading.start()
        try:
            assert gate.reached.wait(PATIENCE)
            if elsewhere:
                evict_from_another_process(kind, bench.arguments)
            else:
                evict_all(bench.store, bench.arguments)
            gone = len(NUMBERS) - len(bench.there(NUMBERS))
        finally:
            gate.open()
            loading.join(PATIENCE)
        counts = Counter(status.value for status in found.values())
        print(f"{kind.name}: a read held, {gone} blocks evicted meanwhile: {counts}")
        assert not troubles, troubles
        assert gone == len(NUMBERS)
        # Not corrupt: what was replaced is told from what rotted, and nothing is dropped for it.
        assert set(found.values()) <= {BlockStatus.OK, BlockStatus.MISSING}
        assert bench.stats.snapshot().tier("tier").corrupt == {}
        bench.put(NUMBERS)
        assert set(bench.load(NUMBERS).values()) == {BlockStatus.OK}
