"""All goals at once: runs the benchmarks, and prints the table of `tests/benchmarks/goal.py`.

    python -m tests.benchmarks.goals --path /mnt/nvme0 --keep figures
    python -m tests.benchmarks.goals --path /mnt/nvme0 --floors

The first tells of each row whether its goal is met. The second looks at the floors below the goals
(the head of `tests/benchmarks/goal.py` says what they are), and its status is 1 where one is not
kept or a row was not measured. Each benchmark is a process of its own; `--only nvme_store` runs
some of them, and `--use figures` judges the JSON that an earlier run has kept.

It takes half an hour, and means something on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.goal import ROWS, Goal, Row
from tests.benchmarks.harness import workspace
from tests.benchmarks.peer_lmcache import PYTHON

__all__ = ["BENCHMARKS", "Figures", "Line", "judge", "main", "read_figures", "rows_of", "show"]

BENCHMARKS = tuple(dict.fromkeys(row.benchmark for row in ROWS))
WITHOUT_PATH = frozenset(("bench_pool_start",))
"""Benchmarks that touch no disk."""
PRINTED = {
    "lookups": {
        "first time": "lookup.first",
        "again in a later step": "lookup.repeated",
        "vLLM's fs tier / ours, until found": "lookup.vllm",
    }
}
"""Benchmarks that print their JSON, and what they call the rows."""
LONGEST_SECONDS = 3600.0

Figures = Mapping[tuple[str, str], float]
"""By row and by what it is measured at."""


@dataclass(frozen=True, slots=True)
class Line:
    """One goal, and what was measured."""

    row: Row
    at: str
    goal: Goal
    value: float | None
    """None where it was not measured."""

    @property
    def met(self) -> bool:
        """Whether the goal is reached; what was not measured is not."""
        return self.value is not None and self.goal.met(self.value)

    @property
    def kept(self) -> bool:
        """Whether the floor is; what was not measured is not."""
        return self.value is not None and self.goal.kept(self.value)


def judge(figures: Figures, benchmarks: Iterable[str] = BENCHMARKS) -> list[Line]:
    """Every goal of these benchmarks."""
    chosen = set(benchmarks)
    return [
        Line(row, at, goal, figures.get((row.name, at)))
        for row in ROWS
        if row.benchmark in chosen
        for at, goal in row.goals.items()
    ]


def read_figures(files: Iterable[Path]) -> dict[tuple[str, str], float]:
    """What benchmarks wrote; files that are not there are passed over.

    Raises:
        ValueError: a figure names a row that the table does not have.
    """
    known = {row.name for row in ROWS}
    found: dict[tuple[str, str], float] = {}
    for file in files:
        if not file.exists():
            continue
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for figure in document["figures"]:
            if figure["row"] not in known:
                raise ValueError(f"{file}: there is no row {figure['row']!r} in the table of goals")
            found[figure["row"], figure["at"]] = float(figure["value"])
    return found


def show(lines: Sequence[Line], *, floors: bool) -> None:
    """Print the table."""
    column = "floor" if floors else "goal"
    print(f"{'':74}{'at':>8}{column:>9}{'figure':>10}   {'kept' if floors else 'met'}")
    for line in lines:
        limit = line.goal.floor if floors else line.goal.value
        sign = "<=" if line.goal.at_most else ">="
        value = "-" if line.value is None else f"{line.value:.3g}"
        good = line.kept if floors else line.met
        verdict = "yes" if good else "NOT MEASURED" if line.value is None else "NO"
        unit = f" ({line.row.unit})" if line.row.unit != "x" else ""
        what = f"{line.row.title + unit:74}{line.at:>8}"
        print(f"{what}{f'{sign} {limit:.3g}':>9}{value:>10}   {verdict}")
    good_lines = sum(line.kept if floors else line.met for line in lines)
    print(f"{good_lines} of {len(lines)} {'floors kept' if floors else 'goals met'}")


def _run(benchmark: str, file: Path, options: argparse.Namespace) -> None:
    if importlib.util.find_spec(f"tests.benchmarks.{benchmark}") is None:
        print(f"{benchmark}: there is no such benchmark here", file=sys.stderr)
        return
    printed = PRINTED.get(benchmark)
    command = [sys.executable, "-m", f"tests.benchmarks.{benchmark}", "--json"]
    if printed is None:
        command.append(str(file))
    if options.path is not None and benchmark not in WITHOUT_PATH:
        command += ["--path", str(options.path)]
    if benchmark == "lmcache_disk":
        command += ["--lmcache", str(options.lmcache)]
    print(f"--- {' '.join(command)}", flush=True)
    began = time.monotonic()
    # Its status says what this command finds out by itself; a benchmark that fails leaves no file.
    out = None if printed is None else subprocess.PIPE
    done = subprocess.run(command, check=False, timeout=LONGEST_SECONDS, stdout=out, text=True)
    if printed is not None and done.stdout.strip():
        print(done.stdout)
        file.write_text(json.dumps({"figures": rows_of(done.stdout, printed)}), encoding="utf-8")
    print(f"--- {benchmark} took {time.monotonic() - began:.0f} s\n", flush=True)


def rows_of(printed: str, names: Mapping[str, str]) -> list[dict[str, object]]:
    """Figures for the table, out of the JSON that a benchmark printed."""
    return [
        {"row": names[figure["name"]], "at": "", "value": figure["value"], "best": None}
        for figure in json.loads(printed)["figures"]
        if figure["name"] in names
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.goals",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--path", type=Path, help="directory on the disk (default: temporary)")
    parser.add_argument("--floors", action="store_true", help="status 1 where a floor is not kept")
    parser.add_argument(
        "--only", action="append", choices=BENCHMARKS, help="a benchmark; may be given again"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave all JSON in this folder")
    parser.add_argument("--use", type=Path, metavar="DIR", help="run nothing, judge this folder")
    parser.add_argument(
        "--lmcache", type=Path, default=PYTHON, help=f"Python of LMCache's environment ({PYTHON})"
    )
    options = parser.parse_args(arguments)
    benchmarks = options.only or BENCHMARKS
    with ExitStack() as stack:
        folder = options.use or options.keep or stack.enter_context(workspace(options.path))
        files = {name: folder / f"{name}.json" for name in benchmarks}
        if options.use is None:
            folder.mkdir(parents=True, exist_ok=True)
            for name, file in files.items():
                file.unlink(missing_ok=True)
                _run(name, file, options)
        lines = judge(read_figures(files.values()), benchmarks)
    show(lines, floors=options.floors)
    return int(options.floors and not all(line.kept for line in lines))


if __name__ == "__main__":
    sys.exit(main())
