"""The process of an offline engine; `tiered_kv.vllm.engine_process` starts it and talks to it.

Requests come on stdin, answers go to stdout, one JSON value a line. Whatever else is printed, here
or in vLLM's own processes, goes to stderr. The process ends when it is told to, and when its stdin
is closed.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from prometheus_client import REGISTRY
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

from tiered_kv.errors import RefuseToStart, TieredKVError
from tiered_kv.stats import METRICS, GaugeValue, MetricKind, Series, StatsSnapshot
from tiered_kv.vllm.engine_process import Generated, PromptLimits, Warmth
from tiered_kv.vllm.inside import bare_request, chat_tokens, scheduler_connector

__all__ = ["OfflineEngine", "main"]

METRIC_PREFIX = "vllm:tiered_kv_"

SHORT = tuple(range(8))
"""A prompt shorter than any block: nothing is stored or loaded for it."""

SETTLE_STEP_SECONDS = 0.05

IDLE_STEP_SECONDS = 0.001

ENGINE = {
    "enforce_eager": True,
    "disable_log_stats": False,  # times of requests and our own metrics need them
    "seed": 0,
}


class OfflineEngine:
    """Performs requests on a `vllm.LLM`, one after another."""

    def __init__(self) -> None:
        self._llm: LLM | None = None
        self._numbers = itertools.count()

    @property
    def llm(self) -> LLM:
        """The engine.

        Raises:
            RuntimeError: it was not opened.
        """
        if self._llm is None:
            raise RuntimeError("the engine is not open")
        return self._llm

    def open(self, arguments: Mapping[str, Any]) -> None:
        """Start the engine in place of one that runs, and let it do what it does only once."""
        self.end()
        self._llm = LLM(**(ENGINE | dict(arguments)))
        self.generate(SHORT, 4, None)

    def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of each text or conversation; as vLLM's server makes them of a request."""
        tokenizer = self.llm.get_tokenizer()
        return [
            list(tokenizer.encode(prompt))
            if isinstance(prompt, str)
            else chat_tokens(self.llm, **prompt)
            for prompt in prompts
        ]

    def limits(self) -> dict[str, int]:
        """What a prompt must keep to; see `PromptLimits`."""
        config = self.llm.llm_engine.vllm_config
        limits = PromptLimits(
            max_model_len=config.model_config.max_model_len,
            vocabulary=config.model_config.get_vocab_size(),
            block_tokens=scheduler_connector(self.llm).block_tokens,
        )
        return asdict(limits)

    def warmth(self, prompts: Sequence[Sequence[int]], seconds: float) -> list[dict[str, Any]]:
        """How much of each prompt lies in each store tier; see `EngineProcess.warmth`."""
        connector = scheduler_connector(self.llm)
        deadline = time.monotonic() + seconds
        while any(state != "ready" for state in connector.manager.states().values()):
            if time.monotonic() > deadline:
                states = connector.manager.states().items()
                said = ", ".join(f"{tier}: {state}" for tier, state in states if state != "ready")
                raise TieredKVError(
                    f"it is not known what the tiers hold ({said}) after {seconds:.0f} s"
                )
            time.sleep(IDLE_STEP_SECONDS)
        step = connector.block_tokens
        found: list[dict[str, Any]] = []
        for ids in prompts:
            request = bare_request(self.llm, f"warmth-{next(self._numbers)}", ids)
            held = connector.held(request)
            found.append(asdict(Warmth(len(ids) // step * step if step else 0, held)))
        return found

    def block_keys(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Under which keys the prompts' blocks lie; see `EngineProcess.block_keys`."""
        connector = scheduler_connector(self.llm)
        keys: dict[str, None] = {}
        for ids in prompts:
            request = bare_request(self.llm, f"keys-{next(self._numbers)}", ids)
            keys.update(dict.fromkeys(key.hex() for key in connector.block_keys(request)))
        return {"namespace": connector.manager.view().namespace, "keys": list(keys)}

    def generate(
        self, token_ids: Sequence[int], max_tokens: int, tiers: Sequence[str] | None
    ) -> dict[str, Any]:
        """Answer one prompt; see `EngineProcess.generate`."""
        [answer] = self.generate_all([{"token_ids": token_ids, "tiers": tiers}], max_tokens)
        return answer

    def generate_all(
        self, prompts: Sequence[Mapping[str, Any]], max_tokens: int
    ) -> list[dict[str, Any]]:
        """Answer several prompts side by side; see `EngineProcess.generate_all`."""
        numbers: list[str] = []
        for prompt in prompts:
            tiers = prompt["tiers"]
            hint = None if tiers is None else {"tiered_kv": {"tiers": list(tiers)}}
            params = SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens,
                ignore_eos=True,
                extra_args=None if hint is None else {"kv_transfer_params": hint},
            )
            number = str(next(self._numbers))
            tokens = TokensPrompt(prompt_token_ids=list(prompt["token_ids"]))
            self.llm.llm_engine.add_request(number, tokens, params)
            numbers.append(number)
        answers = self._answers(set(numbers))
        return [asdict(_generated(answers[number], max_tokens)) for number in numbers]

    def _answers(self, waiting: set[str]) -> dict[str, RequestOutput]:
        """As `LLM.generate`, but leave the interpreter to the transfers where a step did nothing:
        an engine inside this process would spin while a request waits for its blocks, as vLLM's
        engine process does not."""
        engine = self.llm.llm_engine
        answers: dict[str, RequestOutput] = {}
        while waiting:
            outputs = engine.step()
            for output in outputs:
                if isinstance(output, RequestOutput) and output.finished:
                    answers[output.request_id] = output
                    waiting.discard(output.request_id)
            if not outputs:
                time.sleep(IDLE_STEP_SECONDS)
        return answers

    def reset_prefix_cache(self) -> None:
        """Forget what the engine itself has cached."""
        if not self.llm.reset_prefix_cache(reset_connector=False):
            raise RuntimeError("the engine did not reset its prefix cache")

    def stats(self) -> dict[str, Any]:
        """The tiers' metrics, under the names that they have outside vLLM."""
        return snapshot().as_dict()

    def settle(self, seconds: float) -> dict[str, Any]:
        """Wait until nothing is left to be written.

        vLLM hands on statistics with engine steps only, so a short prompt is answered before each
        look. Nothing waits, twice in a row, with equal counters in between, is the end.
        """
        deadline = time.monotonic() + seconds
        before: StatsSnapshot | None = None
        while True:
            self.generate(SHORT, 2, None)
            now = snapshot()
            waiting = sum(tier.write_behind_blocks for tier in now.tiers().values())
            if before is not None and not waiting and now.hops() == before.hops():
                return now.as_dict()
            if time.monotonic() > deadline:
                raise TieredKVError(
                    f"{waiting} blocks still wait to be written to the tiers after "
                    f"{seconds:.0f} s; a tier is slow or full, see the log"
                )
            before = now
            time.sleep(SETTLE_STEP_SECONDS)

    def end(self) -> None:
        """Drain and let go, of what vLLM keeps in this process too."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()


def _generated(request: RequestOutput, max_tokens: int) -> Generated:
    [completion] = request.outputs
    if len(completion.token_ids) != max_tokens:
        raise RuntimeError(
            f"{len(completion.token_ids)} of {max_tokens} tokens came, finish reason "
            f"{completion.finish_reason!r}"
        )
    metrics: Any = request.metrics
    return Generated(
        token_ids=tuple(completion.token_ids),
        text=completion.text,
        prompt_tokens=len(request.prompt_token_ids or ()),
        cached_tokens=request.num_cached_tokens or 0,
        first_token_seconds=float(metrics.first_token_latency),
    )


def snapshot() -> StatsSnapshot:
    """This process's metrics of the tiers, under the names that they have outside vLLM.

    Read from the registry itself, since `LLM.get_metrics` cuts counters down to whole numbers.
    """
    now = time.time()
    counters: dict[Series, float] = {}
    gauges: dict[tuple[Series, str], GaugeValue] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            name = sample.name.removeprefix(METRIC_PREFIX)
            metric = METRICS.get(name)
            if name == sample.name or metric is None:
                continue
            series = name, tuple(sample.labels[label] for label in metric.labels)
            if metric.kind is MetricKind.COUNTER:
                counters[series] = counters.get(series, 0.0) + sample.value
            elif metric.kind is MetricKind.GAUGE:
                gauges[series, "engine"] = GaugeValue(sample.value, now)
    return StatsSnapshot(now, counters, gauges)


def serve(requests: TextIO, answers: TextIO) -> None:
    """Perform requests until `end`, the end of `requests`, or an engine that does not start."""
    engine = OfflineEngine()
    verbs: dict[str, Callable[..., Any]] = {
        "open": engine.open,
        "encode": engine.encode,
        "limits": engine.limits,
        "generate": engine.generate,
        "generate_all": engine.generate_all,
        "warmth": engine.warmth,
        "block_keys": engine.block_keys,
        "reset_prefix_cache": engine.reset_prefix_cache,
        "stats": engine.stats,
        "settle": engine.settle,
        "end": engine.end,
    }
    for line in requests:
        request = json.loads(line)
        do = request.pop("do")
        try:
            answer = {"ok": verbs[do](**request)}
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent reports it
            refused = isinstance(error, RefuseToStart)
            text = str(error) if isinstance(error, TieredKVError) else repr(error)
            answer = {"error": text, "refused": refused}
        print(json.dumps(answer), file=answers, flush=True)
        if do == "end" or (do == "open" and "error" in answer):
            return
    engine.end()


def main() -> None:
    """Serve the parent. The engine's own processes inherit neither its line nor its input."""
    requests = os.fdopen(os.dup(0), "r")
    answers = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    serve(requests, answers)


if __name__ == "__main__":  # vLLM may spawn processes, which import this module again
    main()
