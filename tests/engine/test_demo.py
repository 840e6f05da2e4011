"""The demo as a user runs it: a real model, every tier, a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.commands import run_command


@pytest.mark.usefixtures("smollm2_model")
def test_demo_shows_every_tier_and_equal_outputs(engine_cache: Path, tmp_path: Path) -> None:
    done = run_command(
        *("demo", "--json"),
        scratch=tmp_path,
        cache=engine_cache,
        multiprocess=False,
        env={"TMPDIR": str(tmp_path)},
        timeout=850,
    )
    assert done.status == 0, done.stderr
    shown = json.loads(done.stdout)
    print({key: value for key, value in shown.items() if key != "runs"})

    assert shown["outputs_equal"] is True
    assert shown["shortcomings"] == []
    assert shown["answer_tokens"] == 48
    assert len(shown["prompt_tokens"]) == 6
    assert min(shown["prompt_tokens"]) >= 6000
    names = {"host", "ssd", "pins"}
    assert shown["ttft_seconds"].keys() == {"recompute", *names, "after_restart"}
    assert shown["tiers"].keys() == names

    # Every prompt came back from every tier whole, and its answer was compared in full.
    runs = shown["runs"]
    for process, name in ((1, "host"), (2, "ssd"), (2, "pins")):
        alone = [
            run
            for run in runs
            if run["process"] == process
            and [tier for tier, size in run["loaded_bytes"].items() if size] == [name]
            and run["compared_tokens"] == 48
        ]
        assert {run["prompt"] for run in alone} == {1, 2, 3, 4, 5, 6}
        assert all(run["equal"] and run["cached_tokens"] > 5888 for run in alone)
    # Budgets were so small that blocks left host memory, and they had reached the tiers below.
    assert shown["tiers"]["host"]["evicted_blocks"] > 0
    assert shown["hops"]["cpu->ssd"]["bytes"] > 100_000_000
    assert shown["hops"]["cpu->pins"]["bytes"] > 100_000_000
    assert sum(hop["failures"] for hop in shown["hops"].values()) == 0
    assert not list(tmp_path.glob("tiered-kv-demo-*"))
