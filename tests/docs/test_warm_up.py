"""The page about warming up is executed: its commands, those in its cron lines and in its pod."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import fenced
from tests.docs.test_docs import run, store_example
from tiered_kv.config import load
from tiered_kv.plugins import Plugins

PAGE = "warm-up.md"
CONFIG_JSON = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "torch_dtype": "bfloat16",
}


def deployments() -> list[str]:
    return [block for block in fenced(PAGE, "yaml") if "apiVersion" not in block]


def pod() -> Any:
    [block] = [block for block in fenced(PAGE, "yaml") if "apiVersion" in block]
    return yaml.safe_load(block)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the page's deployment, another host's, a model's configuration, prompts, and
    blocks in the tier `ssd`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HERE", str(tmp_path / "here"))
    own, *_ = deployments()
    (tmp_path / "deployment.yaml").write_text(own)
    (tmp_path / "other.yaml").write_text(own.replace("$HERE", str(tmp_path / "there")))
    (tmp_path / "MODEL").mkdir()
    (tmp_path / "MODEL" / "config.json").write_text(json.dumps(CONFIG_JSON))
    (tmp_path / "prompts").mkdir()
    for file in (tmp_path / "prompts.jsonl", tmp_path / "prompts" / "more.jsonl"):
        file.write_text(json.dumps({"token_ids": list(range(600))}) + "\n")
    store_example(tmp_path / "deployment.yaml")
    return tmp_path


def here(text: str, place: Path) -> str:
    """A command of another machine, with the directories of this one."""
    for theirs, ours in (
        ("/etc/kv", place),
        ("/srv/prompts", place / "prompts"),
        ("/mnt/peer/kv", place / "here" / "ssd"),
        ("/warmed/kv", place / "here" / "ssd"),
    ):
        text = text.replace(theirs, str(ours))
    return text


def other_host(place: Path) -> None:
    """From now on `deployment.yaml` is that of a host whose tiers are empty."""
    (place / "other.yaml").rename(place / "deployment.yaml")


def blocks(config: Path, capsys: pytest.CaptureFixture[str]) -> int:
    capsys.readouterr()
    assert run("stat", str(config), "--tier", "ssd", "--json") == 0
    found = json.loads(capsys.readouterr().out)["tiers"][0]["blocks"]
    assert isinstance(found, int)
    return found


def test_yaml(tmp_path: Path) -> None:
    found = deployments()
    assert len(found) == 2
    for block in found:
        file = tmp_path / "d.yaml"
        file.write_text(block)
        load(file, Plugins(), {"HERE": "/home/op"})


def test_commands_do_what_the_page_says(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [line for block in fenced(PAGE, "bash") for line in block.splitlines()]
    ran: list[str] = []
    for line in commands:
        program, *arguments = shlex.split(line)
        assert program == "tiered-kv"
        assert run(*arguments) == 0, capsys.readouterr().err
        ran.append(arguments[0])
        if arguments[0] == "import":
            assert blocks(place / "other.yaml", capsys) == 5
            assert run("gc", "other.yaml", "--unused", "--yes") == 0
            assert blocks(place / "other.yaml", capsys) == 0
    assert ran == ["warm", "ls", "export", "import", "warm"]
    assert blocks(place / "other.yaml", capsys) == 5


def test_what_needs_an_engine_is_counted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine's tests run it; here its dry run."""
    (place / "docs").mkdir()
    (place / "docs" / "a.jsonl").write_text(json.dumps({"token_ids": list(range(256))}))
    [block] = fenced(PAGE, "sh")
    program, *arguments = shlex.split(block)
    assert (program, arguments[0]) == ("tiered-kv", "warm")
    assert run(*arguments, "--dry-run", "--json") == 0, capsys.readouterr().err
    said = json.loads(capsys.readouterr().out)
    assert (said["prompts"], said["prompt_tokens"]) == (2, 856)
    # 2 layers x K and V x 2 heads of 32 values x 2 bytes, in whole blocks of 256 tokens.
    assert said["bytes_per_token"] == 512
    assert said["tiers"]["ssd"]["bytes"] == 3 * 256 * 512
    assert said["tiers"]["ssd"]["bytes_per_second"] > 0


def test_cron_lines(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, store = [line for block in fenced(PAGE, "cron") for line in block.splitlines()]
    found: list[list[str]] = []
    for line in (prompts, store):
        *when, user, command = line.split(maxsplit=6)
        assert all(re.fullmatch(r"\*|\d+", field) for field in when)
        assert (len(when), user) == (5, "kv")
        flock, option, lock, program, *arguments = shlex.split(here(command, place).split(">")[0])
        assert (flock, option, program) == ("flock", "-n", "tiered-kv")
        assert lock.startswith("/run/lock/")
        found.append(arguments)
    assert run(*found[0], "--dry-run") == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 600
    other_host(place)
    assert blocks(place / "deployment.yaml", capsys) == 0
    assert run(*found[1]) == 0, capsys.readouterr().err
    assert blocks(place / "deployment.yaml", capsys) == 5


def test_the_pod(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = pod()["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    [first], [serving] = spec["initContainers"], spec["containers"]
    for container in (first, serving):
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted.keys() <= volumes
        paths = re.findall(r"(/[a-z]+)/", " ".join(container["command"]))
        assert set(paths) <= {"/etc", *mounted.values()}
        assert "/etc/kv" in mounted.values()

    shell, option, command = serving["command"]
    assert (shell, option) == ("sh", "-c")
    inner = re.search(r"\$\((tiered-kv vllm-args [^)]*)\)", command)
    assert inner is not None
    assert run(*shlex.split(here(inner[1], place))[1:]) == 0
    assert "--kv-transfer-config" in capsys.readouterr().out

    other_host(place)
    program, *arguments = [here(argument, place) for argument in first["command"]]
    assert program == "tiered-kv"
    for expected in ("5 of 5 blocks", "0 of 5 blocks"):  # the second pod finds them
        assert run(*arguments) == 0, capsys.readouterr().err
        assert f"tier ssd: {expected}" in capsys.readouterr().out
    assert blocks(place / "deployment.yaml", capsys) == 5
