"""ls, stat, verify, gc, export and import, on tiers in memory: what they say, and what they refuse.

`tests/stores/test_upkeep_commands.py` runs them on real tiers.
"""

from __future__ import annotations

import signal
import stat
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.command_line import Cli
from tests.faults.tracing import injected
from tests.unit.archives import archive
from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import NewBlock, StoreContext
from tiered_kv.errors import TierError
from tiered_kv.plugins import GROUP
from tiered_kv.testing.conformance.blocks import aligned_copy, content, key
from tiered_kv.testing.faults import Effect, Fault, Method
from tiered_kv.testing.memory_tier import MemoryDisk, MemorySettings, MemoryTiers
from tiered_kv.values import (
    BlockKey,
    CacheGeometry,
    Fingerprint,
    GroupGeometry,
    Namespace,
)

LENGTH = 5000
GEOMETRY = CacheGeometry((GroupGeometry(0, LENGTH, 1, 16),), 0, 2)
PLAIN = {"architectures": "TinyModel", "dtype": "bf16", "name": "-", "tp": "2", "weights": "w" * 90}
ONE = Namespace(Fingerprint.of(PLAIN))
TWO = Namespace(Fingerprint.of(PLAIN | {"dtype": "fp8"}))
AFTER_RESET = Namespace(Fingerprint.of(PLAIN), b"\1\2")

CONFIG = """\
tiers:
  - {name: host, type: cpu, capacity: 32MiB}
  - {name: near, type: memory, capacity: 10MiB}
  - {name: far, type: memory, capacity: 20MiB}
"""


class Rig:
    """Two tiers in memory, and a configuration that names them."""

    def __init__(self, folder: Path) -> None:
        self._tiers = MemoryTiers()
        self.module = ModuleType("memory_plugin")
        self.folder = folder
        self.config = folder / "deployment.yaml"
        self.config.write_text(CONFIG)
        self.bring(self._tiers.backend)

    def bring(self, backend: object) -> None:
        """What the plug-in brings from now on."""
        vars(self.module)["backend"] = backend

    def without_maintenance(self) -> None:
        self.bring(replace(self._tiers.backend, open_maintenance=None))

    def disk(self, tier: str) -> MemoryDisk:
        return self._tiers.disk(tier)

    def store(self, tier: str, namespace: Namespace, rank: int = 0) -> Any:
        assert self._tiers.backend.open_store is not None
        geometry = replace(GEOMETRY, rank=rank)
        settings = MemorySettings(name=tier)
        return self._tiers.backend.open_store(StoreContext(tier, settings, namespace, geometry))

    def fill(self, tier: str, namespace: Namespace, numbers: Sequence[int]) -> None:
        for rank in range(GEOMETRY.world_size):
            store = self.store(tier, namespace, rank)
            for number in numbers:
                data = aligned_copy(content(number, rank, LENGTH))
                checksum = BlockChecksum.capture(key(number), rank, data)
                places = store.reserve([NewBlock(key(number), checksum)])
                store.write(places, [data])
                store.publish(places)
            store.close()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    made = Rig(tmp_path)
    monkeypatch.setitem(sys.modules, "memory_plugin", made.module)
    entry = EntryPoint("memory", "memory_plugin:backend", GROUP)
    found = [*entry_points(group=GROUP), entry]
    monkeypatch.setattr("tiered_kv.plugins._installed", lambda: found)
    return made


COMMANDS: dict[str, tuple[str, ...]] = {
    "ls": (),
    "stat": (),
    "verify": (),
    "gc": ("--yes",),
    "export": ("out.archive", "--namespace", "00"),
    "import": ("in.archive",),
}


# What all of them refuse, and how they end


