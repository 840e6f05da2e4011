"""A short form of `python -m tests.faults.torture`, which nights and releases run at length."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.commands import COMMAND_SECONDS, found_by


@pytest.mark.faults
@pytest.mark.timeout(COMMAND_SECONDS)
def test_nothing_is_lost_when_processes_are_killed(tmp_path: Path) -> None:
    status, found = found_by("torture", "--rounds", "12", "--seed", "7", "--path", str(tmp_path))
    print({name: found[name] for name in ("rounds", "counted", "kills", "counts", "promised")})
    assert found["problems"] == []
    assert (found["wrong"], found["lost"]) == (0, 0)
    assert status == 0
    assert found["counted"] == 12
    assert sum(found["kills"].values()) >= 12
    assert min(found["counts"][name] for name in ("stored", "loaded", "evicted")) > 0
    assert min(found["promised"], found["verified"]) > 0
