"""One process of a round: stores on one thread and loads on another until it is killed or stopped.

It is watched, not changed: the index's transactions are wrapped so that the board shows where the
process is, and so that the kernel's timer can kill it there.
"""

from __future__ import annotations

import ctypes
import faulthandler
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.faults.torture.blocks import (
    BATCH,
    BLOCK_BYTES,
    Writer,
    content,
    length_of,
    new_block,
)
from tests.faults.torture.board import Board, Count, Phase, Seat
from tiered_kv.contracts import BlockStore
from tiered_kv.errors import NoSpace
from tiered_kv.index import BlockIndex, Environment, FullKey
from tiered_kv.testing.conformance.blocks import aligned_copy, keys, page_aligned
from tiered_kv.values import BlockStatus

__all__ = ["Task", "work"]

_WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.0002
_LEAST_SECONDS = 0.0001
_STEP_SECONDS = 0.01
_STEPS_AHEAD = 2
_LOADS_AT_ONCE = 6
_MAY_EVICT = (Phase.RESERVE, Phase.DATA, Phase.HEADERS)
_LONG = (Phase.OPEN, Phase.CLOSE)
_REMOVES_EVERY = 16
_AGAIN_EVERY = 8

_libc = ctypes.CDLL(None, use_errno=True)


class _Event(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("padding", ctypes.c_char * 48),
    )


class _Times(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "s", "ns"))


def kill_within(seconds: float) -> None:
    """Have the kernel send SIGKILL to this process then; Python has no part in it."""
    timer = ctypes.c_void_p()
    event = _Event(None, signal.SIGKILL, 0, b"")
    times = _Times(0, 0, int(seconds), max(1, int(seconds % 1 * 1e9)))
    made = _libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer))
    if made or _libc.timer_settime(timer, 0, ctypes.byref(times), None):
        raise OSError(ctypes.get_errno(), "no timer")


@dataclass(frozen=True, slots=True)
class Task:
    """What one process does in a round."""

    writer: Writer
    seed: str
    start: int
    """Number of its first new block."""
    batches: int
    """It stores no more than so many batches."""
    visible: tuple[int, ...] = ()
    """What is there before."""
    aim: Phase | None = None
    """Where it is to be killed by its own timer."""
    skip: int = 0
    """How often the phase is let pass before."""
    until_full: bool = False
    """End when the tier has been full for some batches; else when the board says so."""


