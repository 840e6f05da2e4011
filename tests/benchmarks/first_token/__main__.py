"""The command; see the package."""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.benchmarks.first_token import picture, starts, throughput, tokens
from tests.benchmarks.goal import goal_of
from tests.benchmarks.harness import workspace, write_figures
from tiered_kv.cli.progress import Progress
from tiered_kv.testing.models import smollm2

PARTS = ("tokens", "throughput", "start")


def main() -> int:
    """Measure the parts that were asked for; 1 where a floor was not reached."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.first_token",
        description="Time to first token, throughput and start of a real vLLM with tiers.",
    )
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--path", type=Path, help="directory on the disk (default: temporary)")
    parser.add_argument("--rounds", type=int, default=6, help="of `tokens` (6)")
    parser.add_argument("--few", type=int, default=3, help="rounds of the others (3)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw them")
    parsed = parser.parse_args()
    if parsed.plot and (missing := picture.missing_matplotlib()):
        parser.error(missing)
    parts = parsed.part or PARTS
    timed: tokens.Tokens | None = None
    rates: throughput.Throughput | None = None
    begun: starts.Starts | None = None
    with Progress() as progress, workspace(parsed.path) as folder:
        model = smollm2(progress=progress.stage)
        if "tokens" in parts:
            timed = tokens.measure(_made(folder / "tokens"), model, parsed.rounds, progress)
            show_tokens(timed)
        if "throughput" in parts:
            rates = throughput.measure(_made(folder / "throughput"), parsed.few, progress)
            show_throughput(rates)
        if "start" in parts:
            begun = starts.measure(_made(folder / "start"), model, parsed.few, progress)
            show_starts(begun)
    figures = [figure for part in (timed, begun) if part is not None for figure in part.figures()]
    if parsed.json:
        results: dict[str, Any] = {
            name: asdict(part)
            for name, part in (("tokens", timed), ("throughput", rates), ("start", begun))
            if part is not None
        }
        write_figures(parsed.json, "first_token", figures, **results)
    if parsed.plot:
        picture.draw(parsed.plot, timed, rates, begun)
    missed = False
    for figure in figures:
        goal = goal_of(str(figure["row"]))
        assert goal is not None  # all of them have one
        value = float(str(figure["value"]))
        met = "met" if goal.met(value) else "not met"
        print(f"{figure['row']}: {value:.2f}, goal {goal}: {met}, floor {goal.floor:g}")
        missed |= not goal.kept(value)
    return int(missed)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def show_tokens(timed: tokens.Tokens) -> None:
    """The README's table."""
    shortest, longest = min(timed.prompt_tokens), max(timed.prompt_tokens)
    computed = timed.median(tokens.COMPUTED)
    print(f"\nPrompts of {shortest} to {longest} tokens, medians\n")
    print("| KV of the prompt | first token after | rounds, fastest to slowest |\n|---|---|---|")
    for way, words in tokens.WAYS.items():
        seconds = timed.seconds[way]
        times = "" if way == tokens.COMPUTED else f" ({computed / timed.median(way):.0f} times)"
        spread = f"{len(seconds)}, {min(seconds):.3f} to {max(seconds):.3f} s"
        print(f"| {words} | {timed.median(way):.3f} s{times} | {spread} |")
    print(f"\n{timed.equal} of {timed.compared} answers are those of vLLM alone", flush=True)


def show_throughput(rates: throughput.Throughput) -> None:
    """A table."""
    print("\nThroughput, half of each prompt shared, tokens/s, medians\n")
    print("| clients | vLLM | with tiers | ratio |\n|---|---|---|---|")
    for clients in throughput.CLIENTS:
        plain, tiered = (statistics.median(r[clients]) for r in (rates.plain, rates.tiered))
        print(f"| {clients} | {plain:.0f} | {tiered:.0f} | {rates.ratio(clients):.2f} |")
    shares = ", ".join(f"{name} {share:.2f}" for name, share in rates.cached.items())
    print(f"\nshare of the prompts' tokens that was not computed: {shares}", flush=True)


def show_starts(begun: starts.Starts) -> None:
    """A table."""
    print("\nStart of the process to its first answer, medians\n\n| tiers | seconds |\n|---|---|")
    for name, seconds in begun.seconds.items():
        print(f"| {name} | {statistics.median(seconds):.2f} |")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
