"""A tier whose reads hang for ever: 50 requests with one prefix are done within one deadline and
the time that computing takes."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tests.benchmarks.serving.figures import Figure
from tests.benchmarks.serving.servers import ask, ask_together, pair, prompt
from tests.engine.control import write_plan
from tests.engine.tiers import faulty, plan_file
from tiered_kv.testing.faults import Effect, Fault, FaultPlan, Method

__all__ = ["run"]

REQUESTS, PREFIX, OWN, ANSWER = 50, 1000, 40, 8
DEADLINE = 2.0
SLACK = 1.25
"""For noise of this machine: two servers never compute equally long."""


def run(directory: Path, parsed: argparse.Namespace) -> list[Figure]:
    """All at once, on both servers."""
    shared = prompt(1, PREFIX)
    prompts = [shared + prompt(2 + number, OWN) for number in range(REQUESTS)]
    write_plan(plan_file(directory), {})
    limits = {"load_deadline": f"{DEADLINE:g}s"}
    with pair(directory, [faulty(directory)], limits=limits) as servers:
        ask(servers.tiered, shared, 1)
        servers.tiered.settle()
        for each in (servers.plain, servers.tiered):
            each.reset_prefix_cache()
        loaded = ask(servers.tiered, shared, 1)
        for each in (servers.plain, servers.tiered):
            each.reset_prefix_cache()
        hang = FaultPlan(faults=(Fault(method=Method.READ, effect=Effect.HANG),))
        write_plan(plan_file(directory), hang.model_dump(mode="json"))
        seconds: dict[str, float] = {}
        texts: dict[str, list[str]] = {}
        for name, each in (("plain", servers.plain), ("tiered", servers.tiered)):
            began = time.perf_counter()
            answers = ask_together(each, prompts, ANSWER, REQUESTS)
            seconds[name] = time.perf_counter() - began
            texts[name] = [answer.text for answer in answers]
        log = servers.tiered.group.log()
    equal = sum(a == b for a, b in zip(texts["plain"], texts["tiered"], strict=True))
    return [
        Figure("tokens found before it hung", loaded.cached_tokens, at_least=900),
        Figure("reads that hung", log.count("faulty store: hang"), at_least=1),
        Figure("all requests, without tiers", seconds["plain"], "s"),
        Figure(
            "all requests, with the tier that hangs",
            seconds["tiered"],
            "s",
            at_most=DEADLINE + SLACK * seconds["plain"],
        ),
        Figure("equal answers (batches differ, so bf16 may)", equal),
    ]
