"""The documentation is executed: its YAML loaded, its commands run, its plug-in used."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import SOURCE, fenced, page, tables
from tiered_kv import config
from tiered_kv.cli import main
from tiered_kv.cli.selftest import SelfTest
from tiered_kv.config import load, schema, shipped, shipped_names
from tiered_kv.connector import LiveView
from tiered_kv.connector.assembly import Assembly
from tiered_kv.connector.live import Answering
from tiered_kv.plugins import GROUP, Plugins
from tiered_kv.stats import StatsRecorder
from tiered_kv.testing.conformance.blocks import BLOCK_BYTES, put
from tiered_kv.testing.conformance.runs import run_instance
from tiered_kv.values import CacheGeometry, Fingerprint, GroupGeometry

SMALL = """\
tiers:
  - {name: host, type: cpu, capacity: 32MiB}
  - {name: ssd, type: nvme, path: $HERE/ssd, capacity: 256MiB, min_free: 0%}
"""


def run(*arguments: str) -> int:
    """Run the command line in this process; its exit code."""
    before, sys.argv = sys.argv, ["tiered-kv", *arguments]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_deployments(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is loaded as it is, then checked with its directories and budgets made small."""
    monkeypatch.setenv("TIERED_KV_DEMO_DIR", str(tmp_path))
    deployment = load(shipped(name), Plugins())
    for place, tier in enumerate(deployment.tiers):
        key = f"TIERED_KV__TIERS__{place}__"
        monkeypatch.setenv(f"{key}CAPACITY", "64MiB")
        if tier.directories:
            where = {"PATH": str(tmp_path / tier.name)}
            if "path" not in tier.directories:
                folders = [str(tmp_path / f"{tier.name}-{n}") for n in range(len(tier.directories))]
                where = {"PATHS": json.dumps(folders)}
            for option, value in {**where, "MIN_FREE": "0%"}.items():
                monkeypatch.setenv(f"{key}{option}", value)
    assert run("check", str(shipped(name)), "--json") == 0
    checked = json.loads(capsys.readouterr().out)
    tested = [c["tiers"][0] for c in checked["checks"] if c["check"] == "self-test"]
    assert tested == [tier.name for tier in deployment.tiers]
    assert all(entry["ok"] for entry in checked["checks"])


def test_the_shipped_deployments() -> None:
    assert shipped_names() == ("cpu-only", "demo", "lmdb", "nvme", "striped")


def test_yaml_in_the_configuration_page(tmp_path: Path) -> None:
    blocks = fenced("configuration.md", "yaml")
    assert blocks
    for block in blocks:
        file = tmp_path / "d.yaml"
        file.write_text(block)
        load(file, Plugins(), {"HOME": "/home/op"})


def test_the_configuration_page_describes_every_setting() -> None:
    expected = tables(schema(Plugins()))
    assert expected.count("\n| `") > 40
    assert page("configuration.md").endswith(expected), (
        "run `python -m tests.docs.pages` to write the tables anew"
    )


def test_commands_in_the_command_line_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HERE", str(tmp_path))
    (tmp_path / "deployment.yaml").write_text(SMALL)
    commands = [line for block in fenced("cli.md", "bash") for line in block.splitlines()]
    assert {shlex.split(line)[1] for line in commands} == {
        "backends",
        "bench",
        "check",
        "explain",
        "export",
        "gc",
        "import",
        "ls",
        "plan",
        "schema",
        "stat",
        "top",
        "verify",
        "vllm-args",
        "warm",
    }
    (tmp_path / "other.yaml").write_text(SMALL.replace("/ssd", "/other"))
    view = LiveView("manager", "", os.getpid(), {}, {}, StatsRecorder("manager").snapshot())
    answering = Answering("manager", lambda: view)  # for `top`
    write_trace(tmp_path)
    for line in commands:
        store_example(tmp_path / "deployment.yaml")
        program, *arguments = shlex.split(line)
        assert program == "tiered-kv"
        assert run(*arguments) == 0, capsys.readouterr().err
        assert capsys.readouterr().out
    answering.close()


