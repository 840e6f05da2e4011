"""How long an engine takes to start, with and without tiers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.benchmarks.first_token.tokens import engine
from tiered_kv.cli.progress import Progress

__all__ = ["CAPACITIES", "Starts", "measure"]

CAPACITIES = ("1GiB", "8GiB")
ALONE = "without tiers"


@dataclass(frozen=True, slots=True)
class Starts:
    """Seconds from the start of the process to its first answer."""

    seconds: Mapping[str, Sequence[float]]
    """By capacity of each tier, of each round; `ALONE` among them."""

    def later(self, capacity: str) -> float:
        """Seconds by which an engine with such tiers starts later; medians."""
        alone = statistics.median(self.seconds[ALONE])
        return statistics.median(self.seconds[capacity]) - alone

    def figures(self) -> list[dict[str, object]]:
        """For the table of goals."""
        return [
            {"row": f"start.{size}", "at": "", "value": self.later(size), "best": None}
            for size in CAPACITIES
        ]


def measure(folder: Path, model: Path, rounds: int, progress: Progress) -> Starts:
    """Each start is a process of its own; they alternate."""
    configs: dict[str, Path | None] = {ALONE: None}
    for size in CAPACITIES:
        tiers = [
            {"name": "host", "type": "cpu", "capacity": size},
            {
                "name": "ssd",
                "type": "nvme",
                "path": str(folder / f"ssd-{size}"),
                "capacity": size,
                "min_free": "0%",
            },
        ]
        file = folder / f"start-{size}.yaml"
        file.write_text(yaml.safe_dump({"tiers": tiers}), encoding="utf-8")
        configs[size] = file
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    for number in range(rounds + 1):
        for name, config in configs.items():
            began = time.perf_counter()
            with engine(folder, f"start-{name.replace(' ', '-')}", model, config):
                took = time.perf_counter() - began
            progress.stage(f"start, {name}: {took:.1f} s")
            if number:  # the first round reads the engine's files from the disk
                seconds[name].append(took)
    return Starts(seconds)
