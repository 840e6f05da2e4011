"""A host block pool in a process of its own, with a stand-in driver, and machines made of files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.config import MIB
from tiered_kv.memory import HostBlockPool, PageState, pool

PATIENCE = 30.0
SLOT = 64 * 1024

CHILD = """
import ctypes, json, os, resource, sys
from pathlib import Path
from tiered_kv.errors import ConfigError
from tiered_kv.memory import HostBlockPool

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def status(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

def areas(pool):
    "Fields of the kernel's list that lie in the pool."
    first = pool.as_array(0).ctypes.data
    end = first + pool.slots * pool.slot_bytes
    inside, found = False, []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            start, stop = (int(part, 16) for part in name.split("-"))
            inside = start < end and stop > first
            if inside:
                found.append({"bytes": stop - start, "permissions": rest.split()[0]})
        elif inside:
            found[-1][name[:-1]] = rest.split()
    return found

def say(**values):
    print(json.dumps(values), flush=True)
"""


def child(code: str) -> dict[str, Any]:
    """What the code says, in a fresh process."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD + code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    said: dict[str, Any] = json.loads(ran.stdout)
    print(said, ran.stderr)
    return {**said, "stderr": ran.stderr}


class Driver:
    """Stands for a device's driver: notes what is registered, and refuses what it is told to."""

    def __init__(self, *, refuse_from: int | None = None) -> None:
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []
        self.calls = 0
        self._refuse_from = refuse_from

    def register(self, address: int, nbytes: int) -> None:
        self.calls += 1
        if self._refuse_from is not None and self.calls >= self._refuse_from:
            raise MemoryError("out of host memory (code 2)")
        self.registered.append((address, nbytes))

    def unregister(self, address: int) -> None:
        self.unregistered.append(address)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 slots instead of 256 MiB."""
    monkeypatch.setattr(pool, "CHUNK_BYTES", 16 * SLOT)
    monkeypatch.setattr(pool, "START_BYTES", 16 * SLOT)


def address(made: HostBlockPool, number: int) -> int:
    return int(made.as_array(number).ctypes.data)


def grown(made: HostBlockPool) -> PageState:
    said: list[PageState] = []
    made.grow(said.append)
    assert made.wait_grown(PATIENCE)
    [state] = said
    return state


STAT = f"anon 4096\nactive_file {MIB}\ninactive_file {MIB}\nshmem 77\n"
STAT_V1 = f"active_file 1\ntotal_active_file {MIB}\ntotal_inactive_file {MIB}\n"


def control_group(root: Path, *, version: int, namespace: str = "/") -> Path:
    """The files of a machine with 1 GiB, whose process is in /serving/box; the folder of the group.
    `namespace` is what the mount shows of the hierarchy."""
    proc = root / "proc" / "self"
    proc.mkdir(parents=True)
    (root / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  1048576 kB\n")
    if version == 2:
        (proc / "cgroup").write_text("0::/serving/box\n")
        mount, kind, options = "/sys/fs/cgroup", "cgroup2", "rw"
    else:
        (proc / "cgroup").write_text("7:cpu:/elsewhere\n4:blkio,memory:/serving/box\n0::/\n")
        mount, kind, options = "/sys/fs/cgroup/memory", "cgroup", "rw,memory"
    (proc / "mountinfo").write_text(
        "22 1 8:1 / / rw shared:1 - ext4 /dev/root rw\n"
        "30 22 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        f"35 22 0:32 {namespace} {mount} rw,relatime shared:9 - {kind} {kind} {options}\n"
    )
    seen = "serving/box".removeprefix(namespace.strip("/")).strip("/")
    group = root / mount.lstrip("/") / seen
    group.mkdir(parents=True)
    return group


def write(folder: Path, files: dict[str, int | str]) -> None:
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")
