"""What the calls of an inference engine into the connector take, with a tier that hangs.

    python -m tests.benchmarks.engine_calls

Three simulated engines live side by side, turn by turn, with the same requests: one has host memory
alone, one an nvme and an lmdb tier below it as well, and for the third every call of these tiers'
stores hangs once they have been filled. Each call that an engine makes into the halves of the
connector is timed; the table shows its p99 for each, medians of that of several parts of the run.
The floor: no call's p99 with hanging tiers is more than 1.5 times that with host memory alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.harness import MIB, workspace
from tiered_kv.config import CpuSettings, Deployment, Limits, Recompute, SizeOrPercent, TierSettings
from tiered_kv.connector.assembly import Assembly
from tiered_kv.plugins import Plugins
from tiered_kv.testing.faults import Effect, Fault, Faults, Method, faulty_backend
from tiered_kv.testing.simulation import SimulatedModel, Simulation, Workload
from tiered_kv_lmdb.settings import LmdbSettings
from tiered_kv_nvme.settings import NvmeSettings

__all__ = ["CALLS", "Line", "measure"]

MOST = 1.5
"""Times the p99 without tiers."""
STEP = "all calls of a step"
ALONE, WELL, HUNG = "host alone", "with tiers", "tiers hang"
CALLS = {
    "manager": (
        "on_new_request",
        "lookup",
        "prepare_load",
        "complete_load",
        "prepare_store",
        "complete_store",
        "take_report",
        "take_orders",
        "take_stats",
        "on_request_finished",
    ),
    "rank": (
        "handle_preemptions",
        "start_kv_transfers",
        "prepare_store_kv",
        "get_finished",
        "take_completed",
        "take_report",
        "get_kv_connector_stats",
    ),
}
"""By half of the connector, what an engine calls in its steps."""
HANGING = (
    Method.CONTAINS,
    Method.RESERVE,
    Method.WRITE,
    Method.PUBLISH,
    Method.READ,
    Method.TOUCH,
    Method.CHANGES,
    Method.STAT,
)
MODEL = SimulatedModel(blocks=96, chunk=2)
LIFE = Workload(arrivals=0.7, preempt=0.1, abort=0.02)
_SLOT = 4096
_TURN = 10
"""Steps of one engine before it is another one's turn."""
_PARTS = 9
_ENOUGH = 100
"""Calls that a p99 is taken of, at least: of fewer it is the slowest one."""


