"""The suite itself: what it quotes, what it needs, and how instances run apart."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path

import pytest

from tiered_kv import contracts, specs, values
from tiered_kv.testing.conformance.contract import (
    BrokenPromise,
    HandlerPromise,
    MaintenancePromise,
    StorePromise,
    owe,
    refused,
)
from tiered_kv.testing.conformance.runs import run_instance

INSTANCE = """
import os
import pytest
from tests.conformance.honest import memory_case
from tiered_kv.testing.conformance.stores.lasting import LastingChecks

class TestInstance(LastingChecks):
    @pytest.fixture
    def case(self):
        print("library:", os.environ["LIBRARY"])
        import a_driver
        return memory_case()

class TestWithoutCase(LastingChecks):
    pass
"""


def sentences(*files: str | None) -> str:
    """All docstrings of modules, in one line."""
    said: list[str] = []
    for file in files:
        tree = ast.parse(Path(str(file)).read_text(encoding="utf-8"))
        said += [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
    return " ".join(" ".join(said).split())


def test_failures_quote_the_contract_word_for_word() -> None:
    folder = Path(str(contracts.__file__)).parent
    said: dict[type[StrEnum], str] = {
        StorePromise: sentences(str(folder / "store.py")),
        MaintenancePromise: sentences(str(folder / "maintenance.py")),
        HandlerPromise: sentences(
            *(str(folder / name) for name in ("handler.py", "store.py")),
            specs.__file__,
            values.__file__,
        ),
    }
    for promises, text in said.items():
        missing = [promise.name for promise in promises if promise not in text]
        print(f"{len(list(promises)) - len(missing)} sentences of {promises.__name__} found")
        assert missing == []


def test_every_promise_is_proved_by_some_check() -> None:
    folder = Path(str(sys.modules[owe.__module__].__file__)).parent
    text = "".join(file.read_text(encoding="utf-8") for file in folder.rglob("*.py"))
    for promises in (StorePromise, MaintenancePromise, HandlerPromise):
        unused = [p.name for p in promises if f"{promises.__name__}.{p.name}" not in text]
        assert unused == []


def test_a_broken_promise_names_sentence_and_finding() -> None:
    owe(True, StorePromise.READ, "never said")
    with pytest.raises(BrokenPromise, match=r'says "Mark as recently used\.", but it was not'):
        owe(False, StorePromise.TOUCH, "it was not")

    def misbehave() -> int:
        raise KeyError("x")

    with pytest.raises(BrokenPromise, match=r"KeyError.*ValueError is due"):
        refused(misbehave, ValueError, StorePromise.ERRORS)
    with pytest.raises(BrokenPromise, match="answered 3 where ValueError is due"):
        refused(lambda: 3, ValueError, StorePromise.ERRORS)
    refused(lambda: int("x"), ValueError, StorePromise.ERRORS)


@pytest.mark.parametrize("suite", ["stores", "handlers"])
def test_without_pytest_it_says_what_to_install(suite: str) -> None:
    code = f"""
import sys
sys.modules["pytest"] = None
import tiered_kv.testing
import tiered_kv.testing.conformance.blocks, tiered_kv.testing.conformance.children
import tiered_kv.testing.conformance.contract, tiered_kv.testing.conformance.runs
assert not {{"torch", "hypothesis"}} & set(sys.modules)
try:
    import tiered_kv.testing.conformance.{suite}
except ModuleNotFoundError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    said = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert "pip install 'tiered-kv[testing]'" in said


def test_an_instance_runs_in_a_prepared_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "prepared_instance.py"
    module.write_text(INSTANCE)
    (tmp_path / "a_driver.py").write_text("print('driver loaded')\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = run_instance(
        module,
        tmp_path,
        checks=["TestInstance", "TestWithoutCase::test_files_are_private"],
        environment={"LIBRARY": "here"},
        plugins=["a_driver"],
        arguments=["-k", "private or restart"],
    )
    print(run.output)
    found = {(one.instance, one.check): one for one in run.outcomes}
    assert (run.passed, run.skipped, run.failed) == (1, 1, 1)
    assert "library: here" in found["TestInstance", "test_blocks_survive_a_restart"].text
    assert "driver loaded" not in found["TestInstance", "test_blocks_survive_a_restart"].text
    assert "directory=False" in found["TestInstance", "test_files_are_private"].text
    assert "no fixture `case`" in found["TestWithoutCase", "test_files_are_private"].text
    with pytest.raises(RuntimeError, match="status 4"):
        run_instance(tmp_path / "none.py", tmp_path)
