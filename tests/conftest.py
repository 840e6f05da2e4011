from __future__ import annotations

import gc
import os
from pathlib import Path

import hypothesis
import pytest

from tests.command_line import cli
from tests.light_children import pytest_configure

__all__ = ["cli", "pytest_configure"]

_HERE = Path(__file__).parent
_ENGINE_SECONDS = 900

hypothesis.settings.register_profile("commit", deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
# For tests that are to fail: the first failure counts, however large.
hypothesis.settings.register_profile(
    "unshrunk", deadline=None, max_examples=50, phases=[hypothesis.Phase.generate]
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "commit"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `engine/` and `packaging/`, so that a stage can be run by its marker."""
    for item in items:
        folder = item.path.relative_to(_HERE).parts[0]
        if folder in {"engine", "packaging"}:
            item.add_marker(folder)
        if folder == "engine" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_ENGINE_SECONDS))


def pytest_collection_finish() -> None:
    """Let no collection look again through all that was imported, as engines do: it stops every
    thread, for 0.15 s where the processor is free, and loads that run meanwhile miss short
    deadlines."""
    gc.collect()
    gc.freeze()