@dataclass(slots=True)
class _Engine:
    """A simulation whose calls are timed."""

    sim: Simulation
    faults: Faults
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """By call, of the part of the run that is going on."""
    _step: float = 0.0

    def __post_init__(self) -> None:
        for half, target in (("manager", self.sim.manager), ("rank", self.sim.workers[0])):
            for name in CALLS[half]:
                setattr(target, name, self._timed(f"{half}.{name}", getattr(target, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                seconds = time.perf_counter() - began
                self.seconds.setdefault(name + _work(name, arguments), []).append(seconds)
                self._step += seconds

        return timed

    def step(self) -> None:
        """One step of the engine."""
        self._step = 0.0
        self.sim.live(LIFE, 1)
        self.seconds.setdefault(STEP, []).append(self._step)


def _work(name: str, arguments: Sequence[Any]) -> str:
    """What a call has to do, for calls that often have nothing to do: two that do the same are
    compared, not how often each of the engines has something to load."""
    by_step = {
        "rank.handle_preemptions": ("flush", "to flush"),
        "rank.start_kv_transfers": ("loads", "with loads"),
        "rank.prepare_store_kv": ("stores", "with stores"),
    }
    if name not in by_step:
        return ""
    part, words = by_step[name]
    return f", {words}" if getattr(arguments[0], part) else ""


@dataclass(frozen=True, slots=True)
class Line:
    """A call."""

    call: str
    counts: Mapping[str, int]
    """By engine, how often it was made."""
    p99: Mapping[str, float]
    """By engine, seconds: the median of that of as many parts as have enough calls each."""
    slowest: Mapping[str, float]
    """By engine, seconds."""

    @property
    def ratio(self) -> float:
        """Of the engine whose tiers hang to that without tiers."""
        return self.p99[HUNG] / self.p99[ALONE]

    @property
    def tells(self) -> bool:
        """Whether it was called often enough."""
        return min(self.counts[ALONE], self.counts[HUNG]) >= _ENOUGH


def _engine(kind: str, folder: Path, stack: ExitStack) -> _Engine:
    faults = Faults(tier=kind)
    stack.callback(faults.let_go)
    no_floor = SizeOrPercent(percent=0.0)
    tiers: list[TierSettings] = [CpuSettings(name="host", capacity=64 * _SLOT)]
    if kind != ALONE:
        capacity = 64 * MIB
        tiers += [
            NvmeSettings(name="ssd", path=folder / "ssd", capacity=capacity, min_free=no_floor),
            LmdbSettings(name="map", path=folder / "map", capacity=capacity, min_free=no_floor),
        ]
    deployment = Deployment(
        tiers=tuple(tiers),
        recompute=Recompute(gate="off"),  # nearly all is slower than to simulate computing
        limits=Limits(load_deadline=0.2, store_deadline=0.5, retry_backoff=1.0, drain=1.0),
    )
    backends = dict(Plugins().deployed(tier.type for tier in deployment.stores))
    for tier in deployment.stores:
        backends[tier.type] = faulty_backend(backends[tier.type], faults)
    sim = Simulation(Assembly(deployment, backends), MODEL, seed=1)
    stack.callback(sim.close)
    stack.callback(faults.let_go)
    sim.wait_ready()
    return _Engine(sim, faults)


def measure(folder: Path, steps: int) -> tuple[list[Line], int, int]:
    """Every call's line; how many calls of the stores hung, and how many loads failed by that."""
    with ExitStack() as stack:
        engines = {
            kind: _engine(kind, folder / str(number), stack)
            for number, kind in enumerate((ALONE, WELL, HUNG))
        }
        for engine in engines.values():  # what is found in the tiers later
            engine.sim.live(LIFE, 300)
            engine.sim.settle()
        hung = engines[HUNG]
        hung.faults.inject(*(Fault(method=method, effect=Effect.HANG) for method in HANGING))
        found: dict[str, dict[str, list[float]]] = {kind: {} for kind in engines}
        order = list(engines)
        for part in range(_PARTS + 1):
            for engine in engines.values():
                engine.seconds.clear()
            for _ in range(max(1, steps // _PARTS // _TURN)):
                for kind in order:
                    for _ in range(_TURN):
                        engines[kind].step()
                order.reverse()
            if not part:
                continue  # it warms up
            for kind, engine in engines.items():
                for call, seconds in engine.seconds.items():
                    found[kind].setdefault(call, []).extend(seconds)
        calls = [call for call in found[ALONE] if all(call in found[kind] for kind in engines)]
        lines = [
            Line(
                call,
                {kind: len(found[kind][call]) for kind in engines},
                {kind: _p99(found[kind][call]) for kind in engines},
                {kind: max(found[kind][call]) for kind in engines},
            )
            for call in calls
        ]
        met = sum(hung.faults.injected().values())
        return lines, met, hung.sim.counts.failed_loads


def _p99(seconds: Sequence[float]) -> float:
    """`seconds` in the order of the calls."""
    parts = max(1, min(_PARTS, len(seconds) // _ENOUGH))
    size = -(-len(seconds) // parts)
    each = [sorted(seconds[start : start + size]) for start in range(0, len(seconds), size)]
    return statistics.median(part[min(len(part) - 1, int(0.99 * len(part)))] for part in each)


def show(lines: Sequence[Line], met: int, failed: int) -> None:
    """Print the table."""
    print(f"{met} calls of the stores hung, {failed} loads failed by that")
    print(f"{'call, p99 in us':38}{ALONE:>12}{WELL:>12}{HUNG:>12}{'ratio':>8}{'calls':>9}")
    for line in lines:
        shown = "".join(f"{line.p99[kind] * 1e6:12.1f}" for kind in (ALONE, WELL, HUNG))
        note = "" if line.tells else "  too few to tell"
        print(f"{line.call:38}{shown}{line.ratio:8.2f}{line.counts[HUNG]:9}{note}")
    worst = max((line for line in lines if line.tells), key=lambda line: line.ratio)
    verdict = "reached" if worst.ratio <= MOST else "NOT REACHED"
    print(f"highest ratio {worst.ratio:.2f} ({worst.call}); at most {MOST}: {verdict}")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.engine_calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--path", type=Path, help="directory on the disk (default: temporary)")
    parser.add_argument("--steps", type=int, default=9000, help="of each engine (9000)")
    parser.add_argument("--json", action="store_true", help="print a JSON object, not a table")
    options = parser.parse_args()
    with workspace(options.path) as folder:
        lines, met, failed = measure(folder, options.steps)
    if options.json:
        found = [asdict(line) | {"ratio": line.ratio} for line in lines]
        print(json.dumps({"calls": found, "hung": met, "failed_loads": failed}))
    else:
        show(lines, met, failed)
    return 0 if all(line.ratio <= MOST for line in lines if line.tells) else 1


if __name__ == "__main__":
    sys.exit(main())
