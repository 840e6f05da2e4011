"""What `tiered-kv warm` does with prompts: one engine stores them, another one loads a sample."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tiered_kv.cli.progress import Progress
from tiered_kv.cli.prompt_file import Origin, PlacedPrompt, TokenIds, refuse
from tiered_kv.cli.warm_deployment import engine_environment
from tiered_kv.stats import StatsSnapshot
from tiered_kv.values import BlockKey
from tiered_kv.vllm.engine_process import (
    EngineProcess,
    Prompt,
    PromptLimits,
    PromptText,
    Warmth,
    offline_environment,
)

__all__ = ["Sampled", "Warmed", "Warming", "duration_text"]

T = TypeVar("T")

ASKED_TOGETHER = 64
"""Prompts that the engine is asked about at once."""

READY_SECONDS = 300.0
"""Longest wait until the indexes of the tiers are read."""

MIRROR_SECONDS = 5.0
"""Longest wait until what was published is known to the scheduler, too."""

PASSES = 3
"""How often what was dropped is stored again; a pass that stores nothing is the last."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A prompt that was loaded back from one tier."""

    origin: Origin
    tier: str
    prompt_tokens: int
    expected_tokens: int
    """What the tier holds of it, and an engine can load: the last token is always computed."""
    loaded_tokens: int


@dataclass(slots=True)
class Warmed:
    """What was done, as far as it came."""

    prompts: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    """Tokens of whole blocks: what tiers can hold of the prompts."""
    short: int = 0
    """Prompts without a whole block."""
    present_tokens: int = 0
    """Those that all tiers held before."""
    computed_tokens: int = 0
    """What the engine computed."""
    lacking: dict[str, int] = field(default_factory=dict)
    """By tier, tokens that it does not hold in the end."""
    sampled: list[Sampled] = field(default_factory=list)
    stats: list[StatsSnapshot] = field(default_factory=list)
    """At the end of each engine."""
    done_prompts: int = 0
    """Prompts that all tiers hold as far as is known."""
    namespace: bytes = b""
    """Id of the one in which the blocks lie."""
    keys: list[BlockKey] = field(default_factory=list)
    """Of the prompts' blocks, each once."""

    @property
    def hit(self) -> bool:
        """Whether the sample was loaded; True where none was asked for."""
        return all(one.loaded_tokens >= one.expected_tokens > 0 for one in self.sampled)

    @property
    def complete(self) -> bool:
        """Whether every tier holds everything, and there was something."""
        return self.tokens > 0 and not any(self.lacking.values())


