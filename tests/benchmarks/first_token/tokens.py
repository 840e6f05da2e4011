"""Time to first token, by where the prompt's blocks come from."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tiered_kv.cli.demonstration import (
    ENGINE,
    ENVIRONMENT,
    PRIMING_TOKENS,
    SETTLE_SECONDS,
    TIMED_TOKENS,
    long_prompts,
)
from tiered_kv.cli.progress import Progress
from tiered_kv.cli.traffic import loaded_bytes, tiers_that_supplied
from tiered_kv.cli.vllm_args import engine_arguments
from tiered_kv.vllm.engine_process import EngineProcess, Generated, offline_environment

__all__ = ["TIERS", "WAYS", "Rounds", "Tokens", "engine", "measure"]

TIERS = {"host": "cpu", "ssd": "nvme", "pins": "lmdb"}
COMPUTED, LIMIT, RESTARTED, AFRESH = "computed", "limit", "restarted", "first"
WAYS = {
    COMPUTED: "computed",
    "host": "from host memory",
    "ssd": "from NVMe",
    "pins": "from LMDB",
    RESTARTED: "from NVMe, after a restart",
    AFRESH: "from NVMe, first request after a restart",
    LIMIT: "never left the engine (the limit)",
}


@dataclass(frozen=True, slots=True)
class Tokens:
    """Seconds to the first token."""

    prompt_tokens: tuple[int, ...]
    seconds: Mapping[str, Sequence[float]]
    """By way, of each round."""
    equal: int
    """Answers out of tiers that are those of vLLM out of its own cache."""
    compared: int

    def median(self, way: str) -> float:
        """Of one way's rounds."""
        return statistics.median(self.seconds[way])

    def figures(self) -> list[dict[str, object]]:
        """For the table of goals."""
        computed, limit = self.median(COMPUTED), self.median(LIMIT)
        fastest = {way: min(seconds) for way, seconds in self.seconds.items()}
        return [
            {
                "row": "token.recompute",
                "at": "",
                "value": computed / self.median(RESTARTED),
                "best": fastest[COMPUTED] / fastest[RESTARTED],
            },
            {
                "row": "token.limit",
                "at": "",
                "value": self.median("ssd") / limit,
                "best": fastest["ssd"] / fastest[LIMIT],
            },
        ]


@contextmanager
def engine(
    folder: Path, name: str, model: Path, config: Path | None = None
) -> Iterator[EngineProcess]:
    """A vLLM in a process of its own, with the tiers of `config` if one is given; it ends in good
    order."""
    environment = offline_environment() | ENVIRONMENT
    with EngineProcess(log=folder / f"{name}.log", environment=environment) as process:
        more = {} if config is None else engine_arguments(config)
        process.open({"model": str(model)} | ENGINE | more)
        yield process
        process.end()


@dataclass(slots=True)
class Rounds:
    """Asks, and keeps what was seen."""

    prompts: list[tuple[int, ...]]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    equal: int = 0
    compared: int = 0

    def alone(self, plain: EngineProcess, prompt: int) -> None:
        """Computed, then out of the engine's own cache."""
        plain.reset_prefix_cache()
        computed = self._ask(plain, prompt)
        if computed.cached_tokens:
            raise RuntimeError(f"{computed.cached_tokens} tokens were not computed")
        again = self._ask(plain, prompt)
        self.seconds[COMPUTED].append(computed.first_token_seconds)
        self.seconds[LIMIT].append(again.first_token_seconds)
        self.answers[prompt] = again.token_ids

    def tiered(self, tiered: EngineProcess, prompt: int, tier: str, way: str) -> None:
        """Out of one tier."""
        tiered.reset_prefix_cache()
        before = tiered.stats()
        answer = self._ask(tiered, prompt, tier)
        supplied = tiers_that_supplied(loaded_bytes(TIERS, before, tiered.stats()))
        if list(supplied) != [tier]:
            raise RuntimeError(f"{supplied or 'nothing'} supplied the blocks, not {tier}")
        self.seconds[way].append(answer.first_token_seconds)
        self.compared += 1
        self.equal += answer.token_ids == self.answers[prompt]

    def last(self) -> str:
        """The last times of all ways."""
        return ", ".join(f"{way} {s[-1]:.3f}" for way, s in self.seconds.items() if s)

    def _ask(self, asked: EngineProcess, prompt: int, tier: str | None = None) -> Generated:
        tiers = None if tier is None else [tier]
        return asked.generate(self.prompts[prompt], max_tokens=TIMED_TOKENS, tiers=tiers)


def measure(folder: Path, model: Path, rounds: int, progress: Progress) -> Tokens:
    """Rounds before and after the restart, as many each."""
    config = folder / "tokens.yaml"
    config.write_text(yaml.safe_dump(_deployment(folder)), encoding="utf-8")
    with ExitStack() as stack:
        progress.stage("starting engines")
        plain = stack.enter_context(engine(folder, "plain", model))
        found = Rounds(long_prompts(plain.encode))
        with engine(folder, "tiered", model, config) as tiered:
            for prompt, ids in enumerate(found.prompts[:rounds]):
                tiered.reset_prefix_cache()
                tiered.generate(ids, max_tokens=PRIMING_TOKENS)
                tiered.settle(SETTLE_SECONDS)
                progress.stage(f"prompt {prompt + 1} is stored in all tiers")
            for number in range(rounds):
                prompt = number % len(found.prompts)
                found.alone(plain, prompt)
                for tier in TIERS:
                    found.tiered(tiered, prompt, tier, tier)
                progress.stage(f"round {number + 1} of {rounds}: {found.last()}")
        with engine(folder, "restarted", model, config) as tiered:
            for number in range(rounds):
                prompt = number % len(found.prompts)
                found.alone(plain, prompt)
                found.tiered(tiered, prompt, "ssd", RESTARTED if number else AFRESH)
                if not number:
                    found.tiered(tiered, prompt, "ssd", RESTARTED)
                progress.stage(f"after the restart, {number + 1} of {rounds}: {found.last()}")
    lengths = tuple(len(ids) for ids in found.prompts)
    return Tokens(lengths, found.seconds, found.equal, found.compared)


def _deployment(folder: Path) -> dict[str, object]:
    # All prompts' blocks are about 0.2 GiB.
    return {
        "tiers": [
            {"name": "host", "type": "cpu", "capacity": "512MiB"},
            {
                "name": "ssd",
                "type": "nvme",
                "path": str(folder / "ssd"),
                "capacity": "1GiB",
                "min_free": "0%",
            },
            {
                "name": "pins",
                "type": "lmdb",
                "path": str(folder / "pins"),
                "capacity": "512MiB",
                "min_free": "0%",
            },
        ],
        "placement": {"write": list(TIERS)},
        "limits": {"load_deadline": "20s", "lookup_wait": "2s"},
        "recompute": {"gate": "off"},  # each tier is measured, however fast computing is
    }
