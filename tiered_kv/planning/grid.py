"""Replays a trace for every cell of a grid of capacities and policies, side by side in processes.

The replay is `tiered_kv.placement.Replay`: the policies that serve, under the catalog's rules.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

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
    blocks = trace.distinct_blocks
    jobs: dict[_Job, list[int]] = {}
    """The cells by what is to be replayed: all that hold everything are one, for example."""
    for number, cell in enumerate(cells):
        jobs.setdefault(_Job(_tiers(cell, gate, blocks), gate, first), []).append(number)
    outcomes: dict[int, Outcome] = {}

    def take(job: _Job, found: _Found) -> None:
        for number in jobs[job]:
            outcomes[number] = Outcome(cells[number], *found)
            done(cells[number])

    wanted = min(len(jobs), processes or len(os.sched_getaffinity(0)))
    if wanted <= 1:
        requests = _numbered(trace.requests)
        for job in jobs:
            take(job, job.run(requests))
    else:
        _replay_in_processes(trace.requests, list(jobs), wanted, take)
    return [outcomes[number] for number in range(len(cells))]


def _replay_in_processes(
    requests: Sequence[TracedRequest],
    jobs: Sequence[_Job],
    processes: int,
    take: Callable[[_Job, _Found], None],
) -> None:
    before = set(multiprocessing.active_children())
    # Fresh processes: one that is forked would inherit the locks of other threads.
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_take,
        initargs=(requests,),
    )
    try:
        futures = {pool.submit(_run, job): job for job in jobs}
        for future in as_completed(futures):
            take(futures[future], future.result())
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


def _tiers(cell: Cell, gate: PlannedGate, blocks: int) -> tuple[ReplayTier, ...]:
    """The tiers of a cell; of a trace of so many blocks none needs to hold more."""
    size = gate.block_bytes
    return tuple(
        ReplayTier(
            name,
            int(min(capacity // size, blocks)),
            policy,
            store=name == SSD,
            takes_loaded=name == ENGINE,
        )
        for name, capacity, policy in (
            (ENGINE, cell.engine_bytes, "lru"),
            (HOST, cell.host_bytes, cell.policy),
            (SSD, cell.ssd_bytes, cell.ssd_policy),
        )
        if capacity >= size
    )


_Found = tuple[Counts, Counts, Counts, Counts, Counts, Times, int, int, int, int]
"""What an `Outcome` has beside its cell."""


@dataclass(frozen=True, slots=True)
class _Job:
    tiers: tuple[ReplayTier, ...]
    gate: PlannedGate
    first: int

    def run(self, requests: Sequence[TracedRequest]) -> _Found:
        gate = self.gate
        size = gate.block_tokens
        replay = Replay(self.tiers, block_tokens=size, block_bytes=int(gate.block_bytes))
        for request in requests[: self.first]:
            replay.play(request)
        before = replay.counts.get(SSD)
        measured = requests[self.first :]
        found = [(replay.play(request), request.tokens) for request in measured]
        after = replay.counts.get(SSD)
        stored = evicted = resident = 0
        if before is not None and after is not None:
            stored = after.stored - before.stored
            evicted = after.evicted - before.evicted
            resident = after.resident
        names = (ENGINE, HOST, SSD)
        tokens = [tokens_by_source(sources, count, size, names) for sources, count in found]
        engine, host, ssd = np.array(tokens, np.int64).T
        cuts = [gate.cut(sources, count) for sources, count in found]
        return (
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


def _numbered(requests: Sequence[TracedRequest]) -> tuple[TracedRequest, ...]:
    """The same with the blocks numbered, one object each: less memory, and found sooner."""
    numbers: dict[int, int] = {}
    return tuple(
        replace(
            request, keys=tuple([numbers.setdefault(key, len(numbers)) for key in request.keys])
        )
        for request in requests
    )


_requests: Sequence[TracedRequest] = ()
"""In a process of the pool, the trace."""


def _take(requests: Sequence[TracedRequest]) -> None:
    global _requests  # noqa: PLW0603 - how a pool's process is given what all its calls need
    _requests = _numbered(requests)
    gc.disable()  # a replay makes no cycles, and much that the collector would look at: a fifth


def _run(job: _Job) -> _Found:
    return job.run(_requests)
