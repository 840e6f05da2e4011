"""vLLM without us: the ground that everything else stands on."""

from __future__ import annotations

from pathlib import Path

from tests.engine.actions import EngineOptions, Generate, Kill, ResetPrefixCache
from tests.engine.harness import EngineRunner, ServerRunner

_PROMPTS = tuple(
    tuple((17 * i + seed) % 256 + 3 for i in range(length)) for seed, length in ((1, 200), (2, 333))
)


def test_tiny_model_answers_alike_in_both_kinds_of_process(
    run_engine: EngineRunner, tiny_model: Path
) -> None:
    ask = Generate(_PROMPTS, max_tokens=24, logprobs=True)
    first = run_engine(EngineOptions(tiny_model), ask, ask, ResetPrefixCache(), ask)
    second = run_engine(EngineOptions(tiny_model, multiprocess=True), ask)

    cold, cached, after_reset = first.generations
    tokens = [output.token_ids for output in cold]
    assert all(len(set(ids)) > 8 for ids in tokens), "greedy answers vary"
    for generation in (cached, after_reset, *second.generations):
        assert [output.token_ids for output in generation] == tokens
    assert [output.num_cached_tokens for output in cold] == [0, 0]
    # The last prompt token is always computed, and only whole blocks of 32 tokens are cached.
    assert [output.num_cached_tokens for output in cached] == [192, 320]
    assert [output.num_cached_tokens for output in after_reset] == [0, 0]
    assert {output.finish_reason for output in first.outputs} == {"length"}
    assert all(output.first_token_latency > 0 for output in first.outputs)
    assert all(len(output.logprobs) == 24 for output in first.outputs)
    assert first.metrics.total("vllm:prefix_cache_hits") == 192 + 320


def test_killed_engine_keeps_the_answers_before(run_engine: EngineRunner, tiny_model: Path) -> None:
    run = run_engine(
        EngineOptions(tiny_model, multiprocess=True),
        Generate(_PROMPTS[:1], max_tokens=4),
        Kill(),
        Generate(_PROMPTS[1:], max_tokens=4),
    )
    assert run.killed
    assert run.left_behind, "the engine's processes share memory"
    assert not [path for path in run.left_behind if path.exists()]
    assert [len(output.token_ids) for output in run.outputs] == [4]


def test_server_answers_and_shows_metrics(serve: ServerRunner, tiny_model: Path) -> None:
    with serve(EngineOptions(tiny_model)) as server:
        answer = server.complete(_PROMPTS[0], max_tokens=8)
        assert answer["usage"]["completion_tokens"] == 8
        assert server.metrics().total("vllm:generation_tokens_total") == 8
    assert server.group.members() == []


def test_smollm2_knows_a_capital(run_engine: EngineRunner, smollm2_model: Path) -> None:
    question = "What is the capital of France? Answer in one short sentence."
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    run = run_engine(
        EngineOptions(smollm2_model, dtype="bfloat16"),
        Generate((prompt,), max_tokens=24, ignore_eos=False),
    )
    [output] = run.outputs
    assert "Paris" in output.text
    assert output.finish_reason == "stop"
