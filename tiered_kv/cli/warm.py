"""`tiered-kv warm`: fill the tiers before anyone asks, with prompts or from another store."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiered_kv.cli.output import FAILED, Json, print_json, read_seconds, read_size, warn

if TYPE_CHECKING:
    from tiered_kv.cli.prompt_file import PlacedPrompt
    from tiered_kv.cli.warm_keep import Keeping, Kept
    from tiered_kv.config import Deployment

__all__ = ["warm"]

Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE",
        help="Files with one prompt a line, or JSONL with prompt, messages or token_ids; "
        "directories of documents; - for standard input.",
        show_default=False,
    ),
]
Deployed = Annotated[
    Path,
    typer.Option(
        "--config", metavar="CONFIG", help="YAML file of the deployment.", show_default=False
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", help="Name or folder, as vLLM takes it.", show_default=False
    ),
]
Tiers = Annotated[
    list[str] | None,
    typer.Option(
        "--tier",
        metavar="NAME",
        help="A tier to warm; may be repeated. By default all that are written and outlive their "
        "engine.",
        show_default=False,
    ),
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="As vLLM's.", show_default=False)]
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", min=1, help="As vLLM's.", show_default=False)
]
EngineBlock = Annotated[
    int | None,
    typer.Option(
        "--block-size", min=1, help="As vLLM's: tokens per engine block.", show_default=False
    ),
]
EngineArguments = Annotated[
    str,
    typer.Option(
        "--engine-args",
        metavar="JSON",
        help="Further arguments of vllm.LLM as a JSON object. They decide which engines find the "
        "blocks, so give what the serving engine gets.",
    ),
]
Whole = Annotated[
    bool,
    typer.Option("--whole-files", help="Each FILE that is no JSONL is one prompt, not one a line."),
]
Batch = Annotated[
    int,
    typer.Option(
        "--batch",
        min=1,
        help="Prompts that the engine computes side by side; after each batch its blocks are "
        "published.",
    ),
]
Sample = Annotated[
    int, typer.Option("--sample", min=0, help="Prompts that are loaded back from each tier.")
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Only say how much it would be: tokens, bytes, time. No engine starts."
    ),
]
PrefillRate = Annotated[
    float | None,
    typer.Option(
        "--tokens-per-second",
        min=1.0,
        help="With --dry-run: how fast the engine computes prompts.",
        show_default=False,
    ),
]
Timeout = Annotated[
    str,
    typer.Option(
        "--timeout", metavar="DURATION", help="For what a batch leaves to be written behind."
    ),
]
Keep = Annotated[
    str | None,
    typer.Option(
        "--keep",
        metavar="DURATION",
        help="Evict what is warmed after everything else, for so long.",
        show_default=False,
    ),
]
KeepShare = Annotated[
    int,
    typer.Option(
        "--keep-share",
        min=1,
        max=100,
        help="Percent of a tier that kept blocks may take; further ones are not kept.",
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="STORE",
        help="Copy blocks of another store, without an engine: its directory, or CONFIG:TIER.",
        show_default=False,
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(
        "--rate", metavar="SIZE", help="With --from: most bytes per second.", show_default=False
    ),
]
MostBytes = Annotated[
    str | None,
    typer.Option(
        "--max-bytes",
        metavar="SIZE",
        help="With --from: most bytes that go to each tier.",
        show_default=False,
    ),
]
Which = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        metavar="ID",
        help="With --from: id of the namespace to copy, as `ls` shows it; its beginning is enough.",
        show_default=False,
    ),
]
Unknown = Annotated[
    bool,
    typer.Option(
        "--new-namespace",
        help="With --from: copy also where the tier's engines have another fingerprint.",
    ),
]


_FOR_PROMPTS = (
    *("model", "dtype", "max_model_len", "block_size", "engine_args", "whole_files", "batch"),
    *("sample", "tokens_per_second", "timeout"),
)
_FOR_COPIES = ("rate", "max_bytes", "namespace", "new_namespace")


def _refuse_others(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Options that would do nothing.

    Raises:
        typer.BadParameter: one of them was given.
    """
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and given is not None and given.name == "COMMANDLINE":
            raise typer.BadParameter(why, param_hint=parameter.opts[0])


