"""`tiered-kv warm` on a real vLLM: what it stores is found by an engine that is started later."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.engine.actions import EngineRun
from tests.engine.commands import COMMAND, Result, run_command
from tests.engine.lives import LONG_AND_SHORT, WARM_ENGINE, Lives, write_prompts
from tests.engine.processes import environment
from tests.engine.tiers import cached, cpu, deployment, loaded_bytes, nvme

CACHED = [*LONG_AND_SHORT, 0]


def prompt_file(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    write_prompts(file)
    return file


def test_warmed_prompts_come_back_in_later_engines(warmed: Result, in_process: EngineRun) -> None:
    assert warmed.status == 0, warmed.stderr
    report = json.loads(warmed.stdout)
    print("stored:", {name: tier["stored"] for name, tier in report["tiers"].items()})
    print("sample:", report["sample"])
    assert (report["hit"], report["complete"]) == (True, True)
    assert (report["prompts"], report["short_prompts"]) == (4, 1)
    assert report["present_tokens"] == 0
    short = report["prompt_tokens"] - report["computed_tokens"]
    assert 0 < short < 32, "of which no tier keeps a block"
    assert set(report["tiers"]) == {"ssd", "pins"}  # the host tier ends with its engine
    blocks = sum(CACHED) / 32
    for tier in report["tiers"].values():
        assert tier["stored"]["blocks"] == report["block_tokens"] / 32
        assert tier["stored"]["blocks"] > blocks  # and those of the conversation
        assert tier["failures"] == tier["stored"]["failures"] == tier["lacking_tokens"] == 0
        # The sample was loaded by an engine that found nothing in host memory.
        assert tier["blocks"] > blocks
    named = [
        (s["line"], s["tier"], s["expected_tokens"], s["loaded_tokens"]) for s in report["sample"]
    ]
    assert named[:4] == [
        (1, "ssd", 992, 992),
        (1, "pins", 992, 992),
        (2, "ssd", 672, 672),
        (2, "pins", 672, 672),
    ]
    assert "4 of 4 prompts stored" in warmed.stderr
    assert "shorter than a block: 1 of the prompts" in warmed.stderr

    assert cached(in_process.answers["warmed"]) == CACHED
    assert loaded_bytes(in_process.at["start"], in_process.at["warmed"], "pins") > 1_000_000


def test_a_dry_run_counts_the_tokens_that_the_engine_counted(
    warmed: Result, lives: Lives, tiny_model: Path, engine_cache: Path, tmp_path: Path
) -> None:
    done = run_command(
        *("warm", str(lives.store / "prompts.jsonl"), "--model", str(tiny_model), *WARM_ENGINE),
        *("--config", str(deployment(tmp_path, [cpu(), nvme(tmp_path)])), "--dry-run", "--json"),
        scratch=tmp_path,
        cache=engine_cache,
        multiprocess=False,
    )
    assert done.status == 0, done.stderr
    said, report = json.loads(done.stdout), json.loads(warmed.stdout)
    print({name: said[name] for name in ("prompts", "prompt_tokens", "block_tokens", "tiers")})
    for name in ("prompts", "prompt_tokens", "block_tokens"):
        assert said[name] == report[name]
    assert said["tiers"]["ssd"]["bytes"] == report["tiers"]["ssd"]["stored"]["bytes"]


def test_mistakes_are_told_before_anything_is_stored(
    tiny_model: Path, engine_cache: Path, tmp_path: Path
) -> None:
    config = deployment(tmp_path, [cpu(), nvme(tmp_path)])
    host_only = deployment(tmp_path, [cpu()])
    good = prompt_file(tmp_path)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "good"}\n{"promt": "bad"}\n')

    def warm(file: Path, deployed: Path, *more: str) -> tuple[int, str]:
        done = run_command(
            *("warm", str(file), "--config", str(deployed), "--model", str(tiny_model)),
            *(*WARM_ENGINE, *more),
            scratch=tmp_path,
            cache=engine_cache,
            multiprocess=False,
        )
        assert done.stdout == ""
        return done.status, done.stderr

    status, message = warm(bad, config)
    assert (status, f"{bad}:2: unknown key 'promt'" in message) == (2, True)
    status, message = warm(good, host_only)
    assert (status, "no tier that outlives its process" in message) == (2, True)
    status, message = warm(good, config, "--engine-args", "[]")
    assert (status, "is not a JSON object" in message) == (2, True)
    assert not (tmp_path / "ssd").exists()

    status, message = warm(good, config, "--max-model-len", "800")
    assert (status, f"{good}:1: 1000 tokens, but this engine takes 800" in message) == (2, True)
    assert f"{good}:2:" not in message


def test_prompts_too_short_to_store_are_a_failure(
    tiny_model: Path, engine_cache: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Hi.\n")
    config = deployment(tmp_path, [cpu(), nvme(tmp_path)])
    done = run_command(
        *("warm", str(file), "--config", str(config), "--model", str(tiny_model), *WARM_ENGINE),
        *("--json",),
        scratch=tmp_path,
        cache=engine_cache,
        multiprocess=False,
    )
    assert done.status == 1, done.stderr
    assert json.loads(done.stdout)["complete"] is False
    assert "no prompt is as long as a block" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_engine_does_not_outlive_its_parent(
    tiny_model: Path, engine_cache: Path, tmp_path: Path, number: signal.Signals
) -> None:
    config = deployment(tmp_path, [cpu(), nvme(tmp_path)])
    arguments = ("warm", str(prompt_file(tmp_path)), "--config", str(config))
    said = tmp_path / "said.txt"
    with (
        said.open("wb") as stderr,
        subprocess.Popen(
            [*COMMAND, *arguments, "--model", str(tiny_model), *WARM_ENGINE],
            cwd=tmp_path,
            env=environment(engine_cache, multiprocess=False) | {"TMPDIR": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        ) as command,
    ):
        deadline = time.monotonic() + 60
        while not (engines := children(command.pid)):
            assert time.monotonic() < deadline, "no engine was started"
            assert command.poll() is None
            time.sleep(0.05)
        command.send_signal(number)
        assert command.wait(60) != 0
    print("ended with", command.returncode, "engines", engines)
    if number is signal.SIGKILL:  # then the engine sees the end of its input by itself
        while any(map(runs, engines)):
            assert time.monotonic() < deadline + 120, "the engine outlived its parent"
            time.sleep(0.1)
    else:
        assert not list(tmp_path.glob("tiered-kv-warm-*"))
        assert "interrupted: 0 of 4 prompts are stored" in said.read_text()
    assert not [pid for pid in engines if runs(pid)]


def children(pid: int) -> list[int]:
    """Ids of the processes that a process has started."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []


def runs(pid: int) -> bool:
    """Whether a process is there and not only waits to be reaped."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
