"""`tiered-kv warm`: put prompts into the tiers before anyone asks, through the real engine."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiered_kv.cli.output import (
    FAILED,
    Json,
    bytes_text,
    print_json,
    read_seconds,
    warn,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered_kv.cli.progress import Progress
    from tiered_kv.cli.prompt_file import PromptLine
    from tiered_kv.stats import StatsSnapshot
    from tiered_kv.vllm.engine_process import EngineProcess, PromptLimits, PromptText

__all__ = ["warm"]

SAMPLE = 3
"""How many prompts are loaded back to see that it worked."""

File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="One prompt a line; or JSONL with prompt, messages or token_ids.",
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
    str,
    typer.Option(
        "--model", metavar="MODEL", help="Name or folder, as vLLM takes it.", show_default=False
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
Timeout = Annotated[
    str,
    typer.Option(
        "--timeout", metavar="DURATION", help="For what is left to be written in the end."
    ),
]


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A prompt that was loaded back."""

    line: int
    prompt_tokens: int
    expected_tokens: int
    """What the tiers supplied before the engine was ended."""
    loaded_tokens: int
    """What they supplied to a new engine."""


def warm(
    file: File,
    config: Deployed,
    model: Model,
    dtype: Dtype = None,
    max_model_len: MaxModelLen = None,
    block_size: EngineBlock = None,
    engine_args: EngineArguments = "{}",
    timeout: Timeout = "10min",
    as_json: Json = False,
) -> None:
    """Compute the prompts of FILE on vLLM, store their blocks, and load a sample back.

    The sample is loaded by a new engine, so that what is found has outlived its process. Exits 1
    if the sample was not found, 2 if FILE or CONFIG has a mistake; then nothing was stored.
    """
    from tiered_kv.cli.progress import Progress
    from tiered_kv.cli.prompt_file import read_prompts
    from tiered_kv.cli.traffic import traffic
    from tiered_kv.cli.vllm_args import engine_arguments
    from tiered_kv.config import load
    from tiered_kv.errors import ConfigError
    from tiered_kv.plugins import Plugins
    from tiered_kv.vllm.engine_process import require_vllm

    seconds = read_seconds(timeout)
    further = _engine_arguments(engine_args)
    lines = read_prompts(file)
    deployment = load(config, Plugins())
    if not any(tier in deployment.write_order for tier in deployment.stores):
        raise ConfigError(
            f"{config}: no tier that outlives its process may be written, so there is nothing to "
            "warm; name one in placement.write",
            file=config,
            key="placement.write",
        )
    require_vllm()
    given = {"dtype": dtype, "max_model_len": max_model_len, "block_size": block_size}
    arguments = {
        "model": model,
        "enable_prefix_caching": True,
        **{name: value for name, value in given.items() if value is not None},
        **further,
        **engine_arguments(config),
    }
    tiers = {tier.name: tier.type for tier in deployment.tiers}
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="tiered-kv-warm-") as folder,
        Progress(len(lines)) as progress,
    ):
        run = _Warming(Path(folder), arguments, file, lines, seconds, progress)
        stored = run.store()
        loaded, sampled = run.load_back()
    moved = traffic(tiers, stored, loaded)
    hit = bool(sampled) and all(s.loaded_tokens >= s.expected_tokens > 0 for s in sampled)
    if as_json:
        print_json(
            {
                "file": str(file),
                "prompts": len(lines),
                "prompt_tokens": run.prompt_tokens,
                "tiers": moved.tiers_as_json(),
                "hops": moved.hops_as_json(),
                "sample": [
                    {
                        "line": s.line,
                        "prompt_tokens": s.prompt_tokens,
                        "expected_tokens": s.expected_tokens,
                        "loaded_tokens": s.loaded_tokens,
                    }
                    for s in sampled
                ],
                "hit": hit,
                "seconds": time.monotonic() - began,
            }
        )
    else:
        moved.print_tables()
        total = sum(moved.stored(tier.name).bytes for tier in deployment.stores)
        typer.echo(
            f"{len(lines)} prompts, {run.prompt_tokens} tokens; {bytes_text(total)} stored; "
            f"sample of {len(sampled)} after a restart: "
            f"{sum(s.loaded_tokens for s in sampled)} tokens loaded of "
            f"{sum(s.prompt_tokens for s in sampled)}"
        )
    for line in _complaints(file, sampled):
        warn(line)
    if not hit:
        raise typer.Exit(FAILED)


def _engine_arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"is not JSON: {error}", param_hint="--engine-args") from error
    if not isinstance(value, dict):
        raise typer.BadParameter("is not a JSON object", param_hint="--engine-args")
    return value


