"""How long a host block pool takes until it can be used and until all of it is resident, and how
much memory it then has.

    python -m tests.benchmarks.bench_pool_start --size 256MiB --size 2GiB --size 8GiB

Each measurement is a process of its own. With and without huge pages alternate round by round.
`--lock` registers the memory as a device's driver would, by locking it (needs `ulimit -l`).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.benchmarks.goal import goal_of
from tests.benchmarks.harness import write_figures
from tests.benchmarks.million import anonymous_bytes
from tiered_kv.config import MIB, readable_bytes
from tiered_kv.config.units import parse_bytes
from tiered_kv.memory import HostBlockPool

PR_SET_THP_DISABLE = 41
PATIENCE = 300.0


def lock(address: int, nbytes: int) -> None:
    """Pin memory as far as that goes without a device."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def measure(size: int, huge: bool, pin: bool) -> dict[str, object]:
    """Seconds of one pool in this process, and what it says of itself."""
    if not huge and ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0):
        raise OSError("huge pages cannot be switched off for this process")
    before = anonymous_bytes()
    begin = time.perf_counter()
    pool = HostBlockPool(size // MIB, 0, MIB, register=lock if pin else None)
    usable = time.perf_counter() - begin
    pool.grow()
    if not pool.wait_grown(PATIENCE):
        raise TimeoutError(f"the pool has not grown within {PATIENCE:g} s")
    grown = time.perf_counter() - begin
    resident = anonymous_bytes() - before
    state = pool.state()
    begin = time.perf_counter()
    pool.close()
    return {
        "usable_seconds": usable,
        "grown_seconds": grown,
        "close_seconds": time.perf_counter() - begin,
        "resident_share": resident / size,
        **state.modes(),
    }


def in_a_process(size: int, huge: bool, pin: bool) -> dict[str, object]:
    """One measurement, in a fresh process."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_pool_start", "--one", f"{size}B"]
    command += [] if huge else ["--base-pages"]
    command += ["--lock"] if pin else []
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    answer: dict[str, object] = json.loads(ran.stdout)
    return answer


def main() -> int:
    """Measure all sizes and print medians, or one size as JSON; 1 where too much is resident."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", action="append", type=parse_bytes, metavar="SIZE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lock", action="store_true")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--base-pages", action="store_true", help="with --one: no huge pages")
    parser.add_argument("--one", type=parse_bytes, metavar="SIZE", help="one, in this process")
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(measure(arguments.one, not arguments.base_pages, arguments.lock)))
        return 0
    figures: list[dict[str, object]] = []
    results: list[dict[str, object]] = []
    for size in arguments.size or [256 * MIB, 2048 * MIB, 8192 * MIB]:
        found: dict[bool, list[dict[str, object]]] = {True: [], False: []}
        for _ in range(arguments.rounds):
            for huge, answers in found.items():
                answers.append(in_a_process(size, huge, arguments.lock))
        shares: list[float] = []
        for huge, answers in found.items():
            usable, grown, closed, share = (
                statistics.median(float(str(answer[name])) for answer in answers)
                for name in ("usable_seconds", "grown_seconds", "close_seconds", "resident_share")
            )
            shares.append(share)
            last = answers[-1]
            print(
                f"{readable_bytes(size):>7}  usable {usable:6.3f} s  grown {grown:6.3f} s  "
                f"closed {closed:6.3f} s  resident {share:.4f} of it  pages {last['pages']}; "
                f"memory {last['memory']}",
                flush=True,
            )
            results.append({"bytes": size, "huge_pages": huge, "rounds": answers})
        at = readable_bytes(size)
        figures.append({"row": "pool.resident", "at": at, "value": max(shares), "best": None})
    if arguments.json:
        write_figures(arguments.json, "bench_pool_start", figures, results=results)
    goals = [(goal_of("pool.resident", str(one["at"])), one["value"]) for one in figures]
    return int(any(goal is not None and not goal.kept(float(str(v))) for goal, v in goals))


if __name__ == "__main__":
    sys.exit(main())
