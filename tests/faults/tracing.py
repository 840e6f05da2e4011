"""Real failures of this process's own system calls: strace looks on and makes them fail."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_ATTACH_SECONDS = 30.0


@dataclass(slots=True)
class Injected:
    """What was made to fail; counted when the block has ended."""

    calls: list[str] = field(default_factory=list)
    """One line of strace for each."""

    def __len__(self) -> int:
        return len(self.calls)


@contextmanager
def injected(*faults: str, paths: Sequence[Path] = (), log: Path) -> Iterator[Injected]:
    """Make calls of all threads of this process fail inside the block: each of `faults` as in
    `strace -e inject=`. With `paths`, only calls that concern exactly these files. `log` is
    written to. CPython's `os.preadv` and `os.pwritev` are `preadv2` and `pwritev2`.

    Skips the test where strace cannot be used.
    """
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace")
    names = ",".join(fault.partition(":")[0] for fault in faults)
    command = [strace, "-f", "-y", "-qq", "-o", str(log), "-e", f"trace={names}"]
    for fault in faults:
        command += ["-e", f"inject={fault}"]
    for path in paths:
        command += ["-P", str(path)]
    command += ["-p", str(os.getpid())]
    found = Injected()
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        _wait_until_attached(tracer)
        yield found
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.communicate(timeout=30)
        if log.exists():
            found.calls += [line for line in log.read_text().splitlines() if "(INJECTED)" in line]


def _wait_until_attached(tracer: subprocess.Popen[str]) -> None:
    """Until every thread is traced: there is no event for that."""
    traced = re.compile(rf"^TracerPid:\t{tracer.pid}$", re.MULTILINE)
    until = time.monotonic() + _ATTACH_SECONDS
    while not all(traced.search(text) for text in _threads()):
        if tracer.poll() is not None:
            _, said = tracer.communicate()
            pytest.skip(f"strace cannot attach here: {said.strip()}")
        assert time.monotonic() < until, "strace did not attach"


def _threads() -> Iterator[str]:
    for task in Path("/proc/self/task").iterdir():
        try:
            yield (task / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
