"""What all benchmarks share: interleaved rounds, medians, a table and JSON.

Variants alternate round by round, so that a change of the machine's load meets all of them, and a
ratio is always that of two medians of the same rounds. The first round is not counted: it writes
to space that was never written, and takes memory that was never touched.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.benchmarks.goal import Goal, goal_of
from tiered_kv.config import format_bytes
from tiered_kv.config.units import parse_bytes
from tiered_kv.values import BlockKey

__all__ = [
    "KIB",
    "MIB",
    "Batch",
    "Ratio",
    "Result",
    "Timing",
    "Took",
    "Variant",
    "arguments",
    "keys_of",
    "main",
    "measure",
    "processor_seconds",
    "ratio",
    "workspace",
    "write_figures",
]

KIB = 2**10
MIB = 2**20

LEAST_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks of one size that are moved together."""

    block_bytes: int
    blocks: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.block_bytes * self.blocks

    @property
    def label(self) -> str:
        """`512 x 64 KiB`."""
        return f"{self.blocks} x {self.size}"

    @property
    def size(self) -> str:
        """`64 KiB`, `4 MiB`: where goals are looked up."""
        if self.block_bytes % MIB:
            return f"{self.block_bytes // KIB} KiB"
        return f"{self.block_bytes // MIB} MiB"


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Took:
    """What a run took that was done by another process."""

    seconds: float
    processor_seconds: float


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to move the bytes of a batch."""

    name: str
    run: Callable[[], Took | None]
    """What is timed. It may tell itself what it took (a program that runs beside this one knows
    better when it began), else the time of the call counts."""
    prepare: Callable[[], None] = field(default=_nothing)
    """Called before each `run`, untimed."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One variant's rounds: medians, and the best and worst of them."""

    gib_per_second: float
    best_gib_per_second: float
    seconds: float
    fastest_seconds: float
    slowest_seconds: float
    processor_us_per_block: float
    """Processor time, user and system, of the process that did the work, all threads."""
    processor_seconds_per_gib: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better `ours` is than `theirs`, in the same rounds."""

    ours: str
    theirs: str
    value: float | None
    """Of the medians."""
    best: float | None = None
    """Of the fastest rounds."""
    floor: float | None = None
    missing: str = ""
    """Why there is no value."""
    row: str = ""
    """Which row of the table of goals it belongs to."""
    goal: Goal | None = None
    """Its floor is `floor`."""
    processor: bool = False
    """Whether it is one of processor time."""

    @property
    def met(self) -> bool | None:
        """Whether the floor is reached; None where there is no value or no floor."""
        if self.value is None or self.floor is None:
            return None
        return self.value >= self.floor


@dataclass(frozen=True, slots=True)
class Result:
    """All figures of one batch."""

    batch: Batch
    rounds: int
    timings: Mapping[str, Timing]
    ratios: Sequence[Ratio]
    notes: Mapping[str, str]


def measure(
    variants: Sequence[Variant], batch: Batch, rounds: int, *, settle: bool
) -> dict[str, Timing]:
    """Run all variants `rounds` times, in turn, after one round that does not count. `settle`: let
    the system write what is dirty before each run, so that nobody pays for what another one left.
    """
    gc.collect()
    gc.freeze()  # what was made so far is not looked through again, as in an engine
    walls: dict[str, list[float]] = {variant.name: [] for variant in variants}
    used: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for number in range(rounds + 1):
        for variant in variants:
            variant.prepare()
            if settle:
                os.sync()
            processor, wall = processor_seconds(), time.perf_counter()
            took = variant.run()
            if took is None:
                took = Took(time.perf_counter() - wall, processor_seconds() - processor)
            if number:
                walls[variant.name].append(took.seconds)
                used[variant.name].append(took.processor_seconds)
    gib = batch.total_bytes / 2**30
    return {
        name: Timing(
            gib / statistics.median(seconds),
            gib / min(seconds),
            statistics.median(seconds),
            min(seconds),
            max(seconds),
            statistics.median(used[name]) / batch.blocks * 1e6,
            statistics.median(used[name]) / gib,
        )
        for name, seconds in walls.items()
    }


def ratio(
    timings: Mapping[str, Timing],
    ours: str,
    theirs: str,
    *,
    floor: float | None = None,
    missing: str = "",
    row: str = "",
    at: str = "",
    processor: bool = False,
) -> Ratio:
    """The ratio of two variants; without a value where `missing` says why.

    Args:
        timings: of all variants.
        ours: the variant whose rate is divided.
        theirs: the one that it is divided by.
        floor: least value; that of the row's goal where there is one.
        missing: why there is no value.
        row: of the table of goals (`tests/benchmarks/goal.py`).
        at: the block size, as goals name it.
        processor: compare processor time, not time.
    """
    goal = goal_of(row, at) if row else None
    if goal is not None:
        floor = goal.floor
    if missing:
        return Ratio(ours, theirs, None, None, floor, missing, row, goal, processor)
    mine, other = timings[ours], timings[theirs]
    value = other.seconds / mine.seconds
    best: float | None = other.fastest_seconds / mine.fastest_seconds
    if processor:
        value, best = other.processor_us_per_block / mine.processor_us_per_block, None
    return Ratio(ours, theirs, value, best, floor, "", row, goal, processor)


def processor_seconds() -> float:
    """Processor time of this process so far, user and system, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def keys_of(batch: Batch) -> tuple[BlockKey, ...]:
    """Keys as they are used: 36 bytes that look random."""
    rng = os.urandom
    return tuple(BlockKey(rng(32) + number.to_bytes(4, "big")) for number in range(batch.blocks))


