"""What storing costs where nothing is ever found: throughput with tiers over that without."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from tests.benchmarks.serving.figures import Figure
from tests.benchmarks.serving.servers import ask_together, pair, prompt
from tests.engine.harness import Server

__all__ = ["run"]

PROMPT, ANSWER, CONCURRENCY = 1000, 64, 4
FLOOR = 0.97


def run(directory: Path, parsed: argparse.Namespace) -> list[Figure]:
    """Rounds of ABBA: both servers answer the same prompts, which no round before had, and which
    are divided among the rounds."""
    tiers = [
        {"name": "host", "type": "cpu", "capacity": "1GiB"},
        {"name": "ssd", "type": "nvme", "path": str(directory / "ssd"), "capacity": "16GiB"},
    ]
    ratios: list[float] = []
    speeds: dict[str, list[float]] = {"plain": [], "tiered": []}
    hits = 0
    each = max(1, parsed.requests // (2 * parsed.rounds))
    with pair(directory, tiers) as servers:
        before = servers.tiered.metrics()
        for number in range(parsed.rounds):
            batches = [
                [prompt(1 + (2 * number + half) * each + i, PROMPT) for i in range(each)]
                for half in (0, 1)
            ]
            found: dict[str, list[float]] = {"plain": [], "tiered": []}
            for name, half in (("plain", 0), ("tiered", 0), ("tiered", 1), ("plain", 1)):
                asked: Server = getattr(servers, name)
                speed, cached = _throughput(asked, batches[half])
                found[name].append(speed)
                hits += cached
            for name, both in found.items():
                speeds[name] += both
            ratios.append(statistics.mean(found["tiered"]) / statistics.mean(found["plain"]))
            print(f"round {number + 1}: {ratios[-1]:.4f}", flush=True)
        servers.tiered.settle()
        after = servers.tiered.metrics()

    def stored(tier: str) -> float:
        name = "vllm:tiered_kv_hop_bytes_total"
        labels = {"dst": tier} if tier == "cpu" else {"tier": tier, "src": "cpu"}
        return after.total(name, **labels) - before.total(name, **labels)

    return [
        Figure("throughput without tiers", statistics.median(speeds["plain"]), "tokens/s"),
        Figure("throughput with tiers", statistics.median(speeds["tiered"]), "tokens/s"),
        Figure("ratio, median of rounds", statistics.median(ratios), at_least=FLOOR),
        Figure("prompts", 2 * parsed.rounds * each),
        Figure("tokens found in any cache", hits, at_most=0),
        Figure("stored in the host tier", stored("cpu") / 2**30, "GiB", at_least=0.1),
        Figure("stored on the disk", stored("ssd") / 2**30, "GiB", at_least=0.1),
    ]


def _throughput(asked: Server, prompts: list[list[int]]) -> tuple[float, int]:
    began = time.perf_counter()
    answers = ask_together(asked, prompts, ANSWER, CONCURRENCY)
    seconds = time.perf_counter() - began
    return sum(a.tokens for a in answers) / seconds, sum(a.cached_tokens for a in answers)
