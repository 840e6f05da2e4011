"""What `warm` asks of an engine, and what it says of the answers; a real engine is asked by
`tests/engine/test_warm.py`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from tiered_kv.cli import warming
from tiered_kv.cli.progress import Progress
from tiered_kv.cli.prompt_file import AnyPrompt, Origin, PlacedPrompt, TokenIds
from tiered_kv.cli.warm_keep import Keeping, Kept
from tiered_kv.cli.warm_report import complaints, report_as_json
from tiered_kv.cli.warming import Warmed, Warming, duration_text
from tiered_kv.errors import ConfigError
from tiered_kv.stats import StatsSnapshot
from tiered_kv.values import BlockKey
from tiered_kv.vllm.engine_process import Generated, Prompt, PromptLimits, PromptText, Warmth

BLOCK = 16
TYPES = {"ssd": "nvme", "pins": "lmdb"}


class Engines:
    """Stands for all engines of a run, and for the tiers: whole prompts' tokens by tier."""

    def __init__(self) -> None:
        self.held: dict[str, dict[tuple[int, ...], int]] = {tier: {} for tier in TYPES}
        self.batches: list[list[Prompt]] = []
        self.started = 0
        self.settled = 0
        self.drops: dict[str, int] = {}
        """By tier, how many more prompts are not stored in it."""
        self.interrupt_at: int | None = None

    def start(self, **_: object) -> _Engine:
        self.started += 1
        return _Engine(self)

    def answer(self, prompt: Prompt) -> Generated:
        cached = 0
        for tier in TYPES if prompt.tiers is None else prompt.tiers:
            cached = max(cached, self.held[tier].get(prompt.token_ids, 0))
        cached = min(cached, (len(prompt.token_ids) - 1) // BLOCK * BLOCK)
        whole = len(prompt.token_ids) // BLOCK * BLOCK
        for tier, held in self.held.items():
            if self.drops.get(tier, 0):
                self.drops[tier] -= 1
            else:
                held[prompt.token_ids] = whole
        return Generated((0,), "", len(prompt.token_ids), cached, 0.0)


class _Engine:
    """One `EngineProcess`."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def open(self, arguments: Mapping[str, Any]) -> None:
        assert arguments == {"model": "m"}

    def end(self) -> None:
        pass

    def limits(self) -> PromptLimits:
        return PromptLimits(max_model_len=200, vocabulary=100, block_tokens=BLOCK)

    def encode(self, prompts: Sequence[PromptText]) -> list[tuple[int, ...]]:
        return [tuple(range(len(str(prompt)))) for prompt in prompts]

    def warmth(self, prompts: Sequence[Sequence[int]], seconds: float) -> list[Warmth]:
        assert seconds > 0
        return [
            Warmth(
                len(ids) // BLOCK * BLOCK,
                {tier: held.get(tuple(ids), 0) for tier, held in self._engines.held.items()},
            )
            for ids in prompts
        ]

    def block_keys(self, prompts: Sequence[Sequence[int]]) -> tuple[bytes, list[BlockKey]]:
        keys = [
            BlockKey(bytes(ids[: end + BLOCK]))
            for ids in prompts
            for end in range(0, len(ids) - BLOCK + 1, BLOCK)
        ]
        return b"namespace", list(dict.fromkeys(keys))

    def generate_all(self, prompts: Sequence[Prompt], *, max_tokens: int) -> list[Generated]:
        assert max_tokens == 1
        if len(self._engines.batches) == self._engines.interrupt_at:
            raise KeyboardInterrupt
        self._engines.batches.append(list(prompts))
        return [self._engines.answer(prompt) for prompt in prompts]

    def settle(self, seconds: float) -> StatsSnapshot:
        assert seconds == 9.0
        self._engines.settled += 1
        return StatsSnapshot(time.time())

    def reset_prefix_cache(self) -> None:
        pass


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()
    monkeypatch.setattr(warming, "EngineProcess", made.start)
    monkeypatch.setattr(warming, "MIRROR_SECONDS", 0.0)
    return made


def ids(number: int, length: int = 40) -> tuple[int, ...]:
    return tuple((number + place) % 100 for place in range(length))


def placed(*prompts: AnyPrompt) -> list[PlacedPrompt]:
    return [PlacedPrompt(Origin("p.jsonl", line), one) for line, one in enumerate(prompts, 1)]


def warmed(
    folder: Path, prompts: Sequence[PlacedPrompt], *, batch: int = 2, sample: int = 2
) -> Warmed:
    with Progress() as progress:
        return Warming(
            folder,
            {"model": "m"},
            prompts,
            tuple(TYPES),
            batch=batch,
            sample=sample,
            seconds=9.0,
            progress=progress,
        ).run()


def test_prompts_are_stored_in_batches_and_a_sample_comes_back(
    engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = placed(*(TokenIds(ids(number)) for number in range(5)), "x" * 50, "short")
    done = warmed(tmp_path, prompts)
    stored, sample = engines.batches[:3], engines.batches[3:]
    assert [[len(prompt.token_ids) for prompt in batch] for batch in stored] == [
        [40, 40],
        [40, 40],
        [40, 50],
    ]
    assert all(prompt.tiers == () for batch in stored for prompt in batch)
    assert [(len(p.token_ids), p.tiers) for [p] in sample] == [
        (40, ("ssd",)),
        (40, ("pins",)),
        (50, ("ssd",)),
        (50, ("pins",)),
    ]
    assert engines.started == 2
    assert engines.settled >= 3  # after each batch
    assert (done.prompts, done.prompt_tokens, done.tokens, done.short) == (7, 255, 208, 1)
    assert (done.present_tokens, done.computed_tokens) == (0, 250)
    assert (done.complete, done.hit, done.done_prompts) == (True, True, 7)
    assert done.namespace == b"namespace"
    assert len(done.keys) == len(set(done.keys)) > 0
    assert [(s.expected_tokens, s.loaded_tokens) for s in done.sampled] == [(32, 32)] * 2 + [
        (48, 48)
    ] * 2
    said = capsys.readouterr().err
    assert "0 tokens are there already, about 250 of 6 prompts are to be computed" in said
    assert "7 of 7 prompts stored, 250 of 250 tokens computed" in said
    assert complaints(done, TYPES) == [
        "not kept, since they are shorter than a block: 1 of the prompts"
    ]
    kept = {"pins": Kept(9, 9, 20, Keeping(60.0, 0.5))}
    report = report_as_json(done, TYPES, ["p.jsonl"], 1.0, kept)
    assert report["tiers"]["pins"]["held_tokens"] == 208
    assert report["tiers"]["pins"]["kept_blocks"] == 9


def test_what_is_there_is_not_computed_again(
    engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = placed(*(TokenIds(ids(number)) for number in range(6)))
    warmed(tmp_path, prompts[:4])
    engines.batches.clear()
    done = warmed(tmp_path, prompts, sample=0)
    assert [[p.token_ids for p in batch] for batch in engines.batches] == [[ids(4), ids(5)]]
    assert (done.present_tokens, done.computed_tokens, done.tokens) == (128, 80, 192)
    assert (done.complete, done.hit, done.sampled) == (True, True, [])
    assert "128 tokens are there already" in capsys.readouterr().err

    engines.started = 0
    engines.batches.clear()
    done = warmed(tmp_path, prompts, sample=1)
    assert engines.started == 1  # it has not stored what it loads back either
    assert [[p.tiers for p in batch] for batch in engines.batches] == [[("ssd",)], [("pins",)]]
    assert (done.present_tokens, done.computed_tokens) == (192, 0)
    assert "nothing is to be computed" in capsys.readouterr().err


def test_what_one_tier_lacks_is_loaded_as_far_as_it_goes(engines: Engines, tmp_path: Path) -> None:
    engines.held["ssd"][ids(1)] = 32
    engines.held["pins"][ids(1)] = 16
    engines.held["ssd"][ids(2)] = 32
    done = warmed(tmp_path, placed(TokenIds(ids(1)), TokenIds(ids(2))), sample=0)
    [[first, second]] = engines.batches
    assert (first.tiers, second.tiers) == (("pins",), ())
    assert done.present_tokens == 16
    assert done.computed_tokens == (40 - 16) + 40
    assert done.complete


def test_a_prompt_named_twice_is_computed_once(engines: Engines, tmp_path: Path) -> None:
    done = warmed(tmp_path, placed(*[TokenIds(ids(1))] * 3), batch=1, sample=0)
    assert [len(batch) for batch in engines.batches] == [1]
    assert (done.computed_tokens, done.done_prompts) == (40, 3)


def test_what_was_dropped_is_stored_once_more(
    engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines.drops["pins"] = 2
    done = warmed(tmp_path, placed(*(TokenIds(ids(number)) for number in range(4))), sample=0)
    assert [len(batch) for batch in engines.batches] == [2, 2, 2]
    assert (done.complete, done.lacking) == (True, {"ssd": 0, "pins": 0})
    said = capsys.readouterr().err
    assert "2 prompts lack blocks: once more" in said
    assert "4 of 4 prompts stored, 240 of 240 tokens computed" in said


def test_what_a_tier_does_not_take_is_told(engines: Engines, tmp_path: Path) -> None:
    engines.drops["pins"] = 1000
    prompts = placed(*(TokenIds(ids(number)) for number in range(4)))
    done = warmed(tmp_path, prompts, sample=1)
    assert (done.complete, done.lacking) == (False, {"ssd": 0, "pins": 128})
    assert not done.hit
    lacks, sample = complaints(done, TYPES)
    assert lacks.startswith("tier pins lacks 128 of 128 tokens (no reason was counted); the same ")
    assert sample == "p.jsonl:4: 0 of 0 tokens came back from tier pins"
    assert len(engines.batches) == 2 + 2 + 2  # a second pass that stores nothing is the last


def test_an_interruption_tells_how_far_it_came(engines: Engines, tmp_path: Path) -> None:
    engines.interrupt_at = 1
    prompts = placed(*(TokenIds(ids(number)) for number in range(6)))
    with Progress() as progress:
        run = Warming(
            tmp_path,
            {"model": "m"},
            prompts,
            tuple(TYPES),
            batch=2,
            sample=1,
            seconds=9.0,
            progress=progress,
        )
        with pytest.raises(KeyboardInterrupt):
            run.run()
    assert (run.result.done_prompts, run.result.computed_tokens) == (2, 80)


def test_prompts_that_do_not_fit_are_named_before_anything_is_stored(
    engines: Engines, tmp_path: Path
) -> None:
    prompts = placed(TokenIds(ids(1, 200)), TokenIds((7, 100)), TokenIds(ids(2)))
    with pytest.raises(ConfigError) as caught:
        warmed(tmp_path, prompts)
    first, second = str(caught.value).splitlines()
    assert first.startswith("p.jsonl:1: 200 tokens, but this engine takes 200 with the answer; cut")
    assert second == "p.jsonl:2: token 100, but the model knows 100 tokens"
    assert engines.batches == []


def test_only_short_prompts(engines: Engines, tmp_path: Path) -> None:
    done = warmed(tmp_path, placed(TokenIds((1, 2))))
    assert (done.complete, engines.batches) == (False, [])
    assert complaints(done, TYPES) == [
        "no prompt is as long as a block, so nothing could be stored"
    ]


def test_durations() -> None:
    assert [duration_text(s) for s in (0.4, 59.6, 75, 3599, 3700, 90_000)] == [
        "0 s",
        "1 min 0 s",
        "1 min 15 s",
        "59 min 59 s",
        "1 h 1 min",
        "25 h 0 min",
    ]
