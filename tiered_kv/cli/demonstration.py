"""What `tiered-kv demo` does: the prompts, the engines one after another, and what was seen.

The first process answers without tiers, then with them; another one answers after the restart.

Outputs are compared with those of vLLM without tiered-kv that serves the same prompt from its own
prefix cache: the shapes of the computation are the same then. A prompt that is computed as a whole
may get another answer in bf16, from vLLM alone too.
"""

from __future__ import annotations

import pydoc_data.topics
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiered_kv.cli.progress import Progress
from tiered_kv.cli.traffic import loaded_bytes, tiers_that_supplied
from tiered_kv.cli.vllm_args import engine_arguments
from tiered_kv.errors import TieredKVError
from tiered_kv.stats import StatsSnapshot
from tiered_kv.vllm.engine_process import EngineProcess, Messages, offline_environment

__all__ = [
    "ANSWER_TOKENS",
    "QUESTIONS",
    "Demonstration",
    "Findings",
    "LoadedRun",
    "Reference",
    "long_prompts",
    "prompts",
]

MIN_PROMPT_TOKENS = 6000
MAX_MODEL_LEN = 8192
ANSWER_TOKENS = 48
PRIMING_TOKENS = 8
"""Length of the answer where a prompt is asked for the first time, to compute and store it."""
TIMED_TOKENS = 2
"""Length of an answer of which only the time to its first token is wanted."""
TIMED_PROMPTS = 2
"""How many prompts are computed as a whole to time it."""
SETTLE_SECONDS = 60.0

DOCUMENT = ("compound", 22_500)
"""Topic of Python's own documentation that all prompts share, and how many of its characters."""
NOTE_CHARACTERS = 2_000

QUESTIONS = (
    ("assignment", "What is the difference between an assignment and an augmented assignment?"),
    ("attribute-access", "When is __getattr__ called?"),
    ("comparisons", "What does a chained comparison such as a < b < c mean?"),
    ("formatstrings", "What does the conversion !r do in a replacement field?"),
    ("typesmapping", "What happens if a dictionary is changed while it is iterated over?"),
    ("debugger", "How is a breakpoint set?"),
)
"""A further topic and a question about it, per prompt."""

ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 1024,
    "block_size": 128,
    "enable_prefix_caching": True,
    "prefix_caching_hash_algo": "sha256_cbor",
}
"""Arguments of all engines, with and without tiers."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; all prompts fit
    # In processes of its own, vLLM on a CPU computes with fewer threads if it has a connector, and
    # in bf16 the number of threads changes answers.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
}


@dataclass(frozen=True, slots=True)
class Reference:
    """What vLLM without tiered-kv did."""

    answers: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Per prompt: token ids when it was asked first, and when it was asked again at once."""
    cached: tuple[tuple[int, int], ...]
    """Per prompt: its tokens that the own prefix cache supplied, likewise."""
    prefix_cache_seconds: tuple[float, ...]
    """Times to the first token of those that were asked again."""
    computed_seconds: tuple[float, ...]
    """Times to the first token of prompts that were computed as a whole."""


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """One request of which tiers supplied a part."""

    process: int
    """1, or 2 for the one after the restart."""
    prompt: int
    way: str
    """"shared" (asked for the first time), "after_restart", or the name of the tier that was
    asked for."""
    first_token_seconds: float
    cached_tokens: int
    """Prompt tokens that were not computed."""
    reference_cached_tokens: int
    """Likewise, in the reference."""
    loaded: Mapping[str, int]
    """Bytes that each tier supplied."""
    compared_tokens: int
    equal: bool
    """Whether these tokens are the reference's."""

    @property
    def only(self) -> str | None:
        """The tier that supplied all bytes of the load, if it was one."""
        supplied = tiers_that_supplied(self.loaded)
        return supplied[0] if len(supplied) == 1 else None


