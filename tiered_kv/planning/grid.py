"""Replays a trace for every cell of a grid of capacities and policies, side by side in processes.

The replay is `tiered_kv.placement.Replay`: the placement and eviction code that serves.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiered_kv.errors import TieredKVError
from tiered_kv.placement import Replay, ReplayTier, TracedRequest
from tiered_kv.planning.speeds import HOST, SSD
from tiered_kv.planning.traces import Trace

__all__ = ["ENGINE", "Cell", "Measured", "Outcome", "automatic_capacities", "replay_grid"]

ENGINE = "engine"
"""The engine's own cache, where it is replayed, too: least recently used goes first, as in vLLM."""

AUTOMATIC = 8
"""Capacities that are tried where none are given, each twice the one before."""

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination."""

    policy: str
    """Of the host tier."""
    ssd_policy: str
    """Of the SSD: the same, where a store can go by it."""
    ssd_bytes: int
    """0: none."""
    host_bytes: int
    """Of all ranks; 0: none."""
    engine_bytes: int = 0
    """Of all ranks, of the engine's own cache; 0: not replayed."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The part of the trace that counts: what comes before it warms the tiers up."""

    first: int
    """Number of its first request."""
    tokens: Counts
    """Of the prompt of each of its requests."""
    seconds: float
    """From the end of the warm-up to the last request."""

    @classmethod
    def of(cls, trace: Trace, warm_up: float) -> Measured:
        """All but the first `warm_up` (0 to less than 1) of the requests."""
        first = min(int(len(trace.requests) * warm_up), len(trace.requests) - 1)
        requests = trace.requests
        since = requests[first - 1].time if first else requests[0].time
        tokens = np.array([request.tokens for request in requests[first:]], np.int64)
        return cls(first, tokens, requests[-1].time - since)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a cell came to, over the measured part of the trace."""

    cell: Cell
    engine: Counts
    """Tokens that each request found in the engine's own cache ..."""
    host: Counts
    """... in host memory ..."""
    ssd: Counts
    """... and on the SSD."""
    ssd_stored: int
    """Blocks written to the SSD."""
    ssd_evicted: int
    ssd_resident: int
    """Blocks on it in the end."""


def automatic_capacities(footprint: int) -> list[int]:
    """Capacities (bytes) to try for a trace that wants `footprint` bytes in all, the largest of
    which holds everything; powers of two."""
    largest = 1 << max(20 + AUTOMATIC, (footprint - 1).bit_length())
    return [largest >> step for step in reversed(range(AUTOMATIC))]


def replay_grid(
    trace: Trace,
    cells: Sequence[Cell],
    *,
    block_bytes: float,
    first: int,
    processes: int | None = None,
    done: Callable[[Cell], None] = lambda cell: None,
) -> list[Outcome]:
    """Replay the trace for each cell.

    Args:
        trace: requests.
        cells: combinations; the outcomes come in the same order.
        block_bytes: of a block of the trace, over all ranks.
        first: number of the first request that counts.
        processes: that run at once; as many as there are processors if not given.
        done: called when a cell is done.

    Raises:
        TieredKVError: a process was killed.
    """
    wanted = min(len(cells), processes or len(os.sched_getaffinity(0)))
    jobs = [_Job(cell, trace.block_tokens, block_bytes, first) for cell in cells]
    if wanted <= 1:
        outcomes = []
        for job in jobs:
            outcomes.append(job.run(trace.requests))
            done(job.cell)
        return outcomes
    before = set(multiprocessing.active_children())
    # Fresh processes: one that is forked would inherit the locks of other threads.
    pool = ProcessPoolExecutor(
        wanted,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_take,
        initargs=(trace.requests,),
    )
    try:
        futures = {pool.submit(_run, job): number for number, job in enumerate(jobs)}
        results: dict[int, Outcome] = {}
        for future in as_completed(futures):
            number = futures[future]
            results[number] = future.result()
            done(jobs[number].cell)
    except BrokenProcessPool as error:
        raise TieredKVError(
            "a process that replayed the trace was killed (by the kernel, for want of memory?); "
            "try fewer at once with --processes"
        ) from error
    except BaseException:  # interrupted: nobody waits for the cells that are being replayed
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return [results[number] for number in range(len(jobs))]


@dataclass(frozen=True, slots=True)
class _Job:
    cell: Cell
    block_tokens: int
    block_bytes: float
    first: int

    def run(self, requests: Sequence[TracedRequest]) -> Outcome:
        cell = self.cell
        tiers = [
            ReplayTier(name, int(size // self.block_bytes), policy, name == SSD)
            for name, size, policy in (
                (ENGINE, cell.engine_bytes, "lru"),
                (HOST, cell.host_bytes, cell.policy),
                (SSD, cell.ssd_bytes, cell.ssd_policy),
            )
            if size >= self.block_bytes
        ]
        replay = Replay(tiers, block_tokens=self.block_tokens, block_bytes=int(self.block_bytes))
        for request in requests[: self.first]:
            replay.request(request)
        before = replay.counts.get(SSD)
        found = [replay.request(request) for request in requests[self.first :]]
        after = replay.counts.get(SSD)
        stored = evicted = resident = 0
        if before is not None and after is not None:
            stored = after.stored - before.stored
            evicted = after.evicted - before.evicted
            resident = after.resident
        return Outcome(
            cell,
            _column(ENGINE, found),
            _column(HOST, found),
            _column(SSD, found),
            stored,
            evicted,
            resident,
        )


def _column(name: str, found: Iterable[Mapping[str, int]]) -> Counts:
    return np.array([one.get(name, 0) for one in found], np.int64)


_requests: Sequence[TracedRequest] = ()
"""In a process of the pool, the trace."""


def _take(requests: Sequence[TracedRequest]) -> None:
    global _requests  # noqa: PLW0603 - how a pool's process is given what all its calls need
    _requests = requests
    gc.disable()  # a replay makes no cycles, and much that the collector would look at: a fifth


def _run(job: _Job) -> Outcome:
    return job.run(_requests)
