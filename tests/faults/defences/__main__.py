"""Shows that each defence is tested: without it, a test of its row fails.

    python -m tests.faults.defences [ROW ...] [--json]

In one scratch worktree of HEAD, applies each patch in turn and runs the tests of its row. A patch
is good where they pass without it and one fails with it, by an assertion: an import error, an error
while tests are collected, a timeout, a killed test process and "no tests ran" are told as such and
are not good. The status is 1 where a patch is not good, or a row that is owed has none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

from rich import box
from rich.console import Console
from rich.table import Table

from tests.faults.defences import OWED, Patch, patches_of, row_name

_ROW_SECONDS = 900.0
_ROW = re.compile(r"[fF]?(\d{1,2})")
_ASSERTIONS = ("AssertionError", "BrokenPromise", "Failed")
_STATUSES = {
    2: "interrupted, or an error while tests were collected",
    3: "an internal error of pytest",
    4: "pytest refused its arguments",
    5: "no tests ran",
}


@dataclass(frozen=True, slots=True)
class Run:
    """What came of the tests of a row."""

    passed: int
    good_failure: bool
    """A test failed by an assertion."""
    test: str
    """The first one that did not pass."""
    says: str
    """The first line of why, or what became of the whole run."""
    seconds: float

    @property
    def green(self) -> bool:
        """Some passed, and no other thing happened."""
        return self.passed > 0 and not self.says


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table."""

    row: str
    defence: str
    patch: str
    test: str
    says: str
    seconds: float
    good: bool


class Tree:
    """A scratch worktree whose packages are the ones that tests import."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(root), str(root / "backends")]),
            # A patch may keep size and time of a module, by which stale bytecode is told.
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        for name in ("TIERED_KV_SOURCE", "TIERED_KV_DIST"):
            self._environment.pop(name, None)

    def check(self) -> None:
        """Raises `RuntimeError` where other packages than the tree's would be imported."""
        code = "import tiered_kv, tiered_kv_gpu, tiered_kv_lmdb, tiered_kv_nvme, tests; "
        code += "print(*(m.__file__ for m in (tiered_kv, tiered_kv_gpu, tiered_kv_lmdb, "
        code += "tiered_kv_nvme, tests)), sep='\\n')"
        files = self._python("-c", code, timeout=60.0).stdout.split()
        print("tested:", *files, sep="\n  ", file=sys.stderr)
        strange = [file for file in files if not Path(file).is_relative_to(self.root)]
        if strange or not files:
            raise RuntimeError(f"{', '.join(strange) or 'nothing'} is imported, not {self.root}")

    def reset(self) -> None:
        """As HEAD is."""
        git(self.root, "reset", "--hard", "--quiet")
        git(self.root, "clean", "-ffdxq")

    def apply(self, patch: Patch) -> str:
        """Apply a patch; why it could not be, or nothing."""
        ran = subprocess.run(
            ["git", "-C", self.root, "apply", "--whitespace=nowarn", patch.path],
            capture_output=True,
            text=True,
            check=False,
        )
        return ran.stderr.strip().partition("\n")[0] if ran.returncode else ""

    def test(self, row: int) -> Run:
        """Run the tests of a row, up to the first that fails."""
        report = self.root.parent / "report.xml"
        report.unlink(missing_ok=True)
        arguments = ["-q", "-x", "-k", f"test_{row_name(row)}_", "-p", "no:cacheprovider"]
        arguments += [f"--junitxml={report}", "tests/faults"]
        began = time.monotonic()
        try:
            ran = self._python("-m", "pytest", *arguments, timeout=_ROW_SECONDS)
        except subprocess.TimeoutExpired:
            return Run(
                0, False, "", f"the tests did not end in {_ROW_SECONDS:.0f} s", _since(began)
            )
        return judge(ran.returncode, report, _since(began))

    def _python(self, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=self._environment,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)


def judge(status: int, report: Path, seconds: float) -> Run:
    """What a run of pytest came to."""
    if status < 0:
        return Run(0, False, "", f"killed by {signal.Signals(-status).name}", seconds)
    if status not in (0, 1) or not report.exists():
        return Run(0, False, "", _STATUSES.get(status, f"status {status}"), seconds)
    passed = skipped = 0
    for case in ElementTree.parse(report).iter("testcase"):
        name = str(case.get("name"))
        for kind in ("error", "failure"):
            found = case.find(kind)
            if found is not None:
                message = str(found.get("message"))
                good = kind == "failure" and by_assertion(message)
                lines = [line for line in message.splitlines() if line.strip()] or [kind]
                says = lines[0] if good else f"no assertion: {lines[0]}"
                return Run(passed, good, name, says, seconds)
        if case.find("skipped") is None:
            passed += 1
        else:
            skipped += 1
    says = "" if passed else f"no tests ran, {skipped} were skipped"
    return Run(passed, False, "", says, seconds)


