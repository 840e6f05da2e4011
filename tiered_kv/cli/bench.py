"""`tiered-kv bench`: how fast each hop and each chain of a deployment is here, held against what
this machine does at most."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiered_kv.cli.output import (
    FAILED,
    Config,
    bytes_text,
    print_json,
    print_table,
    read_seconds,
    read_size,
)
from tiered_kv.cli.output_files import OutputFiles, check_output

if TYPE_CHECKING:
    from tiered_kv.cli.benching.figures import Figure, TierResult
    from tiered_kv.cli.benching.run import Bench, Effort
    from tiered_kv.config import Deployment, TierSettings
    from tiered_kv.plugins import Plugins

__all__ = ["bench"]

BlockSizes = Annotated[
    list[str] | None,
    typer.Option(
        "--block-size",
        metavar="SIZE",
        help="Size of a block on one rank; may be given several times.  "
        "[default: 64KiB, 256KiB, 1MiB, 4MiB]",
        show_default=False,
    ),
]
Size = Annotated[
    str,
    typer.Option(
        "--size",
        metavar="SIZE",
        help="Bytes that are moved in each run; auto: 256MiB, or twice the processor's last cache.",
    ),
]
Rounds = Annotated[
    int,
    typer.Option("--rounds", min=1, max=1000, help="Rounds that count; one more goes before them."),
]
Tiers = Annotated[
    list[str] | None,
    typer.Option(
        "--tier",
        metavar="NAME",
        help="Only this tier; may be given several times.",
        show_default=False,
    ),
]
Layers = Annotated[
    int,
    typer.Option(
        "--layers", min=1, max=1000, help="Tensors of the engine that each block is spread over."
    ),
]
Timeout = Annotated[str, typer.Option("--timeout", metavar="DURATION", help="For each run.")]
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Also write all figures to this file; -: print them instead of text.",
        show_default=False,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Also draw them, as .png or .svg; needs tiered-kv[plot].",
        show_default=False,
    ),
]

DEFAULT_SIZES = ("64KiB", "256KiB", "1MiB", "4MiB")
LEAST_BATCH_BYTES = 256 * 2**20
MOST_BATCH_BYTES = 2 * 2**30
MOST_THREADS = 4
"""That copy memory at once: as many as the transfer engine has per tier and direction."""


def bench(
    config: Config,
    block_size: BlockSizes = None,
    size: Size = "auto",
    rounds: Rounds = 5,
    tier: Tiers = None,
    layers: Layers = 32,
    timeout: Timeout = "2min",
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Measure each hop and each chain of a deployment, through the transfer engine that serves,
    beside what this machine does at most: plain copies of memory, and the disk itself.

    What is stored is never touched: each tier is measured in directories of its own."""
    from tiered_kv.cli.benching.run import Bench
    from tiered_kv.cli.progress import Progress
    from tiered_kv.config import load
    from tiered_kv.plugins import Plugins

    file = None if json_file in (None, "-") else Path(json_file)
    check_output(file, "--json")
    _check_plot(plot)
    effort = _effort(block_size or DEFAULT_SIZES, size, rounds, layers, read_seconds(timeout))
    plugins = Plugins()
    deployment = load(config, plugins)
    wanted = _wanted(config, deployment, tier or [])
    steps = len(effort.batches) * (rounds + 1)
    with Progress(steps * len(wanted)) as progress:
        plan = Bench(deployment, plugins, effort, progress)
        _check_room(plan, plugins, [one for one in wanted if one is not None])
        results = [plan.host() if one is None else _store(plan, one) for one in wanted]
    document = _document(config, effort, results)
    files = OutputFiles()
    files.write(file, lambda file: _write_json(file, document))
    files.write(plot, lambda plot: _draw(plot, results))
    if json_file == "-":
        print_json(document)
    else:
        for result in results:
            _print(result)
    for result in results:
        if result.problem:
            word = "error" if result.failed else "warning"
            typer.echo(f"{word}: tier {result.tier!r}: {result.problem}", err=True)
    files.finish()
    if any(result.failed for result in results):
        raise typer.Exit(FAILED)


# ---------------------------------------------------------------------------- before it begins