def write_trace(folder: Path) -> None:
    """A trace and a model for `plan`."""
    requests = [
        {
            "timestamp": 1000 * number,
            "input_length": 1024 * (number % 3 + 1),
            "output_length": 10,
            "hash_ids": [100 * (number % 7) + place for place in range(2 * (number % 3 + 1))],
        }
        for number in range(60)
    ]
    (folder / "trace.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in requests))
    (folder / "models" / "llama").mkdir(parents=True)
    shape = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    values = {**shape, "hidden_size": 8192, "dtype": "bfloat16"}
    (folder / "models" / "llama" / "config.json").write_text(json.dumps(values))


EXAMPLE = Fingerprint.of({"architectures": "LlamaForCausalLM", "name": "docs"})
"""Its namespace's id begins with 5fbc, as the page has it."""


def store_example(deployment: Path) -> None:
    """Store blocks in the tier `ssd`."""
    assembly = Assembly(load(deployment, Plugins()), Plugins().deployed(["nvme"]))
    for rank in range(2):
        geometry = CacheGeometry((GroupGeometry(0, BLOCK_BYTES, 1, 16),), rank, 2)
        store = assembly.open_store("ssd", geometry, EXAMPLE, writable=True)
        put(store, range(5), rank)
        store.close()


def test_the_commands_of_the_command_line_page_did_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the page says of the blocks: they go into the file, are dropped, and come back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HERE", str(tmp_path))
    (tmp_path / "deployment.yaml").write_text(SMALL)
    store_example(tmp_path / "deployment.yaml")
    blocks: list[int] = []
    order = [
        "export deployment.yaml warm.archive --tier ssd --namespace 5fbc",
        "gc deployment.yaml --unused --yes",
        "import deployment.yaml warm.archive --tier ssd --expect 5fbc",
    ]
    for line in order:
        assert f"\ntiered-kv {line}\n" in page("cli.md")
        assert run(*shlex.split(line)) == 0
        capsys.readouterr()
        assert run("stat", "deployment.yaml", "--json") == 0
        blocks.append(json.loads(capsys.readouterr().out)["tiers"][0]["blocks"])
    assert blocks == [5, 0, 5]


def test_commands_that_need_an_engine_are_in_the_command_line_page_as_they_are() -> None:
    """They are run by the tests of the engine; here their options are held against the page."""
    for block in fenced("cli.md", "sh"):
        _, command, *arguments = shlex.split(block)
        assert run(command, "--help") == 0
        assert (command, arguments[:2]) in [
            ("warm", ["prompts.txt", "--config"]),
            ("demo", []),
        ]


def test_every_command_is_in_the_command_line_page(capsys: pytest.CaptureFixture[str]) -> None:
    run("--help")
    listed = capsys.readouterr().out.partition("Commands:")[2].split("\n  ")
    commands = {line.split()[0] for line in listed if line and not line.startswith(" ")} - {""}
    text = page("cli.md")
    assert commands
    assert {name for name in commands if f"\n## {name}\n" not in text} == set()


def test_the_plugin_in_its_page_stores_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, *_ = fenced("plugins.md", "python")
    (tmp_path / "shelf_tier.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    shelf = EntryPoint("shelf", "shelf_tier:backend", GROUP)
    plugins = Plugins(lambda: [*entry_points(group=GROUP), shelf])
    (text,) = fenced("plugins.md", "yaml")
    file = tmp_path / "d.yaml"
    file.write_text(text.replace("/tmp/shelf", str(tmp_path / "shelf")))
    deployment = load(file, plugins, {})
    assembly = Assembly(deployment, plugins.deployed(["shelf"]))
    verdict = SelfTest(assembly, 3 * config.MIB, 30.0).run("shelf")
    assert verdict.ok, verdict.detail
    assert verdict.detail == "3145728 bytes stored, 3145728 loaded, compared and deleted"
    assert verdict.modes["io"] == "buffered"
    assert list((tmp_path / "shelf").rglob("*.*.*")) == []
    assert list((tmp_path / "shelf").glob("*/*.*")) == []


def test_the_plugin_in_its_page_can_be_looked_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, *_ = fenced("plugins.md", "python")
    (tmp_path / "shelf_tier.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shelf_tier", raising=False)
    entries = [*entry_points(group=GROUP), EntryPoint("shelf", "shelf_tier:backend", GROUP)]
    monkeypatch.setattr("tiered_kv.plugins._installed", lambda: entries)
    (text,) = fenced("plugins.md", "yaml")
    file = tmp_path / "d.yaml"
    file.write_text(text.replace("/tmp/shelf", str(tmp_path / "shelf")))
    assembly = Assembly(load(file, Plugins(), {}), Plugins().deployed(["shelf"]))
    stores = [
        assembly.open_store(
            "shelf",
            CacheGeometry((GroupGeometry(0, BLOCK_BYTES, 1, 16),), rank, 2),
            EXAMPLE,
            writable=True,
        )
        for rank in range(2)
    ]
    for rank, store in enumerate(stores):
        put(store, range(6), rank)

    def told(*arguments: str, status: int = 0) -> Any:
        assert run(*arguments, "--json") == status, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)["tiers"][0]

    [held] = told("ls", str(file))["namespaces"]
    assert (held["blocks"], held["ranks"], held["in_use"]) == (6, 2, True)
    part = next((tmp_path / "shelf").glob("*/*.1"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    assert told("verify", str(file), status=1)["left"] == {"corrupt blocks": 1}
    assert told("verify", str(file), "--repair")["left"] == {}
    assert told("gc", str(file), "--unused", "--yes")["dropped_blocks"] == {}
    for store in stores:
        store.close()
    dropped = told("gc", str(file), "--unused", "--yes")["dropped_blocks"]
    assert dropped == {held["namespace"]: 5}
    assert told("ls", str(file))["namespaces"] == []


@pytest.mark.timeout(400)  # the suites as a whole, in a child process
def test_the_plugin_in_its_page_keeps_the_contracts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("shelf_tier.py", "shelf_case.py", "test_shelf.py")
    for name, code in zip(names, fenced("plugins.md", "python"), strict=True):
        assert code.startswith(f'"""{name}: ')
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    run = run_instance(tmp_path / "test_shelf.py", tmp_path, plugins=["tests.light_children"])
    failed = [one for one in run.outcomes if one.outcome == "failed"]
    print(f"{run.passed} checks passed, {run.skipped} skipped")
    assert not failed, failed
    assert run.passed > 100
    skipped = {one.text.partition("=")[0] for one in run.outcomes if one.outcome == "skipped"}
    declared = {"keeps_log", "guards_fork"}
    assert skipped == {f"the case declares {name}" for name in declared}


def test_links_lead_to_files() -> None:
    links = 0
    for file in (SOURCE / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", file.read_text(encoding="utf-8")):
            assert (file.parent / target).exists(), f"{file.name}: {target}"
            links += 1
    assert links
