"""What a test asks of an engine, and what it gets back; plain values that travel as JSON.

Read by the test process and by the engine's process alike, so nothing heavy is imported here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

Prompt = str | tuple[int, ...]
"""Text, or token ids."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine is built; the defaults are those for quick, repeatable tests on a CPU."""

    model: Path
    dtype: str = "float32"
    block_size: int = 32
    max_model_len: int = 2048
    kv_transfer_config: Mapping[str, Any] | None = None
    multiprocess: bool = False
    """Scheduler and worker in processes of their own, as they are in production."""
    tensor_parallel_size: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM`."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Answer the prompts greedily: one request after another, or all in one batch."""

    prompts: tuple[Prompt, ...]
    max_tokens: int = 16
    together: bool = False
    logprobs: bool = False
    ignore_eos: bool = True
    kv_transfer_params: Mapping[str, Any] | None = None
    name: str = ""
    """Under which the answers are found in `EngineRun.answers`."""


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget what the engine itself has cached; the connector's part only if asked."""

    connector: bool = False


@dataclass(frozen=True, slots=True)
class Sleep:
    """Leave the engine idle."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Settle:
    """Wait until every tier is open and nothing is left to be written to any."""


@dataclass(frozen=True, slots=True)
class ReadMetrics:
    """Take a reading of `LLM.get_metrics()`."""

    name: str = ""
    """Under which it is found in `EngineRun.at`."""


@dataclass(frozen=True, slots=True)
class Inject:
    """Have the faulty store fail as this plan says, from its next call on."""

    file: str
    """The store's `plan`."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """A `tiered_kv.testing.faults.FaultPlan` as JSON has it; nothing fails if empty."""


@dataclass(frozen=True, slots=True)
class FillDisk:
    """Take all the space that is left on a file's disk, as another tenant of it may."""

    file: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete a file or a directory, whoever uses it."""

    path: str


@dataclass(frozen=True, slots=True)
class Restart:
    """End the engine, and start another one for the client that is left.

    What runs in processes of its own (`multiprocess`) gets new ones.
    """

    options: EngineOptions


@dataclass(frozen=True, slots=True)
class StartRefused:
    """End the engine and start one that refuses to; its error is printed."""

    options: EngineOptions
    ends: bool = False
    """Let the error end the process, as it would end any other; then it is the last action."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process and all its children at once with SIGKILL."""


Action = (
    Generate
    | ResetPrefixCache
    | Sleep
    | Settle
    | ReadMetrics
    | Inject
    | FillDisk
    | Remove
    | Restart
    | StartRefused
    | Kill
)
_ACTIONS: tuple[type[Any], ...] = get_args(Action)


@dataclass(frozen=True, slots=True)
class Output:
    """One answer."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    num_cached_tokens: int
    """Prompt tokens that were not computed, from the engine's own cache or from ours."""
    first_token_latency: float
    """Seconds from the arrival of the request to its first token; 0.0 from a server."""
    logprobs: tuple[float, ...] = ()
    """Of the chosen tokens, when asked for."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one metric; a histogram gives two, `NAME_count` and `NAME_sum`."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Metrics:
    """A reading of all metrics."""

    samples: tuple[Sample, ...] = ()

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name that carry at least these labels; 0.0 if none does."""
        return sum(
            (
                sample.value
                for sample in self.samples
                if sample.name == name and labels.items() <= sample.labels.items()
            ),
            0.0,
        )

    def names(self) -> frozenset[str]:
        """Names of all samples."""
        return frozenset(sample.name for sample in self.samples)

    def settled(self, before: Metrics) -> bool:
        """Whether every tier is open, nothing waits to be written, and no hop has done anything
        since `before`."""
        state = "vllm:tiered_kv_tier_state"
        return (
            self.total(state) > 0
            and not self.total(state, state="opening")
            and not self.total("vllm:tiered_kv_write_behind_blocks")
            and self._moved() == before._moved()
        )

    def _moved(self) -> list[Sample]:
        return [sample for sample in self.samples if "tiered_kv_hop_" in sample.name]


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What came out of one engine's life."""

    generations: tuple[tuple[Output, ...], ...]
    """Answers per `Generate`, in the order of its prompts."""
    readings: tuple[Metrics, ...]
    """One per `ReadMetrics`, and one more at the end of a run that was not killed."""
    killed: bool
    log: str
    """Everything that the processes printed."""
    left_behind: tuple[Path, ...] = ()
    """Shared memory that the processes held at the end; removed by the harness."""
    answers: Mapping[str, tuple[Output, ...]] = field(default_factory=dict)
    """Those of each `Generate` that has a name, under it."""
    at: Mapping[str, Metrics] = field(default_factory=dict)
    """Each reading that has a name, under it."""

    @property
    def outputs(self) -> tuple[Output, ...]:
        """All answers of the run, in order."""
        return tuple(output for generation in self.generations for output in generation)

    @property
    def metrics(self) -> Metrics:
        """The last reading."""
        return self.readings[-1] if self.readings else Metrics()


def encode_scenario(options: EngineOptions, actions: Iterable[Action]) -> str:
    """JSON for the engine's process."""
    steps = [{"do": type(action).__name__} | asdict(action) for action in actions]
    return json.dumps({"engine": asdict(options), "actions": steps}, default=os.fspath)


def decode_scenario(text: str) -> tuple[EngineOptions, tuple[Action, ...]]:
    """The reverse of `encode_scenario`."""
    scenario = json.loads(text)
    by_name = {kind.__name__: kind for kind in _ACTIONS}
    actions: list[Action] = []
    for step in scenario["actions"]:
        kind = by_name[step.pop("do")]
        if "prompts" in step:
            step["prompts"] = tuple(p if isinstance(p, str) else tuple(p) for p in step["prompts"])
        if "options" in step:
            step["options"] = _options(step["options"])
        actions.append(kind(**step))
    return _options(scenario["engine"]), tuple(actions)


def _options(raw: dict[str, Any]) -> EngineOptions:
    settings: dict[str, Any] = raw | {"model": Path(raw["model"])}
    return EngineOptions(**settings)


def encode_event(kind: str, value: Any, name: str = "") -> str:
    """One line of the result file."""
    return json.dumps({"kind": kind, "name": name, "value": value})


def decode_run(lines: Iterable[str], *, killed: bool, log: str) -> EngineRun:
    """Put the lines of a result file together; a torn last line of a killed run is left out."""
    generations: list[tuple[Output, ...]] = []
    readings: list[Metrics] = []
    left_behind: list[Path] = []
    answers: dict[str, tuple[Output, ...]] = {}
    at: dict[str, Metrics] = {}
    for line in lines:
        if not line.endswith("\n"):
            break
        event = json.loads(line)
        match event["kind"]:
            case "outputs":
                generations.append(tuple(_output(raw) for raw in event["value"]))
                if event["name"]:
                    answers[event["name"]] = generations[-1]
            case "metrics":
                readings.append(Metrics(tuple(Sample(**raw) for raw in event["value"])))
                if event["name"]:
                    at[event["name"]] = readings[-1]
            case "shared_memory":
                left_behind += map(Path, event["value"])
    return EngineRun(
        tuple(generations), tuple(readings), killed, log, tuple(left_behind), answers, at
    )


def _output(raw: dict[str, Any]) -> Output:
    token_ids, logprobs = tuple(raw.pop("token_ids")), tuple(raw.pop("logprobs"))
    return Output(token_ids=token_ids, logprobs=logprobs, **raw)
