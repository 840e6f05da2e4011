"""The life of one simulated engine among troubles, from its start to an audit of what it left."""

from __future__ import annotations

import logging
import random
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

from tests.faults.soak.leftovers import Leftovers
from tests.faults.soak.scenes import Scene
from tests.faults.soak.troubles import Kind, Trouble
from tiered_kv.testing.simulation import ContentMismatch, Counts, Simulation, Workload

__all__ = ["History", "Soaked", "live"]

STEP_SECONDS = 15.0
"""A step that takes longer has waited for what it must not wait for. A flush may take 1 s."""
_STEPS = 5
"""Between two looks at the troubles."""
_LOGGERS = ("tiered_kv", "tiered_kv_gpu", "tiered_kv_nvme", "tiered_kv_lmdb", "asyncio")
_LIVES = (
    Workload(arrivals=0.7, abort=0.04, preempt=0.03, priorities=3),
    Workload(arrivals=0.7, abort=0.04, preempt=0.05, reset=0.002),
    Workload(arrivals=0.9, most_alive=16, prefixes=4, abort=0.1, preempt=0.06, priorities=2),
)


class History:
    """The latest that happened, in order. Thread-safe."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=400)
        self._began = time.monotonic()

    def tell(self, line: str) -> None:
        """It happens now."""
        self._lines.append(f"{time.monotonic() - self._began:10.3f} s  {line}")

    @property
    def lines(self) -> list[str]:
        """Oldest first."""
        return list(self._lines)


@dataclass(slots=True)
class Soaked:
    """What all lives came to."""

    lives: int = 0
    shut_while_busy: int = 0
    """Lives that ended while transfers ran, and while tiers hung."""
    counts: Counter[str] = field(default_factory=Counter)
    """Of `Counts`, what is a number."""
    by_kind: dict[str, Counter[str]] = field(default_factory=dict)
    """Of `Counts`, what is counted by kind."""
    hits: Counter[Kind] = field(default_factory=Counter)
    full_disks: int = 0
    flipped: int = 0
    checked_cache_blocks: int = 0
    slowest_step: float = 0.0
    wrong_bytes: int = 0
    exceptions: int = 0
    leaks: int = 0
    violations: list[str] = field(default_factory=list)

    def add(self, counts: Counts) -> None:
        """What one engine counted."""
        for each in fields(counts):
            value = getattr(counts, each.name)
            if isinstance(value, Counter):
                self.by_kind.setdefault(each.name, Counter()).update(value)
            else:
                self.counts[each.name] += value


class _Listener(logging.Handler):
    """Puts the log into the history, and keeps what only an event loop logs: an exception that
    nobody fetched."""

    def __init__(self, history: History) -> None:
        super().__init__(logging.WARNING)
        self._history = history
        self.lost: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self._history.tell(f"log: {text}")
        if record.name == "asyncio" and record.levelno >= logging.ERROR:
            self.lost.append(f"{text}\n{record.exc_info}")


@contextmanager
def _listening(history: History) -> Iterator[list[str]]:
    """Exceptions that ended a thread, or that no one fetched, are put into the list."""
    listener = _Listener(history)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    hook = threading.excepthook

    def ended(arguments: threading.ExceptHookArgs) -> None:
        shown = "".join(traceback.format_exception(arguments.exc_value or arguments.exc_type()))
        listener.lost.append(f"thread {getattr(arguments.thread, 'name', '?')} ended: {shown}")

    threading.excepthook = ended
    for logger in loggers:
        logger.addHandler(listener)
        logger.propagate = False
    try:
        yield listener.lost
    finally:
        threading.excepthook = hook
        for logger in loggers:
            logger.removeHandler(listener)
            logger.propagate = True


class _Life:
    """One engine."""

    def __init__(
        self,
        scene: Scene,
        draw: random.Random,
        soaked: Soaked,
        history: History,
        hits: Callable[[], Counter[Kind]],
    ) -> None:
        self._scene = scene
        self._draw = draw
        self._soaked = soaked
        self._history = history
        self._troubles = [
            Trouble(victim, random.Random(draw.random()), hits, history.tell)
            for victim in scene.victims.values()
        ]

    def run(self, seconds: float) -> None:
        """From the start to the end.

        Raises:
            ContentMismatch, EngineBroken, or whatever came out of a call that must raise nothing.
        """
        draw, history, scene = self._draw, self._history, self._scene
        workload = draw.choice(_LIVES)
        # A tier that is full, slow or gone must not keep the next engine from its start.
        with Simulation(
            scene.assembly,
            scene.model,
            seed=draw.randrange(2**32),
            hold_finished=draw.random() < 0.3,
            late_outputs=0.1,
            repeated_messages=0.1,
            by_priority=workload.priorities > 1,
            pace=scene.pace(),
        ) as sim:
            history.tell(f"{scene}: {workload}")
            try:
                sim.wait_ready(1.0)
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    for trouble in self._troubles:
                        trouble.step()
                    self._step(sim, workload)
                if draw.random() < 0.25:
                    self._soaked.shut_while_busy += 1
                    history.tell("shut down while transfers run")
                else:
                    self._end(sim)
            finally:
                self._soaked.add(sim.counts)
                if not self._soaked.violations:
                    sim.close()
                for trouble in self._troubles:
                    trouble.end()

    def _step(self, sim: Simulation, workload: Workload) -> None:
        for _ in range(_STEPS):
            began = time.monotonic()
            sim.live(workload, 1)
            took = time.monotonic() - began
            self._soaked.slowest_step = max(self._soaked.slowest_step, took)
            if took > STEP_SECONDS:
                raise TimeoutError(f"a step took {took:.1f} s")

    def _end(self, sim: Simulation) -> None:
        for trouble in self._troubles:
            trouble.end()
        self._history.tell("good times, until all requests are over")
        sim.run()
        if not sim.settle():
            self._blame_leak("transfers did not end within 30 s")
            return
        self._soaked.checked_cache_blocks += sim.check_device_cache()
        for what in sim.audit():
            self._blame_leak(what)
        for victim in self._scene.victims.values():
            if victim.watch.open_places:
                self._blame_leak(f"{victim.watch.open_places} places of {victim.name} are open")

    def _blame_leak(self, what: str) -> None:
        self._soaked.leaks += 1
        self._soaked.violations.append(f"leak: {what}")


def live(
    scene: Scene,
    seed: str,
    seconds: float,
    soaked: Soaked,
    history: History,
    hits: Callable[[], Counter[Kind]],
) -> None:
    """Let one engine live on a scene; what it did, and did wrong, is added to `soaked`."""
    before = Leftovers.now()
    soaked.lives += 1
    history.tell(f"life {seed!r} begins")
    with _listening(history) as lost:
        try:
            _Life(scene, random.Random(seed), soaked, history, hits).run(seconds)
        except ContentMismatch as error:
            soaked.wrong_bytes += 1
            soaked.violations.append(f"wrong bytes: {error}")
        except Exception:  # noqa: BLE001 - none may come out of a step, whatever it is
            soaked.exceptions += 1
            soaked.violations.append(f"exception: {traceback.format_exc()}")
        if not soaked.violations:
            for what in before.since(scene.folder):
                soaked.leaks += 1
                soaked.violations.append(f"leak: {what}")
    soaked.exceptions += len(lost)
    soaked.violations.extend(f"exception: {what}" for what in lost)
