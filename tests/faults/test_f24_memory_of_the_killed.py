"""Memory of a process that is killed goes with it: /dev/shm and locked memory do not fill up."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.faults.killed_hosts import POOL_BYTES
from tests.faults.namespaces import run_mounted

KILLS = 5


@pytest.mark.faults
def test_f24_five_killed_processes_leave_no_memory_behind(tmp_path: Path) -> None:
    # In a /dev/shm of its own: in a shared one, what others do would be counted.
    told = run_mounted("tests.faults.killed_hosts", str(tmp_path), str(KILLS), image=False)
    kills = json.loads(told)
    for number, kill in enumerate(kills):
        print(f"kill {number + 1}: {kill}")
    had = [kill["had"] for kill in kills]
    assert [one is not None for one in had] == [True] * KILLS
    assert [kill["status"] for kill in kills] == [-signal.SIGKILL] * KILLS
    assert [one["blocks"] for one in had] == [32] * KILLS
    assert min(one["locked"] for one in had) >= POOL_BYTES
    assert [kill["names"] for kill in kills] == [[]] * KILLS
    assert [kill["shm"] for kill in kills] == [0] * KILLS
    # The machine's figure, in which others have a part: what four pools more would make shows.
    assert kills[-1]["locked"] - kills[0]["locked"] < 2 * POOL_BYTES
