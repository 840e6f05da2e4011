"""What the README promises: its commands are those that run here, its YAML loads."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.docs.pages import SOURCE
from tiered_kv.cli.vllm_args import vllm_args
from tiered_kv.config import load
from tiered_kv.plugins import Plugins

README = (SOURCE / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_first_command_sets_up_and_the_second_runs_all_tests() -> None:
    setup, tests = blocks("bash")
    lines = setup.splitlines()
    assert lines[0] == "python3 -m venv .venv"
    assert lines[-1] == ".venv/bin/tiered-kv demo"
    named = re.findall(r"-r (\S+)", setup)
    assert named
    assert all((SOURCE / name).is_file() for name in named)
    assert tests == "bash tests/run\n"
    assert os.access(SOURCE / "tests" / "run", os.X_OK)


def test_continuous_integration_runs_exactly_the_second() -> None:
    [tests] = blocks("bash")[1:]
    assert f"exec {tests.strip()} " in (SOURCE / ".ci" / "run").read_text(encoding="utf-8")


def test_the_deployment_loads(tmp_path: Path) -> None:
    [deployment] = blocks("yaml")
    file = tmp_path / "deployment.yaml"
    file.write_text(deployment)
    assert [tier.name for tier in load(file, Plugins()).tiers] == ["host", "ssd"]


def test_the_flags_for_vllm_are_those_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [line] = blocks("sh")
    assert line.strip() == 'eval vllm serve MODEL "$(tiered-kv vllm-args deployment.yaml)"'
    file = tmp_path / "deployment.yaml"
    file.write_text(blocks("yaml")[0])
    vllm_args(file)
    assert "--kv-transfer-config '{" in capsys.readouterr().out


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (SOURCE / link).exists()] == []


def test_what_is_said_of_the_gpu_is_said_plainly() -> None:
    assert "Not yet run on a GPU" in README