def warm(
    context: typer.Context,
    config: Deployed,
    files: Files = None,
    model: Model = None,
    tier: Tiers = None,
    dtype: Dtype = None,
    max_model_len: MaxModelLen = None,
    block_size: EngineBlock = None,
    engine_args: EngineArguments = "{}",
    whole_files: Whole = False,
    batch: Batch = 8,
    sample: Sample = 3,
    dry_run: DryRun = False,
    tokens_per_second: PrefillRate = None,
    timeout: Timeout = "10min",
    keep: Keep = None,
    keep_share: KeepShare = 50,
    source: From = None,
    rate: Rate = None,
    max_bytes: MostBytes = None,
    namespace: Which = None,
    new_namespace: Unknown = False,
    as_json: Json = False,
) -> None:
    """Compute the prompts of FILEs on vLLM and store their blocks, then load a sample back; or,
    with --from, copy the blocks of another store, the most used first.

    What is there already is skipped, so that an interrupted warm-up goes on where it was. The
    sample is loaded by a new engine: what it finds has outlived its process.

    Exits 1 if a tier lacks blocks in the end or the sample was not found, 2 if FILE or CONFIG has
    a mistake; then nothing was stored.
    """
    from tiered_kv.cli.warm_keep import Keeping
    from tiered_kv.config import load
    from tiered_kv.plugins import Plugins

    keeping = None if keep is None else Keeping(read_seconds(keep), keep_share / 100)
    if keeping is None:
        _refuse_others(context, ("keep_share",), "is for --keep")
    if source is not None:
        from tiered_kv.cli.warm_copy import Copying, copy_blocks_of

        if files:
            raise typer.BadParameter("takes no FILE", param_hint="--from")
        _refuse_others(context, _FOR_PROMPTS, "is for prompts, not for --from")
        copy_blocks_of(
            Copying(
                source=source,
                config=config,
                tiers=tuple(tier or ()),
                namespace=namespace,
                rate=None if rate is None else read_size(rate),
                most_bytes=None if max_bytes is None else read_size(max_bytes),
                new_namespace=new_namespace,
                dry_run=dry_run,
                keeping=keeping,
            ),
            as_json=as_json,
        )
        return
    _refuse_others(context, _FOR_COPIES, "is for --from")
    if not dry_run:
        _refuse_others(context, ("tokens_per_second",), "is for --dry-run")
    if not files:
        raise typer.BadParameter(
            "name files with prompts, or a store with --from", param_hint="FILE"
        )
    if model is None:
        raise typer.BadParameter("is needed to compute prompts", param_hint="--model")

    from tiered_kv.cli.prompt_sources import read_sources
    from tiered_kv.cli.warm_deployment import tiers_to_warm

    given = {"dtype": dtype, "max_model_len": max_model_len, "block_size": block_size}
    arguments = {
        "model": model,
        "enable_prefix_caching": True,
        **{name: value for name, value in given.items() if value is not None},
        **_engine_arguments(engine_args),
    }
    plugins = Plugins()
    deployment = load(config, plugins)
    job = _Job(
        deployment=deployment,
        tiers=tiers_to_warm(deployment, tier or (), config),
        arguments=arguments,
        batch=batch,
        sample=sample,
        seconds=read_seconds(timeout),
        keeping=keeping,
        config=config,
        as_json=as_json,
    )
    prompts = read_sources(files, whole=whole_files)
    if dry_run:
        from tiered_kv.cli.warm_estimate import estimate, print_estimate

        found = estimate(deployment, plugins, job.tiers, arguments, prompts, tokens_per_second)
        print_estimate(found, as_json=as_json)
        return
    _warm(job, files, prompts)


@dataclass(frozen=True, slots=True)
class _Job:
    """How prompts are to be stored."""

    deployment: Deployment
    tiers: tuple[str, ...]
    arguments: dict[str, Any]
    batch: int
    sample: int
    seconds: float
    keeping: Keeping | None
    config: Path
    as_json: bool


def _warm(job: _Job, files: list[str], prompts: list[PlacedPrompt]) -> None:
    from tiered_kv.cli.progress import Progress
    from tiered_kv.cli.tending import store_tiers
    from tiered_kv.cli.vllm_args import engine_arguments
    from tiered_kv.cli.warm_deployment import write_deployment
    from tiered_kv.cli.warm_keep import keep_stored, kept_text, require_keeping
    from tiered_kv.cli.warm_report import complaints, print_report, report_as_json
    from tiered_kv.cli.warming import Warming
    from tiered_kv.vllm.engine_process import require_vllm

    require_vllm()
    types = {name: job.deployment.tier(name).type for name in job.tiers}
    targets = [tier for name in job.tiers for tier in store_tiers(job.config, name)]
    if job.keeping is not None:
        require_keeping(targets)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="tiered-kv-warm-") as name,
        Progress(len(prompts)) as progress,
    ):
        folder = Path(name)
        write_deployment(job.deployment, job.tiers, folder / "deployment.yaml")
        warming = Warming(
            folder,
            job.arguments | engine_arguments(folder / "deployment.yaml"),
            prompts,
            job.tiers,
            batch=job.batch,
            sample=job.sample,
            seconds=job.seconds,
            progress=progress,
        )
        try:
            warmed = warming.run()
        except KeyboardInterrupt:
            done = warming.result
            progress.stage(
                f"interrupted: {done.done_prompts} of {done.prompts} prompts are stored; the same "
                "command goes on from there"
            )
            raise
    kept: Mapping[str, Kept] = {}
    keeping = job.keeping
    if keeping is not None:
        kept = keep_stored(targets, warmed.namespace, warmed.keys, keeping)
    if job.as_json:
        seconds = time.monotonic() - began
        print_json(report_as_json(warmed, types, files, seconds, kept))
    else:
        print_report(warmed, types)
        for name, one in kept.items():
            typer.echo(f"tier {name}: {kept_text(one)}")
    for line in complaints(warmed, types):
        warn(line)
    for one in kept.values():
        if one.why:
            warn(one.why)
    if not (warmed.complete and warmed.hit and not any(one.why for one in kept.values())):
        raise typer.Exit(FAILED)


def _engine_arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"is not JSON: {error}", param_hint="--engine-args") from error
    if not isinstance(value, dict):
        raise typer.BadParameter("is not a JSON object", param_hint="--engine-args")
    return value
