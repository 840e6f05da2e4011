"""Crash torture: processes are killed while they store, load and evict, and nothing may be lost.

    python -m tests.faults.torture --rounds 500 --durability all --tier all --seed 1

Each round, three processes share one small, full store: two ranks of one engine, and another
engine. Each stores and loads at once, and compares every byte. One of them, or all, are killed with
SIGKILL: at random, or by a timer of the kernel that goes off inside a chosen phase (open, reserve,
evict, data, header tables, index, close). Those that were not killed go on, then everything is
opened anew and looked at. A round counts where a store, a load and an eviction were under way at
the kill. The status is 1 where a byte was wrong, a block that had been published and not removed
was lost, the index was unsound, or something was left behind.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.faults.torture.blocks import BATCH, CAPACITY, TIERS, Writer, writers
from tests.faults.torture.board import Board, Count, Phase
from tests.faults.torture.checker import Known, Verdict, check
from tests.faults.torture.worker import Task, work

# Forked, so that what takes a second to import is imported once; nothing is ever opened here.
_PROCESSES = multiprocessing.get_context("fork")

SEATS = 4
"""Three processes, and one that takes the place of one that was killed."""
AIMS = (
    Phase.OPEN,
    Phase.RESERVE,
    Phase.EVICT,
    Phase.EVICT,
    Phase.DATA,
    Phase.HEADERS,
    Phase.INDEX,
    Phase.CLOSE,
    None,
)
GOAL = 20
"""So many kills in each of these phases are what 500 rounds are to reach."""
GOALS = (Phase.DATA, Phase.INDEX, Phase.EVICT, Phase.OPEN, Phase.CLOSE)
_BATCHES = 240
_SHM = "/dev/shm"
_NEW_MOUNTS = 0x00020000
_RANDOM_SECONDS = 0.05
_AFTER_SECONDS = 0.03
_AIM_SECONDS = 8.0
_END_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to happen in a round; all of it comes from the seed."""

    victim: int
    aim: Phase | None
    """None: at random."""
    skip: int
    everybody: bool
    """All are killed at once."""
    replaced: bool
    """Another one takes the victim's place, beside the others."""
    wait: float

    @classmethod
    def of(cls, seed: int, number: int) -> Plan:
        """The plan of a round."""
        chance = random.Random(f"{seed} {number}")
        everybody = chance.random() < 0.4
        return cls(
            victim=chance.randrange(3),
            aim=AIMS[number % len(AIMS)],
            skip=chance.randrange(2, 10),
            everybody=everybody,
            replaced=not everybody and chance.random() < 0.5,
            wait=chance.uniform(0.0, _RANDOM_SECONDS),
        )


@dataclass(slots=True)
class Store:
    """A store that lives through all its rounds."""

    tier: str
    durability: str
    path: Path
    known: Known = field(default_factory=Known)
    next: int = 0
    """Blocks that were begun, counted from the first of each namespace."""
    rounds: int = 0
    kills: int = 0
    blocks: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    @property
    def writers(self) -> list[Writer]:
        """Who opens it."""
        return writers(self.tier, self.durability, self.path)


@dataclass(slots=True)
class Totals:
    """What all rounds came to."""

    rounds: int = 0
    counted: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    """By phase, of the rounds that count."""
    kills_elsewhere: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    verified: int = 0
    promised: int = 0
    wrong: int = 0
    lost: int = 0
    restarts: int = 0
    problems: list[str] = field(default_factory=list)


