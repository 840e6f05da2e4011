"""`tiered-kv demo`: a real model gets its KV blocks back from every tier, also after a restart."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiered_kv.cli.output import FAILED, Json, bytes_text, print_json, print_table, warn

if TYPE_CHECKING:
    from tiered_kv.cli.demonstration import Findings
    from tiered_kv.stats import HopStats

__all__ = ["demo"]

FOLDER_VARIABLE = "TIERED_KV_DEMO_DIR"
"""Environment variable through which `configs/demo.yaml` finds its directories."""

MODEL = "SmolLM2-135M-Instruct"

Keep = Annotated[
    Path | None,
    typer.Option(
        "--keep",
        metavar="DIR",
        help="Put the tiers and the engines' logs into this empty directory, and leave them there.",
        show_default=False,
    ),
]


def demo(keep: Keep = None, as_json: Json = False) -> None:
    """Ask a real model long questions: computed, from each tier, and after a restart of vLLM.

    SmolLM2-135M on vLLM answers six prompts that share a long document, through a host tier, an
    NVMe tier and an LMDB tier. Every answer is compared with that of vLLM without tiered-kv. Takes
    a few minutes and about 1 GB below TMPDIR. Exits 1 if an answer differs or a tier served
    nothing.
    """
    from tiered_kv.cli.demonstration import QUESTIONS, TIMED_PROMPTS, Demonstration
    from tiered_kv.cli.progress import Progress
    from tiered_kv.config import load, shipped
    from tiered_kv.plugins import Plugins
    from tiered_kv.testing.models import smollm2
    from tiered_kv.vllm.engine_process import require_vllm

    require_vllm()
    began = time.monotonic()
    with _folder(keep) as folder:
        environment = {FOLDER_VARIABLE: str(folder)}
        config = shipped("demo")
        deployment = load(config, Plugins(), {**os.environ, **environment})
        tiers = {tier.name: tier.type for tier in deployment.tiers}
        # Once alone and twice with the host tier per prompt, then once per way after the restart.
        steps = TIMED_PROMPTS + len(QUESTIONS) * (3 + len(tiers))
        with Progress(steps) as progress:
            model = smollm2(progress=progress.stage)
            findings = Demonstration(
                model=model,
                config=config,
                tiers=tiers,
                folder=folder,
                environment=environment,
                progress=progress,
            ).run()
    seconds = time.monotonic() - began
    if as_json:
        print_json(findings_as_json(findings, seconds))
    else:
        print_findings(findings, seconds)
    if keep is not None:
        typer.echo(f"the tiers and the engines' logs are in {keep}", err=True)
    shortcomings = findings.shortcomings()
    for line in shortcomings:
        warn(line)
    if shortcomings:
        raise typer.Exit(FAILED)


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(
            prefix="tiered-kv-demo-", ignore_cleanup_errors=True
        ) as name:
            yield Path(name)
        return
    try:
        keep.mkdir(mode=0o700, parents=True, exist_ok=True)
        empty = not any(keep.iterdir())
    except OSError as error:
        raise typer.BadParameter(f"{keep} cannot be used: {error}", param_hint="--keep") from error
    if not empty:
        raise typer.BadParameter(f"{keep} is not empty", param_hint="--keep")
    yield keep.resolve()


def findings_as_json(findings: Findings, seconds: float) -> dict[str, Any]:
    """What `--json` prints."""
    from tiered_kv.cli.demonstration import ANSWER_TOKENS
    from tiered_kv.cli.traffic import traffic

    moved = traffic(findings.tiers, *findings.stats)
    return {
        "model": MODEL,
        "prompt_tokens": list(findings.prompt_tokens),
        "answer_tokens": ANSWER_TOKENS,
        "outputs_equal": findings.outputs_equal,
        "ttft_seconds": findings.ttft_seconds(),
        "own_prefix_cache_ttft_seconds": statistics.median(findings.reference.prefix_cache_seconds),
        "tiers": moved.tiers_as_json(),
        "hops": moved.hops_as_json(),
        "runs": [
            {
                "process": run.process,
                "prompt": run.prompt + 1,
                "way": run.way,
                "ttft_seconds": run.first_token_seconds,
                "cached_tokens": run.cached_tokens,
                "loaded_bytes": dict(run.loaded),
                "compared_tokens": run.compared_tokens,
                "equal": run.equal,
            }
            for run in findings.runs
        ],
        "shortcomings": findings.shortcomings(),
        "seconds": seconds,
    }


def print_findings(findings: Findings, seconds: float) -> None:
    """Print the table."""
    from tiered_kv.cli.traffic import traffic

    moved = traffic(findings.tiers, *findings.stats)
    times = findings.ttft_seconds()
    own = statistics.median(findings.reference.prefix_cache_seconds)
    computed = times["recompute"]
    assert computed is not None  # it is measured in the reference
    rows = [
        _row("computed by vLLM", computed, computed),
        *(_row(name, times[name], computed, moved.loaded(name)) for name in findings.tiers),
        _row("after the restart, nearest tier", times["after_restart"], computed),
        _row("limit: never left the engine", own, computed),
        *(_row(f"hop {label}", None, computed, hop) for label, hop in moved.hops().items()),
    ]
    shortest, longest = min(findings.prompt_tokens), max(findings.prompt_tokens)
    print_table(
        f"{MODEL}, {len(findings.prompt_tokens)} prompts of {shortest} to {longest} tokens",
        ("KV of the prompt", "first token after", "times faster", "blocks", "bytes", "failed"),
        rows,
    )
    equal = "yes" if findings.outputs_equal else "NO"
    prompts = len({run.prompt for run in findings.runs})
    typer.echo(
        f"outputs equal to those from vLLM's own prefix cache: {equal} "
        f"({len(findings.runs)} requests with loaded blocks, {prompts} prompts)"
    )
    evicted = {name: moved.stats.tier(name).evicted for name in findings.tiers}
    typer.echo(
        f"blocks evicted: {', '.join(f'{name} {count}' for name, count in evicted.items())}; "
        f"took {seconds:.0f} s"
    )


def _row(
    label: str, value: float | None, computed: float, moved: HopStats | None = None
) -> tuple[str, ...]:
    times = ("", "") if value is None else (f"{value:.3f} s", f"{computed / value:.1f}")
    if moved is None:
        return label, *times, "", "", ""
    failed = sum(moved.failures.values())
    return label, *times, str(moved.blocks), bytes_text(moved.bytes), str(failed)
