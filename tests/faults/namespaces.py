"""Runs a module in a mount namespace of its own, where it can mount what it likes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 100.0


def unshared() -> list[str]:
    """The words before a command that may mount what it likes. Skips where that cannot be done."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    words = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    if subprocess.run([*words, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")  # as in most unprivileged containers
    return words


def run_mounted(module: str, *arguments: str, image: bool) -> str:
    """Run `python -m MODULE ARGUMENTS`, and give what it printed; it must end well. `image`: it
    makes file systems in files, which takes root. Skips the test where that cannot be done."""
    if image and (os.geteuid() != 0 or shutil.which("mkfs.ext4") is None):
        # A full or broken file system can only be had as one of its own; and on Debian mkfs.ext4 is
        # not in the path of all users.
        pytest.skip("needs root for a loop mount, and mkfs.ext4")
    done = subprocess.run(
        [*unshared(), sys.executable, "-m", module, *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=SECONDS,
    )
    print(done.stdout[-3000:])
    # Minus the signal's number where one killed it: -7 is SIGBUS.
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    return done.stdout