class Warming:
    """The two engines, one after the other."""

    def __init__(
        self,
        folder: Path,
        arguments: Mapping[str, Any],
        prompts: Sequence[PlacedPrompt],
        tiers: Sequence[str],
        *,
        batch: int,
        sample: int,
        seconds: float,
        progress: Progress,
    ) -> None:
        """Nothing is started yet.

        Args:
            folder: for logs.
            arguments: of `vllm.LLM`, the deployment included.
            prompts: what is stored.
            tiers: names of the tiers that are to hold them, nearest first.
            batch: prompts that the engine answers side by side.
            sample: prompts that are loaded back from each tier.
            seconds: for what a batch leaves to be written.
            progress: entered.
        """
        self._folder = folder
        self._arguments = arguments
        self._prompts = prompts
        self._tiers = tuple(tiers)
        self._batch = batch
        self._sample = sample
        self._seconds = seconds
        self._progress = progress
        self._ids: list[tuple[int, ...]] = []
        self._warmth: list[Warmth] = []
        self._limits = PromptLimits(0, 0, 0)
        self._computed = False
        self.result = Warmed(prompts=len(prompts))

    def run(self) -> Warmed:
        """Store all prompts, wait until they are in all tiers, and load a sample back.

        Where all of them lay there already, the first engine loads the sample: it has not stored
        it itself either.

        Raises:
            ConfigError: a prompt does not fit the model; nothing was stored.
            TieredKVError: an engine or a tier failed.
        """
        with self._engine("warming") as engine:
            self._store(engine)
            if not self._computed:
                self._load_back(engine)
            self.result.stats.append(engine.settle(self._seconds))
        if self._computed and self._chosen():
            with self._engine("loading a sample back") as engine:
                engine.warmth([], READY_SECONDS)
                self._load_back(engine)
                self.result.stats.append(engine.settle(self._seconds))
        return self.result

    @contextmanager
    def _engine(self, name: str) -> Iterator[EngineProcess]:
        self._progress.stage(f"{name}: starting vLLM")
        environment = engine_environment(offline_environment())
        with EngineProcess(log=self._folder / "engine.log", environment=environment) as engine:
            engine.open(self._arguments)
            self._progress.stage(f"{name}: vLLM is ready")
            yield engine
            engine.end()

    # Storing

    def _store(self, engine: EngineProcess) -> None:
        self._limits = engine.limits()
        self._encode(engine)
        self._check()
        result = self.result
        result.prompt_tokens = sum(map(len, self._ids))
        self._warmth = self._ask(engine, range(len(self._ids)))
        result.tokens = sum(warmth.tokens for warmth in self._warmth)
        result.short = sum(not warmth.tokens for warmth in self._warmth)
        result.present_tokens = sum(map(self._held, self._warmth))
        missing = self._missing()
        result.done_prompts = len(self._ids) - len(missing)
        to_do = (
            f"about {self._to_compute(missing)} of {len(missing)} prompts are to be computed"
            if missing
            else "nothing is to be computed"
        )
        self._progress.stage(
            f"{len(self._ids)} prompts, {result.prompt_tokens} tokens: {result.present_tokens} "
            f"tokens are there already, {to_do}"
        )
        self._progress.expect(len(self._ids))
        self._progress.skip(result.done_prompts)
        for number in range(PASSES):
            if number:
                self._progress.stage(f"{len(missing)} prompts lack blocks: once more")
                engine.reset_prefix_cache()
            self._pass(engine, missing)
            before, missing = missing, self._settled(engine, missing)
            result.done_prompts = len(self._ids) - len(missing)
            if not missing or (number and len(missing) == len(before)):
                break
        result.lacking = self._lacking(missing)
        found: dict[BlockKey, None] = {}
        for some in _portions(self._ids, ASKED_TOGETHER):
            result.namespace, keys = engine.block_keys(some)
            found.update(dict.fromkeys(keys))
        result.keys = list(found)

    def _pass(self, engine: EngineProcess, missing: Sequence[int]) -> None:
        """Have the engine answer these prompts; what tiers hold of them is not computed."""
        began, behind = time.monotonic(), 0
        wanted = self.result.computed_tokens + self._to_compute(missing)
        for numbers in _portions(missing, self._batch):
            # Asked again: what a prompt shares with those before it is there by now.
            for i, warmth in zip(numbers, self._ask(engine, numbers), strict=True):
                self._warmth[i] = warmth
            left = [i for i in numbers if self._held(self._warmth[i]) < self._warmth[i].tokens]
            if left:
                self._computed = True
                answers = engine.generate_all(
                    [Prompt(self._ids[i], self._source(self._warmth[i])) for i in left],
                    max_tokens=1,
                )
                engine.settle(self._seconds)
                computed = sum(one.prompt_tokens - one.cached_tokens for one in answers)
                self.result.computed_tokens += computed
            self.result.done_prompts += len(numbers)
            behind += sum(len(self._ids[i]) for i in numbers)
            seconds = time.monotonic() - began
            whole = sum(len(self._ids[i]) for i in missing)
            rest = seconds / behind * (whole - behind)
            self._progress.step(
                f"{self.result.done_prompts} of {len(self._ids)} prompts stored, "
                f"{self.result.computed_tokens} of {wanted} tokens computed"
                + (f", about {duration_text(rest)} left" if rest >= 0.5 else ""),
                len(numbers),
            )

    def _settled(self, engine: EngineProcess, asked: Sequence[int]) -> list[int]:
        """Those of the prompts of which a tier lacks blocks, once the scheduler knows of all that
        was published."""
        deadline = time.monotonic() + MIRROR_SECONDS
        while asked:
            for i, warmth in zip(asked, self._ask(engine, asked), strict=True):
                self._warmth[i] = warmth
            if not self._missing() or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return self._missing()

    def _ask(self, engine: EngineProcess, numbers: Sequence[int]) -> list[Warmth]:
        found: list[Warmth] = []
        for some in _portions(numbers, ASKED_TOGETHER):
            found += engine.warmth([self._ids[i] for i in some], READY_SECONDS)
        return found

    def _to_compute(self, missing: Sequence[int]) -> int:
        """About how many tokens the engine will compute for these prompts: fewer, where they share
        any."""
        return sum(len(self._ids[i]) - self._held(self._warmth[i]) for i in missing)

    def _held(self, warmth: Warmth) -> int:
        """Tokens that all tiers hold."""
        return min(warmth.held.get(tier, 0) for tier in self._tiers)

    def _source(self, warmth: Warmth) -> tuple[str, ...]:
        """The tier that a prompt's beginning is loaded from: that which holds the least, so that
        everything that any of them lacks passes the engine, and is stored."""
        tier = min(self._tiers, key=lambda name: warmth.held.get(name, 0))
        return (tier,) if warmth.held.get(tier, 0) else ()

    def _missing(self) -> list[int]:
        return [i for i, one in enumerate(self._warmth) if self._held(one) < one.tokens]

    def _lacking(self, missing: Sequence[int]) -> dict[str, int]:
        asked = [self._warmth[i] for i in missing]
        return {
            tier: sum(warmth.tokens - warmth.held.get(tier, 0) for warmth in asked)
            for tier in self._tiers
        }

    def _encode(self, engine: EngineProcess) -> None:
        """Token ids of all prompts; those that are token ids already are not sent around."""
        texts: list[PromptText] = []
        for placed in self._prompts:
            if not isinstance(placed.prompt, TokenIds):
                texts.append(placed.prompt)
        encoded = iter(
            [ids for some in _portions(texts, ASKED_TOGETHER) for ids in engine.encode(some)]
        )
        self._ids = [
            placed.prompt.ids if isinstance(placed.prompt, TokenIds) else next(encoded)
            for placed in self._prompts
        ]

    def _check(self) -> None:
        limits = self._limits
        problems: list[tuple[Origin, str]] = []
        for placed, ids in zip(self._prompts, self._ids, strict=True):
            if len(ids) >= limits.max_model_len:
                problem = (
                    f"{len(ids)} tokens, but this engine takes {limits.max_model_len} with the "
                    "answer; cut the prompt, or give --max-model-len"
                )
                problems.append((placed.origin, problem))
            elif max(ids, default=0) >= limits.vocabulary:
                problem = f"token {max(ids)}, but the model knows {limits.vocabulary} tokens"
                problems.append((placed.origin, problem))
        refuse(problems)

    # Loading back

    def _chosen(self) -> list[int]:
        """Prompts of the sample: the first, the last, and evenly between."""
        able = [i for i, ids in enumerate(self._ids) if len(ids) > self._limits.block_tokens]
        if len(able) <= self._sample:
            return able
        if self._sample == 1:
            return able[-1:]
        last = len(able) - 1
        return [able[i * last // (self._sample - 1)] for i in range(self._sample)]

    def _load_back(self, engine: EngineProcess) -> None:
        for i in self._chosen():
            ids, warmth = self._ids[i], self._warmth[i]
            step = self._limits.block_tokens
            loadable = (len(ids) - 1) // step * step
            for tier in self._tiers:
                engine.reset_prefix_cache()
                [answer] = engine.generate_all([Prompt(ids, (tier,))], max_tokens=1)
                self.result.sampled.append(
                    Sampled(
                        origin=self._prompts[i].origin,
                        tier=tier,
                        prompt_tokens=len(ids),
                        expected_tokens=min(loadable, warmth.held.get(tier, 0)),
                        loaded_tokens=answer.cached_tokens,
                    )
                )


def _portions(values: Sequence[T], most: int) -> list[Sequence[T]]:
    return [values[start : start + most] for start in range(0, len(values), most)]


def duration_text(seconds: float) -> str:
    """About so many seconds, for people: `1 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
