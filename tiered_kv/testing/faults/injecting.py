"""When: counts calls, draws from the plan's seed, holds up, raises, keeps the score."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.errors import NoSpace, TierError
from tiered_kv.testing.faults.plan import HOLDING, RAISING, Effect, Fault, FaultPlan, Method
from tiered_kv.testing.faults.valves import Valve
from tiered_kv.values import BlockKey

__all__ = ["Call", "Faults", "Injection"]

LONGEST_HANG = 600.0
"""Seconds after which a call that hangs counts as forgotten by its test."""


@dataclass(frozen=True, slots=True)
class Injection:
    """Something that went wrong."""

    method: Method
    effect: Effect
    call: int
    """Which call of the method, counted from 1 since the fault was injected."""
    positions: tuple[int, ...]
    """Which blocks of its batch; all where the effect is on the call as a whole."""


class Faults:
    """What goes wrong in the stores that share this object, and what did so far. Thread-safe."""

    def __init__(
        self,
        *faults: Fault,
        seed: int = 0,
        tier: str = "faulty",
        file: Path | None = None,
        told: Callable[[Injection], object] | None = None,
    ) -> None:
        """Begin with these faults; without any, nothing goes wrong yet.

        Args:
            faults: see `inject`.
            seed: see `inject`.
            tier: name of the tier in the errors that are raised.
            file: a file that holds a `FaultPlan` as JSON. It is looked at before each call, so that
                stores in other processes can be told; replace it by renaming. Nothing goes wrong
                while it is missing.
            told: called with everything that goes wrong, in the thread of the call.
        """
        self._tier = tier
        self._file = file
        self._told = told
        self._lock = threading.Lock()
        self._valves = {method: Valve() for method in Method}
        self._released = threading.Event()
        self._held = 0
        self._injected: Counter[tuple[Method, Effect]] = Counter()
        self._blocks: Counter[tuple[Method, Effect]] = Counter()
        self._seen: tuple[int, int] | None = None
        self._begin(FaultPlan(faults=faults, seed=seed))

    def _begin(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._calls: Counter[Method] = Counter()
        self._times = [0] * len(plan.faults)
        self._random = random.Random(plan.seed)

    def inject(self, *faults: Fault, seed: int = 0) -> None:
        """From now on these, instead of those before: calls are counted anew. Without arguments,
        nothing goes wrong any more."""
        with self._lock:
            self._begin(FaultPlan(faults=faults, seed=seed))

    def at(self, method: Method) -> Valve:
        """The valve that every call of a method passes before it begins."""
        return self._valves[method]

    def let_go(self) -> None:
        """Let every call begin that SLOW or HANG holds now."""
        with self._lock:
            self._released.set()
            self._released = threading.Event()

    @property
    def held(self) -> int:
        """Calls that SLOW or HANG is holding."""
        return self._held

    def calls(self) -> Counter[Method]:
        """Calls that began since the faults were injected."""
        with self._lock:
            return Counter(self._calls)

    def injected(self) -> Counter[tuple[Method, Effect]]:
        """At how many calls each effect was, since this object was made."""
        with self._lock:
            return Counter(self._injected)

    def injected_blocks(self) -> Counter[tuple[Method, Effect]]:
        """How many blocks each effect met, since this object was made."""
        with self._lock:
            return Counter(self._blocks)

    def begin(self, method: Method, keys: Sequence[BlockKey] = ()) -> Call:
        """A call begins: held up, or ended by an error, if that is planned.

        Raises:
            TierError, NoSpace, OSError, RuntimeError: as planned.
            TimeoutError: a valve was not opened, or a hanging call not let go, for too long.
        """
        self._valves[method].pass_through()
        with self._lock:
            self._look()
            self._calls[method] += 1
            number = self._calls[method]
            due = [
                (fault, positions)
                for at, fault in enumerate(self._plan.faults)
                if fault.method is method
                and (positions := self._chosen(at, fault, number, keys)) is not None
            ]
            released = self._released
        call = Call(self, method, number, due)
        for fault, positions in due:
            if fault.effect in HOLDING:
                call.injected(fault.effect, positions)
                self._hold(fault, released)
        call.raise_due(done=False)
        return call

    def _chosen(
        self, at: int, fault: Fault, number: int, keys: Sequence[BlockKey]
    ) -> tuple[int, ...] | None:
        positions = fault.chooses(number, keys)
        if positions is None or (fault.times is not None and self._times[at] >= fault.times):
            return None
        if fault.chance < 1 and self._random.random() >= fault.chance:
            return None
        self._times[at] += 1
        return positions

    def _look(self) -> None:
        """Read the plan's file where it is another one than before."""
        if self._file is None:
            return
        try:
            stat = self._file.stat()
        except FileNotFoundError:
            return
        seen = stat.st_ino, stat.st_mtime_ns
        if seen != self._seen:
            self._seen = seen
            self._begin(FaultPlan.model_validate_json(self._file.read_bytes()))

    def _hold(self, fault: Fault, released: threading.Event) -> None:
        hangs = fault.effect is Effect.HANG
        with self._lock:
            self._held += 1
        try:
            if not released.wait(LONGEST_HANG if hangs else fault.seconds) and hangs:
                raise TimeoutError(f"a call hung for {LONGEST_HANG:g} s; nobody let it go")
        finally:
            with self._lock:
                self._held -= 1

    def note(self, injection: Injection) -> None:
        """Keep the score."""
        with self._lock:
            what = injection.method, injection.effect
            self._injected[what] += 1
            self._blocks[what] += len(injection.positions)
        if self._told is not None:
            self._told(injection)

    def draw(self, count: int) -> int:
        """A number below `count`, from the plan's seed."""
        with self._lock:
            return self._random.randrange(count)

    def error(self, fault: Fault) -> Exception:
        """What a fault raises."""
        full = fault.effect in {Effect.NO_SPACE, Effect.ENOSPC}
        code = errno.ENOSPC if full else errno.EIO
        cause = OSError(code, os.strerror(code))
        where = f"injected at {fault.method} of tier {self._tier!r}"
        match fault.effect:
            case Effect.TIER_ERROR:
                error: Exception = TierError(f"{where}: {cause}", tier=self._tier)
            case Effect.NO_SPACE:
                error = NoSpace(f"{where}: {cause}")
            case Effect.BUG:
                return RuntimeError(f"{where}: a bug")
            case _:
                return cause
        error.__cause__ = cause
        return error


