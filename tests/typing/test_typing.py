"""Type checkers infer the exact handler in right uses of the registry, and reject wrong uses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
RIGHT, WRONG = FOLDER / "right_uses.py", FOLDER / "wrong_uses.py"
MARK = "# E"
SECONDS = 240

Errors = dict[str, dict[int, str]]
"""By file name: line -> what the checker says of it."""


def _run(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=SECONDS
    )
    assert done.returncode == 1, f"{command} ended with {done.returncode}: {done.stderr}"
    return done.stdout


def mypy(scratch: Path) -> Errors:
    found: Errors = {}
    options = ("--output", "json", "--cache-dir", str(scratch))
    for line in _run("mypy", *options, str(RIGHT), str(WRONG)).splitlines():
        told = json.loads(line)
        if told["severity"] == "error":
            found.setdefault(Path(told["file"]).name, {})[told["line"]] = told["message"]
    return found


def pyright(scratch: Path) -> Errors:
    found: Errors = {}
    settings = {
        "include": [str(RIGHT), str(WRONG)],
        "extraPaths": [str(ROOT), str(ROOT / "backends")],
        "pythonVersion": "3.11",
        "typeCheckingMode": "standard",
    }
    project = scratch / "pyrightconfig.json"
    project.write_text(json.dumps(settings))
    options = ("--outputjson", "--project", str(project), "--pythonpath", sys.executable)
    told = json.loads(_run("basedpyright", *options))
    for entry in told["generalDiagnostics"]:
        if entry["severity"] == "error":
            line = entry["range"]["start"]["line"] + 1
            found.setdefault(Path(entry["file"]).name, {})[line] = entry["message"]
    return found


@pytest.mark.parametrize("check", [mypy, pyright])
def test_wrong_uses_are_rejected_and_right_ones_are_not(
    check: Callable[[Path], Errors], tmp_path: Path
) -> None:
    wrong = WRONG.read_text().splitlines()
    expected = {number for number, line in enumerate(wrong, start=1) if line.endswith(MARK)}
    found = check(tmp_path)
    print(f"{check.__name__} rejects {len(found[WRONG.name])} of {len(expected)} wrong uses")
    assert set(found) == {WRONG.name}, found  # nothing in the right ones
    assert {n: wrong[n - 1] for n in sorted(found[WRONG.name])} == {
        n: wrong[n - 1] for n in sorted(expected)
    }
    assert len(expected) > 20
