"""The check for a GPU machine, tried where there is none: every measurement, in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import report
from tests.unit.device_stand_in import StandIn
from tests.unit.gpu_rig import KINDS

CHECK = Path(report.__file__).parent / "check"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> report.Bench:
    monkeypatch.setattr("tiered_kv_gpu.handlers.copies_for", KINDS["device"])
    return report.Bench(StandIn(), torch.device("cpu"), layers=2, page=2048, blocks=16)


def test_every_measurement_says_what_it_found(bench: report.Bench) -> None:
    pool = report.pool_registration(bench, 8 << 20)
    assert (pool["memory"], pool["failed"]) == ("pinned", False)
    assert report.bus(bench).keys() == {"device to host GB/s", "host to device GB/s"}
    assert report.rows(bench, apart=True)["launches"] == 2
    assert report.rows(bench, apart=False)["launches"] == 1
    for pinned, memory in ((True, "pinned"), (False, "pageable")):
        found = report.handlers(bench, pinned=pinned)
        assert found["mode"] == f"stand-in:0 streams, {memory}"
        assert (found["not OK"], found["failed"]) == (0, False)
        assert found["store GB/s, wsum"] > 0
        assert found["load GB/s, xxh3"] > 0
    found = report.weighted_sum(bench)
    assert (found["lengths"], found["wrong"], found["failed"]) == (202, 0, False)


def test_what_breaks_is_a_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def skipped() -> dict[str, object]:
        raise report.Skip("no such thing here")

    table = [
        report.run("good", lambda: {"speed": 3}),
        report.run("bad", lambda: {"wrong": 2, "failed": True}),
        report.run("broken", lambda: {"x": 1 // 0}),
        report.run("absent", skipped),
    ]
    file = tmp_path / "out.json"
    options = report.arguments(["--json", str(file)])
    assert report.publish(table, options) == 1
    expected = {
        "good": {"status": "ok", "speed": 3},
        "bad": {"status": "failed", "wrong": 2},
        "broken": {
            "status": "failed",
            "reason": "ZeroDivisionError: integer division or modulo by zero",
        },
        "absent": {"status": "skipped", "reason": "no such thing here"},
    }
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == json.loads(file.read_text()) == expected
    assert [line.split()[:2] for line in lines[:-1]] == [
        ["good", "ok"],
        ["bad", "failed"],
        ["broken", "failed"],
        ["absent", "skipped"],
    ]
    assert report.publish(table[:1], report.arguments([])) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to be checked")
def test_without_a_device_it_says_so() -> None:
    done = subprocess.run(
        [CHECK],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    reason = "torch sees no CUDA device here"
    expected = {"device": {"status": "skipped", "reason": reason}}
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    assert done.stdout.splitlines()[0].split(maxsplit=2) == ["device", "skipped", reason]
    assert subprocess.run([CHECK, "--what"], capture_output=True, check=False).returncode == 2


def test_the_tests_of_the_folder_are_run_and_counted() -> None:
    """Where there is no device they are skipped as a whole, which is no success."""
    found = report.tests_on_device()
    print(found)
    assert (found["failures"], found["errors"]) == (0, 0)
    assert found["tests"] >= 2
    assert found["failed"] == (found["tests"] == found["skipped"])
