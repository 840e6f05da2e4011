"""A short form of `python -m tests.benchmarks.engine_calls`, which compares how long calls take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.engine_calls import CALLS, measure


@pytest.mark.faults
def test_every_call_of_an_engine_returns_while_its_tiers_hang(tmp_path: Path) -> None:
    lines, hung, failed = measure(tmp_path, 600)
    counts = {line.call: dict(line.counts) for line in lines}
    print("calls of the stores that hung:", hung, "loads that failed by that:", failed)
    print(counts)
    made = {call.partition(",")[0] for call in counts}
    assert made >= {f"{half}.{name}" for half, names in CALLS.items() for name in names}
    assert min(count for each in counts.values() for count in each.values()) > 0
    assert {"rank.start_kv_transfers, with loads", "rank.prepare_store_kv, with stores"} <= set(
        counts
    )
    assert hung > 0  # whether a load was among them, or a background read found out first
    # A store that hangs is let go at the end alone: no call of an engine has waited for one.
    assert max(line.slowest["tiers hang"] for line in lines) < 10.0
