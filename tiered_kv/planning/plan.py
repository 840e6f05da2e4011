"""The whole of a plan: what was asked, what came of it, and what is to be done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tiered_kv.config import readable_bytes
from tiered_kv.errors import TraceError
from tiered_kv.planning.cuts import LONGEST_LOAD, PlannedGate
from tiered_kv.planning.figures import Drive, Figures, figures_of
from tiered_kv.planning.grid import Cell, Measured, replay_grid
from tiered_kv.planning.models import KVShape
from tiered_kv.planning.recommend import Recommendation, recommend
from tiered_kv.planning.speeds import Speeds
from tiered_kv.planning.traces import Trace, TraceKind
from tiered_kv.stats import LoadRate

__all__ = ["Plan", "Question", "make_plan", "plan_as_dict"]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked."""

    trace: Trace
    shape: KVShape
    block_tokens: int | None
    """Of a block as the tiers would keep it; None: not known."""
    speeds: Speeds
    drive: Drive
    ssd_bytes: tuple[int, ...]
    """Capacities to try, without 0, rising."""
    host_bytes: tuple[int, ...]
    """Of all ranks, rising; 0: no host tier."""
    engine_bytes: int
    """Of the engine's own cache; 0: it is not replayed."""
    policies: tuple[str, ...]
    preferred: str
    """The policy of a configuration that names none."""
    warm_up: float
    """Share of the requests that fills the tiers and is not counted, 0 to less than 1."""
    ssd_policies: Mapping[str, str] = field(default_factory=dict)
    """What the SSD goes by behind a host tier with a policy that is for host memory alone."""
    host_from: str = "given"
    """Where the host's capacity is from."""
    ssd_budgeted: bool = True
    """Whether the SSD's tier takes a write budget."""

    @property
    def trace_block_bytes(self) -> float:
        """Of a block of the trace, over all ranks."""
        return self.shape.bytes_per_token * self.trace.block_tokens

    @property
    def footprint_bytes(self) -> float:
        """What would hold all blocks of the trace."""
        return self.trace.distinct_blocks * self.trace_block_bytes

    @property
    def gate(self) -> PlannedGate:
        """What cuts the requests' loads."""
        return PlannedGate(self.speeds, self.trace.block_tokens, self.shape.bytes_per_token)

    def cells(self) -> list[Cell]:
        """All combinations, and those without an SSD."""
        return [
            Cell(policy, self.ssd_policies.get(policy, policy), ssd, host, self.engine_bytes)
            for policy in self.policies
            for host in self.host_bytes
            for ssd in (0, *self.ssd_bytes)
        ]


@dataclass(frozen=True, slots=True)
class Plan:
    """What came of it."""

    question: Question
    figures: tuple[Figures, ...]
    """Of each cell, in the order of `Question.cells`."""
    measured_requests: int
    measured_seconds: float
    recommendation: Recommendation
    notes: tuple[str, ...]
    """What a reader has to know of the figures."""

    def of(self, policy: str, host_bytes: int) -> list[Figures]:
        """By capacity of the SSD, the one without first."""
        return [
            one
            for one in self.figures
            if one.cell.policy == policy and one.cell.host_bytes == host_bytes
        ]


def make_plan(
    question: Question,
    *,
    processes: int | None = None,
    done: Callable[[Cell], None] = lambda cell: None,
) -> Plan:
    """Replay all cells, and choose.

    Args:
        question: what is asked.
        processes: that run at once; as many as there are processors if not given.
        done: called when a cell was replayed.

    Raises:
        TraceError: the requests that count have no tokens.
        TieredKVError: a process was killed.
    """
    trace = question.trace
    measured = Measured.of(trace, question.warm_up)
    if not measured.tokens.any():
        raise TraceError(
            f"{trace.source}: none of the {len(measured.tokens)} requests that count has a token, "
            f"the first {measured.first} only warm up (--warm-up): there is nothing to plan from"
        )
    outcomes = replay_grid(
        trace,
        question.cells(),
        gate=question.gate,
        first=measured.first,
        processes=processes,
        done=done,
    )
    figures = tuple(
        figures_of(
            outcome,
            measured,
            question.speeds,
            block_bytes=question.trace_block_bytes,
            whole_requests=trace.whole_requests,
        )
        for outcome in outcomes
    )
    advice = recommend(figures, question.drive, question.preferred, budgeted=question.ssd_budgeted)
    return Plan(
        question,
        figures,
        len(measured.tokens),
        measured.seconds,
        advice,
        tuple(_notes(question, measured, advice.figures)),
    )


