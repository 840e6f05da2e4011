"""Throughput of a server with tiers beside one without, where prompts share prefixes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.benchmarks.serving.servers import ask, ask_together, prompt, server
from tests.engine.harness import Server
from tiered_kv.cli.progress import Progress

__all__ = ["CLIENTS", "Throughput", "measure"]

CLIENTS = (1, 4, 16)
PREFIX, OWN, ANSWER = 1024, 1024, 16
"""Tokens of a prompt's shared half, of its own half, and of the answer."""
PREFIXES = 16
CACHE_BLOCKS = 1100
"""Of 32 tokens, in the engine's own cache: 16 requests at once fit, all shared prefixes and what
each request adds do not."""
REQUESTS = 32
"""Of a round, per server and number of clients: each prefix twice."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second, of prompts and answers together."""

    plain: Mapping[int, Sequence[float]]
    """By number of clients, of each round, without tiers."""
    tiered: Mapping[int, Sequence[float]]
    cached: Mapping[str, float]
    """Share of the prompts' tokens that were not computed, by server."""

    def ratio(self, clients: int) -> float:
        """Of the medians, with tiers over without."""
        return statistics.median(self.tiered[clients]) / statistics.median(self.plain[clients])


def measure(folder: Path, rounds: int, progress: Progress) -> Throughput:
    """Both servers answer the same prompts in turn. Their shared halves were asked for before, the
    other halves are new."""
    tiers = [
        {"name": "host", "type": "cpu", "capacity": "1GiB"},
        {"name": "ssd", "type": "nvme", "path": str(folder / "ssd"), "capacity": "2GiB"},
    ]
    shared = [prompt(number, PREFIX) for number in range(1, PREFIXES + 1)]
    flags = ("--num-gpu-blocks-override", str(CACHE_BLOCKS))
    speeds: dict[str, dict[int, list[float]]] = {
        name: {clients: [] for clients in CLIENTS} for name in ("plain", "tiered")
    }
    hits = dict.fromkeys(speeds, 0)
    asked_tokens = 0
    fresh = PREFIXES + 1
    progress.stage("starting servers")
    config = folder / "throughput.yaml"
    config.write_text(yaml.safe_dump({"tiers": tiers}), encoding="utf-8")
    with (
        server(folder / "plain", None, *flags) as plain,
        server(folder / "tiered", config, *flags) as tiered,
    ):
        both: dict[str, Server] = {"plain": plain, "tiered": tiered}
        for each in both.values():
            ask(each, prompt(0, 500), 4)  # what an engine does only once
            ask_together(each, shared, 1, 4)
        tiered.settle()
        for number in range(rounds):
            for clients in CLIENTS:
                prompts = [shared[i % PREFIXES] + prompt(fresh + i, OWN) for i in range(REQUESTS)]
                fresh += REQUESTS
                asked_tokens += REQUESTS * (PREFIX + OWN)
                order = list(both) if number % 2 == 0 else list(both)[::-1]
                for name in order:
                    began = time.perf_counter()
                    answers = ask_together(both[name], prompts, ANSWER, clients)
                    seconds = time.perf_counter() - began
                    speeds[name][clients].append(sum(a.tokens for a in answers) / seconds)
                    hits[name] += sum(a.cached_tokens for a in answers)
                    speed = speeds[name][clients][-1]
                    progress.stage(f"{clients} clients, {name}: {speed:.0f} tokens/s")
    cached = {name: count / asked_tokens for name, count in hits.items()}
    return Throughput(speeds["plain"], speeds["tiered"], cached)
