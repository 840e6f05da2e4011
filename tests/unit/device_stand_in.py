"""A stand-in for a device: nothing runs before somebody waits for it, and everything is recorded.

It is as late as a device may be. Work runs when a thread waits for a mark behind it, and then only
what that mark stands behind: the lane's own earlier work, and what the lane was told to come
after. So a missing `after`, a missing wait, or memory reused too early shows as wrong bytes, and
in the record.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


class StandInMark:
    def __init__(self, lane: StandInLane, position: int) -> None:
        self._lane = lane
        self._position = position

    def wait(self) -> None:
        """As the thread of the handler does."""
        device = self._lane.device
        with device.turn:
            self.reach()
            device.record.append(f"{self._lane.name}: waited")
            if device.failure is not None:
                raise RuntimeError(device.failure)

    def reach(self) -> None:
        self._lane.advance(self._position)


class StandInLane:
    def __init__(self, device: StandIn, name: str) -> None:
        self.device = device
        self.name = name
        self.given = 0
        self._done = 0
        self._work: deque[tuple[str, Callable[[], object]]] = deque()

    def after(self, mark: object) -> None:
        if not isinstance(mark, StandInMark):
            raise TypeError(f"{mark!r} is no mark")
        self._give("held back", mark.reach)

    def run(self, work: Callable[[], object]) -> None:
        self._give(work.__name__, work)

    def mark(self) -> StandInMark:
        self._give("marked", lambda: None)
        return StandInMark(self, self.given)

    def advance(self, position: int) -> None:
        while self._done < position:
            name, work = self._work.popleft()
            self._done += 1
            work()
            self.device.record.append(f"{self.name}: {name}")

    def _give(self, name: str, work: Callable[[], object]) -> None:
        with self.device.turn:
            self._work.append((name, work))
            self.given += 1
            self.device.record.append(f"{self.name}: given {name}")


@dataclass(eq=False)
class StandIn:
    """Implements `tiered_kv.memory.Device` on CPU tensors. `compute` is the engine's stream."""

    name: str = "stand-in:0"
    record: list[str] = field(default_factory=list)
    """What the device was given and did, in order, and when a thread had waited. Tests add what
    else must have its place in that order."""
    failure: str | None = None
    """Waiting fails with it."""
    ranges: dict[int, int] = field(default_factory=dict)
    """Registered host memory: address to bytes."""
    turn: threading.RLock = field(default_factory=threading.RLock)
    lanes: list[StandInLane] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compute = StandInLane(self, "compute")

    def lane(self) -> StandInLane:
        lane = StandInLane(self, f"lane {len(self.lanes)}")
        self.lanes.append(lane)
        return lane

    def fence(self) -> StandInMark:
        return self.compute.mark()

    def synchronize(self) -> None:
        with self.turn:
            for lane in (self.compute, *self.lanes):
                lane.advance(lane.given)
            self.record.append("synchronised")

    def host_tensor(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)

    def register_host(self, address: int, nbytes: int) -> None:
        self.ranges[address] = nbytes

    def unregister_host(self, address: int) -> None:
        del self.ranges[address]
