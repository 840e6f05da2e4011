from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Cli, Ran
from tiered_kv.config import GIB, MIB
from tiered_kv.contracts import Backend, HandlerContext, TransferHandler
from tiered_kv.plugins import build_registry
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import GpuSpec
from tiered_kv_nvme import NvmeSpec

GOOD = """\
tiers:
  - {{name: host, type: cpu, capacity: 32MiB}}
  - {{name: ssd, type: nvme, path: {0}/ssd, capacity: 256MiB, min_free: 0%}}
  - {{name: pins, type: lmdb, path: {0}/pins, capacity: 64MiB, min_free: 0%}}
"""


@pytest.fixture
def deployment(tmp_path: Path) -> Path:
    file = tmp_path / "deployment.yaml"
    file.write_text(GOOD.format(tmp_path))
    return file


def child(code: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=cwd
    )


# The program itself


def test_help_and_version(cli: Cli) -> None:
    helped = cli("--help")
    assert helped.code == 0
    for command in ("check", "explain", "backends", "vllm-args", "schema"):
        assert f"\n  {command}" in helped.out
        assert cli(command, "--help").code == 0
    assert cli("--version").out.startswith("tiered-kv ")


def test_starting_it_imports_nothing_heavy(tmp_path: Path) -> None:
    heavy = ("torch", "vllm", "numpy", "pydantic", "yaml", "lmdb", "kvikio")
    done = child(
        "import sys, tiered_kv.cli.app\n"
        f"print([name for name in {heavy!r} if name in sys.modules])",
        cwd=tmp_path,
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("check",),
        ("explain", "a", "b"),
        ("backends", "--nonsense"),
        ("explain", "a", "--block-size", "2"),
        ("explain", "a", "--block-size", "0B"),
        ("explain", "a", "--ranks", "0"),
        ("check", "a", "--timeout", "5m"),
    ],
)
def test_wrong_use_exits_2(cli: Cli, arguments: tuple[str, ...]) -> None:
    ran = cli(*arguments)
    assert ran.code == 2
    assert ran.err
    assert not ran.out


