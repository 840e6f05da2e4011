"""A fault in a tier costs a recompute on a real vLLM, never an answer.

The faults come from a store plug-in that wraps the real nvme store.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.actions import (
    EngineOptions,
    Generate,
    Metrics,
    ReadMetrics,
    ResetPrefixCache,
    Sleep,
)
from tests.engine.harness import EngineRunner
from tests.engine.tiers import (
    PLUGINS,
    cpu,
    deployment,
    faulty,
    hint,
    loaded_bytes,
    options,
    prompt,
    same_answers,
)

PROMPTS = tuple(prompt(seed) for seed in range(3))
BLOCKS = 31
"""Whole blocks of 32 tokens in a prompt that can be loaded."""

PYTHONPATH = (PLUGINS / "faulty_store",)


def failures(metrics: Metrics, reason: str) -> float:
    return metrics.total("vllm:tiered_kv_hop_failures", tier="bad", reason=reason)


@pytest.mark.parametrize("failure", ["corrupt", "missing"])
def test_first_middle_and_last_block_fail(
    run_engine: EngineRunner, tiny_model: Path, tmp_path: Path, failure: str
) -> None:
    # One read call per load: each faulty one is followed by the load of the good prefix.
    reads = [[0], [BLOCKS // 2], [], [BLOCKS - 1], []]
    config = deployment(tmp_path, [faulty(tmp_path, failure=failure, reads=reads)])
    load = Generate(PROMPTS, max_tokens=24)
    run = run_engine(
        options(tiny_model, config, multiprocess=failure == "corrupt"),
        *(load, Sleep(2.0), ResetPrefixCache(), load, Sleep(2.0), ReadMetrics()),
        *(ResetPrefixCache(), load),
        pythonpath=PYTHONPATH,
    )
    cold, failed, again = run.generations
    print("cached tokens:", [[o.num_cached_tokens for o in outputs] for outputs in (failed, again)])
    print("failed blocks:", failures(run.readings[0], failure))
    assert failures(run.readings[0], failure) == 3
    assert same_answers(failed, cold)
    assert [o.num_cached_tokens for o in failed] == [0, 32 * (BLOCKS // 2), 32 * (BLOCKS - 1)]
    # What was lost was computed, stored again and is found again.
    assert same_answers(again, cold)
    assert [o.num_cached_tokens for o in again] == [32 * BLOCKS] * 3
    assert {o.finish_reason for o in run.outputs} == {"length"}


@pytest.mark.parametrize("failure", ["corrupt", "tier_error", "raise"])
def test_every_load_fails(
    run_engine: EngineRunner, tiny_model: Path, tmp_path: Path, failure: str
) -> None:
    config = deployment(tmp_path, [faulty(tmp_path, failure=failure, every_read=True)])
    load = Generate(PROMPTS, max_tokens=24)
    run = run_engine(
        options(tiny_model, config, multiprocess=failure == "raise"),
        *(load, Sleep(2.0), ResetPrefixCache(), load),
        *(Sleep(1.0), ResetPrefixCache(), load),
        pythonpath=PYTHONPATH,
    )
    cold, *failed = run.generations
    reason = "corrupt" if failure == "corrupt" else "tier_error"
    print("failed blocks:", failures(run.metrics, reason))
    assert failures(run.metrics, reason) >= BLOCKS
    for outputs in failed:
        assert same_answers(outputs, cold)
        assert [o.num_cached_tokens for o in outputs] == [0, 0, 0]
    assert {o.finish_reason for o in run.outputs} == {"length"}


def test_failed_stores_leave_no_trace(
    run_engine: EngineRunner, tiny_model: Path, tmp_path: Path
) -> None:
    config = deployment(tmp_path, [cpu(), faulty(tmp_path, failing_writes=1)])
    first, second = (Generate((p,), max_tokens=24) for p in PROMPTS[:2])
    only_bad = Generate(PROMPTS[:2], max_tokens=24, kv_transfer_params=hint("bad"))
    run = run_engine(
        options(tiny_model, config, multiprocess=True),
        *(first, Sleep(7.0), second, Sleep(2.0), ResetPrefixCache(), ReadMetrics()),
        *(only_bad, ReadMetrics()),
        pythonpath=PYTHONPATH,
    )
    plain = run_engine(EngineOptions(tiny_model), Generate(PROMPTS[:2], max_tokens=24))
    loaded = run.generations[2]
    print("cached tokens:", [o.num_cached_tokens for o in loaded])
    assert "write 0" in run.log
    assert same_answers(loaded, plain.outputs)
    assert [o.num_cached_tokens for o in loaded] == [0, 32 * BLOCKS]
    assert loaded_bytes(run.readings[0], run.readings[1], "bad") > 0
