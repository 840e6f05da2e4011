"""gpu <-> nvme with real KvikIO's device path, under a fake CUDA driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.kvikio_process import run_scenario

MODULE = "tests.stores.kvikio_direct"


@pytest.mark.parametrize(
    "name", ["sizes", "engines", "parts", "joined", "crowded", "through_the_engine"]
)
def test_blocks_go_directly(name: str, tmp_path: Path) -> None:
    result = run_scenario(MODULE, name, tmp_path)
    copies = result["device copies"]
    assert isinstance(copies, int)
    assert copies > 0


@pytest.mark.faults
@pytest.mark.parametrize(
    "name",
    [
        *("rotten", "given_up", "hung", "closing", "failing", "cut_off", "changed", "held"),
        "fails_over",
    ],
)
def test_a_fault_costs_at_most_a_miss(name: str, tmp_path: Path) -> None:
    result = run_scenario(MODULE, name, tmp_path)
    copies = result["device copies"]
    assert isinstance(copies, int)
    assert copies > 0


def test_a_striped_tier_goes_directly_too(tmp_path: Path) -> None:
    result = run_scenario("tests.stores.kvikio_striped", "striped", tmp_path)
    copies = result["device copies"]
    assert isinstance(copies, int)
    assert copies >= 12


def test_the_setting_decides(tmp_path: Path) -> None:
    run_scenario(MODULE, "settings_decide", tmp_path)


def test_each_way_is_measured_by_itself(tmp_path: Path) -> None:
    result = run_scenario("tests.stores.kvikio_bench", "bench", tmp_path)
    assert result["chains"] == 6
    copies = result["device copies"]
    assert isinstance(copies, int)
    assert copies > 0
