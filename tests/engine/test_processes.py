"""The harness itself: what hangs is shown and ended, whatever it has started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engine.processes import ProcessGroup, environment, members, running, shared_memory

_HANGS = """
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory

def hang_in_a_grandchild():
    time.sleep(600)

memory = SharedMemory(create=True, size=4096)
multiprocessing.get_context("fork").Process(target=hang_in_a_grandchild).start()
print("started", memory.name, flush=True)
time.sleep(600)
"""


def test_a_hang_shows_every_stack_and_leaves_nothing(tmp_path: Path) -> None:
    variables = environment(tmp_path / "cache", multiprocess=False)
    command = ["-c", _HANGS]
    with running(command, env=variables, scratch=tmp_path) as group:
        _until_started(group)
        mapped = shared_memory(group.pid)
        with pytest.raises(TimeoutError, match="hang_in_a_grandchild"):
            group.wait(0.1)
    assert members(group.pid) == []
    assert mapped
    assert not [path for path in mapped if path.exists()]


def test_a_process_that_ends_gives_its_status(tmp_path: Path) -> None:
    with running(["-c", "print('done'); exit(3)"], env=os.environ, scratch=tmp_path) as group:
        assert group.wait(30.0) == 3
    assert group.log() == "done\n"


def _until_started(group: ProcessGroup) -> None:
    while "started" not in group.log():
        assert group.poll() is None, group.log()