def _complaints(file: Path, sampled: Sequence[_Sampled]) -> list[str]:
    if not sampled:
        return ["no prompt is as long as an engine block, so nothing could be stored"]
    found: list[str] = []
    for s in sampled:
        if s.expected_tokens == 0:
            found.append(f"{file}:{s.line}: {s.prompt_tokens} tokens, of which none was stored")
        elif s.loaded_tokens < s.expected_tokens:
            found.append(
                f"{file}:{s.line}: {s.loaded_tokens} of {s.expected_tokens} stored tokens were "
                "found again; the tiers may be smaller than what FILE needs"
            )
    return found


class _Warming:
    """The two engines, one after the other."""

    def __init__(
        self,
        folder: Path,
        arguments: Mapping[str, Any],
        file: Path,
        lines: Sequence[PromptLine],
        seconds: float,
        progress: Progress,
    ) -> None:
        self._folder = folder
        self._arguments = arguments
        self._file = file
        self._lines = lines
        self._seconds = seconds
        self._progress = progress
        self._prompts: list[tuple[int, ...]] = []
        self._sample: list[int] = []
        self._expected: list[int] = []

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self._prompts))

    def store(self) -> StatsSnapshot:
        """Compute all prompts, and wait until they are in all tiers.

        Raises:
            ConfigError: a prompt does not fit the model; nothing was stored.
            TieredKVError: the engine or a tier failed.
        """
        with self._engine("warming") as engine:
            limits = engine.limits()
            self._prompts = self._encoded(engine)
            self._check(limits)
            for line, ids in zip(self._lines, self._prompts, strict=True):
                engine.generate(ids, max_tokens=1)
                self._progress.step(f"line {line.number}: {len(ids)} tokens")
            self._progress.stage("waiting for the last writes")
            stats = engine.settle(self._seconds)
            self._sample = _spread(
                [i for i, ids in enumerate(self._prompts) if len(ids) > limits.block_tokens]
            )
            for i in self._sample:
                engine.reset_prefix_cache()
                answer = engine.generate(self._prompts[i], max_tokens=1)
                self._expected.append(answer.cached_tokens)
            return stats

    def load_back(self) -> tuple[StatsSnapshot, list[_Sampled]]:
        """Load the sample in a new engine.

        Raises:
            TieredKVError: the engine failed.
        """
        from tiered_kv.stats import StatsSnapshot

        sampled: list[_Sampled] = []
        if not self._sample:
            return StatsSnapshot(time.time()), sampled
        with self._engine("loading a sample back") as engine:
            for i, expected in zip(self._sample, self._expected, strict=True):
                engine.reset_prefix_cache()
                answer = engine.generate(self._prompts[i], max_tokens=1)
                sampled.append(
                    _Sampled(
                        line=self._lines[i].number,
                        prompt_tokens=len(self._prompts[i]),
                        expected_tokens=expected,
                        loaded_tokens=answer.cached_tokens,
                    )
                )
            return engine.settle(self._seconds), sampled

    @contextmanager
    def _engine(self, name: str) -> Iterator[EngineProcess]:
        from tiered_kv.vllm.engine_process import EngineProcess, offline_environment

        self._progress.stage(f"{name}: starting vLLM")
        log = self._folder / "engine.log"
        with EngineProcess(log=log, environment=offline_environment()) as engine:
            engine.open(self._arguments)
            self._progress.stage(f"{name}: vLLM is ready")
            yield engine
            engine.end()

    def _encoded(self, engine: EngineProcess) -> list[tuple[int, ...]]:
        """Token ids of all prompts; those that are token ids already are not sent around."""
        from tiered_kv.cli.prompt_file import TokenIds

        texts: list[PromptText] = []
        for line in self._lines:
            prompt = line.prompt
            if not isinstance(prompt, TokenIds):
                texts.append(prompt)
        encoded = iter(engine.encode(texts))
        return [
            line.prompt.ids if isinstance(line.prompt, TokenIds) else next(encoded)
            for line in self._lines
        ]

    def _check(self, limits: PromptLimits) -> None:
        from tiered_kv.cli.prompt_file import refuse

        problems: list[tuple[int, str]] = []
        for line, ids in zip(self._lines, self._prompts, strict=True):
            if len(ids) >= limits.max_model_len:
                problem = (
                    f"{len(ids)} tokens, but this engine takes {limits.max_model_len} with the "
                    "answer; cut the prompt, or give --max-model-len"
                )
                problems.append((line.number, problem))
            elif max(ids, default=0) >= limits.vocabulary:
                problem = f"token {max(ids)}, but the model knows {limits.vocabulary} tokens"
                problems.append((line.number, problem))
        refuse(self._file, problems)


def _spread(indices: Sequence[int]) -> list[int]:
    """At most `SAMPLE` of them: the first, the last, and evenly between."""
    if len(indices) <= SAMPLE:
        return list(indices)
    last = len(indices) - 1
    return [indices[i * last // (SAMPLE - 1)] for i in range(SAMPLE)]
