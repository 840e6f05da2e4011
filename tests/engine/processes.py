"""Starts child processes in groups of their own, and ends each group for certain."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

TESTS_ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds the package `tests`."""


def environment(
    cache: Path, *, multiprocess: bool, pythonpath: Sequence[Path] = ()
) -> dict[str, str]:
    """Environment for a vLLM process that stays on this machine.

    What it caches goes below `cache`; engines that share one start 8 s faster on two cores.
    """
    return dict(os.environ) | {
        "HF_HOME": str(cache / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS_ROOT, *pythonpath))),
        "PYTHONUNBUFFERED": "1",
        "TORCHDYNAMO_DISABLE": "1",  # logprobs alone would be compiled, for 10 s in each engine
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "VLLM_CONFIG_ROOT": str(cache / "vllm-config"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if multiprocess else "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def members(group: int) -> list[int]:
    """Ids of the living processes of a process group."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                after_name = (entry / "stat").read_text().rpartition(")")[2]
                state, _parent, its_group = after_name.split()[:3]
                if int(its_group) == group and state != "Z":
                    found.append(int(entry.name))
    return found


def shared_memory(group: int) -> list[Path]:
    """Files in shared memory that processes of the group have mapped."""
    mapped: set[int] = set()
    for pid in members(group):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line:
                    mapped.add(int(line.split()[4]))
    # By inode: a semaphore is mapped under a temporary name before it gets its own.
    patterns = ("psm_*", "sem.mp-*", "vllm_*")
    names = [path for pattern in patterns for path in Path("/dev/shm").glob(pattern)]
    return sorted(path for path in names if _inode(path) in mapped)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def remove_shared_memory(paths: Iterable[Path]) -> None:
    """Remove what killed processes could not; hundreds of MB would add up."""
    for path in paths:
        path.unlink(missing_ok=True)


class ProcessGroup:
    """One child and all processes that it starts, found again by their process group."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], scratch: Path) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        self._log = scratch / "log.txt"
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-P", *command],
                cwd=scratch,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._shared: set[Path] = set()
        # A dump of all stacks ends in SIGABRT; it must not leave gigabytes of core file.
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self._child.pid, resource.RLIMIT_CORE, (0, 0))

    @property
    def pid(self) -> int:
        """Process id of the child, which is also its group's."""
        return self._child.pid

    def log(self) -> str:
        """What the processes have printed so far."""
        return self._log.read_text(errors="replace")

    def poll(self) -> int | None:
        """Exit status of the child, None while it runs."""
        return self._child.poll()

    def members(self) -> list[int]:
        """Ids of the living processes of the group."""
        return members(self.pid)

    def wait(self, timeout: float) -> int:
        """Exit status of the child.

        Raises:
            TimeoutError: it still ran after `timeout` seconds. The group was ended; the message
                holds the stacks of all its threads.
        """
        try:
            return self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            self.dump_stacks()
            self.kill()
            raise TimeoutError(
                f"process {self._child.pid} hung for {timeout:.0f} s:\n{self.log()}"
            ) from None

    def dump_stacks(self) -> None:
        """Have every process of the group print the stacks of its threads, and abort."""
        self._shared.update(shared_memory(self.pid))
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        self._await_end(5.0)

    def terminate(self, timeout: float) -> int | None:
        """Ask the child to end (SIGTERM); its exit status, or None after `timeout` seconds."""
        self._shared.update(shared_memory(self.pid))
        self._child.terminate()
        try:
            return self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End whatever is left of the group, at once; harmless when nothing is."""
        self._shared.update(shared_memory(self.pid))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(30.0)
        self._await_end(10.0)
        remove_shared_memory(self._shared)

    def _await_end(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.members() and time.monotonic() < deadline:
            self._child.poll()
            time.sleep(0.05)


@contextlib.contextmanager
def running(
    command: Sequence[str], *, env: Mapping[str, str], scratch: Path
) -> Iterator[ProcessGroup]:
    """A process group that is gone when the block is left, however it is left."""
    # vLLM never removes its sockets, and their path must be short.
    with tempfile.TemporaryDirectory(prefix="tkv-") as sockets:
        group = ProcessGroup(
            command, env=dict(env) | {"VLLM_RPC_BASE_PATH": sockets}, scratch=scratch
        )
        try:
            yield group
        finally:
            group.kill()
