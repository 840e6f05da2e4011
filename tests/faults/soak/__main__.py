"""Simulated engines live on real stores in which everything goes wrong, for as long as asked.

    python -m tests.faults.soak --minutes 30 --seed 1

Scene after scene, each with a model (one or two ranks, one or two KV groups) and tiers of its own
(host memory, nvme and lmdb on real directories, a tier in memory), engine after engine runs random
requests with shared prefixes and priorities, aborts, preemptions and evictions in a pool that holds
two or three of them, while its tiers are slow, hang, fail, have no space, return or hold wrong
bytes, and are deleted. Bytes are compared before the engine reads them. The status is 1 where a
byte was wrong, an exception came out of a call or ended a thread, anything was left in use, or too
little happened: a fault counts where it hit a call that was moving blocks.

Everything that is asked comes from the seed; when transfers end is up to threads. A violation ends
it, with its seed, what happened before it, and the directories left behind.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tests.faults.soak.lives import History, Soaked, live
from tests.faults.soak.scenes import Scene
from tests.faults.soak.troubles import Kind

LIVES = 3
"""Engines that follow on each other in a scene."""
LIFE_SECONDS = 6.0
"""What an engine lives, at most."""
FLOOR_MINUTES = 30.0
FLOORS = {"completed_loads": 1000, "completed_stores": 1000, "preemptions_in_loads": 50}
KIND_FLOOR = 100
"""Least counts of `FLOOR_MINUTES`."""
_NEW_MOUNTS = 0x00020000
_DISK_MIB = 40


class Soak:
    """Runs scenes until the time is over."""

    def __init__(self, seed: int, folder: Path, tiny: Path | None) -> None:
        self.soaked = Soaked()
        self.history = History()
        self._seed = seed
        self._folder = folder
        self._tiny = tiny
        self._past: Counter[Kind] = Counter()
        self._scene: Scene | None = None

    def hits(self) -> Counter[Kind]:
        """Of all scenes so far."""
        now = self._past.copy()
        if self._scene is not None:
            for victim in self._scene.victims.values():
                now.update(victim.hits())
        return now

    def run(self, first: int, scenes: int | None, until: float, life_seconds: float) -> None:
        """Scene after scene, until a violation, or the end of the time or of the scenes."""
        number = first
        while time.monotonic() < until and (scenes is None or number < first + scenes):
            folder = self._folder / f"scene-{number}"
            self._scene = scene = Scene.of(number, self._seed, folder, self._tiny)
            for life in range(LIVES):
                if time.monotonic() >= until:
                    break
                name = f"{self._seed} {number} {life}"
                live(scene, name, life_seconds, self.soaked, self.history, self.hits)
                if self.soaked.violations:
                    self.soaked.hits = self.hits()
                    return
            for victim in scene.victims.values():
                self._past.update(victim.hits())
                self.soaked.full_disks += victim.full_disks
                self.soaked.flipped += victim.flipped
            self._scene = None
            shutil.rmtree(folder)
            if self._tiny is not None:
                shutil.rmtree(self._tiny / folder.name, ignore_errors=True)
            number += 1
        self.soaked.hits = self.hits()


def floors(minutes: float) -> dict[str, int]:
    """Least counts of so many minutes."""
    share = minutes / FLOOR_MINUTES
    wanted = FLOORS | {kind.value: KIND_FLOOR for kind in Kind}
    return {name: max(1, int(count * share)) for name, count in wanted.items()}


def judge(soaked: Soaked, minutes: float) -> list[str]:
    """What is wrong with what came of it."""
    if soaked.violations:  # they ended it
        return soaked.violations
    reached = soaked.counts | Counter({kind.value: n for kind, n in soaked.hits.items()})
    return [
        f"too little: {name} {reached[name]}, at least {least} are expected"
        for name, least in floors(minutes).items()
        if reached[name] < least
    ]


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of its own, small enough to be full; None where none can be had."""
    point, file = folder / "disk", folder / "disk.img"
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(_NEW_MOUNTS):
        yield None
        return
    point.mkdir()
    with file.open("wb") as out:
        out.truncate(_DISK_MIB * 2**20)
    commands = (
        ["mount", "--make-rprivate", "/"],
        ["mkfs.ext4", "-q", "-F", str(file)],
        ["mount", "-o", "loop", str(file), str(point)],
    )
    for command in commands:
        if (
            shutil.which(command[0]) is None
            or subprocess.run(command, check=False, capture_output=True).returncode
        ):
            yield None
            return
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=False)