def _effort(sizes: Sequence[str], size: str, rounds: int, layers: int, timeout: float) -> Effort:
    from tiered_kv.cli.benching.rig import Batch
    from tiered_kv.cli.benching.run import Effort
    from tiered_kv.values import PAGE_BYTES

    wanted = _auto_bytes() if size == "auto" else read_size(size)
    batches: list[Batch] = []
    for block_bytes in sorted({read_size(text) for text in sizes}):
        if block_bytes % PAGE_BYTES or block_bytes % layers:
            raise typer.BadParameter(
                f"{bytes_text(block_bytes)} is not a multiple of {PAGE_BYTES} bytes and of the "
                f"{layers} layers (--layers)",
                param_hint="--block-size",
            )
        batches.append(Batch(block_bytes, max(1, wanted // block_bytes), layers))
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    return Effort(tuple(batches), rounds, threads, timeout)


def _auto_bytes() -> int:
    """So many that the processor's caches keep little of them."""
    largest = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        if text.endswith("K") and text[:-1].isdigit():
            largest = max(largest, int(text[:-1]) * 1024)
    return min(MOST_BATCH_BYTES, max(LEAST_BATCH_BYTES, 2 * largest))


def _check_plot(plot: Path | None) -> None:
    """Refuse a picture that could not be drawn in the end.

    Raises:
        ConfigError: matplotlib is not installed.
        typer.BadParameter: it is neither .png nor .svg, or cannot be written.
    """
    if plot is None:
        return
    from importlib.util import find_spec

    from tiered_kv.errors import ConfigError

    if plot.suffix not in (".png", ".svg"):
        raise typer.BadParameter(f"{plot} is neither .png nor .svg", param_hint="--plot")
    check_output(plot, "--plot")
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot draws with matplotlib, which is not installed: pip install 'tiered-kv[plot]'"
        )


def _wanted(
    config: Path, deployment: Deployment, names: Sequence[str]
) -> list[TierSettings | None]:
    """The tiers to measure, nearest first; None for host memory.

    Raises:
        ConfigError: there is no such tier.
    """
    from tiered_kv.errors import ConfigError
    from tiered_kv.routing import CPU_ENDPOINT

    host = CPU_ENDPOINT.tier if deployment.cpu is None else deployment.cpu.name
    by_name: dict[str, TierSettings | None] = {host: None}
    by_name |= {one.name: one for one in deployment.stores}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ConfigError(f"{config} has no tier {unknown[0]!r}; there are {', '.join(by_name)}")
    return [one for name, one in by_name.items() if not names or name in names]


def _check_room(plan: Bench, plugins: Plugins, tiers: Sequence[TierSettings]) -> None:
    """Say what will be written, and refuse what does not fit.

    Raises:
        ConfigError: a tier, or the machine's memory, has not the room for it.
    """
    from tiered_kv.cli.benching.place import place_of, shortages_of
    from tiered_kv.cli.stat import state_of
    from tiered_kv.cli.tending import StoreTier
    from tiered_kv.config import host_memory
    from tiered_kv.errors import ConfigError

    problems: list[str] = []
    memory = host_memory()
    wanted = plan.effort.host_bytes(int(plan.deployment.limits.staging))
    if wanted > memory.free_bytes:
        problems.append(
            f"measuring takes {bytes_text(wanted)} of memory, but {memory.place} has "
            f"{bytes_text(memory.free_bytes)} left; lower --size"
        )
    for settings in tiers:
        if not settings.writable:
            continue
        need = plan.need(settings)
        where = {place_of(directory) for directory in settings.directories.values()}
        if where:
            tier = StoreTier(settings, plan.deployment, plugins)
            budget = getattr(settings, "write_budget", 0)
            today = (state_of(tier).written_today or 0) if budget else 0
            problems += shortages_of(settings, need, tier.held_bytes(), written_today=today)
        places = ", ".join(sorted(str(place) for place in where)) or "the tier itself"
        plan.progress.stage(
            f"tier {settings.name}: writes {bytes_text(need.written_bytes)} in all, at most "
            f"{bytes_text(need.held_bytes)} of it at once, in {places}"
        )
    if problems:
        raise ConfigError("\n".join(problems), problems=tuple(problems))


def _store(plan: Bench, settings: TierSettings) -> TierResult:
    from tiered_kv.cli.benching.figures import TierResult

    if settings.writable:
        return plan.store(settings)
    problem = "read only, so nothing can be stored in it to be measured"
    return TierResult(settings.name, settings.type, problem=problem)


# -------------------------------------------------------------------------------------- results


def _document(config: Path, effort: Effort, results: Sequence[TierResult]) -> dict[str, Any]:
    import platform

    return {
        "config": str(config),
        "machine": {
            "platform": platform.platform(),
            "processors": os.cpu_count(),
            "load": os.getloadavg(),
        },
        "rounds": effort.rounds,
        "layers": effort.batches[0].layers,
        "tiers": [_tier(result) for result in results],
    }


def _tier(result: TierResult) -> dict[str, Any]:
    return {
        "tier": result.tier,
        "type": result.type,
        "place": result.place,
        "written_bytes": result.written_bytes,
        "limits": result.limits,
        "modes": {part: dict(said) for part, said in result.modes.items()},
        "sizes": [
            {
                "block_bytes": one.block_bytes,
                "blocks": one.blocks,
                "figures": [_figure(figure) for figure in one.figures],
                "chains": [asdict(way) for way in one.ways],
            }
            for one in result.sizes
        ],
        "problem": result.problem or None,
    }


def _figure(figure: Figure) -> dict[str, Any]:
    move = {name: value or None for name, value in asdict(figure.move).items()}
    return move | {
        "best_gib_per_second": figure.best_gib_per_second,
        "median_gib_per_second": figure.median_gib_per_second,
        "processor_seconds_per_gib": figure.processor_seconds_per_gib,
        "of_limit": figure.of_limit,
    }


def _write_json(file: Path, document: dict[str, Any]) -> None:
    import json

    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _draw(file: Path, results: Sequence[TierResult]) -> None:
    from tiered_kv.cli.benching.plot import draw

    draw(file, results)


def _print(result: TierResult) -> None:
    if not result.sizes:
        return
    print_table(
        f"Tier {result.tier}, {result.place}",
        (
            "block",
            "move",
            "verified",
            "page cache",
            "median",
            "best",
            "limit",
            "of it",
            "CPU s/GiB",
        ),
        _rows(result),
        numbers=("block", "median", "best", "of it", "CPU s/GiB"),
        sections=True,
    )
    for name, how in result.limits.items():
        typer.echo(f"{name}: {how}")
    print_table(
        f"Chains of tier {result.tier}, by what was measured",
        ("block", "chain", "taken", "per block", "why"),
        _chains(result),
        numbers=("block", "per block"),
        sections=True,
    )
    print_table(
        f"In effect for tier {result.tier}",
        ("where", "mode", "value"),
        _modes(result),
        sections=True,
    )


def _rows(result: TierResult) -> Iterator[tuple[str, ...]]:
    for one in result.sizes:
        block = bytes_text(one.block_bytes)
        for figure in one.figures:
            move, used = figure.move, figure.processor_seconds_per_gib
            yield (
                block,
                f"{move.name} (limit)" if move.kind == "limit" else move.name,
                move.verify,
                move.cache,
                f"{figure.median_gib_per_second:.2f}",
                f"{figure.best_gib_per_second:.2f}",
                move.limit,
                "" if figure.of_limit is None else f"{figure.of_limit:.0%}",
                "-" if used is None else f"{used:.2f}",
            )
            block = ""


def _chains(result: TierResult) -> Iterator[tuple[str, ...]]:
    for one in result.sizes:
        block = bytes_text(one.block_bytes)
        for way in one.ways:
            seconds = way.seconds_per_block
            yield (
                block,
                way.chain,
                "yes" if way.chosen else "no",
                "-" if seconds is None else f"{seconds * 1e6:.0f}us",
                way.reason,
            )
            block = ""


def _modes(result: TierResult) -> Iterator[tuple[str, ...]]:
    """Of a hop only what is not said of the store; of a tier only the hops that touch it."""
    of_store = result.modes.get("store", {})
    for where, said in result.modes.items():
        ends = where.split("->")
        if of_store and len(ends) > 1 and result.tier not in ends:
            continue
        first = where
        for mode, value in said.items():
            if where == "store" or of_store.get(mode) != value:
                yield first, mode, value
                first = ""
