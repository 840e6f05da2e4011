"""Builds the third party's package and installs its wheel into a folder, as its users would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("sqlite_tier")


def installed(scratch: Path) -> Path:
    """The folder with the package in it, for `PYTHONPATH`; made below `scratch`.

    Raises:
        AssertionError: it cannot be built or installed; the text is what was printed.
    """
    wheels, site = scratch / "wheels", scratch / "site"
    _run("build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(SOURCE))
    [wheel] = wheels.glob("*.whl")
    _run("pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel))
    return site


def _run(module: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