@contextmanager
def workspace(parent: Path | None) -> Iterator[Path]:
    """A directory on the disk that is measured; gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="tiered-kv-bench-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def arguments(description: str, batches: Sequence[Batch]) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--path", type=Path, help="directory on the disk (default: temporary)")
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS, help="rounds that count (7)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    sizes = ", ".join(format_bytes(batch.block_bytes) for batch in batches)
    parser.add_argument(
        "--block",
        type=parse_bytes,
        action="append",
        metavar="SIZE",
        help=f"only blocks of this size; may be given more than once (default: {sizes})",
    )
    return parser


def main(
    name: str,
    parsed: argparse.Namespace,
    batches: Sequence[Batch],
    run: Callable[[Batch, Path], Result],
) -> int:
    """Run the chosen batches, each in a directory of its own; print a table and write JSON.

    Returns:
        0, or 1 where a floor was not reached.
    """
    results: list[Result] = []
    for batch in batches:
        if parsed.block and batch.block_bytes not in parsed.block:
            continue
        with workspace(parsed.path) as directory:
            result = run(batch, directory)
        _print(result)
        results.append(result)
    if parsed.json:
        figures = [
            {"row": one.row, "at": result.batch.size, "value": one.value, "best": one.best}
            for result in results
            for one in result.ratios
            if one.row and one.value is not None
        ]
        write_figures(parsed.json, name, figures, results=[asdict(result) for result in results])
    missed = [one for result in results for one in result.ratios if one.met is False]
    return 1 if missed else 0


def write_figures(
    file: Path, name: str, figures: Sequence[Mapping[str, object]], **more: object
) -> None:
    """Write a benchmark's JSON. `figures` are those that have a row in the table of goals, each
    with `row`, `at` and `value`; `more` is whatever else was found."""
    document = {
        "benchmark": name,
        "command": sys.argv,
        "machine": {
            "processors": os.cpu_count(),
            "load": os.getloadavg(),
            "platform": platform.platform(),
        },
        "figures": list(figures),
        **more,
    }
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _print(result: Result) -> None:
    print(f"\n{result.batch.label}, {result.rounds} rounds: medians, and the best of each")
    print(
        f"  {'':32}{'GiB/s':>8}{'best':>8}{'ms':>9}{'fastest':>9}{'slowest':>9}"
        f"{'processor us/block':>20}{'s/GiB':>8}"
    )
    for name, timing in result.timings.items():
        print(
            f"  {name:32}{timing.gib_per_second:8.2f}{timing.best_gib_per_second:8.2f}"
            f"{timing.seconds * 1e3:9.1f}{timing.fastest_seconds * 1e3:9.1f}"
            f"{timing.slowest_seconds * 1e3:9.1f}{timing.processor_us_per_block:20.1f}"
            f"{timing.processor_seconds_per_gib:8.3f}"
        )
    for one in result.ratios:
        of = f"{one.ours} / {one.theirs}{', processor time' if one.processor else ''}"
        if one.value is None:
            print(f"  {of}: no ratio, {one.missing}")
            continue
        best = "" if one.best is None else f" (best {one.best:.2f})"
        verdict = ""
        if one.goal is not None:
            reached = "reached" if one.goal.met(one.value) else "not reached"
            verdict = f"   goal {one.goal}: {reached}"
        if one.floor is not None:
            verdict += f"   floor {one.floor:.2f}: {'reached' if one.met else 'NOT REACHED'}"
        print(f"  {of}: {one.value:.2f}{best}{verdict}")
    for name, note in result.notes.items():
        print(f"  {name}: {note}")
    sys.stdout.flush()
