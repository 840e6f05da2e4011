"""A plan as text on a terminal."""

from __future__ import annotations

import typer

from tiered_kv.cli.output import bytes_text, print_table
from tiered_kv.planning import Figures, Plan, Question, lifetime

__all__ = ["print_plan"]


def print_plan(made: Plan, deployment: str) -> None:
    """To stdout, with the recommended `deployment`."""
    question = made.question
    print_table("From", ("", ""), _facts(question))
    print_table(
        "What it would buy",
        (
            *("policy", "host", "SSD", "hits: host", "SSD", "first token: mean", "p50", "p99"),
            *("engines saved", "written a day", "drive writes a day", "lasts"),
        ),
        (_row(one, made) for one in made.figures),
    )
    for note in made.notes:
        typer.echo(f"- {note}")
    typer.echo("")
    typer.echo(made.recommendation.headline)
    for reason in made.recommendation.reasons:
        typer.echo(f"- {reason}")
    typer.echo("")
    typer.echo(deployment, nl=False)


def _facts(question: Question) -> list[tuple[str, str]]:
    trace, shape, speeds = question.trace, question.shape, question.speeds
    token = bytes_text(round(shape.bytes_per_token))
    block = ""
    if question.block_tokens is not None:
        size = bytes_text(round(shape.bytes_per_token * question.block_tokens))
        block = f", {size} per block of {question.block_tokens} tokens"

    def rate(bytes_per_second: float, source: str) -> str:
        tokens = bytes_per_second / shape.bytes_per_token
        return f"{bytes_per_second / 1e9:.2f} GB/s, {tokens:.0f} tokens/s ({source})"

    return [
        (
            "trace",
            (
                f"{trace.kind.value}: {len(trace.requests)} requests, {trace.tokens} tokens in "
                f"{trace.seconds:.0f} s; all of it is {bytes_text(round(question.footprint_bytes))}"
            ),
        ),
        ("KV", f"{token} per token over {shape.ranks} rank(s){block}"),
        ("known from", shape.source),
        ("prefill", f"{speeds.prefill:.0f} tokens/s ({speeds.prefill_from})"),
        ("host loads", rate(speeds.host.bytes_per_second, speeds.host_from)),
        ("SSD loads", rate(speeds.ssd.bytes_per_second, speeds.ssd_from)),
        (
            "SSD rating",
            (
                f"{question.drive.rated_dwpd:g} drive writes per day for five years "
                f"({question.drive.rated_from})"
            ),
        ),
    ]


def _row(one: Figures, made: Plan) -> tuple[str, ...]:
    token, years = one.first_token, one.years(made.question.drive)
    times = (None, None, None) if token is None else (token.mean, token.p50, token.p99)
    mark = " *" if one is made.recommendation.figures else ""
    per_day, writes = one.ssd_bytes_per_day, one.ssd_drive_writes
    return (
        one.cell.policy + mark,
        bytes_text(one.cell.host_bytes),
        bytes_text(one.cell.ssd_bytes) if one.cell.ssd_bytes else "none",
        f"{one.host_hits:.1%}",
        f"{one.ssd_hits:.1%}",
        *("-" if seconds is None else f"{seconds:.2f}s" for seconds in times),
        "-" if one.saved_gpu_seconds is None else f"{one.saved_gpu_seconds:.2f}",
        "-" if per_day is None else bytes_text(round(per_day)),
        "-" if writes is None else f"{writes:.0f}" if writes >= 10 else f"{writes:.2g}",
        "-" if years is None else lifetime(years),
    )
