"""Scenarios with real KvikIO under the fake CUDA driver, each in a process of its own."""

from __future__ import annotations

import faulthandler
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.fakes.cuda_driver import FakeCudaDriver

__all__ = ["DEVICE_READS", "Scenario", "cufile_environment", "perform", "run_scenario"]

TESTS_ROOT = Path(__file__).resolve().parents[2]

SECONDS = 100.0

Scenario = Callable[[Path, FakeCudaDriver | None], Mapping[str, object]]
"""Gets a folder of its own, and the driver where one is loaded; gives what is worth printing."""

DEVICE_READS = "cuMemGetAddressRange_v2"
"""KvikIO asks this once for each call that moves device memory in its threads."""


def cufile_environment() -> dict[str, str]:
    """What lets the loader find the libcufile that is installed: KvikIO looks for it beside the
    interpreter only, and an environment may see the packages of another one."""
    files = importlib.metadata.files("nvidia-cufile") or []
    [library] = [file for file in files if file.name == "libcufile.so.0"]
    return {"LD_LIBRARY_PATH": str(Path(str(library.locate())).resolve().parent)}


def run_scenario(
    module: str,
    name: str,
    folder: Path,
    *,
    driver: bool = True,
    env: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Perform a scenario of `module` in a child process; what it gave.

    Raises:
        AssertionError: it failed, hung, or ended with an error; the text holds what it printed.
    """
    command = [sys.executable, "-P", "-W", "error", "-m", module, name, str(folder)]
    variables = dict(os.environ) | cufile_environment() | dict(env or {})
    variables["PYTHONPATH"] = os.pathsep.join(
        [str(TESTS_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    variables["FAKE_CUDA_DRIVER"] = "1" if driver else ""
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=SECONDS + 15,
        check=False,
    )
    said = f"{done.stdout}{done.stderr}"
    assert done.returncode == 0, f"{name} ended with status {done.returncode}:\n{said}"
    print(f"{name}: {done.stdout.strip()}")
    result: dict[str, object] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return result


def perform(scenarios: Mapping[str, Scenario]) -> None:
    """The child's side: `python -m MODULE NAME FOLDER`."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    name, folder = sys.argv[1], Path(sys.argv[2])
    driver = FakeCudaDriver(folder) if os.environ["FAKE_CUDA_DRIVER"] else None
    result = dict(scenarios[name](folder, driver))
    if driver is not None:
        result["device copies"] = driver.copies()
    print(json.dumps(result), flush=True)