def by_assertion(message: str) -> bool:
    """Whether a failure says that something was asserted, not that something broke."""
    if "Timeout (>" in message.partition("\n")[0]:
        return False
    kind = message.partition(":")[0].rpartition(".")[2]
    return message.startswith("assert ") or kind in _ASSERTIONS


def git(root: Path, *arguments: str | Path) -> str:
    """What git says.

    Raises:
        CalledProcessError: it failed.
    """
    ran = subprocess.run(
        ["git", "-C", root, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return ran.stdout.strip()


@contextmanager
def scratch_tree(root: Path) -> Iterator[Tree]:
    """A worktree of HEAD, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="tiered-kv-defences.") as folder:
        path = Path(folder).resolve() / "tree"
        git(root, "worktree", "add", "--quiet", "--detach", path, "HEAD")
        try:
            yield Tree(path)
        finally:
            git(root, "worktree", "remove", "--force", path)


def examine(tree: Tree, patch: Patch, clean: dict[int, Run]) -> Line:
    """Test a row with a patch, and without it where that was not done yet."""

    def line(test: str, says: str, seconds: float, *, good: bool) -> Line:
        name = patch.path.name
        return Line(row_name(patch.row), patch.defence, name, test, says, seconds, good)

    if patch.row not in clean:
        clean[patch.row] = tree.test(patch.row)
    before = clean[patch.row]
    if not before.green:
        return line(before.test, f"without the patch: {before.says}", before.seconds, good=False)
    refusal = tree.apply(patch)
    if refusal:
        return line("", f"does not apply: {refusal}", 0.0, good=False)
    try:
        run = tree.test(patch.row)
    finally:
        tree.reset()
    if run.green:
        return line("", "the tests stay green", run.seconds, good=False)
    return line(run.test, run.says, run.seconds, good=run.good_failure)


def chosen_rows(words: Sequence[str]) -> set[int]:
    """The rows that words name.

    Raises:
        ValueError: one names none.
    """
    rows: set[int] = set()
    for word in words:
        match = _ROW.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is no row; expected one like F9 or f09")
        rows.add(int(match[1]))
    return rows


def show(lines: Sequence[Line]) -> None:
    """Print the table."""
    table = Table(box=box.MARKDOWN)
    for name in ("row", "defence removed", "failing test", "it says", "s", "good"):
        table.add_column(name, overflow="fold")
    for line in lines:
        table.add_row(
            line.row,
            line.defence,
            line.test,
            line.says,
            f"{line.seconds:.1f}",
            "yes" if line.good else "NO",
        )
    console = Console(width=220, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(table)
    print(*(line.rstrip() for line in capture.get().splitlines() if line.strip()), sep="\n")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.defences", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("row", nargs="*", help="only these rows (F9, f09); default: all")
    parser.add_argument("--json", action="store_true", help="print a JSON array, not a table")
    options = parser.parse_args()
    try:
        rows = chosen_rows(options.row)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    root = Path(git(Path(__file__).parent, "rev-parse", "--show-toplevel"))
    if git(root, "status", "--porcelain", "--", "tests/faults", "tiered_kv", "backends"):
        print("what is not committed is not looked at", file=sys.stderr)
    lines: list[Line] = []
    with scratch_tree(root) as tree:
        tree.check()
        patches = [patch for patch in patches_of(tree.root) if not rows or patch.row in rows]
        clean: dict[int, Run] = {}
        for patch in patches:
            line = examine(tree, patch, clean)
            print(f"{line.patch}: {'good' if line.good else line.says}", file=sys.stderr)
            lines.append(line)
    owed = rows or set(OWED)
    for row in sorted(owed - {patch.row for patch in patches}):
        lines.append(Line(row_name(row), "", "", "", "no patch", 0.0, good=False))
    lines.sort(key=lambda line: line.row)
    if options.json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
    else:
        show(lines)
        print(f"{sum(line.good for line in lines)} of {len(lines)} are good")
    return 0 if all(line.good for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
