"""The patches that remove a defence each still fit the tree, so that what they show can be shown:
`python -m tests.faults.defences` runs the tests against them."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.faults.defences import OWED, count_tests, gaps, patches_of
from tests.faults.defences.__main__ import judge


def test_every_row_that_is_owed_has_tests_and_a_patch(source: Path) -> None:
    print(f"{len(OWED)} rows, {sum(count_tests(source).values())} tests")
    assert gaps(source) == []


def test_every_patch_removes_something_and_says_what(source: Path) -> None:
    patches = patches_of(source)
    assert patches
    assert [patch.path.name for patch in patches if not patch.defence] == []
    strange = {
        patch.path.name: patch.changed
        for patch in patches
        if not patch.changed
        or not all(name.startswith(("tiered_kv/", "backends/")) for name in patch.changed)
    }
    assert strange == {}
    tested = count_tests(source)
    assert [patch.path.name for patch in patches if not tested.get(patch.row)] == []


def test_every_patch_applies_and_leaves_python_behind(source: Path, tmp_path: Path) -> None:
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.resolve())}
    problems: dict[str, str] = {}
    for number, patch in enumerate(patches_of(source)):
        tree = tmp_path / str(number)
        for name in patch.changed:
            if (source / name).exists():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source / name, tree / name)
        tree.mkdir(exist_ok=True)
        ran = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", patch.path],
            cwd=tree,
            env=outside,
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            problems[patch.path.name] = ran.stderr
            continue
        changed = [tree / name for name in patch.changed if (tree / name).exists()]
        for path in changed:
            try:
                ast.parse(path.read_text(encoding="utf-8"))
            except SyntaxError as error:
                problems[patch.path.name] = str(error)
        if all((source / name).read_bytes() == _bytes(tree / name) for name in patch.changed):
            problems[patch.path.name] = "changes nothing"
    assert problems == {}


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _report(tmp_path: Path, *cases: str) -> Path:
    path = tmp_path / "report.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


PASSED = '<testcase name="one"/>'
SKIPPED = '<testcase name="two"><skipped/></testcase>'


@pytest.mark.parametrize(
    ("kind", "message", "good"),
    [
        ("failure", "assert 1 == 2", True),
        ("failure", "AssertionError: nothing came", True),
        ("failure", "tiered_kv.testing.conformance.contract.BrokenPromise: it was lost", True),
        ("failure", "Failed: DID NOT RAISE TierError", True),
        ("failure", "Failed: Timeout (&gt;120.0s) from pytest-timeout.", False),
        ("failure", "ImportError: no module", False),
        ("failure", "AttributeError: 'Turn' object has no attribute 'take'", False),
        ("error", "AssertionError: in the set-up", False),
    ],
)
def test_only_an_assertion_shows_that_a_defence_is_missed(
    tmp_path: Path, kind: str, message: str, good: bool
) -> None:
    case = f'<testcase name="two"><{kind} message="{message}"/></testcase>'
    run = judge(1, _report(tmp_path, PASSED, case), 1.0)
    assert (run.good_failure, run.green, run.test) == (good, False, "two")
    assert run.says


def test_a_run_is_green_when_something_passed(tmp_path: Path) -> None:
    assert judge(0, _report(tmp_path, PASSED, SKIPPED), 1.0).green
    for run in (
        judge(0, _report(tmp_path, SKIPPED), 1.0),
        judge(5, tmp_path / "none", 1.0),
        judge(2, tmp_path / "none", 1.0),
        judge(-9, _report(tmp_path, PASSED), 1.0),
    ):
        assert not run.green
        assert not run.good_failure
        print(run.says)