@dataclass(frozen=True, slots=True)
class Findings:
    """What the demonstration showed."""

    tiers: Mapping[str, str]
    """Type of each tier by its name, nearest first."""
    prompt_tokens: tuple[int, ...]
    reference: Reference
    runs: tuple[LoadedRun, ...]
    stats: tuple[StatsSnapshot, ...]
    """At the end of each process with tiers."""

    @property
    def outputs_equal(self) -> bool:
        """Whether every answer to a loaded prompt is the reference's."""
        return bool(self.runs) and all(run.equal for run in self.runs)

    def seconds(self, way: str) -> float | None:
        """Median time to the first token of one way; None where it was never gone."""
        times = [run.first_token_seconds for run in self.runs if run.way == way]
        return statistics.median(times) if times else None

    def ttft_seconds(self) -> dict[str, float | None]:
        """Median times to the first token: computed, from each tier, after the restart."""
        return {
            "recompute": statistics.median(self.reference.computed_seconds),
            **{name: self.seconds(name) for name in self.tiers},
            "after_restart": self.seconds("after_restart"),
        }

    def shortcomings(self) -> list[str]:
        """What was not shown, one line each."""
        found = [
            f"process {run.process}, prompt {run.prompt + 1}, {run.way}: the answer differs "
            f"from the reference within its first {run.compared_tokens} tokens "
            f"({run.cached_tokens} prompt tokens were loaded, {run.reference_cached_tokens} there)"
            for run in self.runs
            if not run.equal
        ]
        for name, kind in self.tiers.items():
            # What lies in host memory does not outlive its process.
            process = 1 if kind == "cpu" else 2
            if not any(r.only == r.way == name and r.process == process for r in self.runs):
                found.append(
                    f"tier {name!r} supplied no request alone in process {process}, although it "
                    "was asked to"
                )
        if not any(tiers_that_supplied(r.loaded) for r in self.runs if r.way == "after_restart"):
            found.append("no tier supplied anything after the restart unless it was asked to")
        return found


def prompts(document_characters: int = DOCUMENT[1]) -> list[Messages]:
    """The conversations: one document for all, then a note and a question of each its own."""
    topics: Mapping[str, str] = pydoc_data.topics.topics
    document = topics[DOCUMENT[0]][:document_characters]
    return [
        (
            {
                "role": "user",
                "content": f"{document}\n\n{topics[note][:NOTE_CHARACTERS]}\n\n{question}",
            },
        )
        for note, question in QUESTIONS
    ]


