"""Runs the commands that prove more than a test has time for, in a short form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["COMMAND_SECONDS", "found_by"]

COMMAND_SECONDS = 300
"""What a test that runs a command may take: seconds on an idle machine, minutes on a busy one."""

_ROOT = Path(__file__).parents[2]
_SECONDS = 280.0


def found_by(command: str, *options: str) -> tuple[int, dict[str, Any]]:
    """Status of `python -m tests.faults.COMMAND` with these options, and the values it prints."""
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.faults.{command}", "--json", *options],
        check=False,
        capture_output=True,
        text=True,
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=_SECONDS,
    )
    print(ran.stderr)
    assert ran.stdout, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return ran.returncode, found
