"""A process that is killed while it waits to write keeps nobody else waiting.

LMDB's own lock loses a wake-up where a process is killed that had been woken and did not run yet,
once somebody else has the lock again. A real-time process keeps the first waiter from running for
as long as that takes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tiered_kv.index import Environment

SECONDS = 20.0


def opened(path: Path) -> Environment:
    return Environment.open(path, kind="test", tier="t", max_bytes=2**21, writable=True)


def hold_twice(path: Path, pipe: Connection) -> None:
    """Child process: writes from one word to the next, twice."""
    environment = opened(path)
    pipe.send("opened")
    for _ in range(2):
        pipe.recv()
        with environment.write():
            pipe.send("has it")
            pipe.recv()
        pipe.send("gave it")
    pipe.recv()


def write_once(path: Path, pipe: Connection) -> None:
    """Child process: waits for its turn."""
    environment = opened(path)
    pipe.send("opened")
    pipe.recv()
    pipe.send("asks")
    with environment.write():
        pipe.send("has it")
    pipe.recv()


def spin(pipe: Connection) -> None:
    """Child process: nobody else runs on its processor."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))
    pipe.send("spins")
    end = time.monotonic() + 2
    while time.monotonic() < end:
        pass


def hear(pipe: Connection, word: str) -> None:
    assert pipe.poll(SECONDS), f"never told: {word}"
    assert pipe.recv() == word


def wait_until_asleep(process: BaseProcess) -> None:
    """There is no event for what a process waits for; the kernel says that it waits."""
    deadline = time.monotonic() + SECONDS
    asleep = 0
    while asleep < 5:
        assert time.monotonic() < deadline
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        asleep = asleep + 1 if fields[0] == "S" else 0
        time.sleep(0.01)


@pytest.mark.faults
def test_f33_a_killed_waiter_keeps_nobody_waiting(tmp_path: Path) -> None:
    processors = sorted(os.sched_getaffinity(0))
    if os.geteuid() != 0 or len(processors) < 2:
        # Only a process that the kernel must not run can be killed between wake-up and lock.
        pytest.skip("needs root, for a real-time process, and two processors")
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []

    def start(
        target: Callable[..., object], *arguments: object, on: int
    ) -> tuple[BaseProcess, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        process.start()
        assert process.pid is not None
        os.sched_setaffinity(process.pid, {on})
        processes.append(process)
        return process, ours

    path, first, last = tmp_path / "tier", processors[0], processors[-1]
    os.sched_setaffinity(0, {last})
    try:
        _, holder = start(hold_twice, path, on=last)
        doomed, words = start(write_once, path, on=first)
        waiting, others = start(write_once, path, on=last)
        for pipe in (holder, words, others):
            hear(pipe, "opened")
        holder.send("begin")
        hear(holder, "has it")
        for process, pipe in ((doomed, words), (waiting, others)):
            pipe.send("ask")
            hear(pipe, "asks")
            wait_until_asleep(process)
        spinning, spinner = start(spin, on=first)
        hear(spinner, "spins")
        holder.send("end")  # whoever asked first is woken now, and cannot run
        hear(holder, "gave it")
        holder.send("begin")
        assert holder.poll(SECONDS)
        for process in (doomed, spinning):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join(SECONDS)
        with pytest.raises(EOFError):
            pytest.fail(f"what was to be killed first {words.recv()}")
        hear(holder, "has it")
        holder.send("end")
        hear(holder, "gave it")
        assert others.poll(SECONDS), "the lock is free, and who waits for it was never woken"
        assert others.recv() == "has it"
    finally:
        os.sched_setaffinity(0, processors)
        for process in processes:
            process.kill()
            process.join(SECONDS)
