"""Blocks leave a real vLLM for every tier, and come back: also after a restart and a SIGKILL."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.engine.actions import EngineOptions, Generate, Kill, ReadMetrics, ResetPrefixCache, Sleep
from tests.engine.harness import EngineFailedError, EngineRunner, ServerRunner
from tests.engine.tiers import (
    cpu,
    deployment,
    hint,
    lmdb,
    loaded_bytes,
    nvme,
    options,
    prompt,
    same_answers,
    transfer_config,
)

PROMPTS = (prompt(1), prompt(2, 700))
CACHED = [992, 672]
"""Prompt tokens in whole blocks of 32, the last token always computed."""

WRITE_BEHIND = Sleep(2.0)


def ask(*tiers: str) -> Generate:
    return Generate(
        PROMPTS,
        max_tokens=24,
        logprobs=True,
        kv_transfer_params=hint(*tiers) if tiers else None,
    )


def test_blocks_come_back_from_every_tier_and_after_a_restart(
    run_engine: EngineRunner, tiny_model: Path, tmp_path: Path
) -> None:
    config = deployment(tmp_path, [cpu(), nvme(tmp_path), lmdb(tmp_path)])
    first = run_engine(
        options(tiny_model, config, multiprocess=True),
        ask(),
        WRITE_BEHIND,
        *(ResetPrefixCache(), ReadMetrics(), ask("host"), ReadMetrics()),
        *(ResetPrefixCache(), ask("ssd"), ReadMetrics()),
        *(ResetPrefixCache(), ask("pins"), ReadMetrics()),
    )
    cold, *loaded = first.generations
    print("cached tokens:", [[o.num_cached_tokens for o in outputs] for outputs in loaded])
    for outputs in loaded:
        assert [o.num_cached_tokens for o in outputs] == CACHED
        assert same_answers(outputs, cold)
        for one, other in zip(outputs, cold, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    moved = {
        tier: loaded_bytes(first.readings[i], first.readings[i + 1], tier)
        for i, tier in enumerate(("cpu", "ssd", "pins"))
    }
    print("bytes loaded:", moved)
    assert len(set(moved.values())) == 1
    assert moved["cpu"] > 1_000_000
    # A load from the host tier leaves the others alone.
    assert loaded_bytes(first.readings[0], first.readings[1], "ssd") == 0
    assert loaded_bytes(first.readings[0], first.readings[1], "pins") == 0

    second = run_engine(
        options(tiny_model, config),
        *(ReadMetrics(), ask("pins"), ReadMetrics()),
        *(ResetPrefixCache(), ask("ssd"), ReadMetrics()),
    )
    for outputs in second.generations:
        assert [o.num_cached_tokens for o in outputs] == CACHED
        assert same_answers(outputs, cold)
    assert loaded_bytes(second.readings[0], second.readings[1], "pins") == moved["pins"]
    assert loaded_bytes(second.readings[1], second.readings[2], "ssd") == moved["ssd"]


@pytest.mark.parametrize("multiprocess", [True, False])
def test_blocks_stored_before_an_idle_time_survive_sigkill(
    run_engine: EngineRunner, tiny_model: Path, tmp_path: Path, multiprocess: bool
) -> None:
    config = deployment(tmp_path, [nvme(tmp_path), lmdb(tmp_path)])
    killed = run_engine(
        # One token: no engine step follows the store, so only the timer submits it.
        options(tiny_model, config, multiprocess=multiprocess),
        Generate(PROMPTS, max_tokens=1),
        WRITE_BEHIND,
        Kill(),
    )
    assert killed.killed
    run = run_engine(
        options(tiny_model, config, multiprocess=multiprocess),
        *(ReadMetrics(), ask("ssd"), ReadMetrics(), ResetPrefixCache(), ask("pins")),
    )
    print("cached tokens after SIGKILL:", [o.num_cached_tokens for o in run.outputs])
    assert [o.num_cached_tokens for o in run.outputs] == CACHED + CACHED
    assert same_answers(*run.generations)
    assert [o.token_ids[0] for o in run.generations[0]] == [o.token_ids[0] for o in killed.outputs]
    assert loaded_bytes(run.readings[0], run.readings[1], "ssd") > 1_000_000


def test_several_kv_groups_and_engine_blocks_per_block(
    run_engine: EngineRunner, tiny_hybrid_model: Path, tmp_path: Path
) -> None:
    config = deployment(tmp_path, [cpu(), nvme(tmp_path)], chunk=4)
    plain = run_engine(EngineOptions(tiny_hybrid_model), Generate(PROMPTS, max_tokens=24))
    run = run_engine(
        options(tiny_hybrid_model, config, multiprocess=True),
        ask(),
        WRITE_BEHIND,
        *(ResetPrefixCache(), ask("host"), ResetPrefixCache(), ask("ssd")),
    )
    print("cached tokens:", [o.num_cached_tokens for o in run.outputs])
    for outputs in run.generations:
        assert same_answers(outputs, plain.outputs)
    # Whole blocks of 4 engine blocks of 32 tokens.
    assert [o.num_cached_tokens for o in run.outputs[2:]] == [896, 640] * 2


def test_two_ranks_share_one_store(
    run_engine: EngineRunner, tiny_model: Path, tmp_path: Path
) -> None:
    config = deployment(tmp_path, [cpu(), nvme(tmp_path)])
    ranks = options(tiny_model, config, multiprocess=True, tensor_parallel_size=2)
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    first = run_engine(ranks, ask(), WRITE_BEHIND, ResetPrefixCache(), ask("ssd"), env=cores)
    second = run_engine(ranks, ask("ssd"), env=cores)
    cold, loaded = first.generations
    print("cached tokens:", [o.num_cached_tokens for o in (*loaded, *second.outputs)])
    for outputs in (loaded, second.outputs):
        assert [o.num_cached_tokens for o in outputs] == CACHED
        assert same_answers(outputs, cold)


def test_server_serves_from_the_tiers_and_shows_what_it_does(
    serve: ServerRunner, tiny_model: Path, tmp_path: Path
) -> None:
    config = deployment(tmp_path, [cpu(), nvme(tmp_path)])
    server_options = options(tiny_model, config)
    with serve(server_options, "--enable-prompt-tokens-details") as server:
        cold = server.complete(PROMPTS[0], max_tokens=16)
        assert server.metrics().total("vllm:tiered_kv_job_bytes_total", kind="store") > 1_000_000
    assert server.group.members() == []
    with serve(server_options, "--enable-prompt-tokens-details") as server:
        warm = server.complete(
            PROMPTS[0], max_tokens=16, kv_transfer_params=hint("ssd"), stream=False
        )
        metrics = server.metrics()
    print("usage:", warm["usage"])
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == CACHED[0]
    hop = metrics.total("vllm:tiered_kv_hop_bytes_total", tier="ssd", dst="cpu")
    assert hop > 1_000_000
    assert metrics.total("vllm:tiered_kv_tier_hits_total", tier="ssd") == CACHED[0] / 32
    assert metrics.total("vllm:tiered_kv_job_bytes_total", kind="load") == hop


def test_every_job_is_submitted_by_the_engine_neutral_connector(
    run_engine: EngineRunner, tiny_model: Path, tmp_path: Path
) -> None:
    config = deployment(tmp_path, [cpu()])
    # The transfer engine logs on behalf of whoever submits a job.
    logging_config = tmp_path / "logging.json"
    logging_config.write_text(
        json.dumps(
            {
                "version": 1,
                "formatters": {"place": {"format": "%(pathname)s: %(message)s"}},
                "handlers": {"err": {"class": "logging.StreamHandler", "formatter": "place"}},
                "loggers": {"tiered_kv.engine": {"handlers": ["err"], "level": "DEBUG"}},
            }
        )
    )
    run = run_engine(
        options(tiny_model, config),
        *(ask(), ResetPrefixCache(), ask()),
        env={"VLLM_LOGGING_CONFIG_PATH": str(logging_config)},
    )
    assert [o.num_cached_tokens for o in run.generations[1]] == CACHED
    submitted = re.findall(r"(\S+): (load|store) job \d+ submitted", run.log)
    print(f"{len(submitted)} jobs submitted")
    assert {kind for _, kind in submitted} == {"load", "store"}
    assert {file.partition("tiered_kv/")[2] for file, _ in submitted} == {"connector/worker.py"}


def test_a_load_that_would_end_requests_is_refused_at_start(
    run_engine: EngineRunner, tiny_model: Path, tmp_path: Path
) -> None:
    config = deployment(tmp_path, [cpu()])
    refused = EngineOptions(
        tiny_model, kv_transfer_config=transfer_config(config, kv_load_failure_policy="fail")
    )
    with pytest.raises(EngineFailedError, match="kv_load_failure_policy") as failure:
        run_engine(refused, ask())
    assert '"kv_load_failure_policy": "recompute"' in str(failure.value)
