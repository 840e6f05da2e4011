"""fio with the same block size, depth, bytes and memory: what the disk gives to a program that
does nothing else.

Ours has a whole batch in flight, from and to memory as large as the batch (vectored calls of
several MiB by a few threads). So fio's jobs have, together, a batch of blocks in flight, each with
a buffer of its own; with one buffer per job, its bytes would come from the processor's cache.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path

from tests.benchmarks.harness import Batch, Took

__all__ = ["LOOPS", "io_engine", "missing_fio", "run_fio"]

LOOPS = 4
"""Passes over the bytes per run: fio tells its time in milliseconds."""


def missing_fio() -> str:
    """Why no ratio to fio can be given; empty where there is one."""
    return "" if shutil.which("fio") else "fio is not installed (apt-get install fio)"


@cache
def io_engine() -> str:
    """The engine that has many blocks in flight: io_uring where the kernel allows it."""
    file = Path("/proc/sys/kernel/io_uring_disabled")
    allowed = not file.exists() or file.read_text().strip() == "0"
    return "io_uring" if allowed else "libaio"


def run_fio(file: Path, batch: Batch, threads: int, *, write: bool, direct: bool) -> Took:
    """Write or read the batch's bytes in `file`; what one pass took. The file is made by the first
    run, and must be written once before it is read.

    Raises:
        RuntimeError: fio failed.
    """
    blocks = batch.blocks // threads
    share = blocks * batch.block_bytes
    command = [
        "fio",
        "--name=bench",
        f"--filename={file}",
        f"--rw={'write' if write else 'read'}",
        f"--bs={batch.block_bytes}",
        f"--numjobs={threads}",
        f"--iodepth={blocks}",
        f"--size={share}",
        f"--offset_increment={share}",
        f"--loops={LOOPS}",
        f"--direct={int(direct)}",
        f"--ioengine={io_engine()}",
        "--thread",
        "--group_reporting",
        "--overwrite=1",
        "--allow_file_create=1",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    told = json.loads(done.stdout)["jobs"][0]
    job = told["write" if write else "read"]
    part = batch.total_bytes / int(job["io_bytes"])
    used = (told["usr_cpu"] + told["sys_cpu"]) / 100 * told["job_runtime"]
    return Took(float(job["runtime"]) / 1e3 * part, used / 1e3 * part)
