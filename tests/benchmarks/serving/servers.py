"""Two servers, one of them with tiers, that are asked the same."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.engine.actions import EngineOptions
from tests.engine.harness import Server, ServerRunner
from tests.engine.lives import PYTHONPATH
from tests.engine.tiers import HASH, options
from tiered_kv.testing.models import smollm2

__all__ = ["Answer", "Pair", "ask", "ask_alone", "ask_together", "pair", "prompt", "server"]

VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "FAULTY_STORE_BACKGROUND_READS": "1",
}
"""Both servers compute on the same two cores, so that the one with tiers has none fewer.
Tiers are measured by background reads, which the plug-in of the tests switches off otherwise."""

SPIN_SECONDS = 1.2


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client saw."""

    text: str
    seconds: float
    cached_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Pair:
    """The two servers."""

    plain: Server
    tiered: Server


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that share no block with those of other seeds."""
    return [(7919 * i + 104_729 * seed + i * i * (seed + 3)) % 40_000 + 100 for i in range(length)]


def _options(config: Path | None) -> EngineOptions:
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 4096}
    if config is None:
        return EngineOptions(smollm2(), extra=HASH, **settings)
    return options(smollm2(), config, **settings)


@contextmanager
def server(scratch: Path, config: Path | None, *flags: str) -> Iterator[Server]:
    """A server of SmolLM2 in bf16, with the tiers of `config` if one is given; further `flags` go
    to vLLM."""
    runner = ServerRunner(scratch, scratch / "cache")
    with runner(
        _options(config),
        "--enable-prompt-tokens-details",
        *flags,
        env=VARIABLES,
        pythonpath=PYTHONPATH,
    ) as running:
        yield running


@contextmanager
def pair(scratch: Path, tiers: Sequence[Mapping[str, Any]], **settings: Any) -> Iterator[Pair]:
    """Both, ready, with their first computations behind them."""
    config = scratch / "deployment.yaml"
    config.write_text(yaml.safe_dump({**settings, "tiers": list(tiers)}))
    with server(scratch / "plain", None) as plain, server(scratch / "tiered", config) as tiered:
        for each in (plain, tiered):
            ask(each, prompt(0, 500), 4)
        tiered.settle()
        yield Pair(plain, tiered)


def ask(asked: Server, tokens: Sequence[int], answer: int) -> Answer:
    """One greedy answer of so many tokens."""
    began = time.perf_counter()
    said = asked.complete(list(tokens), max_tokens=answer, ignore_eos=True)
    seconds = time.perf_counter() - began
    usage = said["usage"]
    details = usage["prompt_tokens_details"] or {}
    return Answer(
        said["choices"][0]["text"],
        seconds,
        details.get("cached_tokens") or 0,
        usage["prompt_tokens"] + usage["completion_tokens"],
    )


def ask_alone(asked: Server, tokens: Sequence[int], answer: int) -> Answer:
    """The same when the worker of the other server sleeps: for a second behind its last message it
    spins (vLLM's `SpinCondition`), and takes one of the two cores."""
    time.sleep(SPIN_SECONDS)
    return ask(asked, tokens, answer)


def ask_together(
    asked: Server, prompts: Sequence[Sequence[int]], answer: int, concurrency: int
) -> list[Answer]:
    """Answers in the order of the prompts, so many requests at once."""
    with ThreadPoolExecutor(concurrency) as clients:
        return list(clients.map(lambda tokens: ask(asked, tokens, answer), prompts))
