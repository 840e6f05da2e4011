"""Putting the results of a job's groups together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tiered_kv.specs import HopResult
from tiered_kv.values import BlockStatus

__all__ = ["Outcome", "all_ended", "groups_of"]


@dataclass(slots=True)
class Outcome:
    """What became of a job's blocks so far, in job order."""

    statuses: list[BlockStatus]
    copied_bytes: int = 0
    """Bytes that entered or left the engine's cache."""

    @classmethod
    def pending(cls, count: int) -> Outcome:
        """Nothing is in place yet: whatever is never set counts as failed."""
        return cls([BlockStatus.TIER_ERROR] * count)

    def set(self, positions: Sequence[int], statuses: Sequence[BlockStatus]) -> None:
        """Note what became of the blocks at these positions of the job."""
        for position, status in zip(positions, statuses, strict=True):
            self.statuses[position] = status

    def set_all(self, positions: Sequence[int], status: BlockStatus) -> None:
        """The same for all of them."""
        for position in positions:
            self.statuses[position] = status

    def add(self, positions: Sequence[int], result: HopResult) -> None:
        """Note the result of a hop into, or out of, the engine's cache."""
        self.set(positions, result.statuses)
        self.copied_bytes += result.copied_bytes


def groups_of(count: int, size: int) -> Iterator[range]:
    """Cut `range(count)` into runs of at most `size`."""
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


async def all_ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until every task has ended, and only then raise what one of them raised."""
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        task.result()