@pytest.mark.parametrize("command", COMMANDS)
def test_tiers_that_are_not_there(cli: Cli, rig: Rig, command: str) -> None:
    more = COMMANDS[command]
    for name, said in (
        ("nera", "has no tier 'nera'; did you mean 'near'? there are near, far"),
        ("host", "tier 'host' is the host's, and ends with its engine"),
    ):
        ran = cli(command, rig.config, *more, "--tier", name)
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err
    rig.config.write_text("tiers: [{name: host, type: cpu, capacity: 32MiB}]")
    ran = cli(command, rig.config, *more, "--tier", "near")
    assert (ran.code, ran.out) == (2, "")
    assert "has no tier 'near'; there is none that keeps blocks" in ran.err


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc"])
def test_a_configuration_without_stores(cli: Cli, rig: Rig, command: str) -> None:
    rig.config.write_text("tiers: [{name: host, type: cpu, capacity: 32MiB}]")
    ran = cli(command, rig.config, *COMMANDS[command])
    assert (ran.code, ran.out) == (2, "")
    assert "no tier outlives its process" in ran.err


@pytest.mark.parametrize("command", COMMANDS)
def test_interrupted(cli: Cli, rig: Rig, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("tiered_kv.config.load", interrupt)
    # A shell may have started the tests in the background, which ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli(command, rig.config, *COMMANDS[command], "--tier", "near").code == 130
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_bad_configuration(cli: Cli, rig: Rig, command: str) -> None:
    rig.config.write_text("tiers: [{name: near, type: memory, capacity: 32G}]")
    ran = cli(command, rig.config, *COMMANDS[command], "--tier", "near")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"{rig.config}:1: tiers.0.capacity: '32G' is ambiguous")


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc", "export"])
def test_a_backend_that_cannot_say_what_it_holds(cli: Cli, rig: Rig, command: str) -> None:
    rig.without_maintenance()
    ran = cli(command, rig.config, *COMMANDS[command], "--tier", "near")
    assert (ran.code, ran.out) == (2, "")
    assert "cannot say what the tier holds: it brings no open_maintenance" in ran.err


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc"])
def test_one_broken_tier_hides_no_other(
    cli: Cli, rig: Rig, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    rig.fill("far", ONE, range(3))
    opener = rig._tiers.backend.open_maintenance
    assert opener is not None

    def broken(context: Any) -> Any:
        if context.tier == "near":
            raise TierError("tier near: the disk is gone", tier="near")
        return opener(context)

    rig.bring(replace(rig._tiers.backend, open_maintenance=broken))
    ran = cli(command, rig.config, *COMMANDS[command], "--json")
    assert ran.code == 1
    assert "error: tier 'near': the disk is gone\n" in ran.err
    near, far = ran.json["tiers"]
    assert near == {"tier": "near", "type": "memory", "error": "tier near: the disk is gone"}
    assert far["tier"] == "far"
    assert "error" not in far
    assert cli(command, rig.config, *COMMANDS[command]).code == 1
    ran = cli(command, rig.config, *COMMANDS[command], "--tier", "near")
    assert ran.code == 1
    assert ran.err.endswith("error: tier near: the disk is gone\n")


def test_a_plugin_that_raises_what_no_contract_allows_is_named(cli: Cli, rig: Rig) -> None:
    def broken(context: Any) -> Any:
        raise KeyError("nonsense")

    rig.bring(replace(rig._tiers.backend, open_maintenance=broken))
    ran = cli("ls", rig.config, "--tier", "far")
    assert ran.code == 1
    assert "tier 'far' breaks the contract of a backend by raising KeyError" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("command", "more", "said"),
    [
        ("ls", ("--namespace", "zz"), "there is no namespace 'zz'"),
        ("ls", ("--limit", "0"), "greater than or equal to 1"),
        ("verify", ("--namespace", "zz"), "there is no namespace 'zz'"),
        ("verify", ("--rate", "5"), "'5' has no unit"),
        ("verify", ("--rate", "0B"), "expected more than 0 bytes"),
        ("gc", ("--namespace", "zz", "--yes"), "there is no namespace 'zz'"),
        ("gc", ("--namespace", "zz", "--unused"), "give --namespace or --unused, not both"),
        ("gc", ("--json",), "--json cannot ask; give --yes or --dry-run with it"),
        ("export", ("x",), "Missing option '--tier'"),
        ("export", ("x", "--tier", "near"), "Missing option '--namespace'"),
        ("export", ("x", "--tier", "near", "--namespace", "zz"), "there is no namespace 'zz'"),
        ("export", ("x", "--tier", "near", "--namespace", "z", "--limit", "1"), "has no unit"),
        (
            "export",
            ("x", "--tier", "near", "--namespace", "z", "--rank", "-1"),
            "than or equal to 0",
        ),
        ("import", ("x",), "Missing option '--tier'"),
        ("import", ("none", "--tier", "near"), "there is no file none"),
        ("import", (".", "--tier", "near"), "there is no file ."),
    ],
)
def test_wrong_use(
    cli: Cli,
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    more: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(rig.folder)
    rig.fill("near", ONE, range(2))
    ran = cli(command, rig.config, *more)
    assert (ran.code, ran.out) == (2, "")
    assert said in " ".join(ran.err.replace("│", " ").split())
    assert list(rig.folder.iterdir()) == [rig.config]


# ls


def test_ls(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(3))
    rig.fill("near", TWO, range(5))
    writer = rig.store("near", TWO)
    told = cli("ls", rig.config, "--json")
    assert told.code == 0
    near, far = told.json["tiers"]
    assert far == {"tier": "far", "type": "memory", "namespaces": []}
    by_id = {entry["namespace"]: entry for entry in near["namespaces"]}
    assert list(by_id) == sorted([ONE.id.hex(), TWO.id.hex()])
    assert by_id[ONE.id.hex()] == {
        "namespace": ONE.id.hex(),
        "fields": PLAIN,
        "epoch": "",
        "telling": ["dtype"],
        "blocks": 3,
        "used_bytes": 3 * 2 * LENGTH,
        "ranks": 2,
        "in_use": False,
    }
    assert by_id[TWO.id.hex()]["in_use"]
    writer.close()
    text = cli("ls", rig.config)
    assert text.code == 0
    for shown in (ONE.id.hex(), TWO.id.hex(), "architectures: TinyModel", "dtype: fp8", "29.3KiB"):
        assert shown in text.out
    assert "weights" not in text.out  # the same in both, so it tells nothing
    assert "tier far holds nothing" in text.out


def test_ls_shows_an_epoch_and_shortens_what_is_long(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(1))
    rig.fill("near", AFTER_RESET, range(1))
    other = "w" * 50 + "v" + "w" * 39
    rig.fill("near", Namespace(Fingerprint.of(PLAIN | {"weights": other})), range(1))
    text = cli("ls", rig.config, "--tier", "near").out
    assert "epoch: 0102" in text
    # What is shown of a long value is where it differs from the others.
    assert f"weights: ...{'w' * 34}..." in text
    assert f"weights: ...{'w' * 10}v{'w' * 23}..." in text
    alike = cli("stat", rig.config, "--tier", "near").out
    assert f"...{'w' * 10}v{'w' * 23}..." in alike


def test_ls_of_a_namespace_lists_its_keys(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(7))
    rig.fill("far", ONE, range(2))
    prefix = ONE.id.hex()[:4]
    ran = cli("ls", rig.config, "--tier", "near", "--namespace", prefix)
    assert ran.code == 0
    assert sorted(ran.out.split()) == sorted(key(number).hex() for number in range(7))
    assert ran.err == "tier near: 7 blocks\n"
    some = cli("ls", rig.config, "--tier", "near", "--namespace", prefix, "--limit", "3")
    assert len(some.out.split()) == 3
    assert some.err == "tier near: 7 blocks, of which 3 are listed; --limit lists more\n"
    both = cli("ls", rig.config, "--namespace", prefix, "--json").json["tiers"]
    assert [(entry["tier"], len(entry["keys"])) for entry in both] == [("near", 7), ("far", 2)]


# stat


def test_stat(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(3))
    rig.fill("near", TWO, range(5))
    near, far = cli("stat", rig.config, "--json").json["tiers"]
    assert (near["blocks"], near["used_bytes"]) == (8, 8 * 2 * LENGTH)
    assert near["capacity_bytes"] == 10 * 2**20
    assert near["room_bytes"] == 10 * 2**20 - 8 * 2 * LENGTH
    assert near["modes"] == {"io": "memory"}
    assert [entry["blocks"] for entry in near["namespaces"]] in ([3, 5], [5, 3])
    [pair] = near["alike"]
    assert {pair["namespace"], pair["other"]} == {ONE.id.hex(), TWO.id.hex()}
    [difference] = pair["differences"]
    assert difference["field"] == "dtype"
    assert {difference["value"], difference["other"]} == {"bf16", "fp8"}
    assert (far["blocks"], far["used_bytes"], far["modes"]) == (0, 0, {})
    text = cli("stat", rig.config)
    assert text.code == 0
    assert "Namespaces that differ in few fields" in text.out
    assert "weights" not in text.out
    full = cli("stat", rig.config, "-v").out
    assert f"Namespace {ONE.id.hex()} in tier near" in full
    assert "w" * 90 in full


# verify


def test_verify_of_what_is_sound(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(6))
    rig.fill("far", TWO, range(4))
    ran = cli("verify", rig.config, "--json")
    assert ran.code == 0
    assert ran.json["ok"]
    reads = [read for tier in ran.json["tiers"] for read in tier["read"]]
    assert [(read["rank"], read["blocks"], read["bytes"]) for read in reads] == [
        (0, 6, 6 * LENGTH),
        (1, 6, 6 * LENGTH),
        (0, 4, 4 * LENGTH),
        (1, 4, 4 * LENGTH),
    ]
    one = cli("verify", rig.config, "--namespace", TWO.id.hex()[:6], "--json").json
    assert [entry["tier"] for entry in one["tiers"]] == ["far"]
    text = cli("verify", rig.config)
    assert text.code == 0
    assert ONE.id.hex() in text.out


def test_verify_finds_what_is_bad_and_repairs_it(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(6))
    disk = rig.disk("near")
    disk.spoil(key(2))
    disk.faults.inject(Fault(method=Method.READ, effect=Effect.NOT_FOUND, keys=frozenset({key(4)})))
    left = rig.store("near", ONE)
    left.reserve([NewBlock(BlockKey(b"left"), BlockChecksum(100, 1))])
    left.close()
    for _ in range(2):  # it changes nothing
        found = cli("verify", rig.config, "--tier", "near")
        assert found.code == 1
        assert "2 corrupt blocks, 2 missing blocks" in found.err
        assert "1 places of closed stores" in found.err
        assert "--repair drops what is bad" in found.err
    disk.faults.inject()
    repaired = cli("verify", rig.config, "--tier", "near", "--repair", "--json")
    assert repaired.code == 0, repaired.err
    [near] = repaired.json["tiers"]
    assert near["structure"]["repaired"] == {"places of closed stores": 1}
    assert [read["corrupt"] for read in near["read"]] == [1, 0]  # its parts went together
    assert disk.keys() == {key(number) for number in (0, 1, 3, 4, 5)}
    assert cli("verify", rig.config, "--tier", "near").code == 0


def test_a_repair_drops_what_is_listed_and_cannot_be_found(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(6))
    disk = rig.disk("near")
    disk.faults.inject(Fault(method=Method.READ, effect=Effect.NOT_FOUND, keys=frozenset({key(4)})))
    ran = cli("verify", rig.config, "--tier", "near", "--repair", "--json")
    assert ran.code == 0, ran.err
    assert [read["missing"] for read in ran.json["tiers"][0]["read"]] == [1, 0]
    assert disk.keys() == {key(number) for number in (0, 1, 2, 3, 5)}


def test_what_is_evicted_while_verify_reads_is_not_bad(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(6))
    engine = rig.store("near", TWO)
    missing = Fault(method=Method.READ, effect=Effect.NOT_FOUND, keys=frozenset({key(4)}))
    rig.disk("near").faults.inject(missing)
    ran = cli("verify", rig.config, "--tier", "near", "--json")
    assert ran.code == 0
    assert [read["missing"] for read in ran.json["tiers"][0]["read"]] == [1, 1, 0, 0]
    engine.close()
    assert cli("verify", rig.config, "--tier", "near").code == 1


def test_what_cannot_be_read_is_bad_also_after_a_repair(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(3))
    broken = Fault(method=Method.READ, effect=Effect.BLOCK_ERROR, keys=frozenset({key(1)}))
    rig.disk("near").faults.inject(broken)
    ran = cli("verify", rig.config, "--tier", "near", "--repair")
    assert ran.code == 1
    assert "2 unreadable blocks" in ran.err


def test_verify_keeps_to_a_rate(cli: Cli, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    rig.fill("near", ONE, range(6))
    ran = cli("verify", rig.config, "--tier", "near", "--rate", f"{LENGTH}B")
    assert ran.code == 0
    print(f"{sum(slept):.2f} s to sleep for {12 * LENGTH} bytes at {LENGTH} per second")
    assert max(slept) > 5


# gc


def test_gc_removes_leftovers_and_what_it_is_told(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(6))
    rig.fill("near", TWO, range(4))
    left = rig.store("near", ONE)
    left.reserve([NewBlock(BlockKey(b"left"), BlockChecksum(100, 1))])
    left.close()
    disk = rig.disk("near")
    before = disk.used_bytes
    dry = cli("gc", rig.config, "--namespace", TWO.id.hex(), "--dry-run", "--json")
    assert dry.code == 0
    [near, far] = dry.json["tiers"]
    assert near["leftovers"] == {"places of closed stores": 1}
    assert near["namespaces"] == [
        {"namespace": TWO.id.hex(), "blocks": 4, "used_bytes": 4 * 2 * LENGTH}
    ]
    assert far["namespaces"] == []
    assert disk.used_bytes == before
    ran = cli("gc", rig.config, "--namespace", TWO.id.hex(), "--yes")
    assert ran.code == 0
    assert "tier near: 4 blocks dropped" in ran.out
    assert disk.used_bytes == 6 * 2 * LENGTH
    assert cli("gc", rig.config, "--dry-run").out == "nothing is left over\n"


def test_gc_asks(cli: Cli, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.fill("near", ONE, range(6))
    asked: list[str] = []
    answers = iter((False, True))

    def confirm(text: str, *, abort: bool) -> None:
        asked.append(text)
        if not next(answers) and abort:
            raise SystemExit(1)

    monkeypatch.setattr("typer.confirm", confirm)
    assert cli("gc", rig.config, "--unused").code == 1
    assert len(rig.disk("near").keys()) == 6
    assert cli("gc", rig.config, "--unused").code == 0
    assert rig.disk("near").keys() == set()
    assert len(asked) == 2
    assert cli("gc", rig.config, "--unused").code == 0  # there is nothing to ask about
    assert len(asked) == 2


def test_gc_drops_no_namespace_that_is_in_use(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(6))
    rig.fill("near", TWO, range(4))
    engine = rig.store("near", TWO)
    refused = cli("gc", rig.config, "--namespace", TWO.id.hex(), "--yes")
    assert (refused.code, refused.out) == (2, "")
    assert "is in use; stop the engine" in refused.err
    assert cli("gc", rig.config, "--unused", "--yes").code == 0
    assert {row[0] for row in rig.disk("near").rows} == {TWO.id}
    engine.close()


def test_gc_and_an_engine_that_opens_meanwhile(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(6))
    opener = rig._tiers.backend.open_maintenance
    assert opener is not None

    def opened_too_late(context: Any) -> Any:
        if context.writable:
            rig.store("near", ONE)
        return opener(context)

    rig.bring(replace(rig._tiers.backend, open_maintenance=opened_too_late))
    ran = cli("gc", rig.config, "--tier", "near", "--unused", "--yes")
    assert ran.code == 2
    assert "was not dropped: namespace" in ran.err
    assert len(rig.disk("near").keys()) == 6


# export and import


def test_export_and_import(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(9))
    file = rig.folder / "blocks.archive"
    which = ("--tier", "near", "--namespace", ONE.id.hex()[:5])
    ran = cli("export", rig.config, file, *which)
    assert ran.code == 0
    assert ran.out.startswith("9 blocks of 2 ranks, 87.89KiB, written to")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(rig.folder.iterdir()) == sorted([rig.config, file])
    again = cli("export", rig.config, file, *which)
    assert (again.code, again.out) == (2, "")
    assert f"{file} exists already" in again.err
    got = cli("import", rig.config, file, "--tier", "far", "--json")
    assert got.code == 0
    assert got.json == {
        "file": str(file),
        "tier": "far",
        "namespace": ONE.id.hex(),
        "ranks": [0, 1],
        "parts": 18,
        "bytes": 18 * LENGTH,
        "present": 0,
        "refused": 0,
        "damage": "",
        "full": "",
        "evicted_blocks": 0,
    }
    for number in range(9):
        for rank in range(2):
            assert rig.disk("far").content(key(number), rank) == content(number, rank, LENGTH)
    text = cli("import", rig.config, file, "--tier", "far", "--expect", ONE.id.hex()[:3])
    assert text.out == "0 parts of blocks, 0B, stored in tier far; 18 were there already\n"


def test_export_of_some(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(9))
    which = ("--tier", "near", "--namespace", ONE.id.hex(), "--json")
    limited = cli("export", rig.config, rig.folder / "a", *which, "--limit", "50000B").json
    assert (limited["blocks"], limited["bytes"]) == (5, 50_000)
    none = cli("export", rig.config, rig.folder / "d", *which, "--limit", "9999B")
    assert (none.code, none.out) == (1, "")
    assert none.err.endswith("error: no block of 2 ranks fits into --limit 9999B\n")
    assert not (rig.folder / "d").exists()
    ranked = cli("export", rig.config, rig.folder / "b", *which, "--rank", "1").json
    assert (ranked["blocks"], ranked["ranks"]) == (9, [1])
    refused = cli("export", rig.config, rig.folder / "c", *which, "--rank", "2")
    assert refused.code == 2
    assert "has ranks 0 to 1, not 2" in refused.err
    assert not (rig.folder / "c").exists()
    assert cli("export", rig.config, rig.folder, *which).code == 2


def test_export_leaves_out_what_is_damaged_and_says_so(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(9))
    rig.disk("near").spoil(key(3))
    file = rig.folder / "blocks.archive"
    ran = cli("export", rig.config, file, "--tier", "near", "--namespace", ONE.id.hex())
    assert ran.code == 1
    assert ran.out.startswith("8 blocks")
    assert "1 blocks are left out: 1 damaged, 0 unreadable" in ran.err
    assert cli("import", rig.config, file, "--tier", "far").code == 0
    assert rig.disk("far").keys() == {key(n) for n in range(9) if n != 3}


def test_an_export_that_fails_leaves_no_file(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(9))
    rig.disk("near").faults.inject(Fault(method=Method.READ, effect=Effect.TIER_ERROR))
    file = rig.folder / "blocks.archive"
    ran = cli("export", rig.config, file, "--tier", "near", "--namespace", ONE.id.hex())
    assert (ran.code, ran.out) == (1, "")
    assert "injected at read" in ran.err
    assert list(rig.folder.iterdir()) == [rig.config]
    gone = rig.folder / "none" / "blocks.archive"
    ran = cli("export", rig.config, gone, "--tier", "near", "--namespace", ONE.id.hex())
    assert ran.code == 1
    assert f"cannot write {gone}" in ran.err
    full = cli("export", rig.config, "/dev/full", "--tier", "far", "--namespace", ONE.id.hex())
    assert full.code == 2  # far holds nothing
    rig.disk("near").faults.inject()
    full = cli("export", rig.config, "/dev/full", "--tier", "near", "--namespace", ONE.id.hex())
    assert full.code == 1
    assert "No space left on device" in full.err


NO_LINKS = ("link:error=EOPNOTSUPP", "linkat:error=EPERM")


def test_an_export_without_hard_links_replaces_nothing(
    cli: Cli, rig: Rig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rig.fill("near", ONE, range(9))
    file = rig.folder / "blocks.archive"
    which = ("--tier", "near", "--namespace", ONE.id.hex())
    with injected(*NO_LINKS, log=tmp_path_factory.mktemp("log") / "log") as hits:
        ran = cli("export", rig.config, file, *which)
        again = cli("export", rig.config, file, *which)
    assert ran.code == 0, ran.err
    assert len(hits) == 1
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(rig.folder.iterdir()) == sorted([rig.config, file])
    assert (again.code, f"{file} exists already" in again.err) == (2, True)
    assert cli("import", rig.config, file, "--tier", "far", "--json").json["parts"] == 18


@pytest.mark.parametrize(
    "faults", [(), NO_LINKS, (*NO_LINKS, "rename:error=EIO", "renameat2:error=EIO")]
)
def test_an_export_that_cannot_have_its_name_is_kept(
    cli: Cli, rig: Rig, faults: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rig.fill("near", ONE, range(9))
    file = rig.folder / "blocks.archive"
    which = ("--tier", "near", "--namespace", ONE.id.hex())
    taken = len(faults) < 3
    near = rig.disk("near").faults
    near.inject(Fault(method=Method.READ, effect=Effect.HANG, times=1))

    def meanwhile() -> None:
        while not near.held:  # by then it has looked whether the name is free
            time.sleep(0.002)
        if taken:
            file.write_text("another's")
        near.let_go()

    with ExitStack() as stack:
        if faults:
            log = tmp_path_factory.mktemp("log") / "log"
            stack.enter_context(injected(*faults, log=log))
        other = threading.Thread(target=meanwhile)
        other.start()
        ran = cli("export", rig.config, file, *which)
        other.join()
    assert (ran.code, ran.out) == (1, "")
    [kept] = rig.folder.glob(".blocks.archive.*.part")
    assert f"cannot be named {file}" in ran.err
    assert f"it is kept as {kept}" in ran.err
    assert file.exists() == taken
    if taken:
        assert file.read_text() == "another's"
    assert cli("import", rig.config, kept, "--tier", "far", "--json").json["parts"] == 18


def test_imports_that_are_refused(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(3))
    file = rig.folder / "blocks.archive"
    cli("export", rig.config, file, "--tier", "near", "--namespace", ONE.id.hex())
    whole = file.read_bytes()
    other = rig.folder / "other"
    for data, code, said in (
        (b"", 1, "the end of the file within the beginning"),
        (b"hello, world, this is a text", 2, "this is no tiered-kv archive"),
        (whole[:8] + b"\0\0\0\7" + whole[12:], 2, "archive of version 7"),
        (whole[:40], 1, "the end of the file within the header"),
    ):
        other.write_bytes(data)
        ran = cli("import", rig.config, other, "--tier", "far")
        assert (ran.code, ran.out) == (code, "")
        assert said in ran.err
    ran = cli("import", rig.config, file, "--tier", "far", "--expect", TWO.id.hex())
    assert (ran.code, ran.out) == (2, "")
    assert f"the file is of namespace {ONE.id.hex()}" in ran.err
    assert rig.disk("far").keys() == set()
    assert rig.disk("far").namespaces == {}


def test_an_import_of_a_damaged_file_keeps_what_verified(cli: Cli, rig: Rig) -> None:
    rig.fill("near", ONE, range(9))
    file = rig.folder / "blocks.archive"
    cli("export", rig.config, file, "--tier", "near", "--namespace", ONE.id.hex())
    whole = file.read_bytes()
    cut = rig.folder / "cut"
    cut.write_bytes(whole[: len(whole) * 2 // 3])
    ran = cli("import", rig.config, cut, "--tier", "far")
    assert ran.code == 1
    assert "the end of the file within a block's bytes" in ran.err
    assert "what was stored before was verified, and stays" in ran.err
    assert "11 parts of blocks" in ran.out
    flipped = rig.folder / "flipped"
    place = whole.index(content(5, 1, LENGTH)) + 17
    flipped.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    ran = cli("import", rig.config, flipped, "--tier", "far", "--json")
    assert ran.code == 1
    assert (ran.json["parts"], ran.json["present"], ran.json["refused"]) == (6, 11, 1)
    assert "another digest" in ran.json["damage"]
    assert "1 parts of blocks are damaged" in ran.err
    assert rig.disk("far").content(key(5), 1) is None


def test_a_file_of_another_shape_does_not_touch_a_namespace(cli: Cli, rig: Rig) -> None:
    """Whoever knows the format can write any geometry under a namespace's fields."""
    rig.fill("near", ONE, range(3))
    from tiered_kv.upkeep import ArchiveContents

    groups = (GroupGeometry(0, 2**31, 1, 16),)
    hostile = rig.folder / "hostile"
    hostile.write_bytes(archive((), ArchiveContents(ONE, CacheGeometry(groups, 0, 2), (0,))))
    ran = cli("import", rig.config, hostile, "--tier", "near")
    assert (ran.code, ran.out) == (2, "")
    assert "with blocks of another shape than the file" in ran.err
    assert rig.disk("near").namespaces[ONE.id] == (ONE, GEOMETRY)
