"""A tier that hangs for ever, then the end: the processes are gone within the drain deadline and a
second."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tests.benchmarks.serving.figures import Figure
from tests.benchmarks.serving.servers import ask, prompt, server
from tests.engine.control import write_plan
from tests.engine.processes import ProcessGroup
from tests.engine.tiers import deployment, faulty, plan_file
from tiered_kv.testing.faults import Effect, Fault, FaultPlan, Method

__all__ = ["run"]

DRAIN = 3.0
ANY = (Method.READ, Method.WRITE, Method.STAT, Method.SCAN, Method.CHANGES, Method.CLOSE)


def run(directory: Path, parsed: argparse.Namespace) -> list[Figure]:
    """A server that is asked to end by SIGTERM while everything in its tier hangs."""
    write_plan(plan_file(directory), {})
    config = deployment(directory, [faulty(directory)], limits={"drain": f"{DRAIN:g}s"})
    with server(directory / "plain", None) as plain:
        ask(plain, prompt(1, 500), 1)
        alone = _ends(plain.group)
    with server(directory / "tiered", config) as tiered:
        ask(tiered, prompt(1, 500), 1)
        tiered.settle()
        hang = FaultPlan(faults=tuple(Fault(method=m, effect=Effect.HANG) for m in ANY))
        write_plan(plan_file(directory), hang.model_dump(mode="json"))
        ask(tiered, prompt(2, 500), 1)
        ended = _ends(tiered.group)
        hangs = tiered.group.log().count("faulty store: hang")
    return [
        Figure("calls that hung", hangs, at_least=1),
        Figure("SIGTERM until all processes are gone, without tiers", alone, "s"),
        Figure("the same, with a tier that hangs", ended, "s", at_most=alone + DRAIN + 1.0),
    ]


def _ends(group: ProcessGroup) -> float:
    began = time.perf_counter()
    group.terminate(60.0)
    while group.members() and time.perf_counter() - began < 60.0:
        time.sleep(0.02)
    return time.perf_counter() - began
