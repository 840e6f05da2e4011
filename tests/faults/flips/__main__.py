"""Flips single bits of stores, one at a time, and shows that none of it is served.

    python -m tests.faults.flips --flips 10000 --tier all --seed 1

After each flip a process opens the store, verifies and reads all blocks, stores further ones, reads
all again, and closes it. The bit is in a block's bytes, in a segment's header page or table, in the
index, in LMDB's values, or in the heads of LMDB's pages and nodes. Flips of LMDB's files are made
twice: with the time of the last change that every write leaves ("changed"), and with the time put
back ("hidden"), as when a disk rots below its file system.

The status is 1 where wrong bytes were served, a flip inside a block's bytes was not found, an error
came out that is none of ours, or a process was killed or hung; a process that was killed by a
hidden flip is told apart.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.faults.flips.places import Flip, Places
from tests.faults.flips.reader import LENGTHS, Outcome, content, fill, read_for_ever
from tests.stores.lmdb_parts import open_into_map, open_lmdb
from tests.stores.nvme_parts import open_nvme
from tiered_kv.testing.conformance.blocks import StoreArguments
from tiered_kv.testing.conformance.children import Opener

_PROCESSES = multiprocessing.get_context("fork")

TIERS: dict[str, Opener] = {"nvme": open_nvme, "lmdb": open_lmdb, "lmdb_map": open_into_map}
SHARES = {
    "block bytes": 30,
    "room between blocks": 5,
    "header page": 10,
    "header table": 15,
    "index: trees": 15,
    "index: page heads": 25,
    "values: trees": 10,
    "values: page heads": 20,
}
"""How many of the flips of a store go to each place, in parts of those it has."""
LEFT = ("clean", "killed")
"""How the process that made a store left it."""
BLOCKS = 96
_CAPACITY = 4 * 2**20
_ANSWER_SECONDS = 60.0
COLUMNS = ("flips", "right", "missed", "found", "refused", "wrong", "broke", "killed", "hung")


@dataclass(slots=True)
class Tally:
    """What all flips came to."""

    lines: dict[tuple[str, str, str, str], Counter[str]] = field(default_factory=dict)
    """By (tier, place, how the store was left, times)."""
    problems: list[str] = field(default_factory=list)
    hidden_kills: list[str] = field(default_factory=list)
    examples: dict[str, str] = field(default_factory=dict)
    """Of each kind of refusal, and of each error, the first."""

    def add(self, other: Tally) -> None:
        """What another process counted."""
        for key, line in other.lines.items():
            self.lines.setdefault(key, Counter()).update(line)
        self.problems += other.problems
        self.hidden_kills += other.hidden_kills
        self.examples = other.examples | self.examples


class Pristine:
    """The sound store, and a copy of it that is damaged and put right again."""

    def __init__(self, folder: Path, opener: Opener, left: str) -> None:
        """`left`: "clean", or "killed" where the process that made it was."""
        self.copy = folder / "store"
        self.left = left
        self.opener = opener
        self.arguments = StoreArguments(self.copy, _CAPACITY, block_bytes=LENGTHS)
        process = _PROCESSES.Process(
            target=_quietly, args=(fill, opener, self.arguments, BLOCKS, left)
        )
        process.start()
        process.join()
        if process.exitcode != (-signal.SIGKILL if left == "killed" else 0):
            raise RuntimeError(f"the store was not made: {process.exitcode}")
        self._kept = folder / "pristine"
        shutil.copytree(self.copy, self._kept)
        self._states = {path: path.stat() for path in sorted(self._kept.rglob("*"))}
        self._seen: dict[Path, tuple[int, int, int]] = {}
        shutil.rmtree(self.copy)
        self.restore()
        self.places = Places(self.copy, {number: content(number) for number in range(BLOCKS)})

    def restore(self) -> None:
        """As it was, the times of the files included."""
        wanted = {path.relative_to(self._kept) for path in self._states}
        if self.copy.exists():
            for path in sorted(self.copy.rglob("*"), reverse=True):
                if path.relative_to(self.copy) not in wanted:
                    path.rmdir() if path.is_dir() else path.unlink()
        self.copy.mkdir(mode=0o700, exist_ok=True)
        for path, state in self._states.items():
            ours = self.copy / path.relative_to(self._kept)
            if path.is_dir():
                ours.mkdir(mode=0o700, exist_ok=True)
            elif ours not in self._seen or self._seen[ours] != _identity(ours):
                ours.unlink(missing_ok=True)
                shutil.copyfile(path, ours)
                ours.chmod(0o600)
                os.utime(ours, ns=(state.st_atime_ns, state.st_mtime_ns))
                self._seen[ours] = _identity(ours) or (0, 0, 0)

    def flip(self, flip: Flip, *, hidden: bool) -> None:
        """Turn the bit over."""
        path = self.copy / flip.file
        before = path.stat()
        fd = os.open(path, os.O_RDWR)
        try:
            byte = os.pread(fd, 1, flip.offset)[0] ^ (1 << flip.bit)
            os.pwrite(fd, bytes([byte]), flip.offset)
        finally:
            os.close(fd)
        now = before.st_mtime_ns if hidden else time.time_ns()
        os.utime(path, ns=(before.st_atime_ns, now))
        self._seen.pop(path, None)


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Differs whenever the file was written to; a change through a map may show in ctime alone."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return state.st_ino, state.st_mtime_ns, state.st_ctime_ns


class Reader:
    """The process that reads, started anew when it was killed."""

    def __init__(self, store: Pristine) -> None:
        self._store = store
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def look(self) -> Outcome | str:
        """What it found, or what became of it: "hung", or the name of a signal."""
        process, pipe = self._started()
        pipe.send(True)
        try:
            if pipe.poll(_ANSWER_SECONDS):
                outcome: Outcome = pipe.recv()
                return outcome
            end = "hung"
            process.kill()
            process.join()
        except EOFError:
            process.join()
            status = process.exitcode or 0
            end = signal.Signals(-status).name if status < 0 else f"status {status}"
        self._process = None
        return end

    def _started(self) -> tuple[BaseProcess, Connection]:
        if self._process is None or self._pipe is None:
            self._pipe, theirs = _PROCESSES.Pipe()
            arguments = (self._store.opener, self._store.arguments, BLOCKS, theirs)
            self._process = _PROCESSES.Process(target=_quietly, args=(read_for_ever, *arguments))
            self._process.start()
            theirs.close()
        return self._process, self._pipe

    def close(self) -> None:
        """End it."""
        if self._process is not None and self._pipe is not None:
            self._pipe.send(False)
            self._process.join(_ANSWER_SECONDS)


def _quietly(act: Any, *arguments: Any) -> None:
    """A child: what is logged about damage would be tens of thousands of lines."""
    import logging

    logging.disable(logging.CRITICAL)
    act(*arguments)
    os._exit(0)


def judge(
    tally: Tally, tier: str, left: str, flip: Flip, times: str, outcome: Outcome | str
) -> None:
    """Add an outcome to the table."""
    line = tally.lines.setdefault((tier, flip.place, left, times), Counter())
    line["flips"] += 1
    where = f"{tier} left {left}, {flip.place}, {times}: {flip.file}"
    where += f" byte {flip.offset} bit {flip.bit}"
    if isinstance(outcome, str):
        kind = "hung" if outcome == "hung" else "killed"
        line[kind] += 1
        told = f"{where}: {outcome}"
        if kind == "killed" and times == "hidden":
            tally.hidden_kills.append(told)
        else:
            tally.problems.append(told)
        return
    if outcome.served:
        line["wrong"] += 1
        tally.problems.append(f"{where}: blocks {sorted(outcome.served)} are served wrong")
    elif outcome.broke:
        line["broke"] += 1
        last = outcome.broke.strip().splitlines()[-1]
        tally.problems.append(f"{where}: {outcome.stage}: {last}")
        tally.examples.setdefault(last, outcome.broke)
    elif outcome.refused:
        line["refused"] += 1
        tally.examples.setdefault(
            " ".join(outcome.refused.split()[:5]), f"{where}: {outcome.refused}"
        )
    elif outcome.found:
        line["found"] += 1
    elif outcome.missing or outcome.unreadable:
        line["missed"] += 1
    else:
        line["right"] += 1
    if flip.block is not None and flip.block not in outcome.found:
        tally.problems.append(f"{where}: not found in block {flip.block}: {outcome}")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.flips", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--flips", type=int, default=10_000, help="of all tiers together (10000)")
    parser.add_argument("--tier", choices=(*TIERS, "all"), default="all")
    parser.add_argument("--times", choices=("changed", "hidden", "both"), default="both")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes that flip at once (2)")
    parser.add_argument("--path", type=Path, help="where the stores are made (/dev/shm)")
    parser.add_argument("--json", action="store_true", help="print a JSON object, not a table")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    base = options.path or (Path("/dev/shm") if Path("/dev/shm").is_dir() else None)
    tiers = list(TIERS) if options.tier == "all" else [options.tier]
    both = ("changed", "hidden")
    wanted = both if options.times == "both" else (options.times,)
    tally = Tally()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tiered-kv-flips.", dir=base) as folder:
        parts = [
            (tier, left, job) for tier in tiers for left in LEFT for job in range(options.jobs)
        ]
        shares = [
            options.flips // len(parts) + (number < options.flips % len(parts))
            for number in range(len(parts))
        ]
        for first in range(0, len(parts), options.jobs):
            running = []
            for (tier, left, job), share in list(zip(parts, shares, strict=True))[
                first : first + options.jobs
            ]:
                ours, theirs = _PROCESSES.Pipe(duplex=False)
                place = Path(folder) / f"{tier}-{left}-{job}"
                seed = f"{options.seed} {tier} {left} {job}"
                process = _PROCESSES.Process(
                    target=_torment, args=(theirs, tier, left, place, share, seed, wanted)
                )
                process.start()
                theirs.close()
                running.append((ours, process))
            for ours, process in running:
                tally.add(ours.recv())
                process.join()
    seconds = time.monotonic() - began
    if options.json:
        print(json.dumps(report(tally, seconds), indent=1))
    else:
        show(tally, seconds)
    return 1 if tally.problems else 0


def _torment(out: Connection, *arguments: Any) -> None:
    try:
        out.send(torment(*arguments))
    except BaseException as error:
        out.send(Tally(problems=[f"the flips broke off: {error!r}"]))
        raise


def torment(
    tier: str, left: str, folder: Path, flips: int, seed: str, times: tuple[str, ...]
) -> Tally:
    """So many flips of one store."""
    folder.mkdir()
    tally = Tally()
    store = Pristine(folder, TIERS[tier], left)
    reader = Reader(store)
    chance = random.Random(seed)
    names = store.places.names
    weights = [SHARES[name] for name in names]
    sound = reader.look()
    if isinstance(sound, str) or sound.right != BLOCKS or not sound.stored or sound.refused:
        raise RuntimeError(f"the sound store of {tier} is not served: {sound}")
    store.restore()
    began = time.monotonic()
    for number in range(flips):
        place = chance.choices(names, weights)[0] if number >= len(names) else names[number]
        flip = store.places.draw(place, chance)
        for mode in times:
            if mode == "hidden" and not flip.file.endswith("data.mdb") and "changed" in times:
                continue  # nobody looks at the times of the other files
            store.flip(flip, hidden=mode == "hidden")
            judge(tally, tier, left, flip, mode, reader.look())
            store.restore()
        if (number + 1) % 250 == 0:
            print(
                f"{seed}: {number + 1} of {flips} flips, {time.monotonic() - began:.0f} s, "
                f"{len(tally.problems)} violations, {len(tally.hidden_kills)} hidden kills",
                file=sys.stderr,
                flush=True,
            )
    reader.close()
    return tally


def report(tally: Tally, seconds: float) -> dict[str, Any]:
    """What came of it, as values."""
    return {
        "seconds": round(seconds, 1),
        "lines": [
            {"tier": tier, "place": place, "left": left, "times": times}
            | {column: line[column] for column in COLUMNS}
            for (tier, place, left, times), line in sorted(tally.lines.items())
        ],
        "problems": tally.problems,
        "hidden_kills": tally.hidden_kills,
        "examples": tally.examples,
    }


def show(tally: Tally, seconds: float) -> None:
    """Print the table."""
    print("| tier | place | left | times |", " | ".join(COLUMNS), "|")
    print("|---" * (4 + len(COLUMNS)) + "|")
    total: Counter[str] = Counter()
    for key, line in sorted(tally.lines.items()):
        print("|", " | ".join((*key, *(str(line[column]) for column in COLUMNS))), "|")
        total.update(line)
    print("| all | | | |", " | ".join(str(total[c]) for c in COLUMNS), f"|\n{seconds:.0f} s")
    for kind, example in tally.examples.items():
        print(f"e.g. {kind}: {example}")
    for problem in tally.problems[:50]:
        print("VIOLATION:", problem)
    if len(tally.problems) > 50:
        print(f"and {len(tally.problems) - 50} more")
    if tally.hidden_kills:
        print(
            f"killed by hidden flips: {len(tally.hidden_kills)}. Nothing but a check of the file "
            "before LMDB maps it prevents that where its size and time say that nobody wrote to it "
            "(at the first open per boot, in a child process), or LMDB in a process of its own."
        )
        for told in tally.hidden_kills[:10]:
            print(f"  {told}")


if __name__ == "__main__":
    sys.exit(main())