class Torture:
    """Runs rounds on one store after another."""

    def __init__(self, stores: Sequence[Store], seed: int) -> None:
        self._stores = stores
        self._seed = seed
        self._board = Board(SEATS)
        self.totals = Totals()

    def fill(self) -> None:
        """Fill every store, so that all that follows has to evict."""
        for store in self._stores:
            self._board.clear()
            tasks = [
                Task(writer, f"fill {seat}", writer.first, 400, until_full=True)
                for seat, writer in enumerate(store.writers)
            ]
            processes = [self._start(seat, task) for seat, task in enumerate(tasks)]
            self._expect_end(store, processes, "filling")
            store.next = 400 * BATCH
            self._note(store, self._check(store))

    def round(self, number: int) -> None:
        """One round, on the store whose turn it is."""
        store = self._stores[number % len(self._stores)]
        plan = Plan.of(self._seed, number // len(self._stores) * 7 + number)
        self._board.clear()
        tasks = [
            Task(
                writer,
                f"{self._seed} {number} {seat}",
                writer.first + store.next,
                _BATCHES,
                tuple(sorted(store.known.visible[writer.first])),
                plan.aim if seat == plan.victim else None,
                plan.skip,
            )
            for seat, writer in enumerate(store.writers)
        ]
        store.next += _BATCHES * BATCH
        processes = [self._start(seat, task) for seat, task in enumerate(tasks)]
        in_flight = self._kill(plan, processes)
        killed = [plan.victim]
        if plan.everybody:
            for process in processes:
                process.kill()
            killed = list(range(3))
        for seat in killed:
            processes[seat].join(_END_SECONDS)
        fell = [
            self._board.seats[seat].phase.name.lower()
            for seat in killed
            if processes[seat].exitcode == -signal.SIGKILL
        ]
        others = [process for seat, process in enumerate(processes) if seat not in killed]
        if not plan.everybody:
            if plan.replaced:
                task = tasks[plan.victim]
                again = replace(task, seed=f"{task.seed} again", aim=None)
                others.append(self._start(3, again))
            time.sleep(_AFTER_SECONDS)
            self._board.stop()
            self._expect_end(store, others, f"round {number}, {plan}")
        self._count(store, plan, fell, in_flight=in_flight, number=number)
        self._note(store, self._check(store, plan.victim if plan.replaced else None))

    def _start(self, seat: int, task: Task) -> BaseProcess:
        # The seat that takes another's place stores the same blocks as that one.
        peers = (0, 1, 3) if task.writer.first == 0 else (2, 3)
        process = _PROCESSES.Process(target=_quietly, args=(work, self._board, seat, task, peers))
        process.start()
        return process

    def _kill(self, plan: Plan, processes: Sequence[BaseProcess]) -> bool:
        """Kill the victim, or wait until it is; whether everything was in flight."""
        victim, seat = processes[plan.victim], self._board.seats[plan.victim]
        deadline = time.monotonic() + _AIM_SECONDS
        if plan.aim is not None:
            victim.join(_AIM_SECONDS)
            if victim.exitcode is not None:
                return seat.in_flight
        else:
            while not all(self._board.seats[n].ready for n in range(3)):
                if time.monotonic() > deadline or victim.exitcode is not None:
                    break
                time.sleep(0.001)
            time.sleep(plan.wait)
        while not self._board.in_flight() and time.monotonic() < deadline:
            pass
        in_flight = self._board.in_flight()
        victim.kill()
        return in_flight

    def _expect_end(self, store: Store, processes: Sequence[BaseProcess], when: str) -> None:
        for process in processes:
            process.join(_END_SECONDS)
            if process.exitcode is None and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)  # prints where its threads are
                time.sleep(1.0)
                process.kill()
                process.join(_END_SECONDS)
                self._blame(store, f"a process did not end ({when})")
            elif process.exitcode != 0:
                self._blame(store, f"a process ended with {process.exitcode} ({when})")

    def _blame(self, store: Store, what: str) -> None:
        self.totals.problems.append(f"{store.tier} {store.durability}: {what}")

    def _count(
        self, store: Store, plan: Plan, fell: Sequence[str], *, in_flight: bool, number: int
    ) -> None:
        totals = self.totals
        totals.rounds += 1
        store.rounds += 1
        store.kills += len(fell)
        if not fell:
            self._blame(store, f"a process ended before it was killed, in round {number}, {plan}")
        if in_flight and fell:
            totals.counted += 1
            totals.kills.update(fell)
        else:
            totals.kills_elsewhere.update(fell)
        for seat in self._board.seats:
            totals.counts.update({count.name.lower(): seat.counted(count) for count in Count})

    def _check(self, store: Store, again: int | None = None) -> Verdict:
        """`again`: the seat that the fourth one took the place of."""
        seats = self._board.seats
        acked = [seats[seat].acknowledged() for seat in range(3)]
        if again is not None:
            acked[again] += seats[3].acknowledged()
        removed = frozenset().union(*(seat.removals() for seat in seats))
        ours, theirs = _PROCESSES.Pipe(duplex=False)
        arguments = (theirs, store.path, store.writers, acked, removed, store.known, store.next)
        process = _PROCESSES.Process(target=_quietly, args=(_send_check, *arguments))
        process.start()
        theirs.close()
        try:
            verdict: Verdict = ours.recv()
        except EOFError:
            process.join(_END_SECONDS)
            verdict = Verdict(store.known, [f"the check ended with {process.exitcode}"])
        process.join(_END_SECONDS)
        ours.close()
        return verdict

    def _note(self, store: Store, verdict: Verdict) -> None:
        totals = self.totals
        store.known = verdict.known
        store.blocks.append(verdict.blocks)
        store.bytes.append(max(verdict.disk_bytes, verdict.clean_bytes))
        store.files.append(verdict.known.files)
        totals.verified += verdict.verified
        totals.promised += verdict.promised
        totals.wrong += verdict.wrong
        totals.lost += verdict.lost
        totals.restarts += verdict.restarts
        for problem in verdict.problems:
            self._blame(store, f"after round {totals.rounds - 1}: {problem}")


def _send_check(out: Any, *arguments: Any) -> None:
    out.send(check(*arguments))


def _quietly(act: Callable[..., None], *arguments: Any) -> None:
    """Run in a child process: an error is told in one piece, and is its status."""
    try:
        act(*arguments)
    except BaseException:  # noqa: BLE001 - whatever it is, the parent counts it
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def stores_of(tier: str, durability: str, folder: Path) -> list[Store]:
    """The stores that the options name."""
    tiers = list(TIERS) if tier == "all" else [tier]
    return [
        Store(name, level, folder / f"{name}-{level}")
        for name in tiers
        for level in TIERS[name][1]
        if durability in ("all", level)
    ]


