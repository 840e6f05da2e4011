"""vLLM without us, and the harness: the ground that everything else stands on."""

from __future__ import annotations

from tests.engine.actions import EngineRun
from tests.engine.tiers import cached


def test_tiny_model_answers_alike_however_it_is_asked(last: EngineRun) -> None:
    cold = last.answers["stock"]
    tokens = [output.token_ids for output in cold]
    assert all(len(set(ids)) > 8 for ids in tokens), "greedy answers vary"
    for name in ("own cache", "after reset"):
        assert [output.token_ids for output in last.answers[name]] == tokens
    assert cached(cold) == [0, 0]
    # The last prompt token is always computed, and only whole blocks of 32 tokens are cached.
    assert cached(last.answers["own cache"]) == [192, 320]
    assert cached(last.answers["after reset"]) == [0, 0]
    outputs = [o for name in ("stock", "own cache", "after reset") for o in last.answers[name]]
    assert {output.finish_reason for output in outputs} == {"length"}
    assert all(output.first_token_latency > 0 for output in outputs)
    assert all(len(output.logprobs) == 24 for output in outputs)
    assert last.at["own cache"].total("vllm:prefix_cache_hits") == 192 + 320


def test_killed_engine_keeps_the_answers_before(separate: EngineRun) -> None:
    assert separate.killed
    assert separate.left_behind, "the engine's processes share memory"
    assert not [path for path in separate.left_behind if path.exists()]
    assert [len(output.token_ids) for output in separate.answers["last"]] == [1, 1]
    assert separate.generations[-1] == separate.answers["last"]


def test_smollm2_knows_a_capital(last: EngineRun) -> None:
    [output] = last.answers["capital"]
    assert "Paris" in output.text
    assert output.finish_reason == "stop"
