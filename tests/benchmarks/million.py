"""A tier with a million blocks: how long until the first hit, what the scheduler pays for it.

    python -m tests.benchmarks.million --path /mnt/nvme0 --json million.json

The index is written without the blocks' bytes. Each figure comes from a process of its own. "Busy"
is beside a thread that computes in Python without a pause, as the engine's own thread may.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from tests.benchmarks.harness import workspace
from tests.stores.many_blocks import KINDS, Kind, fill_index, many_keys
from tiered_kv.index import Mirror, keyset
from tiered_kv.testing.conformance.blocks import StoreArguments, put
from tiered_kv.values import BlockKey

Answer = TypeVar("Answer")

PREFIX = 1_024
"""Keys of one lookup."""
LONG = 10_240
"""Keys of a long one, for which there is no floor."""
LOOKUPS = 300
BUSY_SECONDS = 1.0
LATE_SECONDS = 600.0
BYTES_PER_BLOCK = 5_500
"""Capacity to ask for per block of 4 KiB, so that the index has room."""

FIRST_HIT_SECONDS = 0.5
MOST_BYTES_PER_BLOCK = 40.0
IDLE_SECONDS = 0.001
BUSY_LOOKUP_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value."""

    kind: str
    name: str
    value: float
    unit: str
    most: float | None = None
    """The floor: the value may be this large; None where there is none."""

    @property
    def met(self) -> bool:
        """Whether the floor is kept."""
        return self.most is None or self.value <= self.most

    def __str__(self) -> str:
        verdict = ""
        if self.most is not None:
            verdict = f"   at most {self.most:g}: {'kept' if self.met else 'NOT KEPT'}"
        return f"  {self.name:58}{self.value:12.4g} {self.unit:16}{verdict}"


@dataclass(frozen=True, slots=True)
class Tier:
    """What is measured; picklable, for the processes that measure."""

    kind: Kind
    arguments: StoreArguments
    blocks: int

    def mirror(self) -> Mirror:
        """As the scheduler has it."""
        reading = self.arguments.with_(writable=False)
        return Mirror(lambda: self.kind.open(reading), tier=self.kind.name)

    def some_keys(self, count: int) -> list[BlockKey]:
        """Keys of blocks that are there, far apart in the index."""
        choice = random.Random(count)
        return [many_keys(choice.randrange(self.blocks), 1)[0] for _ in range(count)]


# ------------------------------------------------------------------- what runs in other processes


def build(tier: Tier) -> float:
    """Seconds it took to write the index."""
    begin = time.perf_counter()
    fill_index(tier.kind, tier.arguments, tier.blocks)
    return time.perf_counter() - begin


def write_and_die(tier: Tier) -> None:
    """Leave the index as a killed process does."""
    store = tier.kind.open(tier.arguments)
    put(store, [0], length=4096)
    os.kill(os.getpid(), signal.SIGKILL)


def first_hit_of_store(tier: Tier) -> float:
    """Seconds from before the store is opened until it has found a block."""
    (wanted,) = tier.some_keys(2)[1:]
    begin = time.perf_counter()
    store = tier.kind.open(tier.arguments)
    assert store.contains([wanted]) == [True]
    seconds = time.perf_counter() - begin
    store.close()
    return seconds


def first_hit_of_mirror(tier: Tier) -> tuple[float, float]:
    """Seconds from before the mirror is made until a whole prefix is answered, and until it is
    full."""
    wanted = tier.some_keys(PREFIX)[1:]
    begin = time.perf_counter()
    mirror = tier.mirror()
    while not all(mirror.lookup(wanted)):
        time.sleep(0.001)
    hit = time.perf_counter() - begin
    assert mirror.wait_ready(LATE_SECONDS)
    full = time.perf_counter() - begin
    mirror.close()
    return hit, full


def memory(tier: Tier) -> tuple[float, float]:
    """Bytes per block of a full mirror: of the process's own memory, and of the table alone."""
    tier.kind.open(tier.arguments.with_(writable=False)).close()
    tables: list[keyset.KeySet] = []
    real = keyset.KeySet.__init__

    def note(self: keyset.KeySet, seed: int | None = None) -> None:
        tables.append(self)
        real(self, seed)

    keyset.KeySet.__init__ = note  # type: ignore[method-assign]  # to see the tables it makes
    before = anonymous_bytes()
    mirror = tier.mirror()
    assert mirror.wait_ready(LATE_SECONDS)
    blocks = len(mirror)
    taken = anonymous_bytes() - before
    table = max(one.nbytes for one in tables)
    mirror.close()
    return taken / blocks, table / blocks


