"""A load does not wait behind stores, and the slowest tier holds nobody else's places."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.loading import KINDS, Kind
from tests.faults.writing import LENGTH, WriteBench
from tiered_kv.engine.pace import CALL_SECONDS, UNMEASURED_BYTES
from tiered_kv.testing.conformance.blocks import keys

RATE = 5e6
"""Bytes per second of a tier that is throttled."""
STORES = range(1_000)
OURS = range(2_000, 2_004)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_f15_a_load_passes_a_thousand_queued_stores(kind: Kind, tmp_path: Path) -> None:
    """Shown by the order in which the medium is used: of the stores, only the call that was under
    way comes before the load's read."""
    with WriteBench({"ssd": kind}, tmp_path) as bench:
        medium = bench.stores["ssd"].medium
        bench.put("ssd", OURS)
        medium.log.clear()
        medium.sizes.clear()
        medium.most_queued = 0
        medium.rate = RATE
        assert bench.store(STORES, "ssd").ok
        medium.wait_for("write ends", 2)
        medium.hold()
        medium.wait_for("write begins", 3)
        medium.note("load submitted")
        load = bench.begin_load("ssd", OURS)
        medium.wait_in_line(2)  # a write that is held, and the read
        waiting = bench.tier("ssd").write_behind_blocks
        medium.go_on()
        bench.check_loaded(bench.result(load), OURS)
        log = medium.log[medium.log.index("load submitted") :]
        before = log[: log.index("read begins")]
        print(
            f"{kind.name}: {waiting} blocks waited; before the read {before.count('write begins')} "
            f"writes began and {before.count('write ends')} ended; writes of {medium.sizes} bytes, "
            f"at most {medium.most_queued} on their way"
        )
        assert waiting > 900
        assert before.count("write begins") == 0
        assert before.count("write ends") == 1
        # What is on its way is written in a quarter of a second, at the rate that is measured.
        assert medium.most_queued <= max(RATE * CALL_SECONDS, UNMEASURED_BYTES)
        assert max(medium.sizes) > LENGTH


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.name)
def test_f15_no_write_begins_while_a_load_goes_on(kind: Kind, tmp_path: Path) -> None:
    numbers = range(2_000, 2_100)
    with WriteBench({"ssd": kind}, tmp_path, group_blocks=4) as bench:
        medium = bench.stores["ssd"].medium
        bench.put("ssd", numbers)
        medium.rate = RATE * 2
        medium.log.clear()
        assert bench.store(STORES, "ssd").ok
        medium.wait_for("write ends", 2)
        medium.hold()
        medium.wait_for("write begins", 3)
        load = bench.begin_load("ssd", numbers)
        medium.wait_in_line(2)
        medium.rate = None
        medium.go_on()
        bench.check_loaded(bench.result(load), numbers)
        log = [*medium.log]
        reads = [i for i, entry in enumerate(log) if entry.startswith("read")]
        during = log[reads[0] : reads[-1] + 1]
        waiting = bench.tier("ssd").write_behind_blocks
        print(f"{kind.name}: {log.count('read ends')} reads, {waiting} blocks wait: {during[:6]}")
        assert log.count("read ends") == 25
        assert waiting > 0
        assert during.count("write begins") == 0
        medium.wait_for("write begins", 4)  # they go on afterwards


@pytest.mark.parametrize("slow", ["nvme", "lmdb"])
def test_f15_the_slowest_tier_holds_nobody_elses_slots(slow: str, tmp_path: Path) -> None:
    kinds = {kind.name: kind for kind in KINDS[:2]}
    fast = "lmdb" if slow == "nvme" else "nvme"
    with WriteBench(kinds, tmp_path, slots=64, share=0.25) as bench:
        bench.stores[slow].medium.hold()
        stored = 0
        for start in range(0, 160, 8):
            assert bench.store(range(start, start + 8), slow, fast, generation=1 + start // 64).ok
            stored += 8
            bench.wait_written(fast)
        there = sum(bench.stores[fast].contains(keys(range(160))))
        held = bench.tier(slow).write_behind_blocks
        print(
            f"{slow} stands still with {held} blocks; {there} of {stored} are in {fast}; dropped "
            f"{dict(bench.dropped(slow))} and {dict(bench.dropped(fast))}"
        )
        assert there == stored
        assert not bench.dropped(fast)
        assert bench.dropped(slow)["share"] > 0
        assert held <= 16
