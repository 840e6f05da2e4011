"""A tier that hangs for ever does not keep the process: whichever way that ends, it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.exiting import DRAIN, LOADS, STORES_IN_FLIGHT

pytestmark = pytest.mark.faults

PATIENCE = 60.0
SLACK = 15.0
"""For the end of the interpreter and its libraries, on a machine that is busy with other things."""


@contextmanager
def engine(folder: Path, kind: str, way: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.faults.exiting", str(folder), kind, way],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        yield child, child.stdout.readline().strip()
    finally:
        child.kill()
        child.communicate(timeout=PATIENCE)


def ended(folder: Path, kind: str, way: str) -> tuple[int, str, str]:
    """Its status, what was in flight, and what it said at the end."""
    with engine(folder, kind, way) as (child, said):
        began = time.monotonic()
        if way in ("handler", "plain"):
            child.send_signal(signal.SIGTERM)
        try:
            _, errors = child.communicate(timeout=DRAIN + 1.0 + SLACK)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the process is there {DRAIN + 1 + SLACK:g} s later ({said})")
        print(f"{way}: {said}; gone after {time.monotonic() - began:.2f} s, drain {DRAIN:g} s")
        return child.returncode, said, errors


WAYS = {
    "end": 0,
    "closed": 0,
    "exception": 1,
    "handler": 128 + signal.SIGTERM,
    "plain": -signal.SIGTERM,
}
"""Ways to end, with the status: at the end of a script that closes nothing, of one that closes its
engine, by an exception that nobody catches, by SIGTERM with a handler as vLLM's processes have, and
without one."""


@pytest.mark.parametrize(("way", "kind"), [*((way, "nvme") for way in WAYS), ("end", "lmdb")])
def test_f58_a_process_with_a_hung_tier_is_gone_in_time(
    way: str, kind: str, tmp_path: Path
) -> None:
    status, said, errors = ended(tmp_path, kind, way)
    assert "hang True" in said
    assert status == WAYS[way], errors
    assert "Fatal Python error" not in errors
    assert ("RuntimeError: something else" in errors) is (way == "exception")
    if way != "plain":
        assert "were not written behind within 2 s" in errors
    assert f"{LOADS} loads, {STORES_IN_FLIGHT} stores" in said