def anonymous_bytes() -> int:
    """Resident memory of this process without mapped files (those are the page cache's)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


@contextmanager
def busy_thread() -> Iterator[Callable[[], tuple[float, float]]]:
    """A thread that computes; gives how many rounds a second it made, and its longest pause, since
    the last call."""
    stop = threading.Event()
    marks = [time.perf_counter()]

    def compute() -> None:
        while not stop.is_set():
            sum(number * number for number in range(500))
            marks.append(time.perf_counter())

    def told() -> tuple[float, float]:
        mine = marks[:]
        del marks[: len(mine) - 1]
        longest = max(after - before for before, after in pairwise(mine))
        return (len(mine) - 1) / (mine[-1] - mine[0]), longest

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        stop.set()
        thread.join()


def lookups(tier: Tier) -> dict[tuple[int, str], list[float]]:
    """Seconds of each lookup, by keys: idle, and beside a busy thread. Half of the keys hit."""
    mirror = tier.mirror()
    assert mirror.wait_ready(LATE_SECONDS)

    def look_up(keys: int) -> list[float]:
        wanted = tier.some_keys(keys // 2) + many_keys(tier.blocks, keys // 2)
        seconds: list[float] = []
        for _ in range(LOOKUPS):
            begin = time.perf_counter()
            mirror.lookup(wanted)
            seconds.append(time.perf_counter() - begin)
            time.sleep(0.001)  # as between two steps; a thread that comes back waits its turn
        return seconds

    times = {(keys, "idle"): look_up(keys) for keys in (PREFIX, LONG)}
    with busy_thread():
        times |= {(keys, "busy"): look_up(keys) for keys in (PREFIX, LONG)}
    mirror.close()
    return times


def fill_beside_busy_thread(tier: Tier) -> tuple[float, float, float, float]:
    """Seconds of a fill; rounds of the busy thread while it runs, as a share of those alone;
    longest pause of that thread, alone and meanwhile."""
    with busy_thread() as told:
        time.sleep(BUSY_SECONDS)
        alone, pause_alone = told()
        begin = time.perf_counter()
        mirror = tier.mirror()
        assert mirror.wait_ready(LATE_SECONDS)
        seconds = time.perf_counter() - begin
        beside, pause = told()
    mirror.close()
    return seconds, beside / alone, pause_alone, pause


# --------------------------------------------------------------------------------------- in turn


def measure(tier: Tier) -> Iterator[Figure]:
    """All figures of one store."""
    kind = tier.kind.name

    def apart(run: Callable[[Tier], Answer]) -> Answer:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(run, tier).result()

    def seconds(name: str, value: float, most: float | None = None) -> Figure:
        return Figure(kind, name, value, "s", most)

    yield seconds("index written", apart(build))
    yield seconds("open to first hit, closed", apart(first_hit_of_store), FIRST_HIT_SECONDS)
    killed = multiprocessing.get_context("spawn").Process(target=write_and_die, args=(tier,))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    value = apart(first_hit_of_store)
    yield seconds("open to first hit, after SIGKILL", value, FIRST_HIT_SECONDS)
    hit, full = apart(first_hit_of_mirror)
    name = f"mirror: to first answer for {PREFIX} keys, while it fills"
    yield seconds(name, hit, FIRST_HIT_SECONDS)
    yield seconds("mirror: full", full)
    taken, table = apart(memory)
    yield Figure(kind, "mirror: memory", taken, "bytes/block", MOST_BYTES_PER_BLOCK)
    yield Figure(kind, "mirror: its table", table, "bytes/block", MOST_BYTES_PER_BLOCK)
    floors = {(PREFIX, "idle"): IDLE_SECONDS, (PREFIX, "busy"): BUSY_LOOKUP_SECONDS}
    for (keys, name), times in apart(lookups).items():
        most = floors.get((keys, name))
        yield seconds(f"lookup of {keys} keys, {name}: median", statistics.median(times), most)
        yield seconds(f"lookup of {keys} keys, {name}: p99", sorted(times)[-len(times) // 100])
    filled, share, alone, meanwhile = apart(fill_beside_busy_thread)
    yield seconds("mirror: full beside a busy thread", filled)
    yield Figure(kind, "busy thread while it fills", share, "of its speed")
    yield seconds("busy thread's longest pause, alone", alone)
    yield seconds("busy thread's longest pause, while it fills", meanwhile)


def main(given: Sequence[str] | None = None) -> int:
    """Measure; 1 where a floor was not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, help="directory on the disk (default: temporary)")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=[kind.name for kind in KINDS], action="append")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args(given)
    figures: list[Figure] = []
    for kind in KINDS:
        if options.kind and kind.name not in options.kind:
            continue
        print(f"{kind}, {options.blocks} blocks")
        with workspace(options.path) as folder:
            # The lmdb tier's index has a fixed share of its capacity, which is not taken ahead.
            per_block = BYTES_PER_BLOCK * (2 if kind.name == "lmdb" else 1)
            capacity = options.blocks * per_block
            arguments = StoreArguments(folder / "tier", capacity=capacity, block_bytes=(4096,))
            for figure in measure(Tier(kind, arguments, options.blocks)):
                print(figure, flush=True)
                figures.append(figure)
    if options.json:
        document = {"benchmark": "million", "figures": [asdict(one) for one in figures]}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