class Call:
    """One call, and what is to go wrong in it."""

    def __init__(
        self,
        faults: Faults,
        method: Method,
        number: int,
        due: Sequence[tuple[Fault, tuple[int, ...]]],
    ) -> None:
        self._faults = faults
        self._method = method
        self._number = number
        self._due = due

    def raise_due(self, *, done: bool) -> None:
        """Raise what is planned for before, or after the call was `done`."""
        for fault, positions in self._due:
            if fault.effect in RAISING and fault.done is done:
                self.injected(fault.effect, positions)
                raise self._faults.error(fault)

    def at(self, *effects: Effect) -> set[int]:
        """Positions of the blocks that one of these effects is planned for."""
        return {i for fault, positions in self._due if fault.effect in effects for i in positions}

    def has(self, effect: Effect) -> bool:
        """Whether an effect on the call as a whole is planned."""
        return any(fault.effect is effect for fault, _ in self._due)

    def injected(self, effect: Effect, positions: Iterable[int] = ()) -> None:
        """It was done."""
        self._faults.note(Injection(self._method, effect, self._number, tuple(sorted(positions))))

    def flip(self, data: memoryview) -> None:
        """Flip a bit of `data`."""
        bit = self._faults.draw(8 * data.nbytes)
        data[bit // 8] ^= 1 << bit % 8
