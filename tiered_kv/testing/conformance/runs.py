"""Running an instance of a suite in a child process, for drivers that need one of their own.

A driver that has to be loaded first, or that stays loaded once it was used, is best tested in a
process that is prepared for it. Put the instance into a module whose name does not begin with
`test_`, so that an ordinary run passes it by, and let a test run it:

```python
def test_my_driver(tmp_path: Path) -> None:
    run = run_instance(
        Path(__file__).with_name("my_driver_instance.py"),
        tmp_path,
        environment={"LD_LIBRARY_PATH": str(my_libraries)},
        plugins=("my_package.tests.load_driver",),
    )
    assert run.failed == 0, run.output
    assert run.passed > 0
```

`environment` is set before the child's interpreter starts; the modules in `plugins` are imported
before the instance is, so the place to load a driver. What a store's own child processes need
(`StoreCase.open`) they have to load again: they inherit the environment, not the plug-ins.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

__all__ = ["CheckOutcome", "InstanceRun", "run_instance"]

SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """What became of one check."""

    instance: str
    """Name of the instance's class."""
    check: str
    """Name of the check, with its parameters."""
    outcome: str
    """"passed", "failed" or "skipped"."""
    text: str
    """Why it failed or was skipped; what it printed where it passed."""


@dataclass(frozen=True, slots=True)
class InstanceRun:
    """What became of all checks of a module."""

    outcomes: tuple[CheckOutcome, ...]
    output: str
    """All that pytest said."""

    def _count(self, outcome: str) -> int:
        return Counter(one.outcome for one in self.outcomes)[outcome]

    @property
    def passed(self) -> int:
        """How many checks passed."""
        return self._count("passed")

    @property
    def failed(self) -> int:
        """How many failed, or could not be set up."""
        return self._count("failed")

    @property
    def skipped(self) -> int:
        """How many were skipped for a capability that the case lacks."""
        return self._count("skipped")


def run_instance(
    module: Path,
    folder: Path,
    *,
    checks: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    plugins: Sequence[str] = (),
    arguments: Sequence[str] = (),
    seconds: float = SECONDS,
) -> InstanceRun:
    """Run the checks of a module under pytest, in a child process. The child finds what this
    process finds (`sys.path`).

    Args:
        module: the file with the instances.
        folder: where the run may write; it must be there.
        checks: only these, as "TestClass" or "TestClass::test_name"; all where it is empty.
        environment: variables to set for the child.
        plugins: modules to import before the instance (pytest's `-p`).
        arguments: further arguments for pytest.
        seconds: when the child is stopped.

    Raises:
        RuntimeError: pytest did not get as far as running checks; the text says why.
        subprocess.TimeoutExpired: it took longer than `seconds`.
    """
    report = folder / "checks.xml"
    chosen = [f"{module}::{check}" for check in checks] or [str(module)]
    command = [
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "-q"),
        *(part for plugin in plugins for part in ("-p", plugin)),
        *("-o", "junit_logging=all", f"--junitxml={report}"),
        f"--basetemp={folder / 'checks'}",
        *arguments,
        *chosen,
    ]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        command,
        env=variables | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    output = f"{done.stdout}{done.stderr}"
    if done.returncode not in {0, 1} or not report.exists():
        raise RuntimeError(f"pytest ended with status {done.returncode}:\n{output}")
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return InstanceRun(tuple(_outcome(case) for case in cases), output)


def _outcome(case: ElementTree.Element) -> CheckOutcome:
    outcome = "passed"
    parts = [case.findtext("system-out") or ""]
    for kind, name in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
        for element in case.iter(kind):
            outcome = name
            parts = [element.get("message") or "", element.text or ""]
    instance = (case.get("classname") or "").rpartition(".")[2]
    return CheckOutcome(instance, case.get("name") or "", outcome, "\n".join(parts).strip())
