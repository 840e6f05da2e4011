"""`tiered-kv bench` at small sizes: what it counts, what it refuses, that it leaves nothing. How
fast anything is, is not asserted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.command_line import Cli, Ran
from tests.conformance.direct import DirectLoad, DirectStore
from tiered_kv.checksum import BlockChecksum
from tiered_kv.cli.benching import limits
from tiered_kv.cli.benching.figures import Move, Sample, figures_of
from tiered_kv.cli.benching.page_cache import drop_from_cache, read_in, resident_bytes
from tiered_kv.cli.benching.place import PREFIX, Need, place_of, shortages_of, workplace
from tiered_kv.config import GIB, KIB, MIB, SizeOrPercent
from tiered_kv.contracts import NewBlock, StoreContext
from tiered_kv.plugins import GROUP
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import GpuSpec
from tiered_kv.testing.conformance.blocks import aligned_copy, content, key, reserved
from tiered_kv.testing.faults import Effect, Fault, Method
from tiered_kv.testing.memory_tier import MemorySettings, MemorySpec, MemoryTiers
from tiered_kv.values import CacheGeometry, Fingerprint, GroupGeometry, Namespace
from tiered_kv_lmdb.settings import LmdbSettings
from tiered_kv_nvme.settings import NvmeSettings

DISKS = """\
tiers:
  - {{name: host, type: cpu, capacity: 32MiB}}
  - {{name: ssd, type: nvme, path: {0}/disks/ssd, capacity: 256MiB, min_free: 0%}}
  - {{name: pins, type: lmdb, path: {0}/disks/pins, capacity: 256MiB, min_free: 0%}}
