"""Memory of a process that is killed goes with it: /dev/shm and locked memory do not fill up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.killed_hosts import POOL_BYTES

ROOT = Path(__file__).parents[2]
KILLS = 5


@pytest.mark.faults
def test_f24_five_killed_processes_leave_no_memory_behind(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare, for a /dev/shm of its own")
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(
        [*unshare, sys.executable, "-m", "tests.faults.killed_hosts", str(tmp_path), str(KILLS)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    kills = json.loads(done.stdout)
    for number, kill in enumerate(kills):
        print(f"kill {number + 1}: {kill}", done.stderr)
    had = [kill["had"] for kill in kills]
    assert [one is not None for one in had] == [True] * KILLS
    assert [kill["status"] for kill in kills] == [-signal.SIGKILL] * KILLS
    assert [one["blocks"] for one in had] == [32] * KILLS
    assert min(one["locked"] for one in had) >= POOL_BYTES
    assert [kill["names"] for kill in kills] == [[]] * KILLS
    assert [kill["shm"] for kill in kills] == [0] * KILLS
    # The machine's figure, in which others have a part: what four pools more would make shows.
    assert kills[-1]["locked"] - kills[0]["locked"] < 2 * POOL_BYTES
