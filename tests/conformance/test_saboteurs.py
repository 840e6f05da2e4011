"""Each promise of the contracts is proved: whoever breaks it fails the check that is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conformance import saboteur_handlers, saboteur_maintenance, saboteur_stores
from tiered_kv.testing.conformance.runs import CheckOutcome, run_instance

pytestmark = pytest.mark.timeout(400)  # one child process for all of them


def saboteurs(module: ModuleType) -> dict[str, Any]:
    return {name: one for name, one in vars(module).items() if name.startswith("Test")}


MODULES = (saboteur_stores, saboteur_maintenance, saboteur_handlers)
ALL = {module: saboteurs(module) for module in MODULES}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[CheckOutcome]]:
    """By saboteur, what became of its check."""
    found: dict[str, list[CheckOutcome]] = {}
    for module, classes in ALL.items():
        run = run_instance(
            Path(str(module.__file__)),
            tmp_path_factory.mktemp("saboteurs"),
            checks=[f"{name}::{one.check}" for name, one in classes.items()],
            environment={"HYPOTHESIS_PROFILE": "unshrunk"},
        )
        for outcome in run.outcomes:
            found.setdefault(outcome.instance, []).append(outcome)
        print(f"{module.__name__}: {run.failed} checks failed, {run.passed} passed")
    return found


@pytest.mark.parametrize("name", [name for classes in ALL.values() for name in classes])
def test_who_breaks_a_promise_fails_its_check(
    name: str, outcomes: Mapping[str, list[CheckOutcome]]
) -> None:
    (saboteur,) = (classes[name] for classes in ALL.values() if name in classes)
    failed = [one for one in outcomes[name] if one.outcome == "failed"]
    print(f"{len(failed)} of {len(outcomes[name])} runs of {saboteur.check} failed")
    assert failed, outcomes[name]
    assert any("BrokenPromise" in one.text for one in failed), failed[0].text
    assert any(f'"{saboteur.promise}"' in one.text for one in failed), failed[0].text
