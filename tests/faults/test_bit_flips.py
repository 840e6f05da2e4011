"""A short form of `python -m tests.faults.flips`, which nights and releases run at length."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.commands import COMMAND_SECONDS, found_by


@pytest.mark.faults
@pytest.mark.timeout(COMMAND_SECONDS)
def test_no_flipped_bit_is_served() -> None:
    status, found = found_by("flips", "--flips", "150", "--times", "changed", "--seed", "7")
    total: Counter[str] = Counter()
    for line in found["lines"]:
        total.update({name: value for name, value in line.items() if isinstance(value, int)})
        if line["place"] == "block bytes":
            assert line["found"] == line["flips"] > 0, line
    print(dict(total))
    assert found["problems"] == []
    assert status == 0
    assert total["flips"] == 150
    assert {line["tier"] for line in found["lines"]} == {"nvme", "lmdb", "lmdb_map"}
    assert sum(line["flips"] for line in found["lines"] if "heads" in line["place"]) >= 20
    assert min(total["right"], total["missed"], total["found"]) > 0
