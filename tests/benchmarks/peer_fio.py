"""fio with the same block size, threads and bytes: what the disk gives to a program that does
nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tests.benchmarks.harness import Batch

__all__ = ["LOOPS", "missing_fio", "run_fio"]

LOOPS = 4
"""Passes over the bytes per run: fio tells its time in milliseconds."""


def missing_fio() -> str:
    """Why no ratio to fio can be given; empty where there is one."""
    return "" if shutil.which("fio") else "fio is not installed (apt-get install fio)"


def run_fio(file: Path, batch: Batch, threads: int, *, write: bool, direct: bool) -> float:
    """Write or read the batch's bytes in `file`; the seconds that one pass took. The file is made
    by the first run, and must be written once before it is read.

    Raises:
        RuntimeError: fio failed.
    """
    share = batch.total_bytes // threads // batch.block_bytes * batch.block_bytes
    command = [
        "fio",
        "--name=bench",
        f"--filename={file}",
        f"--rw={'write' if write else 'read'}",
        f"--bs={batch.block_bytes}",
        f"--numjobs={threads}",
        f"--size={share}",
        f"--offset_increment={share}",
        f"--loops={LOOPS}",
        f"--direct={int(direct)}",
        "--ioengine=psync",
        "--thread",
        "--group_reporting",
        "--overwrite=1",
        "--allow_file_create=1",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout)["jobs"][0]["write" if write else "read"]
    moved, milliseconds = int(job["io_bytes"]), float(job["runtime"])
    return milliseconds / 1e3 * batch.total_bytes / moved
