"""What the author of sqlite-tier runs: `pytest conformance.py`, with the package installed."""

from __future__ import annotations

import pytest
from sqlite_case import SQLITE

from tiered_kv.testing.conformance.stores import StoreCase, StoreConformance


class TestSqliteStore(StoreConformance):
    @pytest.fixture
    def case(self) -> StoreCase:
        return SQLITE
