"""A disk of 5 MB/s: nobody waits for it longer than computing takes, and it is used again soon
after it is fast again."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tests.benchmarks.serving.figures import Figure
from tests.benchmarks.serving.servers import Answer, Pair, ask, ask_alone, pair, prompt
from tests.disks import loop_disk, throttling

__all__ = ["run"]

SPEED = 5_000_000
REQUESTS, PROMPT, ANSWER = 50, 1000, 8
MORE_TOTAL = 1.10
MORE_EACH, MORE_EACH_SECONDS = 1.5, 0.2
BACK_WITHIN = 10.0


def run(directory: Path, parsed: argparse.Namespace) -> list[Figure]:
    """The same requests, one by one, on both servers; all blocks lie on the disk."""
    if not throttling():
        raise SystemExit("throttling a disk needs root and the blkio controller of control groups")
    with loop_disk(directory, 3072) as disk:
        tiers = [
            {"name": "ssd", "type": "nvme", "path": str(disk.folder / "kv"), "capacity": "2GiB"}
        ]
        prompts = [prompt(number, PROMPT) for number in range(1, REQUESTS + 1)]
        with pair(directory, tiers) as servers:
            for tokens in prompts:
                ask(servers.tiered, tokens, 1)
            servers.tiered.settle()
            fast = _both(servers, prompts[:5])
            disk.limit(SPEED)
            slow = _both(servers, prompts)
            before = servers.tiered.metrics()
            disk.limit(0)
            back = _until_used(servers, prompts)
            cut = before.total("vllm:tiered_kv_tier_state", tier="ssd")
    computed = sum(plain.seconds for plain, _ in slow)
    total = sum(tiered.seconds for _, tiered in slow)
    excess = max(_above(tiered, plain) for plain, tiered in slow)
    noise = max(_above(plain, tiered) for plain, tiered in slow)
    return [
        Figure("fast disk: tokens found, of 5 requests", _found(fast), at_least=5 * 900),
        Figure("fast disk: time with tiers over that without", _share(fast)),
        Figure("slow disk: tokens found", _found(slow)),
        Figure("slow disk: time of all, without tiers", computed, "s"),
        Figure(
            "slow disk: time with tiers over that without", total / computed, at_most=MORE_TOTAL
        ),
        Figure("noise: a request without tiers above 1.5 x that with + 0.2 s", noise, "s"),
        Figure(
            "slow disk: a request with tiers above 1.5 x that without + 0.2 s",
            excess,
            "s",
            at_most=max(0.0, noise),
        ),
        Figure("states reported", cut),
        Figure("fast again: until the tier is in use", back, "s", at_most=BACK_WITHIN),
    ]


def _both(servers: Pair, prompts: list[list[int]]) -> list[tuple[Answer, Answer]]:
    answers: list[tuple[Answer, Answer]] = []
    for tokens in prompts:
        for each in (servers.plain, servers.tiered):
            each.reset_prefix_cache()
        plain, tiered = (
            ask_alone(each, tokens, ANSWER) for each in (servers.plain, servers.tiered)
        )
        answers.append((plain, tiered))
        print(
            f"{len(answers)}: {plain.seconds:.2f} s, with tiers {tiered.seconds:.2f} s, "
            f"{tiered.cached_tokens} tokens found",
            flush=True,
        )
    return answers


def _above(one: Answer, other: Answer) -> float:
    """Seconds by which it took longer than it may, measured by the other."""
    return one.seconds - MORE_EACH * other.seconds - MORE_EACH_SECONDS


def _found(answers: list[tuple[Answer, Answer]]) -> int:
    return sum(tiered.cached_tokens for _, tiered in answers)


def _share(answers: list[tuple[Answer, Answer]]) -> float:
    return sum(t.seconds for _, t in answers) / sum(p.seconds for p, _ in answers)


def _until_used(servers: Pair, prompts: list[list[int]]) -> float:
    began = time.perf_counter()
    for tokens in prompts * 4:
        servers.tiered.reset_prefix_cache()
        if ask(servers.tiered, tokens, 1).cached_tokens > PROMPT // 2:
            break
    return time.perf_counter() - began
