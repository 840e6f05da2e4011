"""Processes that tests start are quick to start: they do not import pytest.

A process that `multiprocessing` spawns imports the main module of the one that starts it, so that
it finds what is defined there. Under pytest that is pytest, and it defines nothing for tests.

A plug-in of pytest.
"""

from __future__ import annotations

import sys

__all__ = ["pytest_configure"]


def pytest_configure() -> None:
    """Before any test starts a process."""
    main = sys.modules["__main__"]
    if getattr(main.__spec__, "name", "").startswith("pytest"):
        main.__spec__ = None
        main.__file__ = None
