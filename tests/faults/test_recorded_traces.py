"""Traces are recorded within their room: on a disk that is really full, and by several engines."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.faults.namespaces import ROOT, run_mounted
from tiered_kv.connector import recording, trace_files
from tiered_kv.planning import read_trace
from tiered_kv.testing.faults import PATIENCE

pytestmark = pytest.mark.faults

MODULE = "tests.faults.recorded_traces"
MOST = 2**18
ENGINES = 3
REQUESTS = 150


@pytest.mark.parametrize("file_system", ["ext4", "tmpfs"])
def test_a_full_disk_leaves_no_empty_files_of_a_trace(file_system: str, tmp_path: Path) -> None:
    said = run_mounted(MODULE, "full", str(tmp_path), file_system, image=file_system == "ext4")
    assert said.endswith("done\n")


def _size(folder: Path) -> int:
    sizes = 0
    for file in trace_files(folder):
        with suppress(FileNotFoundError):
            sizes += file.stat().st_size
    return sizes


def test_engines_that_share_a_directory_stay_within_it_together(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    folder.mkdir(mode=0o700)
    command = [sys.executable, "-m", MODULE, "beside", str(folder), str(MOST), str(REQUESTS)]
    most, looks = 0, 0
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                )
            )
            for _ in range(ENGINES)
        ]
        for engine in engines:
            stack.callback(engine.kill)
        for engine in engines:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "ready\n"
        for engine in engines:
            assert engine.stdin is not None
            engine.stdin.write("go\n")
            engine.stdin.flush()
        while any(engine.poll() is None for engine in engines):
            most, looks = max(most, _size(folder)), looks + 1
        said = [engine.communicate(timeout=PATIENCE)[0] for engine in engines]
    left = {file.name: file.stat().st_size for file in trace_files(folder)}
    print(f"{said} of {REQUESTS} recorded each; at most {most} of {MOST} bytes in {looks} looks")
    print(left)
    assert [engine.returncode for engine in engines] == [0] * ENGINES
    assert most <= MOST
    assert [int(recorded) for recorded in said] == [REQUESTS] * ENGINES
    assert len(left) >= recording.FILES - ENGINES
    assert all(left.values())
    assert read_trace(folder).requests
