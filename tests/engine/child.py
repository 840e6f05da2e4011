"""The engine's process: reads a scenario, runs it on vLLM, writes a line per result.

Run as a script: `python -P child.py SCENARIO RESULTS`. Results are written as they come, so that
those before a crash or a kill are kept.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from tests.disks import fill
from tests.engine.actions import (
    Action,
    EngineOptions,
    FillDisk,
    Generate,
    Inject,
    Kill,
    Metrics,
    Output,
    ReadMetrics,
    Remove,
    ResetPrefixCache,
    Restart,
    Sample,
    Settle,
    Sleep,
    StartRefused,
    decode_scenario,
    encode_event,
)
from tests.engine.control import SHORT, await_settled, write_plan
from tests.engine.processes import shared_memory


def build(options: EngineOptions) -> Any:
    from vllm import LLM

    arguments: dict[str, Any] = {
        "model": str(options.model),
        "dtype": options.dtype,
        "block_size": options.block_size,
        "max_model_len": options.max_model_len,
        "tensor_parallel_size": options.tensor_parallel_size,
        "seed": 0,
        "enforce_eager": True,
        "disable_log_stats": False,
    }
    if options.kv_transfer_config is not None:
        arguments["kv_transfer_config"] = dict(options.kv_transfer_config)
    return LLM(**(arguments | dict(options.extra)))


def perform(llm: Any, action: Action, results: TextIO) -> Any:
    """Do it; the engine that is there afterwards."""
    match action:
        case Generate():
            outputs = [asdict(output) for output in answer(llm, action)]
            print(encode_event("outputs", outputs, action.name), file=results, flush=True)
        case ResetPrefixCache():
            if not llm.reset_prefix_cache(reset_connector=action.connector):
                raise RuntimeError("the engine did not reset its prefix cache")
        case Sleep():
            time.sleep(action.seconds)
        case Settle():
            settle(llm)
        case ReadMetrics():
            tell_metrics(read_metrics(llm), results, action.name)
        case Inject():
            write_plan(Path(action.file), action.plan)
        case FillDisk():
            fill(Path(action.file))
        case Remove():
            path = Path(action.path)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        case Restart():
            end(llm, results)
            return build(action.options)
        case StartRefused():
            end(llm, results)
            return refused(action)
        case Kill():
            tell_shared_memory(results)
            os.killpg(os.getpgrp(), signal.SIGKILL)
    return llm


def refused(action: StartRefused) -> None:
    from tiered_kv.errors import RefuseToStart

    try:
        build(action.options)
    except RefuseToStart:
        if action.ends:
            raise
        traceback.print_exc()
    else:
        raise RuntimeError("the engine started")


def answer(llm: Any, action: Generate) -> list[Output]:
    from vllm import SamplingParams, TokensPrompt

    prompts = [
        prompt if isinstance(prompt, str) else TokensPrompt(prompt_token_ids=list(prompt))
        for prompt in action.prompts
    ]
    hint = action.kv_transfer_params
    params = SamplingParams(
        temperature=0.0,
        max_tokens=action.max_tokens,
        ignore_eos=action.ignore_eos,
        logprobs=0 if action.logprobs else None,
        extra_args={"kv_transfer_params": dict(hint)} if hint is not None else None,
    )
    batches = [prompts] if action.together else [[prompt] for prompt in prompts]
    return [
        to_output(request)
        for batch in batches
        for request in llm.generate(batch, params, use_tqdm=False)
    ]


def to_output(request: Any) -> Output:
    [completion] = request.outputs
    chosen = zip(completion.token_ids, completion.logprobs or (), strict=False)
    return Output(
        token_ids=tuple(completion.token_ids),
        text=completion.text,
        finish_reason=completion.finish_reason,
        num_cached_tokens=request.num_cached_tokens or 0,
        first_token_latency=request.metrics.first_token_latency if request.metrics else 0.0,
        logprobs=tuple(candidates[token].logprob for token, candidates in chosen),
    )


def read_metrics(llm: Any) -> Metrics:
    samples: list[Sample] = []
    for metric in llm.get_metrics():
        labels = dict(metric.labels)
        if hasattr(metric, "value"):
            samples.append(Sample(metric.name, metric.value, labels))
        elif hasattr(metric, "buckets"):
            samples.append(Sample(f"{metric.name}_count", metric.count, labels))
            samples.append(Sample(f"{metric.name}_sum", metric.sum, labels))
    return Metrics(tuple(samples))


def tell_metrics(metrics: Metrics, results: TextIO, name: str = "") -> None:
    samples = [asdict(sample) for sample in metrics.samples]
    print(encode_event("metrics", samples, name), file=results, flush=True)


def settle(llm: Any) -> None:
    def look() -> Metrics:
        answer(llm, SHORT)
        return read_metrics(llm)

    await_settled(look)


def tell_shared_memory(results: TextIO) -> None:
    paths = [str(path) for path in shared_memory(os.getpgrp())]
    print(encode_event("shared_memory", paths), file=results, flush=True)


def end(llm: Any, results: TextIO) -> None:
    """End the engine, and what an engine inside this process leaves to it."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    if llm is not None:
        tell_shared_memory(results)  # vLLM leaves some even when it ends by itself
        llm.llm_engine.engine_core.shutdown()
    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def main(scenario: Path, results: Path) -> None:
    options, actions = decode_scenario(scenario.read_text())
    with results.open("w") as file:
        llm = build(options)
        for action in actions:
            llm = perform(llm, action, file)
        tell_metrics(read_metrics(llm), file)
        tell_shared_memory(file)
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":  # the engine's own processes are spawned, and import this module again
    main(Path(sys.argv[1]), Path(sys.argv[2]))
