"""F38: readers that were killed give their places in LMDB's table back, and the pages they held."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tiered_kv.errors import TierError
from tiered_kv.index import Environment, writemap
from tiered_kv.testing.conformance.children import start

READERS = 4


def opened(path: Path, *, writable: bool) -> Environment:
    """With a table of four readers: who opens the directory first says how many."""
    before = writemap._MAX_READERS, writemap._LOCK_BYTES
    # LMDB goes by the size of a lock file that it finds.
    writemap._MAX_READERS, writemap._LOCK_BYTES = READERS, (READERS + 2) * 64
    try:
        return Environment.open(path, kind="lmdb", tier="pins", max_bytes=2**24, writable=writable)
    finally:
        writemap._MAX_READERS, writemap._LOCK_BYTES = before


def read_until_killed(path: Path, out: Connection) -> None:
    """Child process."""
    environment = opened(path, writable=False)
    with environment.read() as txn:
        out.send(txn.id())
        out.poll(None)


def kill_readers(path: Path) -> None:
    """Four processes that are killed while they read."""
    context = get_context("spawn")
    children = []
    for _ in range(READERS):
        ours, theirs = context.Pipe()
        children.append((start(read_until_killed, path, theirs), ours))
    for _, ours in children:
        ours.recv()
    for child, _ in children:
        child.kill()
        child.join()
    print(f"{len(children)} readers killed, exit codes {[child.exitcode for child, _ in children]}")


@pytest.mark.parametrize("when", ["open", "closed"])
def test_f38_killed_readers_do_not_fill_the_table(tmp_path: Path, when: str) -> None:
    environment = opened(tmp_path, writable=True)
    if when == "closed":
        # The table lasts as long as somebody has it open; then its size is said anew.
        environment.close()
        (tmp_path / "lock.mdb").unlink()
    kill_readers(tmp_path)
    if when == "closed":
        environment = opened(tmp_path, writable=True)
        assert environment.clear_dead_readers() == 0
    try:
        with environment.read(), environment.read(), environment.read(), environment.read():
            outcome = "four read at once"
    except TierError as error:
        outcome = str(error)
    print(outcome)
    assert outcome == "four read at once"
    environment.close()


def test_f38_pages_of_killed_readers_are_used_again(tmp_path: Path) -> None:
    environment = opened(tmp_path, writable=True)
    numbers = environment.database("numbers")
    data = tmp_path / "data.mdb"

    def churn(turns: int) -> int:
        for turn in range(turns):
            with environment.write() as txn:
                txn.put(b"value", bytes([turn]) * 100_000, db=numbers)
        return data.stat().st_size

    before = churn(20)
    kill_readers(tmp_path)
    held = churn(20)
    cleared = environment.clear_dead_readers()
    after = churn(40)
    print(f"{cleared} dead readers: {before} bytes, {held} beside them, {after} after them")
    assert cleared == READERS
    assert before < held
    assert after <= held + 300_000
    environment.close()
