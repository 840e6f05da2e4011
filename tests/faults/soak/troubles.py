"""What goes wrong in a tier, and when: bad times of one kind after another, and good ones between
them, so that the tier comes back."""

from __future__ import annotations

import errno
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tests.faults.soak.watching import OPERATIONS, Watch
from tiered_kv.testing.faults import Effect, Fault, Faults, Method
from tiered_kv.testing.memory_tier import MemoryDisk

__all__ = ["Kind", "Trouble", "VictimTier"]

MIB = 2**20


class Kind(StrEnum):
    """What goes wrong."""

    SLOW = "slow"
    HANG = "hang"
    ERROR = "error"
    NO_SPACE = "no space"
    CORRUPTION = "corruption"
    REMOVAL = "removal"


EFFECTS = {
    Kind.SLOW: (Effect.SLOW,),
    Kind.HANG: (Effect.HANG,),
    Kind.ERROR: (Effect.TIER_ERROR, Effect.EIO, Effect.BUG, Effect.BLOCK_ERROR, Effect.NOT_FOUND),
    Kind.NO_SPACE: (Effect.NO_SPACE, Effect.ENOSPC),
    Kind.CORRUPTION: (Effect.FLIP, Effect.SHORT, Effect.FOREIGN, Effect.LIE),
    Kind.REMOVAL: (),
}
"""By which injected effects each kind is; only those at `OPERATIONS` count as hits."""

GOOD_SECONDS = (0.2, 1.0)
BAD_SECONDS = (0.2, 0.8)
_SLOW_SECONDS = (0.02, 0.6)
"""On both sides of the deadline of a load."""


@dataclass(slots=True)
class VictimTier:
    """A tier in which things go wrong."""

    name: str
    faults: Faults
    watch: Watch
    remove: Callable[[], object]
    """Takes everything away that the tier holds."""
    files: Path | None = None
    """Where bits can be flipped; None: nowhere, without knowing what lies there."""
    disk: MemoryDisk | None = None
    filler: Path | None = None
    """A file that can take all the space of the tier's file system; None: that is not its own."""
    full_disks: int = 0
    """Times that its file system was full, and a call was refused by that."""
    flipped: int = 0
    """Bits that were flipped on its medium."""

    def hits(self) -> Counter[Kind]:
        """How often each kind was at a call that was moving blocks."""
        injected = self.faults.injected()
        hits = Counter(
            {
                kind: sum(injected[method, effect] for method in OPERATIONS for effect in effects)
                for kind, effects in EFFECTS.items()
            }
        )
        hits[Kind.NO_SPACE] += self.full_disks
        hits[Kind.REMOVAL] += self.watch.acted
        return hits


