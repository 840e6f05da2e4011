"""A process that is stopped while it writes holds nobody up for long."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.stores.lmdb_parts import open_into_map, open_lmdb
from tests.stores.nvme_parts import open_nvme
from tiered_kv.contracts import BlockStore
from tiered_kv.errors import TierError
from tiered_kv.index import Environment
from tiered_kv.index.turns import Turn
from tiered_kv.testing.conformance.blocks import StoreArguments, assert_held, put

WAIT_SECONDS = 0.3
KINDS = {"index": "nvme", "values": "lmdb-values"}


def write_until_told(path: Path, out: Connection) -> None:
    """Child process: is in a write transaction of an environment that it has open."""
    with environment_at(path) as environment:
        with environment.write():
            out.send(os.getpid())
            out.recv()
        out.send("ended")


@contextmanager
def environment_at(path: Path) -> Iterator[Environment]:
    environment = Environment.open(
        path,
        kind=KINDS.get(path.name, "lmdb"),
        tier="other",
        max_bytes=2**26,
        writable=True,
        own_budget=("values",),
    )
    try:
        yield environment
    finally:
        environment.close()


@contextmanager
def stopped_writer(path: Path) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=write_until_told, args=(path, theirs))
    child.start()
    pid = ours.recv()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield ours
    finally:
        os.kill(pid, signal.SIGCONT)
        child.kill()
        child.join()


@pytest.mark.parametrize(
    ("opener", "file"),
    [
        (open_lmdb, "."),
        (open_lmdb, "values"),
        (open_into_map, "values"),
        (open_nvme, "index"),
    ],
)
def test_a_stopped_writer_is_an_error_for_others_until_it_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opener: Callable[[StoreArguments], BlockStore],
    file: str,
) -> None:
    monkeypatch.setattr("tiered_kv.index.environment._WRITE_SECONDS", WAIT_SECONDS)
    arguments = StoreArguments(tmp_path / "tier")
    store = opener(arguments)
    put(store, range(5))
    with stopped_writer(arguments.path / file) as child:
        with pytest.raises(TierError, match=r"a write of process \d+ .* may be stopped"):
            put(store, [10])
        assert_held(store, range(5))
        child_goes_on(child)
        assert put(store, [10]) == [10]
        assert_held(store, [*range(5), 10])
    store.close()


def child_goes_on(child: Connection) -> None:
    for process in multiprocessing.active_children():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGCONT)
    child.send("go on")
    assert child.recv() == "ended"


def test_a_turn_ends_with_its_process(tmp_path: Path) -> None:
    Environment.open(tmp_path, kind="lmdb", tier="pins", max_bytes=2**26, writable=True).close()
    with environment_at(tmp_path) as environment:
        with stopped_writer(tmp_path):
            pass  # killed in its transaction
        with environment.write() as txn:
            txn.put(b"after", b"1")


def test_threads_wait_for_each_other_and_a_thread_not_for_itself(tmp_path: Path) -> None:
    turn = Turn(tmp_path, "pins")
    turn.take(0.0)
    with pytest.raises(ValueError, match="already"):
        turn.take(0.0)
    raised: list[str] = []

    def other() -> None:
        try:
            turn.take(0.01)
        except TierError as error:
            raised.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert f"process {os.getpid()}" in raised[0]
    turn.give()
    turn.take(0.0)
    turn.give()
    turn.close()
    turn.close()
    with pytest.raises(TierError, match="closed"):
        turn.take(0.0)


def test_a_forked_child_closes_its_door_whoever_was_waiting_at_the_fork(tmp_path: Path) -> None:
    turn = Turn(tmp_path, "pins")
    with turn.taken(0.0):
        pass
    waiting = getattr(turn._closed, "_cond")  # noqa: B009 - what a waiting thread has for moments
    with waiting:
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            try:
                turn.close()
            finally:
                os._exit(0 if turn._fd < 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with turn.taken(0.0):
        pass
    turn.close()