@dataclass(slots=True)
class Demonstration:
    """Runs the engines, one at a time."""

    model: Path
    config: Path
    """The deployment's YAML; its environment variables are set in `environment`."""
    tiers: Mapping[str, str]
    """Type of each tier by its name, nearest first."""
    folder: Path
    """For logs; exists."""
    environment: Mapping[str, str]
    progress: Progress
    _prompts: list[tuple[int, ...]] = field(default_factory=list)
    _runs: list[LoadedRun] = field(default_factory=list)

    def run(self) -> Findings:
        """Do all of it.

        Raises:
            RefuseToStart: the deployment cannot be used.
            TieredKVError: an engine failed; the message tells what it printed.
        """
        with self._process("first process") as engine:
            reference = self._reference(engine)
            first = self._first_process(engine, reference)
        with self._process("after the restart") as engine:
            stats = first, self._second_process(engine, reference)
        return Findings(
            tiers=self.tiers,
            prompt_tokens=tuple(len(ids) for ids in self._prompts),
            reference=reference,
            runs=tuple(self._runs),
            stats=stats,
        )

    @contextmanager
    def _process(self, name: str) -> Iterator[EngineProcess]:
        log = self.folder / f"{name.replace(' ', '-')}.log"
        environment = offline_environment() | ENVIRONMENT | dict(self.environment)
        with EngineProcess(log=log, environment=environment) as engine:
            yield engine
            engine.end()

    def _open(self, engine: EngineProcess, name: str, **arguments: Any) -> None:
        self.progress.stage(f"{name}: starting")
        engine.open({"model": str(self.model)} | ENGINE | arguments)
        self.progress.stage(f"{name}: ready")

    def _reference(self, engine: EngineProcess) -> Reference:
        answers: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        cached: list[tuple[int, int]] = []
        again_seconds: list[float] = []
        computed_seconds: list[float] = []
        self._open(engine, "vLLM alone")
        self._prompts = long_prompts(engine.encode)
        lengths = sorted(len(ids) for ids in self._prompts)
        self.progress.stage(
            f"{len(lengths)} prompts of {lengths[0]} to {lengths[-1]} tokens, "
            f"answers of {ANSWER_TOKENS}"
        )
        for number, ids in enumerate(self._prompts, 1):
            first = engine.generate(ids, max_tokens=PRIMING_TOKENS)
            again = engine.generate(ids, max_tokens=ANSWER_TOKENS)
            answers.append((first.token_ids, again.token_ids))
            cached.append((first.cached_tokens, again.cached_tokens))
            again_seconds.append(again.first_token_seconds)
            if first.cached_tokens == 0:  # the first prompt finds nothing
                computed_seconds.append(first.first_token_seconds)
                self.progress.step(f"prompt {number}: {first.first_token_seconds:.2f} s computed")
            self.progress.step(
                f"prompt {number}: {again.first_token_seconds:.2f} s from vLLM's own cache"
            )
        for number, ids in enumerate(self._prompts[1:TIMED_PROMPTS], 2):
            engine.reset_prefix_cache()
            cold = engine.generate(ids, max_tokens=TIMED_TOKENS)
            computed_seconds.append(cold.first_token_seconds)
            self.progress.step(f"prompt {number}: {cold.first_token_seconds:.2f} s computed")
        return Reference(
            tuple(answers), tuple(cached), tuple(again_seconds), tuple(computed_seconds)
        )

    def _first_process(self, engine: EngineProcess, reference: Reference) -> StatsSnapshot:
        host = next((name for name, kind in self.tiers.items() if kind == "cpu"), None)
        self._open(engine, "vLLM with tiers", **engine_arguments(self.config))
        for prompt in range(len(self._prompts)):
            self._ask(engine, reference, 1, prompt, "shared", max_tokens=PRIMING_TOKENS)
            engine.settle(SETTLE_SECONDS)
            if host is not None:
                self._ask(engine, reference, 1, prompt, host, hint=host)
        return engine.settle(SETTLE_SECONDS)

    def _second_process(self, engine: EngineProcess, reference: Reference) -> StatsSnapshot:
        stores = [name for name, kind in self.tiers.items() if kind != "cpu"]
        self._open(engine, "vLLM with tiers, new", **engine_arguments(self.config))
        for prompt in range(len(self._prompts)):
            free = self._ask(engine, reference, 2, prompt, "after_restart")
            for name in stores:
                # The whole answer was compared already where this tier supplied all of it.
                seen = free.only == name and free.equal
                length = TIMED_TOKENS if seen else ANSWER_TOKENS
                self._ask(engine, reference, 2, prompt, name, hint=name, max_tokens=length)
        return engine.settle(SETTLE_SECONDS)

    def _ask(
        self,
        engine: EngineProcess,
        reference: Reference,
        process: int,
        prompt: int,
        way: str,
        *,
        hint: str | None = None,
        max_tokens: int = ANSWER_TOKENS,
    ) -> LoadedRun:
        """One request, with nothing in the engine's own cache; noted if tiers supplied a part."""
        engine.reset_prefix_cache()
        before = engine.stats()
        answer = engine.generate(
            self._prompts[prompt],
            max_tokens=max_tokens,
            tiers=None if hint is None else [hint],
        )
        loaded = loaded_bytes(self.tiers, before, engine.stats())
        asking = 0 if way == "shared" else 1
        expected = reference.answers[prompt][asking]
        cached = reference.cached[prompt][asking]
        run = LoadedRun(
            process=process,
            prompt=prompt,
            way=way,
            first_token_seconds=answer.first_token_seconds,
            cached_tokens=answer.cached_tokens,
            reference_cached_tokens=cached,
            loaded=loaded,
            compared_tokens=len(answer.token_ids),
            equal=answer.token_ids == expected[: len(answer.token_ids)],
        )
        if way != "shared" or cached:  # the very first prompt finds nothing
            self._runs.append(run)
        supplied = " and ".join(tiers_that_supplied(loaded)) or "computed"
        self.progress.step(f"prompt {prompt + 1}: {run.first_token_seconds:.2f} s, {supplied}")
        return run


def long_prompts(
    encode: Callable[[Sequence[Messages]], list[tuple[int, ...]]],
) -> list[tuple[int, ...]]:
    """Token ids of the prompts; the document grows until each of them is long enough.

    Raises:
        TieredKVError: no length of the document fits the model's context.
    """
    characters = DOCUMENT[1]
    while True:
        encoded = encode(prompts(characters))
        shortest, longest = min(map(len, encoded)), max(map(len, encoded))
        if longest > MAX_MODEL_LEN - ANSWER_TOKENS:
            raise TieredKVError(
                f"the demo's prompts take {shortest} to {longest} tokens; expected at least "
                f"{MIN_PROMPT_TOKENS}, and at most {MAX_MODEL_LEN - ANSWER_TOKENS} beside the "
                "answer; this Python's documentation differs too much from the ones it was made "
                "with"
            )
        if shortest >= MIN_PROMPT_TOKENS:
            return encoded
        characters += 2_000
