from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tiered_kv.cli.app import app
from tiered_kv.cli.demo import findings_as_json, print_findings
from tiered_kv.cli.demonstration import (
    QUESTIONS,
    Findings,
    LoadedRun,
    Reference,
    long_prompts,
    prompts,
)
from tiered_kv.cli.progress import Progress
from tiered_kv.errors import TieredKVError
from tiered_kv.specs import HopResult
from tiered_kv.stats import StatsRecorder
from tiered_kv.values import BlockStatus
from tiered_kv.vllm.engine_process import Messages

TIERS = {"host": "cpu", "ssd": "nvme", "pins": "lmdb"}
REFERENCE = Reference(
    answers=(((1, 2), (3, 4)),),
    cached=((0, 128),),
    prefix_cache_seconds=(0.1,),
    computed_seconds=(8.0, 9.0, 7.0),
)


def loaded(process: int, way: str, seconds: float, **by_tier: int) -> LoadedRun:
    return LoadedRun(
        process=process,
        prompt=0,
        way=way,
        first_token_seconds=seconds,
        cached_tokens=128,
        reference_cached_tokens=128,
        loaded=dict.fromkeys(TIERS, 0) | by_tier,
        compared_tokens=2,
        equal=True,
    )


GOOD = (
    loaded(1, "host", 0.5, host=10),
    loaded(2, "after_restart", 0.7, ssd=10),
    loaded(2, "after_restart", 0.9, ssd=10),
    loaded(2, "ssd", 0.6, ssd=10),
    loaded(2, "pins", 0.4, pins=10),
)


def findings(*runs: LoadedRun) -> Findings:
    stats = StatsRecorder("test").snapshot()
    return Findings(TIERS, (6000,), REFERENCE, runs, (stats, stats))


def test_everything_was_shown() -> None:
    found = findings(*GOOD)
    assert found.outputs_equal
    assert found.shortcomings() == []
    assert found.ttft_seconds() == {
        "recompute": 8.0,
        "host": 0.5,
        "ssd": 0.6,
        "pins": 0.4,
        "after_restart": 0.8,
    }


def test_what_was_not_shown_is_said() -> None:
    differs = findings(replace(GOOD[0], equal=False), *GOOD[1:])
    assert not differs.outputs_equal
    assert ["process 1, prompt 1, host" in line for line in differs.shortcomings()] == [True]

    mixed = findings(*GOOD[:4], loaded(2, "pins", 0.4, pins=5, ssd=5))
    assert [line for line in mixed.shortcomings() if "'pins' supplied no request alone" in line]

    # What only the first process had is no proof of a restart.
    too_early = findings(*GOOD[:3], loaded(1, "ssd", 0.6, ssd=10), GOOD[4])
    assert [line for line in too_early.shortcomings() if "'ssd'" in line]

    nothing = findings()
    assert not nothing.outputs_equal
    assert len(nothing.shortcomings()) == 4


def test_json_has_what_is_promised() -> None:
    value = json.loads(json.dumps(findings_as_json(findings(*GOOD), 12.5)))
    assert value["outputs_equal"] is True
    assert value["ttft_seconds"].keys() == {"recompute", *TIERS, "after_restart"}
    assert value["tiers"].keys() == TIERS.keys()
    for tier in value["tiers"].values():
        assert {"blocks", "bytes", "seconds", "failures"} <= tier.keys()
    assert value["hops"] == {}
    assert len(value["runs"]) == len(GOOD)


def test_the_table_shows_ways_tiers_and_hops(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = StatsRecorder("test")
    recorder.hop("gpu", "cpu", "cpu", HopResult((BlockStatus.OK,) * 7, 700), 0.5)
    stats = recorder.snapshot()
    print_findings(Findings(TIERS, (6000, 6100), REFERENCE, GOOD, (stats, stats)), 12.0)
    out = capsys.readouterr().out
    cells = {
        row[0]: row[1:]
        for line in out.splitlines()
        if (row := [cell.strip() for cell in line.strip("│").split("│")]) and len(row) == 6
    }
    assert cells["computed by vLLM"][:2] == ["8.000 s", "1.0"]
    assert cells["pins"] == ["0.400 s", "20.0", "0", "0B", "0"]
    assert cells["after the restart, nearest tier"][:2] == ["0.800 s", "10.0"]
    assert cells["limit: never left the engine"][:2] == ["0.100 s", "80.0"]
    assert cells["hop gpu->cpu"] == ["", "", "14", "1.367KiB", "0"]
    assert "equal to those from vLLM's own prefix cache: yes (5 requests" in out


def test_prompts_share_a_document_and_end_in_different_questions() -> None:
    texts = [str(message["content"]) for [message] in prompts(2000)]
    assert len(texts) == len(set(texts)) == len(QUESTIONS) == 6
    assert {text[:2000] for text in texts} == {texts[0][:2000]}
    assert len({text[2000:2100] for text in texts}) == 6
    assert [text.endswith(q) for text, (_, q) in zip(texts, QUESTIONS, strict=True)] == [True] * 6


def test_the_document_grows_until_every_prompt_is_long_enough() -> None:
    lengths: list[int] = []

    def encode(asked: Sequence[Messages]) -> list[tuple[int, ...]]:
        tokens = [len(str(message["content"])) // 5 for [message] in asked]
        lengths.append(min(tokens))
        return [(0,) * count for count in tokens]

    assert min(map(len, long_prompts(encode))) >= 6000
    assert len(lengths) > 1
    assert lengths[-2] < 6000


def test_prompts_that_cannot_fit_are_refused() -> None:
    def encode(asked: Sequence[Messages]) -> list[tuple[int, ...]]:
        return [(0,) * len(str(message["content"])) for [message] in asked]

    with pytest.raises(TieredKVError, match="expected at least 6000"):
        long_prompts(encode)


def test_keep_wants_an_empty_directory(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    (tmp_path / "something").touch()
    result = CliRunner().invoke(app, ["demo", "--keep", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not empty" in result.output


def test_without_vllm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiered_kv.errors import UnsupportedError
    from tiered_kv.vllm import engine_process

    monkeypatch.setattr(engine_process, "find_spec", lambda _: None)
    result = CliRunner().invoke(app, ["demo", "--json"])
    assert isinstance(result.exception, UnsupportedError)  # `main` makes it exit code 2
    assert 'pip install "tiered-kv[vllm]"' in str(result.exception)
    assert result.stdout == ""


def test_progress_is_plain_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress(2) as progress:
        progress.stage("starting [1]")
        progress.step("first")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split("] ", 1)[1] for line in captured.err.splitlines()] == [
        "starting [1]",
        "  first",
    ]
