"""`tiered-kv plan`: what a capacity of SSD and a policy would bring, from a trace of requests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiered_kv.cli.output import (
    Json,
    bytes_text,
    print_json,
    read_seconds,
    read_size,
)
from tiered_kv.cli.output_files import OutputFiles, check_output

if TYPE_CHECKING:
    from tiered_kv.connector import LiveView
    from tiered_kv.planning import KVShape, Speeds, Trace

__all__ = ["plan"]

File = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="Requests: JSONL of the Mooncake format, a file or directory that an engine recorded "
        "(`trace` in its configuration), or KV events of vLLM.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Its folder, its config.json, or its name where it was downloaded before.",
        show_default=False,
    ),
]
KVDtype = Annotated[
    str, typer.Option("--kv-dtype", help="As vLLM's --kv-cache-dtype: auto, fp8, bfloat16, ...")
]
Ranks = Annotated[
    int, typer.Option("--ranks", min=1, help="Over which the engine's heads are spread (TP).")
]
BytesPerToken = Annotated[
    str | None,
    typer.Option(
        "--bytes-per-token",
        metavar="SIZE",
        help="KV of a token over all ranks, with a unit, in place of a model.",
        show_default=False,
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAMESPACE",
        help="Take KV and speeds from an engine that runs here: the beginning of its namespace, as "
        "`tiered-kv top` shows it, or `any`.",
        show_default=False,
    ),
]
Capacities = Annotated[
    list[str] | None,
    typer.Option(
        "--capacity",
        metavar="SIZE",
        help="Of the SSD; may be given several times. By default eight, up to what holds "
        "everything.",
        show_default=False,
    ),
]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="SIZE",
        help="Host memory for KV, of all ranks (0B: none); may be given several times.",
        show_default="64GiB",
    ),
]
EngineCache = Annotated[
    str | None,
    typer.Option(
        "--engine-cache",
        metavar="SIZE",
        help="The engine's own KV cache, of all ranks: what it holds is no hit of a tier.",
        show_default="not replayed",
    ),
]
PolicyNames = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="Eviction policy, as `eviction.policy`; may be given several times.",
        show_default="all",
    ),
]
Prefill = Annotated[
    float | None,
    typer.Option(
        "--prefill-rate",
        min=0.001,
        metavar="TOKENS/S",
        help="Tokens of prompts that the engine computes per second.",
        show_default=False,
    ),
]
HostRate = Annotated[
    str | None,
    typer.Option(
        "--host-rate",
        metavar="SIZE",
        help="Bytes per second that all ranks load from host memory.",
        show_default=False,
    ),
]
SsdRate = Annotated[
    str | None,
    typer.Option(
        "--ssd-rate",
        metavar="SIZE",
        help="Bytes per second that all ranks load from the SSD.",
        show_default=False,
    ),
]
SsdLatency = Annotated[
    str | None,
    typer.Option(
        "--ssd-latency",
        metavar="DURATION",
        help="What a load from the SSD takes beside its bytes.",
        show_default=False,
    ),
]
Rates = Annotated[
    Path | None,
    typer.Option(
        "--rates",
        metavar="FILE",
        help="Load rates from a file: what `tiered-kv bench --json` or `explain --json` printed.",
        show_default=False,
    ),
]
Dwpd = Annotated[
    float | None,
    typer.Option(
        "--dwpd",
        min=0.001,
        help="Drive writes per day that the SSD is rated for, for five years.",
        show_default="1",
    ),
]
WarmUp = Annotated[
    int,
    typer.Option(
        "--warm-up", min=0, max=99, help="Percent of the requests that fill the tiers first."
    ),
]
TraceBlock = Annotated[
    int | None,
    typer.Option(
        "--trace-block",
        min=1,
        help="Tokens of a block of a trace in the Mooncake format.",
        show_default="512",
    ),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a page with plots.", show_default=False),
]
WriteConfig = Annotated[
    Path | None,
    typer.Option(
        "--write-config",
        metavar="FILE",
        help="Write the recommended configuration to a file that is not there yet.",
        show_default=False,
    ),
]
SsdPath = Annotated[
    Path, typer.Option("--path", metavar="DIR", help="Directory of the SSD tier in it.")
]
SsdType = Annotated[str, typer.Option("--type", metavar="TYPE", help="Type of the SSD tier in it.")]
Processes = Annotated[
    int | None,
    typer.Option(
        "--processes", min=1, help="That replay at once.", show_default="one per processor"
    ),
]

DEFAULT_HOST = "64GiB"


def plan(
    trace: File,
    model: Model = None,
    kv_dtype: KVDtype = "auto",
    ranks: Ranks = 1,
    bytes_per_token: BytesPerToken = None,
    engine: Engine = None,
    capacity: Capacities = None,
    host: Hosts = None,
    engine_cache: EngineCache = None,
    policy: PolicyNames = None,
    prefill_rate: Prefill = None,
    host_rate: HostRate = None,
    ssd_rate: SsdRate = None,
    ssd_latency: SsdLatency = None,
    rates: Rates = None,
    dwpd: Dwpd = None,
    warm_up: WarmUp = 50,
    trace_block: TraceBlock = None,
    html: Html = None,
    write_config: WriteConfig = None,
    path: SsdPath = Path("/mnt/nvme0/tiered-kv"),
    type_: SsdType = "nvme",
    processes: Processes = None,
    as_json: Json = False,
) -> None:
    """Say what an SSD behind host memory would buy: hit rates, time to the first token, GPU time
    and wear for a grid of capacities and policies, replayed on the policies that serve; and
    recommend a configuration. Needs no engine, GPU or SSD."""
    from tiered_kv.cli.plan_text import print_plan
    from tiered_kv.cli.progress import Progress
    from tiered_kv.placement import DEFAULT_POLICY
    from tiered_kv.planning import (
        Drive,
        Question,
        automatic_capacities,
        deployment_yaml,
        make_plan,
        page,
        plan_as_dict,
        read_trace,
    )

    for option, number in (("--prefill-rate", prefill_rate), ("--dwpd", dwpd)):
        if number is not None and not math.isfinite(number):
            raise typer.BadParameter(f"{number} is no number to count with", param_hint=option)
    check_output(write_config, "--write-config", new=True)
    check_output(html, "--html", others=(trace, rates, write_config))
    path = _directory(path)
    settings = _settings_of(type_)
    policies = _policies(policy or [])
    view = None if engine is None else _view(engine)
    with Progress() as progress:
        progress.stage(f"reading {trace}")
        requests = read_trace(trace, trace_block)
        shape, block_tokens = _shape(requests, model, kv_dtype, ranks, bytes_per_token, view)
        footprint = requests.distinct_blocks * requests.block_tokens * shape.bytes_per_token
        question = Question(
            requests,
            shape,
            block_tokens,
            _speeds(prefill_rate, host_rate, ssd_rate, ssd_latency, rates, view),
            Drive() if dwpd is None else Drive(dwpd, "given"),
            _sizes(capacity) if capacity else tuple(automatic_capacities(int(footprint))),
            _sizes(host or [DEFAULT_HOST], least=0),
            0 if engine_cache is None else read_size(engine_cache),
            tuple(policies),
            preferred=DEFAULT_POLICY,
            warm_up=warm_up / 100,
            ssd_policies={name: ssd for name, ssd in policies.items() if name != ssd},
            host_from="given" if host else "assumed",
            ssd_budgeted="write_budget" in settings,
        )
        cells = question.cells()
        progress.stage(f"replaying {len(requests.requests)} requests {len(cells)} times")
        progress.expect(len(cells))
        made = make_plan(
            question,
            processes=processes,
            done=lambda cell: progress.advance(1, f"{cell.policy} {bytes_text(cell.ssd_bytes)}"),
        )
    deployment = deployment_yaml(
        made.recommendation,
        trace=requests.source,
        ranks=shape.ranks,
        ssd_type=type_,
        ssd_path=path,
        ssd_settings=settings,
    )
    files = OutputFiles()
    files.write(write_config, lambda file: file.write_text(deployment, encoding="utf-8"), new=True)
    files.write(html, lambda file: file.write_text(page(made, deployment), encoding="utf-8"))
    if as_json:
        print_json(plan_as_dict(made, deployment))
    else:
        print_plan(made, deployment)
    files.finish()


def _directory(path: Path) -> Path:
    """What was meant, as a configuration can name it."""
    try:
        path = path.expanduser().absolute()
        str(path).encode()
    except RuntimeError as error:
        raise typer.BadParameter(str(error), param_hint="--path") from error
    except UnicodeEncodeError as error:
        raise typer.BadParameter(f"{path!r} is no UTF-8 text", param_hint="--path") from error
    return path


def _settings_of(name: str) -> frozenset[str]:
    """The settings that tiers of a type have."""
    from tiered_kv.errors import PluginError
    from tiered_kv.plugins import Plugins

    plugins = Plugins()
    try:
        return frozenset(plugins.settings(name).model_fields)
    except (KeyError, PluginError) as error:
        reason = f"there is none of this name; known are {', '.join(plugins.names())}"
        text = reason if isinstance(error, KeyError) else str(error)
        raise typer.BadParameter(text, param_hint="--type") from error


def _policies(names: list[str]) -> dict[str, str]:
    """The policies to try for host memory, and what the SSD goes by behind each: the one of a
    configuration that names none comes first."""
    from tiered_kv.placement import DEFAULT_POLICY, Policies

    known = Policies()
    wanted = dict.fromkeys(names or known.names())
    ordered = sorted(wanted, key=lambda name: name != DEFAULT_POLICY)
    scored = {name: known.get(name, "--policy").scoring is not None for name in ordered}
    return {name: name if scored[name] else DEFAULT_POLICY for name in ordered}


def _sizes(texts: list[str], least: int = 1) -> tuple[int, ...]:
    from tiered_kv.config.units import parse_bytes

    sizes = set()
    for text in texts:
        try:
            size = parse_bytes(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        if size < least:
            raise typer.BadParameter(f"{text!r}: expected more than 0 bytes")
        sizes.add(size)
    return tuple(sorted(sizes))


def _view(engine: str) -> LiveView:
    """What the manager of a running engine says."""
    from tiered_kv.connector import ask_all

    found = [
        view
        for view in ask_all()
        if view.cache is not None and (engine == "any" or view.namespace.startswith(engine))
    ]
    if len(found) == 1:
        return found[0]
    if not found:
        text = f"no engine with tiers answers here whose namespace begins with {engine!r}"
        if engine == "any":
            text = "no engine with tiers answers on this machine"
        raise typer.BadParameter(f"{text}; see `tiered-kv top`", param_hint="--engine")
    names = ", ".join(f"{view.namespace} (pid {view.pid})" for view in found)
    raise typer.BadParameter(f"several engines answer: {names}", param_hint="--engine")


def _shape(
    trace: Trace,
    model: str | None,
    kv_dtype: str,
    ranks: int,
    bytes_per_token: str | None,
    view: LiveView | None,
) -> tuple[KVShape, int | None]:
    """KV of a token, and tokens of a block as the tiers would keep it."""
    from tiered_kv.connector import auto_chunk
    from tiered_kv.planning import KVShape, TraceKind, find_config, kv_shape

    if sum(one is not None for one in (model, bytes_per_token, view)) > 1:
        raise typer.BadParameter("give one of --model, --bytes-per-token and --engine")
    if view is not None and view.cache is not None:
        cache = view.cache
        shape = KVShape(f"the engine of pid {view.pid}", cache.bytes_per_token, cache.ranks)
        return shape, cache.block_tokens
    if model is not None:
        shape = kv_shape(find_config(model), kv_dtype, ranks)
        engine_block = 16
        per_rank = round(shape.rank_bytes_per_token * engine_block)
        return shape, engine_block * auto_chunk(per_rank, engine_block)
    if bytes_per_token is not None:
        return KVShape("given", float(read_size(bytes_per_token)), ranks), None
    if trace.kind is TraceKind.RECORDED and trace.bytes_per_token is not None:
        shape = KVShape("the engine that was recorded", trace.bytes_per_token, ranks)
        return shape, trace.block_tokens
    raise typer.BadParameter(
        "how much KV does a token take? Give --model (its folder, config.json or name), "
        "--bytes-per-token, or --engine"
    )


def _speeds(
    prefill: float | None,
    host: str | None,
    ssd: str | None,
    latency: str | None,
    rates: Path | None,
    view: LiveView | None,
) -> Speeds:
    """What is given counts before what is measured, and that before what is assumed."""
    from dataclasses import replace

    from tiered_kv.planning import Speeds, live_speeds, read_speeds

    speeds = Speeds()
    if view is not None:
        speeds = live_speeds(view, speeds)
    if rates is not None:
        speeds = read_speeds(rates, speeds)
    if prefill is not None:
        speeds = replace(speeds, prefill=prefill, prefill_from="given")
    if host is not None:
        rate = replace(speeds.host, bytes_per_second=float(read_size(host)))
        speeds = replace(speeds, host=rate, host_from="given")
    if ssd is not None:
        rate = replace(speeds.ssd, bytes_per_second=float(read_size(ssd)))
        speeds = replace(speeds, ssd=rate, ssd_from="given")
    if latency is not None:
        rate = replace(speeds.ssd, latency_seconds=read_seconds(latency))
        speeds = replace(speeds, ssd=rate)
    return speeds
