"""A short form of `python -m tests.faults.soak`, which nights and releases run at length."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.commands import COMMAND_SECONDS, found_by


@pytest.mark.faults
@pytest.mark.timeout(COMMAND_SECONDS)
def test_engines_live_among_tiers_in_which_everything_goes_wrong(tmp_path: Path) -> None:
    status, found = found_by("soak", "--minutes", "0.3", "--seed", "7", "--path", str(tmp_path))
    print({name: found[name] for name in ("lives", "counts", "hits", "by_kind")})
    assert found["problems"] == []
    assert (found["wrong_bytes"], found["exceptions"], found["leaks"]) == (0, 0, 0)
    assert status == 0
    assert found["counts"]["completed_loads"] >= 16
    assert found["counts"]["completed_stores"] >= 16
    assert found["counts"]["preemptions_in_loads"] > 0
    assert found["counts"]["checked_blocks"] > 10_000
    kinds = {"slow", "hang", "error", "no space", "corruption", "removal"}
    assert {kind for kind, hits in found["hits"].items() if hits} == kinds