limits: {{staging: 2MiB}}
"""
SMALL = ("--size", "1MiB", "--rounds", "1", "--block-size", "64KiB")
STORE_BYTES = 2 * MIB
"""Rounds, the uncounted one included, times bytes."""


FIO = shutil.which("fio") is not None


@pytest.fixture
def disks(tmp_path: Path) -> Path:
    file = tmp_path / "deployment.yaml"
    file.write_text(DISKS.format(tmp_path))
    return file


def tiers_of(ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, ran.err
    return {tier["tier"]: tier for tier in ran.json["tiers"]}


def moves(size: dict[str, Any]) -> Counter[tuple[str, str | None, str | None, str | None]]:
    return Counter(
        (figure["name"], figure["verify"], figure["cache"], figure["limit"])
        for figure in size["figures"]
    )


def left(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(PREFIX)]


# The tiers that come with it


def test_every_hop_and_chain_is_measured_beside_its_limit(
    cli: Cli, disks: Path, tmp_path: Path
) -> None:
    two = ("--size", "2MiB", "--rounds", "1", "--block-size", "64KiB", "--block-size", "256KiB")
    tiers = tiers_of(cli("bench", disks, *two, "--json", "-"))
    assert list(tiers) == ["host", "ssd", "pins"]
    assert [tier["type"] for tier in tiers.values()] == ["cpu", "nvme", "lmdb"]
    for tier in tiers.values():
        sizes = [(size["block_bytes"], size["blocks"]) for size in tier["sizes"]]
        assert sizes == [(64 * KIB, 32), (256 * KIB, 8)]
        assert tier["problem"] is None
    for size in tiers["host"]["sizes"]:
        assert moves(size) == Counter(
            [
                ("memcpy", None, None, None),
                ("gpu->cpu", None, None, "memcpy"),
                ("cpu->gpu", "always", None, "memcpy"),
            ]
        )
        assert [chain["chain"] for chain in size["chains"]] == ["gpu->cpu", "cpu->gpu"]
    by_fio = ("fio write", "fio read") if FIO else ()
    shown = [(name, None, None, None) for name in ("memcpy", "disk write", "disk read", *by_fio)]
    for size in tiers["ssd"]["sizes"]:
        assert moves(size) == Counter(
            [
                *shown,
                ("cpu->ssd", None, None, "disk write"),
                ("gpu->cpu->ssd", None, None, "disk write"),
                *(
                    (name, verify, "cold", "disk read")
                    for name in ("ssd->cpu", "ssd->cpu->gpu")
                    for verify in ("always", "never")
                ),
            ]
        )
    for size in tiers["pins"]["sizes"]:
        assert moves(size) == Counter(
            [
                *shown,
                ("cpu->pins", None, None, "memcpy"),
                ("gpu->cpu->pins", None, None, "memcpy"),
                *(
                    (name, verify, cache, limit)
                    for name in ("pins->cpu", "pins->cpu->gpu")
                    for verify in ("always", "never")
                    for cache, limit in (("cold", "disk read"), ("warm", "memcpy"))
                ),
            ]
        )
    figures = [one for tier in tiers.values() for size in tier["sizes"] for one in size["figures"]]
    print(f"{len(figures)} figures")
    for figure in figures:
        assert figure["best_gib_per_second"] >= figure["median_gib_per_second"] > 0
        assert (figure["of_limit"] is None) == (figure["kind"] == "limit")
    assert tiers["ssd"]["modes"]["store"]["io"] == "direct"
    assert tiers["ssd"]["modes"]["ssd->cpu"]["verify"] == "always"
    assert tiers["pins"]["modes"]["store"]["writemap"] == "off"
    chains = {chain["chain"]: chain for chain in tiers["ssd"]["sizes"][0]["chains"]}
    assert chains["gpu->cpu->ssd"]["chosen"]
    assert "measured over" in chains["gpu->cpu->ssd"]["reason"]
    assert not chains["gpu->ssd"]["chosen"]
    assert "not in use here" in chains["gpu->ssd"]["reason"]
    assert tiers["host"]["written_bytes"] == 0
    # Two rounds of two sizes, in the tier and on the disk beside it.
    assert tiers["pins"]["written_bytes"] == 2 * 2 * (2 * MIB) * (2 + FIO)
    # Neither tier has got a directory, nor is anything of ours left.
    assert list((tmp_path).iterdir()) == [disks]


def test_the_text_says_the_same(cli: Cli, disks: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    ran = cli("bench", disks, *SMALL, "--tier", "ssd", "--json", file)
    assert ran.code == 0, ran.err
    for said in ("Tier ssd", "gpu->cpu->ssd", "disk write: ", "64KiB", "CPU s/GiB", "io "):
        assert said in ran.out
    assert "Tier host" not in ran.out
    assert f"in {tmp_path}" in ran.err
    ways = 3 + FIO  # one may be direct elsewhere
    assert f"writes {2 * ways}MiB in all" in ran.err
    assert Counter(line.count("round 1 of 1") for line in ran.err.splitlines())[1] == 1
    assert '"block_bytes": 65536' in file.read_text()


def test_without_a_cpu_tier_stores_pass_through_staging(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(
        f"tiers: [{{name: ssd, type: nvme, path: {tmp_path}/ssd, capacity: 256MiB}}]\n"
        "limits: {staging: 2MiB}"
    )
    tiers = tiers_of(cli("bench", file, *SMALL, "--json", "-"))
    assert list(tiers) == ["cpu", "ssd"]
    names = {figure["name"] for figure in tiers["ssd"]["sizes"][0]["figures"]}
    assert {"cpu->ssd", "gpu->cpu->ssd"} <= names


@pytest.mark.parametrize("there", [True, False])
def test_what_is_stored_is_not_touched(
    cli: Cli, disks: Path, tmp_path: Path, *, there: bool
) -> None:
    """Also where the tier is full, as a tier in use is: it is refused, not made room in."""
    folder = tmp_path / "disks" / "ssd"
    folder.mkdir(parents=True)
    (folder / "mine").write_bytes(bytes(4096 if there else 200 * MIB))
    before = {path: path.stat() for path in [folder, *folder.rglob("*")]}
    ran = cli("bench", disks, *SMALL, "--tier", "ssd", "--json", "-")
    assert ran.code == (0 if there else 2)
    if not there:
        assert "tier 'ssd' holds 200MiB of its capacity of 256MiB" in ran.err
        assert ran.out == ""
    assert {path: path.stat() for path in [folder, *folder.rglob("*")]} == before
    assert not left(tmp_path)


# Refusals


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--tier", "sdd"), "has no tier 'sdd'; there are host, ssd, pins"),
        (("--block-size", "10000B"), "is not a multiple of 4096 bytes"),
        (("--block-size", "64KiB", "--layers", "3"), "and of the 3 layers"),
        (("--size", "200MiB"), "measuring it takes up to"),
        (("--size", "1000GiB"), "of memory, but"),
        (("--plot", "x.pdf"), "neither .png nor .svg"),
        (("--plot", "nowhere/x.png"), "nowhere/x.png: there is no directory"),
        (("--json", "nowhere/x.json"), "nowhere/x.json: there is no directory"),
    ],
)
def test_refused(cli: Cli, disks: Path, tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    ran = cli("bench", disks, *more)
    assert (ran.code, ran.out) == (2, "")
    assert said in " ".join(ran.err.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == [disks]


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(cli: Cli) -> None:
    ran = cli("bench", "no-such-deployment.yaml", "--json", "/proc/figures.json")
    assert ran.code == 2
    assert "cannot be written" in ran.err


def test_figures_are_printed_where_their_file_cannot_be_written(cli: Cli, disks: Path) -> None:
    ran = cli("bench", disks, *SMALL, "--tier", "host", "--json", "/dev/full")
    print(ran.err)
    assert ran.code == 1
    assert "/dev/full could not be written: No space left" in ran.err
    assert "Tier host" in ran.out


def test_figures_are_written_where_they_cannot_be_printed(disks: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = "from tiered_kv.cli import main; main()"
    options = ("bench", disks, *SMALL, "--tier", "host", "--json", file)
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-c", command, *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    print(ran.stderr)
    assert ran.returncode == 1
    assert file.read_text().startswith("{")


def test_a_plot_needs_matplotlib(cli: Cli, disks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = cli("bench", disks, "--plot", "x.png")
    assert (ran.code, ran.out) == (2, "")
    assert "pip install 'tiered-kv[plot]'" in ran.err


def test_bounds_of_a_tier(tmp_path: Path) -> None:
    need = Need(store_bytes=2 * MIB, file_bytes=MIB, written_bytes=10 * MIB)
    disk = os.statvfs(tmp_path)
    whole = disk.f_blocks * disk.f_frsize

    def nvme(min_free: int, write_budget: int = 0) -> NvmeSettings:
        return NvmeSettings(
            name="t",
            path=tmp_path / "t",
            capacity=4 * MIB,
            min_free=SizeOrPercent(size=min_free),
            write_budget=write_budget,
        )

    assert shortages_of(nvme(0), need, MIB, written_today=0) == []
    [full] = shortages_of(nvme(0), need, MIB + 1, written_today=0)
    assert "holds 1MiB" in full
    [low] = shortages_of(nvme(whole), need, 0, written_today=0)
    assert "has 0B above the tier's min_free" in low
    assert shortages_of(nvme(0, 12 * MIB), need, 0, written_today=2 * MIB) == []
    [spent] = shortages_of(nvme(0, 12 * MIB), need, 0, written_today=3 * MIB)
    assert "9MiB are left of its write_budget of today" in spent


def test_a_read_only_tier_is_left_out(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(
        f"tiers: [{{name: ssd, type: nvme, path: {tmp_path}/ssd, capacity: 256MiB, access: read}}]"
    )
    ran = cli("bench", file, *SMALL, "--tier", "ssd", "--json", "-")
    assert ran.code == 0
    assert ran.json["tiers"][0]["sizes"] == []
    assert "warning: tier 'ssd': read only" in ran.err


# Where it is measured


def test_ours_are_beside_the_tiers(tmp_path: Path) -> None:
    folder = tmp_path / "kv" / "ssd"
    need = Need(MIB, MIB, 0)
    settings = NvmeSettings(
        name="t",
        paths=(folder / "a", folder / "b"),
        index=tmp_path / "index",
        capacity=4 * GIB,
        scrub=MIB,
        write_budget=GIB,
    )
    (folder / "a").mkdir(parents=True)
    assert place_of(folder / "a") == folder  # is there
    assert place_of(folder / "b") == folder  # will be made there
    assert place_of(Path("/proc")) == Path("/proc")  # above it is another file system
    with workplace(settings, need) as work:
        assert work.own
        moved = work.settings
        assert isinstance(moved, NvmeSettings)
        assert (moved.capacity, moved.scrub, moved.write_budget) == (MIB, 0, 0)
        assert [path.parent.parent for path in moved.folders] == [folder, folder]
        assert moved.index is not None
        assert moved.index.parent.parent == tmp_path
        assert len(work.folders) == 3
        assert all(path.stat().st_mode & 0o777 == 0o700 for path in work.folders)
        # Another one beside it removes nothing of a process that lives.
        with workplace(settings, need) as other:
            assert not set(other.folders) & set(work.folders)
            assert all(path.is_dir() for path in (*other.folders, *work.folders))
        assert all(path.is_dir() for path in work.folders)
    assert not left(tmp_path)


def test_a_tier_that_cannot_be_moved_is_measured_where_it_is() -> None:
    class Elsewhere(MemorySettings, frozen=True):
        @property
        def directories(self) -> dict[str, Path]:
            return {"shelf": Path("/tmp")}

    with workplace(Elsewhere(name="t"), Need(MIB, MIB, 0)) as work:
        assert not work.own
        assert work.settings == Elsewhere(name="t")
    with workplace(MemorySettings(name="t"), Need(MIB, MIB, 0)) as work:
        assert (work.own, work.folders, work.file) == (False, (), None)


# How it ends


def begun(disks: Path) -> subprocess.Popen[str]:
    """A bench of very many rounds, which has begun to measure the tier `ssd`."""
    arguments = ["bench", str(disks), "--size", "1MiB", "--rounds", "1000", "--tier", "ssd"]
    child = subprocess.Popen(
        [sys.executable, "-c", "from tiered_kv.cli import main; main()", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    for line in child.stderr:
        if "round 1 of" in line:
            return child
    raise AssertionError(f"it ended with {child.wait()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing(disks: Path, tmp_path: Path, number: signal.Signals) -> None:
    child = begun(disks)
    assert left(tmp_path)
    child.send_signal(number)
    out, _ = child.communicate(timeout=60)
    assert (child.returncode, out) == (130, "")
    assert not left(tmp_path)


def test_what_a_killed_one_left_is_removed_by_the_next(
    cli: Cli, disks: Path, tmp_path: Path
) -> None:
    child = begun(disks)
    child.kill()
    child.communicate(timeout=60)
    found = left(tmp_path)
    assert found
    assert cli("bench", disks, *SMALL, "--tier", "ssd").code == 0
    assert not left(tmp_path)
    print(f"{len(found)} directories of a killed process removed")


# A tier without directories, and one that is reached directly


class MemoryRig:
    def __init__(self, folder: Path) -> None:
        self.tiers = MemoryTiers()
        self.module = ModuleType("memory_plugin")
        self.config = folder / "deployment.yaml"
        self.config.write_text(
            "tiers:\n  - {name: host, type: cpu, capacity: 32MiB}\n"
            "  - {name: far, type: memory, capacity: 8MiB}\n"
            "limits: {staging: 2MiB}\n"
        )
        vars(self.module)["backend"] = self.tiers.backend

    def directly(self) -> None:
        def register(registry: TransferRegistry) -> None:
            registry.register(MemorySpec, GpuSpec, DirectLoad, provider="memory")
            registry.register(GpuSpec, MemorySpec, DirectStore, provider="memory")

        vars(self.module)["backend"] = replace(self.tiers.backend, register=register)

    def put(self, numbers: range) -> None:
        """Blocks of an engine."""
        assert self.tiers.backend.open_store is not None
        namespace = Namespace(Fingerprint.of({"model": "mine"}))
        geometry = CacheGeometry((GroupGeometry(0, 5000, 1, 16),), 0, 1)
        settings = MemorySettings(name="far", capacity=8 * MIB)
        store = self.tiers.backend.open_store(StoreContext("far", settings, namespace, geometry))
        for number in numbers:
            data = aligned_copy(content(number, 0, 5000))
            checksum = BlockChecksum.capture(key(number), 0, data)
            places = reserved(store, [NewBlock(key(number), checksum)])
            store.write(places, [data])
            store.publish(places)
        store.close()


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryRig:
    made = MemoryRig(tmp_path)
    monkeypatch.setitem(sys.modules, "memory_plugin", made.module)
    entry = EntryPoint("memory", "memory_plugin:backend", GROUP)
    found = [*entry_points(group=GROUP), entry]
    monkeypatch.setattr("tiered_kv.plugins._installed", lambda: found)
    return made


def test_a_tier_without_directories(cli: Cli, memory: MemoryRig) -> None:
    memory.put(range(3))
    tier = tiers_of(cli("bench", memory.config, *SMALL, "--tier", "far", "--json", "-"))["far"]
    for size in tier["sizes"]:
        assert moves(size) == Counter(
            [
                ("memcpy", None, None, None),
                ("cpu->far", None, None, "memcpy"),
                ("gpu->cpu->far", None, None, "memcpy"),
                *(
                    (name, verify, None, "memcpy")
                    for name in ("far->cpu", "far->cpu->gpu")
                    for verify in ("always", "never")
                ),
            ]
        )
    assert tier["written_bytes"] == STORE_BYTES
    disk = memory.tiers.disk("far")
    assert disk.keys() == {key(number) for number in range(3)}  # ours are gone, others are not
    assert len(disk.namespaces) == 1
    assert disk.evicted == 0


def test_a_tier_without_room_is_not_made_to_evict(cli: Cli, memory: MemoryRig) -> None:
    memory.put(range(3))
    large = ("--size", "5MiB", "--rounds", "1", "--block-size", "1MiB")
    ran = cli("bench", memory.config, *large, "--json", "-")
    assert ran.code == 1
    told = {tier["tier"]: tier for tier in ran.json["tiers"]}
    assert told["host"]["problem"] is None
    assert "lower --size" in told["far"]["problem"]
    assert "error: tier 'far': measuring it takes up to 10MiB" in ran.err
    assert memory.tiers.disk("far").keys() == {key(number) for number in range(3)}


def test_a_direct_way_is_measured_beside_the_other(cli: Cli, memory: MemoryRig) -> None:
    memory.directly()
    tier = tiers_of(cli("bench", memory.config, *SMALL, "--tier", "far", "--json", "-"))["far"]
    for size in tier["sizes"]:
        found = moves(size)
        assert found["gpu->far", None, None, "memcpy"] == 1
        assert found["gpu->cpu->far", None, None, "memcpy"] == 1
        for verify in ("always", "never"):
            assert found["far->gpu", verify, None, "memcpy"] == 1
            assert found["far->cpu->gpu", verify, None, "memcpy"] == 1
        chosen = Counter(chain["destination"] for chain in size["chains"] if chain["chosen"])
        assert chosen == Counter(["far", "gpu"])
        assert len(size["chains"]) == 4
        assert all("measured over" in c["reason"] for c in size["chains"] if c["chosen"])
    assert tier["modes"]["far->gpu"] == {"way": "direct", "verify": "always"}
    assert not memory.tiers.disk("far").keys()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(method=Method.READ, effect=Effect.FLIP), "corrupt"),
        (Fault(method=Method.WRITE, effect=Effect.TIER_ERROR), "were not stored"),
    ],
)
def test_blocks_that_do_not_come_through_are_no_figures(
    cli: Cli, memory: MemoryRig, fault: Fault, said: str
) -> None:
    memory.tiers.disk("far").faults.inject(fault)
    ran = cli("bench", memory.config, *SMALL, "--json", "-")
    assert ran.code == 1
    host, far = ran.json["tiers"]
    assert len(host["sizes"]) == 1
    assert far["sizes"] == []
    assert said in far["problem"]


# The parts


def test_figures() -> None:
    limit = Move("limit", "memcpy")
    hop = Move("hop", "a->b", "store", limit="memcpy")
    samples = {
        hop: [Sample(4.0, 2.0), Sample(2.0, 4.0), Sample(8.0, None)],
        limit: [Sample(1.0, None), Sample(2.0, None), Sample(3.0, None)],
    }
    first, second = figures_of(samples, 2 * GIB)
    assert (first.move, first.median_gib_per_second, first.best_gib_per_second) == (limit, 1.0, 2.0)
    assert (first.of_limit, first.processor_seconds_per_gib) == (None, None)
    assert (second.median_gib_per_second, second.best_gib_per_second) == (0.5, 1.0)
    assert (second.of_limit, second.processor_seconds_per_gib) == (0.5, 1.5)


@pytest.mark.parametrize("by_fio", [False, True])
def test_the_disk_itself(tmp_path: Path, *, by_fio: bool) -> None:
    if by_fio and not FIO:
        pytest.skip("fio, which no Python package brings, is not installed")
    memory = limits.Memory(4 * MIB, 2)
    raw = limits.RawFile(tmp_path / "raw", memory, 4 * MIB, 64 * KIB, call=256 * KIB, depth=4)
    memory.areas[0][:] = os.urandom(4 * MIB)
    for write in (True, False):
        assert raw.run(60.0, write=write, by_fio=by_fio).seconds > 0
    assert raw.has_fio == FIO
    assert raw.how == "4 calls at once of 256 KiB, direct"
    if not by_fio:
        assert memory.areas[1] == memory.areas[0] == (tmp_path / "raw").read_bytes()
    raw.close()
    memory.close()


def test_a_disk_without_fio(
    cli: Cli, disks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    tier = tiers_of(cli("bench", disks, *SMALL, "--tier", "ssd", "--json", "-"))["ssd"]
    found = [name for name, *_ in moves(tier["sizes"][0])]
    assert "disk read" in found
    assert "fio read" not in found
    assert tier["written_bytes"] == 3 * STORE_BYTES


def test_memory_is_copied_whole() -> None:
    memory = limits.Memory(MIB + 4096, 3)
    memory.areas[0][:] = os.urandom(MIB + 4096)
    memory.copy(60.0)
    assert memory.areas[0] == memory.areas[1]
    memory.close()


def test_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(2 * MIB))
    (tmp_path / "lock").write_bytes(bytes(4096))  # left alone
    assert resident_bytes([tmp_path]) == 2 * MIB
    drop_from_cache([tmp_path])
    assert resident_bytes([tmp_path]) == 0
    read_in([tmp_path])
    assert resident_bytes([tmp_path]) == 2 * MIB


def test_a_plot(cli: Cli, disks: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ran = cli(
        "bench",
        disks,
        *SMALL,
        "--block-size",
        "256KiB",
        "--tier",
        "pins",
        "--plot",
        tmp_path / "p.svg",
    )
    assert ran.code == 0, ran.err
    text = (tmp_path / "p.svg").read_text()
    assert text.startswith("<?xml")
    for said in ("pins (lmdb): load, from the page cache", "block size", "GiB/s", "limit: memcpy"):
        assert f"<!-- {said} -->" in text


def test_directories_of_all_backends_can_be_moved(tmp_path: Path) -> None:
    need = Need(4 * MIB, MIB, 0)
    for settings in (
        NvmeSettings(name="t", path=tmp_path / "a"),
        LmdbSettings(name="t", path=tmp_path / "b"),
    ):
        with workplace(settings, need) as work:
            assert work.own
            assert work.settings.capacity == 4 * MIB