@dataclass(slots=True)
class Trouble:
    """The times of one tier in one life of an engine. Engine's thread only."""

    tier: VictimTier
    random: random.Random
    hits: Callable[[], Mapping[Kind, int]]
    """Of all tiers so far: what was rare comes sooner."""
    tell: Callable[[str], object]
    _kind: Kind | None = None
    _until: float = 0.0
    _refused: int = 0
    _removed: bool = field(default=False)

    def step(self) -> None:
        """Begin or end bad times, if it is time."""
        now = time.monotonic()
        if now < self._until:
            return
        if self._kind is not None:
            self._end()
            self._until = now + self.random.uniform(*GOOD_SECONDS)
        elif self._until == 0.0:
            self._until = now + self.random.uniform(0.0, GOOD_SECONDS[1])
        else:
            self._begin(self._choose())
            self._until = now + self.random.uniform(*BAD_SECONDS)

    def end(self) -> None:
        """Good times from now on."""
        if self._kind is not None:
            self._end()
        self.tier.watch.forget()
        self.tier.faults.inject()
        self.tier.faults.let_go()

    def _choose(self) -> Kind:
        hits = self.hits()
        kinds = [kind for kind in Kind if kind is not Kind.REMOVAL or not self._removed]
        return self.random.choices(kinds, [1 / (1 + hits.get(kind, 0)) for kind in kinds])[0]

    def _begin(self, kind: Kind) -> None:
        tier = self.tier
        self._kind = kind
        what = ""
        self._refused = tier.watch.refused
        if kind is Kind.REMOVAL:
            self._removed = True
            tier.watch.in_a_call(tier.remove)
        elif kind is Kind.NO_SPACE and tier.filler is not None and self.random.random() < 0.5:
            what = f", {_fill(tier.filler)} bytes by others"
        else:
            if kind is Kind.CORRUPTION:
                what = self._flip()
            faults = self._faults(kind)
            tier.faults.inject(*faults, seed=self.random.randrange(2**32))
            what += ", " + ", ".join(f"{f.effect} at {f.method}" for f in faults)
        self.tell(f"{tier.name}: {kind}{what}")

    def _end(self) -> None:
        tier = self.tier
        tier.faults.inject()
        tier.faults.let_go()
        if tier.filler is not None and tier.filler.exists():
            tier.filler.unlink()
            if tier.watch.refused > self._refused:
                tier.full_disks += 1
        self.tell(f"{tier.name}: no more {self._kind}")
        self._kind = None

    def _faults(self, kind: Kind) -> tuple[Fault, ...]:
        draw = self.random
        effects = EFFECTS[kind]
        match kind:
            case Kind.SLOW:
                seconds = draw.uniform(*_SLOW_SECONDS)
                return tuple(
                    Fault(method=method, effect=Effect.SLOW, seconds=seconds, chance=0.5)
                    for method in OPERATIONS
                )
            case Kind.HANG:
                methods = draw.sample(OPERATIONS, draw.randint(1, 2))
                return tuple(Fault(method=method, effect=Effect.HANG) for method in methods)
            case Kind.CORRUPTION:
                method = draw.choice((Method.READ, Method.WRITE))
                effect = draw.choice(effects)
                return (Fault(method=method, effect=effect, chance=0.5),)
            case _:
                if kind is Kind.ERROR and draw.random() < 0.3:
                    effect = draw.choice((Effect.BLOCK_ERROR, Effect.NOT_FOUND))
                    return (Fault(method=Method.READ, effect=effect, chance=0.5),)
                effect = draw.choice(effects[:3])
                methods = draw.sample(OPERATIONS, draw.randint(1, 4))
                return tuple(Fault(method=method, effect=effect, chance=0.5) for method in methods)

    def _flip(self) -> str:
        """Flip bits where the tier keeps its blocks, whatever they belong to."""
        tier, count = self.tier, 0
        if tier.disk is not None:
            keys = sorted(tier.disk.keys())
            chosen = self.random.sample(keys, min(3, len(keys)))
            for key in chosen:
                tier.disk.spoil(key)
            count = len(chosen)
        elif tier.files is not None:
            for file in sorted(tier.files.rglob("segment-*"))[:3]:
                count += self._flip_in(file)
        tier.flipped += count
        return f", {count} bits on the medium" if count else ""

    def _flip_in(self, file: Path) -> int:
        try:
            with file.open("r+b") as data:
                size = file.stat().st_size
                at = self.random.randrange(max(1, size))
                data.seek(at)
                byte = data.read(1)
                data.seek(at)
                data.write(bytes([byte[0] ^ 1 << self.random.randrange(8)]) if byte else b"")
        except (FileNotFoundError, OSError):  # removed meanwhile, or the disk is full
            return 0
        return 1


def _fill(file: Path) -> int:
    """Take all the space that is left; how much that was."""
    taken = 0
    with file.open("wb", buffering=0) as out:
        for size in (MIB, 4096):
            try:
                while True:
                    taken += out.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return taken


def remove_directory(path: Path) -> None:
    """Delete a directory that is in use: it is gone at once, and then all that was in it."""
    gone = path.with_name(f"{path.name}-removed-{time.monotonic_ns()}")
    try:
        path.rename(gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)