def show(soaked: Soaked, minutes: float, problems: list[str]) -> None:
    """Print the table."""
    least = floors(minutes)
    table = Table(box=box.MARKDOWN)
    for name in ("what", "count", "at least"):
        table.add_column(name, justify="left" if name == "what" else "right")

    def row(name: str, count: object, floor: str = "") -> None:
        table.add_row(name, str(count), floor)

    row("engines' lives", soaked.lives)
    row("of them shut down while transfers ran", soaked.shut_while_busy)
    for name, count in soaked.counts.items():
        row(name.replace("_", " "), count, str(least.get(name, "")))
    for name, kinds in soaked.by_kind.items():
        shown = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        row(name.replace("_", " "), shown or 0)
    for kind in Kind:
        row(f"hit by: {kind}", soaked.hits[kind], str(least[kind.value]))
    row("of these: disks really full", soaked.full_disks)
    row("bits flipped on media", soaked.flipped)
    row("blocks of the engines' own caches checked", soaked.checked_cache_blocks)
    row("longest step, s", f"{soaked.slowest_step:.2f}")
    row("wrong bytes", soaked.wrong_bytes, "0 wanted")
    row("exceptions", soaked.exceptions, "0 wanted")
    row("leaks", soaked.leaks, "0 wanted")
    console = Console(width=160, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(table)
    print(*(line.rstrip() for line in capture.get().splitlines() if line.strip()), sep="\n")
    for problem in problems:
        print(problem)


def report(soaked: Soaked, problems: list[str]) -> dict[str, Any]:
    """What came of it, as values."""
    plain = {each.name: getattr(soaked, each.name) for each in fields(soaked)}
    return plain | {
        "hits": {kind.value: count for kind, count in soaked.hits.items()},
        "problems": problems,
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (30)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first scene's number (0)")
    parser.add_argument("--scenes", type=int, help="only so many scenes")
    parser.add_argument("--path", type=Path, help="where directories are made (a temporary one)")
    parser.add_argument("--keep", action="store_true", help="leave the directories behind")
    parser.add_argument("--json", action="store_true", help="print a JSON object, not a table")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="tiered-kv-soak.", dir=options.path)).resolve()
    began = time.monotonic()
    seconds = options.minutes * 60
    failed = True
    try:
        with small_disk(folder) as tiny:
            if tiny is None:
                print("no small file system is to be had: none is really full", file=sys.stderr)
            soak = Soak(options.seed, folder, tiny)
            life_seconds = min(LIFE_SECONDS, seconds / 8)
            soak.run(options.first, options.scenes, began + seconds, life_seconds)
        # Only a whole run is held to its floors.
        minutes = options.minutes if options.scenes is None else 0.0
        problems = judge(soak.soaked, minutes)
        failed = bool(problems)
        if soak.soaked.violations:
            print("\n".join(soak.history.lines), file=sys.stderr)
            print(f"seed {options.seed}; left behind: {folder}", file=sys.stderr)
        if options.json:
            print(json.dumps(report(soak.soaked, problems)))
        else:
            show(soak.soaked, minutes, problems)
            print(f"seed {options.seed}, {time.monotonic() - began:.0f} s")
        return 1 if failed else 0
    finally:
        if not options.keep and not failed:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