@pytest.mark.parametrize("command", ["check", "explain", "vllm-args"])
def test_a_bad_configuration_exits_2_with_file_line_and_key(
    cli: Cli, tmp_path: Path, command: str
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("tiers:\n  - {name: a, type: cpu, capacity: 32G}\n  - {name: b, type: nvm}\n")
    for arguments in ((command, file), (command, file, "--json")):
        ran = cli(*arguments)
        assert (ran.code, ran.out) == (2, "")
        first, second = ran.err.splitlines()
        assert first.startswith(f"{file}:2: tiers.0.capacity: '32G' is ambiguous")
        assert second.startswith(f"{file}:3: tiers.1.type: 'nvm' is no tier type; did you mean 'nv")
    assert cli(command, tmp_path / "none.yaml").code == 2
    assert list(tmp_path.iterdir()) == [file]


# backends, schema, vllm-args


def test_backends(cli: Cli) -> None:
    found = {line["name"]: line for line in cli("backends", "--json").json["backends"]}
    assert found["cpu"]["tier"]
    assert not found["gpu"]["tier"]
    for name in ("cpu", "gpu", "nvme", "lmdb"):
        assert found[name]["available"], found[name]
    ran = cli("backends")
    assert ran.code == 0
    assert "nvme" in ran.out


def test_schema(cli: Cli) -> None:
    plain, as_json = cli("schema"), cli("schema", "--json")
    assert plain == as_json
    assert {"CpuSettings", "NvmeSettings", "LmdbSettings"} <= set(plain.json["$defs"])


def test_vllm_args(
    cli: Cli, deployment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = cli("vllm-args", deployment.name)
    flags = shlex.split(ran.out)
    assert flags[::2] == ["--kv-transfer-config", "--prefix-caching-hash-algo"]
    assert flags[3] == "sha256_cbor"
    transfer = json.loads(flags[1])
    assert transfer["kv_connector"] == "TieredKVConnector"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"] == {"config": str(deployment)}
    assert cli("vllm-args", deployment, "--json").json == {
        "kv_transfer_config": transfer,
        "prefix_caching_hash_algo": "sha256_cbor",
    }


# explain


def test_explain(cli: Cli, deployment: Path, tmp_path: Path) -> None:
    told = cli("explain", deployment, "--json", "--ranks", "2").json
    assert [tier["name"] for tier in told["tiers"]] == ["host", "ssd", "pins"]
    assert [tier["total_bytes"] for tier in told["tiers"]] == [64 * MIB, 256 * MIB, 64 * MIB]
    assert told["total_bytes"] == 384 * MIB
    chains = {(route["from"], route["to"]): route["chain"]["label"] for route in told["routes"]}
    assert chains == {
        ("cpu", "gpu"): "cpu->gpu",
        ("ssd", "gpu"): "ssd->cpu->gpu",
        ("pins", "gpu"): "pins->cpu->gpu",
        ("gpu", "cpu"): "gpu->cpu",
        ("gpu", "ssd"): "gpu->cpu->ssd",
        ("gpu", "pins"): "gpu->cpu->pins",
    }
    for route in told["routes"]:
        assert route["chain"]["seconds_per_block"] > 0
        assert "assumed" in route["chain"]["reason"]
    assert told["warnings"] == []
    text = cli("explain", deployment)
    assert (text.code, text.err) == (0, "")
    assert "ssd->cpu->gpu" in text.out
    assert list(tmp_path.iterdir()) == [deployment]


@pytest.mark.parametrize(
    ("recompute", "loaded"),
    [
        ("", [None, None, None]),
        ("recompute: {gate: off}", [None, None, None]),
        ("recompute: {gate: fixed, tokens_per_second: 50000}", [True, False, False]),
        ("recompute: {gate: fixed, tokens_per_second: 5000}", [True, True, True]),
    ],
)
def test_explain_says_when_a_tier_is_worth_it(
    cli: Cli, deployment: Path, recompute: str, loaded: list[bool | None]
) -> None:
    deployment.write_text(f"{deployment.read_text()}\n{recompute}\n")
    told = cli("explain", deployment, "--block-size", "2MiB", "--block-tokens", "16", "--json").json
    gate = told["recompute"]
    assert [tier["name"] for tier in gate["tiers"]] == ["host", "ssd", "pins"]
    assert [tier["loaded"] for tier in gate["tiers"]] == loaded
    seconds = {
        route["from"]: route["chain"]["seconds_per_block"]
        for route in told["routes"]
        if route["to"] == "gpu"
    }
    even = {tier["name"]: tier["break_even_tokens_per_second"] for tier in gate["tiers"]}
    assert even == {
        name: pytest.approx(16 / seconds["cpu" if name == "host" else name]) for name in even
    }
    text = " ".join(cli("explain", deployment).out.split())
    assert f"Load or recompute: gate {gate['gate']}" in text
    assert f"{even['ssd']:.0f} tokens/s" in text
    assert ("recomputes" in text) is (False in loaded)


class DirectHop:
    """Registers hops between the engine's cache and nvme as a backend would."""

    def __init__(self, missing: str | None) -> None:
        self._missing = missing
        self.asked: list[object] = []

    def build_registry(self, backends: Mapping[str, Backend]) -> TransferRegistry:
        registry = build_registry(backends)
        for src, dst in ((NvmeSpec, GpuSpec), (GpuSpec, NvmeSpec)):
            registry.register(
                *(src, dst, self._make),
                provider="rdma",
                override=True,
                missing=self._what_is_missing,
            )
        return registry

    def _what_is_missing(self, settings: object) -> str | None:
        self.asked.append(settings)
        return self._missing

    def _make(self, context: HandlerContext) -> TransferHandler[Any, Any]:
        raise AssertionError("explain makes no handlers")


@pytest.mark.parametrize("missing", [None, "there is no driver"])
def test_explain_shows_both_chains(
    cli: Cli,
    deployment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing: str | None,
) -> None:
    hop = DirectHop(missing)
    monkeypatch.setattr("tiered_kv.plugins.build_registry", hop.build_registry)
    told = cli("explain", deployment, "--json")
    routes = {(route["from"], route["to"]): route for route in told.json["routes"]}
    for ends in (("ssd", "gpu"), ("gpu", "ssd")):
        route = routes[ends]
        [other] = route["rejected"]
        direct, staged = "->".join(ends), f"{ends[0]}->cpu->{ends[1]}"
        expected = (direct, staged) if missing is None else (staged, direct)
        assert (route["chain"]["label"], other["label"]) == expected
        assert all(hop["usable"] for hop in route["chain"]["hops"])
        assert all(hop["reason"] == "assumed" for hop in route["chain"]["hops"])
        assert all(hop["bytes_per_second"] > 0 for hop in other["hops"])
        if missing is None:
            assert other["why"].startswith("slower by ")
        else:
            assert other["why"] == f"{direct}: not in use here: there is no driver"
    assert routes["pins", "gpu"]["rejected"] == []
    assert [getattr(settings, "name", None) for settings in hop.asked] == ["ssd"] * 2
    text = " ".join(cli("explain", deployment).out.split())
    assert "ssd->gpu by rdma" in text
    assert "ssd->cpu by nvme: 5.00 GB/s and 100us per call, assumed" in text
    assert ("yes: cheapest that works" if missing is None else "not usable") in text
    assert list(tmp_path.iterdir()) == [deployment]


def test_explain_without_a_host_tier(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(f"tiers: [{{name: ssd, type: nvme, path: {tmp_path}/ssd, capacity: 1GiB}}]")
    routes = cli("explain", file, "--json").json["routes"]
    assert [(route["from"], route["to"]) for route in routes] == [("ssd", "gpu"), ("gpu", "ssd")]


def test_a_capacity_above_the_disk_is_a_warning_in_explain_and_an_error_in_check(
    cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(f"tiers: [{{name: ssd, type: nvme, path: {tmp_path}/ssd, capacity: 9000TiB}}]")
    warned = cli("explain", file)
    assert warned.code == 0
    assert "warning: tier 'ssd' may grow to" in warned.err
    refused = cli("check", file, "--json")
    assert refused.code == 1
    (finding,) = [check for check in refused.json["checks"] if not check["ok"]]
    assert finding["check"] == "space"
    room = os.statvfs(tmp_path)
    free = int(finding["detail"].partition(" has ")[2].split()[0])
    assert abs(free - room.f_bavail * room.f_frsize) < 4 * GIB
    assert list(tmp_path.iterdir()) == [file]


def test_tiers_that_share_a_disk_are_added_up(cli: Cli, tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    each = room.f_bavail * room.f_frsize * 2 // 3
    file = tmp_path / "d.yaml"
    file.write_text(
        f"tiers:\n  - {{name: a, type: nvme, path: {tmp_path}/a, capacity: {each}B}}\n"
        f"  - {{name: b, type: lmdb, path: {tmp_path}/b, capacity: {each}B}}\n"
    )
    (warning,) = cli("explain", file, "--json").json["warnings"]
    assert warning.startswith(f"tiers 'a' and 'b' may grow to {2 * each} bytes")


def test_a_host_pool_above_the_memory(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text("tiers: [{name: host, type: cpu, capacity: 900TiB}]")
    assert "but host memory has" in cli("explain", file).err
    assert cli("check", file).code == 1


@pytest.mark.parametrize("gone", ["vllm", "kvikio"])
def test_explain_and_backends_need_no_engine(tmp_path: Path, deployment: Path, gone: str) -> None:
    for command in (["backends"], ["explain", str(deployment)], ["--help"]):
        done = child(
            f"import sys; sys.modules[{gone!r}] = None; sys.argv = ['tiered-kv', *{command!r}]\n"
            "from tiered_kv.cli import main; main()",
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr


def test_a_missing_dependency_is_named_with_the_command_to_install_it(
    tmp_path: Path, deployment: Path
) -> None:
    """explain warns, check fails, backends tells: each without a traceback."""
    ran = {}
    for command in ("explain", "check", "backends"):
        arguments = [command] if command == "backends" else [command, str(deployment)]
        ran[command] = child(
            "import sys; sys.modules['aiofiles'] = None\n"
            f"sys.argv = ['tiered-kv', *{arguments!r}]\n"
            "from tiered_kv.cli import main; main()",
            cwd=tmp_path,
        )
    codes = {command: done.returncode for command, done in ran.items()}
    assert codes == {"explain": 0, "check": 1, "backends": 0}
    assert "tier 'ssd' cannot be used: backend 'nvme' needs aiofiles" in ran["explain"].stderr
    for done in ran.values():
        assert "pip install" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


# check


def findings(ran: Ran, check: str) -> dict[str, tuple[bool, str]]:
    return {
        ", ".join(entry["tiers"]): (entry["ok"], entry["detail"])
        for entry in ran.json["checks"]
        if entry["check"] == check
    }


def test_check_stores_reads_back_and_deletes_a_block_in_every_tier(
    cli: Cli, deployment: Path, tmp_path: Path
) -> None:
    for _ in range(2):  # the second finds what the first left
        ran = cli("check", deployment, "--json", "--block-size", "1000001B")
        assert ran.code == 0, ran.out
        tested = findings(ran, "self-test")
        assert set(tested) == {"host", "ssd", "pins"}
        for ok, detail in tested.values():
            assert ok
            assert detail.startswith("1000001 bytes stored, 1000001 loaded, compared")
        modes = ran.json["modes"]
        assert modes["ssd"]["io"] in ("direct", "buffered")
        assert modes["ssd"]["verify"] == modes["pins"]["verify"] == "always"
        assert {"copy", "checksum"} <= set(modes["host"])
        assert modes["host"]["memory"] == "pageable (no device asks for pinned memory)"
        assert modes["host"]["pages"].split()[0] in ("huge", "base")
        assert modes["host"]["prefault"].endswith("MiB")
        assert "writemap" in modes["pins"]
    for folder in (tmp_path / "ssd", tmp_path / "pins"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for file in folder.rglob("*"):
            assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file
    text = cli("check", deployment)
    assert text.code == 0
    assert "compared and deleted" in text.out
    assert "In effect" in text.out


def test_check_without_a_host_tier(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(f"tiers: [{{name: p, type: lmdb, path: {tmp_path}/p, capacity: 64MiB}}]")
    ran = cli("check", file, "--json")
    assert findings(ran, "self-test")["p"][0], ran.out


def test_check_of_a_tier_that_is_read_only(cli: Cli, deployment: Path, tmp_path: Path) -> None:
    assert cli("check", deployment).code == 0
    file = tmp_path / "reader.yaml"
    file.write_text(
        f"tiers: [{{name: pins, type: lmdb, path: {tmp_path}/pins, capacity: 64MiB, access: read}}]"
    )
    ran = cli("check", file, "--json")
    ok, detail = findings(ran, "self-test")["pins"]
    assert ok, detail
    assert "read only, so nothing was stored" in detail
    file.write_text(
        f"tiers: [{{name: pins, type: lmdb, path: {tmp_path}/nope, capacity: 64MiB, access: read}}]"
    )
    refused = cli("check", file, "--json")
    assert refused.code == 1
    assert "does not exist, and the tier is read only" in findings(refused, "directory")["pins"][1]


@pytest.mark.parametrize("kind", ["nvme", "lmdb"])
def test_directories_that_cannot_serve(cli: Cli, tmp_path: Path, kind: str) -> None:
    """One failed check with a reason per tier, exit code 1, and the host tier is still tested."""
    (tmp_path / "file").write_text("not a directory")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("do not touch")
    file = tmp_path / "d.yaml"
    for path in (tmp_path / "file", tmp_path / "file" / "kv", Path("/proc/kv"), foreign):
        file.write_text(
            "tiers:\n  - {name: host, type: cpu, capacity: 32MiB}\n"
            f"  - {{name: t, type: {kind}, path: {path}, capacity: 64MiB, min_free: 0%}}\n"
        )
        ran = cli("check", file, "--json")
        assert ran.code == 1
        failed = [check for check in ran.json["checks"] if not check["ok"]]
        assert {tuple(check["tiers"]) for check in failed} == {("t",)}, failed
        assert str(path.parent if path.name == "kv" else path) in failed[0]["detail"]
        assert findings(ran, "self-test")["host"][0]
    assert (foreign / "thesis.tex").read_text() == "do not touch"


def test_a_plugin_that_breaks_its_contract_is_a_failed_check(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site" / "bad_tier-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-tier\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tiered_kv.backends]\nbad = bad_tier_module:backend\n")
    (tmp_path / "site" / "bad_tier_module.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import Literal\n"
        "from tiered_kv.config import TierSettings\n"
        "from tiered_kv.contracts import API_VERSION, Backend\n"
        "from tiered_kv.specs import KeySpec\n"
        "@dataclass(frozen=True, slots=True)\n"
        "class BadSpec(KeySpec):\n"
        "    medium = 'bad'\n"
        "class BadSettings(TierSettings, frozen=True):\n"
        "    type: Literal['bad'] = 'bad'\n"
        "def open_store(context):\n"
        "    raise ZeroDivisionError('oops')\n"
        "backend = Backend('bad', 'bad', API_VERSION, 'Bad.', lambda: BadSettings, BadSpec,\n"
        "                  open_store)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    file = tmp_path / "d.yaml"
    file.write_text("tiers: [{name: b, type: bad, capacity: 64MiB}]")
    ran = cli("check", file, "--json")
    assert ran.code == 1
    ok, detail = findings(ran, "self-test")["b"]
    assert not ok
    assert detail == "tier 'b' breaks the contract of a backend by raising ZeroDivisionError: oops"


@pytest.mark.parametrize("command", ["schema", "backends"])
def test_where_stdout_has_no_room_it_is_told_in_one_line(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-c", "from tiered_kv.cli import main; main()", command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (ran.returncode, ran.stderr) == (1, "error: [Errno 28] No space left on device\n")