class Watch:
    """Tells the board where the storing thread is, and sets the timer where it is aimed at."""

    def __init__(self, board: Board, seat: Seat, task: Task) -> None:
        self._board = board
        self._seat = seat
        self._task = task
        self._random = random.Random(f"aim {task.seed}")
        self._passed = 0
        self._since = time.monotonic()
        self._thread = threading.get_ident()
        self._call = Phase.BETWEEN

    def enter(self, phase: Phase) -> None:
        """The storing thread is in another phase from here on."""
        now = time.monotonic()
        durations = self._board.durations
        before = self._seat.phase
        took = now - self._since
        durations[before] += (0.2 if durations[before] else 1.0) * (took - durations[before])
        self._since = now
        self._seat.phase = phase
        if phase is self._task.aim and not self._seat.armed:
            self._passed += 1
            if phase in _LONG or self._passed > self._task.skip:
                self._aim(phase)

    def _aim(self, phase: Phase) -> None:
        # Open and close wait for the right moment: the others go on. Inside a transaction there is
        # no waiting, it would hold them up.
        if phase in _LONG:
            self.wait_in_flight()
        in_flight = self._board.in_flight()
        if in_flight or self._passed > self._task.skip + self._task.batches // 2:
            within = max(_LEAST_SECONDS, float(self._board.durations[phase]))
            self._seat.arm(in_flight=in_flight)
            kill_within(self._random.uniform(0.0, within))

    def wait_in_flight(self) -> None:
        """Wait, not for ever, until the others store, load and evict."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while not self._board.in_flight() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    @contextmanager
    def call(self, phase: Phase) -> Iterator[None]:
        """A call of the store."""
        self._call = phase
        self.enter(phase)
        try:
            yield
        finally:
            self._call = Phase.BETWEEN
            self.enter(Phase.BETWEEN)

    def follow_transactions(self) -> None:
        """From now on, tell when a transaction of the index publishes, and when it evicts."""
        write, oldest, remove = Environment.write, BlockIndex.oldest, BlockIndex.remove

        @contextmanager
        def watched_write(environment: Environment, *wait: Any) -> Iterator[Any]:
            publishes = self._call is Phase.HEADERS and threading.get_ident() == self._thread
            with write(environment, *wait) as txn:
                if publishes:
                    self.enter(Phase.INDEX)
                yield txn
            if threading.get_ident() == self._thread and self._call is not Phase.BETWEEN:
                self.enter(Phase.BETWEEN if publishes else self._call)

        def watched_oldest(index: BlockIndex, *arguments: Any) -> Any:
            self._evicting()
            return oldest(index, *arguments)

        def watched_remove(
            index: BlockIndex, txn: Any, blocks: Iterable[FullKey], *more: Any, **named: Any
        ) -> Any:
            removed = list(blocks)
            if removed:
                self._seat.remove(removed)
                self._evicting()
            return remove(index, txn, removed, *more, **named)

        for owner, name, watched in (
            (Environment, "write", watched_write),
            (BlockIndex, "oldest", watched_oldest),
            (BlockIndex, "remove", watched_remove),
        ):
            setattr(owner, name, watched)

    def _evicting(self) -> None:
        mine = threading.get_ident() == self._thread
        if mine and self._call in _MAY_EVICT and self._seat.phase is not Phase.EVICT:
            self.enter(Phase.EVICT)


class Worker:
    """Runs a task."""

    def __init__(self, board: Board, seat: int, task: Task, peers: Sequence[int]) -> None:
        """`peers`: the seats of those that store the same blocks, this one included."""
        self._board = board
        self._seat = board.seats[seat]
        self._peers = [board.seats[peer] for peer in peers]
        self._task = task
        self._random = random.Random(f"work {task.seed}")
        self._watch = Watch(board, self._seat, task)
        self._turn = threading.Lock()
        """Held by the loading thread while it reads, and while the store is opened and closed."""
        self._store: BlockStore | None = None
        self._failure: BaseException | None = None
        self._over = threading.Event()

    def run(self) -> None:
        """The whole task.

        Raises:
            Exception: as the store raises, from either thread.
        """
        self._watch.follow_transactions()
        loader = threading.Thread(target=self._guarded, args=(self._load,), daemon=True)
        with self._turn:
            store = self._open()
            loader.start()
        evicting = 0
        number = self._task.start
        for batch in range(self._task.batches):
            if self._board.stopped or self._failure or (self._task.until_full and evicting >= 3):
                break
            self._keep_step(batch)
            if self._reopens(batch):
                store = self._reopen(store)
            evicting += self._put(store, self._numbers(number))
            number += BATCH
            self._seat.ready = self._seat.counted(Count.LOADED) > 0
            if batch % _REMOVES_EVERY == _REMOVES_EVERY - 1:
                self._remove(store)
        while not (self._board.stopped or self._failure or self._task.until_full):
            time.sleep(_POLL_SECONDS)
        self._over.set()
        loader.join(_WAIT_SECONDS)
        with self._turn:
            self._close(store)
        if self._failure is not None:
            raise self._failure

    def _keep_step(self, batch: int) -> None:
        """The ranks of an engine store the same blocks at about the same time; but none waits for
        one that was killed."""
        self._seat.batches = batch
        deadline = time.monotonic() + _STEP_SECONDS
        while time.monotonic() < deadline and any(
            0 < peer.batches < batch - _STEPS_AHEAD for peer in self._peers
        ):
            time.sleep(_POLL_SECONDS)

    def _reopens(self, batch: int) -> bool:
        aim = self._task.aim
        if aim is Phase.CLOSE:
            return batch == 4 + self._task.skip
        return batch > 0 and aim is None and self._random.random() < 0.03

    def _numbers(self, first: int) -> list[int]:
        """A batch; now and then some of it was stored, and perhaps evicted, long before."""
        numbers = list(range(first, first + BATCH))
        chance = random.Random(first)  # the same on all ranks
        if chance.random() < 1 / _AGAIN_EVERY and first - self._task.writer.first > 400:
            numbers[0] -= 400
        return numbers

    # ------------------------------------------------------------------------------ the store

    def _open(self) -> BlockStore:
        with self._watch.call(Phase.OPEN):
            writer = self._task.writer
            self._store = writer.opener(writer.arguments)
        self._seat.count(Count.OPENED)
        return self._store

    def _close(self, store: BlockStore) -> None:
        with self._watch.call(Phase.CLOSE):
            self._store = None
            store.close()

    def _reopen(self, store: BlockStore) -> BlockStore:
        with self._turn:
            self._close(store)
            return self._open()

    def _put(self, store: BlockStore, numbers: Sequence[int]) -> bool:
        """Store a batch; whether something was evicted for it."""
        rank = self._task.writer.rank
        blocks = [new_block(number, rank) for number in numbers]
        evicted = store.stat().evicted_blocks
        try:
            with self._watch.call(Phase.RESERVE):
                answers = store.reserve(blocks)
        except NoSpace:
            self._seat.count(Count.NO_SPACE, len(blocks))
            return False
        given = [(n, one) for n, one in zip(numbers, answers, strict=True) if one is not None]
        evicted = store.stat().evicted_blocks - evicted
        self._seat.count(Count.EVICTED, evicted)
        self._seat.evicts = evicted > 0
        places = [place for _, place in given]
        memory = [aligned_copy(content(number, rank)) for number, _ in given]
        try:
            with self._watch.call(Phase.DATA):
                store.write(places, memory)
            with self._watch.call(Phase.HEADERS):
                store.publish(places)
        except NoSpace:
            self._seat.count(Count.NO_ROOM, len(places))
            store.abandon(places)
            return evicted > 0
        self._seat.acknowledge([number for number, _ in given])
        self._seat.count(Count.STORED, len(given))
        return evicted > 0

    def _remove(self, store: BlockStore) -> None:
        number = self._random.choice(self._seat.acknowledged() or [self._task.writer.first])
        try:
            with self._watch.call(Phase.REMOVE):
                dropped = store.delete(keys([number]))
        except NoSpace:
            self._seat.count(Count.NO_ROOM)
            return
        self._seat.count(Count.DELETED, dropped)

    # ------------------------------------------------------------------------------- the loads

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - told by the storing thread, whatever it is
            self._failure = error

    def _load(self) -> None:
        first = self._task.writer.first
        chance = random.Random(f"load {self._task.seed}")
        memory = [page_aligned(max(BLOCK_BYTES)) for _ in range(_LOADS_AT_ONCE)]
        while not self._over.is_set():
            recent = [number for seat in self._peers for number in seat.acknowledged()[-40:]]
            known = recent or self._task.visible or [first]
            numbers = [chance.choice(known) for _ in memory]
            if self._task.visible:
                numbers[0] = chance.choice(self._task.visible)
            with self._turn:
                store = self._store
                if store is None:
                    continue
                self._seat.loading = True
                results = store.read(keys(numbers), memory)
                self._seat.loading = False
                store.touch(keys(numbers[:1]))
            for number, view, result in zip(numbers, memory, results, strict=True):
                self._seat.count(judged(number, self._task.writer.rank, view, result))
            time.sleep(0)


def judged(number: int, rank: int, view: memoryview, result: Any) -> Count:
    """What the answer to a read was worth."""
    if result.status is BlockStatus.MISSING:
        return Count.MISSING
    if result.status is not BlockStatus.OK or result.checksum is None:
        return Count.FAILED
    data = view[: result.checksum.length]
    if not result.checksum.verifies(keys([number])[0], rank, data):
        return Count.CORRUPT
    right = result.checksum.length == length_of(number) and bytes(data) == content(number, rank)
    return Count.LOADED if right else Count.WRONG


def work(board: Board, seat: int, task: Task, peers: Sequence[int]) -> None:
    """What the process runs. SIGUSR1 prints where its threads are."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    Worker(board, seat, task, peers).run()