def _notes(question: Question, measured: Measured, chosen: Figures) -> list[str]:
    trace, speeds = question.trace, question.speeds
    notes: list[str] = []
    if speeds.assumed or question.drive.rated_from == "assumed":
        assumed = [*speeds.assumed]
        if question.drive.rated_from == "assumed":
            assumed.append("the drive's rating")
        notes.append(f"Assumed, since neither given nor measured: {', '.join(assumed)}.")
    if question.host_from == "assumed":
        sizes = ", ".join(readable_bytes(size) for size in question.host_bytes)
        notes.append(f"The host's capacity of {sizes} is assumed (--host).")
    if measured.first:
        notes.append(
            f"The first {measured.first} requests fill the tiers and are not counted; figures are "
            f"of the {len(measured.tokens)} behind them."
        )
    for policy, other in question.ssd_policies.items():
        notes.append(
            f"The policy {policy} is for host memory alone: the SSD behind it goes by {other}."
        )
    if question.engine_bytes:
        notes.append(
            f"The engine's own cache ({readable_bytes(question.engine_bytes)}) is replayed, too: "
            "what it holds is no hit of a tier."
        )
    elif trace.whole_requests:
        notes.append(
            "The engine's own cache is not replayed (--engine-cache): what it would have found "
            "itself counts as a hit of a tier."
        )
    if chosen.late:
        notes.append(
            f"With what is recommended, {chosen.late} of the {len(measured.tokens)} requests would "
            f"load more if a load could take longer than {LONGEST_LOAD:g} s, as `limits."
            "load_deadline` is where a configuration does not say."
        )
    if trace.whole_requests:
        notes.append(
            "Times to the first token are of requests that are served at once; what they wait in "
            "the engine's queue is not in them, and shrinks with the GPU time saved."
        )
    if not measured.seconds:
        notes.append("The trace takes no time, so that nothing can be said per day.")
    notes.append(
        f"The trace is replayed in its own blocks of {trace.block_tokens} tokens"
        + (
            f"; the tiers keep blocks of {question.block_tokens}."
            if question.block_tokens not in (None, trace.block_tokens)
            else "."
        )
    )
    notes.append(
        "Bytes written per day are those of the measured part, extended to a day; what a drive or "
        "a file system writes beside them is not in it."
    )
    if trace.kind is TraceKind.RECORDED and trace.recorded_hits and trace.tokens:
        shares = ", ".join(
            f"{name} {tokens / trace.tokens:.1%}"
            for name, tokens in sorted(trace.recorded_hits.items())
        )
        notes.append(f"When the trace was recorded, tokens were found in: {shares}.")
    return [*notes, *trace.notes, *question.shape.notes]


def plan_as_dict(plan: Plan, deployment: str) -> dict[str, Any]:
    """For `--json`: bytes, seconds, and shares of 1."""
    question, trace = plan.question, plan.question.trace
    return {
        "trace": {
            "source": trace.source,
            "kind": trace.kind.value,
            "requests": len(trace.requests),
            "tokens": trace.tokens,
            "seconds": trace.seconds,
            "block_tokens": trace.block_tokens,
            "distinct_blocks": trace.distinct_blocks,
            "footprint_bytes": round(question.footprint_bytes),
            "recorded_hit_tokens": dict(trace.recorded_hits),
        },
        "measured": {"requests": plan.measured_requests, "seconds": plan.measured_seconds},
        "model": {
            "source": question.shape.source,
            "bytes_per_token": question.shape.bytes_per_token,
            "ranks": question.shape.ranks,
            "block_tokens": question.block_tokens,
            "block_bytes": _times(question.shape.bytes_per_token, question.block_tokens),
            "trace_block_bytes": question.trace_block_bytes,
        },
        "speeds": {
            "prefill_tokens_per_second": question.speeds.prefill,
            "prefill_from": question.speeds.prefill_from,
            "host": _rate(question.speeds.host, question.speeds.host_from),
            "ssd": _rate(question.speeds.ssd, question.speeds.ssd_from),
        },
        "drive": asdict(question.drive),
        "cells": [_cell(one, question.drive) for one in plan.figures],
        "recommendation": {
            "cell": asdict(plan.recommendation.figures.cell),
            "ssd": plan.recommendation.ssd,
            "headline": plan.recommendation.headline,
            "reasons": list(plan.recommendation.reasons),
            "write_budget_bytes": plan.recommendation.write_budget,
            "config": deployment,
        },
        "notes": list(plan.notes),
    }


def _times(size: float, count: int | None) -> float | None:
    return None if count is None else size * count


def _rate(rate: LoadRate, source: str) -> dict[str, Any]:
    return {**asdict(rate), "from": source}


def _cell(one: Figures, drive: Drive) -> dict[str, Any]:
    return {
        **asdict(one.cell),
        "hit_rates": {"engine": one.engine_hits, "host": one.host_hits, "ssd": one.ssd_hits},
        "loaded": one.loaded,
        "requests_cut_by_deadline": one.late,
        "ttft_seconds": None if one.first_token is None else asdict(one.first_token),
        "gpu_engines_busy": one.gpu_seconds,
        "gpu_engines_saved": one.saved_gpu_seconds,
        "ssd_written_bytes_per_day": one.ssd_bytes_per_day,
        "ssd_drive_writes_per_day": one.ssd_drive_writes,
        "ssd_years": one.years(drive),
        "ssd_full": one.ssd_full,
    }
