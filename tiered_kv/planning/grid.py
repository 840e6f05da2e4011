"""Replays a trace for every cell of a grid of capacities and policies, side by side in processes.

The replay is `tiered_kv.placement.Replay`: the placement and eviction code that serves.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiered_kv.errors import TieredKVError
from tiered_kv.placement import Replay, ReplayTier, TracedRequest, tokens_by_source
from tiered_kv.planning.cuts import PlannedGate
from tiered_kv.planning.speeds import ENGINE, HOST, SSD
from tiered_kv.planning.traces import Trace

__all__ = ["Cell", "Measured", "Outcome", "automatic_capacities", "replay_grid"]

AUTOMATIC = 8
"""Capacities that are tried where none are given, each twice the one before."""

Counts = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]


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
    loaded: Counts
    """Those of them that it loads from both ..."""
    computed: Counts
    """... and those of its prompt that are computed."""
    first_token: Times
    """Seconds until its first token."""
    late: int
    """Requests that would load more if loads could take longer."""
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
    gate: PlannedGate,
    first: int,
    processes: int | None = None,
    done: Callable[[Cell], None] = lambda cell: None,
) -> list[Outcome]:
    """Replay the trace for each cell.

    Args:
        trace: requests.
        cells: combinations; the outcomes come in the same order.
        gate: cuts what requests find; it knows the size of the trace's blocks.
        first: number of the first request that counts.
        processes: that run at once; as many as there are processors if not given.
        done: called when a cell is done.

    Raises:
        TieredKVError: a process was killed.
    """
    wanted = min(len(cells), processes or len(os.sched_getaffinity(0)))
    jobs = [_Job(cell, gate, first) for cell in cells]
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
    gate: PlannedGate
    first: int

    def run(self, requests: Sequence[TracedRequest]) -> Outcome:
        cell, gate = self.cell, self.gate
        size = gate.block_bytes
        tiers = [
            ReplayTier(name, int(capacity // size), policy, name == SSD)
            for name, capacity, policy in (
                (ENGINE, cell.engine_bytes, "lru"),
                (HOST, cell.host_bytes, cell.policy),
                (SSD, cell.ssd_bytes, cell.ssd_policy),
            )
            if capacity >= size
        ]
        replay = Replay(tiers, block_tokens=gate.block_tokens, block_bytes=int(size))
        for request in requests[: self.first]:
            replay.play(request)
        before = replay.counts.get(SSD)
        measured = requests[self.first :]
        found = [replay.play(request) for request in measured]
        after = replay.counts.get(SSD)
        stored = evicted = resident = 0
        if before is not None and after is not None:
            stored = after.stored - before.stored
            evicted = after.evicted - before.evicted
            resident = after.resident
        cuts = [
            gate.cut(sources, request.tokens)
            for sources, request in zip(found, measured, strict=True)
        ]
        tokens = [
            tokens_by_source(sources, request.tokens, gate.block_tokens, (ENGINE, HOST, SSD))
            for sources, request in zip(found, measured, strict=True)
        ]
        engine, host, ssd = np.array(tokens, np.int64).T
        return Outcome(
            cell,
            engine,
            host,
            ssd,
            np.array([cut.loaded for cut in cuts], np.int64),
            np.array([cut.computed for cut in cuts], np.int64),
            np.array([cut.seconds for cut in cuts], np.float64),
            sum(cut.late for cut in cuts),
            stored,
            evicted,
            resident,
        )


_requests: Sequence[TracedRequest] = ()
"""In a process of the pool, the trace."""


def _take(requests: Sequence[TracedRequest]) -> None:
    global _requests  # noqa: PLW0603 - how a pool's process is given what all its calls need
    _requests = requests
    gc.disable()  # a replay makes no cycles, and much that the collector would look at: a fifth


def _run(job: _Job) -> Outcome:
    return job.run(_requests)