def report(torture: Torture, stores: Sequence[Store], seconds: float) -> dict[str, Any]:
    """What came of it, as values."""
    totals = torture.totals
    return {
        **asdict(totals),
        "kills": dict(totals.kills),
        "kills_elsewhere": dict(totals.kills_elsewhere),
        "counts": dict(totals.counts),
        "seconds": round(seconds, 1),
        "wrong": totals.wrong + totals.counts["wrong"],
        "lost": totals.lost + totals.counts["corrupt"],
        "stores": [
            {
                "tier": store.tier,
                "durability": store.durability,
                "rounds": store.rounds,
                "kills": store.kills,
                "blocks": [min(store.blocks), max(store.blocks)],
                "bytes": [min(store.bytes), max(store.bytes)],
                "files": [min(store.files), max(store.files)],
            }
            for store in stores
        ],
    }


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    print(f"rounds: {found['rounds']}, of which {found['counted']} count", end="")
    print(f"; {found['seconds']:.0f} s")
    for title, name in (
        ("kills", "kills"),
        ("kills in rounds that do not count", "kills_elsewhere"),
    ):
        told = ", ".join(f"{phase} {count}" for phase, count in sorted(found[name].items()))
        print(f"{title}: {told or 'none'}")
    counts = found["counts"]
    print("blocks:", ", ".join(f"{name} {count}" for name, count in counts.items()))
    print(f"checked after the rounds: {found['verified']} parts of blocks read and right;", end=" ")
    print(f"{found['promised']} were published in the round before")
    print(f"wrong: {found['wrong']}, lost: {found['lost']}, restarted logs: {found['restarts']}")
    print("| tier | durability | rounds | kills | blocks | KiB on the disk, of", end="")
    print(f" {CAPACITY // 1024} | files |\n|---|---|---|---|---|---|---|")
    for store in found["stores"]:
        sizes = "-".join(str(size // 1024) for size in store["bytes"])
        ranges = {name: "-".join(map(str, store[name])) for name in ("blocks", "files")}
        print(
            f"| {store['tier']} | {store['durability']} | {store['rounds']} | {store['kills']} "
            f"| {ranges['blocks']} | {sizes} | {ranges['files']} |"
        )
    for problem in found["problems"][:50]:
        print("VIOLATION:", problem)
    if len(found["problems"]) > 50:
        print(f"and {len(found['problems']) - 50} more")


def _take_own_shm() -> bool:
    """Have a /dev/shm of our own, in which only what our stores leave behind can lie."""
    if ctypes.CDLL(None).unshare(_NEW_MOUNTS):
        return False
    commands = (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "tmpfs", _SHM])
    return all(
        subprocess.run(command, check=False, capture_output=True).returncode == 0
        for command in commands
    )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.torture", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=500, help="rounds that count (500)")
    parser.add_argument("--durability", choices=("none", "batch", "full", "all"), default="all")
    parser.add_argument("--tier", choices=(*TIERS, "all"), default="all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--path", type=Path, help="where the stores are made (a temporary folder)")
    parser.add_argument("--keep", action="store_true", help="leave the stores behind")
    parser.add_argument("--json", action="store_true", help="print a JSON object, not a table")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    own_shm = _take_own_shm()
    if not own_shm:
        print(f"no mount namespace to be had: {_SHM} is not looked at", file=sys.stderr)
    folder = Path(tempfile.mkdtemp(prefix="tiered-kv-torture.", dir=options.path))
    try:
        stores = stores_of(options.tier, options.durability, folder)
        if not stores:
            parser.error(f"{options.tier} does not offer durability {options.durability}")
        began = time.monotonic()
        torture = Torture(stores, options.seed)
        torture.fill()
        totals = torture.totals
        number = 0
        while totals.counted < options.rounds and number < 2 * options.rounds + 10:
            torture.round(number)
            number += 1
            if number % 20 == 0:
                print(
                    f"{number} rounds, {totals.counted} count, {time.monotonic() - began:.0f} s, "
                    f"{len(totals.problems)} violations",
                    file=sys.stderr,
                    flush=True,
                )
        left = os.listdir(_SHM) if own_shm else []
        if left:
            totals.problems.append(f"left in {_SHM}: {left}")
        if totals.counted < options.rounds:
            totals.problems.append(f"only {totals.counted} rounds of {options.rounds} count")
        if options.rounds >= 500:
            totals.problems += [
                f"only {totals.kills[phase.name.lower()]} kills of {GOAL} fell in {phase.name}"
                for phase in GOALS
                if totals.kills[phase.name.lower()] < GOAL
            ]
        found = report(torture, stores, time.monotonic() - began)
    finally:
        if options.keep:
            print(f"left behind: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    return 1 if found["problems"] or found["wrong"] or found["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
