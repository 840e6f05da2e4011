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
    "Variant",
    "arguments",
    "keys_of",
    "main",
    "measure",
    "ratio",
    "workspace",
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
        return f"{self.blocks} x {self.block_bytes // KIB} KiB"


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to move the bytes of a batch."""

    name: str
    run: Callable[[], float | None]
    """What is timed. It may answer with seconds of its own (a program that runs beside this one
    knows better when it began), else the time of the call counts."""
    prepare: Callable[[], None] = field(default=_nothing)
    """Called before each `run`, untimed."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians of one variant's rounds."""

    gib_per_second: float
    seconds: float
    fastest_seconds: float
    slowest_seconds: float
    processor_us_per_block: float
    """Processor time of this process, all threads; 0 where another process did the work."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster `ours` is than `theirs`, in the same rounds."""

    ours: str
    theirs: str
    value: float | None
    floor: float | None = None
    missing: str = ""
    """Why there is no value."""

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
            processor, wall = _processor(), time.perf_counter()
            told = variant.run()
            seconds = time.perf_counter() - wall if told is None else told
            if number:
                walls[variant.name].append(seconds)
                used[variant.name].append(_processor() - processor if told is None else 0.0)
    return {
        variant.name: Timing(
            batch.total_bytes / 2**30 / statistics.median(walls[variant.name]),
            statistics.median(walls[variant.name]),
            min(walls[variant.name]),
            max(walls[variant.name]),
            statistics.median(used[variant.name]) / batch.blocks * 1e6,
        )
        for variant in variants
    }


def ratio(
    timings: Mapping[str, Timing],
    ours: str,
    theirs: str,
    *,
    floor: float | None = None,
    missing: str = "",
) -> Ratio:
    """The ratio of two variants; without a value where `missing` says why."""
    if missing:
        return Ratio(ours, theirs, None, floor, missing)
    return Ratio(ours, theirs, timings[theirs].seconds / timings[ours].seconds, floor)


def _processor() -> float:
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
        document = {
            "benchmark": name,
            "command": sys.argv,
            "machine": {
                "processors": os.cpu_count(),
                "load": os.getloadavg(),
                "platform": platform.platform(),
            },
            "results": [asdict(result) for result in results],
        }
        parsed.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    missed = [one for result in results for one in result.ratios if one.met is False]
    return 1 if missed else 0


def _print(result: Result) -> None:
    print(f"\n{result.batch.label}, medians of {result.rounds} rounds")
    print(f"  {'':32}{'GiB/s':>8}{'ms':>9}{'fastest':>9}{'slowest':>9}{'us processor/block':>20}")
    for name, timing in result.timings.items():
        print(
            f"  {name:32}{timing.gib_per_second:8.2f}{timing.seconds * 1e3:9.1f}"
            f"{timing.fastest_seconds * 1e3:9.1f}{timing.slowest_seconds * 1e3:9.1f}"
            f"{timing.processor_us_per_block:20.1f}"
        )
    for one in result.ratios:
        if one.value is None:
            print(f"  {one.ours} / {one.theirs}: no ratio, {one.missing}")
            continue
        floor = ""
        if one.floor is not None:
            floor = f"   floor {one.floor:.2f}: {'reached' if one.met else 'NOT REACHED'}"
        print(f"  {one.ours} / {one.theirs}: {one.value:.2f}{floor}")
    for name, note in result.notes.items():
        print(f"  {name}: {note}")
    sys.stdout.flush()
