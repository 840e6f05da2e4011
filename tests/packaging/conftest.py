from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def source() -> Path:
    """The source tree; `tests/run` runs a copy of the tests and says where the tree is."""
    return Path(os.environ.get("TIERED_KV_SOURCE") or Path(__file__).parents[2])


@pytest.fixture(scope="session")
def distributions() -> Path:
    """The folder that holds the sdist and the wheel that were built from the tree."""
    folder = os.environ.get("TIERED_KV_DIST")
    if not folder:
        pytest.skip("`bash tests/run packaging` builds the distributions that this looks at")
    return Path(folder)


@pytest.fixture(scope="session")
def project(source: Path) -> dict[str, Any]:
    """The content of `pyproject.toml`."""
    return tomllib.loads((source / "pyproject.toml").read_text())
