"""Runs the command line as a user does, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.engine.processes import environment

COMMAND = (sys.executable, "-P", "-c", "from tiered_kv.cli import main; main()")


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


def run_command(
    *arguments: str,
    scratch: Path,
    cache: Path,
    multiprocess: bool,
    env: Mapping[str, str] | None = None,
    timeout: float = 300.0,
) -> Result:
    """Run `tiered-kv` with these arguments.

    Args:
        arguments: of the command line.
        scratch: where it runs.
        cache: what engines may share, see `environment`.
        multiprocess: whether engines run in processes of their own.
        env: added to the environment.
        timeout: seconds.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=scratch,
        env=environment(cache, multiprocess=multiprocess) | dict(env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)
