"""A third party's tier carries blocks on a real vLLM, by its own handler and through the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.actions import Generate, ReadMetrics, ResetPrefixCache, Sleep
from tests.engine.harness import EngineRunner
from tests.engine.tiers import cpu, deployment, hint, options, prompt, same_answers
from tests.third_party import wheel

pytestmark = pytest.mark.engine

PROMPTS = tuple(prompt(seed) for seed in range(2))
BLOCKS = 31
"""Whole blocks of 32 tokens in a prompt that can be loaded."""


def test_blocks_go_to_a_third_partys_tier_and_come_back_after_a_restart(
    run_engine: EngineRunner, tiny_model: Path, tmp_path: Path
) -> None:
    rows = {"name": "rows", "type": "sqlite", "path": str(tmp_path / "rows"), "capacity": "256MiB"}
    site = wheel.installed(tmp_path / "third-party")
    limits = {"load_deadline": "20s"}  # whether a load is quick is no matter here
    config = deployment(tmp_path, [cpu(), rows], limits=limits)
    load = Generate(PROMPTS, max_tokens=16, kv_transfer_params=hint("rows"))
    first = run_engine(
        options(tiny_model, config),
        *(Generate(PROMPTS, max_tokens=16), Sleep(2.0), ResetPrefixCache(), load),
        pythonpath=(site,),
    )
    cold, loaded = first.generations
    staged = deployment(tmp_path, [cpu(), rows | {"direct": False}], limits=limits)
    again = run_engine(
        options(tiny_model, staged, multiprocess=True),
        *(load, ReadMetrics()),
        pythonpath=(site,),
    )
    name = "vllm:tiered_kv_hop_bytes"
    stored = first.metrics.total(name, src="cpu", dst="sqlite", tier="rows")
    direct = first.metrics.total(name, src="sqlite", dst="gpu", tier="rows")
    # Once both ways are measured, the faster one is taken.
    beside = first.metrics.total(name, src="sqlite", dst="cpu", tier="rows")
    through_host = again.metrics.total(name, src="sqlite", dst="cpu", tier="rows")
    print(
        f"bytes stored {stored:.0f}, loaded {direct:.0f} directly and {beside:.0f} "
        f"beside, {through_host:.0f} by way of the host alone"
    )
    assert stored > 0
    assert direct > 0
    assert through_host == direct + beside
    assert same_answers(loaded, cold)
    assert same_answers(again.outputs, cold)
    for outputs in (loaded, again.outputs):
        assert [o.num_cached_tokens for o in outputs] == [32 * BLOCKS] * len(PROMPTS)
